"""Federated self-supervised learning of image encoders."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedssl.api import Round as Round
    from fedssl.api import Run as Run
    from fedssl.api import evaluate as evaluate
    from fedssl.api import sweep as sweep
    from fedssl.api import train as train
    from fedssl.encoder.load import load_encoder as load_encoder

__version__ = "0.3.0"
_PLACES = {
    "train": "fedssl.api",
    "sweep": "fedssl.api",
    "evaluate": "fedssl.api",
    "load_encoder": "fedssl.encoder.load",
    "Run": "fedssl.api",
    "Round": "fedssl.api",
}
__all__ = ["Round", "Run", "__version__", "evaluate", "load_encoder", "sweep", "train"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing fedssl stays cheap."""
    if name not in _PLACES:
        raise AttributeError(f"module 'fedssl' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    """List the public names, which are not imported yet."""
    return sorted(__all__)


class _Package(types.ModuleType):
    """Keeps ``fedssl.evaluate`` a function: importing the package ``fedssl/evaluate`` sets it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _PLACES or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
