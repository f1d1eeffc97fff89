"""SwAV: codes and losses against lightly's, and the queues by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import engine_of, groups_of, made_split, relative, step
from lightly.loss import SwaVLoss
from lightly.loss.swav_loss import sinkhorn as lightly_sinkhorn
from rounds import assert_first_statistics_are_of_both_views, epochs, losses
from torch import Tensor

from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.swav import Prototypes, SwAV, sinkhorn

WORDS = ("objective.name=swav", "objective.projector=32,16", "objective.prototypes=6")


SMALL = ("augment.small=2", "augment.small_size=6", "augment.small_crop=0.5,1")


def objective(**keys: Any) -> SwAV:
    return SwAV(SwAV.Params("swav", **{"projector": (8, 5), "prototypes": (6,), **keys}))


def cosines(rows: int, seed: int, prototypes: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, prototypes, dtype=torch.float64, generator=generator)
    return (2 * scores - 1).requires_grad_()


def projections(count: int = 7) -> tuple[Tensor, Tensor]:
    """The loss is no function of them, only the queue is."""
    rows = torch.randn(2, count, 5, dtype=torch.float64)
    return rows[0], rows[1]


def gradients(loss: Tensor, scores: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss.sum(), scores, retain_graph=True)


def assert_same(ours: Tensor, theirs: Tensor, scores: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(ours, theirs.squeeze(), rtol=1e-10, atol=1e-12)
    for a, b in zip(*(gradients(x, scores) for x in (ours, theirs)), strict=True):
        assert a.abs().max() > 1e-4
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_codes_are_balanced() -> None:
    scores = cosines(12, 0)
    for iterations in (1, 3):
        codes = sinkhorn(scores, 0.05, iterations)
        torch.testing.assert_close(codes.sum(1), torch.ones(12, dtype=torch.float64))
        assert not codes.requires_grad
    uneven = (codes.sum(0) - 2).abs().max()
    codes = sinkhorn(scores, 0.3, 500)
    torch.testing.assert_close(codes.sum(1), torch.ones(12, dtype=torch.float64))
    assert (codes.sum(0) - 2).abs().max() < 1e-6 < uneven


@pytest.mark.parametrize("iterations", [1, 3, 10])
@pytest.mark.parametrize("epsilon", [0.05, 0.5])
def test_codes_agree_with_lightly(iterations: int, epsilon: float) -> None:
    scores = cosines(9, 1)
    theirs = lightly_sinkhorn(scores.detach(), iterations, epsilon)
    torch.testing.assert_close(sinkhorn(scores, epsilon, iterations), theirs, rtol=1e-9, atol=1e-12)


def test_a_small_epsilon_does_not_overflow() -> None:
    scores = cosines(9, 1).detach().float()
    assert lightly_sinkhorn(scores, 3, 0.005).isnan().any()  # exp(200)
    codes = sinkhorn(scores, 0.005, 3)
    exact = sinkhorn(scores.double(), 0.005, 3)
    torch.testing.assert_close(codes.double(), exact, rtol=1e-3, atol=1e-4)


def test_rows_that_do_not_count_change_nothing() -> None:
    scores = cosines(9, 1).detach()
    counts = torch.tensor([True] * 5 + [False] * 4)
    alone = sinkhorn(scores[:5], 0.05, 3)
    torch.testing.assert_close(sinkhorn(scores, 0.05, 3, counts)[:5], alone)
    assert relative(sinkhorn(scores, 0.05, 3)[:5], alone) > 0.01


@pytest.mark.parametrize("temperature", [0.1, 0.4])
def test_the_loss_agrees_with_lightly(temperature: float) -> None:
    views = cosines(7, 2), cosines(7, 3)
    ours = objective(temperature=temperature).loss(EncodedBatch((*views, *projections())))
    assert_same(ours, SwaVLoss(temperature)(list(views), []), views)


@pytest.mark.parametrize("seen", [0, 1, 3, 4])
def test_the_loss_with_a_queue_agrees_with_lightly_and_waits_until_it_is_full(seen: int) -> None:
    views, queues = (cosines(7, 2), cosines(7, 3)), (cosines(4, 4), cosines(4, 5))
    swav, memory = objective(queue=4), {"seen": torch.tensor(seen)}
    ours = swav.loss(EncodedBatch((*views, *queues, *projections()), memory=memory))
    assert_same(ours, SwaVLoss()(list(views), [], list(queues) if seen == 4 else None), views)
    assert torch.autograd.grad(ours, queues, allow_unused=True) == (None, None)


def test_several_sets_are_averaged() -> None:
    sizes = (6, 3, 4)
    sets = [(cosines(7, s, k), cosines(7, s + 50, k)) for s, k in enumerate(sizes)]
    views = tuple(torch.cat(of, dim=1) for of in zip(*sets, strict=True))
    ours = objective(prototypes=sizes).loss(EncodedBatch((*views, *projections())))
    theirs = sum(SwaVLoss()(list(pair), []) for pair in sets) / 3
    assert_same(ours, theirs, tuple(leaf for pair in sets for leaf in pair))


@pytest.mark.parametrize("queue", [0, 4])
@pytest.mark.parametrize("count", [1, 3])
def test_small_views_agree_with_lightly(count: int, queue: int) -> None:
    views, small = (cosines(7, 2), cosines(7, 3)), tuple(cosines(7, 10 + k) for k in range(count))
    queues = (cosines(4, 4), cosines(4, 5)) if queue else ()
    memory = {"seen": torch.tensor(9)} if queue else {}
    batch = EncodedBatch((*views, *small, *queues, *projections()), memory=memory)
    theirs = SwaVLoss()(list(views), list(small), list(queues) or None)
    assert_same(objective(queue=queue).loss(batch), theirs, (*views, *small))


def test_small_views_are_encoded_in_a_pass_of_their_own() -> None:
    """Their batch norm sees no large view, and only large views enter the queues."""
    words = ("objective.queue=30", "augment.small=3", "augment.small_size=4", "augment.name=dcco")
    engine = engine_of(epochs(*WORDS, *words), made_split(), groups_of(9))[0]
    trainer, client = engine.trainer, engine.client(np.array([0]), 0, remember=False)
    state, images = client.random_state(0, slice(None)), [trainer.images[0][:9]] * 2
    large = trainer.augmentation.each(images, state, trainer.dtype)
    small = trainer.augmentation.small_views(images, state, trainer.dtype)
    tower, encodings = trainer.network.towers[0], client.encode(0, slice(None)).encodings
    rows = [*tower(torch.cat(large)).chunk(2), *tower(torch.cat(small)).chunk(3)]
    assert len(encodings) == 5 + 2 + 2
    for found, z in zip(encodings[:5], rows, strict=True):
        torch.testing.assert_close(found, trainer.network.predictors[0](z))
    for found, z in zip(encodings[-2:], rows[:2], strict=True):
        torch.testing.assert_close(found, z)


def test_statistics_of_a_round_count_the_pass_of_small_views() -> None:
    words = ("algorithm.norm_policy=reset", "algorithm.batch=9", "algorithm.local_epochs=1")
    for more, passes in (((), 1), (("augment.small=2", "augment.small_size=4"), 2)):
        engine, _ = engine_of(epochs(*WORDS, *words, *more), made_split(), groups_of(9))
        assert engine.trainer.passes == passes


def test_scores_are_cosines_under_the_prototypes_of_now() -> None:
    """The batch comes first, then each view's queue, before the projections themselves."""
    config = epochs(*WORDS, "objective.queue=5", "objective.prototypes=6,3")
    engine, server = engine_of(config, made_split(), groups_of(9))
    step(engine, server, 0)
    trainer = engine.trainer
    trainer.load(server.weights)
    (weight,) = trainer.network.predictors.parameters()
    assert weight.shape == (9, 16)
    client = engine.client(np.array([0]), 1, remember=False)
    first, second, queue1, queue2, z1, z2 = client.encode_step(0).encodings
    memory = engine.states[0]["memory"]
    assert relative(memory["queue"][0], memory["queue"][1]) > 0.01
    pairs = zip((first, second, queue1, queue2), (z1, z2, *memory["queue"]), strict=True)
    for scores, rows in pairs:
        expected = F.cosine_similarity(rows[:, None], weight[None], dim=2)
        torch.testing.assert_close(scores, expected, rtol=1e-9, atol=1e-12)


def test_under_autocast_scores_are_float32() -> None:
    layer = Prototypes(16, 300, bias=False)
    half = torch.randn(50, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        scores = layer(half)
    exact = F.normalize(half.double(), dim=1) @ F.normalize(layer.weight.double(), dim=1).T
    assert scores.dtype == torch.float32
    assert (scores - exact).abs().max() < 1e-6


def test_statistics_of_a_round_are_those_of_both_views_as_one_batch() -> None:
    assert_first_statistics_are_of_both_views(*WORDS)


@pytest.mark.parametrize("small", [(), SMALL])
def test_the_loss_falls(small: tuple[str, ...]) -> None:
    """Below log K, where it stays if all samples have the same code."""
    words = ("objective.queue=8", "objective.epsilon=0.02", "algorithm.local_epochs=6", *small)
    first, *_, last = losses(epochs(*WORDS, *words), rounds=4)
    assert last < first and last < 0.9 * math.log(6)
