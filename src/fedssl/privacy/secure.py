"""Secure sums: a server learns the sum of its clients' vectors and no single one of them.

Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning", for a
server that is curious but keeps to the protocol. A sum takes four steps (``STEPS``), each a message
to the clients and their replies; a client that misses a step, or answers it wrongly, is out:

keys
    Each client makes two X25519 key pairs: one for talking to a peer past the server, one that its
    pairwise masks come from.
shares
    Each client shares two secrets among all, so that ``threshold`` of them can rebuild either: the
    seed of its self mask, and the secret that its mask key pair derives from.
masked
    Each client sends its vector plus its self mask, plus or minus a mask that it has in common with
    each peer; the latter cancel in the sum.
unmask
    The server names those whose vectors came. Each client tells its shares of their self masks, and
    of the mask keys of the others, never both of one: with both, that client's vector is naked.

A client that sends false shares or a false vector spoils the sum, since nobody may look at its part
alone. One number more in each vector, a 1, shows masks that did not cancel (:class:`Spoiled`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray
from torch import Tensor

from fedssl.util.trees import Tree, flatten, unflatten

STEPS = ("keys", "shares", "masked", "unmask")
SCALE = 2.0**32
KEY, SECRET, NONCE, TAG = 32, 16, 12, 16  # bytes
BUNDLE = NONCE + 2 * SECRET + TAG
CHUNK = 1 << 18  # bytes of keystream at a time: they stay in the processor's cache

Vector: TypeAlias = NDArray[np.int64]  # two's complement: sums are mod 2⁶⁴
Message: TypeAlias = "dict[str, list[int] | list[bytes]]"


class SumLost(Exception):
    """There is no sum: the round is to be skipped."""


class NotEnough(SumLost):
    """Fewer clients answered than the threshold."""

    def __init__(self, have: int, need: int) -> None:
        super().__init__(f"{have} clients are left of the {need} that a secure sum needs")
        self.have, self.need = have, need


class Spoiled(SumLost):
    """The masks did not cancel: a client sent a false share, or no masked vector."""


# The vector


def size(like: Tree) -> int:
    """Count the numbers in the vector of a tree: its weight and its leaves."""
    return 1 + sum(leaf.numel() for leaf in flatten(like).values())


def encode(tree: Tree, weight: float, participants: int) -> Vector:
    """``[weight, weight · leaves …]`` in fixed point, 2⁻³² a unit; leaves in the order of names.

    Rounding costs a client at most 2⁻³³ a number. The mean of n clients differs from the plain one
    by at most n · 2⁻³³ / Σ weights (times 1 + |mean| if weights are no multiples of 2⁻³²), and by
    the float64 rounding of products and of the decoded sum. What could overflow the sum of
    ``participants`` such vectors is refused.
    """
    flat = flatten(tree)
    parts = [torch.ones(1, dtype=torch.float64)]
    parts += [flat[name].detach().to("cpu", torch.float64).reshape(-1) for name in sorted(flat)]
    units = torch.cat(parts).mul_(weight * SCALE).round_().numpy()
    largest = float(np.abs(units).max())
    if not math.isfinite(largest):
        raise ValueError("a number to be summed is not finite")
    if int(largest) * participants >= 2**63:
        raise ValueError(
            f"a number to be summed is {largest / SCALE:.3g} with its weight: a secure sum of "
            f"{participants} clients holds less than {2**31 / participants:.3g}"
        )
    return units.astype(np.int64)


def decode(total: Vector, like: Tree) -> tuple[Tree, float]:
    """Σ weight · tree (in float64, with the names and shapes of ``like``) and Σ weight."""
    numbers = torch.from_numpy(total / SCALE)
    flat, start = flatten(like), 1
    out: dict[str, Tensor] = {}
    for name in sorted(flat):
        end = start + flat[name].numel()
        out[name] = numbers[start:end].reshape(flat[name].shape)
        start = end
    return out[""] if isinstance(like, Tensor) else unflatten(out), float(numbers[0])


# Keys and masks: every one belongs to one sum, one purpose, and one client or pair


def _label(context: str, purpose: str, *clients: int) -> bytes:
    return json.dumps([context, purpose, *clients]).encode()


def _derive(secret: bytes, label: bytes) -> bytes:
    return HKDF(SHA256(), KEY, salt=None, info=label).derive(secret)


def _agree(private: bytes, public: bytes, label: bytes) -> bytes:
    """Derive the key that two clients share, from one's private and the other's public key."""
    key = X25519PrivateKey.from_private_bytes(private)
    return _derive(key.exchange(X25519PublicKey.from_public_bytes(public)), label)


def _public(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def _mask_private(context: str, client: int, secret: bytes) -> bytes:
    """Derive the private key of pairwise masks: Shamir's scheme takes 16 bytes, not 32."""
    return _derive(secret, _label(context, "mask key", client))


def _add_mask(vector: Vector, key: bytes, sign: int) -> None:
    """``vector ± keystream``, in place; the nonce is 0 since a key makes one stream."""
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    zeros, step = memoryview(bytes(CHUNK)), CHUNK // 8
    change = np.add if sign > 0 else np.subtract
    for start in range(0, len(vector), step):
        part = vector[start : start + step]
        change(part, np.frombuffer(stream.update(zeros[: 8 * len(part)]), "<i8"), out=part)


def _add_self_mask(vector: Vector, context: str, client: int, seed: bytes, sign: int) -> None:
    _add_mask(vector, _derive(seed, _label(context, "self mask", client)), sign)


def _add_pair_mask(
    vector: Vector, context: str, private: bytes, public: bytes, mine: int, peer: int, sign: int
) -> None:
    """Add the mask of a pair for ``mine``: the smaller number adds it, the larger subtracts it.

    ``private`` is the one's and ``public`` the other's; which of them is whose does not matter.
    """
    key = _agree(private, public, _label(context, "pair mask", *sorted((mine, peer))))
    _add_mask(vector, key, sign if mine < peer else -sign)


# Messages


def _numbers(message: Mapping[str, object], name: str) -> list[int]:
    value = message.get(name)
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError(f"{name}: not a list of clients")
    if len(set(value)) < len(value):
        raise ValueError(f"{name}: a client is named twice")
    return value


def _strings(
    message: object, name: str, count: int, lengths: Collection[int] | None
) -> list[bytes]:
    value = message.get(name) if isinstance(message, Mapping) else None
    if not isinstance(value, list) or not all(isinstance(item, bytes) for item in value):
        raise ValueError(f"{name}: not a list of bytes")
    if len(value) != count:
        raise ValueError(f"{name}: {len(value)} items, not {count}")
    if lengths is not None and any(len(item) not in lengths for item in value):
        raise ValueError(f"{name}: an item has the wrong length")
    return value


def _check_threshold(threshold: int, clients: int) -> None:
    """Two groups of half the clients could tell a server both secrets of one; one is no sum."""
    if threshold < 2 or not clients < 2 * threshold <= 2 * clients:
        raise ValueError(
            f"threshold {threshold} with {clients} clients: must be at least 2, more than half of "
            "them, and at most all"
        )


# The two sides


@dataclass
class Masker:
    """A client's side of one sum: one method for each step, called once, in order.

    A step may run in another process than the one before: the state between them is
    :meth:`to_bytes`, and is to be stored before the reply is sent (a client that answers a step
    twice tells too much). What the server may not ask raises ``ValueError`` and changes nothing.
    """

    me: int
    context: str  # names the sum: run, round and task; all sides must have the same
    threshold: int
    step: int = 0
    box: bytes = field(default_factory=lambda: os.urandom(KEY), repr=False)
    secret: bytes = field(default_factory=lambda: os.urandom(SECRET), repr=False)
    seed: bytes = field(default_factory=lambda: os.urandom(SECRET), repr=False)
    peers: dict[int, list[bytes]] = field(default_factory=dict, repr=False)  # public keys, and mine
    held: dict[int, bytes] = field(default_factory=dict, repr=False)  # shares, of mine too

    def to_bytes(self) -> bytes:
        """Return the state, to be kept as carefully as the client's data."""
        return json.dumps(asdict(self), default=bytes.hex).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Masker:
        """Restore the state of :meth:`to_bytes`."""
        state: dict[str, Any] = json.loads(data)
        for name in ("box", "secret", "seed"):
            state[name] = bytes.fromhex(state[name])
        state["peers"] = {
            int(peer): [bytes.fromhex(key) for key in keys] for peer, keys in state["peers"].items()
        }
        state["held"] = {int(peer): bytes.fromhex(held) for peer, held in state["held"].items()}
        return cls(**state)

    @property
    def participants(self) -> int:
        """Number of vectors that the sum may have, known after the step ``shares``."""
        return len(self.peers)

    def keys(self) -> Message:
        """Step 1: this client's public keys."""
        self._expect("keys")
        self.step += 1
        return {"keys": self._public_keys()}

    def shares(self, message: Mapping[str, object]) -> Message:
        """Step 2: for each peer, a bundle that only it can open, with its shares of my secrets."""
        self._expect("shares")
        clients = _numbers(message, "clients")
        keys = _strings(message, "keys", 2 * len(clients), {KEY})
        peers = {client: keys[2 * i : 2 * i + 2] for i, client in enumerate(clients)}
        _check_threshold(self.threshold, len(peers))
        if peers.get(self.me) != self._public_keys():
            raise ValueError("the server has other keys of this client than it sent")
        parts = zip(
            Shamir.split(self.threshold, len(peers), self.seed, False),
            Shamir.split(self.threshold, len(peers), self.secret, False),
            strict=True,
        )
        shares = {
            client: seed + secret
            for client, ((_, seed), (_, secret)) in zip(sorted(peers), parts, strict=True)
        }
        self.peers, self.held = peers, {self.me: shares.pop(self.me)}
        self.step += 1
        return {"bundles": [self._seal(peer, share) for peer, share in shares.items()]}

    def masked(self, message: Mapping[str, object], vector: Vector) -> Vector:
        """Step 3: the vector, masked (and one number longer)."""
        self._expect("masked")
        senders = _numbers(message, "senders")
        bundles = _strings(message, "bundles", len(senders), None)
        if self.me in senders or not set(senders) <= self.peers.keys():
            raise ValueError("senders: not peers of this sum")
        if len(senders) + 1 < self.threshold:
            raise ValueError(f"{len(senders) + 1} participants, fewer than the threshold")
        if vector.dtype != np.int64 or vector.ndim != 1:
            raise ValueError("not an encoded vector")
        out = np.concatenate((np.ones(1, np.int64), vector))
        _add_self_mask(out, self.context, self.me, self.seed, 1)
        private = _mask_private(self.context, self.me, self.secret)
        for peer in senders:
            _add_pair_mask(out, self.context, private, self.peers[peer][1], self.me, peer, 1)
        for peer, bundle in zip(senders, bundles, strict=True):
            share = self._open(peer, bundle)
            if share is not None:  # else others may hold enough shares of this peer
                self.held[peer] = share
        self.peers = {peer: self.peers[peer] for peer in (*senders, self.me)}
        self.box = self.secret = self.seed = b""  # not needed any more, so not to be found
        self.step += 1
        return out

    def unmask(self, message: Mapping[str, object]) -> Message:
        """Step 4: a share of each participant's self mask if its vector came, else of its key."""
        self._expect("unmask")
        survivors, dropped = _numbers(message, "survivors"), _numbers(message, "dropped")
        if set(survivors) & set(dropped):
            raise ValueError("a client is named both as survivor and as dropped")
        if set(survivors) | set(dropped) != self.peers.keys() or self.me not in survivors:
            raise ValueError("survivors and dropped are not the participants of this sum")
        if len(survivors) < self.threshold:
            raise ValueError(f"{len(survivors)} survivors, fewer than the threshold")
        shares = []
        for peer in sorted(self.peers):
            share = self.held.get(peer, b"")
            shares.append(share[:SECRET] if peer in survivors else share[SECRET:])
        self.held = {}
        self.step += 1
        return {"shares": shares}

    def _expect(self, step: str) -> None:
        if STEPS[self.step : self.step + 1] != (step,):
            raise ValueError(f"{step} was asked out of turn, or a second time")

    def _public_keys(self) -> list[bytes]:
        mask = _mask_private(self.context, self.me, self.secret)
        return [_public(self.box), _public(mask)]

    def _seal(self, peer: int, share: bytes) -> bytes:
        label, nonce = _label(self.context, "share", self.me, peer), os.urandom(NONCE)
        key = _agree(self.box, self.peers[peer][0], label)
        return nonce + ChaCha20Poly1305(key).encrypt(nonce, share, label)

    def _open(self, peer: int, bundle: bytes) -> bytes | None:
        """Return the shares that a peer sent me, ``None`` if they are not from it, or no shares."""
        if len(bundle) != BUNDLE:
            return None
        label = _label(self.context, "share", peer, self.me)
        key = _agree(self.box, self.peers[peer][0], label)
        try:
            return ChaCha20Poly1305(key).decrypt(bundle[:NONCE], bundle[NONCE:], label)
        except InvalidTag:
            return None


class Unmasker:
    """The server's side of one sum of vectors of ``size`` numbers.

    Four times :meth:`ask` and, for each reply, :meth:`take`; then :meth:`total`.
    """

    def __init__(self, clients: Iterable[int], context: str, threshold: int, size: int) -> None:
        self.clients, self.context, self.threshold = sorted(clients), context, threshold
        _check_threshold(threshold, len(self.clients))
        self._sum = np.zeros(1 + size, np.int64)
        # Who answered each step, and what; vectors are added as they come.
        self._keys: dict[int, list[bytes]] = {}
        self._bundles: dict[int, list[bytes]] = {}
        self._masked: dict[int, list[bytes]] = {}
        self._shares: dict[int, list[bytes]] = {}
        self._replies = (self._keys, self._bundles, self._masked, self._shares)
        self._step = -1

    @property
    def like(self) -> Tensor:
        """A tensor with the shape and type of a masked vector."""
        return torch.from_numpy(self._sum)

    def ask(self) -> dict[int, Message]:
        """Return the next step's message to each remaining client; :class:`NotEnough` if too few.

        Replies of the step before are no longer taken.
        """
        if self._step >= 0:
            self._check(len(self._replies[self._step]))
        self._step += 1
        if self._step == 0:
            return {client: {} for client in self.clients}
        if self._step == 1:
            keys = [key for client in sorted(self._keys) for key in self._keys[client]]
            return {client: {"clients": sorted(self._keys), "keys": keys} for client in self._keys}
        if self._step == 2:
            return {client: self._forward(client) for client in self._bundles}
        dropped = sorted(self._bundles.keys() - self._masked.keys())
        return {
            client: {"survivors": sorted(self._masked), "dropped": dropped}
            for client in self._masked
        }

    def take(self, client: int, reply: object) -> None:
        """Take a client's reply. If it is wrong, ``ValueError`` says why, and the client is out."""
        asked = self._replies[self._step - 1] if self._step else self.clients
        if client not in asked or client in self._replies[self._step]:
            raise ValueError(f"client {client} was not asked, or answers twice")
        read = (self._read_keys, self._read_bundles, self._read_masked, self._read_shares)
        self._replies[self._step][client] = read[self._step](reply)

    def total(self) -> Vector:
        """Return the sum of the vectors that came; :class:`SumLost` if there is none."""
        total = self._sum.copy()
        for client in self._masked:
            _add_self_mask(total, self.context, client, self._rebuild(client), -1)
        for lost in self._bundles.keys() - self._masked.keys():
            private = _mask_private(self.context, lost, self._rebuild(lost))
            for client in self._masked:
                public = self._keys[client][1]
                _add_pair_mask(total, self.context, private, public, client, lost, -1)
        if total[0] != len(self._masked):
            raise Spoiled("the masks of a secure sum did not cancel: a client sent something false")
        return total[1:]

    def _check(self, have: int) -> None:
        if have < self.threshold:
            raise NotEnough(have, self.threshold)

    def _forward(self, client: int) -> Message:
        """Collect the bundles for one client; a sender's are in the order of its peers."""
        senders = sorted(self._bundles.keys() - {client})
        bundles = []
        for sender in senders:
            receivers = sorted(self._keys.keys() - {sender})
            bundles.append(self._bundles[sender][receivers.index(client)])
        return {"senders": senders, "bundles": bundles}

    def _rebuild(self, client: int) -> bytes:
        """Rebuild a client's secret from as many of its shares as are needed."""
        place, numbers = sorted(self._bundles).index(client), sorted(self._keys)
        shares = [
            (1 + numbers.index(holder), held[place])
            for holder, held in self._shares.items()
            if held[place]
        ]
        self._check(len(shares))
        return Shamir.combine(shares[: self.threshold], False)

    def _read_keys(self, reply: object) -> list[bytes]:
        keys = _strings(reply, "keys", 2, {KEY})
        for key in keys:  # a key that nobody can agree with would stop every peer
            X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key))
        return keys

    def _read_bundles(self, reply: object) -> list[bytes]:
        return _strings(reply, "bundles", len(self._keys) - 1, {BUNDLE})

    def _read_masked(self, reply: object) -> list[bytes]:
        if not isinstance(reply, np.ndarray) or reply.dtype != np.int64:
            raise ValueError("a masked vector has 64-bit integers")
        if reply.shape != self._sum.shape:
            raise ValueError(f"a masked vector of shape {reply.shape}, not {self._sum.shape}")
        self._sum += reply
        return []

    def _read_shares(self, reply: object) -> list[bytes]:
        return _strings(reply, "shares", len(self._bundles), {0, SECRET})
