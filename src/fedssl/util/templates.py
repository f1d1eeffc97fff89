"""Fill in template files: pages, model cards and other long texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

Filters = Mapping[str, Callable[..., Any]]


def load_templates(folder: Path, filters: Filters | None = None) -> Environment:
    """Return the environment of the Jinja templates in a folder; HTML templates escape values.

    ``{{ value | tojson }}`` refuses NaN, which no browser reads.
    """
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(filters or {})
    environment.policies["json.dumps_kwargs"] = {
        "allow_nan": False, "ensure_ascii": False, "separators": (",", ":"),
        "default": vars,  # of a dataclass
    }  # fmt: skip
    return environment
