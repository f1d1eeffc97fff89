"""SimCLR, SimSiam, BYOL, MoCo: losses against lightly's, the target against its sum."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import engine_of, groups_of, made_split, relative, siamese, train
from lightly.loss import NegativeCosineSimilarity, NTXentLoss
from lightly.models.utils import update_momentum
from plain import flat_params, network_of
from torch import Tensor

from fedssl.models.norms import Norm
from fedssl.objectives.base import Networks
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.byol import BYOL
from fedssl.objectives.memory import Target
from fedssl.objectives.moco import MoCo
from fedssl.objectives.simclr import SimCLR
from fedssl.objectives.simsiam import SimSiam


def four(count: int = 7, width: int = 5) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(4, count, width, dtype=torch.float64, generator=generator)
    return tuple(r.clone().requires_grad_() for r in rows)


def gradients(loss: Tensor, encodings: tuple[Tensor, ...]) -> list[Tensor]:
    keep = {"allow_unused": True, "retain_graph": True, "materialize_grads": True}
    return list(torch.autograd.grad(loss, encodings, **keep))


def assert_same(ours: Tensor, theirs: Tensor, encodings: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    for a, b in zip(gradients(ours, encodings), gradients(theirs, encodings), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_simclr_agrees_with_lightly(temperature: float) -> None:
    encodings = four()[:2]
    ours = SimCLR(SimCLR.Params("simclr", temperature=temperature)).loss(EncodedBatch(encodings))
    assert_same(ours, NTXentLoss(temperature=temperature)(*encodings), encodings)


@pytest.mark.parametrize("joint", [True, False])
def test_simclr_may_normalize_both_views_as_one_batch(joint: bool) -> None:
    config = siamese("simclr", f"objective.joint={joint}")
    objective, network = SimCLR(config.objective), network_of(config)
    generator = torch.Generator().manual_seed(2)
    views = tuple(torch.randn(2, 6, 1, 8, 8, dtype=torch.float64, generator=generator))
    before = copy.deepcopy(network.towers[0])
    tower = copy.deepcopy(before)
    apart, together = tuple(before(view) for view in views), tower(torch.cat(views)).chunk(2)
    found = torch.cat(objective.encode(Networks(network, None, {}), views, None)).detach()
    same, other = (together, apart) if joint else (apart, together)
    expected = (tower if joint else before).state_dict()
    assert relative(found, torch.cat(same).detach()) < 1e-12
    assert relative(found, torch.cat(other).detach()) > 1e-2
    for name, value in network.towers[0].state_dict().items():
        torch.testing.assert_close(value, expected[name])  # running statistics too


def test_byol_agrees_with_lightly() -> None:
    """Both directions' 2 − 2 cos; constants are made of targets by the network, not the loss."""
    encodings = p1, p2, t1, t2 = four()
    similarity = NegativeCosineSimilarity()
    theirs = 4 + 2 * (similarity(p1, t2) + similarity(p2, t1))
    assert_same(BYOL(BYOL.Params("byol")).loss(EncodedBatch(encodings)), theirs, encodings)


@pytest.mark.parametrize("stop", [True, False])
def test_simsiam_agrees_with_lightly(stop: bool) -> None:
    encodings = p1, p2, z1, z2 = four()
    similarity = NegativeCosineSimilarity()
    ours = SimSiam(SimSiam.Params("simsiam", stop_gradient=stop)).loss(EncodedBatch(encodings))
    to = Tensor.detach if stop else Tensor.clone
    theirs = 0.5 * (similarity(p1, to(z2)) + similarity(p2, to(z1)))
    assert_same(ours, theirs, encodings)
    assert bool(gradients(ours, encodings)[2].any()) != stop


@pytest.mark.parametrize(("version", "temperature"), [(1, 0.07), (2, 0.2)])
def test_moco_agrees_with_lightly(version: Any, temperature: float) -> None:
    """lightly's bank starts at random and drops keys at its end: it is given our negatives."""
    moco = MoCo(MoCo.Params("moco", projector=(8, 5), version=version, queue=6))
    encodings = q1, q2, k1, k2 = four()
    memory = moco.memory.start(q1.detach())
    moco.memory.update(memory, tuple(e + 1 for e in encodings))
    loss = NTXentLoss(temperature=temperature, memory_bank_size=(6, 5))

    def theirs(query: Tensor, key: Tensor) -> Tensor:
        loss.memory_bank.bank = memory["queue"].clone()
        return loss(query, key)

    ours = moco.loss(EncodedBatch(encodings, memory=memory))
    assert_same(ours, theirs(q1, k2) + theirs(q2, k1), encodings)


def test_moco_never_sees_places_that_are_not_filled() -> None:
    moco = MoCo(MoCo.Params("moco", projector=(8, 5), queue=10, temperature=0.5))
    encodings = four(count=3)
    memory = moco.memory.start(encodings[0].detach())
    batch = EncodedBatch(encodings, memory=memory)
    assert float(moco.loss(batch).detach()) == 0  # its own key is the only one
    moco.memory.update(memory, tuple(e.detach()[:2] for e in encodings))
    assert int(memory["seen"]) == 4
    full = MoCo(MoCo.Params("moco", projector=(8, 5), queue=4, temperature=0.5))
    first = {**memory, "queue": memory["queue"][:4].clone()}
    expected = full.loss(EncodedBatch(encodings, memory=first))
    memory["queue"][4:] = torch.randn(6, 5, dtype=torch.float64)
    assert_same(moco.loss(batch), expected, encodings)


@pytest.mark.parametrize("objective", ["byol", "moco"])
@pytest.mark.parametrize("momentum", [0.0, 0.8, 1.0])
def test_the_target_is_the_weighted_sum_of_all_online_networks(
    objective: str, momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Σ (1 − m) m^(n−i) θ_i + mⁿ θ_0, over several rounds; and lightly's own way to it."""
    config = siamese(objective, f"objective.momentum={momentum}")
    engine, server = engine_of(config, made_split(), groups_of(9))
    trainer, path = engine.trainer, []
    real = type(trainer).step

    def kept_step(self: Any, *rest: Any, **named: Any) -> Any:
        result = real(self, *rest, **named)
        path.append(self.flat.params.clone())
        return result

    monkeypatch.setattr(type(trainer), "step", kept_step)
    start = trainer.initial[: trainer.flat.parameter_count]
    network, slow = (copy.deepcopy(trainer.network.towers) for _ in range(2))
    train(engine, server, 3)
    n, size = len(path), sum(p.numel() for p in network.parameters())
    assert n == 12
    expected = momentum**n * start + sum(
        (1 - momentum) * momentum ** (n - i) * theta for i, theta in enumerate(path, start=1)
    )
    target = engine.states[0]["target"]
    assert len(target) == size
    assert relative(target, expected[:size]) < 1e-12
    for theta in path:
        torch.nn.utils.vector_to_parameters(theta[:size], network.parameters())
        update_momentum(network, slow, momentum)
    assert relative(target, flat_params(slow)) < 1e-12


def test_the_defaults_are_the_papers() -> None:
    """FedEMA, appendix B.2."""
    byol, moco = BYOL(BYOL.Params("byol")), MoCo(MoCo.Params("moco"))
    assert byol.params.projector == (4096, 2048)
    predictor = byol.heads(SimpleNamespace(features=8), Norm("batch"), 0).predictor
    assert predictor is not None
    assert [tuple(p.shape) for p in predictor.parameters() if p.ndim == 2] == [
        (4096, 2048),
        (2048, 4096),
    ]
    assert byol.memory.target == moco.memory.target == Target(0.99) and moco.params.queue == 4096
    assert [MoCo(MoCo.Params("moco", version=v)).temperature for v in (1, 2)] == [0.07, 0.2]
    assert MoCo(MoCo.Params("moco", version=1, temperature=0.3)).temperature == 0.3
