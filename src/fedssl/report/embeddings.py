"""Images as the encoder sees them: a map, and each image's nearest neighbours."""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from fedssl import config as configuration
from fedssl.config import Config
from fedssl.data.dataset import Dataset
from fedssl.data.random import choose, key
from fedssl.encoder.load import load_encoder
from fedssl.evaluate.features import extract
from fedssl.models.network import Tower
from fedssl.report.data import RunData, Unavailable
from fedssl.runs.build import build_network, image_shape
from fedssl.util.device import pick_device
from fedssl.util.errors import format_resume

MOST_IMAGES = 1000
TILE = 32  # pixels per side of a thumbnail, at most
QUERIES, NEIGHBOURS = 8, 5
COMPONENTS, ITERATIONS = 50, 500  # of t-SNE: its input's dimensions, and its steps
HIDDEN = (
    "there are no test images, and training images are shown only if you allow it: "
    "{} evaluate.show_training_images=true"
)
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Thumbnails:
    """All thumbnails in one image."""

    uri: str
    columns: int
    rows: int


@dataclass(frozen=True)
class ShownImages:
    """Images with their embeddings in the plane and their neighbours."""

    model: str
    projection: str  # how points were computed
    points: list[tuple[float, float]]
    labels: list[int] | None
    classes: list[str]
    thumbnails: Thumbnails
    queries: list[int]  # images whose neighbours are shown
    before: Ints  # neighbours of each image before training
    after: Ints
    precision: tuple[float, float] | None  # neighbours of the right class in %, before and after
    total: int  # images, of which at most MOST_IMAGES are shown
    split: str  # test, or training

    def label(self, index: int) -> int | None:
        """Return an image's class, if it has one."""
        label = -1 if self.labels is None else self.labels[index]
        return label if 0 <= label < len(self.classes) else None


def embed_images(data: RunData) -> ShownImages:
    """Embed a run's test images with its encoder and with the untrained one.

    Without test images, embed training images if ``evaluate.show_training_images`` allows it.
    """
    config, tower = data.settings, int(data.settings.evaluate.tower == "second")
    encoder = load_encoder(data.run.path, tower)
    dataset = data.dataset
    has_test = dataset.test is not None and len(dataset.test) > 0
    if not has_test and not config.evaluate.show_training_images:
        raise Unavailable(HIDDEN.format(format_resume(data.run.path)))
    split = data.evaluated.test if has_test else data.evaluated.train
    assert split is not None
    chosen = np.arange(len(split))
    if len(split) > MOST_IMAGES:
        chosen = np.sort(choose(key(config.seed, "report"), len(split), MOST_IMAGES))
    images = split.images[tower % len(dataset.train.images)][chosen]
    device = pick_device("auto")
    features = [
        extract(body.to(device), images).cpu()
        for body in (build_untrained(config, dataset, tower), encoder.body)
    ]
    labels = None if split.labels is None else split.labels[chosen].cpu().numpy()
    if labels is not None and not (labels >= 0).any():
        labels = None
    before, after = map(find_neighbours, features)
    points, projection = project(features[1])
    return ShownImages(
        encoder.note["model"],
        projection,
        points,
        None if labels is None else labels.tolist(),
        list(dataset.classes),
        draw_thumbnails(images),
        _choose_queries(labels, len(images)),
        before,
        after,
        None if labels is None else (_precision(before, labels), _precision(after, labels)),
        len(split),
        "test" if has_test else "training",
    )


def build_untrained(config: Config, dataset: Dataset, tower: int) -> nn.Module:
    """Build the evaluated tower's encoder with the random weights that the run began from."""
    objective = configuration.variant("objective", config.objective.name)(config.objective)
    fresh = replace(config, encoder=config.encoder.without_weights())
    shape = image_shape(config, dataset)
    network = build_network(fresh, objective, *shape, len(dataset.classes))
    return cast(Tower, network.towers[tower]).encoder.float().eval()


def project(features: Tensor) -> tuple[list[tuple[float, float]], str]:
    """Return a place in the plane for each image, and a description of the method."""
    centred = (features - features.mean(0)).double()
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    components = (centred @ directions[:COMPONENTS].T).numpy()
    if len(components) < 10:
        plane = np.pad(components[:, :2], ((0, 0), (0, max(0, 2 - components.shape[1]))))
        return _to_unit_square(plane), "the first two principal components"
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    perplexity = min(30.0, (len(components) - 1) / 3)
    method = TSNE(init="pca", perplexity=perplexity, random_state=0, max_iter=ITERATIONS)
    with threadpool_limits(1):  # ten times faster on a busy machine
        plane = method.fit_transform(components)
    description = (
        f"t-SNE (keeps neighbours together; distances between groups mean little; perplexity "
        f"{perplexity:g}) on the first {components.shape[1]} principal components"
    )
    return _to_unit_square(plane), description


def _to_unit_square(plane: NDArray[np.float64]) -> list[tuple[float, float]]:
    low, span = plane.min(0), np.ptp(plane, axis=0)
    places = (plane - low) / np.where(span > 0, span, 1)
    return [(round(float(x), 4), round(float(y), 4)) for x, y in places]


def find_neighbours(features: Tensor) -> Ints:
    """Return each image's nearest other images by cosine similarity, ``[N, NEIGHBOURS]``."""
    unit = nn.functional.normalize(features, dim=1)
    similarity = unit @ unit.T
    similarity.fill_diagonal_(-math.inf)
    return similarity.topk(min(NEIGHBOURS, len(features) - 1), dim=1).indices.numpy()


def _precision(near: Ints, labels: Ints) -> float:
    """Return the share of neighbours that have their image's class, in percent."""
    if not near.shape[1]:
        return 0.0
    return 100 * float((labels[near] == labels[:, None])[labels >= 0].mean())


def _choose_queries(labels: Ints | None, count: int) -> list[int]:
    """Choose the first image of each of several classes."""
    if labels is None:
        return sorted(set(np.linspace(0, count - 1, min(QUERIES, count)).astype(int).tolist()))
    classes = np.unique(labels[labels >= 0])
    spread = classes[np.linspace(0, len(classes) - 1, min(QUERIES, len(classes))).astype(int)]
    queries = [int(np.flatnonzero(labels == c)[0]) for c in spread]
    others = [int(k) for k in np.flatnonzero(labels >= 0) if k not in queries]
    return queries + others[: QUERIES - len(queries)]


def draw_thumbnails(images: Tensor) -> Thumbnails:
    """Draw uint8 images ``[N, C, H, W]`` into one image: PNG for gray, JPEG for color."""
    count, channels, height, width = images.shape
    tile = min(TILE, max(height, width))
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    mode, pixels = ("RGB", images[:, :3]) if channels >= 3 else ("L", images[:, :1])
    sheet = Image.new(mode, (columns * tile, rows * tile))
    for k, array in enumerate(pixels.permute(0, 2, 3, 1).cpu().numpy()):
        picture = Image.fromarray(np.ascontiguousarray(array.squeeze(2 if mode == "L" else ())))
        picture.thumbnail((tile, tile))
        left, top = (tile - picture.width) // 2, (tile - picture.height) // 2
        sheet.paste(picture, (k % columns * tile + left, k // columns * tile + top))
    options: dict[str, Any] = {"format": "PNG", "optimize": True}
    if mode == "RGB":
        options = {"format": "JPEG", "quality": 85, "subsampling": 0}
    buffer = io.BytesIO()
    sheet.save(buffer, **options)
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return Thumbnails(f"data:image/{options['format'].lower()};base64,{encoded}", columns, rows)
