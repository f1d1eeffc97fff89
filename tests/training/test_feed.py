"""Images that are streamed from files give the numbers of images in memory."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    engine_of,
    groups_of,
    made_split,
    quick,
    refused,
    relative,
    settings,
    step,
    train,
    without_compiler,
)
from image_folders import save_noise
from torch import Tensor

import fedssl
from fedssl.algorithms.ccl import CCL
from fedssl.config import Data, build
from fedssl.data import stored
from fedssl.data.dataset import Census, Dataset, Split
from fedssl.data.heterogeneity import alter_training_images
from fedssl.data.load import convert_channels, load_dataset
from fedssl.data.stored import ChangedImages, StoredArray, place_images
from fedssl.runs.metrics import read
from fedssl.training import compiled
from fedssl.training.feed import AHEAD, Feed
from fedssl.training.pool import TrainerPool

SIZES = (9, 12, 10)
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU"))
EPOCHS = "algorithm.name=fedavg algorithm.local_epochs=2 algorithm.batch=4 encoder.norm=batch"
HEADS = "objective.projector=32,16"
MOCO = f"objective.name=moco {HEADS} objective.queue=20"
DCCO = "algorithm.name=dcco"
SIMCLR = f"{EPOCHS} objective.name=simclr {HEADS}"
SWAV = f"{EPOCHS} objective.name=swav {HEADS} augment.small=2 augment.small_size=4"
CCL_WORDS = f"{EPOCHS} {MOCO} algorithm.name=ccl algorithm.neighbours=3 algorithm.features=9"
CASES = [
    DCCO,
    f"{DCCO} engine.chunk=22",
    f"{DCCO} engine.merge=off",
    SIMCLR,
    SWAV,
    CCL_WORDS,
    f"{EPOCHS} objective.name=deepcluster {HEADS} objective.clusters=3",
    f"{EPOCHS} objective.name=supervised",
    f"{EPOCHS} {MOCO} algorithm.name=ditto algorithm.lambda=0.5",
    f"{EPOCHS} {MOCO} algorithm.name=featarc algorithm.clusters=1",
    f"{EPOCHS} objective.name=simclr {HEADS} algorithm.name=fedca algorithm.dictionary=5 "
    "algorithm.align=0 algorithm.public=0",
]


def write(path: Path, images: Tensor) -> StoredArray:
    np.save(path, images.numpy())
    return StoredArray(path)


def on_disk(split: Split, folder: Path) -> Split:
    """The same split, with images in files."""
    images = (write(folder / f"{k}.npy", x[:]) for k, x in enumerate(split.images))
    return Split(tuple(images), split.labels, sizes=split.sizes)


def whole(split: Split) -> Split:
    """The same images in frames that they do not fill."""
    images = split.images[0][:].clone()
    sizes = torch.stack((torch.full((len(images),), 6), 3 + torch.arange(len(images)) % 6), 1)
    images[:, :, 6:] = 0
    for image, (_, width) in zip(images, sizes.tolist(), strict=True):
        image[:, :, width:] = 0
    return Split((images,), split.labels, sizes=(sizes,))


def trained(
    words: str, split: Split, compiles: bool = False, device: str = "cpu", pool: int = 0
) -> Tensor:
    given = settings("client.lr=0.05", "augment.name=dcco", *words.split())
    groups = groups_of(*SIZES)
    engine, server = engine_of(given, split, groups, device)
    engine.trainer.compiles = compiles
    assert split.labels is not None
    engine.trainer.census = Census(split.labels, groups, 4)  # CCL encodes more for it
    engine.pool = TrainerPool(engine.trainer, pool) if pool else None
    return train(engine, server, 3)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("words", quick(CASES, DCCO, SIMCLR, CCL_WORDS))
def test_streamed_images_train_as_images_in_memory(
    words: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CCL, "secret", lambda *_: np.random.default_rng(1))
    split = made_split()
    expected = trained(words, split, device=device)
    if device == "cpu":
        assert torch.equal(trained(words, on_disk(split, tmp_path)), expected)
        assert torch.equal(trained(f"{words} data.stream=on", split), expected)
    else:
        assert relative(trained(words, on_disk(split, tmp_path), device=device), expected) < 1e-9


@pytest.mark.parametrize("words", [DCCO, SIMCLR])
def test_streamed_whole_images_have_their_sizes(words: str, tmp_path: Path) -> None:
    split, words = whole(made_split()), f"{words} augment.size=5"
    expected = trained(words, split)
    assert torch.equal(trained(words, on_disk(split, tmp_path)), expected)
    full = Split(split.images, split.labels)
    assert relative(trained(words, full), expected) > 1e-6


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("words", quick([SIMCLR, SWAV], SIMCLR))
def test_compiled_steps_take_streamed_images(
    words: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        without_compiler(monkeypatch)
    split = made_split()
    expected = trained(words, split, device=device)
    fast = trained(words, on_disk(split, tmp_path), compiles=True, device=device)
    assert relative(fast, expected) < 1e-9


def test_clients_side_by_side_take_streamed_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_compiler(monkeypatch)
    monkeypatch.setattr(compiled, "RARE", 1)
    split = made_split()
    expected = trained(SIMCLR, split, compiles=True, pool=2)
    streamed = on_disk(split, tmp_path)
    assert torch.equal(trained(SIMCLR, streamed, compiles=True, pool=2), expected)


def test_compiled_passes_take_streamed_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_compiler(monkeypatch)
    weights = []
    for split, is_compiled in ((made_split(), False), (on_disk(made_split(), tmp_path), True)):
        engine, server = engine_of(settings(), split, groups_of(8, 8, 8))
        if is_compiled:
            engine.trainer.compile_passes()
        weights.append(train(engine, server, 2))
    assert torch.equal(*weights)


def test_the_next_steps_are_read_ahead_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, server = engine_of(
        settings(*SIMCLR.split()), on_disk(made_split(), tmp_path), groups_of(20)
    )
    read, threads, real = list[int](), set[int](), StoredArray.read
    begun: list[int] = []

    def watch(self: StoredArray, numbers: Any, out: Tensor) -> None:
        threads.add(threading.get_ident())
        read.extend(numbers)
        real(self, numbers, out)

    def encode(*arguments: Any) -> Any:
        begun.append(len(engine.trainer.feed._ahead))
        return encode_batch(*arguments)

    encode_batch = engine.trainer.encode_batch
    monkeypatch.setattr(StoredArray, "read", watch)
    monkeypatch.setattr(engine.trainer, "encode_batch", encode)
    step(engine, server, 0)
    assert sorted(read) == sorted(list(range(20)) * 2)  # two epochs, each image once an epoch
    assert threading.get_ident() not in threads
    # Of each step its own images and those of the next two, as long as there are any.
    assert begun == [1 + AHEAD] * 8 + [2, 1]
    assert not engine.trainer.feed._ahead


def test_a_run_on_streamed_images_gives_the_same_numbers(tmp_path: Path) -> None:
    """From files to evaluation; images are stored in colour, and evaluated as squares."""
    save_noise(tmp_path / "photos", "train/a", "train/b", "test/a", "test/b")
    results = []
    for stream in ("off", "on"):
        keys = {"data__size": 16, "augment__size": 8, "partition__clients": 4, "rounds": 2}
        keys |= {"data__root": str(tmp_path / "photos"), "data__cache": str(tmp_path)}
        keys |= {"encoder__name": "tiny", "evaluate__protocols": ["knn", "linear"]}
        run = fedssl.train("folder", tmp_path / stream, data__stream=stream, **keys)
        losses = [line["loss"] for line in read(tmp_path / stream)]
        results.append([*losses, run.summary["linear_top1"]])
    assert results[0] == results[1]


# ---- files


def test_stored_images_are_indexed_like_a_tensor(tmp_path: Path) -> None:
    images = torch.randint(0, 256, (60, 2, 4, 3), dtype=torch.uint8)
    found = write(tmp_path / "x.npy", images)
    assert found.shape == images.shape and len(found) == 60
    some = torch.tensor([59, 0, 7, 7] * 5)
    for index in (slice(None), slice(3, 50), slice(2, 60, 7), slice(5, 5), some, some.numpy()):
        assert torch.equal(found[index], images[index]), index


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    found = write(tmp_path / "x.npy", torch.zeros(9, 1, 4, 4, dtype=torch.uint8))
    with (tmp_path / "x.npy").open("r+b") as file:
        file.truncate(200)
    with pytest.raises(OSError, match="cut short"):
        found[:]
    with pytest.raises(ValueError, match="cut short"):
        StoredArray(tmp_path / "x.npy")


def test_images_are_streamed_if_they_are_large_or_if_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "x.npy", torch.zeros(10, 1, 10, 10, dtype=torch.uint8))
    for free, stream, streams in (
        (1999, "auto", True),
        (2000, "auto", False),
        (10, "off", False),
        (10**9, "on", True),
    ):
        monkeypatch.setattr(stored, "find_free_memory", lambda free=free: free)
        assert isinstance(place_images(file, stream), StoredArray) == streams


def test_images_are_streamed_to_a_gpu_that_has_little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    split, gpu = made_split(), torch.device("cuda")
    size = split.images[0].shape.numel()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * size - 1, 0))
    feed = Feed(split, gpu, "auto", 2)
    assert feed.streams and feed.numbers_on is None
    assert not Feed(split, torch.device("cpu"), "auto", 2).streams


def test_streamed_images_are_changed_when_they_are_used(tmp_path: Path) -> None:
    images = torch.randint(0, 256, (20, 3, 4, 4), dtype=torch.uint8)
    grey = convert_channels(Dataset("x", Split((images,)), None), [1]).train.images[0]
    dataset = Dataset("x", Split((write(tmp_path / "x.npy", images),)), None)
    changed = convert_channels(dataset, [1]).train.images[0]
    assert isinstance(changed, ChangedImages) and changed.shape == (20, 1, 4, 4)
    assert torch.equal(changed[torch.tensor([3, 9])], grey[[3, 9]])
    params = build({"partition": {"name": "dirichlet", "source": "style"}}).partition
    with refused("partition.source", "style"):
        alter_training_images(params, dataset, 0)


def test_halves_of_streamed_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load_dataset(Data("digits", size=8, halves=True)).train.images
    images = load_dataset(Data("digits", size=8)).train.images[0]
    dataset = Dataset("digits", Split((write(tmp_path / "x.npy", images[:]),)), None)
    monkeypatch.setitem(load_dataset.__globals__["LOADERS"], "digits", lambda data: dataset)
    halves = load_dataset(Data("digits", size=8, halves=True)).train.images
    for half, expected in zip(halves, plain, strict=True):
        assert torch.equal(half[:], expected)


# ---- memory

LARGE = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import numpy as np
from helpers import engine_of, groups_of, settings, train
from fedssl.data.dataset import Split
from fedssl.data.stored import StoredArray, place_images

shape = (50_000, 3, 256, 256)
with Path(sys.argv[1]).open("wb") as file:
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    file.truncate(file.tell() + int(np.prod(shape, dtype=np.int64)))
given = settings("objective.name=simclr", "objective.projector=32,16", "augment.size=16",
    "algorithm.name=fedavg", "algorithm.local_steps=4", "algorithm.batch=16")

def run(images):
    train(*engine_of(given, Split((images,)), groups_of(25_000, 25_000)), 1)

run(StoredArray(Path(sys.argv[1])))  # starts threads, and loads libraries
status = Path("/proc/self/status").read_text().split()
limit = int(status[status.index("VmSize:") + 1]) * 1024 + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
images = place_images(StoredArray(Path(sys.argv[1])), "auto")
assert isinstance(images, StoredArray)
run(images)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_a_set_larger_than_memory_trains_in_little(tmp_path: Path) -> None:
    """9.8 GB of images, in a sparse file, with 1 GB of memory."""
    tests = str(Path(__file__).resolve().parent.parent)
    command = [sys.executable, "-c", LARGE, str(tmp_path / "x.npy"), tests]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
