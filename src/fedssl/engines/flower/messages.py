"""Write requests, replies and greetings as Flower's records, and read them back.

Flower is imported inside functions, so that importing this module is cheap.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedssl.engines.remote.codec import MalformedError, Packed
from fedssl.engines.remote.disk_states import History
from fedssl.engines.remote.messages import Reply, Request, SecureStep

if TYPE_CHECKING:
    from flwr.app import RecordDict

GREETING = "hello"
_RAW = "fedssl"  # the serialization of arrays: plain bytes


def write_request(request: Request) -> RecordDict:
    """Write a request as Flower's records."""
    from flwr.app import ConfigRecord, RecordDict

    facts: dict[str, Any] = {
        "task": request.task,
        "clients": list(request.clients),
        "samples": [request.samples[k] for k in request.clients if k in request.samples],
        "round": request.round,
        "exchange": request.exchange,
        "weight": request.weight or "",
        "arguments": request.arguments,
        "attempts": list(request.history.names),
        "starts": list(request.history.starts),
        "committed": request.history.committed,
    }
    if request.secure is not None:
        facts["step"] = request.secure.step
    known: dict[str, Any] = {
        name: f"{exchange} {before}" for name, (exchange, before) in request.known.items()
    }
    return RecordDict(
        {
            "request": ConfigRecord(facts),
            "known": ConfigRecord(known),
            "secure": ConfigRecord(
                _name_by_client(request.secure.messages if request.secure else {})
            ),
            "payload": _write_arrays(request.payload),
        }
    )


def read_request(content: RecordDict) -> Request:
    """Read a request; names and numbers that become file names are checked."""
    try:
        return _read_request(content)
    except (KeyError, ValueError, TypeError) as error:
        raise MalformedError(_describe_stranger(error)) from None


def _read_request(content: RecordDict) -> Request:
    facts: dict[str, Any] = dict(content.config_records["request"])
    numbers = [*facts["clients"], *facts["starts"]]
    numbers += [facts[name] for name in ("round", "exchange", "committed", "arguments")]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise MalformedError("a number of the request is not a non-negative integer")
    if not isinstance(facts["task"], str) or not facts["attempts"]:
        raise MalformedError("the request names no task or no attempt")
    if not all(re.fullmatch("[0-9a-f]{8}", str(name)) for name in facts["attempts"]):
        raise MalformedError("the request names an attempt that is not eight hexadecimal digits")
    known = {}
    for name, text in content.config_records["known"].items():
        exchange, _, before = str(text).partition(" ")
        known[name] = (int(exchange), before)
    secure = None
    if "step" in facts:
        messages = _split_by_client(content.config_records["secure"])
        secure = SecureStep(str(facts["step"]), messages)
    return Request(
        facts["task"],
        tuple(facts["clients"]),
        facts["round"],
        facts["exchange"],
        History(tuple(facts["attempts"]), tuple(facts["starts"]), facts["committed"]),
        facts["weight"] or None,
        facts["arguments"],
        _read_arrays(content.array_records["payload"]),
        known,
        secure,
        dict(zip(facts["clients"], facts["samples"], strict=False)),
    )


def read_clients(content: RecordDict) -> list[int]:
    """Read the clients of a request that may be malformed otherwise."""
    facts: Mapping[str, Any] = content.config_records.get("request") or {}
    clients = facts.get("clients")
    return [k for k in clients if type(k) is int] if isinstance(clients, list) else []


def write_replies(replies: Mapping[int, Reply]) -> RecordDict:
    """Write replies as Flower's records; the tensors of client 3 are named ``3/path``."""
    from flwr.app import ConfigRecord, RecordDict

    shares = {str(k): reply.share for k, reply in replies.items() if reply.fault is None}
    faults = {str(k): reply.fault for k, reply in replies.items() if reply.fault is not None}
    return RecordDict(
        {
            "shares": ConfigRecord(dict(shares)),
            "faults": ConfigRecord(dict(faults)),
            "secure": ConfigRecord(_name_by_client({k: r.message for k, r in replies.items()})),
            "replies": _write_arrays(_name_by_client({k: r.tensors for k, r in replies.items()})),
        }
    )


def read_replies(content: RecordDict) -> dict[int, Reply] | str:
    """Read the replies of a node by client, or return why they cannot be read."""
    try:
        tensors = _split_by_client(_read_arrays(content.array_records["replies"]))
        messages = _split_by_client(content.config_records["secure"])
        shares: Mapping[str, Any] = content.config_records["shares"]
        replies = {
            int(k): Reply(float(share), tensors.get(int(k), {}), None, messages.get(int(k), {}))
            for k, share in shares.items()
        }
        faults = content.config_records["faults"].items()
        return replies | {int(k): Reply(fault=str(fault)) for k, fault in faults}
    except (KeyError, ValueError, TypeError) as error:
        return _describe_stranger(error)


def _describe_stranger(error: Exception) -> str:
    return f"a message that fedssl did not write ({type(error).__name__})"


def write_greeting(facts: Mapping[str, str]) -> RecordDict:
    """Write the first question to a site, or the site's answer."""
    from flwr.app import ConfigRecord, RecordDict

    return RecordDict({GREETING: ConfigRecord(dict(facts))})


def read_greeting(content: RecordDict) -> dict[str, str]:
    """Read a site's answer to the first question."""
    return {name: str(value) for name, value in content.config_records[GREETING].items()}


def list_content(content: RecordDict) -> tuple[int, dict[str, Any]]:
    """Return a message's bytes and its entries; of arrays and of keys only type and size.

    The bytes are those of arrays, keys and text.
    """
    total, entries = 0, dict[str, Any]()
    for group, arrays in content.array_records.items():
        for name, array in arrays.items():
            total += len(array.data)
            entries[f"{group}/{name}"] = f"{array.dtype}{list(array.shape)}"
    for group, values in content.config_records.items():
        for name, value in values.items():
            parts = value if isinstance(value, list) else [value]
            secret = [len(part) for part in parts if isinstance(part, bytes)]
            total += sum(secret) + (len(value.encode()) if isinstance(value, str) else 0)
            entries[f"{group}/{name}"] = f"{sum(secret)} bytes" if secret else value
    return total, entries


def _name_by_client(values: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of all clients, those of client 3 as ``3/name``."""
    return {f"{k}/{name}": value for k, own in values.items() for name, value in own.items()}


def _split_by_client(record: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the inverse of :func:`_name_by_client`."""
    values: dict[int, dict[str, Any]] = {}
    for name, value in record.items():
        client, _, path = name.partition("/")
        values.setdefault(int(client), {})[path] = value
    return values


def _write_arrays(packed: Mapping[str, Packed]) -> Any:
    from flwr.app import Array, ArrayRecord

    return ArrayRecord({n: Array(p.dtype, p.shape, _RAW, p.data) for n, p in packed.items()})


def _read_arrays(record: Any) -> dict[str, Packed]:
    return {n: Packed(a.dtype, tuple(a.shape), a.data) for n, a in record.items()}
