"""Federated self-supervised learning of image encoders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedssl.api import Run as Run
    from fedssl.api import train as train
    from fedssl.encoder.load import load_encoder as load_encoder

__version__ = "0.3.0"
__all__ = ["Run", "__version__", "load_encoder", "train"]
_PLACES = {
    "train": "fedssl.api",
    "load_encoder": "fedssl.encoder.load",
    "Run": "fedssl.api",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing fedssl stays cheap."""
    if name not in _PLACES:
        raise AttributeError(f"module 'fedssl' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_PLACES[name]), name)
