"""The recipe `sites`: settings that suit the number of sites and of their images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from helpers import refused
from image_folders import gradient, save

import fedssl
from fedssl import config
from fedssl.cli import main
from fedssl.config import Config, Recipe
from fedssl.deploy.write import write_app
from fedssl.federation.algorithm import build_algorithm
from fedssl.models import published
from fedssl.privacy.leakage import find_leaks
from fedssl.runs import fit

XRAYS = (74, 167, 44, 68, 56, 20, 21)  # ../shared/data/xray-sites.tar
SECURE = {"privacy": {"secure": True}}
TABLE = {
    # sizes: algorithm, images in a step, width of encodings (DCCO), secure sums
    (5000, 3000, 1000): ("fedema", 64, None, False),
    (1000,) * 32: ("fedema", 64, None, False),
    (1000,) * 33: ("dcco", 64, 120, False),
    (1000, 999): ("dcco", 64, 120, False),
    XRAYS: ("dcco", 20, 32, False),
    (19,) * 3: ("dcco", 19, 32, False),
    (18,) * 3: ("dcco", 18, 96, True),
    (4,) * 500: ("dcco", 4, 336, True),
    (1,) * 100: ("dcco", 1, 80, True),
    (18,) * 2: ("fedema", 18, None, False),
    (5,) * 3: ("fedema", 5, None, False),
}


@pytest.fixture(autouse=True)
def without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights on this machine, and no network."""
    monkeypatch.setattr(fit, "find_backbone", lambda names: (None, "none are here"))


def make_sites(root: Path, *sizes: int) -> Path:
    for site, count in enumerate(sizes):
        for k in range(count):
            save(root / f"site-{site}" / "2024" / f"{k}.png", gradient(20 + k, 16))
    return root


def resolve(root: Path, *words: str) -> Config:
    given = [f"data.root={root}", *words]
    return config.resolve(fit.fit_recipe(config.read_recipe("sites"), given), given)


@pytest.mark.parametrize("sizes", TABLE)
def test_the_table(sizes: tuple[int, ...]) -> None:
    chosen = fit.choose_settings(sizes, has_weights=False).settings
    name, batch, width, is_secure = TABLE[sizes]
    assert chosen["algorithm"] == {"name": name, "batch": batch}
    assert chosen.get("objective", {}).get("projector", [None])[-1] == width
    assert chosen.get("privacy") == ({"secure": True} if is_secure else None)
    assert (chosen["engine"].get("name") == "flower") == is_secure
    assert chosen.get("cohort") == ({"size": 64} if len(sizes) > 64 else None)


@pytest.mark.parametrize("sizes", [*TABLE, (2, 900), (1, 1), (30, 1000, 7, 19, 64)])
def test_no_choice_lets_the_server_recover_single_images(sizes: tuple[int, ...]) -> None:
    settings = config.resolve({"fit": fit.choose_settings(sizes, has_weights=True).settings})
    leaks = find_leaks(settings, build_algorithm(settings), sizes)
    if min(sizes) > 1 or "privacy" in fit.choose_settings(sizes, has_weights=True).settings:
        assert not leaks
    else:  # a change that one image made: no setting of ours prevents it with two sites
        assert [risk.reveals for risk, _ in leaks] == ["image"]


def test_small_steps_from_given_weights() -> None:
    for sizes, section in (((5000,) * 3, "client"), (XRAYS, "server")):
        first, second = (fit.choose_settings(sizes, given).settings for given in (True, False))
        assert first[section]["lr"] < second[section]["lr"]


def test_an_algorithm_of_the_user_keeps_its_batch() -> None:
    chosen = fit.choose_settings(XRAYS, False, "fedema")
    assert chosen.settings["algorithm"] == {"name": "fedema", "batch": 20}
    assert "your choice" in chosen.reason
    unprotected = fit.choose_settings((5, 5), False, "dcco").settings
    assert unprotected["algorithm"]["name"] == "dcco" and "privacy" not in unprotected


def test_the_recipe_needs_a_folder_of_folders_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = resolve(make_sites(tmp_path / "sites", 4, 21, 20))
    assert (found.algorithm.name, found.algorithm.batch) == ("fedema", 4)
    assert found.partition.name == "folder" and found.data.levels == ("client",)
    assert (found.encoder.name, found.encoder.pretrained) == ("resnet18", False)
    assert (found.augment.size, found.data.size, found.data.shape) == (64, 73, "whole")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("3 sites (site-0, site-1, site-2) with 4 to 21 images: fedema (")
    assert second == "The encoder is a resnet18 with random weights: none are here."


def test_words_win_and_explain_says_where_values_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_sites(tmp_path / "sites", 20, 21, 22)
    words = ["encoder.name=tiny", "algorithm.batch=7", "server.lr=0.5"]
    found = resolve(root, *words)
    assert (found.encoder.name, found.encoder.groups) == ("tiny", 8)
    assert (found.algorithm.batch, found.server.lr) == (7, 0.5)
    assert "random weights" not in capsys.readouterr().err  # the encoder was not chosen here
    assert main(["run", "sites", f"data.root={root}", *words, "--explain"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert rows["algorithm.batch"].endswith("word")
    assert rows["objective.projector"].split()[1] == "[512,512,32]"
    assert rows["objective.projector"].endswith("your sites")


def test_weights_that_are_here_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm")
    monkeypatch.setattr(fit, "find_backbone", lambda names: ("timm/resnet18", ""))
    found = resolve(make_sites(tmp_path / "sites", 20, 21, 22))
    assert (found.encoder.name, found.encoder.pretrained) == ("timm/resnet18", True)
    assert (found.encoder.norm, found.augment.size, found.data.size) == ("frozen", 224, 256)
    assert found.server.lr == fit.RATES[True] and found.data.interpolation == "bicubic"
    small = resolve(tmp_path / "sites", "augment.size=96")
    assert (small.augment.size, small.data.size) == (96, 110)


def test_the_first_backbone_that_can_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("timm")
    here: list[str] = ["resnet50"]
    monkeypatch.setattr(
        published, "_find_cached", lambda known: tmp_path if known.architecture in here else None
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert published.find_backbone(fit.BACKBONES) == ("timm/resnet50", "")
    here.append("resnet18")
    assert published.find_backbone(fit.BACKBONES) == ("timm/resnet18", "")
    here.clear()
    name, reason = published.find_backbone(fit.BACKBONES)
    assert name is None and "HF_HUB_OFFLINE is set" in reason
    monkeypatch.setattr(published, "_download", lambda name, known: tmp_path)
    assert published.find_backbone(fit.BACKBONES) == (fit.BACKBONES[0], "")


def test_folders_that_are_no_sites_are_refused(tmp_path: Path) -> None:
    with refused("data.root", says="not given"):
        fit.fit_recipe(config.read_recipe("sites"), [])
    (tmp_path / "empty").mkdir()
    with refused("data.root", says="there are no images"):
        fit.count_images(str(tmp_path / "empty"))
    save(make_sites(tmp_path / "mixed", 2) / "loose.png", gradient(9, 9))
    with refused("data.root", says="1 images are in no site's folder"):
        fit.count_images(str(tmp_path / "mixed"))
    assert fit.count_images(str(make_sites(tmp_path / "split" / "train", 3, 2).parent)) == {
        "site-0": 3,
        "site-1": 2,
    }


def test_a_run_from_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_sites(tmp_path / "sites", 20, 21, 22)
    small = {"encoder__name": "tiny", "augment__size": 16, "rounds": 2, "engine__threads": 1}
    run = fedssl.train("sites", tmp_path / "run", data__root=str(root), **small)
    assert "Privacy" not in capsys.readouterr().err
    assert run.settings.algorithm.batch == 20 and "fit" not in read(tmp_path / "run/config.yaml")
    assert run.summary["views_matched"] > 0  # without labels


def read(path: Path) -> Recipe:
    return yaml.safe_load(path.read_text())


def keys_of(tree: Recipe, names: Sequence[str]) -> dict[str, object]:
    flat = config.flatten(tree)
    return {name: flat[name] for name in names}


def test_an_app_for_real_sites_has_the_settings_of_the_trial(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    root = make_sites(tmp_path / "sites", 20, 21, 22)
    words = [f"data.root={root}", "encoder.name=tiny", "rounds=3"]
    write_app(tmp_path / "app", "sites", words)
    shipped = read(tmp_path / "app" / "fedssl_app" / "recipe.yaml")
    names = ("algorithm.name", "algorithm.batch", "objective.projector", "augment.size")
    assert keys_of(shipped, names) == keys_of(config.to_tree(resolve(root, *words)), names)
    assert shipped["engine"]["sites"] == 3 and shipped["data"]["root"] is None
    more = tmp_path / "more"
    write_app(more, "sites", [*words, "engine.sites=5"])
    assert read(more / "fedssl_app" / "recipe.yaml")["engine"]["sites"] == 5
