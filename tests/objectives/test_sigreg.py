"""SIGReg beside numerical integration, its null value, its slices, and the bound of its moments."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from helpers import engine_of, groups_of, made_split, settings, step
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.integrate import quad
from torch import Tensor

from fedssl.config import read_recipe, resolve
from fedssl.objectives import sigreg
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.sigreg import SIGReg
from fedssl.privacy.accountant import Release, compute_epsilon
from fedssl.privacy.noise import Noisy
from fedssl.runs.build import build_experiment
from fedssl.util.trees import mean

SMALL = ("objective.name=sigreg", "objective.projector=32,16", "objective.slices=10")
NULL = math.sqrt(2 * math.pi) * (1 - 1 / math.sqrt(3))  # ∫ (1 − exp(−t²)) exp(−t²/2) dt


def objective(**keys: float) -> SIGReg:
    return SIGReg(SIGReg.Params("sigreg", projector=(5,), **keys))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def batch_of(*views: Tensor, draw: int = 3) -> EncodedBatch:
    return EncodedBatch(views, draw=torch.tensor(draw))


@pytest.mark.parametrize("views", [2, 3])
def test_it_is_the_papers_loss_by_numerical_integration(views: int) -> None:
    """LeJEPA, Algorithms 1 and 2, with scipy's adaptive quadrature and complex numbers."""
    ours = objective(lambda_=0.3, slices=4, samples=9)
    each = [0.7 * normal(9, 5, seed=k) + 0.2 * normal(9, 5, seed=7) + 0.1 for k in range(views)]
    slices = ours.slices(batch_of(*each)).numpy()

    def distance(t: float, values: np.ndarray) -> float:
        apart = np.exp(1j * t * values).mean() - np.exp(-(t**2) / 2)
        return float(abs(apart) ** 2 * np.exp(-(t**2) / 2))

    statistics = [
        9 * quad(partial(distance, values=z.numpy() @ a), -5, 5)[0] for z in each for a in slices.T
    ]
    middle = (each[0] + each[1]) / 2
    apart = np.mean([((middle - z) ** 2).numpy() for z in each])
    expected = 0.3 * np.mean(statistics) + 0.7 * apart
    assert float(ours.loss(batch_of(*each))) == pytest.approx(expected, rel=1e-5)


def test_slices_are_unit_vectors_in_all_directions_and_depend_on_the_draw() -> None:
    ours, one = objective(slices=4000), normal(1, 5)
    slices = ours.slices(batch_of(one, draw=1))
    torch.testing.assert_close(slices.norm(dim=0), torch.ones(4000).double())
    spread = slices @ slices.T / 4000
    assert (spread - torch.eye(5) / 5).abs().max() < 0.02
    assert torch.equal(slices, ours.slices(batch_of(one, draw=1)))
    assert (slices - ours.slices(batch_of(one, draw=2))).abs().mean() > 0.1


def test_normal_data_have_the_null_value_and_collapsed_data_a_larger_one() -> None:
    ours = objective(lambda_=1, samples=256)
    whole = normal(256, 5)
    found = [float(ours.loss(batch_of(*normal(2, 256, 5, seed=k)))) for k in range(30)]
    assert np.mean(found) == pytest.approx(NULL, rel=0.15)
    white = torch.linalg.qr(whole - whole.mean(0))[0] * 16  # its mean and variance are exact
    assert 0.1 * NULL < float(ours.loss(batch_of(white, white))) < NULL
    point, line = torch.zeros(256, 5).double(), whole[:, :1] @ torch.ones(1, 5).double()
    for collapsed in (point, line, 3 * whole, whole / 3, whole + 1):
        assert float(ours.loss(batch_of(collapsed, collapsed))) > 10 * NULL


def test_only_the_agreement_of_views_is_left_without_normality() -> None:
    f, g = normal(6, 5), normal(6, 5, seed=1)
    found = float(objective(lambda_=0.0).loss(batch_of(f, g)))
    assert found == pytest.approx(float((f - g).square().mean()) / 4)


@budget(max_examples=30)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_mean_of_moments_is_the_unions(sizes: list[int], seed: int) -> None:
    ours, count = objective(slices=3), sum(sizes)
    f, g = normal(count, 5, seed=seed), normal(count, 5, seed=seed + 1)
    pairs = zip(f.split(sizes), g.split(sizes), strict=True)
    average, _ = mean((len(a), ours.moments(batch_of(a, b), {})) for a, b in pairs)
    torch.testing.assert_close(average, ours.moments(batch_of(f, g), {}), rtol=1e-12, atol=1e-14)


def test_all_clients_of_a_round_have_its_slices_and_the_next_round_has_others() -> None:
    config = settings(*SMALL, "engine.merge=off")
    engine, server = engine_of(config, made_split(), groups_of(3, 4))
    seen: list[int] = []
    real = SIGReg.slices

    def spy(ours: SIGReg, batch: EncodedBatch) -> Tensor:
        seen.extend([] if batch.draw is None else [int(batch.draw)])
        return real(ours, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SIGReg, "slices", spy)
        for round in range(2):
            step(engine, server, round)
    assert len(seen) == 8 and len(set(seen[:4])) == len(set(seen[4:])) == 1 and seen[0] != seen[4]
    other = settings(*SMALL, "seed=1")
    client = engine_of(other, made_split(), groups_of(3, 4))[0].client(np.array([0]), 0, False)
    assert int(client.draw) != int(engine.client(np.array([0]), 0, False).draw)


def test_moments_are_the_only_statistics_that_leave_a_client() -> None:
    """The views' agreement is a mean of the clients' own; the server adds nothing to it."""
    words = (*SMALL, "engine.merge=off")
    engine, server = engine_of(settings(*words), made_split(), groups_of(3, 4))
    cohort = step(engine, server, 0)
    numbers = 10 * 2 * len(sigreg.KNOTS) * 2  # cosines and sines, two views
    assert cohort.traffic.up["encode"] == 2 * 8 * numbers and "locate" not in cohort.traffic.up
    sent = len(server.weights)
    assert cohort.traffic.down == {"encode": 2 * 8 * sent, "descend": 2 * 8 * numbers}


def test_several_local_steps_move_within_the_radius() -> None:
    changes = []
    for radius in ("1e-9", "1e9"):
        config = settings(
            *SMALL, "algorithm.local_steps=3", f"algorithm.radius={radius}", "client.lr=0.1"
        )
        engine, server = engine_of(config, made_split(), groups_of(3, 4))
        step(engine, server, 0)
        changes.append(server.weights - engine.trainer.initial)
    one, server = engine_of(settings(*SMALL, "client.lr=0.1"), made_split(), groups_of(3, 4))
    step(one, server, 0)
    torch.testing.assert_close(changes[0], server.weights - one.trainer.initial)
    assert (changes[1] - changes[0]).norm() > 0.1 * changes[0].norm()


# --- differential privacy


wild = arrays(np.float64, st.tuples(st.integers(1, 6), st.just(5)), elements=st.floats(-1e6, 1e6))


@budget(max_examples=60)
@given(f=wild, other=wild, views=st.integers(2, 4), slices=st.sampled_from([1, 7]))
def test_a_client_moves_the_moments_by_no_more_than_the_bound(
    f: np.ndarray, other: np.ndarray, views: int, slices: int
) -> None:
    """Whatever its encodings are. Nothing is clipped, since cos² + sin² = 1."""
    ours = objective(slices=slices)
    found = []
    for client in (f, other):
        encodings = (torch.from_numpy(client * 10.0**-k) for k in range(views))
        found.append(ours.moments(batch_of(*encodings), {})["cf"])
        assert found[-1].norm() <= ours.moments_bound * (1 + 1e-12)
    assert (found[0] - found[1]).norm() <= 2 * ours.moments_bound * (1 + 1e-12)


def test_the_bound_is_that_of_every_single_image() -> None:
    ours = objective(slices=7)
    one = ours.moments(batch_of(normal(1, 5), normal(1, 5, seed=1)), {})["cf"]
    assert float(one.norm()) == pytest.approx(ours.moments_bound)


def test_replacing_one_image_of_a_client_moves_its_moments_by_two_bounds_over_its_images() -> None:
    ours, images = objective(slices=3), normal(8, 5)
    before = ours.moments(batch_of(images, images), {})["cf"]
    moved = []
    for image in range(8):
        for scale in (1e-3, 1.0, 3.0, 30.0, 1e6):
            changed = images.clone()
            changed[image] = scale * normal(5, seed=image)
            after = ours.moments(batch_of(changed, changed), {})["cf"]
            moved.append(float((after - before).norm()))
    limit = 2 * ours.moments_bound / 8
    assert 0.4 * limit < max(moved) <= limit


def test_noise_needs_no_other_bound_and_counts_both_exchanges() -> None:
    words = ("privacy.noise=4", "privacy.clip=0.5", "evaluate.baselines=[]", "engine.threads=1")
    few = ("data.labels=60", "cohort.size=null", "evaluate.protocols=knn", "objective.slices=9")
    config = resolve(read_recipe(None), ["objective.name=sigreg", *few, *words])
    experiment = build_experiment(config)
    noisy, task = experiment.engine.aggregator, experiment.algorithm.tasks()["encode"]
    assert isinstance(noisy, Noisy) and noisy.asked == ["encode", "descend"]
    ours = experiment.algorithm.objective
    assert noisy.clip("encode") == task.bound(experiment.algorithm) == ours.moments_bound
    assert noisy.clip("descend") == 0.5
    reply = dict(ours.moments(batch_of(*normal(2, 1, 128)), {}))
    _, sent = noisy.contribute("encode", 1, reply, "used")
    kept = sent["cf"].double() * ours.moments_bound / reply["cf"]
    torch.testing.assert_close(kept, torch.ones_like(kept), rtol=2e-3, atol=0)
    # Two sums with noise of 4 are one with 4/√2.
    whole = Counter({Release(4 / math.sqrt(2), 15, 15): 10})
    noisy.account.rounds = Counter({("encode", "descend"): 10})
    spent = noisy.compute_privacy()["epsilon"]
    assert spent == pytest.approx(compute_epsilon(whole, config.privacy.delta, "rdp"))
