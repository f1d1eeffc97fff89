"""Checkpoints: safetensors files, written beside the old ones and moved into place."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedssl.config import Config
from fedssl.data.dataset import Dataset
from fedssl.runs.build import Experiment
from fedssl.runs.record import LOCK as LOCK
from fedssl.util.errors import TrainingError, UserError
from fedssl.util.files import save, writing
from fedssl.util.trees import Tree, flatten, unflatten

FILE = Path("checkpoint") / "state.safetensors"
CLIENTS = Path("checkpoint") / "clients"


def write(out: Path, experiment: Experiment) -> None:
    """Save everything that the next round depends on.

    Clients whose state changed get new files, named after the round; the server's file, which says
    which ones count, is moved into place after them; then what no longer counts goes. So a
    reader finds one moment of the run, whenever the writer is killed.
    """
    server, states = experiment.server, experiment.engine.states
    tree: dict[str, Tree] = {
        "weights": server.weights,
        "rule": cast("dict[str, Tree]", server.rule_state),
        "server": server.state,
        "average": cast("dict[str, Tree]", experiment.engine.aggregator.save_state()),
    }
    tensors = {name: leaf.detach().contiguous().cpu() for name, leaf in flatten(tree).items()}
    _check_finite(tensors, experiment, out)
    for client in sorted(states.changed):
        own = {name: leaf.contiguous() for name, leaf in states.on_host(client).items()}
        _check_finite(own, experiment, out)
        save(_client_file(out, client, server.round), own, {})
        states.versions[client] = server.round
    states.changed.clear()
    versions = {str(client): version for client, version in states.versions.items()}
    notes = {
        "round": str(server.round),
        "clients": json.dumps(versions),
        **experiment.engine.notes(),
    }
    notes["classes"] = json.dumps(experiment.dataset.classes)
    if not experiment.of_sites:  # else they are elsewhere
        notes["files"] = json.dumps(dict(experiment.dataset.files))
    save(out / FILE, tensors, notes)
    experiment.engine.committed(server.round)
    _remove_old(out, states.versions)


def forget_clients(out: Path, experiment: Experiment) -> None:
    """After the last round: states that nothing will be read from (a network's size each)."""
    experiment.engine.states.forget()
    write(out, experiment)


def _client_file(out: Path, client: int, version: int) -> Path:
    return out / CLIENTS / f"{client}-{version}.safetensors"


def _remove_old(out: Path, versions: dict[int, int]) -> None:
    current = {_client_file(out, *item).name for item in versions.items()}
    for path in (out / CLIENTS).glob("*"):
        if path.name not in current:
            path.unlink(missing_ok=True)


def _check_finite(tensors: dict[str, Tensor], experiment: Experiment, out: Path) -> None:
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
        config = experiment.config
        raise TrainingError(
            f"round {experiment.server.round}: the weights are no longer finite; lower server.lr "
            f"(now {config.server.lr}) or client.lr (now {config.client.lr}){_pulls(config)}. "
            f"{kept(out)}"
        )


def _pulls(config: Config) -> str:
    """A proximal term diverges as soon as its weight times the learning rate is above 2."""
    for name in ("lambda", "mu"):
        weight = getattr(config.algorithm, name, getattr(config.algorithm, name + "_", None))
        if isinstance(weight, float):
            return f" or algorithm.{name} (now {weight})"
    return ""


def kept(out: Path) -> str:
    """What a run that failed leaves to resume from."""
    if (out / FILE).exists():
        return f"The last good checkpoint is kept in {out}"
    return f"No checkpoint had been written yet in {out}"


def read(out: Path, experiment: Experiment) -> bool:
    """Bring an experiment to where its checkpoint was; false if there is none yet."""
    path = out / FILE
    if not path.exists():
        return False
    tensors, metadata = _load(path)
    device, server = experiment.trainer.device, experiment.server
    tree = unflatten({name: tensor.to(device) for name, tensor in tensors.items()})
    weights = cast(Tensor, tree["weights"])
    if weights.shape != server.weights.shape:
        raise UserError(
            f"{path}: holds a network of {len(weights)} numbers where this configuration makes one "
            f"of {len(server.weights)}; the encoder, the head or the data's channels differ"
        )
    if "clients" in tree:
        raise UserError(
            f"{path}: written by an older version, which kept clients' states elsewhere; "
            "finish the run with that version, or start a new one"
        )
    server.round = int(metadata["round"])
    server.weights = weights
    server.rule_state = cast("dict[str, Tensor]", tree.get("rule", {}))
    server.state = cast("dict[str, Tree]", tree.get("server", {}))
    experiment.engine.resume(metadata, server.round)
    experiment.engine.aggregator.load_state(cast("dict[str, Tensor]", tree.get("average", {})))
    for client, version in json.loads(metadata.get("clients", "{}")).items():
        own, _ = _load(_client_file(out, int(client), version))
        experiment.engine.states.restore(int(client), own, version)
    return True


def of_other_images(out: Path, dataset: Dataset, split: str = "train") -> bool:
    """Whether the run had other files; not known of a deployment, whose images are elsewhere, and
    of a run of an older version.
    """
    before = _files(out)
    return split in before and before[split] != dataset.files.get(split)


def of_same_images(out: Path, dataset: Dataset) -> bool:
    """Whether the run is known to have had these files, wherever they were."""
    before = _files(out)
    return bool(before) and before == dict(dataset.files)


def classes(out: Path) -> tuple[str, ...] | None:
    """The classes of the run's data, which its head was made for; not known of older versions."""
    found = _note(out, "classes")
    return None if found is None else tuple(found)


def _files(out: Path) -> dict[str, str]:
    """A digest of the run's files of each split, as far as it is known."""
    return _note(out, "files") or {}


def _note(out: Path, name: str) -> Any:
    """What the checkpoint says beside its numbers; none where it does not."""
    path = out / FILE
    known = _load(path, whole=False)[1] if path.exists() else {}
    return json.loads(known.get(name, "null"))


def _load(path: Path, whole: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A file's tensors, if they are wanted, and what it says beside them."""
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys() if whole else ()
            tensors = {name: file.get_tensor(name) for name in names}
            metadata = file.metadata() or {}
    except FileNotFoundError:
        raise UserError(f"{path}: missing, so the run cannot be resumed; start a new one") from None
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: not a checkpoint of this program ({error}); start a new run in another folder"
        ) from None
    if path.name == FILE.name and not metadata.get("round", "").isdecimal():
        raise UserError(f"{path}: not a checkpoint of this program (it names no round)")
    return tensors, metadata


@contextlib.contextmanager
def locked(path: Path, where: str, hint: str, what: str = "run") -> Iterator[None]:
    """The folder of a lock file for one process at a time, however the one before ended."""
    import fcntl

    with writing(where):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            number = file.read().strip() or "unknown"
            raise UserError(
                f"{where}: a {what} is at work there (process {number}); {hint}"
            ) from None
        except OSError:
            pass  # some network disks have no locks
        file.truncate(0)
        with contextlib.suppress(OSError):  # a full disk; it is only for the line above
            os.write(file.fileno(), f"{os.getpid()}\n".encode())
        yield
