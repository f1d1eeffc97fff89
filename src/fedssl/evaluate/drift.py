"""Compare local models with the global one (Dec-SSL, appendix B.3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedssl.data import charts
from fedssl.data.random import choose, key
from fedssl.evaluate.evaluator import ModelEvaluator
from fedssl.evaluate.features import extract
from fedssl.evaluate.models import TrainedModels
from fedssl.models.flat_weights import FlatWeights
from fedssl.util.text import name_client

COMPONENTS = 20  # of PCA before UMAP
IMAGES = 500  # training images, the same for all models, whose features are compared


def measure(models: TrainedModels, evaluator: ModelEvaluator) -> dict[str, Any]:
    """Measure how far clients' models are from their new global model, and from each other.

    With clusters, a client is compared with the model of its cluster and with the other members.
    Weights: the sum over convolutions and linear layers of the L2 norm of their difference.
    Features: the mean L2 distance over images, and CKA, which is 1 for the same geometry.
    """
    local, flat = evaluator.trainer.watched, evaluator.trainer.flat
    if not local:
        return {}
    name_of, weights = _global_models(models, local)
    features = extract_features(models, evaluator)
    layers = {str(k): layer_distances(flat, w, weights[name_of[k]]) for k, w in local.items()}
    alike = [(a, b) for a, b in combinations(local, 2) if name_of[a] == name_of[b]]
    pairs = [sum(layer_distances(flat, local[a], local[b]).values()) for a, b in alike]
    names = next(iter(layers.values()))
    both = {str(k): (features[str(k)], features[name_of[k]]) for k in local}
    return {
        "local_weight_distance": {k: sum(each.values()) for k, each in layers.items()},
        "local_feature_distance": {k: mean_distance(*each) for k, each in both.items()},
        "local_cka": {k: cka(*each) for k, each in both.items()},
        "layer_distance": {n: float(np.mean([d[n] for d in layers.values()])) for n in names},
        **({"between_clients_weight_distance": float(np.mean(pairs))} if pairs else {}),
    }


def _global_models(
    models: TrainedModels, clients: Iterable[int]
) -> tuple[dict[int, str], dict[str, Tensor]]:
    """Return the name of the global model that each client trains, and the models by name.

    With clusters there are several.
    """
    trained = {client: models.server_model(client) for client in sorted(clients)}
    names: dict[int, str] = {}
    for model in (models.server.weights, *trained.values()):
        names.setdefault(id(model), f"global {len(names)}" if names else "global")
    name_of = {client: names[id(model)] for client, model in trained.items()}
    used = {name_of[client]: model for client, model in trained.items()}
    return name_of, {name: models.global_model(used[name]) for name in sorted(used)}


def layer_distances(flat: FlatWeights, a: Tensor, b: Tensor) -> dict[str, float]:
    """Return ‖a − b‖ of each convolution and linear layer, biases included."""
    squares: dict[str, Tensor] = {}
    for span in flat.of(nn.Conv2d, nn.Linear):
        layer = span.name.rpartition(".")[0]
        part = (a[span.start : span.stop] - b[span.start : span.stop]).square().sum()
        squares[layer] = squares.get(layer, torch.zeros_like(part)) + part
    return {layer: float(square.sqrt()) for layer, square in squares.items()}


def extract_features(models: TrainedModels, evaluator: ModelEvaluator) -> dict[str, Tensor]:
    """Return features of the same training images, by the name of the global or local model."""
    trainer = evaluator.trainer
    assert trainer.watched is not None
    modality = evaluator.data.modality
    count = len(trainer.images[modality])
    chosen = choose(key(evaluator.data.config.seed, "drift"), count, IMAGES)
    part = trainer.plain_images(torch.as_tensor(chosen, device=trainer.device), modality)
    weights = _global_models(models, trainer.watched)[1]
    weights |= {str(client): local for client, local in trainer.watched.items()}
    return {name: extract(evaluator.tower(each).encoder, part) for name, each in weights.items()}


def mean_distance(a: Tensor, b: Tensor) -> float:
    """Return the mean distance of matching rows."""
    return float((a - b).norm(dim=1).mean())


def cka(a: Tensor, b: Tensor) -> float:
    """Return the linear centred kernel alignment (Kornblith et al. 2019).

    It is 1 for features that differ by rotation and scale.
    """
    a, b = (x.double() - x.double().mean(0) for x in (a, b))
    cross, scale = (a.T @ b).norm().square(), (a.T @ a).norm() * (b.T @ b).norm()
    return float(cross / scale) if scale > 0 else float("nan")


def draw_features(features: Mapping[str, Tensor], names: Sequence[str], path: Path) -> None:
    """Draw all models' features in two dimensions, as :func:`flatten` computes them.

    ``names`` are those of the clients, by number.
    """
    points = flatten(torch.cat(list(features.values())).double().cpu())
    labels = [name_client(names, int(name)) if name.isdecimal() else name for name in features]
    ends = np.cumsum([len(part) for part in features.values()])[:-1]
    groups = dict(zip(labels, np.split(points, ends), strict=True))
    charts.save(charts.draw_points(groups), path, "evaluate.drift")


def flatten(rows: Tensor) -> NDArray[np.float64]:
    """Return two numbers for each row: UMAP of the first 20 of PCA, as in Figure 9.

    Without the package umap-learn, they are the first two of PCA.
    """
    rows = rows - rows.mean(0)
    width = COMPONENTS if find_spec("umap") else 2
    reduced = (rows @ torch.linalg.svd(rows, full_matrices=False)[2][:width].T).numpy()
    if width == 2:
        return reduced
    from umap import UMAP

    points: NDArray[np.float64] = UMAP(n_components=2, random_state=0).fit_transform(reduced)
    return points
