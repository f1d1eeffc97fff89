"""How well the classes' mean features tell test images apart."""

import torch
from torch import Tensor


def nearest_mean(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    classes: int,
    seed: int,
) -> dict[str, float]:
    """Percentages by name; in the run's summary they are ``nearest_mean_top1`` and so on."""
    held = [c for c in range(classes) if bool((train_labels == c).any())]
    means = torch.stack([train_features[train_labels == c].mean(0) for c in held])
    order = torch.cdist(test_features, means).argsort(1)
    right = torch.tensor(held, device=order.device)[order] == test_labels[:, None]
    top = {"top1": right[:, 0], "top3": right[:, :3].any(1)}
    return {name: 100 * float(hit.float().mean()) for name, hit in top.items()}
