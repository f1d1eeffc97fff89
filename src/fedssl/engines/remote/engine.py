"""The server's end of messages: clients elsewhere, asked through a transport such as Flower."""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl.data.dataset import Groups
from fedssl.engines.base import Engine
from fedssl.engines.remote.codec import Malformed, Packed, expect, pack, unpack, unpack_like
from fedssl.engines.remote.messages import CHANGE, Reply, Request, SecureStep
from fedssl.engines.store import History, Stored
from fedssl.federation.aggregate import Aggregator, TooFewReplies, Weight
from fedssl.federation.algorithm import Algorithm
from fedssl.federation.cohort import Cohort, as_arguments
from fedssl.federation.traffic import Argument
from fedssl.privacy import survivors_needed
from fedssl.training.trainer import Trainer
from fedssl.util.trees import Tree, count_bytes, flatten, unflatten

if TYPE_CHECKING:
    from fedssl.privacy.secure import Message, Unmasker

STATES = Path("checkpoint") / "states"  # of a simulation's clients


class Transport(Protocol):
    """How messages travel."""

    def place(self, clients: list[int]) -> dict[int, int]:
        """The node on which each client is now; a client that is nowhere is left out."""

    def send(
        self, requests: Mapping[int, Request], timeout: float
    ) -> dict[int, dict[int, Reply] | str]:
        """Ask nodes; of one that does not answer, why (or nothing: it did not answer in time)."""


@dataclass
class Mailbag:
    """An exchange's payload on its way: what each name holds, and what was sent before."""

    payload: dict[str, Tensor] = field(default_factory=dict)
    own: dict[int, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    known: dict[str, tuple[int, str]] = field(default_factory=dict)


class RemoteEngine(Engine):
    """Asks clients through messages; nothing of a client's is here but its replies."""

    def __init__(
        self,
        trainer: Trainer,
        algorithm: Algorithm,
        groups: Groups,
        aggregator: Aggregator | None = None,
    ) -> None:
        super().__init__(trainer, algorithm, groups, aggregator)
        self.transport: Transport | None = None
        self.attempt = secrets.token_hex(4)
        self.history = History((self.attempt,), (0,), 0)
        self.states: Stored = Stored()

    def cohort(self, ids: NDArray[np.int64], round: int) -> RemoteCohort:
        """The clients of one round."""
        self.states.round = round
        return RemoteCohort(self, ids, round)

    def open(self, out: Path) -> None:
        """A simulation's clients keep their states in the run's folder."""
        self.states.folder = out / STATES
        self.states.history = self.history

    def notes(self) -> dict[str, str]:
        """Which attempt did which rounds."""
        return {"attempts": json.dumps([self.history.names, self.history.starts])}

    def resume(self, notes: Mapping[str, str], round: int) -> None:
        """A new attempt, which goes on where the checkpoint is."""
        names, starts = json.loads(notes.get("attempts", "[[], []]"))
        self.history = History((*names, self.attempt), (*starts, round), round)
        self.states.history, self.states.round = self.history, round

    def committed(self, round: int) -> None:
        """Clients need not keep what came before."""
        self.history = History(self.history.names, self.history.starts, round)
        self.states.history = self.history


class RemoteCohort(Cohort):
    """A cohort of clients elsewhere."""

    def __init__(self, engine: RemoteEngine, ids: NDArray[np.int64], round: int) -> None:
        minimum = engine.trainer.config.cohort.minimum
        super().__init__(ids, engine.algorithm, minimum, True, engine.aggregator)
        self.engine = engine
        self.round = round
        self.exchange = 0
        self.half = (CHANGE,) if engine.trainer.config.engine.updates == "fp16" else ()
        self._where: list[tuple[Tensor, tuple[int, str]]] = []  # tensors that clients have
        self._heard: list[int] = []  # who answered the last exchange, if only to refuse

    def ask(
        self, task: str, payload: tuple[Argument, ...], weight: Weight | None
    ) -> Iterator[tuple[NDArray[np.int64], float, Any]]:
        """All clients at once; replies are taken in the clients' order."""
        answers = self._exchange(task, payload, weight, [int(k) for k in self.ids])
        like = self._like(task, weight)
        for client in sorted(answers):
            try:
                reply = self._checked(client, answers.pop(client), like, task, weight)
            except Malformed as error:
                self._fault(client, f"{task}: {error}")
                continue
            yield np.array([client]), reply[0], reply[1]

    def mean(self, task: str, *payload: Any, weight: Weight = "samples") -> Any:
        """Under secure sums, without seeing any client's reply."""
        if not self.engine.trainer.config.privacy.secure:
            return super().mean(task, *payload, weight=weight)
        self.algorithm.check_asked(task, "means", payload)
        arguments = as_arguments(payload)
        from fedssl.privacy.secure import SumLost

        answered: list[int] = []
        result: Tree | None = None
        lost: TooFewReplies | None = None
        try:
            result = self._secure_mean(task, arguments, weight, answered)
        except SumLost as error:
            lost = TooFewReplies(f"{task}: {error}")
        except TooFewReplies as error:
            lost = error
        self._close(task, (), np.array(answered, dtype=np.int64), lost)
        return result

    def _secure_mean(
        self, task: str, payload: tuple[Argument, ...], weight: Weight, answered: list[int]
    ) -> Tree:
        """The mean from the decoded sum; ``answered`` is filled with whose replies are in it.

        Of a sum that is lost before: with those that were still there.
        """
        from fedssl.privacy import secure

        like = self._like(task, weight)
        assert like is not None
        context = f"{self.engine.attempt}/{self.round}/{self.exchange}/{task}"
        least = survivors_needed(self.engine.trainer.config.privacy.threshold, len(self.ids))
        sums = secure.Unmasker(map(int, self.ids), context, least, secure.size(like))
        for step in secure.STEPS:
            asked = SecureStep(step, context, least, sums.ask())
            held, before = (payload if step == "masked" else ()), self._heard
            replies = self._exchange(task, held, weight, sorted(asked.messages), asked)
            self._count_messages(task, (asked.messages[k] for k in self._heard), up=False)
            self.traffic.count_payload(task, held, self._heard)
            taken = [k for k in sorted(replies) if self._take(sums, task, k, replies.pop(k), step)]
            if step == "unmask":  # who is lost now is in the sum all the same
                self._heard = before
            else:
                answered[:] = taken
        total, share = secure.decode(sums.total(), like)
        if share <= 0:
            raise TooFewReplies(f"{task}: the clients' weights add up to {share:g}")
        return self.aggregator.release(task, cast_like(total, like), share, len(answered))

    def _take(self, sums: Unmasker, task: str, client: int, reply: Reply, step: str) -> bool:
        """Whether a client's reply to a step of a secure sum counts."""
        try:
            if reply.fault is not None:
                raise ValueError(reply.fault)
            if step == "masked":
                expect(reply.tensors, {"masked": sums.like})
                masked = unpack(reply.tensors)
                assert isinstance(masked, Mapping)
                vector = masked["masked"]
                assert isinstance(vector, Tensor)
                sums.take(client, vector.numpy())
                self.traffic.count_up(task, count_bytes(masked))
            else:
                sums.take(client, reply.message)
                self._count_messages(task, [reply.message], up=True)
        except (ValueError, Malformed) as error:
            self._fault(client, f"{task}, {step}: {error}")
            return False
        return True

    def _reached(self) -> NDArray[np.int64]:
        """Those that answered: whether others got the message, nobody can tell."""
        return np.array(self._heard, dtype=np.int64)

    def _fault(self, client: int, reason: str) -> None:
        """Why a client's reply does not count; its own words may be anything."""
        self.faults[client] = plain(reason)

    def _count_messages(self, task: str, messages: Iterable[Message], up: bool) -> None:
        count = self.traffic.count_up if up else self.traffic.count_down
        for message in messages:
            for values in message.values():
                each = values if isinstance(values, list) else []
                count(task, sum(len(v) if isinstance(v, bytes) else 8 for v in each))

    def _exchange(
        self,
        task: str,
        payload: tuple[Argument, ...],
        weight: Weight | None,
        clients: list[int],
        secure: SecureStep | None = None,
    ) -> dict[int, Reply]:
        """Send, wait, and sort out who did not answer and why."""
        transport = self.engine.transport
        assert transport is not None
        places = transport.place(clients)
        requests = self._requests(task, payload, weight, places, secure)
        got = transport.send(requests, self.engine.trainer.config.engine.timeout)
        answers: dict[int, Reply] = {}
        heard = {node for node, said in got.items() if not isinstance(said, str)}
        self._heard = [k for k in clients if places.get(k) in heard]
        for client in clients:
            if client not in places:
                self._fault(client, f"{task}: not connected")
                continue
            reply = got.get(places[client], "no answer in time (engine.timeout)")
            if isinstance(reply, str):
                self._fault(client, f"{task}: {reply}")
            elif client not in reply:
                self._fault(client, f"{task}: sent no reply")
            else:
                answers[client] = reply[client]
        self.exchange += 1
        return answers

    def _requests(
        self,
        task: str,
        payload: tuple[Argument, ...],
        weight: Weight | None,
        places: Mapping[int, int],
        secure: SecureStep | None,
    ) -> dict[int, Request]:
        """One message a node, for all the clients that it has."""
        hosted: dict[int, list[int]] = defaultdict(list)
        for client, node in places.items():
            hosted[node].append(client)
        bag = self._pack(payload)
        packed = _packed(bag.payload)
        return {
            node: Request(
                task,
                tuple(clients),
                self.round,
                self.exchange,
                self.engine.history,
                weight,
                len(payload),
                {**packed, **_packed({k: v for c in clients for k, v in bag.own[c].items()})},
                bag.known,
                _part(secure, clients),
                {k: int(self.engine.groups.sizes[k]) for k in clients},
            )
            for node, clients in hosted.items()
        }

    def _pack(self, payload: tuple[Argument, ...]) -> Mailbag:
        """Name every tensor; one that clients have from this round is only referred to."""
        bag = Mailbag()
        for position, item in enumerate(payload):
            if item.differs:
                for client, value in item.value.items():
                    own = {f"{position}@{client}/{p or '.'}": t for p, t in flatten(value).items()}
                    bag.own[client].update(own)
                continue
            for path, tensor in flatten(item.value).items():
                name = f"{position}/{path or '.'}"
                before = [where for sent, where in self._where if sent is tensor]
                if before:
                    bag.known[name] = before[0]
                else:
                    bag.payload[name] = tensor
                    self._where.append((tensor, (self.exchange, name)))
        return bag

    def _like(self, task: str, weight: Weight | None) -> Tree | None:
        """What a reply must look like; none: numbers for the log, whatever their names."""
        algorithm = self.engine.algorithm
        if task in algorithm.logs:
            return None
        like: Tree = algorithm.reply_like(task, self.engine.trainer)
        return like if weight is None else self.aggregator.contribute(task, 1, like, weight)[1]

    def _checked(
        self, client: int, reply: Reply, like: Tree | None, task: str, weight: Weight | None
    ) -> tuple[float, Tree]:
        """A reply, if it is what was asked for."""
        if reply.fault is not None:
            raise Malformed(reply.fault)
        if like is None:
            return 1.0, _numbers(reply.tensors, self.engine.algorithm.logs[task])
        if weight is not None:
            self._check_share(client, reply.share, like, task, weight)
        varying = task in self.engine.algorithm.varying
        tree = unpack_like(reply.tensors, like, self.half, varying)
        limit, change = self.engine.trainer.config.engine.max_norm, tree.get(CHANGE)
        if limit is not None and isinstance(change, Tensor):
            norm = float(torch.linalg.vector_norm(change))
            if norm > limit:
                raise Malformed(f"a change of norm {norm:.4g}, above engine.max_norm={limit:g}")
        for name, leaf in flatten(tree).items():
            largest = float(leaf.abs().max()) if leaf.numel() else 0.0
            if largest * reply.share * len(self.ids) > torch.finfo(leaf.dtype).max / 16:
                raise Malformed(f"{name}: a number of {largest:.3g} is too large to be averaged")
        return reply.share, tree

    def _check_share(
        self, client: int, share: float, like: Tree, task: str, weight: Weight
    ) -> None:
        """A client counts for as much as the data that it is known to have."""
        size = int(self.engine.groups.sizes[client])
        samples = self.engine.trainer.batches.contributing(size)
        due = self.aggregator.contribute(task, samples, like, weight)[0]
        if share != due:
            raise Malformed(f"a weight of {share:g} where there should be {due:g}")

    def _reply_bytes(self, reply: Tree) -> int:
        """Bytes as they travel."""
        names = flatten(reply)
        saved = (names[n].numel() * (names[n].element_size() - 2) for n in self.half if n in names)
        return super()._reply_bytes(reply) - sum(saved)


def plain(text: str) -> str:
    """One line of printable characters, not too long."""
    return "".join(c if c.isprintable() else " " for c in text)[:300]


def cast_like(tree: Tree, like: Tree) -> Tree:
    """In the types, and on the devices, of ``like``."""
    wanted = flatten(like)
    return unflatten({name: leaf.to(wanted[name]) for name, leaf in flatten(tree).items()})


def _part(secure: SecureStep | None, clients: list[int]) -> SecureStep | None:
    """The messages of some clients."""
    if secure is None:
        return None
    return replace(secure, messages={k: secure.messages[k] for k in clients})


def _packed(tensors: Mapping[str, Tensor]) -> dict[str, Packed]:
    return {name: pack(tensor)["."] for name, tensor in tensors.items()}


def _numbers(packed: Mapping[str, Packed], names: tuple[str, ...]) -> Tree:
    """Single numbers for the log; they need not be finite (not known yet)."""
    if sorted(packed) != sorted(names) or any(item.shape for item in packed.values()):
        raise Malformed(f"not the numbers {', '.join(names)}")
    return unpack(packed)
