"""The cost of rounds with noise: by dp-accounting, by closed forms, and over several runs."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import rdp
from dp_accounting.pld import privacy_loss_distribution as losses
from helpers import HEADS, engine_of, groups_of, made_split, settings, step, timeless
from noisy import noisy, small
from rounds import run_and_resume
from scipy import integrate, optimize, stats

from fedssl.federation.algorithm import build_algorithm
from fedssl.objectives.swav import SwAV
from fedssl.privacy import noise
from fedssl.privacy.accountant import (
    Accountant,
    Release,
    compute_delta,
    compute_epsilon,
    count_rounds,
)
from fedssl.privacy.noise import Noisy


def library(clients: int, cohort: int, rounds: dict[float, int], delta: float = 1e-5) -> float:
    """ε by dp_accounting alone, for rounds by their sums' noise over a contribution's norm."""
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant = rdp.RdpAccountant(neighboring_relation=relation)
    for z, count in rounds.items():
        event: Any = dp_accounting.GaussianDpEvent(z / 2)
        if cohort < clients:
            event = dp_accounting.SampledWithoutReplacementDpEvent(clients, cohort, event)
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize(("clients", "cohort"), [(100, 100), (100, 10), (5000, 50)])
@pytest.mark.parametrize(
    ("words", "tasks", "together"),
    [
        ("privacy.noise=6", ("descend",), 6.0),
        ("privacy.noise=6", ("encode", "descend"), 6 / math.sqrt(2)),
        ("privacy.noise=6 privacy.moments_noise=8", ("encode", "descend"), 4.8),
        ("privacy.noise=6 privacy.moments_noise=8 privacy.most_samples=9", ("encode",), 8.0),
    ],
)
def test_epsilon_is_the_librarys(
    clients: int, cohort: int, words: str, tasks: tuple[str, ...], together: float
) -> None:
    average = noisy(*words.split(), "privacy.delta=1e-6", clients=clients, cohort=cohort)
    assert average.compute_privacy()["epsilon"] == 0
    for _ in range(30):
        for task in tasks:
            average.release(task, {"x": torch.zeros(1)}, 1e6, 10)
    spent = average.compute_privacy()
    expected = library(clients, cohort, {together: 30}, 1e-6)
    assert spent == {"epsilon": pytest.approx(expected, rel=1e-9), "delta": 1e-6}
    assert 0.05 < expected < 60


def test_a_draw_never_costs_privacy() -> None:
    """With little noise the library's bound for the draw is worse than for everyone."""
    average = noisy("privacy.noise=0.5", clients=359, cohort=32)
    for _ in range(20):
        average.account.note("descend")
    whole, drawn = (library(359, cohort, {0.5: 20}) for cohort in (359, 32))
    assert drawn > whole and average.compute_privacy()["epsilon"] <= whole


def test_a_round_that_released_only_its_first_exchange_counts_as_that() -> None:
    average = noisy(clients=50, cohort=50)
    for task in ("encode", "descend", "encode", "encode", "descend", "encode"):
        average.account.note(task)
    assert average.account.counts() == {("encode", "descend"): 2, ("encode",): 2}
    expected = library(50, 50, {3 / math.sqrt(2): 2, 3: 2})
    assert average.compute_privacy()["epsilon"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("words", "amplified"),
    [
        ("algorithm.name=dcco objective.name=vicreg objective.bound=1", True),
        ("algorithm.name=fedsc objective.name=spectral", True),
        ("algorithm.name=fedavg objective.name=cco", True),
        ("algorithm.name=fedavg objective.name=simsiam", True),
        ("algorithm.name=fedavg objective.name=byol", False),
        ("algorithm.name=fedavg objective.name=moco", False),
        ("algorithm.name=fedema objective.name=simsiam", False),
        ("algorithm.name=fedu objective.name=simsiam", False),
        ("algorithm.name=ditto objective.name=cco", False),
    ],
)
def test_a_draw_counts_only_where_clients_keep_nothing(words: str, amplified: bool) -> None:
    name = words.partition("objective.name=")[2].split()[0]
    config = settings("privacy.noise=6", *words.split(), *HEADS.get(name, ()))
    average = Noisy(config, build_algorithm(config), 100, 10)
    average.account.note("train")
    expected = library(100, 10 if amplified else 100, {6: 1})
    assert average.compute_privacy()["epsilon"] == pytest.approx(expected)


def test_a_memory_alone_is_something_kept() -> None:
    algorithm = build_algorithm(settings("algorithm.name=fedavg", "objective.name=simclr"))
    assert noise.is_stateless(algorithm)
    algorithm.objective = SwAV(SwAV.Params("swav", queue=4))
    assert not noise.is_stateless(algorithm)


@pytest.mark.parametrize("algorithm", ["dcco", "fedavg", "fedu", "fedema", "ditto"])
def test_rounds_are_told_apart(algorithm: str) -> None:
    """No algorithm asks for one mean twice in a round, which the ledger would take for two."""
    objective = "cco" if algorithm == "dcco" else "simsiam"
    words = (f"algorithm.name={algorithm}", f"objective.name={objective}")
    config = settings(*words, *HEADS.get(objective, ()), "privacy.noise=1",
                      *(["objective.bound=1"] if objective == "cco" else []))  # fmt: skip
    engine, server = engine_of(config, made_split(), groups_of(4, 6, 5))
    engine.aggregator = Noisy(config, engine.algorithm, 3, 3)
    engine.merges = False
    for round in range(3):
        cohort = step(engine, server, round)
        asked = tuple(
            task for task in cohort.traffic.down if engine.algorithm.tasks()[task].seen == "mean"
        )
        assert set(cohort.traffic.up) == set(asked)  # nothing of single clients, for the log
        assert engine.aggregator.account.counts() == {asked: round + 1}


def test_a_resumed_run_has_spent_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small("privacy.noise=4", "objective.bound=1")
    summary = run_and_resume(config, tmp_path, monkeypatch)
    rows = timeless(tmp_path / "whole")
    whole = [row["epsilon"] for row in rows]
    assert whole == sorted(whole) and len(set(whole)) == 4
    assert (summary["epsilon"], summary["delta"]) == (whole[-1], 1e-5)
    assert whole[-1] == pytest.approx(library(6, 3, {4 / math.sqrt(2): 4}))
    assert all(row["loss"] is None and not row["skipped"] for row in rows)
    assert rows[0]["exchanges"].keys() == {"encode", "descend"}
    assert [row["epsilon"] for row in timeless(tmp_path / "cut")] == whole


# --- the distribution of the privacy loss


def exact(noise: float, rounds: int, delta: float) -> float:
    """ε of Gaussian mechanisms without a draw, by Balle and Wang's theorem 8 and bisection."""
    distance = 2 / noise * math.sqrt(rounds)

    def missing(epsilon: float) -> float:
        upper = stats.norm.cdf(distance / 2 - epsilon / distance)
        lower = stats.norm.logcdf(-distance / 2 - epsilon / distance)
        return float(upper - math.exp(epsilon + lower) - delta)

    return float(optimize.brentq(missing, 0, 300, xtol=1e-10))


@pytest.mark.parametrize(
    ("noise", "rounds", "delta"), [(8.0, 20, 1e-5), (40.0, 1000, 1e-7), (1.0, 3, 1e-5)]
)
def test_without_a_draw_losses_give_the_exact_epsilon(
    noise: float, rounds: int, delta: float
) -> None:
    counted = Counter({Release(noise, 50, 50): rounds})
    least = exact(noise, rounds, delta)
    by_losses, by_divergences = (
        compute_epsilon(counted, delta, accountant) for accountant in ("pld", "rdp")
    )
    assert least <= by_losses <= least * 1.002
    assert by_losses < by_divergences < 1.5 * least


@pytest.mark.parametrize(("z", "clients", "drawn"), [(2.8, 359, 32), (1.0, 10, 9), (6.0, 1000, 1)])
def test_the_curve_of_a_drawn_round_is_its_hockey_stick(z: float, clients: int, drawn: int) -> None:
    """∫ max(0, p − exp(ε) q) of a mixture of two normal densities and one of them, by quadrature.

    The other direction has 1 − exp(ε) more, as every pair of densities.
    """
    share, distance = drawn / clients, 2 / z
    for epsilon in (0.0, 0.1, 0.5, 1.0):

        def above(x: float, epsilon: float = epsilon) -> float:
            apart = stats.norm.pdf(x)
            mixed = (1 - share) * apart + share * stats.norm.pdf(x - distance)
            return max(0.0, mixed - math.exp(epsilon) * apart)

        area = integrate.quad(above, -20, 20 + distance, limit=500, epsabs=1e-14)[0]
        both = compute_delta(np.array([epsilon, -epsilon]), Release(z, clients, drawn))
        assert both[0] == pytest.approx(area, abs=1e-9)
        assert both[1] == pytest.approx(1 - math.exp(-epsilon) * (1 - area), abs=1e-9)


@pytest.mark.parametrize(
    ("z", "clients", "drawn", "rounds"), [(2.83, 359, 32, 20), (5.66, 1000, 100, 100)]
)
def test_losses_of_drawn_rounds_lie_between_two_known_numbers(
    z: float, clients: int, drawn: int, rounds: int
) -> None:
    """Above the curve of one direction alone, which is the library's for Poisson's draw."""
    one = losses.from_gaussian_mechanism(z / 2, sampling_prob=drawn / clients)
    least = one.self_compose(rounds).get_epsilon_for_delta(1e-5)
    counted = Counter({Release(z, clients, drawn): rounds})
    by_losses, by_divergences = (
        compute_epsilon(counted, 1e-5, accountant) for accountant in ("pld", "rdp")
    )
    assert least < by_losses < 1.1 * least < by_divergences


def test_an_attack_on_drawn_rounds_stays_below_the_curve() -> None:
    """Was the client's part +1 or −1? The best test is by the densities; its errors are counted."""
    z, clients, drawn, rounds, tries = 1.5, 10, 5, 3, 400_000
    generator, share = np.random.default_rng(0), drawn / clients
    shift = (generator.random((tries, rounds)) < share) / z

    def log_density(seen: np.ndarray, sign: int) -> np.ndarray:
        mixed = (1 - share) * stats.norm.pdf(seen) + share * stats.norm.pdf(seen - sign / z)
        return np.log(mixed).sum(1)

    both = [sign * shift + generator.standard_normal((tries, rounds)) for sign in (1, -1)]
    ratios = [log_density(seen, 1) - log_density(seen, -1) for seen in both]
    counted = Counter({Release(z, clients, drawn): rounds})
    for delta, least in ((0.3, 0.1), (0.1, 0.01), (0.02, -1)):
        epsilon = compute_epsilon(counted, delta, "pld")
        caught, wrong = (float(np.mean(ratio > epsilon)) for ratio in ratios)
        assert least < caught - math.exp(epsilon) * wrong < delta


def test_little_noise_and_many_rounds_are_no_trouble() -> None:
    for counted in (
        Counter({Release(1e-6, 100, 10): 5}),
        Counter({Release(1e6, 10**6, 1): 10**5}),
        Counter({Release(0.3, 100, 99): 1, Release(50.0, 100, 100): 9}),
    ):
        found = [compute_epsilon(counted, 1e-6, accountant) for accountant in ("pld", "rdp")]
        assert 0 <= found[0] <= found[1] * 1.01 + 1e-3 and all(map(math.isfinite, found))


# --- several runs


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_runs_are_composed_and_their_epsilons_are_not_added(accountant: Accountant) -> None:
    small, other = Release(5.7, 1000, 100), Release(8.0, 40, 40)
    alone = [
        compute_epsilon(Counter({release: 10}), 1e-5, accountant) for release in (small, other)
    ]
    thrice = compute_epsilon(Counter({small: 30}), 1e-5, accountant)
    assert alone[0] < thrice < 3 * alone[0]
    both = compute_epsilon(Counter({small: 10, other: 10}), 1e-5, accountant)
    assert max(alone) < both < sum(alone)
    again = Counter({other: 10, small: 10, Release(1, 2, 2): 0})
    assert both == compute_epsilon(again, 1e-5, accountant)
    assert compute_epsilon(Counter(), 1e-5, accountant) == 0


@pytest.mark.parametrize("most", [0, 1, 7, 8])
def test_rounds_that_a_budget_allows(most: int) -> None:
    assert count_rounds(lambda rounds: rounds <= 5, most) == min(5, most)
    assert count_rounds(lambda rounds: False, most) == 0
