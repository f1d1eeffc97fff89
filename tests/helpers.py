"""Small made data and engines that tests share."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from fedssl import config as configuration
from fedssl.config import Config
from fedssl.data.augment import Augmentation
from fedssl.data.dataset import Groups, Split
from fedssl.engines.local import LocalEngine
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server
from fedssl.runs.build import build_network
from fedssl.runs.metrics import read
from fedssl.runs.split import pool_clients
from fedssl.training.trainer import Trainer
from fedssl.util.errors import UserError
from fedssl.util.seals import seal_text

PLAIN = str(Path(__file__).parent / "plain.yaml")


def load(path: str) -> ModuleType:
    """A script of the repository, by its place there."""
    file = Path(__file__).resolve().parent.parent / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def quick(values: Iterable[Any], *names: Any) -> list[Any]:
    """Parameters of a test; all but these ``names`` are left to ``make slow``."""
    return [v if v in names else pytest.param(v, marks=pytest.mark.slow) for v in values]


def made_split(count: int = 40, channels: int = 1, size: int = 8, classes: int = 4) -> Split:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(
        0, 256, (count, channels, size, size), dtype=torch.uint8, generator=generator
    )
    return Split((images,), labels=torch.arange(count) % classes)


def timeless(out: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, without how long things took."""
    times = ("seconds", "overhead")
    return [{name: v for name, v in line.items() if name not in times} for line in read(out)]


def in_tritons_interpreter(code: str, folder: Path) -> None:
    """Run kernels on the CPU: it must be asked for before Triton is imported, so in a new process.

    Triton 3.4's stumbles over newer versions of numpy.
    """
    pytest.importorskip("triton", minversion="3.5")
    path = os.pathsep.join(str(Path(p).absolute()) for p in sys.path if p)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


class _OnGpu(torch.Tensor):
    is_cuda = True


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor that says that it is on a GPU."""
    return torch.zeros(shape, dtype=dtype).as_subclass(_OnGpu)


def groups_of(*sizes: int) -> Groups:
    return Groups(np.arange(sum(sizes)), np.concatenate(([0], np.cumsum(sizes))))


def settings(*words: str) -> Config:
    base: dict[str, Any] = {
        "augment": {"name": "dcco"},
        "encoder": {"name": "tiny", "groups": 8},
        "objective": {"name": "cco", "projector": [32, 32, 16]},
        "algorithm": {"name": "dcco"},
        "server": {"optimizer": "sgd", "lr": 1.0},
        "client": {"lr": 0.01},
        "schedule": "constant",
        "precision": "fp64",
        "rounds": 3,
    }
    return configuration.build(configuration.apply_words(base, words))


HEADS = {
    "simclr": ("objective.projector=32,16",),
    "moco": ("objective.projector=32,16", "objective.queue=20", "objective.temperature=0.2"),
    "simsiam": ("objective.projector=32,16", "objective.predictor=24,16"),
    "byol": ("objective.projector=32,16", "objective.predictor=24,16", "objective.momentum=0.9"),
}


def siamese(objective: str, *words: str) -> Config:
    """FedAvg of epochs in batches, batch norm, and heads small enough for a test."""
    return settings(
        f"objective.name={objective}",
        *HEADS[objective],
        "algorithm.name=fedavg",
        "algorithm.local_epochs=2",
        "algorithm.batch=4",
        "encoder.norm=batch",
        "client.lr=0.05",
        "client.momentum=0.9",
        "client.weight_decay=0.01",
        "schedule=cosine",
        *words,
    )


def engine_of(
    config: Config, split: Split, groups: Groups, device: str = "cpu"
) -> tuple[LocalEngine, Server]:
    """Build an engine and a server on given data."""
    objective = configuration.variant("objective", config.objective.name)(config.objective)
    algorithm_class = configuration.variant("algorithm", config.algorithm.name)
    if algorithm_class.pools_data:
        config, groups = pool_clients(config, groups, len(groups))
    algorithm = algorithm_class(config.algorithm, objective)
    algorithm.validate(config, len(groups))
    images = split.images[0]
    size = (images.shape[2], images.shape[3])
    channels = tuple(i.shape[1] for i in split.images)
    augmentation = Augmentation.from_config(config.augment, channels[0], size)
    network = build_network(config, objective, channels, min(size), 4)
    trainer = Trainer(config, network, objective, augmentation, split, torch.device(device))
    return LocalEngine(trainer, algorithm, groups), Server(trainer)


def train(engine: LocalEngine, server: Server, rounds: int, order: Any = None) -> torch.Tensor:
    """The weights after some rounds in which everyone takes part."""
    for round in range(rounds):
        server.round = round
        ids = np.arange(len(engine.groups))
        engine.algorithm.round(server, engine.cohort(ids if order is None else ids[order], round))
    return server.weights


def step(engine: LocalEngine, server: Server, round: int, *ids: int) -> Cohort:
    """One round of these clients (none named: of all)."""
    server.round = round
    cohort = engine.cohort(np.array(ids or range(len(engine.groups))), round)
    engine.algorithm.round(server, cohort)
    return cohort


def encode(
    engine: LocalEngine, round: int, step: int = 0, client: int = 0
) -> tuple[torch.Tensor, ...]:
    """The encodings of a client's batch by the initial network: as good as its pixels."""
    one = engine.client(np.array([client]), round, remember=False)
    engine.trainer.load(engine.trainer.initial)
    with torch.no_grad():
        return one.encode_step(step).encodings


def replace_task(patch: pytest.MonkeyPatch, owner: Any, name: str, function: Any) -> None:
    """Replace a task of clients; its declaration stays."""
    patch.setattr(owner, name, functools.wraps(getattr(owner, name))(function))


def record_task(patch: pytest.MonkeyPatch, owner: Any, name: str) -> dict[tuple[int, int], Any]:
    """Note the arguments and the reply of a task, by round and client."""
    seen: dict[tuple[int, int], Any] = {}
    real = getattr(owner, name)

    def recorded(self: Any, client: Any, *payload: Any) -> Any:
        reply = real(self, client, *payload)
        seen[client.round, client.id] = (*payload, reply)
        return reply

    replace_task(patch, owner, name, recorded)
    return seen


def normal_rows(count: int, width: int, seed: int = 0) -> torch.Tensor:
    """Rows of normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, dtype=torch.float64, generator=generator)


def unit_rows(count: int, width: int, seed: int = 0) -> torch.Tensor:
    """Rows of length 1."""
    return torch.nn.functional.normalize(normal_rows(count, width, seed), dim=1)


def without_code(patch: pytest.MonkeyPatch) -> None:
    """Compiled steps are traced and differentiated as ever, but no code is generated for a CPU."""
    torch.compiler.reset()
    traced = functools.partial(torch.compile, dynamic=False, fullgraph=True, backend="aot_eager")
    patch.setattr(torch, "compile", lambda function, **_: traced(function))


def without_compiler(patch: pytest.MonkeyPatch) -> None:
    """Compiled steps run as they are written, on tensors that stay in place."""
    patch.setattr(torch, "compile", lambda function, **_: function)


def fault_of(error: UserError) -> tuple[str, Any]:
    """The key that an error names and its value."""
    key, _, value = str(error).partition(": ")[0].partition("=")
    return key, yaml.safe_load(value)


@contextlib.contextmanager
def refused(key: str | None, value: Any = ..., says: str = "") -> Iterator[None]:
    """Expect a ``UserError`` of one line with this key and value that says some words."""
    with pytest.raises(UserError) as caught:
        yield
    error = caught.value
    assert error.key == key, error
    assert value is ... or str(error.value) == str(value), error
    assert says in str(error) and "\n" not in str(error), error


def edit_config(out: Path, old: str, new: str) -> None:
    """Change the text of a run's configuration, as if fedssl had written it so."""
    path = out / "config.yaml"
    text, seal, _ = path.read_text().partition("# --resume checks")
    assert old in text and seal
    path.write_text(seal_text(text.replace(old, new)))


def flip_bit(data: bytes, bit: int) -> bytes:
    """The same bytes with another bit."""
    byte = data[bit // 8] ^ (1 << bit % 8)
    return data[: bit // 8] + bytes([byte]) + data[bit // 8 + 1 :]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())
