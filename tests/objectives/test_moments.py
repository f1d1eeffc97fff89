"""The losses that are functions of moments: equations, limits, an independent implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st
from lightly.loss import BarlowTwinsLoss, VICRegLoss

from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.cco import CCO, correlation
from fedssl.objectives.moments import MomentObjective
from fedssl.objectives.vicreg import VICReg
from fedssl.util.trees import mean


def encodings(count: int = 12, width: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    f = torch.randn(count, width, dtype=torch.float64, generator=generator)
    g = f + 0.5 * torch.randn(count, width, dtype=torch.float64, generator=generator)
    return f + 2.0, g - 1.0


def objectives() -> list[MomentObjective]:
    return [CCO(CCO.Params("cco")), VICReg(VICReg.Params("vicreg"))]


def test_cco_is_equation_1_written_out() -> None:
    f, g = encodings()
    d = f.shape[1]
    c = np.corrcoef(f.numpy().T, g.numpy().T)[:d, d:]
    expected = sum((1 - c[i, i]) ** 2 for i in range(d)) + 20.0 / (d - 1) * sum(
        c[i, j] ** 2 for i in range(d) for j in range(d) if i != j
    )
    assert float(CCO(CCO.Params("cco")).loss(EncodedBatch((f, g)))) == pytest.approx(
        expected, rel=1e-12
    )


def test_gradient_with_respect_to_encodings_is_equation_7() -> None:
    """∂L/∂F_i^n = (∂L/∂⟨F_i⟩ + 2 ∂L/∂⟨F_i²⟩ F_i^n + Σ_j ∂L/∂⟨F_i G_j⟩ G_j^n) / N_k, by hand."""
    cco = CCO(CCO.Params("cco"))
    zero = {"f": torch.zeros(5, dtype=torch.float64), "g": torch.zeros(5, dtype=torch.float64)}
    f, g = encodings(count=4)
    others = cco.moments(EncodedBatch(encodings(count=9, seed=1)), zero)
    cohort, _ = mean([(4, cco.moments(EncodedBatch((f, g)), zero)), (9, others)])

    leaf = {name: value.clone().requires_grad_() for name, value in cohort.items()}
    cco.loss_of(leaf, zero).backward()
    n = len(f)
    by_hand_f = (leaf["f"].grad + 2 * leaf["f2"].grad * f + g @ leaf["fg"].grad.T) / n
    by_hand_g = (leaf["g"].grad + 2 * leaf["g2"].grad * g + f @ leaf["fg"].grad) / n

    f, g = f.requires_grad_(), g.requires_grad_()
    local = cco.moments(EncodedBatch((f, g)), zero)
    combined = {k: local[k] + (cohort[k] - local[k]).detach() for k in local}
    cco.loss_of(combined, zero).backward()
    torch.testing.assert_close(f.grad, by_hand_f, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(g.grad, by_hand_g, rtol=1e-10, atol=1e-12)


@budget(max_examples=50)
@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=8), seed=st.integers(0, 99))
@pytest.mark.parametrize("objective", objectives())
def test_mean_of_moments_is_the_unions(
    objective: MomentObjective, sizes: list[int], seed: int
) -> None:
    f, g = encodings(sum(sizes), seed=seed)
    centre = {"f": f.mean(0) + 0.3, "g": g.mean(0) - 0.2}
    parts = zip(f.split(sizes), g.split(sizes), strict=True)
    replies = ((len(a), objective.moments(EncodedBatch((a, b)), centre)) for a, b in parts)
    average, total = mean(replies)
    assert total == sum(sizes)
    for name, value in objective.moments(EncodedBatch((f, g)), centre).items():
        torch.testing.assert_close(average[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("objective", objectives())
def test_centre_does_not_change_the_loss(objective: MomentObjective) -> None:
    pair = encodings()
    own = objective.loss(EncodedBatch(pair))
    for shift in (0.0, 3.0):
        centre = {k: torch.full((5,), shift, dtype=torch.float64) for k in "fg"}
        other = objective.loss_of(objective.moments(EncodedBatch(pair), centre), centre)
        torch.testing.assert_close(other, own, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("objective", objectives())
def test_means_a_thousand_times_the_spread(objective: MomentObjective) -> None:
    """In float32, moments about zero lose the variance; those about a near centre keep it."""
    f, g = encodings(count=64)
    truth = float(objective.loss(EncodedBatch((f, g))))
    f32, g32 = (f + 1000).float(), (g + 1000).float()
    near = {"f": torch.full((5,), 1001.0), "g": torch.full((5,), 999.5)}
    batch = EncodedBatch((f32, g32))
    loss = float(objective.loss_of(objective.moments(batch, near), near))
    assert loss == pytest.approx(truth, rel=2e-3)
    assert float(objective.loss(batch)) == pytest.approx(truth, rel=2e-3)

    zero = {"f": torch.zeros(5), "g": torch.zeros(5)}
    naive = float(objective.loss_of(objective.moments(batch, zero), zero))
    assert abs(naive - truth) > 0.01 * truth, "without the centre this should be visibly wrong"


def test_a_constant_component_gives_finite_numbers() -> None:
    f, g = encodings()
    f[:, 0], g[:, 0] = 7.0, 7.0
    f.requires_grad_()
    for objective in objectives():
        loss = objective.loss(EncodedBatch((f, g)))
        loss.backward()
        assert torch.isfinite(loss) and torch.isfinite(f.grad).all()
    cco, batch = CCO(CCO.Params("cco")), EncodedBatch((f, g))
    moments = cco.moments(batch, cco.centre(batch))
    assert correlation(moments)[0].abs().max() < 1e-6


def test_cco_does_not_depend_on_the_scale_of_encodings() -> None:
    """Eq. 2 divides by standard deviations; a floor that is not relative would break this."""
    cco, (f, g) = CCO(CCO.Params("cco")), encodings(count=6)
    results = []
    for scale in (1.0, 1e-5):
        leaf = f.clone().requires_grad_()
        loss = cco.loss(EncodedBatch((scale * leaf, scale * g)))
        results.append((loss, *torch.autograd.grad(loss, leaf)))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_encodings_correlate_with_nothing(dtype: torch.dtype) -> None:
    cco = CCO(CCO.Params("cco"))
    f = torch.ones(4, 3, dtype=dtype, requires_grad=True)
    loss = cco.loss(EncodedBatch((f, f)))
    assert loss.item() == 3
    assert torch.isfinite(torch.autograd.grad(loss, f)[0]).all()


def test_cco_agrees_with_lightly() -> None:
    """lightly: no 1/(d − 1), and variances with batch norm's ε = 1e-5 under the root."""
    f, g = encodings(count=256)
    f, g = f * 100, g * 100  # so that its ε vanishes
    d = f.shape[1]
    theirs = BarlowTwinsLoss(lambda_param=20.0 / (d - 1))(f, g)
    ours = CCO(CCO.Params("cco")).loss(EncodedBatch((f, g)))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def test_vicreg_agrees_with_lightly() -> None:
    """lightly divides (co)variances by N − 1, we by N: its batch holds each sample often."""
    f, g = encodings(count=64)
    f, g = f * 0.6, g * 0.6  # some components below the hinge
    many = 2000
    n = 64 * many
    theirs = VICRegLoss(lambda_param=25.0, mu_param=25.0, nu_param=1.0)(
        f.repeat(many, 1), g.repeat(many, 1)
    )
    ours = VICReg(VICReg.Params("vicreg")).loss(EncodedBatch((f, g)))
    torch.testing.assert_close(ours, theirs, rtol=20 / n, atol=0)
