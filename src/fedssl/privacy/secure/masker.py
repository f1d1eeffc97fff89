"""A client's side of a secure sum."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedssl.privacy.secure.identity import Identity, has_signed
from fedssl.privacy.secure.masks import (
    BUNDLE,
    KEY,
    NONCE,
    PUBLIC,
    SECRET,
    STEPS,
    Message,
    add_pair_mask,
    add_self_mask,
    agree,
    check_threshold,
    keys_statement,
    label,
    mark,
    mark_share,
    mask_private,
    public_key,
    read_numbers,
    read_strings,
    survivors_statement,
)
from fedssl.privacy.secure.vector import Vector


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
    peers: dict[int, list[bytes]] = field(default_factory=dict, repr=False)  # keys, mine too
    identities: dict[int, bytes] = field(default_factory=dict, repr=False)  # mine too
    held: dict[int, bytes] = field(default_factory=dict, repr=False)  # shares, of mine too
    survivors: list[int] = field(default_factory=list)  # those that I signed

    def to_bytes(self) -> bytes:
        """Return the state, to be kept as carefully as the client's data."""
        return json.dumps(asdict(self), default=bytes.hex).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Masker:
        """Restore the state of :meth:`to_bytes`."""
        state: dict[str, Any] = json.loads(data)
        for name in ("box", "secret", "seed"):
            state[name] = bytes.fromhex(state[name])
        for name in ("held", "identities"):
            state[name] = {int(peer): bytes.fromhex(item) for peer, item in state[name].items()}
        state["peers"] = {
            int(peer): [bytes.fromhex(key) for key in keys] for peer, keys in state["peers"].items()
        }
        return cls(**state)

    @property
    def participants(self) -> int:
        """Number of vectors that the sum may have, known after the step ``shares``."""
        return len(self.peers)

    def keys(self, identity: Identity) -> Message:
        """Step 1: this client's public keys, with its identity and signature."""
        self._expect("keys")
        keys = self._public_keys()
        signature = identity.sign(keys_statement(self.context, self.me, keys))
        self.identities = {self.me: identity.public}
        self.step += 1
        return {"keys": keys, "signed": [identity.public, signature]}

    def shares(self, message: Mapping[str, object]) -> Message:
        """Step 2: for each peer, a bundle that only it can open, with its shares of my secrets."""
        self._expect("shares")
        peers, identities = read_peers(self.context, message)
        check_threshold(self.threshold, len(peers))
        if peers.get(self.me) != self._public_keys() or (
            identities[self.me] != self.identities[self.me]
        ):
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
        self.peers, self.identities, self.held = peers, identities, {self.me: shares[self.me]}
        self.step += 1
        others = {peer: share for peer, share in shares.items() if peer != self.me}
        marks = [mark_share(self.context, self.me, peer, share) for peer, share in shares.items()]
        return {
            "bundles": [self._seal(peer, share) for peer, share in others.items()],
            "marks": [each for both in marks for each in both],
        }

    def masked(self, message: Mapping[str, object], vector: Vector, asked: str) -> Vector:
        """Step 3: the vector, masked (and one number longer).

        ``asked`` is the hash of all that the vector was computed from, except the client's data.
        Masks of clients that were asked differently do not cancel.
        """
        self._expect("masked")
        senders = read_numbers(message, "senders")
        bundles = read_strings(message, "bundles", len(senders), None)
        marks = read_strings(message, "marks", 2 * len(senders), {KEY})
        if self.me in senders or not set(senders) <= self.peers.keys():
            raise ValueError("senders: not peers of this sum")
        if len(senders) + 1 < self.threshold:
            raise ValueError(f"{len(senders) + 1} participants, fewer than the threshold")
        if vector.dtype != np.int64 or vector.ndim != 1:
            raise ValueError("not an encoded vector")
        out = np.concatenate((np.ones(1, np.int64), vector))
        add_self_mask(out, self.context, self.me, self.seed, 1)
        private = mask_private(self.context, self.me, self.secret)
        for peer in senders:
            public = self.peers[peer][1]
            add_pair_mask(out, self.context, asked, private, public, self.me, peer, 1)
        for i, (peer, bundle) in enumerate(zip(senders, bundles, strict=True)):
            share = self._open(peer, bundle)
            told = marks[2 * i : 2 * i + 2]
            # Else others may hold enough shares of this peer.
            if share is not None and mark_share(self.context, peer, self.me, share) == told:
                self.held[peer] = share
        self.peers = {peer: self.peers[peer] for peer in (*senders, self.me)}
        self.box = self.secret = self.seed = b""  # not needed any more, so not to be found
        self.step += 1
        return out

    def agree(self, message: Mapping[str, object], identity: Identity) -> Message:
        """Step 4: my signature under the list of those whose vectors came."""
        self._expect("agree")
        survivors = read_numbers(message, "survivors")
        if not set(survivors) <= self.peers.keys() or self.me not in survivors:
            raise ValueError("survivors: not this client and peers of its sum")
        if len(survivors) < self.threshold:
            raise ValueError(f"{len(survivors)} survivors, fewer than the threshold")
        self.survivors = sorted(survivors)
        self.step += 1
        return {"signature": [identity.sign(survivors_statement(self.context, survivors))]}

    def unmask(self, message: Mapping[str, object]) -> Message:
        """Step 5: a share of each participant's self mask if it survived, else of its key."""
        self._expect("unmask")
        signers = read_numbers(message, "signers")
        signatures = read_strings(message, "signatures", len(signers), None)
        if not set(signers) <= set(self.survivors):
            raise ValueError("signers: not survivors of this sum")
        if len(signers) < self.threshold:
            raise ValueError(f"{len(signers)} signers, fewer than the threshold")
        statement = survivors_statement(self.context, self.survivors)
        for signer, signature in zip(signers, signatures, strict=True):
            if not has_signed(self.identities[signer], statement, signature):
                raise ValueError(f"client {signer} did not sign the survivors that this one signed")
        shares = []
        for peer in sorted(self.peers):
            share = self.held.get(peer, b"")
            shares.append(share[:SECRET] if peer in self.survivors else share[SECRET:])
        self.held = {}
        self.step += 1
        return {"shares": shares}

    def _expect(self, step: str) -> None:
        if STEPS[self.step : self.step + 1] != (step,):
            raise ValueError(f"{step} was asked out of turn, or a second time")

    def _public_keys(self) -> list[bytes]:
        private = mask_private(self.context, self.me, self.secret)
        seed_mark = mark(self.context, "seed", self.seed, self.me)
        return [public_key(self.box), public_key(private), seed_mark]

    def _seal(self, peer: int, share: bytes) -> bytes:
        text, nonce = label(self.context, "share", self.me, peer), os.urandom(NONCE)
        key = agree(self.box, self.peers[peer][0], text)
        return nonce + ChaCha20Poly1305(key).encrypt(nonce, share, text)

    def _open(self, peer: int, bundle: bytes) -> bytes | None:
        """Return the shares that a peer sent me, ``None`` if they are not from it, or no shares."""
        if len(bundle) != BUNDLE:
            return None
        text = label(self.context, "share", peer, self.me)
        key = agree(self.box, self.peers[peer][0], text)
        try:
            return ChaCha20Poly1305(key).decrypt(bundle[:NONCE], bundle[NONCE:], text)
        except InvalidTag:
            return None


def read_peers(
    context: str, message: Mapping[str, object]
) -> tuple[dict[int, list[bytes]], dict[int, bytes]]:
    """Read all clients' public keys and identities; refuse equal ones, and what is not signed."""
    clients = read_numbers(message, "clients")
    keys = read_strings(message, "keys", PUBLIC * len(clients), {KEY})
    signed = read_strings(message, "signed", 2 * len(clients), None)
    peers = {client: keys[PUBLIC * i : PUBLIC * (i + 1)] for i, client in enumerate(clients)}
    identities = dict(zip(clients, signed[::2], strict=True))
    signatures = dict(zip(clients, signed[1::2], strict=True))
    if len(set(keys)) < len(keys) or len(set(identities.values())) < len(identities):
        raise ValueError("two clients have the same key")
    for client, identity in identities.items():
        statement = keys_statement(context, client, peers[client])
        if not has_signed(identity, statement, signatures[client]):
            raise ValueError(f"the keys of client {client} are not signed by it")
    return peers, identities
