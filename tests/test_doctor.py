"""``fedssl doctor``."""

from __future__ import annotations

import re
import time
import tomllib
from pathlib import Path

import pytest

from fedssl import doctor
from fedssl.cli import main


def test_it_says_what_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDSSL_CACHE", str(tmp_path))
    (tmp_path / "downloads" / "cifar10").mkdir(parents=True)
    start = time.process_time()
    assert main(["doctor"]) == 0
    assert time.process_time() - start < 5
    shown = capfd.readouterr()
    assert not shown.err
    for line in (
        r"  python +3\.\d+",
        r"  torch +2\.",
        r"  cpu +\d+ cores",
        r"  digits +found",
        rf"  cifar10 +found +{tmp_path}/downloads/cifar10",
        rf"  cifar100 +not here +fetched to {tmp_path}/downloads/cifar100 .*data\.root",
        r"  this folder +[\d.]+ \wB free",
        rf"  FEDSSL_CACHE +[\d.]+ \wB free +{tmp_path}",
    ):
        assert re.search(f"^{line}", shown.out, re.MULTILINE), line
    # One table: the second column begins at the same place everywhere.
    rows = [line for line in shown.out.splitlines() if line.startswith("  ")]
    assert len({re.match(r"  .*?\S(  +)(?=\S)", row).end() for row in rows}) == 1  # type: ignore[union-attr]


def test_what_is_missing_is_named_with_the_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor._version
    gone = ("mlflow", "onnx")
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in gone else real(name))
    shown = doctor.report()
    assert re.search(r"mlflow +missing +log=mlflow; pip install 'fedssl\[mlflow\]'", shown)
    assert re.search(r"onnx +missing +.*'fedssl\[export\]'", shown)
    assert shown.splitlines()[-1].startswith("missing: onnx, mlflow")


def test_it_knows_every_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    brought = {
        re.split(r"[\[<>=]", package)[0]: extra
        for extra, packages in project["optional-dependencies"].items()
        for package in packages
        if extra not in ("dev", "docs")
    }
    brought.pop("torchvision", None)  # comes with fedssl itself
    assert {name: extra for name, (extra, _) in doctor.EXTRAS.items()} == brought
