"""The privacy that rounds with noise cost, by the Rényi or the privacy-loss accountant."""

from __future__ import annotations

import functools
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Accountant = Literal["rdp", "pld"]

VACUOUS = 50.0  # exp(50) is 5·10²¹: a client's data may change every probability by that factor
FINEST = 1e-4  # distance of privacy losses on their grid
MOST_LOSSES = 10_000  # on each side of zero
COARSEST = 0.1  # a round with such losses alone is far beyond what is vacuous
NEGLIGIBLE = 1e-16  # δ of losses beyond the grid, which count as infinite


@dataclass(frozen=True, order=True)
class Release:
    """The sums that one round releases, with Gaussian noise on each.

    A client is replaced by another, which moves the sums by at most twice the norm of one client's
    part. The sums of a round are over the same clients: they count as one vector.

    Args:
        noise: Standard deviation of the noise over the norm of a client's part.
        clients: Number of clients that the round's clients are drawn from, without replacement.
        drawn: Number of clients in the round.
    """

    noise: float
    clients: int
    drawn: int

    @property
    def distance(self) -> float:
        """Distance of the means of two neighbors' normal distributions, in standard deviations."""
        return 2 / self.noise


Releases = Counter[Release]


def compute_epsilon(releases: Releases, delta: float, accountant: Accountant) -> float:
    """Compute ε of all releases together; each may depend on the ones before."""
    counted = sorted((+releases).items())
    if not counted:
        return 0.0
    return (_compose_losses if accountant == "pld" else _compose_rdp)(counted, delta)


class Account:
    """Count the rounds of one run by the tasks whose sums they released."""

    def __init__(self, multiplier: Callable[[str], float], clients: int, drawn: int) -> None:
        self.multiplier, self.clients, self.drawn = multiplier, clients, drawn
        self.run = secrets.token_hex(8)  # by which other runs know this one
        self.rounds: Counter[tuple[str, ...]] = Counter()
        self.current: tuple[str, ...] = ()
        self.lost: Releases = Counter()  # of rounds that a crash took from the checkpoint

    def note(self, task: str) -> None:
        """Count a sum; the task that comes a second time belongs to the next round."""
        if task in self.current:
            self.rounds[self.current] += 1
            self.current = ()
        self.current += (task,)

    def counts(self) -> Counter[tuple[str, ...]]:
        """Return rounds by the tasks that they released, with the current one."""
        return self.rounds + Counter([self.current] if self.current else [])

    def releases(self) -> Releases:
        """Return everything that the run has released."""
        total = self.lost.copy()
        for tasks, count in self.counts().items():
            total[self.release(tasks)] += count
        return total

    def release(self, tasks: Iterable[str]) -> Release:
        """Return what a round with these tasks releases."""
        together = math.fsum(self.multiplier(task) ** -2 for task in tasks) ** -0.5
        return Release(together, self.clients, self.drawn)


def count_rounds(allows: Callable[[int], bool], most: int) -> int:
    """Return the largest number of rounds, up to ``most``, that are allowed."""
    fewest = 0
    while fewest < most:
        middle = (fewest + most + 1) // 2
        fewest, most = (middle, most) if allows(middle) else (fewest, middle - 1)
    return fewest


# Rényi divergences -------------------------------------------------------------------------------


def _compose_rdp(releases: Sequence[tuple[Release, int]], delta: float) -> float:
    from dp_accounting import rdp

    total = sum(count * _divergences(release) for release, count in releases)
    epsilon, _ = rdp.compute_epsilon(rdp.RdpAccountant().orders, total, delta)
    return float(epsilon)


@lru_cache
def _divergences(release: Release) -> Floats:
    """Compute the Rényi divergences of one round; it takes 0.3 seconds."""
    import dp_accounting

    event = dp_accounting.GaussianDpEvent(release.noise / 2)
    curve = _divergences_of(event)
    if release.drawn < release.clients:
        sampled = dp_accounting.SampledWithoutReplacementDpEvent
        # A draw never costs privacy (the divergence is quasi-convex), but the library's bound for
        # it is the larger one where there is little noise.
        amplified = _divergences_of(sampled(release.clients, release.drawn, event))
        curve = np.minimum(curve, amplified)
    return curve


def _divergences_of(event: Any) -> Floats:
    from dp_accounting import NeighboringRelation, rdp

    accountant = rdp.RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    return np.asarray(accountant.compose(event).rdp)


# Privacy losses ----------------------------------------------------------------------------------


def _compose_losses(releases: Sequence[tuple[Release, int]], delta: float) -> float:
    """Compose the distributions of the privacy loss (Doroshenko et al. 2022)."""
    from dp_accounting.pld import pld_pmf

    largest = max(_find_largest_loss(release) for release, _ in releases)
    interval = max(FINEST, largest / MOST_LOSSES)
    if interval > COARSEST:
        return _compose_rdp(releases, delta)
    losses = (_discretize(release, interval).self_compose(count) for release, count in releases)
    total = functools.reduce(lambda a, b: pld_pmf.compose_pmfs(a, b, NEGLIGIBLE), losses)
    return float(total.get_epsilon_for_delta(delta))


@lru_cache
def _discretize(release: Release, interval: float) -> Any:
    """Return a distribution of losses on a grid, whose δ are at least those of the release."""
    from dp_accounting.pld import pld_pmf

    last = math.ceil(_find_largest_loss(release) / interval)
    deltas = compute_delta(np.arange(-last, last + 1.0) * interval, release)
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        interval, -last, last, np.minimum.accumulate(deltas)
    )


def _find_largest_loss(release: Release) -> float:
    """Return a loss beyond which nothing counts."""
    loss = 1.0
    while compute_delta(np.array([loss]), release)[0] > NEGLIGIBLE:
        loss *= 1.25
    return loss


def compute_delta(epsilon: Floats, release: Release) -> Floats:
    """Compute δ of one round for each ε, also below zero.

    Without a draw it is that of the Gaussian mechanism (Balle and Wang 2018, theorem 8). A draw of
    the share q without replacement has q · δ(log(1 + (exp(ε) − 1) / q)) for ε ≥ 0 (Balle, Barthe
    and Gaboardi 2018, theorem 11). Either of two neighbors may be the one that the client is in, so
    that δ(−ε) = 1 − exp(−ε) + exp(−ε) · δ(ε). Such a curve can be composed (Zhu, Dong and Wang
    2022, theorem 10).
    """
    from scipy.special import log_ndtr, ndtr

    share, distance, above = release.drawn / release.clients, release.distance, np.abs(epsilon)
    wider = above + np.log1p((share - 1) * np.exp(-above)) - math.log(share)
    ratio = wider / distance
    delta = ndtr(distance / 2 - ratio) - np.exp(wider + log_ndtr(-distance / 2 - ratio))
    delta = np.clip(share * delta, 0, 1)
    below = -np.expm1(-above) + np.exp(-above) * delta
    return np.where(epsilon >= 0, delta, below)
