"""Convert values from YAML to the annotated types of the keys."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from fedssl.config.schema import Tree
from fedssl.util.errors import UserError, suggest

_EXPECTED = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def key_types(cls: Any) -> dict[str, Any]:
    """Key → type. A trailing underscore keeps Python's keywords free: ``lambda_`` is ``lambda``."""
    hints = typing.get_type_hints(cls)
    return {f.name.rstrip("_"): hints[f.name] for f in dataclasses.fields(cls)}


def check_known(name: str, fields: Mapping[str, Any], prefix: str) -> None:
    """Check that a section has a key of this name."""
    if name not in fields:
        raise UserError(
            f"{prefix}{name}: unknown key{suggest(str(name), fields, prefix)}; "
            f"{prefix.rstrip('.') or 'the top level'} has {', '.join(fields)}"
        )


def convert(kind: Any, value: Any, name: str) -> Any:
    """``value`` as the annotated type ``kind``, or one line that says what was expected."""
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise UserError(
                f"{name}={value}: expected keys such as {name}.{next(iter(key_types(kind)))}"
            )
        fields = key_types(kind)
        values: Tree = {}
        for sub, item in value.items():
            check_known(sub, fields, f"{name}.")
            attribute = (
                sub + "_" if sub + "_" in {f.name for f in dataclasses.fields(kind)} else sub
            )
            values[attribute] = convert(fields[sub], item, f"{name}.{sub}")
        return kind(**values)  # type: ignore[operator]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _convert_union(arguments, value, name)
    if origin is Literal:
        value = _as_choice(arguments, value)
        if value not in arguments or isinstance(value, bool):
            choices = ", ".join(map(str, arguments))
            hint = suggest(str(value), map(str, arguments))
            raise UserError(f"{name}={value}: unknown{hint}; choose one of {choices}")
        return value
    if origin is tuple:
        return _convert_tuple(arguments, value, name)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise UserError(f"{name}={value}: expected keys and values")
        return value
    return _convert_scalar(kind, value, name)


def _as_choice(choices: tuple[Any, ...], value: Any) -> Any:
    """YAML reads ``off`` and ``on`` as booleans; a choice of that name is what was meant."""
    if isinstance(value, bool):
        return ("off", "on")[value] if ("off", "on")[value] in choices else value
    return value


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
    raise UserError(f"{name}={value}: expected {' or '.join(map(_described, kinds))}")


def _described(kind: Any) -> str:
    """What a type expects, in words."""
    if typing.get_origin(kind) is Literal:
        return ", ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return "a list as in [64, 32]"
    return _EXPECTED[kind]


def _convert_tuple(arguments: tuple[Any, ...], value: Any, name: str) -> Any:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")] if value else []
    if value is None:
        raise UserError(f"{name}={value}: expected a list; give [] for an empty one")
    if not isinstance(value, (list, tuple)):
        value = [value]
    if arguments[-1] is Ellipsis:
        return tuple(convert(arguments[0], item, name) for item in value)
    if len(value) != len(arguments):
        raise UserError(f"{name}={value}: expected {len(arguments)} values, got {len(value)}")
    return tuple(convert(a, item, name) for a, item in zip(arguments, value, strict=True))


def _convert_scalar(kind: Any, value: Any, name: str) -> Any:
    wrong = UserError(f"{name}={value}: expected {_EXPECTED[kind]}")
    if kind is bool:
        if not isinstance(value, bool):
            raise wrong
        return value
    if isinstance(value, bool) or value is None or isinstance(value, (dict, list)):
        raise wrong
    if kind is str:
        return str(value)
    try:
        return _number(kind, value)
    except OverflowError:
        digits = " of at most 18 digits" if kind is int else " below 1e308"
        raise UserError(f"{name}={value}: too large; give {_EXPECTED[kind]}{digits}") from None
    except (ValueError, TypeError):
        raise wrong from None


def _number(kind: type[int] | type[float], value: Any) -> int | float:
    """A number that may be text: YAML 1.1 reads 1e-3 so, and ``_read`` keeps 1_000."""
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
