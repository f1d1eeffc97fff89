"""Differential privacy: bounded contributions, the noise that was asked for, and its accountant."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    engine_of,
    groups_of,
    made_split,
    refused,
    relative,
    settings,
    step,
    train,
)
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from noisy import BOUND, noisy, small
from scipy import stats
from torch import Tensor

from fedssl.federation.aggregate import Aggregator, TooFewReplies
from fedssl.federation.algorithm import build_algorithm
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.cco import CCO
from fedssl.objectives.moments import SecondMomentObjective
from fedssl.objectives.vicreg import VICReg
from fedssl.privacy import noise, secure
from fedssl.privacy.gaussian import sample_gaussian
from fedssl.privacy.noise import Noisy
from fedssl.runs import loop
from fedssl.runs.build import build_experiment
from fedssl.runs.progress import Progress
from fedssl.util.errors import TrainingError, UserError
from fedssl.util.trees import Tree, flatten, scale


def no_noise(count: int, sigma: int) -> np.ndarray:
    return np.zeros(count, dtype=np.int64)


def norm(tree: Tree) -> float:
    leaves = [leaf.double().reshape(-1) for leaf in flatten(tree).values()]
    return float(torch.cat(leaves).norm())


def contributed(average: Noisy, task: str, samples: int, reply: Tree) -> Any:
    """Return a client's part of the sum, in the reply's own units."""
    _, part = average.contribute(task, samples, reply, "samples")
    return scale(part, average.clip(task))


# --- what a client puts in


replies = st.builds(
    lambda a, b, exponent: {
        "x": torch.from_numpy(a) * 10.0**exponent,
        "y": {"z": torch.from_numpy(b) * 10.0**exponent},
    },
    arrays(np.float32, 5, elements=st.floats(-1, 1, width=32)),
    arrays(np.float32, (2, 2), elements=st.floats(-1, 1, width=32)),
    st.integers(-30, 37),
)


@pytest.mark.parametrize("task", ["encode", "descend"])
@pytest.mark.parametrize("most", [1, 7])
@budget(max_examples=100)
@given(reply=replies, other=replies, samples=st.integers(1, 20), theirs=st.integers(1, 20))
def test_no_client_moves_the_sum_by_more_than_twice_its_bound(
    task: str, most: int, reply: Tree, other: Tree, samples: int, theirs: int
) -> None:
    average = noisy(f"privacy.most_samples={most}", "privacy.clip=0.3")
    limit = BOUND if task == "encode" else 0.3
    assert average.clip(task) == pytest.approx(limit)
    share, own = average.contribute(task, samples, reply, "samples")
    assert norm(own) <= 1 and share <= 1
    sums: list[Any] = []
    average.release = lambda task, total, weight, replies: sums.append((total, weight)) or total
    for last in ((samples, reply), (theirs, other)):
        each = [(3, reply)] * 3 + [last]
        average.combine(task, (average.contribute(task, n, r, "samples") for n, r in each))
    moved = [a - b for a, b in zip(*(flatten(s[0]).values() for s in sums), strict=True)]
    weight = sums[0][1] - sums[1][1]
    whole = math.hypot(*(float(m.double().norm()) for m in moved), weight)
    assert whole <= 2 * average.sensitivity  # exactly: sums on the grid have no rounding errors
    assert most > 1 or weight == 0


def test_sums_of_many_contributions_lose_nothing() -> None:
    """In float32 the sum of these would be rounded."""
    average = noisy("privacy.clip=1")
    sums: list[Any] = []
    average.release = lambda task, total, weight, replies: sums.append(total) or total
    reply = {"x": torch.tensor([1 - 3 / noise.STEPS, 1 / noise.STEPS])}
    assert torch.equal(average.contribute("descend", 1, reply, "samples")[1]["x"], reply["x"])
    mean = average.combine("descend", ((1.0, reply) for _ in range(1001)))
    steps = sums[0]["x"] * noise.STEPS
    assert steps.tolist() == [1001 * (noise.STEPS - 3), 1001]
    assert mean["x"].dtype == torch.float32 and reply["x"][1] == 1 / noise.STEPS


def test_short_contributions_are_rounded_and_long_ones_keep_their_direction() -> None:
    average = noisy("privacy.clip=2")
    short, long = torch.tensor([0.6, -0.8]), torch.tensor([60.0, -80.0])
    step = 2 / noise.STEPS
    kept = contributed(average, "descend", 4, {"x": short})["x"]
    torch.testing.assert_close(kept, short, rtol=0, atol=step / 2)
    clipped = contributed(average, "descend", 4, {"x": long})["x"]
    torch.testing.assert_close(clipped, 2 * short, rtol=0, atol=2 * step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_contributions_are_on_the_grid(dtype: torch.dtype) -> None:
    """Also in the type that travels, and in the fixed point of secure sums."""
    average = noisy("privacy.clip=0.3", "privacy.most_samples=7")
    reply = {"x": torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)}
    share, part = average.contribute("descend", 5, reply, "samples")
    steps = part["x"].double() * noise.STEPS
    assert torch.equal(steps, steps.round()) and 500 < len(steps.unique()) <= 1000
    assert share * noise.STEPS == int(share * noise.STEPS) and 0 < 5 / 7 - share < 1e-6
    whole, weight = secure.decode(secure.encode(part, share, 9, weigh=False), part)
    assert torch.equal(whole["x"], part["x"].double()) and weight == share


@pytest.mark.parametrize("count", [1, 100, 10**5])
def test_rounding_never_makes_a_contribution_longer_than_the_clip(count: int) -> None:
    average = noisy("privacy.clip=0.3")
    halves = torch.full((count,), 1.5 / noise.STEPS)  # all rounded up, if they are not clipped
    for reply in (halves, torch.randn(count), torch.ones(count)):
        _, part = average.contribute("descend", 1, {"x": reply.double()}, "samples")
        assert norm(part) <= 1
    assert norm(part) > 0.999


def test_each_client_is_clipped_by_itself() -> None:
    """A merged cohort would be clipped as if it were one client."""
    assert not build_experiment(small("privacy.noise=1", "objective.bound=1")).engine.merges
    assert build_experiment(small("objective.bound=1")).engine.merges


def test_a_clients_weight_is_capped_and_clipping_comes_after_it() -> None:
    average = noisy("privacy.most_samples=8", "privacy.clip=1")
    reply = {"x": torch.tensor([3.0, 0.0])}
    weights = [average.contribute("descend", n, reply, "samples")[0] for n in (1, 4, 8, 9, 1000)]
    assert weights == [1 / 8, 1 / 2, 1, 1, 1]
    assert average.contribute("descend", 1, reply, "uniform")[0] == 1
    # 3/8 is within the clip, 12/8 is not.
    assert norm(contributed(average, "descend", 1, reply)) == pytest.approx(3 / 8, rel=1e-6)
    assert norm(contributed(average, "descend", 4, reply)) == pytest.approx(1, rel=1e-5)
    assert noisy().contribute("descend", 1000, reply, "samples")[0] == 1


def test_the_loss_does_not_leave_the_client() -> None:
    reply = {"change": torch.tensor([0.1]), "loss": torch.tensor(5.0)}
    assert contributed(noisy(), "descend", 4, reply).keys() == {"change"}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reply_that_is_not_finite_is_not_hidden(bad: float) -> None:
    reply = {"change": torch.tensor([bad, 1.0])}
    assert not bool(torch.isfinite(contributed(noisy(), "descend", 1, reply)["change"]).all())


def test_a_run_that_is_no_longer_finite_ends(tmp_path: Path) -> None:
    words = ("privacy.noise=1", "objective.bound=1", "server.optimizer=sgd", "server.lr=1e9")
    words += ("server.weight_decay=1", "rounds=6")
    with pytest.raises(TrainingError, match="no longer finite"):
        loop.run(small(*words), tmp_path / "run")


# --- the noise


def deviations(average: Noisy, task: str, total: Tree, weight: float, replies: int) -> Tensor:
    """The noise on the sum, over its intended standard deviation, for many sums."""
    leaves = flatten(total)
    drawn = []
    for _ in range(400):
        mean = flatten(average.release(task, scale(total, 1 / average.clip(task)), weight, replies))
        drawn += [(mean[name] * replies - leaves[name]).reshape(-1) for name in leaves]
    return torch.cat(drawn)


@pytest.mark.parametrize(
    ("words", "task", "expected"),
    [
        ("privacy.noise=3 privacy.clip=0.5", "descend", 3 * 0.5),
        ("privacy.noise=3 privacy.clip=0.5", "encode", 3 * BOUND),
        ("privacy.noise=3 privacy.moments_noise=5", "encode", 5 * BOUND),
        ("privacy.noise=3 privacy.moments_noise=5 privacy.clip=2", "descend", 3 * 2),
    ],
)
def test_the_noise_has_the_standard_deviation_that_was_asked(
    words: str, task: str, expected: float
) -> None:
    total = {"a": torch.full((200,), 7.0).double(), "b": {"c": torch.zeros(50).double()}}
    drawn = deviations(noisy(*words.split()), task, total, 10.0, 10)
    n = len(drawn)
    assert float(drawn.square().mean()) == pytest.approx(
        expected**2, rel=6 * math.sqrt(2 / n)
    )  # six standard deviations of a chi-square
    assert abs(float(drawn.mean())) < 6 * expected / math.sqrt(n)
    # Neither from one sum to the next nor within one sum do they repeat.
    rows = drawn.reshape(400, 250) / expected
    for other in (rows.roll(1, 0), rows.roll(1, 1), rows.roll(200, 1)):
        assert abs(float((rows * other).mean())) < 6 / math.sqrt(n)


@pytest.mark.parametrize(("task", "clip"), [("descend", 0.5), ("encode", BOUND)])
def test_with_weights_their_sum_is_noisy_too(task: str, clip: float) -> None:
    """Noise z√2·clip on the sum, z√2 on the weights: clip · weight is one coordinate of it."""
    average = noisy("privacy.noise=0.5", "privacy.clip=0.5", "privacy.most_samples=4")
    total = torch.tensor([1e9 / average.clip(task), 0.0], dtype=torch.float64)
    weights, ratios = [], []
    for _ in range(4000):
        # The first number is so large that its noise is nothing: it tells the divisor.
        mean = average.release(task, {"x": total}, 64.0, 80)["x"]
        weights.append(1e9 / float(mean[0]))
        ratios.append(float(mean[1]) * weights[-1])
    for values, centre, spread in ((weights, 64, 1.0), (ratios, 0, clip)):
        expected = 0.5 * math.sqrt(2) * spread
        array = np.array(values) - centre
        assert np.mean(array**2) == pytest.approx(expected**2, rel=6 * math.sqrt(2 / 4000))
        assert abs(np.mean(array)) < 6 * expected / math.sqrt(4000)
    assert abs(np.corrcoef(weights, ratios)[0, 1]) < 6 / math.sqrt(4000)


def test_a_weight_without_sense_skips_the_round_and_is_counted() -> None:
    average = noisy("privacy.most_samples=2", sample=lambda count, sigma: np.full(count, -sigma))
    with pytest.raises(TooFewReplies, match=r"sum of the weights.*privacy\.most_samples"):
        average.release("encode", {"x": torch.zeros(2)}, 3.0, 5)
    assert average.account.counts() == {("encode",): 1}


def test_noise_and_cohorts_do_not_come_from_the_seed() -> None:
    results = []
    for _ in range(2):
        session = build_experiment(small("privacy.noise=1", "objective.bound=1"))
        drawn = [tuple(session.draw_cohort(r).tolist()) for r in range(20)]
        session.algorithm.round(session.server, session.engine.cohort(np.arange(3), 0))
        results.append((session.server.weights, drawn))
    assert not torch.equal(results[0][0], results[1][0])
    assert results[0][1] != results[1][1]


@pytest.mark.parametrize("algorithm", ["dcco", "fedavg"])
def test_without_noise_and_clipping_it_is_the_uniform_mean(algorithm: str) -> None:
    words = (f"algorithm.name={algorithm}", "objective.bound=0.7", "engine.merge=off")
    groups = groups_of(4, 7, 2, 9)

    class Uniform(Aggregator):
        def contribute(self, task, samples, reply, weight):  # type: ignore[no-untyped-def]
            return super().contribute(task, samples, reply, "uniform")

    ends = []
    quiet = noisy(*words, "privacy.clip=100", sample=no_noise)
    for average in (quiet, Uniform(), Aggregator()):
        engine, server = engine_of(settings(*words), made_split(), groups)
        engine.aggregator = average
        ends.append(train(engine, server, 1) - engine.trainer.initial)
    assert relative(ends[0], ends[1]) < 1e-4
    assert relative(ends[2], ends[1]) > 1e-2  # by samples is something else


def test_capped_weights_are_weights() -> None:
    average = noisy("privacy.clip=100", "privacy.most_samples=6", sample=no_noise)
    mean: Any = average.combine(
        "descend",
        (
            average.contribute("descend", n, {"x": torch.tensor([v]).double()}, "samples")
            for n, v in [(4, 1.0), (9, 2.0), (6, 5.0)]
        ),
    )
    assert float(mean["x"]) == pytest.approx((4 * 1 + 6 * 2 + 6 * 5) / 16, rel=1e-5)


# --- the bits of what is released


def naive(total: float, spread: float, seed: int) -> np.ndarray:
    """Noise in floating point, added to a sum, as many programs do it."""
    return total + spread * np.random.default_rng(seed).standard_normal(20_000)


def released(total: float, seed: int) -> np.ndarray:
    """Noisy sums by the program, over the clip: dividing by four replies rounds nothing."""
    average = noisy("privacy.clip=0.5", sample=seeded(seed))
    sums = torch.full((20_000,), total, dtype=torch.float64)
    mean = average.release("descend", {"x": sums}, 4.0, 4)["x"]
    return (mean * 4 / 0.5).numpy()


def seeded(seed: int) -> Callable[[int, int], np.ndarray]:
    bits = np.random.default_rng(seed).bytes
    return lambda count, sigma: sample_gaussian(count, sigma, bits)


def is_coarse(values: np.ndarray) -> np.ndarray:
    """Numbers near 0 must not have fewer bits than they could, or an attacker sees it."""
    near = values[np.abs(values) < 0.25]
    assert len(near) > 500
    return near * 2.0**53 == np.round(near * 2.0**53)


def test_the_last_bits_do_not_tell_the_sum() -> None:
    """Mironov 2012: with noise in floating point they tell a sum of 0 from a sum of 1."""
    assert is_coarse(naive(1.0, 3.0, 0)).all() and not is_coarse(naive(0.0, 3.0, 0)).all()
    for total in (0.0, 1.0, 1 / noise.STEPS, 12345 / noise.STEPS):
        steps = released(total, 7) * noise.STEPS
        assert np.array_equal(steps, np.round(steps))  # all sums can give the same numbers
        assert is_coarse(released(total, 7)).all()
        for bit in (0, 1, 2):
            ones = int((steps.astype(np.int64) >> bit & 1).sum())
            assert stats.binomtest(ones, len(steps)).pvalue > 1e-4


def test_the_same_bits_give_the_same_noise_whatever_the_sum() -> None:
    """So a release is the sum plus noise that does not depend on it, without any rounding."""
    away = released(12345 / noise.STEPS, 3) - released(-7 / noise.STEPS, 3)
    assert np.array_equal(away, np.full(20_000, 12352 / noise.STEPS))


# --- bounded encodings


def moment_objectives(bound: float | None) -> list[SecondMomentObjective]:
    return [CCO(CCO.Params("cco", bound=bound)), VICReg(VICReg.Params("vicreg", bound=bound))]


encodings = arrays(
    np.float64, st.tuples(st.integers(1, 6), st.just(3)), elements=st.floats(-1e6, 1e6)
)


@budget(max_examples=100)
@given(f=encodings, seed=st.integers(0, 1000), bound=st.sampled_from([0.01, 1.0, 30.0]))
def test_moments_of_bounded_encodings_are_bounded(f: np.ndarray, seed: int, bound: float) -> None:
    g = np.random.default_rng(seed).normal(size=f.shape) * 10.0 ** (seed % 7 - 3)
    for objective in moment_objectives(bound):
        both = EncodedBatch((torch.from_numpy(f), torch.from_numpy(g)))
        moments = objective.moments(both, objective.centre(both))
        limit = math.sqrt(2 * bound**2 + 3 * bound**4)
        assert objective.moments_bound == pytest.approx(limit)
        assert norm(moments) <= limit * (1 + 1e-12)


def test_the_bound_is_reached() -> None:
    """So that it is not larger than it need be."""
    one = EncodedBatch((torch.tensor([[5.0, 0, 0]], dtype=torch.float64),) * 2)
    for objective in moment_objectives(0.7):
        moments = objective.moments(one, objective.centre(one))
        assert norm(moments) == pytest.approx(BOUND)


def test_encodings_within_the_bound_are_left_alone() -> None:
    f, g = torch.randn(2, 9, 3, dtype=torch.float64)
    for wide, plain in zip(moment_objectives(100.0), moment_objectives(None), strict=True):
        loss = wide.loss(EncodedBatch((f, g)))
        torch.testing.assert_close(loss, plain.loss(EncodedBatch((f, g))))
    both = (3 + f, 3 + g)
    scaled = tuple(x * 0.5 / x.norm(dim=1, keepdim=True) for x in both)
    for tight in moment_objectives(0.5):
        loss = tight.loss(EncodedBatch(both))
        torch.testing.assert_close(loss, tight.loss(EncodedBatch(scaled)))
        torch.testing.assert_close(tight.bounded(both[0]), scaled[0])


def test_the_gradient_goes_through_the_bound_and_is_defined_at_zero() -> None:
    objective = CCO(CCO.Params("cco", bound=1.0))
    mixed = torch.tensor([[3.0, -1], [0.2, 0.1], [0.9, 2]], dtype=torch.float64)
    assert torch.autograd.gradcheck(objective.bounded, (mixed.requires_grad_(),))
    zero = torch.zeros(2, 3, requires_grad=True)
    objective.bounded(zero).sum().backward()
    assert zero.grad is not None and torch.equal(zero.grad, torch.ones(2, 3))


@pytest.mark.parametrize("objective", ["cco", "vicreg"])
@pytest.mark.parametrize("merge", ["off", "auto"])
def test_a_round_of_dcco_is_still_a_centralized_step_on_the_union(
    objective: str, merge: str
) -> None:
    """Appendix A, with about half of the encodings scaled down."""
    sizes, changes = (1, 5, 2, 7, 1, 4), {}
    for bound in (0.8, None):
        name = (f"objective.name={objective}", f"objective.bound={bound or 'null'}")
        engine, server = engine_of(
            settings(*name, f"engine.merge={merge}"), made_split(), groups_of(*sizes)
        )
        federated = train(engine, server, 1) - engine.trainer.initial
        config = settings(*name, "algorithm.name=fedavg")
        engine, server = engine_of(config, made_split(), groups_of(*sizes))
        union = engine.client(np.arange(len(sizes)), 0, remember=False)
        union.sizes = np.array([union.samples])
        server.apply(engine.algorithm.train(union, server.weights))  # type: ignore[attr-defined]
        changes[bound] = centralized = server.weights - engine.trainer.initial
        assert relative(federated, centralized) < 1e-9
    assert relative(changes[0.8], changes[None]) > 1e-3


def test_with_a_bound_the_centre_is_the_origin_and_nobody_is_asked_for_it() -> None:
    engine, server = engine_of(settings("objective.bound=1"), made_split(), groups_of(4, 6, 5))
    for round in range(2):
        cohort = step(engine, server, round)
        assert set(cohort.traffic.down) == {"encode", "descend"}
        centre: Any = server.state["centre"]
        assert all(torch.equal(leaf, torch.zeros(16).double()) for leaf in centre.values())
    tasks = engine.algorithm.tasks()
    assert tasks["encode"].bound(engine.algorithm) == pytest.approx(math.sqrt(5))
    assert tasks["descend"].bound(engine.algorithm) is None
    assert tasks["encode"].bound(build_algorithm(settings())) is None


# --- what is refused, and what is shown


NOISE = "privacy.noise=1"
FEDAVG = f"{NOISE} algorithm.name=fedavg"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("privacy.noise=0", "privacy.noise"),
        ("privacy.moments_noise=1", "privacy.moments_noise"),
        (NOISE, "privacy.noise"),  # moments without a bound
        (f"{NOISE} objective.bound=1 privacy.delta=0.2", "privacy.delta"),
        (f"{NOISE} algorithm.name=standalone", "privacy.noise"),
        (f"{NOISE} algorithm.name=centralized", "privacy.noise"),
        (f"{NOISE} algorithm.name=gossip server.optimizer=sgd server.lr=1", "privacy.noise"),
        (f"{FEDAVG} engine.updates=fp16", "engine.updates"),
        (f"{FEDAVG} algorithm.norm_policy=local", "algorithm.norm_policy"),
        (f"{FEDAVG} evaluate.drift=true engine.merge=off", "evaluate.drift"),
        (f"{FEDAVG} algorithm.weight=uniform privacy.most_samples=2", "privacy.most_samples"),
        (f"{FEDAVG} evaluate.baselines=[dcco]", "evaluate.baselines"),
    ],
)
def test_settings_that_noise_does_not_protect_are_refused(words: str, key: str) -> None:
    with refused(key):
        build_experiment(small(*words.split()))


def test_without_the_accountant_one_line_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(
        noise.importlib.util, "find_spec", lambda name: None if "dp" in name else find(name)
    )
    with pytest.raises(UserError, match=r"pip install 'fedssl\[privacy\]'"):
        noisy()


def test_a_round_whose_loss_is_not_known_was_not_skipped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for round, said in (
        ((1, None, 10, False), "loss not shared"),
        ((1, None, 10, True), "skipped"),
        ((1, 2.5, 10), "loss 2.5 "),
    ):
        progress = Progress("dcco", 1)
        progress.update(*round)
        progress.close()
        assert said in capsys.readouterr().err
