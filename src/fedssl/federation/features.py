"""Images without augmentation, and the features of them that clients share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedssl.federation.server import Server
from fedssl.training.trainer import Trainer

LONGEST = 1.01  # L2 norm of a feature of length 1, with room for rounding


def scale_pixels(trainer: Trainer, images: Tensor) -> Tensor:
    """Return images as networks see them, without augmentation: between 0 and 1."""
    return images.to(trainer.dtype) / 255


def split_batches(trainer: Trainer, images: Tensor) -> tuple[Tensor, ...]:
    """Split images into batches as in training, because batch norm looks at a batch."""
    return images.tensor_split(trainer.batches.per_epoch(len(images)))


def accept_features(
    server: Server, replies: Mapping[int, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the clients' new features; warn of features that are not finite, or longer than 1.

    A longer feature would outweigh those of all other clients.
    """
    accepted: dict[str, Tensor] = {}
    for client, reply in replies.items():
        lengths = torch.linalg.vector_norm(reply["features"], dim=1)
        if bool((lengths < LONGEST).all()):  # false for NaN
            accepted[str(client)] = reply["features"]
            continue
        fault = "longer than 1" if bool(torch.isfinite(lengths).all()) else "not finite"
        server.warn(
            f"{server.name_client(client)} shared features that are {fault}: its last ones stay"
        )
    return accepted


def join_features(
    shared: Mapping[str, Tensor], width: int, like: Tensor, without: int | None = None
) -> Tensor:
    """Join the clients' features in the order of the clients, ``without`` those of one of them."""
    clients = sorted(int(k) for k in shared if int(k) != without)
    return torch.cat([like.new_empty(0, width), *(shared[str(k)] for k in clients)])
