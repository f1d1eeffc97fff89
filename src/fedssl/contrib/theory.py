"""The linear model of the Dec-SSL paper (sections 3.2 and 4.2, appendix E).

Source k of K has mostly data of two classes that differ along the basis vector e_k; the other basis
vectors vary in them too, and more. Self-supervision learns all of these directions from any source;
a classifier learns the one that its own labels need.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedssl.data import charts
from fedssl.data.random import key
from fedssl.util.errors import TrainingError, UserError

Array = NDArray[np.float64]
LARGEST_D = 2048  # the data then takes some hundred megabytes
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
    """Check that the model is defined for these dimensions."""
    if sources < 2:
        raise UserError(
            "sources differ only if there are two", key="--k", value=sources, fix="Use --k 2."
        )
    if not 4 * sources <= d <= LARGEST_D:
        fix = f"Use a value from {4 * sources} (four times --k) to {LARGEST_D}."
        raise UserError("out of range", key="--d", value=d, fix=fix)


def generate(d: int, sources: int, seed: int) -> list[Source]:
    """Generate the data of every source (appendix E.1).

    The paper gives the frequent classes "poly(d)" samples: here d^(5/4). The rare classes have
    d^(3/20) samples each, as in the proof of Lemma E.2.
    """
    check(d, sources)
    rngs = [np.random.default_rng(key(seed, "theory", k)) for k in range(sources)]
    return [_source(k, d, sources, rng) for k, rng in enumerate(rngs)]


def _source(k: int, d: int, sources: int, rng: np.random.Generator) -> Source:
    many, few = round(d**1.25 / 2), round(d**0.15)
    tau, mu = d**0.2, d**-0.2
    others = [i for i in range(sources) if i != k]
    classes = [2 * k, 2 * k + 1, *(2 * i for i in others)]
    y = np.repeat(classes, [many, many, *[few] * len(others)])
    x = mu * rng.standard_normal((len(y), d))
    frequent = 2 * many
    x[:frequent, others] -= tau * rng.integers(0, 2, (frequent, len(others)))
    x[:frequent, k] += np.where(y[:frequent] == 2 * k, 1.0, -1.0)
    x[np.arange(frequent, len(y)), y[frequent:] // 2] += 1
    return Source(x, y)


def embedding(covariance: Array, rows: int) -> Array:
    """Return the minimizer ``[rows, d]`` of the loss: scaled eigenvectors (Eq. E.5)."""
    values, vectors = np.linalg.eigh(covariance)
    return np.sqrt(values[-rows:, None].clip(0)) * vectors[:, -rows:].T


def representability(w: Array) -> Array:
    """Return the share of each basis vector in the span of the rows of ``w`` (Definition 3.1)."""
    _, values, directions = np.linalg.svd(w, full_matrices=False)
    span = directions[values > 1e-10 * values.max()]
    return np.square(span).sum(0)


def classifier(source: Source, classes: int) -> Array:
    """Return the weights ``[classes, d]`` of least norm with all margins at least 1 (Eq. E.19)."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.svm import LinearSVC

    # Classes without a sample have weights too, so each gets a sample of zeros: it misses its
    # margin whatever the weights are, and changes nothing else.
    missing = np.setdiff1d(np.arange(classes), source.y)
    x = np.concatenate((source.x, np.zeros((len(missing), source.x.shape[1]))))
    solver = LinearSVC(
        multi_class="crammer_singer", C=SLACK, fit_intercept=False, tol=1e-5, max_iter=20_000
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # margins are checked below
        solver.fit(x, np.concatenate((source.y, missing)))
    weights: Array = solver.coef_
    if margins(weights, source).min() < 0.99:
        raise TrainingError("no classifier separates the classes of a source. Use a larger --d.")
    return weights


def margins(weights: Array, source: Source) -> Array:
    """Return each sample's score of its class minus the best score of another class."""
    scores, samples = source.x @ weights.T, np.arange(len(source.y))
    right = scores[samples, source.y]
    scores[samples, source.y] = -np.inf
    return right - scores.max(1)


def features(weights: Array) -> Array:
    """Return the first layer of the two-layer network v u = ``weights`` of least norm (E.2).

    ‖uᵀu‖² + ‖vᵀv‖² is least where both have the roots of the singular values.
    """
    _, values, directions = np.linalg.svd(weights, full_matrices=False)
    return np.sqrt(values)[:, None] * directions


def correlation(u: Array) -> Array:
    """Return Σᵢ ⟨uᵢ, eⱼ⟩² for every j (Proposition 4.1)."""
    return np.square(u).sum(0)


def compare(d: int, sources: int, seed: int) -> dict[str, Array]:
    """Return a row for each solution: its share of e₁ to e_K (Theorem 3.2 and Proposition 4.1)."""
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


def format_table(table: Mapping[str, Array], d: int) -> str:
    """Format the table that ``fedssl theory representability`` prints (Figure 3's message)."""
    sources, width = len(next(iter(table.values()))), max(map(len, table))
    rows = [" " * width + "".join(f"{f'e{j + 1}':>8}" for j in range(sources))]
    rows += [name.ljust(width) + "".join(f"{v:8.3f}" for v in row) for name, row in table.items()]
    lines = "\n".join(rows)
    return (
        f"d = {d}, K = {sources}\n"
        "Dec-SSL: representability of the basis vectors (Definition 3.1)\n"
        f"Dec-SLRep: sum of <u, e>^2 over the features u (Proposition 4.1)\n\n{lines}\n\n"
        f"As d grows, Dec-SSL goes to 1 (d^(-4/5) = {d**-0.8:.3f}). Dec-SLRep goes to 0, except in "
        "the direction of each source."
    )


def draw(path: Path, table: Mapping[str, Array], d: int) -> None:
    """Draw a bar for each basis vector, and a group of bars for each solution."""
    sources = len(next(iter(table.values())))
    names: list[str] = []
    values: list[Array] = []
    for name, row in table.items():
        names += [name, *[""] * sources]
        values += [*np.diag(row), np.zeros(sources)]  # the last row separates groups
    legend = [f"e{j + 1}" for j in range(sources)]
    title = f"d = {d}: share of e1 to e{sources} in each solution"
    charts.save(charts.draw_bars(title, names, np.array(values), legend), path)
