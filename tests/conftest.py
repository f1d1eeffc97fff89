import sys
from pathlib import Path

import pytest
import torch

from fedssl import report

sys.path.insert(0, str(Path(__file__).parent))
# Two workers on two cores: more threads only get in each other's way.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_page(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's page takes two seconds, which only tests of it are worth."""
    if request.node.get_closest_marker("page") is None:
        monkeypatch.setattr(report, "leave", lambda run: None)
