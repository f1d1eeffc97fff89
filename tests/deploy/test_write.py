"""What ``fedssl deploy init`` writes, and what it refuses."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from PIL import Image

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, RecordDict

from fedssl import __version__
from fedssl import config as configuration
from fedssl.deploy import instructions, server, transport
from fedssl.deploy.introduction import Introduction
from fedssl.deploy.recipe import adapt_recipe
from fedssl.deploy.site import build_site_experiment
from fedssl.deploy.write import write_app
from fedssl.engines.flower import transport as grid_transport
from fedssl.engines.flower.messages import GREETING
from fedssl.federation.algorithm import build_algorithm
from fedssl.privacy.aggregators import build_aggregator
from fedssl.privacy.exchanges import describe_protection, list_exchanges
from fedssl.runs import loop, sweep
from fedssl.util.errors import UserError

WORDS = ["engine.sites=3", "cohort.size=null", "rounds=7"]


def test_the_app_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "app"
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
    write_app(tmp_path, "default", WORDS)
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
    assert adapt_recipe(str(mine), WORDS).data.root is None
    config = adapt_recipe(str(mine), [*WORDS, "data.root=judge"])
    assert config.data.root == str(Path.cwd() / "judge")
    assert config.data.levels == ("class",)


def test_what_leaves_a_site_is_what_the_algorithm_declares() -> None:
    plain = list_exchanges(adapt_recipe("default", WORDS))
    for task in ("locate", "encode", "descend"):
        assert f"- `{task}`" in plain
    assert "Means of the client's encodings and of their products" in plain
    assert "could see each site's own" in plain
    secure = list_exchanges(adapt_recipe("default", [*WORDS, "privacy.secure=true"]))
    assert "learns only the sum" in secure and "could see" not in secure
    assert "public keys" in secure and "public keys" not in plain
    bounded = list_exchanges(adapt_recipe("default", [*WORDS, "objective.bound=1"]))
    assert "`locate`" in plain and "`locate`" not in secure + bounded
    words = [*WORDS, "privacy.noise=1", "privacy.clip=3", "objective.bound=1"]
    noisy = list_exchanges(adapt_recipe("default", words)).splitlines()
    encode, descend = (
        next(line for line in noisy if f"`{t}`" in line) for t in ("encode", "descend")
    )
    assert "clipped at the site to norm 2.24" in encode  # √(2B² + 3B⁴)
    assert "clipped at the site to norm 3," in descend


def test_what_goes_beside_a_reply_is_listed_too() -> None:
    plain = list_exchanges(adapt_recipe("default", WORDS))
    assert "its weight in the mean" in plain and "the loss" in plain and "random number" in plain
    words = [*WORDS, "privacy.noise=1", "objective.bound=1"]
    noisy = list_exchanges(adapt_recipe("default", words))
    assert "its weight in the mean" in noisy and "loss" not in noisy  # which stays at the site
    assert "the classes' names" not in plain
    words = [*WORDS, "algorithm.name=fedavg", "objective.name=supervised"]
    assert "the classes' names" in list_exchanges(adapt_recipe("default", words))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("algorithm.name=dcco", "Secure sums are off (`privacy.secure=true` turns them on)"),
        ("algorithm.name=featarc", "Secure sums are off (and not possible with these settings)"),
        ("engine.name=flower engine.sites=2", "Secure sums are off (and not possible"),
        ("engine.name=flower engine.max_norm=1", "Secure sums are off (and not possible"),
        ("cohort.average=median", "server has to look at what each"),
        ("algorithm.name=gossip", "sees each site's own reply to train"),
        ("algorithm.name=ccl objective.name=moco", "one\nrow for an image"),
        (
            "algorithm.name=ccl objective.name=moco",
            "keeps the last of each site, also in the run's",
        ),
        (
            "algorithm.name=ccl objective.name=moco algorithm.remote=off algorithm.lambda=0",
            "Secure sums are off",
        ),
    ],
)
def test_what_is_not_protected_is_said(words: str, said: str) -> None:
    settings = configuration.resolve(configuration.read_recipe("folder"), words.split())
    assert said in describe_protection(settings)


def test_what_is_possible_is_not_what_is_installed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = adapt_recipe("default", WORDS)
    assert "`privacy.secure=true` turns them on" in describe_protection(config)
    secure = adapt_recipe("default", [*WORDS, "privacy.secure=true"])
    with pytest.raises(UserError, match="cryptography and pycryptodome are not installed"):
        build_aggregator(secure, build_algorithm(secure), 3, 3)


def test_instructions_have_the_commands(tmp_path: Path) -> None:
    write_app(tmp_path, "default", WORDS)
    sites, server = (tmp_path / name for name in ("SITES.md", "SERVER.md"))
    assert "--node-config 'data=\"/srv/images\"'" in sites.read_text()
    text = server.read_text()
    assert f"flwr run {tmp_path} fedssl --stream --run-config 'resume=true'" in text
    assert "--enable-supernode-auth" in text and "--database" in text
    # The table of `flwr list` is cut off in a terminal of 80 columns.
    assert "flwr list --format json fedssl" in text and '"status": "finished:completed"' in text


@pytest.mark.parametrize(
    ("recipe", "key", "plain"),
    [
        ("fedema/table12/fedbyol/5-clients-50pct", "fraction=0.5", 1.0),
        ("dcco/derm-64", "level=case", "client"),
    ],
)
def test_what_a_recipe_does_to_the_clients_images_is_left_out_and_said(
    recipe: str, key: str, plain: object, capsys: pytest.CaptureFixture[str]
) -> None:
    config = adapt_recipe(recipe, WORDS)
    assert getattr(config.partition, key.partition("=")[0]) == plain
    said = f"fedssl: {recipe}: partition.{key} is left out: sites have their own data, which"
    shown = capsys.readouterr().err
    assert shown.startswith(said) and shown.count("\n") == 1


def test_what_a_recipe_has_for_simulations_is_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text("engine: {name: flower, workers: 4, timeout: 90}\n")
    config = adapt_recipe(str(recipe), WORDS)
    assert config.engine.workers == 2 and config.engine.timeout == 90
    said = f"fedssl: {recipe}: engine.workers=4 is left out: it is for simulations\n"
    assert capsys.readouterr().err == said


def test_a_site_is_told_of_damaged_images() -> None:
    fails = instructions.sites(adapt_recipe("default", WORDS), "default")
    assert "One damaged image keeps this site, and so the run, from starting" in fails
    assert "`fedssl: refused: data.corrupt=fail" in fails and "with `data.corrupt=skip`" in fails
    skips = instructions.sites(adapt_recipe("default", [*WORDS, "data.corrupt=skip"]), "default")
    assert "Damaged images are left out" in skips and "keeps this site" not in skips


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rounds=2"], "engine.sites: say how many sites take part, as in engine.sites=3"),
        (["engine.site=3"], "engine.site: unknown key (did you mean engine.sites?)"),
        (["engine.sites=0"], "engine.sites=0:"),
        (["engine.sites=3"], "cohort.size=32: more than engine.sites=3; add cohort.size=3"),
        ([*WORDS, "cohort.minimum=4"], "cohort.minimum=4: "),
        ([*WORDS, "data.name=digits"], "data.name=digits: each site is one client"),
        ([*WORDS, "partition.name=iid"], "partition.name=iid: each site is one client"),
        ([*WORDS, "engine.name=local"], "engine.name=local: a deployment runs on Flower"),
        ([*WORDS, "algorithm.name=centralized"], "algorithm.name=centralized: has all data"),
        (
            [*WORDS, "privacy.secure=true", "cohort.average=median"],
            "cohort.average=median with privacy.secure=true",
        ),
        ([*WORDS, "algorithm.name=dccoo"], "did you mean"),
        (
            [*WORDS, "evaluate.every=1", "evaluate.monitor=collaborative@10%"],
            "evaluate.monitor=collaborative@10%: the server has no client's images; leave it out",
        ),
        ([*WORDS, "evaluate.drift=true"], "evaluate.drift=true: compares clients' models"),
        ([*WORDS, "encoder.name=tiny", "encoder.groups=7"], "encoder.groups=7"),
    ],
)
def test_refusals_in_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    folder = tmp_path / "app"
    with pytest.raises(UserError) as caught:
        write_app(folder, "default", words)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert not folder.exists()


def test_the_servers_images_are_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, "evaluate.protocols=knn"]
    write_app(tmp_path / "app", "default", [*words, f"data.root={tmp_path / 'no'}"])
    said = f"data.root={tmp_path / 'no'}: no such folder here; the server needs it"
    assert capsys.readouterr().err == f"fedssl: {said}\n"
    images = tmp_path / "images"
    images.mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (16, 16)).save(images / name)
    with pytest.raises(UserError, match=r"evaluate.protocols=knn: .*label"):
        write_app(tmp_path / "other", "default", [*words, f"data.root={images}"])
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["ap😀", "größe", 'a"b'])
def test_what_flower_reads_is_toml_whatever_the_folders_name(name: str, tmp_path: Path) -> None:
    write_app(tmp_path / name, "default", WORDS)
    project = tomllib.loads((tmp_path / name / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["flwr"]["app"]["config"]["out"] == str(tmp_path / name / "run")


def test_real_sites_are_not_simulated(tmp_path: Path) -> None:
    settings = adapt_recipe("default", WORDS)
    with pytest.raises(UserError, match=r"engine.sites=3: sites are elsewhere; write an app"):
        loop.run(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    tree = configuration.to_tree(settings) | {"seed": [0, 1]}
    with pytest.raises(UserError, match="sites are elsewhere"):
        sweep.sweep(tree, tmp_path / "sweep", False)
    assert not (tmp_path / "sweep").exists()


def test_paths_of_the_app_are_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = adapt_recipe("default", [*WORDS, "data.root=photos", "data.cache=cache"]).data
    assert (data.root, data.cache) == (f"{tmp_path}/photos", f"{tmp_path}/cache")


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for folder in (tmp_path, tmp_path / "mine"):
        with pytest.raises(UserError, match="exists and is not an empty folder; name a new one"):
            write_app(folder, "default", WORDS)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_a_recipe_that_was_forgotten(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"engine.sites=3: expected a recipe's name before it"):
        write_app(tmp_path / "app", "engine.sites=3", [])


def test_a_folder_with_a_space_can_be_pasted(tmp_path: Path) -> None:
    write_app(tmp_path / "my app", "default", WORDS)
    text = (tmp_path / "my app/SERVER.md").read_text()
    assert text.count(f"flwr run '{tmp_path}/my app' fedssl") == 2


def test_an_unknown_recipe(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"recipe defalt: no such recipe .*did you mean default"):
        write_app(tmp_path / "app", "defalt", WORDS)


class Nodes(transport.SiteTransport):
    """Sites that answer as told, without Flower."""

    def __init__(self, answers: Mapping[int, Introduction | str]) -> None:
        super().__init__(cast("Any", self))
        self.answers = answers
        self.asked: list[int] = []

    def get_node_ids(self) -> list[int]:
        return list(self.answers)

    def _greet(self, nodes: set[int], timeout: float) -> dict[int, Any]:
        self.asked += sorted(nodes)
        return {
            node: RecordDict(
                {
                    GREETING: ConfigRecord(
                        {"version": __version__}
                        | ({"fault": said} if isinstance(said, str) else {"facts": told(said)})
                    )
                }
            )
            for node, said in self.answers.items()
            if node in nodes and said != "silent"
        }


def told(site: Introduction) -> str:
    return json.dumps(asdict(site))


A = Introduction("a", "here", 8, (1,), 16, 16)
B = Introduction("b", "there", 8, (1,), 16, 16)


def test_a_site_that_cannot_take_part_is_named_once_and_left_alone_for_a_while(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mail = Nodes({1: A, 2: "refused: no such folder", 3: "silent"})
    mail.sites = [A, B]
    for _ in range(3):
        assert mail.place([0, 1]) == {0: 1}
    assert mail.asked == [1, 2, 3]
    assert capsys.readouterr().err == (
        "fedssl: node 2 cannot take part: refused: no such folder\n"
        "fedssl: node 3 cannot take part: no answer\n"
    )
    # Mended, and started again as another node: it is the same site.
    mail.answers = {1: A, 4: B}
    assert mail.place([0, 1]) == {0: 1, 1: 4}
    mail.answers = {1: A, 4: B, 2: "refused: no such folder"}
    monkeypatch.setattr(transport, "RETRY_AFTER", 0.0)
    mail.place([0])
    assert mail.asked == [1, 2, 3, 4, 2] and not capsys.readouterr().err


def test_a_site_that_is_not_needed_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    mail = Nodes({1: B, 2: A})
    mail.sites = mail.wait(1, 0.1)
    grown = Introduction("a", "here", 9, (1,), 16, 16)
    for _ in range(2):
        assert mail.place([0]) == {0: 2}
        mail.connected[2] = grown  # the same site, with an image more
    said = "fedssl: site there has nothing to do: the run has its 1 sites\n"
    assert capsys.readouterr().err == said


def test_a_site_with_a_new_state_is_said_to_be_another(capsys: pytest.CaptureFixture[str]) -> None:
    mail = Nodes({1: A, 2: replace(B, site="new"), 3: Introduction("c", "far", 8, (1,), 16, 16)})
    mail.sites = [A, B]
    for _ in range(2):
        assert mail.place([0, 1]) == {0: 1}
    there, far = capsys.readouterr().err.splitlines()
    assert there == (
        "fedssl: site there has nothing to do: the run has its 2 sites, and their there is another;"
        " if it is the same, its FEDSSL_STATE is new or its folder was moved: bring that back, or"
        " start a new run"
    )
    assert far == "fedssl: site far has nothing to do: the run has its 2 sites"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("engine.sites=3", "3 of a round's 3 sites"),
        ("engine.sites=4", "3 of a round's 4 sites"),
        ("engine.sites=9", "7 of a round's 9 sites"),
        ("engine.sites=9 cohort.size=5", "4 of a round's 5 sites"),
    ],
)
def test_how_many_a_secure_sum_needs_is_a_number(words: str, said: str) -> None:
    config = adapt_recipe("default", ["cohort.size=null", "privacy.secure=true", *words.split()])
    assert f"if at least {said} answer." in describe_protection(config)


def test_too_few_sites_end_the_wait() -> None:
    assert Nodes({1: B, 2: A}).wait(2, 0.1) == [A, B]
    with pytest.raises(UserError, match=r"1 of 2 sites came within .*0\.1 seconds \(here\); start"):
        Nodes({1: A}).wait(2, 0.1)
    with pytest.raises(UserError, match=r"1 of 2 .*\(here\); 1 cannot take part, .*; mend"):
        Nodes({1: A, 2: "refused: x"}).wait(2, 0.1)
    with pytest.raises(UserError, match=r"1 of 3 .*\(here\); start the others"):
        Nodes({1: A, 2: "refused: x"}).wait(3, 0.1)
    with pytest.raises(UserError, match="1 more with the same folder on the same machine"):
        Nodes({1: A, 2: A}).wait(2, 0.1)


def test_one_server_at_a_time_in_a_runs_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(UserError, match=r"resume=true: .* holds no run; leave it out"):
        server.serve(cast("Any", None), adapt_recipe("default", WORDS), out, True)
    with server.claim_folder(out, False):
        (out / "config.yaml").touch()
        with (
            pytest.raises(UserError, match="a run is at work there"),
            server.claim_folder(out, True),
        ):
            pass
        with (
            pytest.raises(UserError, match="holds a run; continue"),
            server.claim_folder(out, False),
        ):
            pass
    with server.claim_folder(out, True):
        pass


def test_a_sites_mistakes_are_told_by_the_name_that_it_knows(tmp_path: Path) -> None:
    config = adapt_recipe("default", WORDS)
    for data, text in (
        ("", "node-config data: not given"),
        (str(tmp_path / "no"), "node-config data=.*/no: no such folder"),
        (str(tmp_path), "node-config data=.*: no images"),
    ):
        with pytest.raises(UserError, match=text):
            build_site_experiment(config, data)


def test_weights_to_start_from_are_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    init, app = "encoder.init=encoder.safetensors", tmp_path / "app"
    with pytest.raises(UserError, match=f"encoder.init={tmp_path}/encoder.safetensors: no such"):
        write_app(app, "default", [*WORDS, init])
    Path("encoder.safetensors").touch()
    for word in ("algorithm.name=ditto", "algorithm.norm_policy=reset"):
        with pytest.raises(UserError, match=f"with {word}: sites start from the same weights"):
            write_app(app, "default", [*WORDS, "algorithm.local_epochs=1", init, word])
    write_app(app, "default", [*WORDS, init])
    tree = yaml.safe_load((app / "fedssl_app" / "recipe.yaml").read_text())
    assert tree["encoder"]["init"] == str(tmp_path / "encoder.safetensors")


def test_a_superlink_that_fails_once_does_not_end_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def locked(what: list[Any]) -> list[Any]:
        raise RuntimeError("500 Internal Server Error\nmore")

    assert grid_transport._try(locked, [1]) == []
    assert capsys.readouterr().err == "fedssl: the SuperLink failed: 500 Internal Server Error\n"
    assert grid_transport._try(lambda what: iter(what), [1]) == [1]
