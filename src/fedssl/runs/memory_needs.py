"""Compare the memory that a run certainly needs with what there is, before it is built."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from fedssl import config as configuration
from fedssl.config import Config, plugins
from fedssl.data.dataset import Groups
from fedssl.federation.algorithm import Algorithm
from fedssl.federation.sampling import cohort_size
from fedssl.training.trainer import Trainer
from fedssl.util.device import pick_device
from fedssl.util.errors import UserError
from fedssl.util.free_memory import find_free_memory
from fedssl.util.text import format_bytes
from fedssl.util.trees import count_bytes

FIX = "Use a smaller encoder, objective.projector, data.size, algorithm.batch or cohort.size."


def is_shipped(config: Config) -> bool:
    """Return whether a network can be built without memory: a user's own may read values."""
    return (
        config.objective.name in configuration.VARIANTS["objective"]
        and config.algorithm.name in configuration.VARIANTS["algorithm"]
        and not config.encoder.name.startswith(configuration.TIMM)
        and not plugins.is_own(config.encoder.name)
    )


def check_memory(trainer: Trainer, algorithm: Algorithm, groups: Groups) -> None:
    """Refuse a run that cannot fit; ``trainer`` is on the meta device, which takes no memory.

    Activations, copies and evaluation are left out, so a run that passes may still be too large.
    """
    config = trainer.config
    device = pick_device(config.device)
    needs = {"networks": _count_networks(trainer), "replies": _count_reply(trainer, algorithm)}
    needs["a batch"] = _count_batch(trainer, groups)
    states = {"states of clients": _count_states(trainer, config, len(groups))}
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        needs["images"] = sum(map(_count, trainer.images))
        _compare(needs, free, config)
    else:
        states |= needs
    free_here = find_free_memory()
    if free_here is not None:
        _compare(states, free_here, config)


def _compare(needs: dict[str, int], free: int, config: Config) -> None:
    needed = sum(needs.values())
    if needed > free:
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in needs.items() if size)
        problem = f"needs at least {format_bytes(needed)} of memory ({parts})"
        problem += f", and {format_bytes(free)} are free"
        raise UserError(problem, key="device", value=config.device, fix=FIX)


def _count(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _count_networks(trainer: Trainer) -> int:
    """Count weights, gradients, first weights, the target network, and optimizer and memory."""
    kept = [trainer.flat.vector, trainer.flat.gradient, trainer.initial, *trainer.memory.values()]
    if trainer.target is not None:
        kept.append(trainer.target.vector)
    for state in (trainer.rule_state, trainer.target_state):
        kept += state.values()
    return sum(map(_count, kept))


def _count_reply(trainer: Trainer, algorithm: Algorithm) -> int:
    """Count the largest reply: an update, or statistics such as a matrix of correlations."""
    largest = 0
    for task in algorithm.tasks().values():
        with contextlib.suppress(NotImplementedError):  # its size depends on values
            largest = max(largest, count_bytes(task.expected_reply(algorithm, trainer)))
    return largest


def _count_batch(trainer: Trainer, groups: Groups) -> int:
    """Count the images of the smallest client's batch, in the format of the network."""
    samples = min(int(groups.sizes.min()), trainer.batches.size or 2**31)
    pixels = sum(images[0].numel() for images in trainer.images if len(images))
    return samples * pixels * trainer.initial.element_size()


def _count_states(trainer: Trainer, config: Config, clients: int) -> int:
    """Count the target networks and memories that one round leaves with its clients, here."""
    if config.engine.name != "local" or not config.rounds:
        return 0
    one = sum(map(_count, trainer.memory.values()))
    if trainer.target is not None:
        one += _count(trainer.target.vector)
    return one * cohort_size(config, clients)
