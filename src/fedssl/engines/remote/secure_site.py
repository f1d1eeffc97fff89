"""A site's part in secure sums, and its record of them, which survives restarts.

A site takes part in one sum per run, round and task. It stores each answer before it sends it. If
the same request comes again, from a server that was started again, it gets the stored bytes. Any
other request for the same step is refused, also if the first one failed: the server must not
learn from failures.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedssl.config import Config
from fedssl.engines.remote.codec import MalformedError, pack
from fedssl.engines.remote.messages import Reply, Request
from fedssl.engines.remote.payload import hash_arguments
from fedssl.federation.sampling import cohort_size
from fedssl.privacy.checks import smallest_sum
from fedssl.util.errors import UserError
from fedssl.util.files import hold_lock, make_folders, replace_file
from fedssl.util.trees import Tree

if TYPE_CHECKING:
    from fedssl.privacy.secure import Masker, Message
    from fedssl.privacy.secure.identity import Identity

KEY, PEERS = "node-config key", "node-config peers"  # settings of a real site

IDENTITY = "identity"  # the file of the key that a site made

Contribute = Callable[[], tuple[float, Tree]]


@dataclass(frozen=True)
class NodeKeys:
    """The files with the key that a site signs with, and with the public keys that it trusts.

    Without ``key`` the site makes a key of its own. Without ``peers`` it trusts the key that each
    client had when the site first met it in the run.
    """

    key: str = ""
    peers: str = ""

    def identity(self, own: Path) -> Identity:
        """Read the site's key: that of the settings or its own, which is made the first time."""
        from fedssl.privacy.secure.identity import load_identity, make_identity

        with _explain(KEY, self.key, "Name a key that ssh-keygen -t ecdsa wrote, no passphrase."):
            return load_identity(Path(self.key).expanduser()) if self.key else make_identity(own)

    def check(self, own: Path) -> None:
        """Refuse files that cannot be used, or a list of peers without this site."""
        mine, trusted = self.identity(own).public, self.trusted()
        if trusted is not None and mine not in trusted:
            problem = "lacks this site's own public key"
            fix = "Collect the public keys of all sites again."
            raise UserError(problem, f"{PEERS} {problem}", key=PEERS, value=self.peers, fix=fix)

    def trusted(self) -> set[bytes] | None:
        """Read the public keys that the site trusts; ``None`` if it has no list of them."""
        from fedssl.privacy.secure.identity import read_public_keys

        with _explain(PEERS, self.peers, "Name a file with one public key in each line."):
            return read_public_keys(Path(self.peers).expanduser()) if self.peers else None


@contextlib.contextmanager
def _explain(key: str, value: str, fix: str) -> Iterator[None]:
    """Turn errors of a key file into one line. The server learns no path."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        problem, public = f"cannot be used ({reason})", f"{key} cannot be used"
        raise UserError(problem, public, key=key, value=value, fix=fix) from None


class SecureSums:
    """The secure sums of one run that one client took part in, in a folder of its own."""

    def __init__(
        self, folder: Path, config: Config, clients: int, keys: NodeKeys, identity: Path
    ) -> None:
        self.folder = folder
        # By the site's own recipe: clients and rounds of the run, fewest and most of a sum.
        self.clients, self.rounds = clients, config.rounds
        self.threshold, self.most = smallest_sum(config, clients), cohort_size(config, clients)
        self.is_weighed = config.privacy.noise is not None  # a reply has its weight already
        self.keys = keys
        self.own_key = identity

    def answer(
        self, client: int, request: Request, payload: Mapping[str, Tensor], contribute: Contribute
    ) -> Reply:
        """Answer a step of a sum, once; the answer is on the disk before it is returned."""
        assert request.secure is not None
        if request.round >= self.rounds:
            raise MalformedError(f"round {request.round + 1}, the run has {self.rounds}")
        if any("@" in name for name in payload):
            raise MalformedError("a sum of clients that were asked differently")
        step, message = request.secure.step, request.secure.messages.get(client, {})
        asked = hash_arguments(payload, request.arguments, request.weight)
        digest = _digest(client, asked, message)
        with hold_lock(self.folder / "lock"):  # Flower may run several processes for one site
            self._forget_before(request)
            record = SumRecord(self.folder / f"{request.round}-{request.task}")
            stored = record.find(step, digest)
            if stored is not None:
                if step == "masked":
                    contribute()  # the client's state belongs to the server's attempt
                return stored
            masker = self._open(record, client, request)
            record.claim(step, digest)
            reply = self._take(masker, step, message, contribute, asked)
            record.add(step, digest, reply, masker)
        return reply

    def _open(self, record: SumRecord, client: int, request: Request) -> Masker:
        from fedssl.privacy.secure import Masker

        assert request.secure is not None
        masker = record.masker()
        if masker is None:
            if request.secure.step != "keys":
                raise MalformedError(f"{request.secure.step} of a sum that this site did not begin")
            masker = Masker(client, request.sum_context, self.threshold)
        return masker

    def _take(
        self, masker: Masker, step: str, message: Message, contribute: Contribute, asked: str
    ) -> Reply:
        from fedssl.privacy.secure import encode

        vector = None
        if step == "masked":
            share, tree = contribute()
            vector = encode(tree, share, masker.participants, not self.is_weighed)
        try:
            if step == "keys":
                return Reply(message=masker.keys(self.keys.identity(self.own_key)))
            if step == "shares":
                reply = Reply(message=masker.shares(message))
                if masker.participants > self.most:
                    raise MalformedError(f"{masker.participants} clients, a round has {self.most}")
                self._check_peers(masker.identities)
                return reply
            if vector is not None:
                masked = torch.from_numpy(masker.masked(message, vector, asked))
                return Reply(tensors=pack({"masked": masked}))
            if step == "agree":
                identity = self.keys.identity(self.own_key)
                return Reply(message=masker.agree(message, identity))
            if step == "unmask":
                return Reply(message=masker.unmask(message))
        except ValueError as error:  # these texts hold no data
            raise MalformedError(str(error)) from None
        raise MalformedError(f"a secure sum has no step {step!r}")

    def _check_peers(self, identities: Mapping[int, bytes]) -> None:
        """Refuse clients with keys that this site does not trust."""
        trusted, path = self.keys.trusted(), self.folder / "peers.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        met = {str(client): identity.decode() for client, identity in identities.items()}
        for client, identity in met.items():
            if trusted is not None and identity.encode() not in trusted:
                raise MalformedError(f"the key of client {client} is not among this site's peers")
            if known.get(client, identity) != identity:
                raise MalformedError(f"client {client} has another key than before in this run")
            if int(client) not in range(self.clients):
                raise MalformedError(f"client {client}, the run has only {self.clients}")
        if not met.keys() <= known.keys():
            _write(path, json.dumps(known | met).encode())

    def _forget_before(self, request: Request) -> None:
        """Delete the sums of rounds that the server's checkpoint holds, and never do them again."""
        path = self.folder / "first_round"
        before = int(path.read_text()) if path.exists() else 0
        if request.round < before:
            raise MalformedError(f"round {request.round + 1} was done already")
        first = max(before, min(request.history.committed, request.round))
        if first > before:
            _write(path, str(first).encode())
            for old in self.folder.glob("*-*"):
                if int(old.name.partition("-")[0]) < first:
                    shutil.rmtree(old, ignore_errors=True)


class SumRecord:
    """A client's replies and secrets in one sum, kept in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "sum.json"
        self._content: dict[str, Any] = {"answers": {}}
        if self.path.exists():
            self._content = json.loads(self.path.read_text())

    def masker(self) -> Masker | None:
        """Return the client's side of the sum, as the last answer left it."""
        from fedssl.privacy.secure import Masker

        state = self._content.get("masker")
        return None if state is None else Masker.from_bytes(state.encode())

    def find(self, step: str, digest: str) -> Reply | None:
        """Return the answer to the same request; refuse another request for the same step."""
        answer = self._content["answers"].get(step)
        if answer is None:
            return None
        if answer["digest"] != digest:
            raise MalformedError(f"{step} of this sum was answered already, for another request")
        if step == "masked":
            return Reply(tensors=pack({"masked": torch.from_numpy(np.load(self._vector))}))
        stored = answer["message"].items()
        message: Message = {n: [bytes.fromhex(v) for v in values] for n, values in stored}
        return Reply(message=message)

    def claim(self, step: str, digest: str) -> None:
        """Note which vector was asked for first, before it is computed; refuse any other."""
        if step == "masked":
            if self._content.setdefault("claim", digest) != digest:
                raise MalformedError("masked of this sum was asked for already, in another way")
            self._write()

    def add(self, step: str, digest: str, reply: Reply, masker: Masker) -> None:
        """Write an answer and the secrets for the next step to the disk."""
        if reply.tensors:
            with replace_file(self._vector, private=True) as new, new.open("wb") as file:
                np.save(file, np.frombuffer(reply.tensors["masked"].data, np.int64))
        hexed = json.dumps(reply.message, default=bytes.hex)
        self._content["masker"] = masker.to_bytes().decode()
        self._content["answers"][step] = {"digest": digest, "message": json.loads(hexed)}
        self._write()

    def _write(self) -> None:
        make_folders(self.folder, 0o700)
        _write(self.path, json.dumps(self._content).encode())

    @property
    def _vector(self) -> Path:
        return self.folder / "masked.npy"


def _digest(client: int, asked: str, message: Message) -> str:
    """Return the hash of all that an answer depends on, except the client's images and state."""
    facts = json.dumps([client, asked, dict(message)], default=bytes.hex, sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()


def _write(path: Path, data: bytes) -> None:
    with replace_file(path, private=True) as new:
        new.write_bytes(data)
