"""Checkpoints: safetensors files, written beside the old ones and moved into place.

Each file has a seal. The server's file also holds the seals of the clients' files, a copy of
``config.yaml`` and the digest of ``metrics.jsonl``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedssl import config
from fedssl.config import plugins
from fedssl.data.dataset import Dataset
from fedssl.data.places import name_images
from fedssl.engines.base import Version
from fedssl.runs.reader import RunReader
from fedssl.util.errors import TrainingError, UserError
from fedssl.util.files import remove_strays, save_tensors
from fedssl.util.seals import DamagedError, check_tensors
from fedssl.util.trees import Tree, flatten, unflatten

if TYPE_CHECKING:
    from fedssl.runs.build import Experiment

FILE = Path("checkpoint") / "state.safetensors"
CLIENTS = Path("checkpoint") / "clients"
Clients = Sequence[Mapping[str, Any]]  # name and samples of each
FORMAT = "4"  # changes where older checkpoints cannot be read


def write(out: Path, experiment: Experiment) -> None:
    """Save everything that the next round depends on.

    Clients whose state changed get new files. Then the server's file, which says which ones count,
    is moved into place. Then old files are removed. So a reader finds one moment of the run,
    whenever the writer is killed.
    """
    server, engine = experiment.server, experiment.engine
    states = engine.states
    tree: dict[str, Tree] = {
        "weights": server.weights,
        "rule": cast("dict[str, Tree]", server.rule_state),
        "server": server.state,
        "average": cast("dict[str, Tree]", engine.aggregator.save_state()),
        "guard": cast("dict[str, Tree]", experiment.guard.state),
    }
    if experiment.config.encoder.name.startswith(plugins.MEMORY):
        tree["initial"] = experiment.trainer.initial  # no file has the weights that it began with
    tensors = {name: leaf.detach().contiguous().cpu() for name, leaf in flatten(tree).items()}
    _check_finite(tensors, experiment, out)
    files = ClientFiles(out, experiment)
    for client in sorted(states.changed):
        states.versions[client] = files.write(client, states.on_host(client))
    states.changed.clear()
    notes = {
        "format": FORMAT,
        "round": str(server.round),
        "clients": json.dumps(states.versions),
        "config": experiment.record.config,
        "metrics": experiment.record.metrics,
        "classes": json.dumps(experiment.dataset.classes),
        "constants": experiment.trainer.flat.digest_constants(),
        **engine.notes(),
    }
    if not experiment.of_sites:  # whose images are elsewhere
        notes["files"] = json.dumps(dict(experiment.dataset.files))
    save_tensors(out / FILE, tensors, notes)
    engine.committed(server.round)
    _remove_old(out, states.versions)


class ClientFiles:
    """The files of clients' states. The next checkpoint says which ones count."""

    def __init__(self, out: Path, experiment: Experiment) -> None:
        self.out, self.experiment = out, experiment

    def write(self, client: int, flat: dict[str, Tensor]) -> Version:
        """Write a state to a new file: the last checkpoint still needs the older one."""
        state = {name: leaf.contiguous() for name, leaf in flat.items()}
        _check_finite(state, self.experiment, self.out)
        last, _ = self.experiment.engine.states.versions.get(client, (-1, ""))
        number = max(self.experiment.server.round, last + 1)
        return number, save_tensors(_client_file(self.out, client, number), state, {})

    def read(self, client: int, version: Version) -> dict[str, Tensor]:
        """Read a state."""
        number, seal = version
        return _load(_client_file(self.out, client, number), seal)[0]


def forget_clients(out: Path, experiment: Experiment) -> None:
    """Remove the clients' states after the last round if nothing is read from them."""
    experiment.engine.states.forget()
    write(out, experiment)


def _client_file(out: Path, client: int, version: int) -> Path:
    return out / CLIENTS / f"{client}-{version}.safetensors"


def _remove_old(out: Path, versions: dict[int, Version]) -> None:
    current = {_client_file(out, client, round).name for client, (round, _) in versions.items()}
    for path in (out / CLIENTS).glob("*"):
        if path.name not in current:
            path.unlink(missing_ok=True)


def _check_finite(tensors: dict[str, Tensor], experiment: Experiment, out: Path) -> None:
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
        number = experiment.server.round
        raise describe_divergence(
            f"round {number}: the weights are no longer finite", experiment, out
        )


def describe_divergence(problem: str, experiment: Experiment, out: Path) -> TrainingError:
    """Return the error of a run that diverged, with the keys that may help."""
    server, client = experiment.config.server.lr, experiment.config.client.lr
    fix = f"Lower server.lr (now {server}) or client.lr (now {client})"
    keys = config.flatten(config.to_tree(experiment.config.algorithm), "algorithm.")
    for key, value in keys.items():  # a proximal term diverges where its weight times lr is above 2
        if isinstance(value, float) and value * client > 2:
            fix += f" or {key} (now {value})"
    return TrainingError(problem, f"{fix}. {describe_kept(out)}.")


def describe_kept(out: Path) -> str:
    """Describe what a run that failed leaves to resume from."""
    if (out / FILE).exists():
        return f"The last good checkpoint is kept in {out}"
    return f"No checkpoint had been written yet in {out}"


def read(out: Path, experiment: Experiment) -> bool:
    """Restore the state of a run from its checkpoint; return false if there is none yet."""
    path = out / FILE
    if not path.exists():
        return False
    tensors, notes = _load(path)
    experiment.record.metrics = notes["metrics"]
    engine, server = experiment.engine, experiment.server
    device = experiment.trainer.device
    tree = unflatten({name: tensor.to(device) for name, tensor in tensors.items()})
    weights = cast(Tensor, tree["weights"])
    if weights.shape != server.weights.shape:
        made = f"this configuration makes one of {len(server.weights)}"
        fix = "Leave the encoder, the head and the data's channels as they were."
        raise UserError(f"{path} holds a network of {len(weights)} numbers, and {made}", fix=fix)
    if notes.get("constants", "") != experiment.trainer.flat.digest_constants():
        raise UserError(
            f"the weights that do not train are not those of the run in {out}",
            key="encoder.init",
            value=experiment.config.encoder.init,
            fix="Put the file back as it was, or start a new run in another folder.",
        )
    if "initial" in tree:
        experiment.trainer.initial.copy_(cast(Tensor, tree["initial"]))
    server.round = int(notes["round"])
    server.weights = weights
    server.rule_state = cast("dict[str, Tensor]", tree.get("rule", {}))
    server.state = cast("dict[str, Tree]", tree.get("server", {}))
    experiment.guard.state = cast("dict[str, Tensor]", tree.get("guard", {}))
    engine.resume(notes, server.round)
    engine.aggregator.load_state(cast("dict[str, Tensor]", tree.get("average", {})))
    files = engine.states.files = ClientFiles(out, experiment)
    for client, (number, seal) in json.loads(notes["clients"]).items():
        version = number, seal
        engine.states.restore(int(client), files.read(int(client), version), version)
    return True


def exists(out: Path) -> bool:
    """Return whether a run has a checkpoint."""
    return (out / FILE).exists()


def read_config(out: Path) -> str:
    """Return the checkpoint's copy of ``config.yaml``; it is empty if there is none."""
    return _load(out / FILE, whole=False)[1]["config"] if exists(out) else ""


def remove_unfinished(out: Path) -> None:
    """Remove the files of a checkpoint that a killed process was writing."""
    states = (out / FILE).parent
    remove_strays([states, *(each for each in states.rglob("*") if each.is_dir())])


def find_changed_images(out: Path, dataset: Dataset) -> list[str] | None:
    """Return the splits whose files the run did not have; ``None`` if its files are not known."""
    before = _read_note(out, "files")
    if not before:
        return None
    return [split for split, digest in before.items() if dataset.files.get(split) != digest]


def check_images(
    out: Path, data: config.Data, dataset: Dataset, otherwise: str, clients: Clients = ()
) -> None:
    """Check that a run has the images that it had, wherever they are, and the same ``clients``.

    Clients' states are stored by number, and the order of images says which are held out.
    """
    key, value = name_images(data)
    fix = f"Put the images back as they were, or {otherwise}."
    before, after = (
        {row["name"]: row["samples"] for row in rows} for rows in (RunReader(out).clients, clients)
    )
    # Clients that came or went are named first: the held-out images of others change with them.
    names = sorted({**before, **after}, key=lambda name: name in before and name in after)
    for name in names if clients else ():
        if before.get(name) != after.get(name):
            had = f"had {before[name]} images in {out}" if name in before else f"was not in {out}"
            has = f"has {after[name]}" if name in after else "is not there"
            client = f"client {name}" if name.isdecimal() else name
            raise UserError(f"{client} {had} and {has} now", key=key, value=value, fix=fix)
    for split in find_changed_images(out, dataset) or ():
        problem = f"the {split.replace('train', 'training')} images are not those of {out}"
        raise UserError(problem, key=key, value=value, fix=fix)


def read_round(out: Path) -> int:
    """Return the number of rounds that the checkpoint has; 0 if there is none."""
    return int(_load(out / FILE, whole=False)[1]["round"]) if exists(out) else 0


def read_classes(out: Path) -> tuple[str, ...] | None:
    """Return the classes of the run's data, for which its classifier was made."""
    classes = _read_note(out, "classes")
    return None if classes is None else tuple(classes)


def _read_note(out: Path, name: str) -> Any:
    """Return a note of the checkpoint; ``None`` if there is none."""
    path = out / FILE
    notes = _load(path, whole=False)[1] if path.exists() else {}
    return json.loads(notes.get(name, "null"))


def _load(
    path: Path, seal: str | None = None, whole: bool = True
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a file's tensors, if it is read whole, and its notes; check its seal."""
    again = "Put back a copy of it, or start a new run in another folder."
    try:
        found = check_tensors(path)
        if seal is not None and found != seal:
            raise DamagedError
        with safe_open(path, framework="pt") as file:
            names = file.keys() if whole else ()
            tensors = {name: file.get_tensor(name) for name in names}
            notes = file.metadata() or {}
    except FileNotFoundError:
        raise UserError(f"{path} is missing, so the run cannot be resumed", fix=again) from None
    except (DamagedError, SafetensorError, OSError) as error:
        reason = f" ({error})" if isinstance(error, OSError) else ""
        raise UserError(f"{path} is damaged{reason}", fix=again) from None
    if not found and notes.get("format") == FORMAT:
        raise UserError(f"{path} is damaged", fix=again)
    if path.name == FILE.name and notes.get("format") != FORMAT:
        fix = "Finish the run with that version, or start a new run in another folder."
        raise UserError(f"{path} was written by another version of fedssl", fix=fix)
    return tensors, notes
