"""``fedssl evaluate``: on the run's own images, which must be what they were, and on others."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import edit_config, refused
from PIL import Image

from fedssl import config, load_encoder
from fedssl.cli import main
from fedssl.config import Data
from fedssl.data.load import load_dataset
from fedssl.evaluate.unlabeled import effective_rank
from fedssl.runs import loop
from fedssl.runs.reader import RunReader
from fedssl.runs.reevaluate import evaluate
from fedssl.util.errors import UserError

WORDS = [
    "data.name=folder", "data.levels=client,class", "data.size=8", "data.labels=22",
    "data.holdout=0.2", "partition.name=folder", "cohort.size=null", "encoder.norm=batch",
    "objective.name=byol", "objective.projector=16,8", "objective.predictor=12,8",
    "algorithm.name=ditto", "algorithm.local_epochs=1", "algorithm.batch=4", "rounds=1",
    "evaluate.protocols=[knn,heldout@20%]", "evaluate.every=1", "evaluate.monitor=knn",
    "evaluate.targets=50", "evaluate.baselines=[]", "engine.threads=1", "augment.name=flip",
]  # fmt: skip


def made(path: Path, number: int) -> None:
    """An image of noise, the darker the lower its number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 9 + number, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``photos`` of three sites and two classes, and the ``run`` of them."""
    root = tmp_path_factory.mktemp("trained")
    for k in range(36):
        site, label = ("east", "north", "south")[k % 3], k // 3 % 2
        made(root / f"photos/{'test' if k >= 24 else 'train'}/{site}/{label}/{k}.png", k)
    made(root / "photos/longer.png", 200)
    where = [f"data.root={root / 'photos'}", f"data.cache={root / 'cache'}"]
    loop.run(config.resolve(config.read_recipe(None), [*WORDS, *where]), root / "run")
    return root


FIX = "Put the images back as they were, or evaluate on other images with data.root."


@pytest.mark.parametrize(
    ("place", "other", "said"),
    [
        ("east", "west", r"east had \d images in .* and is not there now"),
        ("south/0/14.png", "../14.png", "the training images are not those of"),
        ("south/0/14.png", "south/0/0.png", "the training images are not those of"),
        ("../longer.png", "south/0/14.png", "the training images are not those of"),
    ],
)
def test_images_that_are_no_longer_the_runs(
    trained: Path, place: str, other: str, said: str
) -> None:
    photos, out = trained / "photos", trained / "run"
    kept = shutil.copytree(photos, trained / "kept")
    (photos / "train" / place).rename(photos / "train" / other)
    try:
        for words in ([], ["data.size=12"]):
            with pytest.raises(UserError, match=f"^data.root=.*: {said}.*\\. {re.escape(FIX)}$"):
                evaluate(out, words)
    finally:
        shutil.rmtree(photos)
        kept.rename(photos)
    for file in photos.rglob("*.png"):
        os.utime(file, (1, 1))  # put back, as a copy may have it
    assert evaluate(out, [])


@pytest.mark.parametrize("site", ["aachen", "zurich"])
def test_a_new_site_does_not_get_the_model_of_another(
    site: str, trained: Path, refusal: Callable[..., str]
) -> None:
    new, out = trained / "photos/train" / site, trained / "run"
    for k in range(4):
        made(new / f"{k % 2}/{k}.png", k)  # aachen would be client 0, whose model is that of east
    before = sorted(path.name for path in out.iterdir())
    try:
        line = refusal("evaluate", out)
        assert f"{site} was not in {out} and has" in line and line.endswith(FIX)
        assert sorted(path.name for path in out.iterdir()) == before
        # The fix that the line names works.
        assert evaluate(out, [f"data.root={trained / 'photos'}", "evaluate.protocols=knn"])
    finally:
        shutil.rmtree(new)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("evaluate.every=5", "is about training"),
        ("evaluate.baselines=fedavg", "is about training"),
        ("data.holdout=0.1", "is about training"),
        ("rounds=5", "only evaluate.*, data.* and device can change here"),
    ],
)
def test_keys_about_training_are_refused(
    key: str, said: str, trained: Path, refusal: Callable[..., str]
) -> None:
    assert refusal("evaluate", trained / "run", key).startswith(f"{key}: {said}")


def test_what_watched_the_rounds_need_not_suit_other_protocols(
    trained: Path, tmp_path: Path
) -> None:
    """Targets are of knn or linear, among those that were monitored."""
    out = shutil.copytree(trained / "run", tmp_path / "run")
    edit_config(out, "  monitor:\n  - knn\n", "  monitor: null\n")
    assert RunReader(out).settings.evaluate.monitor is None
    assert evaluate(out, ["evaluate.protocols=unlabeled"])


def test_more_neighbours_than_there_are_is_said(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for k, said in ((22, ""), (23, "evaluate.k=23: knn has only 22 labelled samples; all vote")):
        evaluate(trained / "run", ["evaluate.protocols=knn", f"evaluate.k={k}"])
        assert capsys.readouterr().err == (said and f"fedssl: evaluate: {said}\n")


def test_images_that_were_moved_are_the_runs_own(trained: Path, tmp_path: Path) -> None:
    photos = shutil.copytree(trained / "photos", tmp_path / "moved")
    words = [f"data.root={photos}", "evaluate.protocols=[knn,per-client]"]
    here, there = (evaluate(trained / "run", some) for some in (words[1:], words))
    assert here == there
    made(photos / "train/east/0/new.png", 1)
    with refused("evaluate.protocols", "per-client", "needs the run's own clients"):
        evaluate(trained / "run", words)


def test_other_test_images_are_said_and_not_gone_on_with(
    trained: Path, capsys: pytest.CaptureFixture[str], refusal: Callable[..., str]
) -> None:
    out, new = trained / "run", trained / "photos/test/east/1/new.png"
    before = (out / "summary.json").read_bytes()
    evaluate(out, [])
    assert "the test images are not those" not in capsys.readouterr().err
    made(new, 1)
    try:
        assert evaluate(out, [])
        assert "the test images are not those that the run had" in capsys.readouterr().err
        said = f"data.root={trained / 'photos'}: the test images are not those of {out}"
        assert refusal("run", "--resume", "--out", out).startswith(said)
        assert (out / "summary.json").read_bytes() == before
    finally:
        new.unlink()


def test_a_run_that_has_not_ended_is_judged_and_that_is_said(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    edit_config(tmp_path / "run", "rounds: 1", "rounds: 7")
    assert evaluate(tmp_path / "run", [])
    assert "evaluate: round 1 of 7: it has not ended" in capsys.readouterr().err


def test_a_sweep_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").touch()
    with refused(None, says="holds a sweep. Name one of its runs"):
        evaluate(tmp_path, [])


def test_a_run_that_may_not_be_read_is_one_line(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def closed(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", closed)  # root may read all
    assert main(["evaluate", str(trained / "run")]) == 2
    said = f"fedssl: {trained / 'run/config.yaml'}: Permission denied. Change the permissions"
    assert capsys.readouterr().err.startswith(said)


def test_other_images_need_not_have_what_the_runs_own_had(trained: Path, tmp_path: Path) -> None:
    """Labels to draw from, or to watch rounds by."""
    for k in range(4):
        made(tmp_path / f"flat/{k}.png", k)
    words = [f"data.root={tmp_path / 'flat'}", "data.levels=null", "evaluate.protocols=unlabeled"]
    assert evaluate(trained / "run", words)


def test_another_data_set_has_other_folders(trained: Path, tmp_path: Path) -> None:
    for k in range(8):
        made(tmp_path / f"train/n{k % 2}/images/{k}.png", k)
        made(tmp_path / f"val/images/{k}.png", k)
    lines = [f"{k}.png\tn{k % 2}\n" for k in range(8)]
    (tmp_path / "val/val_annotations.txt").write_text("".join(lines))
    words = ["data.name=tiny-imagenet", f"data.root={tmp_path}", "evaluate.protocols=semi@50%"]
    assert evaluate(trained / "run", words)


def test_a_run_of_unlabeled_sites_is_judged_on_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for k in range(12):
        made(tmp_path / f"photos/{('east', 'west')[k % 2]}/{k}.png", k)
        made(tmp_path / f"lab/{'test' if k >= 8 else 'train'}/{('cat', 'dog')[k % 2]}/{k}.png", k)
        made(tmp_path / f"flat/{k}.png", k)
        site, label = ("east", "north")[k % 2], k // 2 % 2
        made(tmp_path / f"later/{'test' if k >= 8 else 'train'}/{site}/{label}/{k}.png", k)
    words = [word for word in of_two(tmp_path) if not word.startswith("partition.")]
    words += ["data.levels=client", "partition.name=folder", "evaluate.protocols=null"]
    loop.run(config.resolve(config.read_recipe(None), words), tmp_path / "run")

    def judged(place: str, *words: str) -> tuple[set[str], str]:
        capsys.readouterr()
        rows = evaluate(tmp_path / "run", [f"data.root={tmp_path / place}", *words])
        return set(rows["result"]), capsys.readouterr().err

    knn = "evaluate.protocols=knn"
    found, said = judged("lab", knn)
    taken = "the folders in train/ are taken for classes (cat, dog), as with data.levels=class"
    assert found == {"knn_top1"} and f"data.root={tmp_path / 'lab'}: {taken}" in said
    assert (found, "") == judged("lab", knn, "data.levels=class")
    assert "knn_top1" not in judged("lab")[0]  # nobody asked for what needs labels
    rows = evaluate(tmp_path / "run", ["data.name=digits", knn])
    assert "knn_top1" in rows["result"] and taken[:20] not in capsys.readouterr().err
    with refused("data.levels"):
        judged("flat")
    like = "named like the run's clients (east). Say what the folders are, as in data.levels=client"
    with refused("data.root", tmp_path / "later", like):
        judged("later", knn)
    assert judged("later", knn, "data.levels=client,class")[0] == {"knn_top1"}


def of_two(root: Path) -> list[str]:
    """The keys of a run of one round of two clients on ``photos``."""
    return [
        *("data.name=folder", f"data.root={root / 'photos'}", f"data.cache={root / 'cache'}"),
        *("data.size=8", "partition.name=iid", "partition.clients=2", "cohort.size=2", "rounds=1"),
        *("evaluate.baselines=[]", "engine.threads=1"),
    ]


@pytest.fixture(scope="module")
def simple(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one round on a folder without sites, and nothing held out."""
    root = tmp_path_factory.mktemp("simple")
    for k in range(16):
        made(root / f"photos/{'test' if k >= 12 else 'train'}/{k % 2}/{k}.png", k)
    words = [*of_two(root), "objective.projector=16,8", "evaluate.protocols=knn"]
    loop.run(config.resolve(config.read_recipe(None), words), root / "run")
    return root / "run"


def test_an_encoder_alone_is_judged_by_a_run_without_rounds(simple: Path, tmp_path: Path) -> None:
    file = simple / "encoder.safetensors"
    with refused(None, says="`fedssl run` with encoder.init=PATH rounds=0"):
        evaluate(file, [])
    words = [*of_two(simple.parent), f"encoder.init={file}", "rounds=0", "evaluate.protocols=knn"]
    loop.run(config.resolve(config.read_recipe(None), words), tmp_path / "run")
    unlabeled = ["evaluate.protocols=unlabeled"]
    ours, theirs = (evaluate(path, unlabeled) for path in (tmp_path / "run", simple))
    assert ours["result"] == theirs["result"] != ours["untrained"]


def test_a_folder_with_one_training_image_is_refused(simple: Path, tmp_path: Path) -> None:
    for name in ("train/0/a.png", "test/0/b.png"):
        made(tmp_path / "few" / name, 1)
    said = "holds 1 training image, and evaluation needs two. Use a folder with more."
    with refused("data.root", tmp_path / "few", said):
        evaluate(simple, [f"data.root={tmp_path / 'few'}"])


def test_another_data_set_is_not_in_the_runs_folder(
    simple: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(simple), "data.name=digits", "evaluate.protocols=knn"]) == 0
    said = "fedssl: evaluate: data.name=digits: images are made in colour, as the run's are"
    assert said in capsys.readouterr().err.splitlines()


def test_a_run_on_grey_images_is_judged_on_colour_as_it_embeds_them(
    simple: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["rounds=1", "cohort.size=4", "evaluate.protocols=knn", "evaluate.baselines=[]"]
    loop.run(config.resolve(config.read_recipe(None), [*words, "data.size=8"]), tmp_path / "run")
    photos = ["data.name=folder", f"data.root={simple.parent / 'photos'}", "evaluate.k=2"]
    for size in (8, 12):
        words = [*photos, f"evaluate.size={size}", "evaluate.protocols=unlabeled"]
        found = evaluate(tmp_path / "run", words)["result"]["effective_rank"]
        encoder = load_encoder(tmp_path / "run")
        encoder.height = encoder.width = size
        files = sorted((simple.parent / "photos/train").rglob("*.png"))
        assert found == pytest.approx(effective_rank(encoder.embed(files)), rel=1e-5)
    assert "images are made grey, as the run's are" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "protocol", "said"),
    [
        ("data.size=12", "semi@50%", "data.holdout=0.2 keeps fewer images out"),
        ("data.labels=12", "per-client", "needs the run's own clients"),
        ("data.labels=12", "collaborative@50%", "needs the run's own clients"),
        ("data.labels=12", "heldout@20%", "needs the run's own held-out images"),
    ],
)
def test_protocols_that_the_images_do_not_allow(
    word: str, protocol: str, said: str, trained: Path
) -> None:
    with refused("evaluate.protocols", protocol, said):
        evaluate(trained / "run", [word, f"evaluate.protocols={protocol}"])


def test_other_labels_are_those_that_are_asked_for(trained: Path) -> None:
    with refused("data.labels", 3):
        evaluate(trained / "run", ["data.labels=3", "evaluate.protocols=knn"])


def test_what_was_held_out_stays_so_at_another_size(trained: Path) -> None:
    assert "heldout@20%_top1" in evaluate(trained / "run", ["data.size=12"])["untrained"]


def test_images_are_loaded_once(
    simple: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others, and the run's own in another place."""
    photos = shutil.copytree(simple.parent / "photos", tmp_path / "moved")
    real, loads = load_dataset, list[str]()
    monkeypatch.setattr(
        "fedssl.runs.reevaluate.load_dataset", lambda *given: (loads.append("."), real(*given))[1]
    )
    for expected in ("moved", "other"):
        assert evaluate(simple, [f"data.root={photos}"])
        assert len(loads) == 1, expected
        loads.clear()
        made(photos / "train/0/new.png", 3)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A supervised run on images of two classes, ``photos``; ``others`` are of three."""
    root = tmp_path_factory.mktemp("classifier")
    for k in range(36):
        split = "test" if k >= 24 else "train"
        made(root / f"photos/{split}/{k % 2}/{k}.png", k)
        made(root / f"others/{split}/{k % 3}/{k}.png", 40 * (k % 3) + k)
    loop.run(config.resolve(config.read_recipe(None), supervised(root)), root / "run")
    return root


def supervised(root: Path) -> list[str]:
    names = ("objective.name=supervised", "algorithm.name=fedavg", "augment.name=flip")
    return [*of_two(root), *names, "evaluate.protocols=null"]


def test_a_classifiers_encoder_is_judged_on_other_classes(classifier: Path) -> None:
    root, words = classifier, [f"data.root={classifier / 'others'}"]
    rows = evaluate(root / "run", words)
    assert set(rows["result"]) == {"knn_top1", "linear_top1"}  # of its own data head, too
    assert "head_top1" in evaluate(root / "run", [])["result"]
    rows = evaluate(root / "run", [*words, "evaluate.protocols=unlabeled"])
    data = Data("folder", str(root / "others"), 8, cache=str(root / "cache"))
    features = load_encoder(root / "run").embed(load_dataset(data).train.images[0])
    assert rows["result"]["effective_rank"] == effective_rank(features)
    # And where nobody knows classes.
    flat = [f"data.root={root / 'photos/train/0'}", "evaluate.protocols=unlabeled"]
    assert evaluate(root / "run", flat)


@pytest.mark.parametrize("name", ["2", "one"])
def test_a_classifier_itself_only_on_its_own_classes(
    name: str, classifier: Path, tmp_path: Path
) -> None:
    """By their names: as many others are no better."""
    photos = shutil.copytree(classifier / "photos", tmp_path / "photos")
    for split in ("train", "test"):
        if name == "2":
            shutil.copytree(photos / split / "1", photos / split / name)
        else:
            (photos / split / "1").rename(photos / split / name)
    given = "0, 1, 2" if name == "2" else "0, one"
    with refused("evaluate.protocols", "head", f"the classes 0, 1, and these images have {given}."):
        evaluate(classifier / "run", [f"data.root={photos}", "evaluate.protocols=[knn,head]"])
    assert evaluate(classifier / "run", [f"data.root={photos}", "evaluate.protocols=knn"])


def test_a_classifier_that_started_from_weights_is_judged_on_other_classes(
    classifier: Path, tmp_path: Path
) -> None:
    """The random network that it is compared with is like its own."""
    words = [*supervised(classifier), f"encoder.init={classifier / 'run'}"]
    loop.run(config.resolve(config.read_recipe(None), words), tmp_path / "run")
    others = [f"data.root={classifier / 'others'}", "evaluate.protocols=knn"]
    ours, theirs = (evaluate(path / "run", others) for path in (tmp_path, classifier))
    assert ours["untrained"] == theirs["untrained"]
