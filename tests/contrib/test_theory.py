"""The linear model: data, closed forms against descent, and the paper's two conclusions."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.optimize import minimize

from fedssl.cli import main
from fedssl.contrib import theory
from fedssl.contrib.theory import Source
from fedssl.data import charts

GROWING = (64, 160, 400)
SOURCES = 3
SEEDS = (0, 1)


@functools.cache
def compared(d, seed=0):
    return theory.compare(d, SOURCES, seed)


def rate(measure):
    """The power of d that a measure falls by, on average over seeds."""
    means = [np.mean([measure(compared(d, seed)) for seed in SEEDS]) for d in GROWING]
    assert min(means) > 0
    return float(np.polyfit(np.log(GROWING), np.log(means), 1)[0])


def test_where_the_printed_covariance_and_bound_differ_from_the_data():
    """Equations E.2 and E.10, as docs/papers/decssl.md compares them."""
    d, sources = 1024, 3
    covariance = theory.generate(d, sources, seed=0)[0].covariance
    tau2, mu2 = d**0.4, d**-0.4
    assert np.diag(covariance)[1:3] == pytest.approx(tau2 / 2 + mu2, rel=0.03)  # E.2: τ²
    assert covariance[1, 2] == pytest.approx(tau2 / 4, rel=0.05)  # E.2: 0
    values, vectors = np.linalg.eigh(covariance)
    assert values[-1] == pytest.approx(sources * tau2 / 4, rel=0.03)
    assert values[-2] == pytest.approx(tau2 / 4 + mu2, rel=0.05)
    assert round(covariance[1, 1] / values[-1], 2) == 0.68  # what E.10 divides
    assert np.square(vectors[1]).sum() == pytest.approx(1)  # what E.10 sums
    share = theory.representability(theory.embedding(covariance, 2 * sources))
    assert round(share[1], 3) == 0.998


def test_data_has_the_papers_moments():
    """Moments and counts of source 2 of 3 (appendix E.1)."""
    d = 400
    tau, mu = d ** (1 / 5), d ** (-1 / 5)
    source = theory.generate(d, 3, seed=0)[1]
    assert np.bincount(source.y, minlength=6).tolist() == [2, 0, 894, 894, 2, 0]
    for label, sign in ((2, 1), (3, -1)):
        x = source.x[source.y == label]
        np.testing.assert_allclose(x.mean(0)[:3], [-tau / 2, sign, -tau / 2], atol=0.2)
        moments = np.cov(x[:, :5].T)
        expected = np.diag([tau**2 / 4, 0, tau**2 / 4, 0, 0]) + mu**2 * np.eye(5)
        np.testing.assert_allclose(moments, expected, atol=0.25)
        assert np.std(x[:, 5:]) == pytest.approx(mu, rel=0.01)
    for label in (0, 4):
        x = source.x[source.y == label]
        np.testing.assert_allclose(x.mean(0)[:3], np.eye(3)[label // 2], atol=0.8)
    assert not np.array_equal(source.x, theory.generate(d, 3, seed=1)[1].x)


@pytest.mark.slow
def test_eigenvectors_are_what_descent_finds():
    """Eq. E.1 with its expectation over the augmentation noise taken: −tr(w X wᵀ) + ‖wᵀw‖²/2."""
    covariance = theory.generate(24, 2, seed=0)[0].covariance
    x = torch.from_numpy(covariance)
    w = torch.randn(4, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    w.requires_grad_()
    for _ in range(6000):
        loss = -torch.trace(w @ x @ w.T) + (w.T @ w).square().sum() / 2
        (gradient,) = torch.autograd.grad(loss, w)
        w.data -= 0.02 * gradient
    found, ours = w.detach().numpy(), theory.embedding(covariance, 4)
    np.testing.assert_allclose(found.T @ found, ours.T @ ours, atol=1e-6)
    np.testing.assert_allclose(
        theory.representability(found), theory.representability(ours), atol=1e-5
    )


def test_representability_of_known_spans():
    w = np.array([[1.0, 1, 0, 0], [2, 2, 0, 0], [0, 0, 5, 0]])
    np.testing.assert_allclose(theory.representability(w), [0.5, 0.5, 1, 0], atol=1e-12)


def few():
    whole = theory.generate(12, 2, seed=1)[0]
    return Source(whole.x[::3], whole.y[::3])


def test_the_classifier_is_the_quadratic_programs():
    """Against scipy's solver, with the class that no sample has."""
    source = few()
    assert 3 not in source.y
    rows = [
        (np.eye(4)[y] - np.eye(4)[other])[:, None] * x
        for x, y in zip(source.x, source.y, strict=True)
        for other in range(4)
        if other != y
    ]
    constraints = np.stack([row.ravel() for row in rows])
    solved = minimize(
        lambda w: w @ w,
        np.zeros(48),
        jac=lambda w: 2 * w,
        method="SLSQP",
        constraints={
            "type": "ineq",
            "fun": lambda w: constraints @ w - 1,
            "jac": lambda w: constraints,
        },
        options={"maxiter": 500, "ftol": 1e-12},
    )
    assert solved.success
    ours = theory.classifier(source, 4)
    np.testing.assert_allclose(ours, solved.x.reshape(4, 12), atol=2e-3)
    assert np.abs(ours[3]).max() > 0.01  # weights of its own


def test_features_are_the_factor_of_least_norm():
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((4, 12))
    u = theory.features(weights)
    v = weights @ np.linalg.pinv(u)
    np.testing.assert_allclose(v @ u, weights, atol=1e-9)

    def cost(v, u):
        return float(np.square(u.T @ u).sum() + np.square(v.T @ v).sum())

    assert cost(v, u) == pytest.approx(2 * np.square(weights).sum())
    for _ in range(20):
        mixed = np.eye(4) + 0.1 * rng.standard_normal((4, 4))
        assert cost(v @ np.linalg.inv(mixed), mixed @ u) > cost(v, u)
    np.testing.assert_allclose(theory.correlation(u), np.diag(u.T @ u))


@pytest.mark.slow
def test_theorem_3_2_self_supervision_learns_all_directions():
    """1 − O(d^(−4/5)) ≤ r ≤ 1, of a source for all but its own direction, globally for all."""
    for k in range(SOURCES):
        name = f"Dec-SSL, source {k + 1}"
        assert rate(lambda t, k=k, name=name: 1 - float(np.delete(t[name], k).min())) <= -4 / 5
    assert rate(lambda t: 1 - float(t["Dec-SSL, global"].min())) <= -4 / 5
    for d in GROWING:
        rows = [row for name, row in compared(d).items() if name.startswith("Dec-SSL")]
        assert len(rows) == SOURCES + 1 and np.max(rows) <= 1 + 1e-12


def test_proposition_4_1_classifiers_learn_their_own_direction():
    """Σ⟨u, e⟩² of the others O(d^(−1/20)); of e_k at least 1 − O(d^(−1/20)), in fact above 1."""
    for k in range(SOURCES):
        name = f"Dec-SLRep, source {k + 1}"
        assert rate(lambda t, k=k, name=name: float(np.delete(t[name], k).max())) <= -1 / 20
        assert min(compared(d, seed)[name][k] for d in GROWING for seed in SEEDS) >= 1


def test_the_chart_has_a_bar_for_each_value(tmp_path, capsys):
    out = tmp_path / "a.png"
    assert main(["theory", "representability", "--d", "64", "--k", "3", "--out", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    with Image.open(out) as file:
        pixels = np.asarray(file.convert("RGB"))
    table, colors = compared(64), charts.palette(SOURCES)
    step = charts.bar_step(len(table) * (SOURCES + 1))
    longest = max(float(row.max()) for row in table.values())
    for number, (name, row) in enumerate(table.items()):
        (text,) = [text for text in printed if text.startswith(name)]
        np.testing.assert_allclose(list(map(float, text.split()[-3:])), row, atol=5.1e-4)
        for j, value in enumerate(row):
            top = charts.TOP + (number * (SOURCES + 1) + j) * step
            line = pixels[top + step // 2 - 1, charts.LEFT :]
            length = (line == colors[j]).all(axis=1).sum()
            assert abs(length - charts.WIDTH * value / longest) <= 1


@pytest.mark.parametrize(
    ("words", "key"),
    [(["--k", "1"], "--k 1"), (["--d", "8"], "--d 8"), (["--d", "100000"], "--d 100000"),
     (["--d", "16", "--k", "2", "--out", "nowhere/a.png"], "--out nowhere/a.png"),
     (["--out", "a.jpg"], "--out a.jpg")],
)  # fmt: skip
def test_bad_input_is_one_line(words, key, capsys):
    assert main(["theory", "representability", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fedssl: {key}: ") and error.count("\n") == 1
