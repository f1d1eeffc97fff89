"""Checkpoints: one safetensors file that is written beside the old one and moved into place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedssl.errors import TrainingError, UserError
from fedssl.session import Session
from fedssl.trees import Tree, flatten, unflatten

FILE = Path("checkpoint") / "state.safetensors"


def write(out: Path, session: Session) -> None:
    """Save everything that the next round depends on."""
    server = session.server
    states = {str(client): state for client, state in session.engine.states.items() if state}
    tree: dict[str, Tree] = {
        "weights": server.weights,
        "rule": cast("dict[str, Tree]", server.rule_state),
        "server": server.state,
        "clients": cast("dict[str, Tree]", states),
    }
    tensors = {name: leaf.detach().contiguous().cpu() for name, leaf in flatten(tree).items()}
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
        raise TrainingError(
            f"round {server.round}: the weights are no longer finite; lower server.lr "
            f"(now {session.config.server.lr}). {kept(out)}"
        )
    save(out / FILE, tensors, {"round": str(server.round)})


def kept(out: Path) -> str:
    """What a run that failed leaves to resume from."""
    if (out / FILE).exists():
        return f"The last good checkpoint is kept in {out}"
    return f"No checkpoint had been written yet in {out}"


def read(out: Path, session: Session) -> bool:
    """Bring a session to where its checkpoint was; false if there is none yet."""
    path = out / FILE
    if not path.exists():
        return False
    device = session.work.device
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            round = int(file.metadata()["round"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise UserError(f"{path}: not a checkpoint of this program ({error})") from None
    tree = unflatten({name: tensor.to(device) for name, tensor in tensors.items()})
    server = session.server
    server.round = round
    weights = cast(Tensor, tree["weights"])
    if weights.shape != server.weights.shape:
        raise UserError(
            f"{path}: holds a network of {len(weights)} numbers where this configuration makes one "
            f"of {len(server.weights)}; the encoder, the head or the data's channels differ"
        )
    server.weights = weights
    rule = cast("dict[str, Tensor]", tree.get("rule", {}))
    # A count of steps is read by the host at every step: it lives there.
    server.rule_state = {k: v.cpu() if v.ndim == 0 else v for k, v in rule.items()}
    server.state = cast("dict[str, Tree]", tree.get("server", {}))
    clients = cast("dict[str, dict[str, Tree]]", tree.get("clients", {}))
    session.engine.states.update({int(client): state for client, state in clients.items()})
    return True


def save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file so that a reader sees the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    try:
        save_file(tensors, new, metadata)
        with new.open("rb") as file:
            os.fsync(file.fileno())
        new.replace(path)
    except (SafetensorError, OSError) as error:
        new.unlink(missing_ok=True)
        raise UserError(
            f"{path}: cannot be written ({error}); make room, then continue with --resume. "
            "The last good checkpoint is kept"
        ) from None
