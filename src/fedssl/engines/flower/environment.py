"""Prepare this process for Flower: no telemetry, no update check, and little output."""

from __future__ import annotations

import logging
import os
import warnings

from fedssl.util.errors import UserError

SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def silence_flower() -> None:
    """Turn off telemetry and downloads unless the user turned them on, and hide routine logs."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="flwr")


def require_flower() -> None:
    """Raise a :class:`UserError` if Flower is not installed."""
    silence_flower()
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise UserError(
            "Flower is not installed",
            key="engine.name",
            value="flower",
            fix="Run: pip install 'fedssl[flower]'",
        ) from None
