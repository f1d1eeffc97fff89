"""The same rounds through fedssl, plain PyTorch, pfl-research and Flower's simulation.

    python benchmarks/peers.py [--work cohort silo] [--peers fedssl pytorch compiled pfl flower]
        [--device cuda] [--samples 2560] [--rounds 3] [--workers 5] [--tiny] [--out FILE]

``cohort``: 128 clients of 4 images, ResNet-14 with group norm, CCO + FedAvg: one step of SGD on all
images of a client. ``silo``: 5 clients of FedBYOL, ResNet-18, batches of 128, one local epoch; a
target network stays with each client. The server averages the clients' models by samples.

All peers have the same network, augmentation, loss, images, batch sizes and precision (bfloat16
by autocast on a GPU, float32 on a CPU), and the images are on the device. fedssl runs as a recipe
does. The others call one class of plain PyTorch (learner.py: channels-last, cuDNN tries its
algorithms, augmentation of a whole batch on the device), through what their documentation shows:
``pytorch`` is FedAvg by hand, client after client, and ``compiled`` the same with a compiled loss;
``pfl`` is ``FederatedAveraging`` with ``SimulatedBackend`` in one process; ``flower`` is
``strategy.FedAvg`` with ``run_simulation``, on as many Ray workers as ``--workers`` says, which
share the device. Times are the fastest of the rounds after the first: seconds on a GPU, and on a
CPU the processor's seconds of all processes, which other programs change little. The mean loss of
the first round is the check that peers do the same work; their random numbers differ. ``--tiny``:
a small network and 16 pixels, for a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import engine_of, even, made, rounds_of
from learner import Learner, Work, clone, images_of, load, open_learner
from torch import Tensor

from fedssl import config as configuration
from fedssl.engines.flower.environment import silence_flower


def work_of(name: str, o: argparse.Namespace) -> Work:
    """Settings of a workload."""
    on_gpu, pixels = o.device == "cuda", 16 if o.tiny else 32
    tree: dict[str, Any] = {
        "server": {"optimizer": "sgd", "lr": 1.0},
        "device": o.device,
        "precision": "bf16" if on_gpu else "fp32",
        "rounds": 1_000_000,
        "schedule": "constant",
    }
    if name == "cohort":
        clients, samples, batch = 128, 4, 4
        tree |= {
            "augment": {"name": "dcco"},
            "encoder": {"name": "tiny" if o.tiny else "resnet14", "norm": "group"},
            "objective": {"name": "cco"} | ({"projector": [64, 32]} if o.tiny else {}),
            "algorithm": {"name": "fedavg", "local_steps": 1},
            "client": {"lr": 0.01},
        }
    else:
        clients, samples, batch = 5, o.samples, 128
        tree |= {
            "augment": {"name": "fedema"},
            "encoder": {"name": "tiny" if o.tiny else "resnet18", "norm": "batch"},
            "objective": {"name": "byol"} | ({"projector": [64, 32]} if o.tiny else {}),
            "algorithm": {"name": "fedavg", "local_epochs": 1, "batch": batch},
            "client": {"lr": 0.032, "momentum": 0.9, "weight_decay": 5e-4},
        }
    return Work(name, o.device, clients, samples, pixels, batch, tree)


Times = tuple[list[float], float]  # seconds of each round after the first; its loss


def fedssl(work: Work, rounds: int, workers: int) -> Times:
    """Our engine, as a recipe of more than 2,000 steps runs on this device."""
    config, on_gpu = configuration.build(work.tree), work.device == "cuda"
    split, groups = (
        made(work.clients * work.samples, 3, work.pixels),
        even(work.clients, work.samples),
    )
    engine, server = engine_of(config, split, groups, compiled=on_gpu)
    if on_gpu and engine.merges:
        engine.trainer.compile_passes()
    one = rounds_of(engine, server)
    one()
    loss = float(server.log["loss"])
    one()  # other clients' networks are opened in the second round
    return [seconds(one, work.device) for _ in range(rounds)], loss


def pytorch(work: Work, rounds: int, workers: int, compiled: bool = False) -> Times:
    """FedAvg by hand, client after client."""
    learner, images = Learner(work, compiled), images_of(work)
    model = clone(learner.network.state_dict())
    targets: dict[int, dict[str, Tensor]] = {}
    latest: list[Tensor] = []

    def one() -> None:
        total: dict[str, Tensor] = {}
        latest.clear()
        for client in range(work.clients):
            load(learner.network, model)
            learner.take_target(targets.get(client))
            latest.append(learner.train_client(images[client]))
            targets[client] = learner.leave_target()
            for name, tensor in learner.network.state_dict().items():
                part = tensor / work.clients
                total[name] = total[name].add_(part) if name in total else part
        for name, tensor in total.items():
            model[name].copy_(tensor)
        float(latest[-1])

    one()
    loss = float(torch.stack(latest).mean())
    return [seconds(one, work.device) for _ in range(rounds)], loss


def compiled(work: Work, rounds: int, workers: int) -> Times:
    """FedAvg by hand with a compiled loss."""
    return pytorch(work, rounds, workers, compiled=True)


def pfl(work: Work, rounds: int, workers: int) -> Times:
    """pfl-research, in this process."""
    os.environ["PFL_PYTORCH_DEVICE"] = work.device
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    learner, images = Learner(work), images_of(work)
    targets: dict[str, dict[str, Tensor]] = {}
    losses: list[Tensor] = []
    ends: list[float] = []
    plain = learner.loss

    def loss(images: Tensor) -> Tensor:
        value = plain(images)
        if not ends:
            losses.append(value.detach().clone())  # pfl-research divides it in place
        return value

    learner.loss = loss

    class WithTargets(FederatedAveraging):  # type: ignore[misc]
        """A target network stays with each user."""

        def train_one_user(self, state: Any, model: Any, user: Any, context: Any) -> Any:
            learner.take_target(targets.get(user.user_id))
            result = super().train_one_user(state, model, user, context)
            targets[user.user_id] = learner.leave_target()
            return result

    class Clock(TrainingProcessCallback):  # type: ignore[misc]
        """Note when each round ends."""

        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
            ends.append(now(work.device))
            return False, Metrics()

    def user(name: str) -> Any:
        own = images[int(name)]
        return Dataset((own[torch.randperm(len(own), device=own.device)],), user_id=name)

    sampler = get_user_sampler("minimize_reuse", [str(k) for k in range(work.clients)])
    data = FederatedDataset(user, sampler)
    backend = SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()])
    central = torch.optim.SGD(learner.network.parameters(), lr=1.0)
    WithTargets().run(
        algorithm_params=NNAlgorithmParams(rounds + 1, rounds + 2, work.clients, None),
        backend=backend,
        model=PyTorchModel(learner, learner.optimizer, central),
        model_train_params=NNTrainHyperParams(
            local_batch_size=work.batch, local_num_epochs=1, local_learning_rate=work.lr
        ),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    return between(ends), float(torch.stack(losses).mean())


def flower(work: Work, rounds: int, workers: int) -> Times:
    """Flower's simulation, on Ray."""
    silence_flower()
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app, server_app = ClientApp(), ServerApp()
    ends: list[float] = []
    losses: list[float] = []

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        if work.device == "cpu":
            torch.set_num_threads(1)
        learner, images = open_learner(work)
        arrays = message.content.array_records["arrays"].to_torch_state_dict()
        load(learner.network, arrays)
        kept = context.state.array_records.get("target")
        learner.take_target(None if kept is None else kept.to_torch_state_dict())
        loss = float(learner.train_client(images[int(context.node_config["partition-id"])]))
        if learner.target is not None:
            context.state["target"] = ArrayRecord(dict(learner.target.state_dict()))
        metrics = MetricRecord({"num-examples": work.samples, "loss": loss})
        content = {"arrays": ArrayRecord(dict(learner.network.state_dict())), "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)  # type: ignore[arg-type]

    def note(number: int, arrays: ArrayRecord) -> None:
        ends.append(now(work.device))

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        learner = Learner(work)
        strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=work.clients)
        begin = ArrayRecord(dict(learner.network.state_dict()))
        result = strategy.start(grid, begin, num_rounds=rounds + 1, evaluate_fn=note)
        losses.append(float(result.train_metrics_clientapp[1]["loss"]))  # type: ignore[arg-type]

    on_gpu = work.device == "cuda"
    backend = {
        "client_resources": {"num_cpus": 1, "num_gpus": 1 / workers if on_gpu else 0.0},
        "init_args": {
            "num_cpus": workers,
            "num_gpus": int(on_gpu),
            "log_to_driver": False,
            "object_store_memory": 4 << 30 if on_gpu else 256 << 20,
        },
    }
    run_simulation(server_app, client_app, work.clients, backend_config=backend)  # type: ignore[arg-type]
    return between(ends[1:]), losses[0]  # the first end is that of the start's evaluation


def now(device: str) -> float:
    """Return the time on a GPU, and on a CPU the processor's seconds of this program so far."""
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    parents, ticks = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            fields = file.read_text().rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(fields[1])
            ticks[int(file.parent.name)] = sum(map(int, fields[11:15]))  # and of ended children
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    others = sum(ticks[pid] for pid in ours - {os.getpid()})
    return time.process_time() + others / os.sysconf("SC_CLK_TCK")


def seconds(work: Callable[[], None], device: str) -> float:
    """Return how long a call takes."""
    start = now(device)
    work()
    return now(device) - start


def between(ends: list[float]) -> list[float]:
    """Seconds of each round but the first."""
    return [b - a for a, b in itertools.pairwise(ends)]


PEERS = {each.__name__: each for each in (fedssl, pytorch, compiled, pfl, flower)}


def main() -> None:
    """One line a workload and peer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", nargs="+", default=["cohort", "silo"], choices=["cohort", "silo"])
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--samples", type=int, default=2560, help="of each client of silo")
    parser.add_argument("--rounds", type=int, default=3, help="after the first")
    parser.add_argument("--workers", type=int, default=5, help="of Ray, for Flower")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--out", type=Path, help="a file that gets a line of JSON for each line printed"
    )
    o = parser.parse_args()
    for name in o.work:
        work = work_of(name, o)
        for peer in o.peers:
            started = time.perf_counter()
            try:
                times, loss = PEERS[peer](work, o.rounds, o.workers)
            except Exception as error:  # the other peers can still run
                print(f"{name:8} {peer:10} failed: {error!r}", flush=True)
                continue
            best, whole = min(times), time.perf_counter() - started
            rate = f"{1e3 * best:9.1f} ms a round {work.images / best:10,.0f} images/s"
            print(
                f"{name:8} {peer:10} {rate}   first loss {loss:8.3f}   in all {whole:6.1f} s",
                flush=True,
            )
            if o.out:
                line = {"work": name, "peer": peer, "seconds": times, "images": work.images}
                with o.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**line, "loss": loss}) + "\n")


if __name__ == "__main__":
    main()
