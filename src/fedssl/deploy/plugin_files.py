"""Carry the user's plug-in files: to the sites as modules, and into the run's folder as files."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fedssl import config as configuration
from fedssl.config import Config, plugins
from fedssl.runs.folder import PACKAGE
from fedssl.runs.reader import read_keys
from fedssl.util.files import write_text
from fedssl.util.seals import seal_text


def pack_plugins(config: Config) -> tuple[Config, dict[str, str]]:
    """Turn plug-in files into modules of the app; return the new names and the files' texts.

    Sites receive the modules with the app. A path of this machine means nothing to them.
    """
    modules: dict[str, str] = {}

    def rename(name: str) -> str:
        if not plugins.is_file(name):
            return name
        path, _, member = name.rpartition(":")
        return f"{PACKAGE}.{modules.setdefault(path, f'own_{len(modules) + 1}')}:{member}"

    packed = configuration.rename_plugins(config, rename)
    texts = {
        f"{PACKAGE}/{module}.py": Path(path).read_text(encoding="utf-8")
        for path, module in modules.items()
    }
    return packed, texts


def unpack_plugins(config: Config, out: Path) -> tuple[Config, dict[Path, str]]:
    """Turn the app's modules into files of the run's folder; return the new names and the texts.

    The modules exist only while Flower runs the app. The run is evaluated and reported on later.
    """
    texts: dict[Path, str] = {}

    def rename(name: str) -> str:
        module, _, member = name.rpartition(":")
        if not module.startswith(f"{PACKAGE}."):
            return name
        path = out.resolve() / f"{module.removeprefix(f'{PACKAGE}.')}.py"
        texts[path] = inspect.getsource(importlib.import_module(module))
        return f"{path}:{member}"

    return configuration.rename_plugins(config, rename), texts


def write_plugins(out: Path, texts: Mapping[Path, str]) -> None:
    """Write unpacked plug-ins, and their paths into the configuration of a run in ``out``.

    The folder of the run may have been moved since it was written.
    """
    for path, text in texts.items():
        write_text(path, text)
    recorded = out / "config.yaml"
    if texts and recorded.is_file():
        before = read_keys(recorded, is_resumed=True)
        now = _correct_paths(before, out.resolve())
        if now != before:
            text = yaml.safe_dump(now, sort_keys=False, allow_unicode=True)
            write_text(recorded, seal_text(text))


def _correct_paths(tree: Any, out: Path) -> Any:
    if isinstance(tree, dict):
        return {key: _correct_paths(value, out) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_correct_paths(value, out) for value in tree]
    match = re.fullmatch(r".*/(own_\d+\.py:.+)", tree) if isinstance(tree, str) else None
    return f"{out}/{match[1]}" if match else tree
