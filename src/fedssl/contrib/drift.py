"""What local models do: how far they are from the global one (Dec-SSL, appendix B.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedssl.data.random import choose, key
from fedssl.evaluate.features import extract
from fedssl.models.flat_weights import FlatWeights
from fedssl.report import charts
from fedssl.util.text import name_client

if TYPE_CHECKING:
    from fedssl.runs.build import Experiment

IMAGES = 500  # training images, the same for all models, whose features are compared


def measure(experiment: Experiment) -> dict[str, Any]:
    """Each client's distances to its new global model, and those between clients, for the metrics.

    Weights: the sum over convolutions and linear layers of the L2 norm of their difference.
    Features: the mean L2 distance over images, and 1 where CKA sees the same geometry.
    """
    seen, flat = experiment.trainer.watched, experiment.trainer.flat
    if not seen:
        return {}
    central, its = centres(experiment), {str(k): centre_of(experiment, k) for k in seen}
    layers = {str(k): layer_distances(flat, own, central[its[str(k)]]) for k, own in seen.items()}
    features = looks(experiment)
    shared = {name: features.pop(name) for name in central}
    pairs = [sum(layer_distances(flat, a, b).values()) for a, b in combinations(seen.values(), 2)]
    names = next(iter(layers.values()))
    return {
        "local_weight_distance": {k: sum(each.values()) for k, each in layers.items()},
        "local_feature_distance": {k: apart(own, shared[its[k]]) for k, own in features.items()},
        "local_cka": {k: cka(own, shared[its[k]]) for k, own in features.items()},
        "layer_distance": {n: float(np.mean([d[n] for d in layers.values()])) for n in names},
        **({"between_clients_weight_distance": float(np.mean(pairs))} if pairs else {}),
    }


def centre_of(experiment: Experiment, client: int) -> str:
    """The name of the global model that a client trains: one of several with FeatARC."""
    number = experiment.models.number_of(client)
    return f"global {number}" if number else "global"


def centres(experiment: Experiment) -> dict[str, Tensor]:
    """The global models of the clients that are watched."""
    numbers = {
        centre_of(experiment, k): experiment.models.number_of(k)
        for k in experiment.trainer.watched or ()
    }
    return {
        name: experiment.models.global_model(number) for name, number in sorted(numbers.items())
    }


def layer_distances(flat: FlatWeights, a: Tensor, b: Tensor) -> dict[str, float]:
    """‖a − b‖ of each convolution and linear layer (its bias with it)."""
    squares: dict[str, Tensor] = {}
    for span in flat.of(nn.Conv2d, nn.Linear):
        layer = span.name.rpartition(".")[0]
        part = (a[span.start : span.stop] - b[span.start : span.stop]).square().sum()
        squares[layer] = squares.get(layer, torch.zeros_like(part)) + part
    return {layer: float(square.sqrt()) for layer, square in squares.items()}


def looks(experiment: Experiment) -> dict[str, Tensor]:
    """Features of the same images under the global models and the local ones."""
    images = experiment.dataset.train.images[experiment.evaluator.modality]
    chosen = choose(key(experiment.config.seed, "drift"), len(images), IMAGES)
    part = images[torch.as_tensor(chosen)]
    assert experiment.trainer.watched is not None
    models = centres(experiment)
    models |= {str(client): weights for client, weights in experiment.trainer.watched.items()}
    return {
        name: extract(
            experiment.evaluator.tower(weights).encoder, part, device=experiment.trainer.device
        )
        for name, weights in models.items()
    }


def apart(a: Tensor, b: Tensor) -> float:
    """The mean distance of matching rows."""
    return float((a - b).norm(dim=1).mean())


def cka(a: Tensor, b: Tensor) -> float:
    """Linear centred kernel alignment (Kornblith et al. 2019): 1 up to rotation and scale."""
    a, b = (x.double() - x.double().mean(0) for x in (a, b))
    cross, own = (a.T @ b).norm().square(), (a.T @ a).norm() * (b.T @ b).norm()
    return float(cross / own) if own > 0 else float("nan")


def draw_features(features: Mapping[str, Tensor], names: Sequence[str], path: Path) -> None:
    """Draw all models' features on the first two axes of their PCA (Figure 9 has UMAP after it).

    ``names`` are those of the clients, by number.
    """
    rows = torch.cat(list(features.values())).double().cpu()
    rows = rows - rows.mean(0)
    points = (rows @ torch.linalg.svd(rows, full_matrices=False)[2][:2].T).numpy()
    labels = [name_client(names, int(name)) if name.isdecimal() else name for name in features]
    ends = np.cumsum([len(part) for part in features.values()])[:-1]
    groups = dict(zip(labels, np.split(points, ends), strict=True))
    charts.save(charts.draw_points(groups), path, "evaluate.drift")
