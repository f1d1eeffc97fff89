"""Keys, masks and messages, which both sides of a secure sum use.

Every key and mask belongs to one sum, one purpose, and one client or pair.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import TypeAlias

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedssl.privacy.secure.vector import Vector

STEPS = ("keys", "shares", "masked", "agree", "unmask")
KEY, SECRET, NONCE, TAG = 32, 16, 12, 16  # bytes
BUNDLE = NONCE + 2 * SECRET + TAG
CHUNK = 1 << 18  # bytes of keystream at a time: they stay in the processor's cache
PUBLIC = 3  # items of a client's public keys: for bundles, for pairwise masks, and its seed's mark

Message: TypeAlias = "dict[str, list[int] | list[bytes]]"


def label(context: str, purpose: str, *clients: int) -> bytes:
    """Name one use of a key: the sum, the purpose, and the clients."""
    return json.dumps([context, purpose, *clients]).encode()


def derive(secret: bytes, text: bytes) -> bytes:
    """Derive a key for one use from a secret."""
    return HKDF(SHA256(), KEY, salt=None, info=text).derive(secret)


def agree(private: bytes, public: bytes, text: bytes) -> bytes:
    """Derive the key that two clients share, from one's private and the other's public key."""
    key = X25519PrivateKey.from_private_bytes(private)
    return derive(key.exchange(X25519PublicKey.from_public_bytes(public)), text)


def public_key(private: bytes) -> bytes:
    """Return the public key of a private X25519 key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def mask_private(context: str, client: int, secret: bytes) -> bytes:
    """Derive the private key of pairwise masks: Shamir's scheme takes 16 bytes, not 32."""
    return derive(secret, label(context, "mask key", client))


def add_mask(vector: Vector, key: bytes, sign: int) -> None:
    """``vector ± keystream``, in place; the nonce is 0 since a key makes one stream."""
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    zeros, step = memoryview(bytes(CHUNK)), CHUNK // 8
    change = np.add if sign > 0 else np.subtract
    for start in range(0, len(vector), step):
        part = vector[start : start + step]
        change(part, np.frombuffer(stream.update(zeros[: 8 * len(part)]), "<i8"), out=part)


def add_self_mask(vector: Vector, context: str, client: int, seed: bytes, sign: int) -> None:
    """Add or subtract the mask that only one client has."""
    add_mask(vector, derive(seed, label(context, "self mask", client)), sign)


def add_pair_mask(
    vector: Vector,
    context: str,
    asked: str,
    private: bytes,
    public: bytes,
    mine: int,
    peer: int,
    sign: int,
) -> None:
    """Add the mask of a pair for ``mine``: the smaller number adds it, the larger subtracts it.

    ``private`` is the one's and ``public`` the other's; which of them is whose does not matter.
    """
    key = agree(private, public, label(context, f"pair mask {asked}", *sorted((mine, peer))))
    add_mask(vector, key, sign if mine < peer else -sign)


def mark(context: str, purpose: str, secret: bytes, *clients: int) -> bytes:
    """Return the hash by which a secret or a share is recognized. It does not tell the secret."""
    return hashlib.sha256(label(context, f"{purpose} mark", *clients) + secret).digest()


def mark_share(context: str, owner: int, holder: int, share: bytes) -> list[bytes]:
    """Return the marks of both parts of a share that one client gives another."""
    parts = {"seed share": share[:SECRET], "secret share": share[SECRET:]}
    return [mark(context, purpose, part, owner, holder) for purpose, part in parts.items()]


def keys_statement(context: str, client: int, keys: Collection[bytes]) -> bytes:
    """Return the text that a client signs with its public keys."""
    return label(context, "keys", client) + b"".join(keys)


def survivors_statement(context: str, survivors: Collection[int]) -> bytes:
    """Return the text that a client signs to agree to a sum of these clients."""
    return label(context, "survivors", *sorted(survivors))


def read_numbers(message: Mapping[str, object], name: str) -> list[int]:
    """Read a list of clients from a message."""
    value = message.get(name)
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError(f"{name}: not a list of clients")
    if len(set(value)) < len(value):
        raise ValueError(f"{name}: a client is named twice")
    return value


def read_strings(
    message: object, name: str, count: int, lengths: Collection[int] | None
) -> list[bytes]:
    """Read a list of ``count`` keys, marks, shares or signatures from a message."""
    value = message.get(name) if isinstance(message, Mapping) else None
    if not isinstance(value, list) or not all(isinstance(item, bytes) for item in value):
        raise ValueError(f"{name}: not a list of bytes")
    if len(value) != count:
        raise ValueError(f"{name}: {len(value)} items, not {count}")
    if lengths is not None and any(len(item) not in lengths for item in value):
        raise ValueError(f"{name}: an item has the wrong length")
    return value


def check_threshold(threshold: int, clients: int) -> None:
    """Two groups of half the clients could tell a server both secrets of one; one is no sum."""
    if threshold < 2 or not clients < 2 * threshold <= 2 * clients:
        raise ValueError(
            f"threshold {threshold} with {clients} clients: must be at least 2, more than half of "
            "them, and at most all"
        )
