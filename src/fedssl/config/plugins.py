"""Load a user's algorithm, objective, partition or protocol, without changes to the package.

Its name is ``path/to/file.py:Name``, ``package.module:Name``, or the name of an entry point of an
installed package (group ``fedssl.algorithms``, and so on).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import math
import os
import sys
import traceback
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from fedssl.util.errors import TrainingError, UserError, suggest

GROUPS = {
    "algorithm": "fedssl.algorithms",
    "objective": "fedssl.objectives",
    "partition": "fedssl.partitions",
    "protocol": "fedssl.protocols",
}
BASES = {
    "algorithm": "fedssl.federation.algorithm:Algorithm",
    "objective": "fedssl.objectives.base:Objective",
}
# Classes whose methods and arguments a user's class must have.
PATTERNS = {**BASES, "partition": "fedssl.data.partition:Iid"}
PROTOCOL = ("train_features", "train_labels", "test_features", "test_labels", "classes", "seed")
Place = tuple[str, str]  # the key that names a plug-in, and its value
_FILES: dict[str, Place] = {}  # of users' code in use, with the key that named it last
_MODULES: dict[Path, tuple[int, types.ModuleType]] = {}  # with the time of the file's last change


def is_file(name: str) -> bool:
    """Return whether a name is ``path/to/file.py:Name``."""
    return name.rpartition(":")[0].endswith(".py")


def make_absolute(name: str) -> str:
    """Return the name with an absolute path, so that it is valid from any folder."""
    if not is_file(name):
        return name
    path, _, attribute = name.rpartition(":")
    return f"{Path(path).expanduser().resolve()}:{attribute}"


def read_source(module: str) -> str:
    """Return the source text of a module."""
    file = inspect.getfile(importlib.import_module(module))
    return Path(file).read_text(encoding="utf-8")


def short_name(name: str) -> str:
    """Return ``Momentum`` for ``path/to/file.py:Momentum``, and other names unchanged."""
    return name.rpartition(":")[2]


def list_entry_points(section: str) -> dict[str, list[metadata.EntryPoint]]:
    """Return the entry points of installed packages by name."""
    points: dict[str, list[metadata.EntryPoint]] = {}
    for point in metadata.entry_points(group=GROUPS[section]):
        points.setdefault(point.name, []).append(point)
    return points


def load(
    section: str, name: str, place: Place, names: Collection[str], params: type | None = None
) -> Any:
    """Load and check the plug-in called ``name``.

    ``names`` are fedssl's own in this section, for the error of an unknown name. The class
    ``params`` is the base of the plug-in's keys.
    """
    if is_file(name):
        path = Path(name.rpartition(":")[0]).expanduser().resolve()
        plugin = _get_attribute(_load_file(path, place), name, place)
    elif ":" in name:
        with _one_line(place):
            module = importlib.import_module(name.rpartition(":")[0])
        plugin = _get_attribute(module, name, place)
    else:
        plugin = _load_entry_point(section, name, place, names)
    if section == "protocol":
        _check_protocol(plugin, place)
    else:
        _check_class(section, plugin, place)
        if params is not None:
            _check_params(plugin, params, place)
    file = str(getattr(sys.modules.get(plugin.__module__), "__file__", ""))
    if not _is_ours(file):  # a user's file may only give one of fedssl's classes another name
        _FILES[file] = place
    return plugin


def _error(problem: str, place: Place, fix: str = "") -> UserError:
    key, value = place
    return UserError(problem, key=key, value=value, fix=fix)


def _is_ours(file: str) -> bool:
    return file.startswith(f"{Path(__file__).parents[1]}{os.sep}")


def _load_entry_point(section: str, name: str, place: Place, names: Collection[str]) -> Any:
    offers = list_entry_points(section)
    points = offers.get(name, [])
    if name.endswith(".py"):
        raise _error("a file without a name in it", place, f"Give {name}:NAME.")
    if not points:
        every = [*names, *offers]
        fix = f"Choose one of {', '.join(every)}, or path/to/file.py:Name."
        if section == "protocol":
            fix += " Some take a number of labels, as linear@500, or a share, as semi@10%."
        raise _error(f"unknown{suggest(name, every)}", place, fix)
    if len(points) > 1:
        packages = " and ".join(sorted(p.dist.name if p.dist else p.value for p in points))
        raise _error(f"{packages} both have it", place, f"Name its module: {points[0].value}.")
    with _one_line(place):
        return points[0].load()


def _load_file(path: Path, place: Place) -> types.ModuleType:
    """Import a file as a module, and again when it has changed, as in a notebook's session."""
    try:
        changed = path.stat().st_mtime_ns
        if path in _MODULES and _MODULES[path][0] == changed:
            return _MODULES[path][1]
        source = path.read_bytes()
    except OSError as error:
        raise _error(f"{path} cannot be read ({error.strerror})", place) from None
    # Python must know the module by a unique name, because type hints are looked up there.
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    module = types.ModuleType(f"{path.stem}_{digest}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    with _one_line(place, path):
        exec(compile(source, str(path), "exec"), module.__dict__)
    _MODULES[path] = (changed, module)
    return module


@contextlib.contextmanager
def _one_line(place: Place, path: Path | None = None) -> Iterator[None]:
    """Turn any error of a user's code into one line, with its line number in ``path``."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        line = error.lineno if isinstance(error, SyntaxError) else _last_line(error, path)
        where = "" if line is None else f"line {line}: "
        public = UserError(type(error).__name__, key=place[0], value=place[1])
        raise UserError(
            f"{where}{_describe(error)}", str(public), key=place[0], value=place[1]
        ) from None


def _last_line(error: BaseException, path: Path | None) -> int | None:
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno for f in reversed(frames) if f.filename == str(path)), None)


def _describe(error: BaseException) -> str:
    text = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def translate_errors(can_resume: bool = False) -> Iterator[None]:
    """Turn an error of a user's code into one line; an error of fedssl keeps its traceback."""
    try:
        yield
    except (UserError, TrainingError):
        raise
    except Exception as error:
        # The innermost frame that is fedssl's or the user's decides: that code called torch.
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if f.filename in _FILES or _is_ours(f.filename)]
        if not ours or ours[-1].filename not in _FILES:
            if _FILES:  # their return values may be the cause, which no frame shows
                used = (f"{key}={value}" for key, value in _FILES.values())
                error.add_note(f"(in use: {', '.join(used)})")
            raise
        key, value = _FILES[ours[-1].filename]
        problem = f"line {ours[-1].lineno}: {_describe(error)}"
        raise UserError(
            problem, key=key, value=value, fix="Correct it.", can_resume=can_resume
        ) from None


def _get_attribute(module: types.ModuleType, name: str, place: Place) -> Any:
    attribute = name.rpartition(":")[2]
    value = getattr(module, attribute, None)
    if value is None:
        defined = [
            n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__
        ]
        fix = f"The file has {', '.join(defined) or 'no class or function'}."
        raise _error(f"nothing there is called {attribute}", place, fix)
    return value


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _check_class(section: str, plugin: Any, place: Place) -> None:
    base = BASES.get(section)
    if base is None:
        if not inspect.isclass(plugin) or not callable(getattr(plugin, "split", None)):
            fix = "See fedssl.data.partition.Iid."
            problem = f"a {section} is a class with a method split(split, classes, seed)"
            raise _error(problem, place, fix)
    elif not inspect.isclass(plugin) or not issubclass(plugin, _import(base)):
        raise _error(f"not a subclass of {base.replace(':', '.')}", place)
    views = getattr(plugin, "views", 1)
    if isinstance(views, int) and views not in (1, 2):
        raise _error(f"views = {views!r}, and an image has 1 or 2", place)
    missing = sorted(getattr(plugin, "__abstractmethods__", ()))
    if missing:
        raise _error(f"lacks {', '.join(missing)}", place)
    _check_methods(plugin, _import(PATTERNS[section]), place)


def _check_methods(plugin: Any, pattern: Any, place: Place) -> None:
    """Check that the class and its methods take the arguments of the pattern's."""
    _check_call(plugin, "", place, *inspect.signature(pattern).parameters)
    for method, theirs in vars(pattern).items():
        function = inspect.getattr_static(plugin, method, None)
        is_method = inspect.isfunction(theirs) and inspect.isfunction(function)
        if is_method and not method.startswith("_"):
            _check_call(function, f"{method} ", place, *inspect.signature(theirs).parameters)


def _check_call(function: Any, name: str, place: Place, *parameters: str) -> None:
    problem = find_call_error(function, *parameters)
    if problem is not None:
        given = ", ".join(parameter for parameter in parameters if parameter != "self")
        raise _error(f"{name}cannot be called with {given} ({problem})", place)


def find_call_error(function: Any, *arguments: Any) -> str | None:
    """Return why a function cannot be called with these arguments, or ``None`` if it can."""
    try:
        # A decorated function is called by its wrapper's signature.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return str(error)
    return None


def _check_params(plugin: Any, base: type, place: Place) -> None:
    """Check that the keys of a plug-in can be read from a recipe."""
    params = getattr(plugin, "Params", None)
    if not inspect.isclass(params) or not issubclass(params, base):
        raise _error(f"needs a class Params that builds on fedssl.config.{base.__name__}", place)
    if "__dataclass_fields__" not in vars(params):
        raise _error("Params needs the decorator @dataclass(frozen=True)", place)
    try:
        kinds = typing.get_type_hints(params)
    except Exception as error:
        raise _error(f"Params: {_describe(error)}", place) from None
    for item in dataclasses.fields(typing.cast("Any", params)):
        if item.default is MISSING and item.default_factory is MISSING and item.name != "name":
            raise _error(f"Params.{item.name} needs a default", place)
        if not _is_readable(kinds[item.name]):
            fix = "Use int, float, str, bool, Literal, tuple, or one of these | None."
            raise _error(f"Params.{item.name} has a type that keys cannot have", place, fix)


def _is_readable(kind: Any) -> bool:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union, tuple):
        return all(_is_readable(a) for a in arguments if a not in (type(None), Ellipsis))
    return kind in (int, float, str, bool) or origin is Literal


def _check_protocol(plugin: Any, place: Place) -> None:
    if inspect.isclass(plugin) or not callable(plugin):
        problem = f"a protocol is a function of {', '.join(PROTOCOL)} that returns numbers by name"
        raise _error(problem, place)
    _check_call(plugin, "", place, *PROTOCOL)


def call_protocol(function: Any, spec: str, *arguments: Any) -> dict[str, float]:
    """Call a user's protocol, and return its measures, prefixed with its name."""
    place = ("evaluate.protocols", spec)
    with _one_line(place, Path(spec.rpartition(":")[0]) if is_file(spec) else None):
        results = function(*arguments)
    if not isinstance(results, Mapping):
        raise _error(f"returned {type(results).__name__}, not numbers by name", place)
    measures: dict[str, float] = {}
    for name, value in results.items():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise _error(f"{name} is {value!r}, not a number", place) from None
        if not math.isfinite(number):
            raise _error(f"{name} is {number}, not a finite number", place)
        measures[f"{short_name(spec)}_{name}"] = number
    return measures
