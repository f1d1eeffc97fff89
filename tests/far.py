"""Flower's apps and messages in this process: what tests of the Flower engine share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from helpers import PLAIN
from rounds import go as go

from fedssl import config as configuration
from fedssl.config import Config
from fedssl.engines.flower.simulation import SimulatedEngine
from fedssl.engines.flower.transport import GridTransport
from fedssl.runs import loop
from fedssl.runs.build import Experiment, build_experiment

Tamper = Callable[[Message, Message], Message | None]

SMALL = (
    *("partition.name=iid", "partition.clients=5", "data.labels=30", "cohort.size=null"),
    *("encoder.groups=4", "objective.projector=[32,16]", "evaluate.baselines=[]"),
    *("evaluate.protocols=knn", "rounds=3", "precision=fp64", "schedule=cosine"),
    *("server.optimizer=sgd", "server.lr=1", "client.lr=0.05", "engine.threads=1"),
)
BYOL = (
    *("objective.name=byol", "objective.predictor=[24,16]", "encoder.norm=batch"),
    *("algorithm.local_epochs=1", "algorithm.batch=3", "objective.momentum=0.9"),
)


def small(*words: str) -> Config:
    return configuration.resolve(configuration.read_recipe(PLAIN), [*SMALL, *words])


class Here(Grid):
    """Nodes that are functions; every message goes through Flower's bytes both ways."""

    def __init__(
        self, app: Any, nodes: int | list[dict[str, Any]], tamper: Tamper | None = None
    ) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id = 1, SUPERLINK_NODE_ID
        TaskIdentity.task_id = 1
        self.app, self.tamper = app, tamper
        self.types: list[str] = []
        self.waiting: list[Message] = []
        each = [{"partition-id": k} for k in range(nodes)] if isinstance(nodes, int) else nodes
        self.contexts = {
            11 + k: Context(1, 11 + k, settings, RecordDict(), {})
            for k, settings in enumerate(each)
        }

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for message in messages:
            number = f"message-{len(self.types)}"
            message.metadata.__dict__["_message_id"] = number
            self.types.append(message.metadata.message_type)
            message.content = through_bytes(message.content)
            context = self.contexts[message.metadata.dst_node_id]
            reply: Message | None = self.app(message, context)
            if self.tamper is not None and reply is not None:
                reply = self.tamper(message, reply)
            if reply is not None and reply.has_content():
                reply.content = through_bytes(reply.content)
            if reply is not None:
                self.waiting.append(reply)
            yield number

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = [m for m in self.waiting if m.metadata.reply_to_message_id in message_ids]
        self.waiting.clear()
        return reversed(found)  # in no order that anything may rely on

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        raise NotImplementedError

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *arguments: Any, **named: Any) -> Message:
        raise NotImplementedError


def through_bytes(content: RecordDict) -> RecordDict:
    proto = recorddict_to_proto(content)
    return recorddict_from_proto(type(proto).FromString(proto.SerializeToString()))


def far_session(
    config: Config, folder: Path, nodes: int = 2, tamper: Tamper | None = None
) -> tuple[Experiment, Here]:
    """A session whose clients are behind messages."""
    tree = configuration.to_tree(config)
    tree["engine"]["name"] = "flower"
    far = configuration.build(tree)
    session = build_experiment(far)
    engine = session.engine
    assert isinstance(engine, SimulatedEngine)
    engine.open(folder)
    grid = Here(engine.client_app(), nodes, tamper)
    engine.transport = GridTransport(grid)
    return session, grid


def one_round(session: Experiment, folder: Path) -> dict[str, Any]:
    """One round as a run has it, with its line for the metrics."""
    said: list[str] = []
    line = loop.run_one_round(session, folder, said.append)
    return line | {"said": said}


def states_of(session: Experiment) -> dict[int, dict[str, np.ndarray]]:
    states = session.engine.states
    return {k: {n: t.numpy() for n, t in states.on_host(k).items()} for k in states}
