"""Load encoders from runs, exports and files."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
from encoders import SMALL, made, reopened, trained
from helpers import refused
from PIL import Image
from safetensors.torch import load_file, save_file

from fedssl import config, load_encoder
from fedssl.cli import main
from fedssl.config import Data
from fedssl.data.load import load_dataset
from fedssl.encoder import export
from fedssl.evaluate.features import extract
from fedssl.runs.build import build_experiment
from fedssl.util.errors import UserError


def test_an_encoder_gives_the_bits_that_the_run_is_judged_by(folder, images, tmp_path):
    session = reopened(folder)
    judged = extract(session.evaluator.tower(session.models.global_model()).encoder, images)
    encoder = load_encoder(folder)
    assert not encoder.training and not any(m.training for m in encoder.modules())
    assert torch.equal(encoder.embed(images), judged)
    paths = [tmp_path / f"{i}.png" for i in range(300)]
    for path, image in zip(paths, images, strict=False):
        Image.fromarray(image[0].numpy()).save(path)
    assert torch.equal(encoder.embed(paths), judged[:300])
    assert torch.equal(encoder.embed([Image.open(paths[0])]), encoder.embed(images[:1]))
    with torch.no_grad():
        assert torch.equal(encoder(encoder.preprocess(paths[7])[None]), encoder.embed(images[7:8]))


def test_batches_change_no_more_than_rounding(folder, images):
    encoder = load_encoder(folder)
    torch.testing.assert_close(encoder.embed(images[:20], batch=7), encoder.embed(images[:20]))
    assert torch.equal(encoder.embed(list(images[:20])), encoder.embed(images[:20]))
    assert encoder.embed([]).shape == (0, 96)
    with refused("batch", 0):
        encoder.embed(images, batch=0)


def test_a_double_precision_run_is_judged_and_used_in_single(folder, images, tmp_path):
    shutil.copy(folder / "encoder.json", tmp_path)
    state = load_file(folder / "encoder.safetensors")
    save_file({k: v.double() for k, v in state.items()}, tmp_path / "encoder.safetensors")
    assert torch.equal(load_encoder(tmp_path).embed(images), load_encoder(folder).embed(images))


@pytest.mark.parametrize("halves", [False, True])
def test_files_are_read_as_training_reads_a_folder(tmp_path, halves):
    root = tmp_path / "root"
    root.mkdir()
    generator = np.random.default_rng(0)
    for i, (height, width) in enumerate([(40, 61), (33, 20), (16, 16)]):
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"{i}.{'jpg' if i == 0 else 'png'}")
    data = Data("folder", str(root), 16, halves=halves, cache=str(tmp_path / "cache"))
    trained = load_dataset(data).train.images
    for tower, expected in enumerate(trained):
        encoder = made("tiny", "group", 3, 16)
        encoder.tower, encoder.width = tower, expected.shape[3]
        read = torch.stack([encoder.preprocess(path) for path in sorted(root.iterdir())])
        assert torch.equal(read, expected.float() / 255)
    assert len(trained) == 1 + halves


def test_two_towers_are_told_apart(two_towers, tmp_path):
    session = reopened(two_towers)
    session.trainer.load(session.models.global_model())
    exports = {"both": "safetensors", "hub": "hf"}
    for name, format in exports.items():
        lines = list(export.export(two_towers, format, tmp_path / name))
        assert sum("largest difference to torch 0" in line for line in lines) == 2
    for tower, images in enumerate(session.dataset.test.images):
        expected = extract(copy.deepcopy(session.tower(tower).encoder).float(), images)
        for folder in (two_towers, *(tmp_path / name for name in exports)):
            assert torch.equal(load_encoder(folder, tower=tower).embed(images), expected)
    first, second = (tmp_path / "both" / f"encoder{end}.safetensors" for end in ("", "-second"))
    assert load_encoder(second).tower == load_encoder(second, tower=1).tower == 1
    assert torch.equal(load_encoder(second).embed(images), expected)
    for path, tower in ((first, 1), (two_towers, 2)):
        with refused("tower", tower):
            load_encoder(path, tower=tower)
    steps = json.loads((tmp_path / "hub" / "config.json").read_text())["fedssl"]["preprocess"]
    assert "its left 4 columns" in steps["steps"]


def test_personal_models(tmp_path, images):
    words = ("algorithm.name=ditto", "partition.name=iid", "partition.clients=3")
    folder = trained(tmp_path / "run", *words, "cohort.size=null", "rounds=1")
    models = [load_encoder(folder, client=k) for k in range(3)]
    files = [folder / f"personal/client-{k}.safetensors" for k in range(3)]
    embeddings = [model.embed(images[:5]) for model in (load_encoder(folder), *models)]
    assert len({tuple(rows.flatten().tolist()) for rows in embeddings}) == 4
    assert load_encoder(folder).note["model"].startswith("global")
    # Each has a place of its own, and says whose it is.
    for k, (file, model) in enumerate(zip(files, models, strict=True)):
        for name, tensor in load_file(file).items():
            assert torch.equal(model.body.state_dict()[name], tensor.float())
        assert torch.equal(load_encoder(file).embed(images[:5]), embeddings[k + 1])
        lines = list(export.export(file, "torchscript", None))
        assert lines[1].endswith("of the run's test images")
        script = folder / f"personal/export/torchscript/client-{k}.pt"
        assert json.loads(Path(f"{script}.json").read_text())["model"] == f"personal, client {k}"
        found = torch.jit.load(str(script))(images[:5].float() / 255)
        torch.testing.assert_close(found, embeddings[k + 1])
    # A folder of one stands for it; of several one must be named.
    alone, both = tmp_path / "alone", tmp_path / "both"
    list(export.export(file, "safetensors", alone))
    assert torch.equal(load_encoder(alone).embed(images[:5]), embeddings[3])
    list(export.export(alone, "torchscript", None))
    assert (alone / "export/torchscript/client-2.pt").exists()
    with refused("client", 7, says="Use one of 0, 1, 2."):
        load_encoder(folder, client=7)
    with refused("client", 0):
        load_encoder(alone, client=0)
    with refused(str(folder / "personal"), says="client-0.safetensors, client-1.safetensors"):
        load_encoder(folder / "personal")
    # So it is where its file went with the run's note.
    for part in (folder / "encoder.json", file):
        shutil.copy(part, tmp_path)
    for place in (alone, tmp_path / file.name, file):
        assert load_encoder(place).note["model"] == "personal, client 2"
    # A card is about a run.
    for given in (file, alone, folder / "encoder.safetensors"):
        with refused("--format", "hf"):
            list(export.export(given, "hf", both))
    assert not both.exists()


def test_a_run_starts_from_any_folder_that_load_encoder_takes(two_towers, folder, tmp_path):
    def started(path, *words):
        given = [*SMALL, *words, f"encoder.init={path}"]
        network = build_experiment(config.resolve(config.read_recipe(None), given)).trainer.network
        encoders = [tower.get_submodule("encoder") for tower in network.towers]
        return [next(encoder.parameters()) for encoder in encoders]

    of_two = ("data.halves=true", "encoder.towers=2")
    list(export.export(two_towers, "hf", tmp_path / "hub"))
    bare = shutil.copytree(two_towers, tmp_path / "bare", ignore=lambda *_: ["config.yaml"])
    (bare / "encoder.json").unlink()
    own = list(export.export(folder, "safetensors", tmp_path / "one" / "mine.safetensors"))
    assert own and torch.equal(started(tmp_path / "one")[0], started(folder)[0])
    first, second = started(two_towers, *of_two)
    assert not torch.equal(first, second)
    for path in (tmp_path / "hub", tmp_path / "hub/model.safetensors", bare):
        found = started(path, *of_two)
        assert torch.equal(found[0], first) and torch.equal(found[1], second)
    shutil.copy(folder / "encoder.safetensors", tmp_path / "one/other.safetensors")
    with refused("encoder.init", tmp_path / "one", says="holds 2 models"):
        started(tmp_path / "one")
    (tmp_path / "one/other.safetensors").rename(tmp_path / "one/encoder.safetensors")
    assert torch.equal(started(tmp_path / "one")[0], started(folder)[0])


def test_the_file_of_one_tower_is_exported_as_that_tower(two_towers, images, tmp_path):
    list(export.export(two_towers / "encoder-second.safetensors", "safetensors", tmp_path))
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["encoder-second.safetensors"]
    seen = images[..., 4:]
    found = load_encoder(tmp_path / "encoder-second.safetensors").embed(seen)
    assert torch.equal(found, load_encoder(two_towers, tower=1).embed(seen))
    assert json.loads((tmp_path / "encoder-second.safetensors.json").read_text())["tower"] == 1


@pytest.mark.parametrize(
    "given",
    [
        torch.zeros(2, 3, 8, 8, dtype=torch.uint8),
        torch.zeros(2, 1, 9, 8),
        torch.full((1, 8, 8), 2.0),
        "a.png",
        3,
        np.zeros((3, 8, 8), np.uint8),
        np.zeros((8, 8), np.int64),
        np.zeros((8, 8, 7), np.uint8),
        [1],
        [torch.zeros(3, 8, 8, dtype=torch.uint8)],
        ["nowhere.png"],
        [Image.new("F", (8, 8))],
    ],
    ids=lambda given: type(given[0] if isinstance(given, list) else given).__name__,
)
def test_images_that_are_refused(given, folder):
    with pytest.raises(UserError):
        load_encoder(folder).embed(given)


@pytest.mark.parametrize("shape", [(1, 8, 8), (2, 3, 8, 8), (2, 1, 9, 8)])
def test_a_batch_of_another_shape_is_refused(shape, folder):
    with pytest.raises(UserError):
        load_encoder(folder)(torch.zeros(shape))


@pytest.mark.filterwarnings("error")
def test_an_array_of_pillow_gives_no_warning(folder):
    load_encoder(folder).embed(np.asarray(Image.new("L", (8, 8))))


def test_one_image_gives_one_vector_whatever_holds_it(folder, images, tmp_path):
    encoder, pixels = load_encoder(folder), images[0]
    Image.fromarray(pixels[0].numpy()).save(tmp_path / "a.png")
    expected = encoder.embed(images[:1])
    array = pixels[0].numpy()
    kinds = [tmp_path / "a.png", str(tmp_path / "a.png"), Image.open(tmp_path / "a.png")]
    kinds += [pixels, pixels.float() / 255, array, array[..., None].repeat(3, 2), array / 255]
    for kind in kinds:
        assert torch.equal(encoder.embed(kind), expected[0]), type(kind)
        assert torch.equal(encoder.embed([kind]), expected), type(kind)
    assert torch.equal(encoder.embed(images[:3, 0, ..., None].numpy()), encoder.embed(images[:3]))
    large = Image.fromarray(array).resize((24, 16)).convert("RGB")
    assert torch.equal(encoder.embed(np.array(large)), encoder.embed(large))
    for bad in (torch.zeros(2, 3, 8, 8), images[:2]):  # other channels, and bytes
        with refused(None):
            encoder(bad)


def test_a_folder_in_the_users_own(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert load_encoder("~/run").features == 96


@pytest.mark.parametrize(
    ("given", "closed"),
    [
        (".", "."),
        (".", "encoder.safetensors"),
        ("encoder.safetensors", "encoder.safetensors"),
        ("export", "export/alone.safetensors"),
    ],
)
def test_what_may_not_be_read_is_said(given, closed, folder, tmp_path, monkeypatch):
    root = shutil.copytree(folder, tmp_path / "run")
    list(export.export(root, "safetensors", root / "export/alone.safetensors"))
    may, header = os.access, safetensors.safe_open

    def opened(path, framework):
        if path == root / closed:
            raise FileNotFoundError(f"No such file or directory: {path}")  # as it says
        return header(path, framework)

    monkeypatch.setattr(os, "access", lambda path, mode: path != root / closed and may(path, mode))
    monkeypatch.setattr(safetensors, "safe_open", opened)
    with refused(str(root / closed), says="cannot be read"):
        load_encoder(root / given)


def test_what_holds_no_encoder_is_refused(folder, tmp_path):
    (tmp_path / "damaged.safetensors").write_bytes(b"nothing")
    (tmp_path / "empty").mkdir()
    shutil.copy(folder / "encoder.safetensors", tmp_path / "alone.safetensors")
    save_file({}, tmp_path / "x.safetensors", {"fedssl": "no JSON"})
    list(export.export(folder, "torchscript", tmp_path / "script"))
    (tmp_path / "note").mkdir()
    shutil.copy(folder / "encoder.json", tmp_path / "note")
    for name in ("damaged.safetensors", "empty", "alone.safetensors", "x.safetensors",
                 "script", "note"):  # fmt: skip
        with pytest.raises(UserError, match=f"{tmp_path / name}"):
            load_encoder(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"encoder": {"name": "tiny", "new": 1}}, "encoder.new"),
        ({"encoder": {"name": "tiny", "groups": "x"}}, "encoder.groups"),
        ({"encoder": 3}, "encoder"),
        ({"channels": ["x"]}, "channels"),
        ({"size": 16}, "size"),
        ({"features": None}, "features"),
    ],
)
def test_the_note_of_another_version(change, said, folder, tmp_path):
    note = json.loads((folder / "encoder.json").read_text())
    (tmp_path / "encoder.json").write_text(json.dumps(note | change))
    with refused(None, says=f"another version of fedssl ({said}: "):
        load_encoder(tmp_path)


def test_a_run_that_has_not_ended_says_how_to_end_it(folder, tmp_path, capsys):
    shutil.copy(folder / "config.yaml", tmp_path)
    assert main(["export", str(tmp_path), "--format", "torchscript"]) == 2
    assert f"fedssl run --resume --out {tmp_path}" in capsys.readouterr().err
    assert main(["embed", str(tmp_path), str(folder), "--to", str(tmp_path / "a.csv")]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
