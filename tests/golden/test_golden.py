"""Small runs whose weights and metrics must not change.

Each case is one ``fedssl run`` on scikit-learn's digits in float64 on the CPU. Its weights and
its metrics are compared with ``golden.json``. On the machine type that wrote the file the weights
must be equal bit by bit; other processors and versions of torch round differently, so there they
need only be close.

After a change that is meant to change results, write the file again and say why in the commit:

    python tests/golden/test_golden.py
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedssl import report
from fedssl.cli import main
from fedssl.runs import checkpoint

FILE = Path(__file__).parent / "golden.json"
PLAIN = str(Path(__file__).parents[1] / "plain.yaml")
TIMES = {"seconds", "overhead"}
DIGITS = (
    *("partition.name=iid", "partition.clients=4", "data.labels=40", "data.size=8"),
    *("cohort.size=null", "encoder.groups=4"),
    *("evaluate.baselines=[]", "evaluate.protocols=knn", "rounds=3", "precision=fp64"),
    *("server.optimizer=sgd", "server.lr=1", "client.lr=0.05", "engine.threads=1"),
    *("device=cpu", "schedule=cosine"),
)
EPOCHS = ("algorithm.local_epochs=2", "algorithm.batch=4", "client.momentum=0.9")
FEDAVG = ("algorithm.name=fedavg", *EPOCHS)
BYOL = (
    "objective.name=byol",
    "objective.projector=[32,16]",
    "objective.predictor=[24,16]",
    "encoder.norm=batch",
)
MOCO = (
    "objective.name=moco",
    "objective.projector=[32,16]",
    "objective.queue=20",
    "encoder.norm=batch",
)
VIT = ("encoder.name=vit-tiny", "encoder.patch=2", "client.lr=0.001")
HEAD = "objective.projector=[32,16]"
SIMCLR = ("objective.name=simclr", HEAD)
CASES: dict[str, tuple[str, ...]] = {
    "dcco-cco": (HEAD,),
    "dcco-vicreg-partial": ("objective.name=vicreg", HEAD, "cohort.size=3", "engine.merge=off"),
    "dcco-sigreg": ("objective.name=sigreg", HEAD, "objective.slices=50"),
    "fedavg-cco-merged": (*FEDAVG, HEAD),
    "fedavg-cco-one-by-one": (*FEDAVG, HEAD, "engine.merge=off"),
    "fedavg-simclr": (*FEDAVG, *SIMCLR),
    "fedavg-moco": (*FEDAVG, *MOCO, "engine.merge=off"),
    "fedavg-simsiam": (
        *FEDAVG, "objective.name=simsiam", HEAD,
        "objective.predictor=[24,16]", "encoder.norm=batch",
    ),
    "fedavg-rotation": (*FEDAVG, "objective.name=rotation"),
    "fedavg-deepcluster": (*FEDAVG, "objective.name=deepcluster", HEAD),
    "fedavg-supervised": (*FEDAVG, "objective.name=supervised", "server.optimizer=adam"),
    "fedavg-mae": (*FEDAVG, "objective.name=mae", *VIT),
    "featarc-simclr": ("algorithm.name=featarc", *EPOCHS, *SIMCLR),
    "standalone-swav": ("algorithm.name=standalone", *EPOCHS, "objective.name=swav", HEAD),
    "fedprox-simclr": ("algorithm.name=fedprox", *EPOCHS, *SIMCLR),
    "scaffold-simclr-partial": (
        "algorithm.name=scaffold", *EPOCHS, *SIMCLR, "client.momentum=0", "cohort.size=3",
    ),
    "ldawa-simclr": ("algorithm.name=ldawa", *EPOCHS, *SIMCLR),
    "fedu-byol": ("algorithm.name=fedu", *EPOCHS, *BYOL),
    "fedema-byol-partial": ("algorithm.name=fedema", *EPOCHS, *BYOL, "cohort.size=3"),
    "ditto-byol": ("algorithm.name=ditto", *EPOCHS, *BYOL),
    "gossip-simclr": ("algorithm.name=gossip", *EPOCHS, *SIMCLR),
    # InstaHide draws from the system, which no seed repeats: so without it.
    "ccl-moco": (
        *("algorithm.name=ccl", "algorithm.mix=1", "algorithm.share_plain=true"), *EPOCHS, *MOCO,
    ),
    "fedca-simclr": (
        *("algorithm.name=fedca", "algorithm.public=8", "algorithm.base_epochs=100"),
        *EPOCHS,
        *SIMCLR,
    ),
    "centralized-byol": ("algorithm.name=centralized", "algorithm.batch=20", *BYOL),
}  # fmt: skip
FAR = {
    "flower-dcco": (HEAD,),
    "flower-dcco-secure": (HEAD, "privacy.secure=true"),
    "flower-dcco-fp16-updates": (HEAD, "engine.updates=fp16"),
    "flower-fedema-byol": ("algorithm.name=fedema", *EPOCHS, *BYOL),
}
RESUMED = {"fedema-byol-partial": 2, "ccl-moco": 1}  # rounds before the interruption
INTERRUPTED = 130


def run(words: tuple[str, ...], out: Path, *options: str) -> int:
    return main(["run", PLAIN, *DIGITS, *words, "--out", str(out), *options])


def tensors_of(out: Path) -> dict[str, torch.Tensor]:
    """Every tensor that the finished run has in its checkpoint."""
    found = {}
    for file in sorted((out / "checkpoint").glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            found[f"{file.stem.split('-')[0]}/{name}"] = tensor
    return found


def fingerprint(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The hash of all tensors, and the size and one projection of each."""
    digest = hashlib.sha256()
    shapes, projections = {}, {}
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(name.encode() + str(tensor.dtype).encode() + tensor.numpy().tobytes())
        flat = tensor.double().flatten()
        shapes[name] = list(tensor.shape)
        projections[name] = float(flat @ torch.cos(torch.arange(flat.numel()).double()))
    return {"sha256": digest.hexdigest(), "shapes": shapes, "projections": projections}


def metrics_of(out: Path) -> list[dict[str, Any]]:
    """The lines of the run's metrics, without how long things took."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def local_result(name: str, out: Path) -> dict[str, Any]:
    assert run(CASES[name], out) == 0
    return fingerprint(tensors_of(out)) | {"metrics": metrics_of(out)}


def far_result(name: str, out: Path) -> dict[str, Any]:
    from far import far_session, one_round, small

    session, _ = far_session(small(*DIGITS, *FAR[name]), out, nodes=4)
    lines = []
    for _ in range(3):
        line = one_round(session, out)
        lines.append({k: v for k, v in line.items() if k not in {*TIMES, "said"}})
    return fingerprint({"weights": session.server.weights}) | {
        "metrics": json.loads(json.dumps(lines))
    }


def machine() -> dict[str, str]:
    return {"torch": torch.__version__, "processor": torch.backends.cpu.get_cpu_capability()}


def assert_same(result: dict[str, Any], name: str) -> None:
    golden = json.loads(FILE.read_text())
    expected = golden["cases"][name]
    assert result["shapes"] == expected["shapes"]
    assert_close(result["metrics"], expected["metrics"], "metrics")
    assert_close(result["projections"], expected["projections"], "projections")
    if golden["machine"] == machine():
        assert result["sha256"] == expected["sha256"]


def assert_close(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_close(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, value in enumerate(expected):
            assert_close(found[i], value, f"{where}[{i}]")
    elif isinstance(expected, float):
        assert math.isclose(found, expected, rel_tol=1e-5, abs_tol=1e-6), (where, found, expected)
    else:
        assert found == expected, where


def interrupted_result(name: str, out: Path) -> dict[str, Any]:
    """Stop a run by Ctrl-C after a checkpoint, and resume it."""
    write_checkpoint, written = checkpoint.write, itertools.count()

    def interrupt(*arguments: Any) -> None:
        write_checkpoint(*arguments)
        if next(written) == RESUMED[name]:
            signal.raise_signal(signal.SIGINT)

    words = (*CASES[name], "checkpoint.seconds=0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "write", interrupt)
        assert run(words, out) == INTERRUPTED
    assert len(metrics_of(out)) == RESUMED[name]
    assert run(words, out, "--resume") == 0
    return fingerprint(tensors_of(out)) | {"metrics": metrics_of(out)}


def prepare() -> None:
    """Train on one thread and write no pages, as tests do."""
    torch.set_num_threads(1)
    report.write_page_or_warn = lambda run: None


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """A new process: what libraries remember of other tests can change the last bits."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=prepare) as pool:
        yield pool


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_unchanged(name: str, tmp_path: Path, process: ProcessPoolExecutor) -> None:
    assert_same(process.submit(local_result, name, tmp_path / "out").result(), name)


@pytest.mark.parametrize("name", FAR)
def test_a_run_over_messages_is_unchanged(
    name: str, tmp_path: Path, process: ProcessPoolExecutor
) -> None:
    assert_same(process.submit(far_result, name, tmp_path).result(), name)


@pytest.mark.parametrize("name", RESUMED)
def test_an_interrupted_run_ends_as_an_uninterrupted_one(
    name: str, tmp_path: Path, process: ProcessPoolExecutor
) -> None:
    assert_same(process.submit(interrupted_result, name, tmp_path / "out").result(), name)


def write() -> None:
    cases = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            cases[name] = local_result(name, Path(folder) / name)
        for name in FAR:
            cases[name] = far_result(name, Path(folder) / name)
    FILE.write_text(json.dumps({"machine": machine(), "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(Path(__file__).parent.parent))
    torch.set_num_threads(1)
    write()
