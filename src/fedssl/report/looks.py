"""What the page shows of a run's data: who holds what, the map of test features, the gallery."""

from __future__ import annotations

import base64
import copy
import importlib.util
import inspect
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from fedssl import config as configuration
from fedssl.config import Config
from fedssl.data import sources
from fedssl.data.dataset import Dataset, Split
from fedssl.data.partition import counts, distance
from fedssl.data.places import use_local_copy
from fedssl.data.random import choose, key
from fedssl.evaluate.features import extract
from fedssl.models.network import Tower
from fedssl.models.weights import load_weights
from fedssl.runs.build import build_network
from fedssl.runs.record import Run
from fedssl.runs.split import load_run_dataset, split_clients
from fedssl.util.devices import pick_device
from fedssl.util.errors import UserError

MOST_IMAGES = 1000
MOST_CLIENTS = 60
TILE = 32  # pixels a side of a thumbnail, at most
QUERIES, NEIGHBOURS = 8, 5
COMPONENTS, ITERATIONS = 50, 500  # that t-SNE starts from, and that it makes
T = TypeVar("T")
Ints = NDArray[np.int64]


class Empty(Exception):
    """Why a section of the page shows nothing."""


@dataclass(frozen=True)
class Part:
    """Who holds what."""

    names: list[str]  # of the first clients, which are shown
    sizes: list[int]  # of all
    held: list[list[int]] | None  # by client and class; none: no labels
    classes: list[str]
    word: str
    distance: float | None
    unknown: str = "There are no labels here to tell classes by"  # where nothing is held


@dataclass(frozen=True)
class Neighbours:
    """A query and the images nearest to it, as numbers of thumbnails."""

    query: int
    before: list[int]
    after: list[int]


@dataclass(frozen=True)
class Look:
    """Test images as an encoder sees them."""

    model: str
    method: str
    points: list[tuple[float, float]]
    labels: list[int] | None
    classes: list[str]
    sprite: Sprite
    gallery: list[Neighbours]
    right: tuple[float, float] | None  # of the neighbours of all images, before and after, percent
    total: int  # test images in all


@dataclass(frozen=True)
class Sprite:
    """All thumbnails in one picture."""

    uri: str
    tile: int
    columns: int
    rows: int


class Data:
    """A run's data, loaded when it is first asked for."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._loaded: Dataset | None = None

    def settings(self) -> Config:
        """The configuration, of a run whose data can be here."""
        if self.run.config is None:
            raise Empty(f"its configuration is of another version of fedssl: {self.run.problem}")
        if self.run.config.engine.sites is not None:
            raise Empty("a deployment: the images are at their sites, and never come to the server")
        return self.run.config

    def dataset(self) -> Dataset:
        """The data set."""
        config = self.settings()
        if self._loaded is None:
            self._loaded = self.sized(config)
        return self._loaded

    def sized(self, config: Config, size: int | None = None) -> Dataset:
        """The data set at another size; a page downloads nothing."""
        return load_run_dataset(replace(config, data=use_local_copy(config.data)), size)


def tried(what: Callable[[], T]) -> T | str:
    """A section's content, or the sentence that says why it is empty."""
    try:
        return what()
    except (Empty, UserError) as reason:
        return str(reason)
    except Exception as error:  # a page without a picture is better than none, whatever went wrong
        return f"it could not be made ({type(error).__name__}: {str(error)[:200]})"


def partition(data: Data) -> Part:
    """Who holds what; of a deployment, and of data that is gone, the sizes are known."""
    known = data.run.clients
    try:
        config, dataset = data.settings(), data.dataset()
        found = sources.assign(config, dataset, pick_device("auto"))
        groups = split_clients(config, dataset, found)
    except (Empty, UserError, OSError) as reason:
        if not known:
            raise
        names = [str(own["name"]) for own in known[:MOST_CLIENTS]]
        sizes = [int(own["samples"]) for own in known]
        why = f"By clients.json, without classes: {reason}"
        return Part(names, sizes, None, [], "classes", None, why)
    names = [str(own["name"]) for own in known] or list(map(str, range(len(groups))))
    sizes = groups.sizes.tolist()
    labels = None if found.of is None else found.of.numpy()
    if labels is None or not (labels[groups.members] >= 0).any():
        return Part(names[:MOST_CLIENTS], sizes, None, [], found.word, None)
    held = counts(groups, labels)
    classes = list(found.names) or [str(c) for c in range(held.shape[1])]
    held = np.pad(held, ((0, 0), (0, max(0, len(classes) - held.shape[1]))))[:MOST_CLIENTS]
    apart = distance(groups, labels)
    return Part(names[:MOST_CLIENTS], sizes, held.tolist(), classes, found.word, apart)


def look(data: Data) -> Look:
    """The map and the gallery of a run."""
    run, config = data.run, data.settings()
    tower = int(config.evaluate.tower == "second")
    file = run.path / f"encoder{'-second' if tower else ''}.safetensors"
    if not file.is_file():
        raise Empty("the encoder is not written yet: the run has not ended")
    dataset = data.dataset()
    if dataset.test is None or not len(dataset.test):
        raise Empty(
            "the data has no test split, and training images are not shown; "
            "`fedssl search RUN IMAGE FOLDER` shows the neighbours of an image"
        )
    before, modality = untrained(config, dataset, tower)
    after = _loaded(before, file)
    judged = _judged(data, config, dataset)
    chosen = _chosen(config, judged)
    images = judged.images[modality][chosen]
    device = pick_device("auto")
    features = [extract(net.to(device), images, device=device).cpu() for net in (before, after)]
    labels = None if judged.labels is None else judged.labels[chosen].cpu().numpy()
    if labels is not None and not (labels >= 0).any():
        labels = None
    near = [nearest(each) for each in features]
    points, method = flattened(features[1])
    return Look(
        str(run._json("encoder.json", {}).get("model", "global")),
        method,
        points,
        None if labels is None else labels.tolist(),
        list(dataset.classes),
        sprite(images),
        gallery(near[0], near[1], labels),
        None if labels is None else (_right(near[0], labels), _right(near[1], labels)),
        len(judged),
    )


def untrained(config: Config, dataset: Dataset, tower: int) -> tuple[nn.Module, int]:
    """The judged tower's encoder at random, as the run's own was, and which images it sees."""
    objective = configuration.variant("objective", config.objective.name)(config.objective)
    images = dataset.train.images
    fresh = replace(config, encoder=replace(config.encoder, init=None))
    channels = tuple(i.shape[1] for i in images)
    small = min(images[0].shape[2:])
    network = build_network(fresh, objective, channels, small, len(dataset.classes))
    encoder = cast(Tower, network.towers[tower]).encoder
    return encoder.float().eval(), tower % len(images)


def _loaded(like: nn.Module, file: Path) -> nn.Module:
    """The same network with the weights of a file."""
    trained = copy.deepcopy(like)
    try:
        load_weights(trained, file, file.name)
    except UserError as reason:
        raise Empty(f"the encoder does not fit the configuration ({reason})") from None
    return trained


def _judged(data: Data, config: Config, dataset: Dataset) -> Split:
    """The test images at the size at which they are judged."""
    size, test = config.evaluate.size, dataset.test
    if size is not None and size != config.data.size:
        test = data.sized(config, size).test
    assert test is not None
    return test


def _chosen(config: Config, test: Split) -> Ints:
    """Which test images are shown."""
    if len(test) <= MOST_IMAGES:
        return np.arange(len(test))
    return np.sort(choose(key(config.seed, "report"), len(test), MOST_IMAGES))


def flattened(features: Tensor) -> tuple[list[tuple[float, float]], str]:
    """A place in the plane for each image, and the words for how it was found."""
    centred = (features - features.mean(0)).double()
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    wide = (centred @ directions[:COMPONENTS].T).numpy()
    if len(wide) < 10 or importlib.util.find_spec("sklearn") is None:
        plane = np.pad(wide[:, :2], ((0, 0), (0, max(0, 2 - wide.shape[1]))))
        return _scaled(plane), "the first two principal components"
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    perplexity = min(30.0, (len(wide) - 1) / 3)
    named = inspect.signature(TSNE).parameters  # another word before scikit-learn 1.5
    steps = {"max_iter" if "max_iter" in named else "n_iter": ITERATIONS}
    method = TSNE(init="pca", perplexity=perplexity, random_state=0, **steps)
    with threadpool_limits(1):  # more threads wait for each other: on a busy machine ten times
        plane = method.fit_transform(wide)
    said = (
        f"t-SNE (keeps neighbours together; distances between groups mean little; perplexity "
        f"{perplexity:g}) of the first {wide.shape[1]} principal components"
    )
    return _scaled(plane), said


def _scaled(plane: NDArray[np.float64]) -> list[tuple[float, float]]:
    """Between 0 and 1, of which three digits are all that can be seen."""
    low, span = plane.min(0), np.ptp(plane, axis=0)
    places = (plane - low) / np.where(span > 0, span, 1)
    return [(round(float(x), 4), round(float(y), 4)) for x, y in places]


def nearest(features: Tensor) -> Ints:
    """The nearest others of each image by cosine, ``[N, NEIGHBOURS]``."""
    unit = torch.nn.functional.normalize(features, dim=1)
    alike = unit @ unit.T
    alike.fill_diagonal_(-math.inf)
    most = min(NEIGHBOURS, len(features) - 1)
    found: Ints = alike.topk(most, dim=1).indices.numpy() if most > 0 else np.empty((1, 0), int)
    return found


def _right(near: Ints, labels: Ints) -> float:
    """How many of the neighbours are of the image's own class, in percent."""
    known = labels >= 0
    if not near.shape[1]:
        return 0.0
    return 100 * float((labels[near] == labels[:, None])[known].mean())


def gallery(before: Ints, after: Ints, labels: Ints | None) -> list[Neighbours]:
    """Queries of different classes, the first image of each; never chosen by how well they do."""
    if labels is None:
        firsts = np.linspace(0, len(after) - 1, min(QUERIES, len(after))).astype(np.int64)
        queries = sorted(set(firsts.tolist()))
    else:
        classes = np.unique(labels[labels >= 0])
        spread = classes[np.linspace(0, len(classes) - 1, min(QUERIES, len(classes))).astype(int)]
        queries = [int(np.flatnonzero(labels == c)[0]) for c in spread]
        others = (int(k) for k in np.flatnonzero(labels >= 0) if int(k) not in queries)
        while len(queries) < QUERIES and (other := next(others, None)) is not None:
            queries.append(other)
    return [Neighbours(q, before[q].tolist(), after[q].tolist()) for q in queries]


def sprite(images: Tensor) -> Sprite:
    """The thumbnails of uint8 images ``[N, C, H, W]`` in one picture: PNG if gray, else JPEG."""
    count, channels, height, width = images.shape
    tile = min(TILE, max(height, width))
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    mode = "RGB" if channels >= 3 else "L"
    sheet = Image.new(mode, (columns * tile, rows * tile))
    pixels = images[:, :3] if channels >= 3 else images[:, 0]
    arrays = (pixels.permute(0, 2, 3, 1) if channels >= 3 else pixels).cpu().numpy()
    for k, array in enumerate(arrays):
        picture = Image.fromarray(np.ascontiguousarray(array), mode)
        if (width, height) != (tile, tile):
            picture.thumbnail((tile, tile))
        left, top = (tile - picture.width) // 2, (tile - picture.height) // 2
        sheet.paste(picture, (k % columns * tile + left, k // columns * tile + top))
    buffer = io.BytesIO()
    kind: dict[str, Any] = {"format": "PNG", "optimize": True}
    if mode == "RGB":
        kind = {"format": "JPEG", "quality": 85, "subsampling": 0}
    sheet.save(buffer, **kind)
    coded = base64.b64encode(buffer.getvalue()).decode()
    return Sprite(f"data:image/{kind['format'].lower()};base64,{coded}", tile, columns, rows)
