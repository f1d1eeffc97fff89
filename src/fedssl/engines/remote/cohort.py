"""Ask clients elsewhere: send a request, wait, and take the replies that count."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedssl.data.random import key
from fedssl.engines.remote.codec import MalformedError, check_like, unpack
from fedssl.engines.remote.messages import (
    LONGEST_FAULT,
    Reply,
    Request,
    SecureStep,
    message_bytes,
    sum_context,
)
from fedssl.engines.remote.payload import PayloadWriter, hash_arguments, name_tensors
from fedssl.engines.remote.replies import ReplyChecker, Size
from fedssl.federation.aggregate import TooFewReplies
from fedssl.federation.cohort import Answer, Cohort
from fedssl.federation.task import ClientTask
from fedssl.federation.traffic import Argument
from fedssl.privacy.checks import smallest_sum
from fedssl.util.errors import UserError
from fedssl.util.text import escape
from fedssl.util.trees import Tree, cast_like, count_bytes, flatten

if TYPE_CHECKING:
    from fedssl.engines.remote.engine import RemoteEngine
    from fedssl.privacy.secure import Unmasker


class RemoteCohort(Cohort):
    """A cohort whose clients are elsewhere."""

    def __init__(self, engine: RemoteEngine, ids: NDArray[np.int64], round: int) -> None:
        self.engine = engine
        self.config = engine.trainer.config
        super().__init__(
            ids,
            self.config.cohort.minimum,
            engine.algorithm.weight,
            engine.aggregator,
            dropout=self.config.cohort.dropout,
            draw=key(self.config.seed, "dropout", round),
        )
        self.round = round
        self.asked = self.ids.tolist()
        self.refused = set[int]()  # whose replies were false in this round
        self.exchange = 0
        self.replies = ReplyChecker(engine)
        self.payloads = PayloadWriter()
        self.responded: list[int] = []  # who answered the last exchange, if only to refuse

    def ask(self, task: ClientTask, payload: tuple[Argument, ...]) -> Iterator[Answer]:
        """Ask all clients at once, and take their replies in the clients' order.

        All are checked before the first counts: an outlier is one beside the others.
        """
        answers = self._exchange(task, payload, self.ids.tolist())
        asked, sizes = len(self.ids), dict[int, Size]()
        for client, reply in sorted(answers.items()):
            try:
                sizes[client] = Size.of(self.replies.check(task, client, reply, asked)[1])
            except MalformedError as error:
                self._refuse(client, f"{task.name}: {error}", reply)
        for client, problem in self.replies.find_outliers(task, sizes).items():
            self._refuse(client, f"{task.name}: {problem}", answers[client])
            del sizes[client]
        for client in sizes:
            share, tree = self.replies.check(task, client, answers.pop(client), asked)
            yield np.array([client]), share, tree

    def _refuse(self, client: int, reason: str, reply: Reply) -> None:
        """Note why a reply does not count, and whether that is the client's doing."""
        self._note_fault(client, reason)
        if reply.fault is None:
            self.refused.add(client)

    def _mean(self, task: ClientTask, payload: tuple[Argument, ...]) -> Tree | None:
        """Return the mean; under secure sums without seeing any client's reply."""
        if not self.config.privacy.secure:
            return super()._mean(task, payload)
        from fedssl.privacy.secure import SumLost

        included: list[int] = []
        result: Tree | None = None
        lost: TooFewReplies | None = None
        try:
            result = self._secure_mean(task, payload, included)
        except SumLost as error:
            if error.client is not None:
                self._refuse(error.client, f"{task.name}: {error}", Reply())
            lost = TooFewReplies(f"{task.name}: {error}")
        except TooFewReplies as error:
            lost = error
        self._close(task, (), np.array(included, dtype=np.int64), lost)
        return result

    def _secure_mean(
        self, task: ClientTask, payload: tuple[Argument, ...], included: list[int]
    ) -> Tree:
        """Return the mean of a secure sum, and fill ``included`` with the clients in it.

        If the sum is lost, ``included`` holds the clients that were still there.
        """
        from fedssl.privacy import secure

        name = task.name
        if any(argument.differs for argument in payload):
            problem = f"{name} sends each client something else, so its sum would hide nothing"
            fix = "Use another algorithm."
            raise UserError(problem, key="privacy.secure", value=True, fix=fix)
        like = self.replies.expected_reply(task)
        context = sum_context(self.engine.history, self.round, name)
        threshold = smallest_sum(self.config, len(self.engine.groups))
        ids, numbers, known = self.ids.tolist(), secure.size(like), self.engine.identities
        asked = hash_arguments(name_tensors(payload), len(payload), self.weight)
        sums = secure.Unmasker(ids, context, threshold, numbers, asked, known)
        for step in secure.STEPS:
            request = SecureStep(step, sums.ask())
            arguments, before = (payload if step == "masked" else ()), self.responded
            replies = self._exchange(task, arguments, sorted(request.messages), request)
            sent = sum(message_bytes(request.messages[k]) for k in self.responded)
            self.traffic.count_down(name, sent)
            self.traffic.count_payload(name, arguments, self.responded)
            taken = [k for k in sorted(replies) if self._take(sums, name, step, k, replies.pop(k))]
            if step in ("agree", "unmask"):  # who is lost now is in the sum all the same
                self.responded = before
            else:
                included[:] = taken
        total, share = secure.decode(sums.total(), like)
        try:
            self.replies.check_sum(task, included, share, total)
        except MalformedError as error:
            raise TooFewReplies(f"{name}: {error}") from None
        return cast_like(self.aggregator.release(name, total, share, len(included)), like)

    def _take(self, sums: Unmasker, task: str, step: str, client: int, reply: Reply) -> bool:
        """Take a client's reply to a step of a secure sum; return whether it counts."""
        try:
            if reply.fault is not None:
                raise ValueError(reply.fault)
            if step == "masked":
                check_like(reply.tensors, {"masked": sums.like})
                masked = cast("Mapping[str, Tensor]", unpack(reply.tensors))
                sums.take(client, masked["masked"].numpy())
                self.traffic.count_up(task, count_bytes(masked))
            else:
                sums.take(client, reply.message)
                self.traffic.count_up(task, message_bytes(reply.message))
        except (ValueError, MalformedError) as error:
            self._refuse(client, f"{task}, {step}: {error}", reply)
            return False
        return True

    def _reached(self) -> NDArray[np.int64]:
        """Return who answered: nobody can tell whether the others got the message."""
        return np.array(self.responded, dtype=np.int64)

    def _note_fault(self, client: int, reason: str) -> None:
        """Note why a client's reply does not count; the client may have sent any text."""
        self.faults[client] = escape(reason[:LONGEST_FAULT])[:LONGEST_FAULT]

    def _exchange(
        self,
        task: ClientTask,
        payload: tuple[Argument, ...],
        clients: list[int],
        secure: SecureStep | None = None,
    ) -> dict[int, Reply]:
        """Send requests and wait; return the replies, and note who did not answer and why."""
        transport = self.engine.transport
        assert transport is not None
        left_out = self.engine.left_out
        nodes = transport.place([k for k in clients if k not in left_out])
        requests = self._build_requests(task, payload, nodes, secure)
        answers = transport.send(requests, self.config.engine.timeout)
        answering = {node for node, answer in answers.items() if not isinstance(answer, str)}
        self.responded = [k for k in clients if nodes.get(k) in answering]
        replies: dict[int, Reply] = {}
        for client in clients:
            if client in left_out:
                self._note_fault(client, f"{task.name}: left out, because {left_out[client]}")
                continue
            if client not in nodes:
                self._note_fault(client, f"{task.name}: not connected")
                continue
            answer = answers.get(nodes[client], "no answer in time (engine.timeout)")
            if isinstance(answer, str):
                self._note_fault(client, f"{task.name}: {answer}")
            elif client not in answer:
                self._note_fault(client, f"{task.name}: sent no reply")
            else:
                replies[client] = answer[client]
        self.exchange += 1
        return replies

    def _build_requests(
        self,
        task: ClientTask,
        payload: tuple[Argument, ...],
        nodes: Mapping[int, int],
        secure: SecureStep | None,
    ) -> dict[int, Request]:
        """Build one request for each node, for all of its clients."""
        hosted: dict[int, list[int]] = defaultdict(list)
        for client, node in nodes.items():
            hosted[node].append(client)
        packed = self.payloads.pack(payload, self.exchange)
        return {
            node: Request(
                task.name,
                tuple(clients),
                self.round,
                self.exchange,
                self.engine.history,
                self.weight if task.seen == "mean" else None,
                len(payload),
                packed.of(clients),
                packed.known,
                secure and replace(secure, messages={k: secure.messages[k] for k in clients}),
                {k: int(self.engine.groups.sizes[k]) for k in clients},
            )
            for node, clients in hosted.items()
        }

    def _reply_bytes(self, reply: Tree) -> int:
        """Count a reply's bytes as it travels, with some leaves in half precision."""
        leaves, half = flatten(reply).items(), self.replies.half
        return sum(t.numel() * (2 if name in half else t.element_size()) for name, t in leaves)
