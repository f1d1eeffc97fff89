"""The server's side of a secure sum."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from torch import Tensor

from fedssl.privacy.secure.identity import LONGEST, has_signed
from fedssl.privacy.secure.masks import (
    BUNDLE,
    KEY,
    PUBLIC,
    SECRET,
    Message,
    add_pair_mask,
    add_self_mask,
    check_threshold,
    keys_statement,
    mark,
    mask_private,
    public_key,
    read_strings,
    survivors_statement,
)
from fedssl.privacy.secure.vector import Vector


class SumLost(Exception):
    """There is no sum: the round is to be skipped. ``client`` is the one at fault, if known."""

    client: int | None = None


class NotEnough(SumLost):
    """Fewer clients answered than the threshold."""

    def __init__(self, have: int, need: int) -> None:
        super().__init__(f"{have} clients are left of the {need} that a secure sum needs")
        self.have, self.need = have, need


class Spoiled(SumLost):
    """The masks did not cancel: a client shared a false secret, or sent no masked vector."""

    def __init__(self, problem: str, client: int | None = None) -> None:
        super().__init__(problem)
        self.client = client


class Unmasker:
    """The server's side of one sum of vectors of ``size`` numbers.

    For each step :meth:`ask` and, for each reply, :meth:`take`; then :meth:`total`. ``asked`` is
    the hash of what all clients compute their vectors from. ``identities`` has the public key that
    each client signed with before, and gets those that are new.
    """

    def __init__(
        self,
        clients: Iterable[int],
        context: str,
        threshold: int,
        size: int,
        asked: str,
        identities: dict[int, bytes] | None = None,
    ) -> None:
        self.identities = {} if identities is None else identities
        self.clients, self.context, self.threshold = sorted(clients), context, threshold
        self.asked = asked
        self._check(len(self.clients))
        check_threshold(threshold, len(self.clients))
        self._sum = np.zeros(1 + size, np.int64)
        # Who answered each step, and what; vectors are added as they come.
        self._keys: dict[int, list[bytes]] = {}
        self._bundles: dict[int, list[bytes]] = {}
        self._masked: dict[int, list[bytes]] = {}
        self._agreed: dict[int, list[bytes]] = {}
        self._shares: dict[int, list[bytes]] = {}
        self._signed: dict[int, list[bytes]] = {}  # identity and signature, from the step keys
        self._marks: dict[int, list[bytes]] = {}  # of shares, from the step shares
        self._replies = (self._keys, self._bundles, self._masked, self._agreed, self._shares)
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
        message: Message
        if self._step == 1:
            message = {
                "clients": sorted(self._keys),
                "keys": _join(self._keys),
                "signed": _join(self._signed),
            }
            return dict.fromkeys(self._keys, message)
        if self._step == 2:
            return {client: self._forward(client) for client in self._bundles}
        if self._step == 3:
            message = {"survivors": sorted(self._masked)}
            return dict.fromkeys(self._masked, message)
        message = {"signers": sorted(self._agreed), "signatures": _join(self._agreed)}
        return dict.fromkeys(self._agreed, message)

    def take(self, client: int, reply: object) -> None:
        """Take a client's reply. If it is wrong, ``ValueError`` says why, and the client is out."""
        asked = self._replies[self._step - 1] if self._step else self.clients
        if client not in asked or client in self._replies[self._step]:
            raise ValueError(f"client {client} was not asked, or answers twice")
        read = (
            *(self._read_keys, self._read_bundles, self._read_masked),
            *(self._read_signature, self._read_shares),
        )
        self._replies[self._step][client] = read[self._step](client, reply)

    def total(self) -> Vector:
        """Return the sum of the vectors that came; :class:`SumLost` if there is none."""
        total = self._sum.copy()
        for client in self._masked:
            add_self_mask(total, self.context, client, self._rebuild(client), -1)
        for lost in self._bundles.keys() - self._masked.keys():
            private = mask_private(self.context, lost, self._rebuild(lost))
            for client in self._masked:
                public = self._keys[client][1]
                add_pair_mask(total, self.context, self.asked, private, public, client, lost, -1)
        if total[0] != len(self._masked):
            raise Spoiled("the masks of a secure sum did not cancel: a client sent a false vector")
        return total[1:]

    def _check(self, have: int) -> None:
        if have < self.threshold:
            raise NotEnough(have, self.threshold)

    def _forward(self, client: int) -> Message:
        """Collect the bundles and marks for one client; a sender's are in the order of clients."""
        senders, place = sorted(self._bundles.keys() - {client}), sorted(self._keys).index(client)
        bundles, marks = list[bytes](), list[bytes]()
        for sender in senders:
            receivers = sorted(self._keys.keys() - {sender})
            bundles.append(self._bundles[sender][receivers.index(client)])
            marks += self._marks[sender][2 * place : 2 * place + 2]
        return {"senders": senders, "bundles": bundles, "marks": marks}

    def _rebuild(self, client: int) -> bytes:
        """Rebuild a client's secret from as many of its shares as are needed, and check it."""
        place, numbers = sorted(self._bundles).index(client), sorted(self._keys)
        shares = [
            (1 + numbers.index(holder), held[place])
            for holder, held in self._shares.items()
            if held[place]
        ]
        self._check(len(self._shares))
        if len(shares) >= self.threshold:
            secret = Shamir.combine(shares[: self.threshold], False)
            if self._is_secret(client, secret):
                return secret
        raise Spoiled(f"client {client} shared no secret that could be rebuilt", client)

    def _is_secret(self, client: int, secret: bytes) -> bool:
        """Return whether this is the secret that the client's public keys were made of."""
        _, public, seed_mark = self._keys[client]
        if client in self._masked:
            return mark(self.context, "seed", secret, client) == seed_mark
        return public_key(mask_private(self.context, client, secret)) == public

    def _read_keys(self, client: int, reply: object) -> list[bytes]:
        keys = read_strings(reply, "keys", PUBLIC, {KEY})
        for key in keys[:2]:  # a key that nobody can agree with would stop every peer
            X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key))
        signed = read_strings(reply, "signed", 2, range(1, LONGEST))
        if not has_signed(signed[0], keys_statement(self.context, client, keys), signed[1]):
            raise ValueError("keys: not signed by the client")
        others = [identity for other, identity in self.identities.items() if other != client]
        if {*keys} & {*_join(self._keys)} or signed[0] in others:
            raise ValueError("keys: another client has one of them")
        if self.identities.setdefault(client, signed[0]) != signed[0]:
            raise ValueError("keys: signed with another key than before in this run")
        self._signed[client] = signed
        return keys

    def _read_bundles(self, client: int, reply: object) -> list[bytes]:
        self._marks[client] = read_strings(reply, "marks", 2 * len(self._keys), {KEY})
        return read_strings(reply, "bundles", len(self._keys) - 1, {BUNDLE})

    def _read_masked(self, client: int, reply: object) -> list[bytes]:
        if not isinstance(reply, np.ndarray) or reply.dtype != np.int64:
            raise ValueError("a masked vector has 64-bit integers")
        if reply.shape != self._sum.shape:
            raise ValueError(f"a masked vector of shape {reply.shape}, not {self._sum.shape}")
        self._sum += reply
        return []

    def _read_signature(self, client: int, reply: object) -> list[bytes]:
        signature = read_strings(reply, "signature", 1, range(1, LONGEST))
        statement = survivors_statement(self.context, self._masked)
        if not has_signed(self._signed[client][0], statement, signature[0]):
            raise ValueError("signature: not of this client and these survivors")
        return signature

    def _read_shares(self, client: int, reply: object) -> list[bytes]:
        """Read a client's shares; one false share shows that the client lies."""
        shares = read_strings(reply, "shares", len(self._bundles), {0, SECRET})
        place = sorted(self._keys).index(client)
        for owner, share in zip(sorted(self._bundles), shares, strict=True):
            purpose = "seed share" if owner in self._masked else "secret share"
            told = self._marks[owner][2 * place + (owner not in self._masked)]
            if share and mark(self.context, purpose, share, owner, client) != told:
                raise ValueError(f"a false share of a secret of client {owner}")
        return shares


def _join(items: dict[int, list[bytes]]) -> list[bytes]:
    """Return the items of all clients, in the clients' order."""
    return [item for client in sorted(items) for item in items[client]]
