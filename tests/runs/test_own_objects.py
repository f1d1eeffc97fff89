"""An encoder, augmentation, images and callbacks of the user's own, as objects and from files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import refused, timeless
from PIL import Image
from rounds import before_round, press_ctrl_c
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchvision.transforms import v2

import fedssl
from fedssl import config
from fedssl.cli import main
from fedssl.config import Data, plugins
from fedssl.data.in_memory import load_own
from fedssl.data.load import load_dataset
from fedssl.runs.build import build_experiment

FILE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchvision.transforms import v2

class Net(nn.Module):
    def __init__(self, channels=1, width=24):
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, 2)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return self.norm(self.conv(x)).relu().mean((2, 3))

def noise(images, draw):
    return images + 0.1 * draw(images[0].numel()).view(images.shape)

def made(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 1, 8, 8), dtype=torch.uint8, generator=generator)
    return TensorDataset(images, torch.arange(count) % 3)

def sites(data):
    return {"clients": {"oslo": made(9), "rome": made(12, 1)}, "test": made(30, 2)}
"""
OWN: dict[str, Any] = {}
exec(FILE, OWN)
KEYS: dict[str, Any] = {
    **{"rounds": 3, "objective__projector": (16, 8), "encoder__groups": 8, "server__lr": 0.01},
    **{"evaluate__protocols": ["knn"], "engine__threads": 1, "checkpoint__seconds": 0},
}
WORDS = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in KEYS.items()]


def objects(**others: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return {"encoder": OWN["Net"](), "augment": OWN["noise"], **OWN["sites"](None), **others}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> fedssl.Run:
    return fedssl.train(out=tmp_path_factory.mktemp("own") / "run", **objects(), **KEYS)


def test_the_encoder_starts_as_it_was_given_and_its_file_fits_the_module(
    trained: fedssl.Run,
) -> None:
    given = objects()["encoder"]
    with trained._objects.held():
        network = build_experiment(trained.settings).trainer.network
    first = network.get_submodule("towers.0.encoder").state_dict()
    assert all(torch.equal(first[key], value) for key, value in given.state_dict().items())
    images = OWN["made"](4).tensors[0]
    given.load_state_dict(
        load_file(trained.path / "encoder.safetensors")
    )  # its own names, strictly
    with torch.no_grad():
        expected = given.eval()(images / 255)
    torch.testing.assert_close(trained.encoder.embed(images), expected)
    assert {"untrained", "initial"} <= trained.summary.keys()
    assert [client["name"] for client in trained.clients] == ["oslo", "rome"]


def test_files_on_the_command_line_train_what_objects_train(
    trained: fedssl.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also reopened by name, from any folder, and exported without the folder's name."""
    (tmp_path / "mine.py").write_text(f"{FILE}\ntorch.manual_seed(0)\nnet = Net()\n")
    names = {"encoder": "net", "augment": "noise", "data": "sites"}
    own = [f"{key}.name=mine.py:{name}" for key, name in names.items()]
    monkeypatch.chdir(tmp_path)
    words = ["folder", *own, "partition.name=folder", *WORDS]
    assert main(["run", *words, "--out", "run"]) == 0
    monkeypatch.chdir("/")
    assert timeless(tmp_path / "run") == timeless(trained.path)
    run = fedssl.Run(tmp_path / "run")
    images = OWN["made"](4).tensors[0]
    assert torch.equal(run.encoder.embed(images), trained.encoder.embed(images))
    assert main(["run", "--resume", "--out", str(run.path)]) == 0
    assert main(["evaluate", str(run.path)]) == 0
    note = json.loads((run.export("torchscript") / "encoder.pt.json").read_text())
    assert note["encoder"]["name"] == "mine.py:net"


def test_a_class_in_a_file_draws_its_weights_from_the_seed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)

    def weights(seed: int) -> Tensor:
        words = [f"encoder.name={tmp_path}/mine.py:Net", f"seed={seed}", "data.size=8"]
        return build_experiment(config.resolve(config.read_recipe(None), words)).trainer.initial

    assert torch.equal(weights(0), weights(0)) and not torch.equal(weights(0), weights(1))


def test_a_stopped_run_goes_on_with_another_module_of_the_same_kind(
    trained: fedssl.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint holds the weights that the run began with."""
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        before_round(patch, 1, press_ctrl_c)
        with pytest.raises(KeyboardInterrupt, match="resume=True"):
            fedssl.train(out=out, **objects(), **KEYS)
    others = objects()
    torch.manual_seed(1)
    others["encoder"] = OWN["Net"]()
    run = fedssl.train(out=out, resume=True, **others)
    assert timeless(out) == timeless(trained.path)
    assert run.summary["initial"] == trained.summary["initial"]
    with refused("data.name", says="the training images are not those"):
        images = {**others, "clients": {"oslo": OWN["made"](9, 5), "rome": OWN["made"](12, 1)}}
        fedssl.train(out=out, resume=True, **images)


def test_without_the_object_a_run_says_so_in_one_line(
    trained: fedssl.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with refused("encoder.name", "python:Net", "Pass it again with encoder=…"):
        fedssl.load_encoder(trained.path)
    again = fedssl.load_encoder(trained.path, encoder=OWN["Net"])
    images = OWN["made"](4).tensors[0]
    assert torch.equal(again.embed(images), trained.encoder.embed(images))
    for words in (["evaluate", str(trained.path)], ["run", "--resume", "--out", str(trained.path)]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert "data.name=python:clients: " in error and error.count("\n") == 1
    with refused("augment.name", "python:noise", "engine.name=local"):
        fedssl.train(**objects(encoder="tiny"), engine__name="flower", **KEYS)


def test_callbacks_see_each_round_and_add_to_its_metrics(
    trained: fedssl.Run, tmp_path: Path
) -> None:
    seen: list[Tensor] = []
    images = OWN["made"](4).tensors[0]

    def watch(round: fedssl.Round) -> None:
        seen.append(round.encoder.embed(images))
        round.metrics["mine"] = torch.tensor(float(round.number))

    run = fedssl.train(out=tmp_path / "run", callbacks=[watch], **objects(), **KEYS)
    assert [line["mine"] for line in run.lines()] == [1, 2, 3]
    assert torch.equal(seen[-1], trained.encoder.embed(images))  # watching changes nothing
    assert not torch.equal(seen[0], seen[1])

    def fail(round: fedssl.Round) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fedssl.train(out=tmp_path / "failed", callbacks=[fail], **objects(), **KEYS)
    with refused("callbacks"):
        fedssl.train(callbacks=fail, **KEYS)


def test_views_depend_on_each_image_alone(trained: fedssl.Run) -> None:
    """So a merged cohort is the clients one by one, and a resume the same run."""
    state = torch.arange(6) * 1000
    images = OWN["made"](6).tensors[0]
    with plugins.hold_objects({"augment.name": OWN["noise"]}):
        augmentation = build_augmentation("python:noise")
        whole = augmentation.views(images, state, 0)
        parts = [augmentation.views(images[i : i + 1], state[i : i + 1], 0) for i in range(6)]
        assert torch.equal(whole, torch.cat(parts))
        assert not torch.equal(whole, augmentation.views(images, state, 1))
        first, second = augmentation.each((images, images), state)
    assert torch.equal(first, whole) and not torch.equal(second, whole)


def build_augmentation(name: str) -> Any:
    from fedssl.data.augment import Augmentation

    return Augmentation.from_config(config.Augment(name), 1, (8, 8))


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda images: images, "cannot be called with images, draw"),
        (lambda images, draw: images[0], "made (1, 8, 8)"),
        (lambda images, draw: None, "made NoneType"),
        (v2.Identity(), "A transform of torchvision"),
    ],
)
def test_an_augmentation_that_will_not_do(function: Callable[..., Any], says: str) -> None:
    with plugins.hold_objects({"augment.name": function}), refused("augment.name", says=says):
        images = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
        build_augmentation("python:f").views(images, torch.arange(2), 0)


@pytest.mark.parametrize(
    ("encoder", "says"),
    [
        (nn.Flatten(2), "not [1, features]"),
        (nn.Conv2d(3, 4, 3), "cannot encode images of 1 × 8 × 8"),
        (lambda channels: 3, "made int. Return a torch.nn.Module."),
        (7, "is not a callable object"),
    ],
)
def test_an_encoder_that_will_not_do(encoder: Any, says: str, tmp_path: Path) -> None:
    with refused("encoder.name", says=says):
        fedssl.train(out=tmp_path / "run", **objects(encoder=encoder), **KEYS)
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_begin_with_a_function_that_cannot_be_called(
    trained: fedssl.Run, tmp_path: Path
) -> None:
    with refused("augment.name", says="cannot be called"):
        fedssl.train(out=tmp_path / "run", **objects(augment=lambda images: images), **KEYS)
    assert not (tmp_path / "run").exists()
    others = {key: value for key, value in objects().items() if key != "augment"}
    run = fedssl.Run(trained.path, **others)  # evaluation does not need it
    assert run.evaluate("knn").loc["result", "knn_top1"] == trained.summary["knn_top1"]


class Items:
    """A torch data set in all but name, of torchvision's kind."""

    classes = ("cat", "dog")

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def read(clients: Any, test: Any = None, size: int | None = None) -> Any:
    given = {"clients": clients} if test is None else {"clients": clients, "test": test}
    with plugins.hold_objects({"data.name": given}):
        return load_own(Data("python:clients", size=size))


def test_every_kind_of_data_set_gives_the_same_images() -> None:
    images, labels = (t[:4] for t in OWN["made"](4).tensors)
    labels = labels.clamp(max=1)
    pictures = [Image.fromarray(image[0].numpy()) for image in images]
    kinds = {
        "TensorDataset": TensorDataset(images, labels),
        "floats": (images / 255, labels),
        "array": (images[:, 0].numpy(), labels.numpy()),
        "pairs": Items(*zip(pictures, labels.tolist(), strict=True)),
        "mappings": Items(
            *({"image": p, "label": n} for p, n in zip(pictures, labels.tolist(), strict=True))
        ),
        "iterable": iter([(image / 255, n) for image, n in zip(images, labels, strict=True)]),
    }
    for name, kind in kinds.items():
        dataset = read([kind], size=8)
        assert torch.equal(dataset.train.images[0], images), name
        assert dataset.train.labels.tolist() == labels.tolist(), name
        assert dataset.train.clients.tolist() == [0] * 4 and dataset.test is None
    assert read([kinds["pairs"]]).classes == ("cat", "dog")
    plain = read([images, Items(*pictures)])
    assert plain.train.labels is None and plain.train.clients.tolist() == [0] * 4 + [1] * 4
    pool = read(images, test=(images, labels))
    assert pool.train.clients is None and pool.test.labels.tolist() == labels.tolist()
    assert read([images, Items(*pictures)], size=4).train.images[0].shape == (8, 1, 4, 4)
    mixed = read([Items(Image.new("RGB", (9, 8)), *pictures)], size=8)  # gray ones become colored
    assert torch.equal(mixed.train.images[0][1:], images.expand(-1, 3, -1, -1))


@pytest.mark.parametrize(
    ("clients", "says"),
    [
        ([], "there are no clients"),
        ([Items()], "client 0 has no image"),
        ([3], "client 0 is of type int"),
        ({"oslo": Items("a.png")}, "client oslo has an item with a str for its image"),
        ([torch.randn(2, 1, 8, 8)], "client 0 has pixels from"),
        ([torch.zeros(2, 8, 8)], "client 0 has images of the shape 2 × 8 × 8"),
        ([(torch.zeros(2, 1, 8, 8), [1])], "client 0 has 2 images and 1 labels"),
        ([torch.zeros(2, 1, 8, 8), torch.zeros(2, 1, 9, 8)], "different shapes"),
        ([Items(np.zeros((8, 8)), np.zeros((9, 9)))], "different shapes"),
    ],
)
def test_images_that_will_not_do(clients: Any, says: str) -> None:
    with refused("data.size" if "shapes" in says else "data.name", says=says):
        read(clients)


def test_a_function_that_returns_something_else_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def a(data):\n    return [1]\ndef b(data):\n    1 / 0\n")
    for name, says in (("a", "returned list"), ("b", "line 4: ZeroDivisionError")):
        with refused("data.name", says=says):
            load_dataset(Data(f"{tmp_path}/mine.py:{name}"))


def test_a_sweep_is_a_frame_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    keys = {**KEYS, "rounds": [1, 2]}
    frame = fedssl.sweep(out=tmp_path / "sweep", **objects(), seed=[0, 1], **keys)
    assert frame[["rounds", "seed"]].to_numpy().tolist() == [[1, 0], [1, 1], [2, 0], [2, 1]]
    for row in frame.to_dict("records"):
        run = fedssl.Run(row["path"])
        assert (run.summary["rounds"], run.summary["seed"]) == (row["rounds"], row["seed"])
        assert run.summary["knn_top1"] == row["knn_top1"]
    again = fedssl.sweep(out=tmp_path / "sweep", resume=True, **objects())
    assert again.to_dict() == frame.to_dict()
    with refused(None, says="no key has a list"):
        fedssl.sweep(**objects(), **KEYS)
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with refused(None, says="fedssl.sweep needs pandas"):
        fedssl.sweep(**objects(), **keys)
