"""A user's own algorithm, objective, partition or protocol, without touching the package.

It is named ``path/to/file.py:Name``, ``package.module:Name``, or by the name under which an
installed package offers it as an entry point (of the group ``fedssl.algorithms``, and so on).
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
# What has the methods, and takes the arguments, that are called.
PATTERNS = {**BASES, "partition": "fedssl.data.partition:Iid"}
PROTOCOL = ("train_features", "train_labels", "test_features", "test_labels", "classes", "seed")
_FILES: dict[str, str] = {}  # of users' code in use, with the key=value that named it last
_MODULES: dict[Path, tuple[int, types.ModuleType]] = {}  # with the time of the file's last change


def is_file(name: str) -> bool:
    """Whether a name is ``path/to/file.py:Name``."""
    return name.rpartition(":")[0].endswith(".py")


def settled(name: str) -> str:
    """The name as it means the same from any folder: a file's path becomes absolute."""
    if not is_file(name):
        return name
    path, _, own = name.rpartition(":")
    return f"{Path(path).expanduser().resolve()}:{own}"


def source(module: str) -> str:
    """The text of a module's file."""
    file = inspect.getfile(importlib.import_module(module))
    return Path(file).read_text(encoding="utf-8")


def label(name: str) -> str:
    """A name for people: ``Momentum`` of ``path/to/file.py:Momentum``; others as they are."""
    return name.rpartition(":")[2]


def offered(section: str) -> dict[str, list[metadata.EntryPoint]]:
    """What installed packages offer, by name."""
    found: dict[str, list[metadata.EntryPoint]] = {}
    for point in metadata.entry_points(group=GROUPS[section]):
        found.setdefault(point.name, []).append(point)
    return found


def load(
    section: str, name: str, where: str, known: Collection[str], params: type | None = None
) -> Any:
    """What a name that is not one of ours (``known``) stands for, checked.

    ``where`` is the ``key=value`` that named it; ``params`` is what its keys must build on.
    """
    if is_file(name):
        found = _attribute(_module(where, name), where, name)
    elif ":" in name:
        with _one_line(where):
            module = importlib.import_module(name.rpartition(":")[0])
        found = _attribute(module, where, name)
    else:
        found = _offered(section, name, where, known)
    if section == "protocol":
        _check_protocol(found, where)
    else:
        _check_class(section, found, where, params)
    file = str(getattr(sys.modules.get(found.__module__), "__file__", ""))
    if not _is_ours(file):  # a file may name one of ours only to have it under another name
        _FILES[file] = where
    return found


def _is_ours(file: str) -> bool:
    return file.startswith(f"{Path(__file__).parents[1]}{os.sep}")


def _offered(section: str, name: str, where: str, known: Collection[str]) -> Any:
    offers = offered(section)
    points = offers.get(name, [])
    if not points:
        names = [*known, *offers]
        hint = suggest(name, names)
        if name.endswith(".py"):
            raise UserError(f"{where}: say what in the file, as in {name}:Name")
        few = ", with a number of labels as in linear@500 or a share as in semi@10%"
        raise UserError(
            f"{where}: unknown{hint}; choose {'of' if section == 'protocol' else 'one of'} "
            f"{', '.join(names)}{few if section == 'protocol' else ''}, or path/to/file.py:Name"
        )
    if len(points) > 1:
        packages = " and ".join(sorted(p.dist.name if p.dist else p.value for p in points))
        raise UserError(
            f"{where}: {packages} both offer it; name one by its module, as in {points[0].value}"
        )
    with _one_line(where):
        return points[0].load()


def _module(where: str, name: str) -> types.ModuleType:
    """The file as a module; again when it has changed, as it does in a notebook's session."""
    path = Path(name.rpartition(":")[0]).expanduser().resolve()
    try:
        changed = path.stat().st_mtime_ns
        if path in _MODULES and _MODULES[path][0] == changed:
            return _MODULES[path][1]
        source = path.read_bytes()
    except OSError as error:
        raise UserError(f"{where}: {path} cannot be read ({error.strerror})") from None
    # A name of its own, and known to Python: type hints are looked up there.
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    module = types.ModuleType(f"{path.stem}_{digest}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    with _one_line(where, path):
        exec(compile(source, str(path), "exec"), module.__dict__)
    _MODULES[path] = (changed, module)
    return module


@contextlib.contextmanager
def _one_line(where: str, path: Path | None = None) -> Iterator[None]:
    """Whatever somebody's code raises becomes one line, with its line in ``path`` if known."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        text = f"{where}: {_place(error, path)}{_described(error)}"
        raise UserError(text, f"{where}: {type(error).__name__}") from None


@contextlib.contextmanager
def blamed(remedy: str | None = None) -> Iterator[None]:
    """What a user's own code raises becomes one line; an error of ours keeps its traceback.

    ``remedy`` is what to do once it is mended.
    """
    try:
        yield
    except (UserError, TrainingError):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        # Of the two, who came last: what torch or numpy then did was asked for there.
        known = [f for f in frames if f.filename in _FILES or _is_ours(f.filename)]
        if not known or known[-1].filename not in _FILES:
            if _FILES:  # what it returned may be at fault, which its own frames do not show
                error.add_note(f"(in use: {', '.join(_FILES.values())})")
            raise
        where, then = _FILES[known[-1].filename], f"; mend it, then {remedy}" if remedy else ""
        line = f"line {known[-1].lineno}: {_described(error)}"
        raise UserError(f"{where}: {line}{then}") from None


def _place(error: BaseException, path: Path | None) -> str:
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: "
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return f"line {lines[-1]}: " if lines else ""


def _described(error: BaseException) -> str:
    text = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _attribute(module: types.ModuleType, where: str, name: str) -> Any:
    wanted = name.rpartition(":")[2]
    found = getattr(module, wanted, None)
    if found is None:
        own = [
            n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__
        ]
        raise UserError(
            f"{where}: nothing there is called {wanted or 'so'}; it has "
            f"{', '.join(own) or 'no class or function'}"
        )
    return found


def _check_class(section: str, found: Any, where: str, params: type | None) -> None:
    base = BASES.get(section)
    if base is None:
        if not inspect.isclass(found) or not callable(getattr(found, "split", None)):
            raise UserError(
                f"{where}: a {section} is a class with a method split(split, classes, seed), such "
                "as fedssl.data.partition.Iid"
            )
    else:
        module, _, name = base.partition(":")
        kind = getattr(importlib.import_module(module), name)
        if not inspect.isclass(found) or not issubclass(found, kind):
            raise UserError(f"{where}: must be a class that builds on {module}.{name}")
        inputs = getattr(found, "inputs", 1)
        if isinstance(inputs, int) and inputs not in (1, 2):
            raise UserError(f"{where}: inputs = {inputs!r}, and an image has at most 2 views")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise UserError(f"{where}: lacks {', '.join(missing)}")
    _check_methods(found, where, PATTERNS[section])
    if params is not None:
        _check_params(found, where, params)


def _check_methods(found: Any, where: str, pattern: str) -> None:
    """What is called is to take what it will be called with: as many as ``pattern`` takes."""
    module, _, name = pattern.partition(":")
    like = getattr(importlib.import_module(module), name)
    _check_call(found, where, "", *inspect.signature(like).parameters)
    for method, theirs in vars(like).items():
        own = inspect.getattr_static(found, method, None)
        if inspect.isfunction(theirs) and inspect.isfunction(own) and not method.startswith("_"):
            _check_call(own, where, f"{method} ", *inspect.signature(theirs).parameters)


def _check_call(function: Any, where: str, what: str, *names: str) -> None:
    why = misfit(function, *names)
    if why is not None:
        given = ", ".join(name for name in names if name != "self")
        raise UserError(f"{where}: {what}cannot be called with {given} ({why})")


def misfit(function: Any, *arguments: Any) -> str | None:
    """Why a function cannot be called with these; none: it can, or does not say what it takes."""
    try:
        # What is called is a decorator's wrapper, whatever it wraps.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return str(error)
    return None


def _check_params(found: Any, where: str, base: type) -> None:
    """Keys that can be checked as ours are."""
    own = getattr(found, "Params", None)
    if not inspect.isclass(own) or not issubclass(own, base):
        raise UserError(
            f"{where}: needs a class Params that builds on fedssl.config.{base.__name__}"
        )
    if "__dataclass_fields__" not in vars(own):
        raise UserError(f"{where}: Params needs the decorator @dataclass(frozen=True)")
    try:
        kinds = typing.get_type_hints(own)
    except Exception as error:
        raise UserError(f"{where}: Params: {_described(error)}") from None
    for item in dataclasses.fields(typing.cast("Any", own)):
        given = item.default is not dataclasses.MISSING
        if not given and item.default_factory is dataclasses.MISSING and item.name != "name":
            raise UserError(f"{where}: Params.{item.name} needs a default")
        if not _readable(kinds[item.name]):
            raise UserError(
                f"{where}: Params.{item.name}: no type of a key; use int, float, str, bool, "
                "Literal, tuple, or one of these | None"
            )


def _readable(kind: Any) -> bool:
    """Whether a value of this type can be read from a recipe."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union, tuple):
        return all(_readable(a) for a in arguments if a not in (type(None), Ellipsis))
    return kind in (int, float, str, bool) or origin is Literal


def _check_protocol(found: Any, where: str) -> None:
    if inspect.isclass(found) or not callable(found):
        raise UserError(
            f"{where}: a protocol is a function of {', '.join(PROTOCOL)} that returns numbers by "
            "name"
        )
    _check_call(found, where, "", *PROTOCOL)


def measures(function: Any, spec: str, *arguments: Any) -> dict[str, float]:
    """What a user's protocol says, each measure after the protocol's own name."""
    where = f"evaluate.protocols={spec}"
    path = Path(spec.rpartition(":")[0]) if is_file(spec) else None
    with _one_line(where, path):
        found = function(*arguments)
    if not isinstance(found, Mapping):
        raise UserError(f"{where}: returned {type(found).__name__}, not numbers by name")
    numbers: dict[str, float] = {}
    for name, value in found.items():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise UserError(f"{where}: {name} is {value!r}, not a number") from None
        if not math.isfinite(number):
            raise UserError(f"{where}: {name} is {number}, not a finite number")
        numbers[f"{label(spec)}_{name}"] = number
    return numbers


def check_groups(groups: Any, samples: int, name: str) -> None:
    """Refuse what a user's partition cannot mean: empty clients, or samples that are not there."""
    import numpy as np

    from fedssl.data.dataset import Groups

    where = f"partition.name={name}"
    if not isinstance(groups, Groups):
        kind = type(groups).__name__
        raise UserError(f"{where}: split returned {kind}, not fedssl.data.dataset.Groups")
    members, offsets = groups.members, groups.offsets
    arrays = [each for each in (members, offsets) if isinstance(each, np.ndarray)]
    if len(arrays) < 2 or not all(np.issubdtype(each.dtype, np.integer) for each in arrays):
        raise UserError(f"{where}: members and offsets must be arrays of whole numbers")
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(members):
        raise UserError(
            f"{where}: offsets must start with 0 and end with {len(members)}, as many as there are "
            "members"
        )
    if not len(groups) or int(groups.sizes.min()) < 1:
        raise UserError(f"{where}: has a client without a sample; leave it out of the groups")
    if int(members.min()) < 0 or int(members.max()) >= samples:
        raise UserError(f"{where}: names samples beyond the {samples} that there are")
    if len(np.unique(members)) < len(members):
        raise UserError(f"{where}: gives a sample to two clients")
