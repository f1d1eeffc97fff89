"""The user's own files: modules of the app at the sites, files of the run's folder afterwards."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from fedssl import config as configuration
from fedssl.config import Config, plugins
from fedssl.runs.folder import PACKAGE
from fedssl.util.files import write_text


def ship(config: Config) -> tuple[Config, dict[str, str]]:
    """The user's own files as modules of the app, and the names they have so.

    The sites get them with the app; no path of this machine means anything there.
    """
    modules: dict[str, str] = {}

    def moved(name: str) -> str:
        if not plugins.is_file(name):
            return name
        path, _, own = name.rpartition(":")
        return f"{PACKAGE}.{modules.setdefault(path, f'own_{len(modules) + 1}')}:{own}"

    shipped = _renamed(config, moved)
    texts = {
        f"{PACKAGE}/{module}.py": Path(path).read_text(encoding="utf-8")
        for path, module in modules.items()
    }
    return shipped, texts


def keep(config: Config, out: Path) -> tuple[Config, dict[Path, str]]:
    """The app's modules of the user's own as files of the run's folder, and their names so.

    Only while Flower runs the app there are modules; the run is judged and reported on later.
    """
    texts: dict[Path, str] = {}

    def moved(name: str) -> str:
        module, _, own = name.rpartition(":")
        if not module.startswith(f"{PACKAGE}."):
            return name
        path = out.resolve() / f"{module.removeprefix(f'{PACKAGE}.')}.py"
        texts[path] = plugins.read_source(module)
        return f"{path}:{own}"

    return _renamed(config, moved), texts


def bring_back(out: Path, texts: Mapping[Path, str]) -> None:
    """What ``keep`` found as files, and their names in the configuration of a run that goes on.

    It may have been started elsewhere, or by a version that left them as modules of the app.
    """
    for path, text in texts.items():
        write_text(path, text)
    known = out / "config.yaml"
    if texts and known.is_file():
        before = configuration.read_yaml(known)
        now = _renewed(before, out.resolve())
        if now != before:
            write_text(known, yaml.safe_dump(now, sort_keys=False, allow_unicode=True))


def _renewed(tree: Any, out: Path) -> Any:
    if isinstance(tree, dict):
        return {key: _renewed(value, out) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_renewed(value, out) for value in tree]
    named = rf"(?:.*/|{PACKAGE}\.)(own_\d+)(?:\.py)?:(.+)"
    found = re.fullmatch(named, tree) if isinstance(tree, str) else None
    return f"{out}/{found[1]}.py:{found[2]}" if found else tree


def _renamed(config: Config, moved: Callable[[str], str]) -> Config:
    """The same with other names of what may be the user's own."""
    sections: dict[str, Any] = {}
    for section in ("algorithm", "objective"):
        params = getattr(config, section)
        sections[section] = dataclasses.replace(params, name=moved(params.name))
    sections["evaluate"] = configuration.rename_protocols(config.evaluate, moved)
    return dataclasses.replace(config, **sections)
