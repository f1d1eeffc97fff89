"""Load a user's own parts, without changes to the package.

An algorithm, objective, partition or protocol is called ``path/to/file.py:Name``,
``package.module:Name``, or like an entry point of an installed package (group
``fedssl.algorithms``, and so on). An encoder, an augmentation or a data set is called in the first
two ways, or ``python:Name`` if it was passed to ``fedssl.train`` as an object.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import math
import os
import sys
import traceback
import types
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from fedssl.config.keys import key_types
from fedssl.util.errors import TrainingError, UserError, suggest

GROUPS = {
    "algorithm": "fedssl.algorithms",
    "objective": "fedssl.objectives",
    "partition": "fedssl.partitions",
    "protocol": "fedssl.protocols",
}
# Classes whose methods and arguments a user's class must have. A partition need not derive from it.
PATTERNS = {
    "algorithm": "fedssl.federation.algorithm:Algorithm",
    "objective": "fedssl.objectives.base:Objective",
    "partition": "fedssl.data.partition:Iid",
}
PROTOCOL = ("train_features", "train_labels", "test_features", "test_labels", "classes", "seed")
Place = tuple[str, str]  # the key that names a plug-in, and its value
_FILES: dict[str, Place] = {}  # of users' code in use, with the key that named it last
MEMORY = "python:"  # prefix of the name of an object that was passed in Python
ARGUMENTS = {"encoder.name": "encoder", "augment.name": "augment", "data.name": "clients"}
_OBJECTS: dict[str, Any] = {}  # objects that were passed in Python, by the key that names them


def is_file(name: str) -> bool:
    """Return whether a name is ``path/to/file.py:Name``."""
    return name.rpartition(":")[0].endswith(".py")


def is_own(name: str) -> bool:
    """Return whether a name stands for an encoder, augmentation or data set of a user's own."""
    return ":" in name


def name_object(thing: Any) -> str:
    """Return the name that a run's configuration gives to an object passed in Python."""
    return MEMORY + str(getattr(thing, "__name__", type(thing).__name__))


@contextlib.contextmanager
def hold_objects(objects: Mapping[str, Any]) -> Iterator[None]:
    """Make objects that were passed in Python available under their keys."""
    before = dict(_OBJECTS)
    _OBJECTS.update(objects)
    try:
        yield
    finally:
        _OBJECTS.clear()
        _OBJECTS.update(before)


def find_object(key: str, name: str) -> Any:
    """Return the object of a user's own that ``key=name`` stands for."""
    if name.startswith(MEMORY):
        if key in _OBJECTS:
            return _OBJECTS[key]
        problem = "this object was passed in Python and is in no file"
        fix = (
            f"Pass it again with {ARGUMENTS[key]}=…, to fedssl.Run, fedssl.train or "
            f"fedssl.load_encoder. With {key}=FILE.py:NAME, commands find it."
        )
        raise UserError(problem, key=key, value=name, fix=fix)
    with translate_errors((key, name)):
        file, _, attribute = make_absolute(name).rpartition(":")
        return getattr(_import(file, (key, name)), attribute)


def make_absolute(name: str) -> str:
    """Return the name with an absolute path, so that it is valid from any folder."""
    if not is_file(name):
        return name
    path, _, attribute = name.rpartition(":")
    return f"{Path(path).expanduser().resolve()}:{attribute}"


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
    ``params`` is the base of the plug-in's keys; a protocol has none.
    """
    with translate_errors(place):
        plugin = _find(section, name, place, names)
        if params is None:
            _check_call(plugin, "", place, *PROTOCOL)
        else:
            _check_class(section, plugin, params, place)
    file = str(getattr(sys.modules.get(plugin.__module__), "__file__", ""))
    if not _is_ours(file):  # a user's file may only give one of fedssl's classes another name
        _FILES[file] = place
    return plugin


def _find(section: str, name: str, place: Place, names: Collection[str]) -> Any:
    file, _, attribute = make_absolute(name).rpartition(":")
    if file:
        return getattr(_import(file, place), attribute)
    offers = list_entry_points(section)
    points = offers.get(name, [])
    if not points:
        every = [*names, *offers]
        fix = f"Choose one of {', '.join(every)}, or path/to/file.py:Name."
        raise _error(f"unknown{suggest(name, every)}", place, fix)
    if len(points) > 1:
        raise _error("several packages have it", place, f"Name its module: {points[0].value}.")
    return points[0].load()


def _import(name: str, place: Place) -> types.ModuleType:
    """Import a user's file or module; errors of its code are then told as those of ``place``."""
    if name.endswith(".py"):
        _FILES[name] = place
        return _import_file(name, Path(name).stat().st_mtime_ns)
    module = importlib.import_module(name)
    if not _is_ours(str(module.__file__)):
        _FILES[str(module.__file__)] = place
    return module


@functools.cache
def _import_file(file: str, changed: int) -> types.ModuleType:
    """Import a file as a module, and again when it has changed, as in a notebook's session."""
    # Python must know the module by a unique name, because type hints are looked up there.
    digest = hashlib.sha256(file.encode()).hexdigest()[:8]
    module = types.ModuleType(f"{Path(file).stem}_{digest}")
    module.__file__ = file
    sys.modules[module.__name__] = module
    exec(compile(Path(file).read_bytes(), file, "exec"), module.__dict__)
    return module


@contextlib.contextmanager
def translate_errors(place: Place | None = None, can_resume: bool = False) -> Iterator[None]:
    """Turn an error of a user's code into a ``UserError`` that is caused by it.

    The command line prints the user's part of the traceback before the error's line. An error of
    fedssl stays as it is. ``place`` names the code if every error is the user's, as while a file is
    imported. Otherwise the innermost frame that is fedssl's or the user's decides: that code called
    torch.
    """
    caught: tuple[type[BaseException], ...] = (Exception,)
    if place is not None:  # a file that calls sys.exit would end fedssl without an error
        caught += (SystemExit,)
    try:
        yield
    except (UserError, TrainingError):
        raise
    except caught as error:
        frames = traceback.extract_tb(error.__traceback__)
        known = [f for f in frames if f.filename in _FILES or _is_ours(f.filename)]
        theirs = [f for f in known if f.filename in _FILES]
        if place is None and (not theirs or theirs[-1] is not known[-1]):
            if _FILES:  # their return values may be the cause, which no frame shows
                used = (f"{key}={value}" for key, value in _FILES.values())
                error.add_note(f"(in use: {', '.join(used)})")
            raise
        key, value = place or _FILES[theirs[-1].filename]
        kind, text = type(error).__name__, " ".join(str(error).split())
        line = f"line {theirs[-1].lineno}: " if theirs else ""
        cause = _keep_own_frames(error) if theirs or isinstance(error, SyntaxError) else None
        raise UserError(
            f"{line}{kind}: {text}" if text else f"{line}{kind}",
            f"{key}={value}: {kind}",
            key=key,
            value=value,
            fix="Correct it.",
            can_resume=can_resume,
        ) from cause


def _keep_own_frames(error: BaseException) -> BaseException:
    """Drop the frames of a traceback before the first one in a user's file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename not in _FILES:
        trace = trace.tb_next
    return error.with_traceback(trace)


def _error(problem: str, place: Place, fix: str = "") -> UserError:
    key, value = place
    return UserError(problem, key=key, value=value, fix=fix)


def _is_ours(file: str) -> bool:
    return file.startswith(f"{Path(__file__).parents[1]}{os.sep}")


def _check_class(section: str, plugin: Any, params: type, place: Place) -> None:
    """Check that a class takes the calls that fedssl makes, and that its keys have defaults."""
    module, _, name = PATTERNS[section].partition(":")
    pattern = getattr(importlib.import_module(module), name)
    if not inspect.isclass(plugin) or (section != "partition" and not issubclass(plugin, pattern)):
        raise _error(f"not a subclass of {module}.{name}", place)
    own: Any = getattr(plugin, "Params", None)
    has_keys = inspect.isclass(own) and issubclass(own, params)
    if not has_keys or "__dataclass_fields__" not in vars(own):
        base = f"fedssl.config.{params.__name__}"
        fix = f"Derive it from {base}, with the decorator @dataclass(frozen=True)."
        raise _error("needs a dataclass Params with its keys", place, fix)
    key_types(own)  # its annotations exist
    own()
    views = getattr(plugin, "views", 1)
    if isinstance(views, int) and views not in (1, 2):
        raise _error(f"views = {views!r}, and an image has 1 or 2", place)
    _check_call(plugin, "", place, *inspect.signature(pattern).parameters)
    for method, theirs in vars(pattern).items():
        if inspect.isfunction(theirs) and not method.startswith("_"):
            function = inspect.getattr_static(plugin, method, None)
            if function is None or getattr(function, "__isabstractmethod__", False):
                raise _error(f"lacks {method}", place)
            _check_call(function, f"{method} ", place, *inspect.signature(theirs).parameters)


def _check_call(function: Any, name: str, place: Place, *parameters: str) -> None:
    problem = find_call_error(function, *parameters)
    if problem is not None:
        given = ", ".join(parameter for parameter in parameters if parameter != "self")
        raise _error(f"{name}cannot be called with {given} ({problem})", place)


def find_call_error(function: Any, *arguments: Any) -> str | None:
    """Return why a function cannot be called with these arguments, or ``None`` if it can."""
    try:
        with contextlib.suppress(ValueError):  # functions of compiled modules may have no signature
            if inspect.ismethod(function):  # its class's function has one signature for all objects
                function, arguments = function.__func__, (function.__self__, *arguments)
            _signature(function).bind(*arguments)
    except TypeError as error:
        return str(error)
    return None


@functools.cache  # every exchange of a round asks, before its first kernel
def _signature(function: Any) -> inspect.Signature:
    """Return how a function is called: a decorated one by its wrapper's signature."""
    return inspect.signature(function, follow_wrapped=False)


def call_protocol(function: Any, spec: str, *arguments: Any) -> dict[str, float]:
    """Call a user's protocol, and return its measures, prefixed with its name."""
    place = ("evaluate.protocols", spec)
    with translate_errors(place):
        results = function(*arguments)
        if not isinstance(results, Mapping):
            raise _error(f"returned {type(results).__name__}, not numbers by name", place)
        measures = {f"{short_name(spec)}_{name}": float(value) for name, value in results.items()}
    for name, value in measures.items():
        if not math.isfinite(value):
            raise _error(f"{name} is {value}, not a finite number", place)
    return measures
