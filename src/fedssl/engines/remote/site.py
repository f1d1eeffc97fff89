"""A client's end of a message: the task that was asked for, done here; only the reply leaves."""

from __future__ import annotations

import hashlib
import shutil
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from fedssl.engines.remote.codec import Malformed, Packed, pack, tensors
from fedssl.engines.store import History, Store
from fedssl.federation.aggregate import Weight
from fedssl.federation.client import Client
from fedssl.federation.server import learning_rates
from fedssl.privacy import survivors_needed
from fedssl.runs.build import Experiment
from fedssl.util.errors import UserError
from fedssl.util.files import save
from fedssl.util.trees import Tree, unflatten

if TYPE_CHECKING:
    from fedssl.privacy.secure import Message

CHANGE = "change"  # the leaf of a reply that holds the model's change


@dataclass(frozen=True)
class Request:
    """One exchange, as a node is asked: which task, for whom, with what.

    The payload's tensors are named ``position/path``, or ``position@client/path`` where each client
    gets its own. Those in ``known`` came with an earlier exchange of the round: name → exchange and
    name there.
    """

    task: str
    clients: tuple[int, ...]
    round: int
    exchange: int  # its number within the round
    history: History
    weight: Weight | None = None  # of a mean; none: the reply goes as it is
    arguments: int = 0
    payload: Mapping[str, Packed] = field(default_factory=dict)
    known: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    secure: SecureStep | None = None
    samples: Mapping[int, int] = field(default_factory=dict)  # images that each client started with


@dataclass(frozen=True)
class SecureStep:
    """Which step of which secure sum, the least survivors, and the step's messages by client."""

    step: str
    context: str
    threshold: int
    messages: Mapping[int, Message] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """What one client sends back: its share in a mean and its tensors, or why there are none.

    In a secure sum: the step's message; the masked vector is the only tensor, without a share.
    """

    share: float = 1.0
    tensors: Mapping[str, Packed] = field(default_factory=dict)
    fault: str | None = None
    message: Message = field(default_factory=dict)


class Site:
    """The clients that live here: one on a real site, any of a partition in a simulation."""

    def __init__(self, session: Experiment, folder: Path, place: str = "0", alone: bool = False):
        self.session = session
        self.store = Store(folder)
        self.received = folder / f"received-{place}"
        self.alone = alone  # all data here is one client's, whatever number the server gave it
        self.half = (CHANGE,) if session.config.engine.updates == "fp16" else ()

    def answer(self, request: Request) -> dict[int, Reply]:
        """Each client's reply; one that fails costs only its own."""
        try:
            self._allow(request)
            payload = self._payload(request)
        except Exception as error:
            fault = describe(error, self.alone)
            return {client: Reply(fault=fault) for client in request.clients}
        return {client: self._one(client, request, payload) for client in request.clients}

    def _allow(self, request: Request) -> None:
        """Only what the algorithm declares is answered, and only in the declared way."""
        algorithm, privacy = self.session.algorithm, self.session.config.privacy
        if (request.secure is not None) != privacy.secure:
            raise UserError(
                f"task {request.task}: this site answers only "
                + ("in secure sums" if privacy.secure else "in the open")
            )
        logs = tuple(algorithm.logs) if self.session.engine.aggregator.allows_client_logs else ()
        if self.session.trainer.census is None:  # a real site
            logs = tuple(task for task in logs if task not in algorithm.simulated)
        means = algorithm.asked(privacy.secure)
        allowed = means if request.weight is not None else (*algorithm.gathers, *logs)
        if self.alone and len(request.clients) != 1:
            asked = len(request.clients)
            raise UserError(f"task {request.task}: this site is one client, not {asked}")
        if request.task not in allowed:
            raise UserError(
                f"task {request.task}: not among what this site answers "
                f"({', '.join(allowed) or 'nothing'})"
            )

    def _one(self, client: int, request: Request, payload: dict[str, Tensor]) -> Reply:
        try:
            self._check_samples(client, request)
            if request.secure is not None:
                return self._secure(client, request, request.secure, payload)
            share, reply = self.contribution(client, request, payload)
            return Reply(share, pack(reply, self.half))
        except Exception as error:
            return Reply(fault=describe(error, self.alone))

    def _check_samples(self, client: int, request: Request) -> None:
        """In a secure sum the server cannot see that a weight is another one than at the start."""
        now = int(self.session.engine.groups.sizes[0 if self.alone else client])
        before = request.samples.get(client, now)
        if now != before:
            raise UserError(
                f"{now} images, where the run started with {before}; put them back as they were, "
                "or start a new run"
            )

    def _secure(
        self, client: int, request: Request, secure: SecureStep, payload: dict[str, Tensor]
    ) -> Reply:
        """One step of a secure sum; what the client must not forget is written before it speaks."""
        from fedssl.privacy.secure import Masker, encode

        name = hashlib.sha256(secure.context.encode()).hexdigest()[:32]
        path = self.store.folder / "secrets" / f"{client}-{name}"
        told, message = Reply(), secure.messages.get(client, {})
        if secure.step == "keys":
            _clear_secrets(path, client)
            masker = Masker(client, secure.context, secure.threshold)
            told = Reply(message=masker.keys())
        else:
            masker = Masker.from_bytes(path.read_bytes())
        if secure.step == "shares":
            self._check_threshold(len(cast("list[int]", message["clients"])), masker.threshold)
            told = Reply(message=masker.shares(message))
        elif secure.step == "masked":
            share, tree = self.contribution(client, request, payload)
            vector = masker.masked(message, encode(tree, share, masker.participants))
            told = Reply(tensors=pack({"masked": torch.from_numpy(vector)}))
        elif secure.step == "unmask":
            told = Reply(message=masker.unmask(message))
        _write_secret(path, masker.to_bytes())
        return told

    def _check_threshold(self, clients: int, threshold: int) -> None:
        """A server must not talk sites into smaller sums than they agreed to."""
        share = self.session.config.privacy.threshold
        if threshold < survivors_needed(share, clients):
            raise UserError(f"privacy.threshold={share}: not met by {threshold} of {clients}")

    def contribution(
        self, client: int, request: Request, payload: dict[str, Tensor]
    ) -> tuple[float, Tree]:
        """Do the task; the client's state is kept before anything is said."""
        session, ids = self.session, np.array([client])
        groups = session.engine.groups
        members, sizes = groups.select(ids * 0 if self.alone else ids)
        state = self.store.load(client, request.round, request.history)
        state = cast("dict[str, Tree]", _to(state, session.trainer.device))
        _, lr = learning_rates(session.config, request.round)
        one = Client(session.trainer, members, ids, sizes, request.round, lr, state)
        reply = getattr(session.algorithm, request.task)(one, *_arguments(request, payload, client))
        if request.task not in session.algorithm.logs:
            session.algorithm.check_state("client", one.state)
            self.store.save(client, one.state, request.round, request.history)
        if request.weight is None:
            return 1.0, reply
        average = session.engine.aggregator
        return average.contribute(request.task, one.weight, reply, request.weight)

    def _payload(self, request: Request) -> dict[str, Tensor]:
        """All tensors of the request, those of earlier exchanges from where they were kept."""
        here = dict(tensors(request.payload))
        attempt = request.history.names[-1]
        place = self.received / f"{request.round}-{attempt}"
        for old in self.received.glob("*") if request.exchange == 0 else ():
            if int(old.name.split("-")[0]) <= request.round:  # not those of a round that is on
                shutil.rmtree(old, ignore_errors=True)
        if here:
            save(place / f"{request.exchange}.safetensors", here, {}, "make room")
        for exchange in {number for number, _ in request.known.values()}:
            before = load_file(place / f"{exchange}.safetensors")
            for name, (number, there) in request.known.items():
                if number == exchange:
                    here[name] = before[there]
        device = self.session.trainer.device
        return {name: tensor.to(device) for name, tensor in here.items()}


def _clear_secrets(path: Path, client: int) -> None:
    """Of the client's earlier sums nothing is needed any more."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for old in path.parent.glob(f"{client}-*"):
        old.unlink(missing_ok=True)


def _write_secret(path: Path, data: bytes) -> None:
    """Whole or not at all, and for nobody else to read."""
    new = path.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_bytes(data)
    new.replace(path)


def _to(tree: Tree, device: torch.device) -> Tree:
    """Numbers (ndim 0) stay on the host, as in the local engine."""
    if isinstance(tree, Tensor):
        return tree.to(device) if tree.ndim else tree
    return {name: _to(child, device) for name, child in tree.items()}


def _arguments(request: Request, payload: dict[str, Tensor], client: int) -> list[Tree]:
    """The task's arguments, in order."""
    arguments: list[Tree] = []
    for position in range(request.arguments):
        flat: dict[str, Tensor] = {}
        for name, tensor in payload.items():
            head, _, path = name.partition("/")
            if head in (str(position), f"{position}@{client}"):
                flat[path] = tensor
        if not flat:
            raise Malformed(f"argument {position} of {request.task} is missing")
        arguments.append(flat["."] if flat.keys() == {"."} else cast(Tree, unflatten(flat)))
    return arguments


def describe(error: Exception, far: bool = True) -> str:
    """Why, for the server: our own lines; of anything else only its kind, since its text may tell
    of the site's data. The site's log has it all.

    Names of its files do not leave a site that is ``far``: it has ``told`` in place of the line.
    """
    if isinstance(error, (UserError, Malformed)):
        print(f"fedssl: refused: {error}", file=sys.stderr, flush=True)
        if far and isinstance(error, UserError) and error.told is not None:
            return f"refused: {error.told}; the site's log says more"
        return f"refused: {error}"
    traceback.print_exception(error, file=sys.stderr)
    return f"failed: {type(error).__name__}"
