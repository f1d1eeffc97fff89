from __future__ import annotations

from collections.abc import Callable

import pytest

from fedssl.cli import main


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Call the command line with these words; return the one line with which it refuses them."""

    def refuse(*words: object) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        shown = [line for line in capsys.readouterr().err.splitlines() if "decoding" not in line]
        assert len(shown) == 1, shown
        return shown[0].removeprefix("fedssl: ")

    return refuse
