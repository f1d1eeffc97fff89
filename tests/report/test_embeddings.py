"""The map, the neighbours and the partition, against what the run itself computes."""

from __future__ import annotations

import base64
import io
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from image_folders import save_noise
from made_runs import again, made
from PIL import Image
from safetensors.torch import load_file, save_file

from fedssl import config, report
from fedssl.config import to_tree
from fedssl.data import standard
from fedssl.data.places import use_local_copy
from fedssl.evaluate.features import extract
from fedssl.report import embeddings
from fedssl.report.data import RunData, load_holdings, try_section
from fedssl.runs.build import build_experiment
from fedssl.runs.reader import RunReader
from fedssl.runs.split import split_clients


def images_of(path: Path) -> embeddings.ShownImages:
    return embeddings.embed_images(RunData(RunReader(path)))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "ITERATIONS", 250)


def test_the_map_and_the_gallery_are_of_the_run_and_of_its_untrained_network(trained: Path) -> None:
    session = build_experiment(RunReader(trained).settings)
    assert session.dataset.test is not None
    images, labels = session.dataset.test.images[0], session.dataset.test.labels
    body = session.evaluator.tower(session.untrained())
    before = extract(body.encoder, images)
    body.encoder.load_state_dict(load_file(trained / "encoder.safetensors"))
    after = extract(body.encoder, images)
    shown = images_of(trained)
    assert shown.points == images_of(trained).points and "t-SNE" in shown.projection
    places = np.array(shown.points)
    assert places.min() == 0 and places.max() == 1 and len(places) == len(images)
    sprite = shown.thumbnails
    sheet = np.array(Image.open(io.BytesIO(base64.b64decode(sprite.uri.partition(",")[2]))))
    for k in (0, 17, len(images) - 1):
        top, left = (place * 16 for place in divmod(k, sprite.columns))
        assert (sheet[top : top + 16, left : left + 16] == images[k, 0].numpy()).all()
    assert labels is not None and shown.labels == labels.tolist()
    shares = []
    for features, found in ((before, shown.before), (after, shown.after)):
        near = torch.cosine_similarity(features[:, None], features[None], dim=2)
        near.fill_diagonal_(-2)
        best = near.topk(5).indices
        assert torch.allclose(near.gather(1, torch.from_numpy(found)), near.gather(1, best))
        assert (found != np.arange(len(found))[:, None]).all()
        shares.append(100 * (labels[best] == labels[:, None]).double().mean().item())
    assert shown.precision == pytest.approx(shares)
    assert len({shown.labels[k] for k in shown.queries}) == len(shown.queries) == 8


def test_who_holds_what_is_what_was_trained_on(trained: Path) -> None:
    part = load_holdings(RunData(RunReader(trained)))
    settings = RunReader(trained).settings
    dataset = build_experiment(settings).dataset
    groups = split_clients(settings, dataset)
    assert dataset.train.labels is not None and part.held is not None
    for k in range(len(groups)):
        held = torch.bincount(dataset.train.labels[groups[k]], minlength=10)
        assert part.held[k] == held.tolist() and part.sizes[k] == len(groups[k])


def test_of_many_clients_sixty_are_shown(tmp_path: Path) -> None:
    path = made(tmp_path / "a")  # the default: 359 clients of four images
    part = load_holdings(RunData(RunReader(path)))
    assert (len(part.names), len(part.sizes)) == (60, 359)
    text = report.write_page([path]).read_text()
    assert "359 clients; 4 images the smallest" in text and "first 60 are shown" in text


def untrained(path: Path) -> Path:
    """The run with the encoder that it would start from."""
    data = RunData(RunReader(path))
    config = data.settings
    for tower in range(config.encoder.towers):
        encoder = embeddings.build_untrained(config, data.dataset, tower)
        tensors = {k: v.detach().clone() for k, v in encoder.state_dict().items()}
        save_file(tensors, path / f"encoder{('', '-second')[tower]}.safetensors")
    images = data.dataset.train.images
    note = {
        "model": "global", "encoder": to_tree(config.encoder), "features": encoder.features,
        "channels": [i.shape[1] for i in images], "size": list(images[0].shape[2:]),
    }  # fmt: skip
    (path / "encoder.json").write_text(json.dumps(note))
    return path


@pytest.mark.parametrize(
    "words",
    [
        ("data.halves=true", "encoder.towers=2", "evaluate.tower=first"),
        ("data.halves=true", "encoder.towers=2", "evaluate.tower=second"),
        ("encoder.norm=batch", "objective.name=simclr", "algorithm.name=fedavg"),
    ],
)
def test_two_towers_and_batch_norm(words: tuple[str, ...], tmp_path: Path) -> None:
    shown = images_of(untrained(made(tmp_path / "a", words)))
    assert (shown.before == shown.after).all() and shown.precision is not None


def folder(root: Path, levels: tuple[str, ...], test: bool) -> dict[str, Any]:
    """Images in folders of these levels, two of each."""
    names = ["/".join(each) for each in itertools.product(*([f"{n}0", f"{n}1"] for n in levels))]
    for split in ("train", "test") if test else ("train",):
        save_noise(root / split, *names, size=12)
    return {"name": "folder", "root": str(root), "cache": str(root / "cache")}


@pytest.mark.parametrize(
    ("levels", "test", "why"),
    [
        ((), False, "evaluate.show_training_images=true"),
        ((), True, None),
        (("class", "case"), True, None),
    ],
)
def test_other_data(levels: tuple[str, ...], test: bool, why: str | None, tmp_path: Path) -> None:
    data = folder(tmp_path / "d<i>", levels, test) | {"levels": list(levels) or None}
    words = ("partition.name=iid", "partition.clients=2", "cohort.size=null")
    path = again(made(tmp_path / "first", words), tmp_path / "a", data=data)
    shown = try_section(lambda: images_of(untrained(path)))
    if why is not None:
        assert isinstance(shown, str) and why in shown
    else:
        assert isinstance(shown, embeddings.ShownImages), shown
        assert (shown.labels is None) == (not levels) and len(shown.queries) >= 6
        assert shown.thumbnails.uri.startswith("data:image/jpeg")
    text = report.write_page([path]).read_text()
    assert "it could not be made" not in text
    assert ("The images have no labels" in text) == (not levels)
    (tmp_path / "d<i>").rename(tmp_path / "gone")
    known = [{"client": k, "name": str(k), "samples": 4} for k in range(2)]
    (path / "clients.json").write_text(json.dumps(known))
    text = report.write_page([path]).read_text()
    assert "The images have no labels" not in text and "d<i>" not in text
    assert "From clients.json, without classes: data.root=" in text and "no such folder" in text


def test_training_images_are_shown_if_the_key_allows_it(tmp_path: Path) -> None:
    data = folder(tmp_path / "photos", (), False) | {"levels": None}
    words = ("partition.name=iid", "partition.clients=2", "cohort.size=null")
    made(tmp_path / "first", words)
    path = untrained(again(tmp_path / "first", tmp_path / "hidden", data=data))
    hidden = report.write_page([path]).read_text()
    assert "neighbours</h2>" not in hidden and hidden.count("show_training_images=true") == 1
    allowed = again(path, tmp_path / "shown", evaluate__show_training_images=True)
    text = report.write_page([allowed]).read_text()
    assert images_of(allowed).split == "training" and "neighbours</h2>" in text
    assert "This section shows training images" in text


def test_a_page_downloads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSSL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(standard, "_network_patience", Mock(side_effect=AssertionError("download")))
    path = made(tmp_path / "a", ("data.name=cifar10", "evaluate.size=64"))
    untrained(made(tmp_path / "b")).joinpath("encoder.json").rename(path / "encoder.json")
    (tmp_path / "b/encoder.safetensors").rename(path / "encoder.safetensors")
    text = report.write_page([path]).read_text()
    assert text.count("data.name=cifar10: ") == 2  # partition and map
    assert "AssertionError" not in text


def test_data_on_this_machine_is_found(tmp_path: Path) -> None:
    data = config.resolve(config.read_recipe(None), ("data.name=stl10",)).data
    held = tmp_path / "downloads" / "stl10"
    held.mkdir(parents=True)
    assert use_local_copy(replace(data, cache=str(tmp_path))).root == str(held)
    own = replace(data, root="elsewhere")
    assert use_local_copy(own) == own


def test_a_section_that_fails_leaves_the_others(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Mock(side_effect=ZeroDivisionError("never mind"))
    monkeypatch.setattr(embeddings, "embed_images", broken)
    text = report.write_page([trained], tmp_path / "page.html").read_text()
    assert "it could not be made (ZeroDivisionError: never mind)" in text
