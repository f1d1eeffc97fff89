from __future__ import annotations

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

# A busy machine is slow, and no test of properties is about time.
hypothesis.settings.register_profile("fedssl", deadline=None)
hypothesis.settings.load_profile("fedssl")
sys.path.insert(0, str(Path(__file__).parent))
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run"),
)

# Tests and cases that `make test` leaves to `make slow`: another test covers the same feature, or
# another case does. A name that no longer exists only makes its test run everywhere.
SLOW = {
    "test_simulation.py::test_runs_on_ray_are_local_ones": (),
    "test_docs.py::test_what_a_page_shows_runs": ("privacy.md", "reproduce.md", "algorithms.md"),
    "test_page.py::test_a_hundred_thousand_rounds": (),
    "test_page.py::test_fifty_runs": (),
    "test_compiled.py::test_compiled_step_equals_the_plain_one": (
        *("byol-cpu", "moco-cpu", "simclr-cpu", "swav-cpu", "rotation-cpu"),
    ),
    "test_compiled.py::test_compiled_ccl": ("words1-cpu",),
    "test_bf16_weights.py::test_compiled_training_in_bf16": ("byol",),
    "test_mae.py::test_compiled_is_plain": ("cpu",),
    "test_run.py::test_compiled_runs_in_one_process_do_not_use_up_torchs_patience": (),
    "test_console.py::test_a_run_needs_nobody_who_reads": (">&- 2>&-", "2>/dev/full"),
    "test_console.py::test_a_full_disk_under_stdout_costs_no_report": ("1",),
    "test_decssl.py::test_label_skew_costs_self_supervision_less_than_supervision": (),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        test, _, case = item.name.partition("[")
        cases = SLOW.get(f"{item.path.name}::{test}")
        if cases == () or (cases and case.removesuffix("]") in cases):
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Two workers on two cores: more threads, of a test before, only get in each other's way."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_page(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's page takes two seconds, which only tests of it are worth."""
    if request.node.get_closest_marker("page") is None:
        monkeypatch.setattr(report, "write_page_or_warn", lambda run: None)


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
