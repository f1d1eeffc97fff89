"""``fedssl doctor``."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

from fedssl.cli import main
from fedssl.config import plugins
from fedssl.contrib import doctor


def test_the_report_of_this_machine(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("FEDSSL_CACHE", str(tmp_path))
    (tmp_path / "downloads" / "cifar10").mkdir(parents=True)
    start = time.process_time()
    assert main(["doctor"]) == 0
    assert time.process_time() - start < 5
    shown = capfd.readouterr()
    assert shown.err == "looking at what is installed\n"
    for line in (
        r"  python +3\.\d+",
        r"  torch +2\.",
        r"  cpu +\d+ cores",
        r"  digits +found",
        rf"  cifar10 +found +{tmp_path}/downloads/cifar10",
        rf"  cifar100 +not here +downloaded to {tmp_path}/downloads/cifar100 .*data\.root",
        r"  this folder +[\d.]+ \wB free",
        rf"  FEDSSL_CACHE +[\d.]+ \wB free +{tmp_path}",
    ):
        assert re.search(f"^{line}", shown.out, re.MULTILINE), line
    # One table: the second column begins at the same place everywhere.
    rows = [line for line in shown.out.splitlines() if line.startswith("  ")]
    assert len({re.match(r"  .*?\S(  +)(?=\S)", row).end() for row in rows}) == 1


def test_missing_packages_with_their_extra(monkeypatch):
    gone = ("mlflow", "onnx")
    monkeypatch.setattr(doctor, "_find_version", lambda name: None if name in gone else "1.0")
    shown = doctor.report()
    assert re.search(r"mlflow +missing +log=mlflow; pip install 'fedssl\[mlflow\]'", shown)
    assert re.search(r"onnx +missing +.*'fedssl\[export\]'", shown)
    assert shown.splitlines()[-1].startswith("missing: onnx, mlflow")


def test_without_torch():
    code = "import sys; sys.modules['torch'] = None; from fedssl.cli import main; main(['doctor'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.search(r"^  torch +missing +pip install torch", done.stdout, re.MULTILINE)
    assert re.search(r"^missing: torch\b", done.stdout.splitlines()[-1])


def test_plugins_and_whether_they_are_used(monkeypatch):
    def point(package):
        return SimpleNamespace(dist=SimpleNamespace(name=package), value="")

    offers = {"fedavg": [point("a")], "new": [point("a")], "two": [point("b"), point("a")]}
    monkeypatch.setattr(
        plugins,
        "list_entry_points",
        lambda section: offers if section == "algorithm" else {},
    )
    assert list(doctor._list_plugins()) == [
        ("fedavg", "algorithm", "offered by a; not used, because fedssl has this name itself"),
        ("new", "algorithm", "offered by a"),
        ("two", "algorithm", "offered by a and b; not used, because the name is ambiguous"),
    ]


def test_every_extra_is_listed():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    brought = {
        re.split(r"[\[<>=]", package)[0]: extra
        for extra, packages in project["optional-dependencies"].items()
        for package in packages
        if extra not in ("dev", "docs")
    }
    brought.pop("torchvision", None)  # comes with fedssl itself
    assert {name: extra for name, (extra, _) in doctor.EXTRAS.items()} == brought
