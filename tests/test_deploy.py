"""What ``fedssl deploy init`` writes, and what it refuses."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import yaml

from fedssl import config as configuration
from fedssl import deploy
from fedssl.errors import UserError

WORDS = ["engine.sites=3", "cohort.size=null", "rounds=7"]


def test_the_app_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "app"
    deploy.init(folder, "default", WORDS)
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == [
        "LICENSE",
        "SERVER.md",
        "SITES.md",
        "fedssl_app/__init__.py",
        "fedssl_app/client_app.py",
        "fedssl_app/recipe.yaml",
        "fedssl_app/server_app.py",
        "pyproject.toml",
    ]
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["license"] == {"file": "LICENSE"}
    app = project["tool"]["flwr"]["app"]
    assert app["config"] == {"out": str(folder / "run"), "resume": False}
    # Checkpoints and metrics are not sent to the sites.
    assert app["fab-include"] == ["LICENSE", "fedssl_app/*.py", "fedssl_app/recipe.yaml"]
    for side in ("client", "server"):
        module, _, name = app["components"][f"{side}app"].partition(":")
        text = (folder / (module.replace(".", "/") + ".py")).read_text()
        compile(text, module, "exec")
        assert name == "app" and f"import {side}_app\n" in text


def test_the_recipe_is_the_whole_run(tmp_path: Path) -> None:
    deploy.init(tmp_path, "default", WORDS)
    tree = yaml.safe_load((tmp_path / "fedssl_app" / "recipe.yaml").read_text())
    config = configuration.build(tree)
    assert configuration.to_tree(config) == tree
    assert (config.engine.name, config.engine.sites, config.rounds) == ("flower", 3, 7)
    assert (config.data.name, config.data.root, config.data.size) == ("folder", None, 16)
    assert config.partition.name == "folder"
    assert config.evaluate.baselines == () and config.cohort.size is None


def test_a_root_is_the_servers_and_client_folders_are_gone(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("{extends: folder, data: {root: /all, levels: [client, class]}}")
    assert deploy.settle(str(mine), WORDS).data.root is None
    config = deploy.settle(str(mine), [*WORDS, "data.root=judge"])
    assert config.data.root == str(Path.cwd() / "judge")
    assert config.data.levels == ("class",)


def test_what_leaves_a_site_is_what_the_algorithm_declares() -> None:
    plain = deploy.exchanges(deploy.settle("default", WORDS))
    for task in ("locate", "encode", "descend"):
        assert f"- `{task}`" in plain
    assert "encoding moments" in plain and "could see each site's own" in plain
    secure = deploy.exchanges(deploy.settle("default", [*WORDS, "privacy.secure=true"]))
    assert "learns only the sum" in secure and "could see" not in secure
    noisy = deploy.exchanges(deploy.settle("default", [*WORDS, "privacy.noise=1"]))
    assert "clipped at the site to norm 1" in noisy


def test_instructions_have_the_commands(tmp_path: Path) -> None:
    deploy.init(tmp_path, "default", WORDS)
    sites, server = (tmp_path / name for name in ("SITES.md", "SERVER.md"))
    assert "--node-config 'data=\"/srv/images\"'" in sites.read_text()
    text = server.read_text()
    assert f"flwr run {tmp_path} fedssl --stream --run-config 'resume=true'" in text
    assert "--enable-supernode-auth" in text and "--database" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rounds=2"], "engine.sites: say how many sites take part, as in engine.sites=3"),
        (["engine.sites=0"], "engine.sites=0: must be at least 1"),
        (["engine.sites=3"], "cohort.size=32: more than engine.sites=3; add cohort.size=3"),
        ([*WORDS, "cohort.minimum=4"], "cohort.minimum=4: more than the 3 clients"),
        ([*WORDS, "data.name=digits"], "data.name=digits: each site is one client"),
        ([*WORDS, "partition.name=iid"], "partition.name=iid: each site is one client"),
        ([*WORDS, "engine.name=local"], "engine.name=local: a deployment runs on Flower"),
        ([*WORDS, "algorithm.name=centralized"], "algorithm.name=centralized: has all data"),
        (
            [*WORDS, "privacy.secure=true", "cohort.average=median"],
            "cohort.average=median with privacy.secure=true",
        ),
        ([*WORDS, "algorithm.name=dccoo"], "did you mean"),
    ],
)
def test_refusals_in_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    folder = tmp_path / "app"
    with pytest.raises(UserError) as caught:
        deploy.init(folder, "default", words)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert not folder.exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for folder in (tmp_path, tmp_path / "mine"):
        with pytest.raises(UserError, match="exists and is not an empty folder; name a new one"):
            deploy.init(folder, "default", WORDS)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_an_unknown_recipe(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"recipe defalt: no such recipe .*did you mean default"):
        deploy.init(tmp_path / "app", "defalt", WORDS)
