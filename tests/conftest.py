from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# As the command line does, before torch: threads that wait must not spin beside other workers.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hypothesis
import pytest
import torch

from fedssl import report
from fedssl.config import recipe_files
from fedssl.models import vit
from fedssl.objectives import mae
from fedssl.util import status

# A busy machine is slow, and no test of properties is about time.
hypothesis.settings.register_profile("fedssl", deadline=None)
hypothesis.settings.load_profile("fedssl")
sys.path.insert(0, str(Path(__file__).parent))
PLAIN = Path(__file__).parent / "plain.yaml"
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run"),
)


@pytest.fixture(autouse=True, scope="session")
def plain_recipe() -> Iterator[None]:
    """Tests that name no recipe start from explicit settings, which no part replaces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe_files, "DEFAULT", str(PLAIN))
        yield


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Two workers on two cores: more threads, of a test before, only get in each other's way."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_page(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's page takes two seconds, which only tests of it are worth."""
    if request.node.get_closest_marker("page") is None:
        monkeypatch.setattr(report, "write_page_or_warn", lambda run: None)


@pytest.fixture(autouse=True)
def state_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs with noise leave their record of privacy in no user's home."""
    monkeypatch.setenv("FEDSSL_STATE", str(tmp_path_factory.getbasetemp() / "state"))


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is slow: no line about it comes between those that a test expects."""
    monkeypatch.setattr(status, "SILENCE", math.inf)
    monkeypatch.setattr(status, "LIVE_AFTER", math.inf)


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of a transformer, and one of MAE's decoder: whole rounds need no more."""
    monkeypatch.setattr(vit, "LAYERS", 2)
    monkeypatch.setattr(mae, "LAYERS", 1)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's Chromium; one for all tests of a worker, since Playwright takes no second."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM.exists():
        pytest.skip(f"needs {CHROMIUM}")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield opened
        opened.close()
