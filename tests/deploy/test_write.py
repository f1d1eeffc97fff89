"""``fedssl deploy init``: the files that it writes, and the recipes that it refuses."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from helpers import refused
from PIL import Image

pytest.importorskip("flwr")
from fedssl import config as configuration
from fedssl.deploy.recipe import adapt_recipe
from fedssl.deploy.server import claim_folder, serve
from fedssl.deploy.site import build_site_experiment
from fedssl.deploy.write import write_app
from fedssl.runs import loop, sweep

WORDS = ["engine.sites=3", "cohort.size=null", "rounds=7"]


@pytest.mark.parametrize("name", ["app", "my app", "ap😀", "größe", 'a"b'])
def test_the_app_is_complete(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    write_app(folder, "default", WORDS)
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
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["license"] == {"file": "LICENSE"}
    app = project["tool"]["flwr"]["app"]
    assert app["config"] == {"out": str(folder / "run"), "resume": False}
    # Checkpoints and metrics are not sent to the sites.
    assert app["fab-include"] == ["LICENSE", "fedssl_app/*.py", "fedssl_app/recipe.yaml"]
    for side in ("client", "server"):
        module, _, member = app["components"][f"{side}app"].partition(":")
        text = (folder / (module.replace(".", "/") + ".py")).read_text()
        compile(text, module, "exec")
        assert member == "app" and f"import {side}_app\n" in text


def test_the_recipe_is_the_whole_run(tmp_path: Path) -> None:
    write_app(tmp_path, "default", WORDS)
    tree = yaml.safe_load((tmp_path / "fedssl_app" / "recipe.yaml").read_text())
    config = configuration.build(tree)
    assert configuration.to_tree(config) == tree
    assert (config.engine.name, config.engine.sites, config.rounds) == ("flower", 3, 7)
    assert (config.data.name, config.data.root, config.data.size) == ("folder", None, 64)
    assert config.partition.name == "folder"
    assert config.evaluate.baselines == () and config.cohort.size is None


def test_paths_are_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("{extends: folder, data: {root: /all, levels: [client, class]}}")
    assert adapt_recipe("mine.yaml", WORDS).data.root is None
    data = adapt_recipe("mine.yaml", [*WORDS, "data.root=photos", "data.cache=cache"]).data
    assert (data.root, data.cache) == (f"{tmp_path}/photos", f"{tmp_path}/cache")
    assert data.levels == ("class",)


@pytest.mark.parametrize(
    ("recipe", "key", "default"),
    [
        ("fedema/table12/fedbyol/5-clients-50pct", "partition.fraction=0.5", 1.0),
        ("dcco/derm-64", "partition.level=case", "client"),
        ("own.yaml", "engine.workers=4", 2),
        ("split.yaml", "partition.seed=3", None),
    ],
)
def test_keys_for_simulations_are_left_out_with_a_line(
    recipe: str,
    key: str,
    default: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("engine: {name: flower, workers: 4, timeout: 90}\n")
    Path("split.yaml").write_text("partition: {name: iid, seed: 3}\n")
    config = adapt_recipe(recipe, WORDS)
    section, _, name = key.partition("=")[0].partition(".")
    assert getattr(getattr(config, section), name) == default
    assert recipe != "own.yaml" or config.engine.timeout == 90
    shown = capsys.readouterr().err
    assert shown.startswith(f"fedssl: {recipe}: {key} is left out: ") and shown.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["rounds=2"], "engine.sites", None),
        ([*WORDS, "cohort.minimum=4"], "cohort.minimum", 4),
        ([*WORDS, "data.name=digits"], "data.name", "digits"),
        ([*WORDS, "partition.name=iid"], "partition.name", "iid"),
        ([*WORDS, "engine.name=local"], "engine.name", "local"),
        ([*WORDS, "algorithm.name=centralized"], "algorithm.name", "centralized"),
        ([*WORDS, "algorithm.name=standalone"], "algorithm.name", "standalone"),
        ([*WORDS, "algorithm.norm_policy=local"], "algorithm.norm_policy", "local"),
        ([*WORDS, "evaluate.protocols=per-client"], "evaluate.protocols", "per-client"),
        ([*WORDS, "evaluate.drift=true"], "evaluate.drift", True),
        (
            [*WORDS, "evaluate.every=1", "evaluate.monitor=collaborative@10%"],
            "evaluate.monitor",
            "collaborative@10%",
        ),
        ([*WORDS, "encoder.name=tiny", "encoder.groups=7"], "encoder.groups", 7),
        ([*WORDS, "encoder.init=/none"], "encoder.init", "/none"),
        ([*WORDS, "algorithm.name=fedca", "objective.name=simclr"], "algorithm.public", None),
    ],
)
def test_refusals(tmp_path: Path, words: list[str], key: str, value: object) -> None:
    folder = tmp_path / "app"
    with refused(key, ... if value is None else value):
        write_app(folder, "default", words)
    assert not folder.exists()


def test_names_that_are_wrong(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for folder, recipe, key, says in (
        ("app", "engine.sites=3", None, "engine.sites=3: expected the name of a recipe"),
        ("app", "defalt", "recipe", "did you mean default"),
        ("", "default", None, "exists and is not an empty folder"),
        ("mine", "default", None, "exists and is not an empty folder"),
        ("mine/app", "default", None, "cannot be written (Not a directory)"),
    ):
        with refused(key, says=says):
            write_app(tmp_path / folder, recipe, WORDS)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_the_servers_images_are_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, "evaluate.protocols=knn"]
    write_app(tmp_path / "app", "default", [*words, f"data.root={tmp_path / 'no'}"])
    assert f"data.root={tmp_path / 'no'}: no such folder here" in capsys.readouterr().err
    images = tmp_path / "images"
    images.mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (16, 16)).save(images / name)
    with refused("evaluate.protocols", says="knn"):
        write_app(tmp_path / "other", "default", [*words, f"data.root={images}"])
    assert not (tmp_path / "other").exists()


def test_real_sites_are_not_simulated(tmp_path: Path) -> None:
    settings = adapt_recipe("default", WORDS)
    tree = configuration.to_tree(settings) | {"seed": [0, 1]}
    for start in (
        lambda: loop.run(settings, tmp_path / "run"),
        lambda: sweep.sweep(tree, tmp_path / "run", False),
    ):
        with refused("engine.sites", 3):
            start()
    assert not (tmp_path / "run").exists()


def test_one_server_at_a_time_in_a_runs_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with refused("resume", says="holds no run"):
        serve(cast("Any", None), adapt_recipe("default", WORDS), out, True)
    with claim_folder(out, False):
        (out / "config.yaml").touch()
        with refused("out", says="a run is at work there"), claim_folder(out, True):
            pass
        with refused("out", out), claim_folder(out, False):
            pass
    with claim_folder(out, True):
        pass


def test_a_sites_mistakes_are_told_by_the_name_that_it_knows(tmp_path: Path) -> None:
    config = adapt_recipe("default", WORDS)
    for data in ("", str(tmp_path / "no"), str(tmp_path)):
        with refused("node-config data"):
            build_site_experiment(config, data)


def test_weights_to_start_from_are_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    init, app = "encoder.init=encoder.safetensors", tmp_path / "app"
    Path("encoder.safetensors").touch()
    for word in ("algorithm.name=ditto", "algorithm.norm_policy=reset"):
        with refused("encoder.init", says=word):
            write_app(app, "default", [*WORDS, "algorithm.local_epochs=1", init, word])
    part = [*WORDS, "encoder.train=last:1", init]
    write_app(tmp_path / "part", "default", part)  # each site has a copy
    for page in ("SITES.md", "SERVER.md"):
        assert "file of weights" in " ".join((tmp_path / "part" / page).read_text().split())
    assert 'weights="/home' in (tmp_path / "part" / "SITES.md").read_text()
    write_app(app, "default", [*WORDS, init])
    assert "file of weights" not in (app / "SITES.md").read_text()
    tree = yaml.safe_load((app / "fedssl_app" / "recipe.yaml").read_text())
    assert tree["encoder"]["init"] == str(tmp_path / "encoder.safetensors")
