"""Export encoders to every format, and use them without fedssl."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from encoders import made, needs
from helpers import refused
from PIL import Image
from safetensors.torch import load_file

import fedssl
from fedssl import config, load_encoder
from fedssl.cli import main
from fedssl.encoder import embed, export, formats
from fedssl.privacy.exchanges import list_exchanges
from fedssl.runs.result import format_result
from fedssl.util.errors import TrainingError

ALONE = """
import sys
sys.modules["fedssl"] = None  # as if it were not installed
{blocked}
import json
import numpy as np
images = np.load(sys.argv[2]).astype(np.float32) / 255
{load}
for count in (1, 7, len(images)):
    found = infer(images[:count])
    assert found.shape[0] == count
np.save(sys.argv[3], found)
print(note)
"""
TORCHSCRIPT = """
import torch
extra = {"fedssl.json": ""}
model = torch.jit.load(sys.argv[1], _extra_files=extra)
note = extra["fedssl.json"].decode()
infer = lambda x: model(torch.from_numpy(x)).detach().numpy()
"""
ONNX = """
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
note = session.get_modelmeta().custom_metadata_map["fedssl"]
infer = lambda x: session.run(["embeddings"], {"images": x})[0]
"""


@pytest.mark.parametrize(
    ("format", "ending", "load"), [("torchscript", "pt", TORCHSCRIPT), ("onnx", "onnx", ONNX)]
)
def test_an_export_gives_the_runs_embeddings_where_there_is_no_fedssl(
    format, ending, load, folder, images, tmp_path, capfd
):
    needs(format)
    assert main(["export", str(folder), "--format", format]) == 0
    said = capfd.readouterr()
    file = folder / "export" / format / f"encoder.{ending}"
    lines = said.out.splitlines()
    assert lines[0].startswith(f"{file}: ") and lines[1].startswith("largest difference to torch ")
    assert float(lines[1].split()[4]) < 1e-4 and lines[1].endswith("of the run's test images")
    assert len(lines) == 3 and said.err == ""

    np.save(tmp_path / "images.npy", images[:40].numpy())
    blocked = 'sys.modules["torch"] = None' if format == "onnx" else ""
    script = ALONE.format(blocked=blocked, load=load)
    names = [str(file), "images.npy", "found.npy"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    alone = subprocess.run(
        [sys.executable, "-I", "-c", script, *names],
        cwd=tmp_path, env=clean, capture_output=True, text=True,
    )  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    found = torch.from_numpy(np.load(tmp_path / "found.npy"))
    expected = load_encoder(folder).embed(images[:40])
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max()) < 1e-4

    note = json.loads(alone.stdout)
    assert note == json.loads(file.with_name(f"{file.name}.json").read_text())
    wanted = note["preprocess"]
    assert [wanted[key] for key in ("channels", "height", "width")] == [1, 8, 8]
    assert wanted["range"] == [0.0, 1.0] and "divided by 255" in wanted["steps"]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(640, 480), (301, 520), (50, 40)])
def test_the_steps_of_an_export_give_its_numbers(size, channels, tmp_path):
    """For who has Pillow and not fedssl; of a large JPEG only if they say how it is decoded."""
    encoder = made("tiny", "group", channels, 32)
    rough = np.random.default_rng(0).integers(0, 256, (30, 30, 3), dtype=np.uint8)
    Image.fromarray(rough).resize(size).save(tmp_path / "x.jpg", quality=90)
    steps = formats.describe_preprocessing(encoder)["steps"]
    image = Image.open(tmp_path / "x.jpg")
    for step in steps:
        if drafted := re.search(r"draft\(None, \((\d+), (\d+)\)\)", step):
            image.draft(None, (int(drafted[1]), int(drafted[2])))
        elif step.startswith("RGB"):
            image = image.convert("RGB")
        elif step.startswith("the square"):
            (width, height), side = image.size, min(image.size)
            left, top = (width - side) / 2, (height - side) / 2
            box = (left, top, left + side, top + side)
            image = image.resize((32, 32), Image.Resampling.BILINEAR, box=box)
        elif step.startswith("grey"):
            image = image.convert("L")
    pixels = torch.from_numpy(np.array(image)).reshape(32, 32, channels).permute(2, 0, 1) / 255
    with torch.no_grad():
        found = encoder(pixels[None])
    torch.testing.assert_close(found, encoder.embed([tmp_path / "x.jpg"]), atol=1e-5, rtol=0)


def test_safetensors_are_exact_from_folder_and_from_the_file_alone(
    folder, images, tmp_path, capsys
):
    assert main(["export", str(folder), "--format", "safetensors"]) == 0
    assert "largest difference to torch 0" in capsys.readouterr().out
    out = folder / "export" / "safetensors"
    expected = load_encoder(folder).embed(images)
    assert torch.equal(load_encoder(out).embed(images), expected)
    shutil.copy(out / "encoder.safetensors", tmp_path / "renamed.safetensors")
    assert torch.equal(load_encoder(tmp_path / "renamed.safetensors").embed(images), expected)
    state = load_file(folder / "encoder.safetensors")
    exported = load_file(out / "encoder.safetensors")
    assert state.keys() == exported.keys()
    assert all(torch.equal(state[key], exported[key]) for key in state)
    # An exported encoder can be exported again; the run's images are not known there.
    lines = list(export.export(out, "torchscript", tmp_path / "again.pt"))
    assert "random images (the run's data is not here)" in lines[1]
    assert (tmp_path / "again.pt").is_file()


KINDS = [
    ("tiny", "batch", 1, 8),
    ("resnet14", "group", 3, 16),
    ("resnet18", "batch", 3, 96),
    ("resnet50", "group", 3, 16),
    ("vit-tiny", "group", 3, 8),
]


@pytest.mark.parametrize(
    ("format", "name", "norm", "channels", "size"),
    [
        *(("torchscript", *kind) for kind in KINDS),
        ("onnx", "resnet14", "batch", 3, 16),
        pytest.param("onnx", "vit-tiny", "group", 3, 8, marks=pytest.mark.slow),
    ],
)
def test_every_encoder_goes_out(format, name, norm, channels, size, tmp_path):
    needs(format)
    encoder = made(name, norm, channels, size)
    file = tmp_path / f"encoder{formats.ENDINGS[format]}"
    infer = formats.WRITERS[format](encoder, file)
    images = torch.randint(0, 256, (5, channels, size, size), dtype=torch.uint8)
    assert formats.measure_difference(encoder, infer, images)[0] < 1e-4
    if format == "torchscript":
        assert "fedssl::" not in str(torch.jit.load(str(file)).inlined_graph)  # our kernels
    else:
        import onnx

        graph = onnx.load(file).graph
        assert {node.domain for node in graph.node} == {""}
        assert str(Path(formats.__file__).parent).encode() not in file.read_bytes()
        assert graph.input[0].type.tensor_type.shape.dim[0].dim_param


@pytest.mark.parametrize(("off", "said"), [(2e-4, r"0\.0002"), (float("nan"), "nan")])
def test_an_export_that_differs_is_not_written(off, said, folder, tmp_path, monkeypatch):
    def wrong(encoder, path):
        path.write_text("new")
        return lambda images: encoder.body(images) + off

    monkeypatch.setitem(formats.WRITERS, "torchscript", wrong)
    out = tmp_path / "a.pt"
    out.write_text("old")
    with pytest.raises(TrainingError, match=rf"not written \(largest difference to torch {said}"):
        list(export.export(folder, "torchscript", out))
    assert out.read_text() == "old" and list(tmp_path.iterdir()) == [out]


def test_checking_an_export_downloads_nothing(folder, tmp_path, monkeypatch):
    moved = shutil.copytree(folder, tmp_path / "run")
    tree = yaml.safe_load((moved / "config.yaml").read_text())
    tree["data"] |= {"name": "cifar10", "cache": str(tmp_path / "cache")}
    (moved / "config.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.setattr("fedssl.data.standard._network_patience", lambda: pytest.fail("network"))
    assert "random images" in formats.load_check_images(moved, load_encoder(moved))[1]


@pytest.mark.parametrize("missing", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_extra_is_named(missing, folder, monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else real(name)
    )
    assert main(["export", str(folder), "--format", "onnx"]) == 2
    assert "pip install 'fedssl[export]'" in capsys.readouterr().err


@pytest.mark.parametrize("format", ["safetensors", "onnx", "hf"])
def test_a_place_that_cannot_be_written_is_said_before_the_work(
    format, folder, tmp_path, monkeypatch
):
    needs(format)
    (tmp_path / "file").write_text("")
    for name in formats.WRITERS:
        monkeypatch.setitem(formats.WRITERS, name, lambda *_: pytest.fail("work"))
    with refused("--out", says="cannot be written"):
        list(export.export(folder, format, tmp_path / "file" / "out"))


def test_a_wrong_format_is_refused(folder):
    with refused("format", "onx"):
        fedssl.Run(folder).export("onx")


def test_a_wrong_name_for_the_output_is_refused(folder, tmp_path):
    with refused("--out", says=".pt"):
        list(export.export(folder, "torchscript", tmp_path / "a.onnx"))


@pytest.mark.parametrize(
    "place", ["", "encoder.safetensors", "other.safetensors", "personal/client-0.safetensors"]
)
def test_a_runs_own_files_are_not_written_over(place, folder, tmp_path):
    moved = shutil.copytree(folder, tmp_path / "run")
    (moved / "personal").mkdir()
    before = {path: path.read_bytes() for path in moved.rglob("*") if path.is_file()}
    with refused("--out", moved / place):
        list(export.export(moved, "safetensors", moved / place))
    assert before == {path: path.read_bytes() for path in moved.rglob("*") if path.is_file()}


# Hugging Face --------------------------------------------------------------------------------


def test_the_hub_folder_loads_and_its_card_says_what_it_is(folder, images, tmp_path, capsys):
    out = tmp_path / "hub"
    assert main(["export", str(folder), "--format", "hf", "--out", str(out)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{out / 'model.safetensors'}: ") and said[-1].startswith(f"{out}: ")
    assert said[1].startswith("largest difference to torch 0 ")
    assert torch.equal(load_encoder(out).embed(images), load_encoder(folder).embed(images))
    card = (out / "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front)["pipeline_tag"] == "image-feature-extraction"
    settings = config.build(config.read_yaml(folder / "config.yaml"))
    summary = json.loads((folder / "summary.json").read_text())
    clients = json.loads((folder / "clients.json").read_text())
    count = sum(client["samples"] for client in clients)
    assert f"`digits`, unlabeled in training: {count:,} images of {len(clients)} clients" in body
    assert "algorithm `dcco`, 2 rounds" in body
    assert list_exchanges(settings) in body
    assert format_result(summary, settings) in body and "`fedssl run recipe.yaml`" in body
    assert "## Limits" in body
    # The command in the card gives the same run.
    assert config.resolve(config.read_recipe(str(out / "recipe.yaml"))) == settings
    # A second export takes the place of the first.
    assert main(["export", str(folder), "--format", "hf", "--out", str(out)]) == 0


def test_places_on_this_machine_stay_out_of_what_is_published(folder, tmp_path):
    moved = shutil.copytree(folder, tmp_path / "run")
    secret = str(tmp_path / "secret")
    tree = yaml.safe_load((moved / "config.yaml").read_text())
    tree["data"] |= {"name": "folder", "root": secret, "cache": secret}
    tree["encoder"]["init"] = secret
    own = Path(__file__).parents[2] / "examples" / "own"  # as a user's files, anywhere
    tree["partition"] = {"name": f"{own}/partition.py:Halving", "clients": 6}
    protocol = f"{own}/protocol.py:nearest_mean"
    tree["evaluate"] |= {"protocols": ["knn", f"{protocol}@100"], "monitor": [protocol]}
    (moved / "config.yaml").write_text(yaml.safe_dump(tree))
    note = json.loads((moved / "encoder.json").read_text())
    note["encoder"]["init"] = secret
    (moved / "encoder.json").write_text(json.dumps(note))
    list(export.export(moved, "hf", tmp_path / "hub"))
    for file in (tmp_path / "hub").iterdir():
        assert secret.encode() not in file.read_bytes(), file
        assert str(own).encode() not in file.read_bytes(), file
    recipe = yaml.safe_load((tmp_path / "hub" / "recipe.yaml").read_text())
    assert recipe["evaluate"]["protocols"] == ["knn", "protocol.py:nearest_mean@100"]
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "fedssl run recipe.yaml data.root=DIR" in card
    assert "It started from given weights." in card


def test_a_folder_of_something_else_is_left_alone(folder, tmp_path):
    (tmp_path / "README.md").write_text("mine")
    for known in (None, b"\xff\xfe\x00"):
        if known is not None:
            (tmp_path / "config.json").write_bytes(known)
        with refused("--out"):
            list(export.export(folder, "hf", tmp_path))
    assert (tmp_path / "README.md").read_text() == "mine"


def test_an_exported_folder_serves_as_a_run_for_embed(folder, images, tmp_path):
    list(export.export(folder, "hf", tmp_path / "hub"))
    Image.fromarray(images[0, 0].numpy()).save(tmp_path / "a.png")
    to = tmp_path / "a.npz"
    assert embed.embed(tmp_path / "hub", str(tmp_path / "a.png"), to, 256, "cpu") == 1
    expected = load_encoder(folder).embed(images[:1])
    assert np.array_equal(np.load(to)["embedding"], expected.numpy())
