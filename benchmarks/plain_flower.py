"""DCCO as a Flower program in its tutorial's way: the yardstick of benchmarks/engines.py.

A client app builds the model, takes the weights, computes, and returns arrays; the server sends a
message to every node, waits, and averages.
"""

from __future__ import annotations

import itertools
import time

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from torch import Tensor

from fedssl.config import Config
from fedssl.data.random import key, mix
from fedssl.engines.flower.environment import silence_flower
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.moments import MomentObjective
from fedssl.runs.build import Experiment, build_experiment, build_network

Arrays = dict[str, Tensor]
_loaded: dict[str, Experiment] = {}


def session_of(config: Config) -> Experiment:
    """Data and model code; read once in each process, as tutorials do."""
    if "session" not in _loaded:
        _loaded["session"] = build_experiment(config)
    return _loaded["session"]


def make_model(config: Config) -> torch.nn.Module:
    return build_network(
        config, session_of(config).trainer.objective, (1,), config.data.size or 8, 0
    )


def moments_of(config: Config, model: torch.nn.Module, client: int) -> Arrays:
    """The moments of the client's encodings, about the origin."""
    session = session_of(config)
    objective = session.trainer.objective
    assert isinstance(objective, MomentObjective)
    members = torch.from_numpy(session.engine.groups[client])
    images = session.dataset.train.images[0][members]
    state = mix(key(0, "augment", 0), torch.arange(len(images)))
    f, g = model(
        tuple(session.trainer.augmentation.views(images, state, v, torch.float32) for v in (0, 1))
    )
    origin = {"f": torch.zeros(f.shape[1]), "g": torch.zeros(g.shape[1])}
    return objective.moments(EncodedBatch((f, g)), origin)


def reply(message: Message, arrays: Arrays, samples: int) -> Message:
    metrics = MetricRecord({"num-examples": samples})
    detached = {name: tensor.detach() for name, tensor in arrays.items()}
    content = RecordDict({"arrays": ArrayRecord(detached), "metrics": metrics})
    return Message(content, reply_to=message)


def make_client_app(config: Config) -> ClientApp:
    app = ClientApp()

    def start(message: Message) -> torch.nn.Module:
        torch.set_num_threads(1)
        model = make_model(config)
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        return model

    @app.query("encode")
    def encode(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        with torch.no_grad():
            moments = moments_of(config, start(message), client)
        return reply(message, moments, len(session_of(config).engine.groups[client]))

    @app.train("descend")
    def descend(message: Message, context: Context) -> Message:
        client, model = int(context.node_config["partition-id"]), start(message)
        objective = session_of(config).trainer.objective
        assert isinstance(objective, MomentObjective)
        optimizer = torch.optim.SGD(model.parameters(), lr=config.client.lr)
        local = moments_of(config, model, client)
        whole = message.content.array_records["moments"].to_torch_state_dict()
        combined = {name: whole[name] + local[name] - local[name].detach() for name in local}
        loss = objective.loss_of(combined, {})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        samples = len(session_of(config).engine.groups[client])
        return reply(message, dict(model.state_dict()), samples)

    return app


def mean(replies: list[Message]) -> ArrayRecord:
    """By the clients' number of examples."""
    total: Arrays = {}
    weights = [float(r.content.metric_records["metrics"]["num-examples"]) for r in replies]  # type: ignore[arg-type]
    for weight, message in zip(weights, replies, strict=True):
        for name, tensor in message.content.array_records["arrays"].to_torch_state_dict().items():
            part = tensor * (weight / sum(weights))
            total[name] = total[name] + part if name in total else part
    return ArrayRecord(total)


def plain_flower(config: Config, rounds: int, workers: int) -> list[float]:
    """Seconds of each round."""
    silence_flower()
    server_app, ends, clients = ServerApp(), [], config.cohort.size
    assert clients is not None

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        arrays = ArrayRecord(dict(make_model(config).state_dict()))
        while len(list(grid.get_node_ids())) < clients:
            time.sleep(0.1)
        nodes = list(grid.get_node_ids())

        def ask(kind: str, content: RecordDict) -> ArrayRecord:
            messages = [Message(content, node, kind) for node in nodes]
            replies = list(grid.send_and_receive(messages))
            assert len(replies) == clients and not any(r.has_error() for r in replies)
            return mean(replies)

        for _ in range(rounds + 1):
            moments = ask("query.encode", RecordDict({"arrays": arrays}))
            arrays = ask("train.descend", RecordDict({"arrays": arrays, "moments": moments}))
            ends.append(time.perf_counter())

    backend = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": workers, "log_to_driver": False},
    }
    run_simulation(server_app, make_client_app(config), clients, backend_config=backend)  # type: ignore[arg-type]
    return [b - a for a, b in itertools.pairwise(ends)]
