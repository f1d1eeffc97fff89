"""The names of a deployed run: its app, its list of sites, and the command that starts it."""

from __future__ import annotations

import shlex
from pathlib import Path

PACKAGE = "fedssl_app"
SITES = "sites.json"
CONNECTION = "fedssl"  # the server's name in Flower's config.toml


def format_command(out: Path, key: str) -> str:
    """Format the command that starts the app whose run is in ``out``, with a ``--run-config``."""
    app = out.resolve().parent
    named = shlex.quote(str(app)) if (app / PACKAGE).is_dir() else "APP"
    return f"flwr run {named} {CONNECTION} --stream --run-config {shlex.quote(key)}"
