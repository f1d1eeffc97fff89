"""Compare the memory that a run certainly needs with what is free, before it is built."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from fedssl.federation.algorithm import Algorithm
from fedssl.training.trainer import Trainer
from fedssl.util.device import pick_device
from fedssl.util.errors import UserError
from fedssl.util.memory import find_free_memory
from fedssl.util.text import format_bytes
from fedssl.util.trees import Tree, count_bytes

if TYPE_CHECKING:
    from fedssl.runs.build import Experiment


def check_memory(experiment: Experiment) -> None:
    """Refuse a run that cannot fit; its network is on the meta device, which takes no memory.

    Activations, copies and evaluation are left out, so a run that passes may still be too large.
    """
    trainer, name = experiment.trainer, experiment.config.device
    needs = {
        "networks": _count_networks(trainer),
        "a reply": _count_reply(trainer, experiment.algorithm),
        "a batch": _count_batch(trainer, int(experiment.engine.groups.sizes.min())),
    }
    needed, free = sum(needs.values()), _find_free(pick_device(name))
    if needed > free:
        parts = ", ".join(f"{part} {format_bytes(size)}" for part, size in needs.items())
        problem = f"the run needs at least {format_bytes(needed)} of memory ({parts})"
        problem += f", and {format_bytes(free)} are free"
        fix = "Use a smaller encoder, objective.projector, data.size or algorithm.batch."
        raise UserError(problem, key="device", value=name, fix=fix)


def _find_free(device: torch.device) -> int:
    if device.type != "cuda":
        return find_free_memory()
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserved


def _count_networks(trainer: Trainer) -> int:
    """Count weights, gradients, first weights, the target network, and optimizer and memory."""
    kept: Tree = {
        "weights": {"flat": trainer.flat.vector, "first": trainer.initial},
        "gradient": trainer.flat.gradient,
        "target": {} if trainer.target is None else trainer.target.vector,
        "states": {"flat": trainer.rule_state, "target": trainer.target_state},
        "memory": trainer.memory,
    }
    return count_bytes(kept)


def _count_reply(trainer: Trainer, algorithm: Algorithm) -> int:
    """Count the largest reply: an update, or statistics such as a matrix of correlations."""
    largest = 0
    for task in algorithm.tasks().values():
        with contextlib.suppress(NotImplementedError):  # its size depends on values
            largest = max(largest, count_bytes(task.expected_reply(algorithm, trainer)))
    return largest


def _count_batch(trainer: Trainer, samples: int) -> int:
    """Count the images of the smallest client's batch, in the format of the network."""
    pixels = sum(images[0].numel() for images in trainer.images if len(images))
    return min(samples, trainer.batches.size or samples) * pixels * trainer.initial.element_size()
