"""The Dec-SSL paper's linear model (sections 3.2 and 4.2, appendix E): what each source learns.

Source k of K has mostly data of two classes that differ along the basis vector e_k; the other basis
vectors vary in them too, and more. Self-supervision learns all of these directions, whichever
source it looks at; a classifier learns the one that its own labels need.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedssl.data.random import key
from fedssl.util.errors import TrainingError, UserError

Array = NDArray[np.float64]
LARGEST = 2048  # of d; the data takes some hundred megabytes
LEFT, TOP, LENGTH, BAR, GAP = 150, 44, 420, 12, 10  # pixels of the picture
SLACK = 100.0  # price of a missed margin: far above what any sample's constraint costs


@dataclass(frozen=True)
class Source:
    """Samples ``[N, d]`` and their classes, 0 to 2K − 1 (the paper counts from 1)."""

    x: Array
    y: NDArray[np.int64]

    @property
    def covariance(self) -> Array:
        """The mean of x xᵀ: all that the self-supervised loss depends on (Eq. E.5)."""
        return self.x.T @ self.x / len(self.x)


def check(d: int, sources: int) -> None:
    """Refuse what the model is not made for."""
    if sources < 2:
        raise UserError(f"--k {sources}: sources differ only if there are two or more; give --k 2")
    if not 4 * sources <= d <= LARGEST:
        raise UserError(f"--d {d}: must be from {4 * sources} (four times --k) to {LARGEST}")


def generate(d: int, sources: int, seed: int) -> list[Source]:
    """The data of every source (appendix E.1).

    The paper says "poly(d)" for the frequent classes: here d^(5/4) samples. The rare ones have
    d^(3/20) each, as in its proof of Lemma E.2.
    """
    check(d, sources)
    rngs = [np.random.default_rng(key(seed, "theory", k)) for k in range(sources)]
    return [_source(k, d, sources, rng) for k, rng in enumerate(rngs)]


def _source(k: int, d: int, sources: int, rng: np.random.Generator) -> Source:
    often, seldom = round(d**1.25 / 2), round(d**0.15)
    tau, mu = d**0.2, d**-0.2
    others = [i for i in range(sources) if i != k]
    classes = [2 * k, 2 * k + 1, *(2 * i for i in others)]
    y = np.repeat(classes, [often, often, *[seldom] * len(others)])
    x = mu * rng.standard_normal((len(y), d))
    frequent = 2 * often
    x[:frequent, others] -= tau * rng.integers(0, 2, (frequent, len(others)))
    x[:frequent, k] += np.where(y[:frequent] == 2 * k, 1.0, -1.0)
    x[np.arange(frequent, len(y)), y[frequent:] // 2] += 1
    return Source(x, y)


def embedding(covariance: Array, rows: int) -> Array:
    """The minimizer w ``[rows, d]`` of the loss: scaled eigenvectors (Eckart–Young; Eq. E.5)."""
    values, vectors = np.linalg.eigh(covariance)
    kept: Array = np.sqrt(values[-rows:, None].clip(0)) * vectors[:, -rows:].T
    return kept


def representability(w: Array) -> Array:
    """How much of each basis vector is in the span of the rows of ``w`` (Definition 3.1)."""
    _, values, directions = np.linalg.svd(w, full_matrices=False)
    span = directions[values > 1e-10 * values.max()]
    kept: Array = np.square(span).sum(0)
    return kept


def classifier(source: Source, classes: int) -> Array:
    """The weights of least norm with all margins at least 1 (Eq. E.19): ``[classes, d]``."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.svm import LinearSVC

    # scikit-learn must know of the classes that no sample has, as their weights are free too. A
    # sample of zeros misses its margin whatever the weights are, so it changes nothing else.
    missing = np.setdiff1d(np.arange(classes), source.y)
    x = np.concatenate((source.x, np.zeros((len(missing), source.x.shape[1]))))
    solver = LinearSVC(
        multi_class="crammer_singer", C=SLACK, fit_intercept=False, tol=1e-5, max_iter=20_000
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # margins tell, below
        solver.fit(x, np.concatenate((source.y, missing)))
    weights: Array = solver.coef_
    if margins(weights, source).min() < 0.99:
        raise TrainingError("no classifier separates a source's classes; take a larger --d")
    return weights


def margins(weights: Array, source: Source) -> Array:
    """Of each sample: its own class's score over the best other one."""
    scores, own = source.x @ weights.T, np.arange(len(source.y))
    right = scores[own, source.y]
    scores[own, source.y] = -np.inf
    least: Array = right - scores.max(1)
    return least


def features(weights: Array) -> Array:
    """The first layer u of the two-layer network v u = ``weights`` of least norm (appendix E.2).

    ‖uᵀu‖² + ‖vᵀv‖² is least where both have the roots of the singular values.
    """
    _, values, directions = np.linalg.svd(weights, full_matrices=False)
    u: Array = np.sqrt(values)[:, None] * directions
    return u


def correlation(u: Array) -> Array:
    """Σᵢ ⟨uᵢ, eⱼ⟩² for every j (Proposition 4.1)."""
    total: Array = np.square(u).sum(0)
    return total


def compare(d: int, sources: int, seed: int) -> dict[str, Array]:
    """One row a solution: what it has of e₁ to e_K (Theorem 3.2 and Proposition 4.1)."""
    data = generate(d, sources, seed)
    rows = 2 * sources  # the paper's m
    covariances = [source.covariance for source in data]
    table = {
        f"Dec-SSL, source {k + 1}": representability(embedding(covariance, rows))
        for k, covariance in enumerate(covariances)
    }
    # Sources are of one size, so the global loss sees the mean of their covariances (Eq. E.14).
    mean = np.mean(covariances, axis=0)
    table["Dec-SSL, global"] = representability(embedding(mean, rows))
    for k, source in enumerate(data):
        table[f"Dec-SLRep, source {k + 1}"] = correlation(features(classifier(source, rows)))
    return {name: row[:sources] for name, row in table.items()}


def report(table: Mapping[str, Array], d: int) -> str:
    """The table that ``fedssl theory representability`` prints (Figure 3's message)."""
    sources, width = len(next(iter(table.values()))), max(map(len, table))
    lines = [" " * width + "".join(f"{f'e{j + 1}':>8}" for j in range(sources))]
    lines += [name.ljust(width) + "".join(f"{v:8.3f}" for v in row) for name, row in table.items()]
    return "\n".join(
        [
            f"d = {d}, K = {sources}: representability of the basis vectors (Definition 3.1) for "
            "Dec-SSL,",
            "Σ⟨u, e⟩² of the features (Proposition 4.1) for Dec-SLRep",
            "",
            *lines,
            "",
            f"As d grows, Dec-SSL's go to 1 (d^(-4/5) = {d**-0.8:.3f}); Dec-SLRep's to 0 but for "
            "a source's own.",
        ]
    )


def draw(path: Path, table: Mapping[str, Array], d: int) -> None:
    """The same as a picture: a bar for each basis vector, a group of them for each solution."""
    from PIL import Image, ImageDraw, ImageFont

    from fedssl.data.picture import palette

    rows, font = list(table.values()), ImageFont.load_default()
    sources, most = len(rows[0]), max(1.0, max(float(row.max()) for row in rows))
    group = BAR * sources + GAP
    size = (LEFT + LENGTH + 2 * GAP, TOP + group * len(rows))
    image, colours = Image.new("RGB", size, "white"), palette(sources)
    pen = ImageDraw.Draw(image)
    pen.text((GAP, GAP), f"d = {d}: what each solution has of e1 to e{sources}", "black", font)
    one = LEFT + round(LENGTH / most)
    for number, (name, row) in enumerate(table.items()):
        top = TOP + number * group
        pen.text((GAP, top + BAR * sources // 2 - 6), name, "black", font)
        for j, value in enumerate(row):
            end, y = LEFT + round(LENGTH * float(value) / most), top + j * BAR
            if end > LEFT:
                pen.rectangle((LEFT, y, end - 1, y + BAR - 2), colours[j])
            pen.text((end + 4, y - 2), f"e{j + 1}", "black", font)
    pen.line((one, TOP - 4, one, size[1] - GAP), "black")
    pen.text((one - 2, TOP - 18), "1", "black", font)
    try:
        image.save(path, "PNG")
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written ({error.strerror})") from None
