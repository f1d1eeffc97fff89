"""Change Flower's messages in what they say, or in their bytes (``messages.py``)."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as Proto

SENTINEL = "pwned-by-a-message"  # a file that some messages would make if they were executed


class Exploit:
    """An object whose pickle runs a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {SENTINEL}",)


PICKLE = pickle.dumps(Exploit())
CODE = f"__import__('os').system('touch {SENTINEL}')"
NUMBERS = (-1, 0, 1, 7, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63), 0.5, -1.0, 1e308)
TEXTS = ("", "x", "../../x", "/etc/passwd", "\0", "\x1b[2J\n", "train", "__class__", CODE, "9" * 99)
VALUES: tuple[Any, ...] = (
    *NUMBERS,
    *TEXTS,
    *(float("nan"), float("inf"), True, b"", PICKLE, "x" * 100_000),
    *([], [0], [-1], [2**62] * 3, ["../../x"], [True], [0.5], [b""], [PICKLE], list(range(10_000))),
)
NAMES = (*TEXTS, "0/.", "0@1/x", "1/", "-1/x", "a/b/c/d", "/", "@", "0/" * 2000)
SHAPES: tuple[tuple[int, ...], ...] = (
    *((), (0,), (1,), (-1,), (2**31,), (2**62,), (2**31, 2**31), (2**62, 2**62), (1,) * 65),
    *((0, 2**62), (0, 2**62, 2**62), (-1, -1), (3, 0, 5)),
)
TYPES = (
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"),
    *("object", "O", "<f8", "complex128", "float8_e5m2", "", "x" * 1000, CODE),
)


class Mutator:
    """Changes messages, by one random generator."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def mutate(self, data: bytes) -> RecordDict | None:
        """Return a changed message; ``None`` if Flower cannot read its bytes."""
        if self.chance.random() < 0.3:
            return parse(self._mutate_bytes(data))
        content = parse(data)
        assert content is not None
        for _ in range(self.chance.choice([1, 1, 1, 2, 5])):
            with contextlib.suppress(TypeError, ValueError, KeyError):  # of Flower's own checks
                self._mutate_content(content)
        try:
            return parse(write(content))
        except (TypeError, ValueError):  # Flower cannot send it
            return self.mutate(data)

    def _mutate_bytes(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self.chance.choice([1, 1, 2, 8])):
            place, kind = self.chance.randrange(len(changed) or 1), self.chance.random()
            if kind < 0.6 and changed:
                changed[place] ^= 1 << self.chance.randrange(8)
            elif kind < 0.8:
                del changed[place : place + self.chance.choice([1, 8, 1000])]
            else:
                changed[place:place] = self.chance.randbytes(self.chance.choice([1, 8, 100]))
        return bytes(changed)

    def _mutate_content(self, content: RecordDict) -> None:
        if self.chance.random() < 0.05 and content:
            del content[self.chance.choice(sorted(content))]
        elif self.chance.random() < 0.5 and content.config_records:
            self._mutate_values(self._pick(content.config_records))
        elif content.array_records:
            self._mutate_arrays(self._pick(content.array_records))

    def _pick(self, records: Mapping[str, Any]) -> Any:
        full = [name for name in sorted(records) if records[name]] or sorted(records)
        return records[self.chance.choice(full)]

    def _mutate_values(self, record: ConfigRecord) -> None:
        name = self._change_names(record)
        if name is not None:
            record[name] = self._change_value(record[name])

    def _change_value(self, value: Any) -> Any:
        kind = self.chance.random()
        if kind < 0.5 or not value:
            return self.chance.choice(VALUES)
        if isinstance(value, list):
            changed = list(value)
            place = self.chance.randrange(len(changed))
            if kind < 0.6:
                del changed[place]
            elif kind < 0.7:
                changed.append(changed[place])
            elif kind < 0.8:
                changed.reverse()
            else:
                changed[place] = self._change_value(changed[place])
            return changed
        if isinstance(value, bytes):
            return self._mutate_bytes(value)
        if isinstance(value, str):
            return value[: self.chance.randrange(len(value))] + self.chance.choice(TEXTS)
        return value + self.chance.choice([-1, 1, 2, 1000])

    def _change_names(self, record: Any) -> str | None:
        """Return a name in a record, or remove, rename or double it and return none."""
        kind = self.chance.random()
        if not record:
            return None
        name = self.chance.choice(sorted(record))
        if kind < 0.1:
            del record[name]
        elif kind < 0.2:
            record[self.chance.choice(NAMES)] = record[name]
        elif kind < 0.3:
            record[self.chance.choice([*NAMES, f"{name}/x", name[1:]])] = record.pop(name)
        else:
            return name
        return None

    def _mutate_arrays(self, record: Any) -> None:
        name = self._change_names(record)
        if name is None:
            return
        old, kind = record[name], self.chance.random()
        dtype, shape, data = old.dtype, tuple(old.shape), old.data
        if kind < 0.2:
            dtype = self.chance.choice(TYPES)
        elif kind < 0.4:
            shape = self.chance.choice([*SHAPES, shape[::-1], (*shape, 1), (2, *shape)])
        elif kind < 0.5:
            data = self.chance.choice([b"", PICKLE, data[:-1], data + bytes(8), bytes(len(data))])
        elif kind < 0.8 and dtype in ("float32", "float64", "float16") and data:
            numbers = np.frombuffer(data, dtype).copy()
            factor = self.chance.choice([0, -1, 1e3, 1e6, 1e30, 1e300, np.nan, np.inf])
            with np.errstate(all="ignore"):
                if self.chance.random() < 0.5:
                    numbers[self.chance.randrange(len(numbers))] *= factor
                else:
                    numbers = (numbers * factor).astype(dtype)
            data = numbers.tobytes()
        else:
            data = self._mutate_bytes(data)
        stype = self.chance.choice([old.stype, old.stype, "numpy.ndarray", CODE])
        record[name] = Array(dtype, shape, stype, data)


def write(content: RecordDict) -> bytes:
    """Return a message's bytes, as Flower sends it."""
    return bytes(recorddict_to_proto(content).SerializeToString())


def parse(data: bytes) -> RecordDict | None:
    """Return the message of these bytes, if Flower can read it."""
    try:
        return recorddict_from_proto(Proto.FromString(data))
    except Exception:  # of protobuf and of Flower
        return None
