"""Kinds of images beside usual files: DICOM, more bits or channels, archives and tables."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import refused
from image_folders import gradient, save
from numpy.typing import NDArray
from PIL import Image

from fedssl.config import Data
from fedssl.data import folders
from fedssl.data.dataset import Dataset
from fedssl.data.decode import decode_file
from fedssl.data.folders import describe_unused
from fedssl.data.load import load_dataset
from fedssl.encoder.load import ImageEncoder

SIZE = 6
VALUES = np.arange(SIZE * SIZE, dtype=np.uint16).reshape(SIZE, SIZE) * 100  # 0 to 3500


@pytest.fixture(autouse=True)
def forget_warnings() -> None:
    folders._warn_once.cache_clear()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    return tmp_path / "images"


def load(root: Path, **keys: Any) -> Dataset:
    cache = str(root.parent / "cache")
    return load_dataset(Data("folder", root=str(root), cache=cache, **{"size": SIZE, **keys}))


def pixels(dataset: Dataset) -> NDArray[np.uint8]:
    return dataset.train.images[0][:].numpy()


def picture(value: int, kind: str = "png") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (SIZE, SIZE), (value, 0, 0)).save(file, kind)
    return file.getvalue()


# DICOM


def write_dicom(path: Path, values: NDArray[Any] = VALUES, **fields: Any) -> Path:
    pydicom = pytest.importorskip("pydicom")
    dataset = pydicom.Dataset()
    dataset.file_meta = pydicom.dataset.FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    dataset.file_meta.MediaStorageSOPClassUID = pydicom.uid.CTImageStorage
    dataset.file_meta.MediaStorageSOPInstanceUID = "1.2.3"
    dataset.SOPClassUID, dataset.SOPInstanceUID = pydicom.uid.CTImageStorage, "1.2.3"
    dataset.Rows, dataset.Columns = values.shape[1:3] if values.ndim > 2 else values.shape
    if values.ndim == 3:
        dataset.NumberOfFrames = len(values)
    dataset.SamplesPerPixel = 1
    dataset.PhotometricInterpretation = "MONOCHROME2"
    dataset.BitsAllocated = dataset.BitsStored = 8 * values.itemsize
    dataset.HighBit = dataset.BitsStored - 1
    dataset.PixelRepresentation = int(values.dtype.kind == "i")
    dataset.PixelData = values.tobytes()
    for name, value in fields.items():
        setattr(dataset, name, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset.save_as(path, enforce_file_format=True)
    return path


def scaled(values: NDArray[Any], low: float, high: float) -> NDArray[np.uint8]:
    shares = (values.astype(float) - low) / (high - low)
    return np.clip(255 * shares, 0, 255).round().astype(np.uint8)


@pytest.mark.parametrize(
    ("fields", "window", "expected"),
    [
        ({}, None, scaled(VALUES, 0, 3500)),
        ({}, (1000.0, 800.0), scaled(VALUES, 600, 1400)),
        ({"PhotometricInterpretation": "MONOCHROME1"}, None, 255 - scaled(VALUES, 0, 3500)),
        # Of several windows, the first; DICOM counts from the middle of the lowest value.
        ({"WindowCenter": [1000, 9], "WindowWidth": [801, 9]}, None, scaled(VALUES, 599.5, 1399.5)),
        (
            {"WindowCenter": 1000, "WindowWidth": 800, "VOILUTFunction": "LINEAR_EXACT"},
            None,
            scaled(VALUES, 600, 1400),
        ),
        ({"WindowCenter": 9, "WindowWidth": 9}, (1000.0, 800.0), scaled(VALUES, 600, 1400)),
        # A window is of Hounsfield units, not of stored values.
        (
            {"RescaleSlope": 2, "RescaleIntercept": -1024},
            (976.0, 1600.0),
            scaled(VALUES, 600, 1400),
        ),
    ],
)
def test_dicom_by_window(
    fields: dict[str, Any], window: Any, expected: NDArray[np.uint8], tmp_path: Path
) -> None:
    path = write_dicom(tmp_path / "x.dcm", **fields)
    found = decode_file(path, SIZE, 1, window=window)[0].astype(int)
    assert np.abs(found - expected).max() <= 1  # halves are rounded to either side
    assert len(np.unique(found)) > 5


def test_dicom_in_a_folder(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(root / "a.png", gradient(SIZE, SIZE))
    write_dicom(root / "b.DCM")
    found = load(root, levels=())
    assert np.array_equal(pixels(found)[1], [scaled(VALUES, 0, 3500)] * 3)
    assert "1 images" in capsys.readouterr().err
    load(root, levels=())  # from the cache
    folders._warn_once.cache_clear()
    load(root, levels=())
    assert "data.window=CENTER,WIDTH" in capsys.readouterr().err
    load(root, window=(1000.0, 800.0))
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("frames", "numbers"), [("first", [0]), ("middle", [1]), ("all", [0, 1, 2])]
)
def test_frames_of_one_file(frames: str, numbers: list[int], root: Path) -> None:
    stack = np.stack([np.full((SIZE, SIZE), 10 * k + 5, np.uint8) for k in range(3)])
    write_dicom(root / "a.dcm", stack, WindowCenter=128, WindowWidth=256)
    first, *rest = (Image.fromarray(each) for each in stack)
    first.save(root / "b.tif", save_all=True, append_images=rest)
    found = pixels(load(root, frames=frames))[:, 0, 0, 0]
    assert found.tolist() == [10 * k + 5 for k in numbers] * 2


def test_without_pydicom(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dicom(root / "a.dcm")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused("data.root", says="fedssl[dicom]"):
        load(root)


# Bits and channels


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_sixteen_bits_by_window(
    ending: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.fromarray(VALUES).save(root / f"a.{ending}")
    assert pixels(load(root)).max() == 14  # 3500 of 65535
    assert "more than 8 bits" in capsys.readouterr().err
    found = pixels(load(root, window=(1000.0, 800.0), channels=1))[0]
    assert np.array_equal(found, [scaled(VALUES, 600, 1400)])


def test_floating_point_needs_a_window(root: Path) -> None:
    Image.fromarray(VALUES.astype(np.float32)).save(root / "a.tif")
    with refused("data.root", says="set data.window"):
        load(root)
    found = pixels(load(root, window=(1000.0, 800.0)))[0, 0]
    assert np.array_equal(found, scaled(VALUES, 600, 1400))


@pytest.mark.parametrize("is_last", [True, False])
def test_any_number_of_channels(is_last: bool, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tifffile = pytest.importorskip("tifffile")
    layers = np.stack([np.full((SIZE, SIZE), 257 * k, np.uint16) for k in range(5)])
    tifffile.imwrite(root / "a.tif", layers.transpose(1, 2, 0) if is_last else layers)
    found = pixels(load(root, channels=5))
    assert found.shape == (1, 5, SIZE, SIZE) and found[0, :, 0, 0].tolist() == [0, 1, 2, 3, 4]
    with refused("data.root", says="not 4 channels (data.channels)"):
        load(root, channels=4)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused("data.channels", 5, says="fedssl[tiff]"):
        load(root, channels=5, window=(1.0, 2.0))


# Archives and tables


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def write_table(
    path: Path, values: list[int], labels: list[Any] | None = None, names: list[str] | None = None
) -> None:
    """A Parquet or Arrow file as Hugging Face writes it."""
    arrow = pytest.importorskip("pyarrow")
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": picture(value), "path": f"{value}.png"} for value in values]
    columns: dict[str, Any] = {"id": [str(value).encode() for value in values], "image": images}
    if labels is not None:
        columns["label"] = labels
    table = arrow.table(columns)
    if names:
        note = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(note)})
    if path.suffix == ".parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(table, path, row_group_size=2)
    else:
        with arrow.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)


def reds(dataset: Dataset) -> list[int]:
    return pixels(dataset)[:, 0, 0, 0].tolist()


def test_webdataset(root: Path) -> None:
    for split, start in (("train", 0), ("test", 100)):
        for shard in range(2):
            first = start + 10 * shard
            write_tar(
                root / f"{split}-{shard:05}.tar",
                {
                    "./a/1.0.png": picture(first),
                    "./a/1.cls": b"1",
                    "b.seg.png": picture(first + 1),
                    "b.json": json.dumps({"label": "cat"}).encode(),
                    "note.txt": b"no image",
                },
            )
    found = load(root)
    assert reds(found) == [0, 1, 10, 11]
    assert found.test is not None and found.test.images[0][:, 0, 0, 0].tolist() == [
        100,
        101,
        110,
        111,
    ]
    assert found.classes == ("1", "cat") and found.train.full_labels.tolist() == [0, 1, 0, 1]
    clients = load(root, levels=("client",))
    assert clients.clients == ("test-00000", "test-00001", "train-00000", "train-00001")


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_tables(ending: str, root: Path) -> None:
    """Five rows in groups of two; each site has a file."""
    for site, first in (("leeds", 0), ("oslo", 50)):
        values = [first + k for k in range(5)]
        write_table(root / f"train/{site}.{ending}", values, [0, 1, 1, 0, 0], ["no", "yes"])
        write_table(root / f"test/{site}.{ending}", values[:1], [1], ["no", "yes"])
    write_table(root / "train/cache-123.arrow", [200])  # an intermediate result
    found = load(root, levels=("client",))
    assert reds(found) == [*range(5), *range(50, 55)]
    assert found.classes == ("no", "yes")
    assert found.train.full_labels.tolist() == [0, 1, 1, 0, 0] * 2
    assert found.clients == ("leeds", "oslo")
    assert found.train.clients is not None and found.train.clients.tolist() == [0] * 5 + [1] * 5
    assert load(root).clients == ()


def test_rows_without_image_or_label(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrow = pytest.importorskip("pyarrow.parquet")
    write_table(root / "a.parquet", [1, 2], [0, -1])
    found = load(root)
    assert reds(found) == [1, 2] and found.classes == ()
    assert "1 of 2 images have none" in capsys.readouterr().err
    import pyarrow

    arrow.write_table(pyarrow.table({"image": [picture(3), None]}), root / "b.parquet")
    with refused("data.corrupt", says="b.parquet/1 (no bytes in the column image)"):
        load(root)
    assert reds(load(root, corrupt="skip")) == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.tar", b"x" * 2000, "cannot be read"),
        ("a.parquet", b"x" * 2000, "a.parquet cannot be read"),
        ("a.arrow", b"x" * 2000, "a.arrow cannot be read"),
    ],
)
def test_damaged_files_with_many_images(name: str, content: bytes, says: str, root: Path) -> None:
    (root / name).write_bytes(content)
    with refused("data.root", says=says):
        load(root)


def test_a_table_without_images(root: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.table({"age": [1, 2]}), root / "a.parquet")
    with refused("data.root", says="a.parquet has no column of encoded image files"):
        load(root)


def test_without_pyarrow(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(root / "a.parquet", [1])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with refused("data.root", says="fedssl[frames]"):
        load(root)


def test_dicom_in_an_archive(root: Path) -> None:
    content = write_dicom(root.parent / "x.dcm").read_bytes()
    write_tar(root / "a.tar", {"1.dcm": content})
    assert np.array_equal(pixels(load(root))[0, 0], scaled(VALUES, 0, 3500))


def test_files_that_are_not_read_are_counted(root: Path) -> None:
    save(root / "a/x.png", gradient(SIZE, SIZE))
    write_tar(root / "a/b.tar", {"1.png": picture(1)})
    for name in ("a/1.nii", "2.nii", "scan", ".hidden"):
        (root / name).write_text("")
    (line,) = describe_unused(Data("folder", root=str(root)))
    assert "1 without an ending, 2 .nii, 1 .tar" in line
    (root / "a/x.png").unlink()
    (line,) = describe_unused(Data("folder", root=str(root)))
    assert ".tar" not in line
    assert torch.equal(load(root).train.images[0][:, 0, 0, 0], torch.tensor([1]))


def test_embeddings_are_of_the_same_values(tmp_path: Path) -> None:
    Image.fromarray(VALUES).save(tmp_path / "a.png")
    note = {"features": 1, "channels": [1], "size": [SIZE, SIZE], "window": [1000, 800]}
    encoder = ImageEncoder(torch.nn.Flatten(), note, 0)
    for image in (tmp_path / "a.png", Image.open(tmp_path / "a.png")):
        assert np.array_equal(encoder.decode(image)[0], scaled(VALUES, 600, 1400))
