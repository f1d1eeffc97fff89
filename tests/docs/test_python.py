"""Python as users meet it: the notebook, the docstrings' examples, the reference and the names."""

from __future__ import annotations

import contextlib
import doctest
import inspect
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import fedssl
from fedssl.encoder.load import ImageEncoder

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.ipynb"
PUBLIC = [name for name in fedssl.__all__ if name != "__version__"]
LARGEST_PICTURE = 60_000 * 4 // 3  # bytes in base64


def test_the_notebook_runs(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    cells = json.loads(QUICKSTART.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    with contextlib.chdir(tmp_path), contextlib.redirect_stdout(io.StringIO()):
        for number, cell in enumerate(cells):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    assert names["run"].finished and len(names["embeddings"]) == 400
    for cell in cells:
        for output in cell.get("outputs", []):
            assert len("".join(output["data"].get("image/png", ""))) < LARGEST_PICTURE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which examples run: it has ``runs/first`` and two images."""
    path = tmp_path_factory.mktemp("examples")
    with contextlib.chdir(path):
        fedssl.train("default", "runs/first", rounds=2, evaluate__baselines=[])
    for name in ("a.png", "b.jpg"):
        Image.new("RGB", (20, 30), "red").save(path / name)
    return path


@pytest.mark.parametrize("name", [*PUBLIC, "ImageEncoder"])
def test_docstrings_show_a_use_that_runs(name: str, folder: Path) -> None:
    thing = ImageEncoder if name == "ImageEncoder" else getattr(fedssl, name)
    examples = doctest.DocTestFinder().find(thing, name, globs={"fedssl": fedssl})
    assert any(example.examples for example in examples if example.name == name)
    runner, printed = doctest.DocTestRunner(), io.StringIO()
    with contextlib.chdir(folder):
        for example in examples:
            runner.run(example, out=printed.write)
    assert not runner.failures, printed.getvalue()


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^::: (\S+)$", page, re.MULTILINE))
    for name in PUBLIC:
        thing = getattr(fedssl, name)
        assert f"{thing.__module__}.{name}" in listed, name
    for line in listed:
        module, _, name = line.rpartition(".")
        assert inspect.getdoc(getattr(__import__(module, fromlist=[name]), name)), line


def test_names_are_listed_before_they_are_imported_and_stay_functions() -> None:
    code = (
        "import sys, fedssl\n"
        "names = dir(fedssl)\n"
        "assert not {'torch', 'numpy', 'yaml'} & set(sys.modules)\n"
        "import fedssl.evaluate.knn\n"  # the package called like the function
        "assert callable(fedssl.evaluate) and fedssl.evaluate.__module__ == 'fedssl.api'\n"
        "print(*names)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert {"train", "Run", "load_encoder", "sweep", "evaluate", "__version__"} <= {
        *done.stdout.split()
    }
