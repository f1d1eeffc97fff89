"""Declare configuration keys, and convert values from YAML to their types and ranges."""

from __future__ import annotations

import dataclasses
import math
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal

from fedssl.util.errors import UserError, suggest

Recipe = dict[str, Any]

Effect = Literal[
    "result",  # the trained model
    "rounding",  # the trained model, by no more than the rounding of numbers
    "evaluation",  # how the trained model is measured
    "monitoring",  # what is measured during training or trained beside the run
    "location",  # where the images are; the run compares their content, not their path
    "speed",  # time and memory
    "nothing",  # none of these
]
# The largest numbers of keys that declare no bound: products of several fit into float32, and
# counts into 32 bits.
LARGEST: dict[type, float] = {float: 1e9, int: 2**31 - 1}
LONGEST_PATH, LONGEST_NAME = 4095, 255  # bytes, on most systems
_METADATA = "fedssl.key"
_EXPECTED = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


@dataclass(frozen=True)
class Key:
    """The facts about a key beside its type and its default."""

    help: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    finite: bool = True
    nonempty: bool = False
    affects: Effect = "result"
    path: bool = False
    needs: str = ""
    instead_of: str = ""

    @property
    def range(self) -> str:
        """The allowed numbers in words, or nothing where any number is allowed."""
        bounds = (
            ("at least", self.ge),
            ("above", self.gt),
            ("at most", self.le),
            ("below", self.lt),
        )
        return " and ".join(
            f"{word} {bound:,}" if isinstance(bound, int) else f"{word} {bound:g}"
            for word, bound in bounds
            if bound is not None
        )

    @property
    def is_bounded(self) -> bool:
        """True if the declaration says how large a number may be."""
        return self.le is not None or self.lt is not None or not self.finite

    def allows(self, value: Any) -> bool:
        """Return whether a number, or every number of a list, is in the range."""
        if isinstance(value, tuple):
            return bool(value or not self.nonempty) and all(map(self.allows, value))
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
            and (self.is_bounded or abs(value) <= LARGEST[type(value)])
            and (math.isfinite(value) or not self.finite)
        )


def key(
    default: Any = MISSING,
    *,
    default_factory: Callable[[], Any] | Any = MISSING,
    kw_only: bool = False,
    **facts: Any,
) -> Any:
    """Declare a configuration key: a dataclass field with a range, a help text and an effect.

    ``ge``, ``gt``, ``le`` and ``lt`` bound a number, or each number of a list. Without ``le`` and
    ``lt`` it is at most ``LARGEST``. ``finite=False`` allows infinity, ``nonempty=True`` refuses an
    empty list. ``affects`` says what changes with the key (:data:`Effect`). ``path=True`` marks a
    file or folder. ``needs`` names the key of the same section without which this one has no
    effect: ``"noise"`` (it must be set) or ``"average=trimmed|krum"`` (it must have one of these
    values). ``instead_of`` names a key of the same section that excludes this one: a new value of
    either replaces a recipe's.

    >>> @dataclass(frozen=True)
    ... class Params(AlgorithmParams):
    ...     momentum: float = key(0.9, ge=0, lt=1, help="Share of the previous step.")
    """
    return dataclasses.field(
        default=default,
        default_factory=default_factory,
        kw_only=kw_only,
        metadata={_METADATA: Key(**facts)},
    )


def key_fields(section: Any) -> dict[str, dataclasses.Field[Any]]:
    """Return key → field. ``lambda_`` is the key ``lambda``, a keyword of Python."""
    return {field.name.rstrip("_"): field for field in dataclasses.fields(section)}


def facts_of(section: Any) -> dict[str, Key]:
    """Return key → its declaration; a field without ``key`` has no limits."""
    return {k: f.metadata.get(_METADATA, Key()) for k, f in key_fields(section).items()}


def key_types(cls: Any) -> dict[str, Any]:
    """Return key → type."""
    hints = typing.get_type_hints(cls)
    return {name: hints[field.name] for name, field in key_fields(cls).items()}


def declarations(config: Any, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Yield the full name and the facts of every key of a configuration or of its class."""
    if isinstance(config, type):
        values = key_types(config)
    else:
        values = {name: getattr(config, field.name) for name, field in key_fields(config).items()}
    for name, fact in facts_of(config).items():
        if dataclasses.is_dataclass(values[name]):
            yield from declarations(values[name], f"{prefix}{name}.")
        else:
            yield prefix + name, fact


def keys_affecting(config: Any, *effects: Effect) -> set[str]:
    """Return the full names of the keys that have one of these effects."""
    return {name for name, fact in declarations(config) if fact.affects in effects}


def find_idle_keys(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield a warning for each changed key that has no effect beside the others."""
    facts = facts_of(config)
    for name, field in key_fields(config).items():
        value, needs = getattr(config, field.name), facts[name].needs
        if dataclasses.is_dataclass(value):
            yield from find_idle_keys(value, f"{prefix}{name}.")
        elif needs and value != field.default and not _is_met(needs, config):
            yield f"{prefix}{name} has no effect without {prefix}{needs}"


def _is_met(needs: str, section: Any) -> bool:
    name, _, allowed = needs.partition("=")
    value = getattr(section, key_fields(section)[name].name)
    return str(value) in allowed.split("|") if allowed else bool(value)


def path_keys(config: Any) -> list[str]:
    """Return the full names of the keys whose values are files or folders."""
    return [name for name, fact in declarations(config) if fact.path]


def convert_section(cls: Any, given: Any, name: str) -> Any:
    """Return a section's dataclass with checked values; ``name`` is empty for the top level."""
    fields, kinds, facts = key_fields(cls), key_types(cls), facts_of(cls)
    prefix = f"{name}." if name else ""
    if not isinstance(given, Mapping):
        fix = f"Give keys such as {prefix}{next(iter(kinds))}."
        if isinstance(given, str) and "name" in kinds:
            fix = f"Write {prefix}name={given}."
        raise UserError("not keys and values", key=name, value=given, fix=fix)
    values: Recipe = {}
    for key, item in given.items():
        if key not in kinds:
            problem = f"unknown key{suggest(str(key), kinds, prefix)}"
            fix = f"Use a key of {name or 'the top level'}: {', '.join(kinds)}."
            raise UserError(problem, key=f"{prefix}{key}", fix=fix)
        value = convert(kinds[key], item, prefix + key)
        _check_range(facts[key], value, prefix + key)
        values[fields[key].name] = value
    for key, fact in facts.items():
        other = fact.instead_of
        if other and values.get(key) is not None and values.get(other) is not None:
            problem = f"given together with {prefix}{other}={values[other]}"
            fix = f"Give one of the two, and set the other to null: {prefix}{other}=null."
            raise UserError(problem, key=prefix + key, value=values[key], fix=fix)
    return cls(**values)


def _check_range(fact: Key, value: Any, name: str) -> None:
    if fact.path and isinstance(value, str):
        whole, parts = os.fsencode(value), Path(value).parts
        if len(whole) > LONGEST_PATH or any(len(os.fsencode(p)) > LONGEST_NAME for p in parts):
            raise UserError("too long a path", key=name, value=value, fix="Use a shorter one.")
    if fact.allows(value):
        return
    if value == ():
        raise UserError("an empty list", key=name, value=value, fix="Give at least one value.")
    kind = "numbers" if isinstance(value, tuple) else "a number"
    first = next(iter(value), 0) if isinstance(value, tuple) else value
    largest = "" if fact.is_bounded else f"at most {LARGEST[type(first)]:,.0f}"
    fix = f"Use {kind} {' and '.join(filter(None, (fact.range, largest)))}."
    raise UserError("out of range", key=name, value=value, fix=fix)


def convert(kind: Any, value: Any, name: str) -> Any:
    """Return ``value`` as the annotated type ``kind``, or say what was expected."""
    if dataclasses.is_dataclass(kind):
        return value if isinstance(value, kind) else convert_section(kind, value, name)  # type: ignore[arg-type]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _convert_union(arguments, value, name)
    if origin is Literal:
        choices = {str(choice): choice for choice in arguments}
        # YAML reads off and on as booleans.
        text = ("off", "on")[value] if isinstance(value, bool) else str(value)
        if text not in choices:
            problem = f"unknown{suggest(text, choices)}"
            fix = f"Choose one of {', '.join(choices)}."
            raise UserError(problem, key=name, value=value, fix=fix)
        return choices[text]
    if origin is tuple:
        return _convert_tuple(arguments, value, name)
    if origin is Mapping:
        if not isinstance(value, dict):
            raise _mistyped(name, value, "keys and values")
        return value
    return _convert_scalar(kind, value, name)


def _mistyped(name: str, value: object, expected: str) -> UserError:
    return UserError(f"not {expected}", key=name, value=value, fix=f"Give {expected}.")


def _convert_union(arguments: tuple[Any, ...], value: Any, name: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    kinds = [a for a in arguments if a is not type(None)]
    errors = []
    for kind in kinds:
        try:
            return convert(kind, value, name)
        except UserError as error:
            errors.append(error)
    if len(kinds) == 1:
        raise errors[0]
    raise _mistyped(name, value, " or ".join(map(_describe, kinds)))


def _describe(kind: Any) -> str:
    """Return what a type expects, in words."""
    if typing.get_origin(kind) is Literal:
        return ", ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return "a list such as [64,32]"
    return _EXPECTED[kind]


def _convert_tuple(arguments: tuple[Any, ...], value: Any, name: str) -> Any:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")] if value else []
    if value is None:
        raise UserError("not a list", key=name, value=value, fix="Give [] for an empty list.")
    if not isinstance(value, (list, tuple)):
        value = [value]
    if arguments[-1] is Ellipsis:
        return tuple(convert(arguments[0], item, name) for item in value)
    if len(value) != len(arguments):
        raise _mistyped(name, value, f"a list of {len(arguments)} values")
    return tuple(convert(a, item, name) for a, item in zip(arguments, value, strict=True))


def _convert_scalar(kind: Any, value: Any, name: str) -> Any:
    if kind not in _EXPECTED:
        fix = "Use int, float, str, bool, Literal, tuple, or one of these | None."
        raise UserError(f"a key cannot have the type {kind}", key=name, value=value, fix=fix)
    if value is None or isinstance(value, dict | list) or isinstance(value, bool) != (kind is bool):
        raise _mistyped(name, value, _EXPECTED[kind])
    if kind is str and "\0" in str(value):
        raise _mistyped(name, value, "text without zero bytes")
    if kind in (bool, str):
        return kind(value)
    try:
        return _convert_number(kind, value)
    except OverflowError:
        fix = "Give a smaller number."
        raise UserError("too large", key=name, value=value, fix=fix) from None
    except (ValueError, TypeError):
        raise _mistyped(name, value, _EXPECTED[kind]) from None


def _convert_number(kind: type[int] | type[float], value: Any) -> int | float:
    """Convert a number that may be text: YAML 1.1 reads 1e-3 as text."""
    if isinstance(value, str):
        try:
            value = int(value)  # by way of a float, large ones would change
        except ValueError:
            value = float(value)
    number = kind(value)
    if number != number or (kind is int and number != value):
        raise ValueError
    if kind is int and abs(number) >= 2**63:
        raise OverflowError
    return number
