from __future__ import annotations

from pathlib import Path

import pytest
from image_folders import save
from PIL import Image


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSSL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of five images."""
    for i in range(5):
        save(tmp_path / f"root/{i}.png", Image.new("RGB", (8, 8), (i, i, i)))
    return tmp_path / "root"
