from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from fedssl.data.random import key, permutation
from fedssl.evaluate import linear
from fedssl.evaluate.linear import Training, batches, fit, fit_logistic
from fedssl.training.optim import cosine

PRESETS = ("logistic", "dcco", "fedema", "ccl")


@pytest.fixture
def steps(monkeypatch):
    """The rule and the learning rate of every step, instead of taking it."""
    seen = []

    def spy(rule, state, params, gradient, lr, layers):
        seen.append((rule, lr))
        return gradient

    monkeypatch.setattr(linear.optim, "step", spy)
    return seen


def blobs(n, classes, d, spread, seed):
    """Class c sits at the c-th corner; samples are around it."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    return torch.eye(classes, d)[labels] + spread * torch.randn(n, d, generator=generator), labels


@pytest.mark.parametrize("preset", ["logistic", "dcco", "ccl"])
@pytest.mark.parametrize(("size", "offset"), [(1.0, 0.0), (1e-3, 0.0), (1e3, 0.0), (1.0, 30.0)])
def test_learns_blobs_whatever_the_size_and_offset_of_the_features(preset, size, offset):
    train, labels = blobs(300, 5, 16, 0.15, seed=0)
    test, truth = blobs(300, 5, 16, 0.15, seed=1)
    score = linear.accuracy(
        size * (train + offset), labels, size * (test + offset), truth, 5, preset
    )
    assert score > 97.0


@pytest.mark.parametrize("preset", PRESETS)
def test_labels_that_say_nothing_give_chance(preset):
    train, labels = blobs(400, 4, 8, 0.3, seed=0)
    shuffled = labels[torch.randperm(400, generator=torch.Generator().manual_seed(2))]
    test, truth = blobs(400, 4, 8, 0.3, seed=1)
    assert linear.accuracy(train, shuffled, test, truth, 4, preset) < 50.0


@pytest.mark.parametrize(("n", "d"), [(200, 6), (30, 50)])
def test_logistic_is_scikit_learns(n, d):
    x, labels = blobs(n, 3, d, 0.6, seed=3)
    x = x * torch.linspace(0.1, 5, d) + torch.linspace(-3, 8, d)
    weight, bias = fit_logistic(x, labels, 3)
    mean, std = x.double().mean(0), x.double().std(0, correction=0)
    reference = LogisticRegression(C=1.0, solver="newton-cholesky", tol=1e-10)
    reference.fit(((x.double() - mean) / std).numpy(), labels.numpy())
    # Both are shifted to sum to zero over classes: only differences of biases are determined.
    ours = bias + weight @ mean
    np.testing.assert_allclose(weight * std, reference.coef_, atol=1e-4)
    np.testing.assert_allclose(
        ours - ours.mean(), reference.intercept_ - reference.intercept_.mean(), atol=1e-4
    )


def test_float32_comes_to_the_same_solution(monkeypatch):
    x, labels = blobs(400, 4, 10, 0.7, seed=4)
    exact, _ = fit_logistic(x, labels, 4)
    monkeypatch.setattr(linear, "_SMALL", 0)
    rough, _ = fit_logistic(x, labels, 4)
    assert not torch.equal(rough, exact)
    torch.testing.assert_close(rough, exact, atol=5e-3, rtol=0)


@pytest.mark.parametrize("few", [1, 1 << 22])
def test_many_samples_are_standardized_in_parts(few, monkeypatch):
    """In float32 and float64; a collapsed encoder does no harm."""
    x, labels = blobs(400, 4, 10, 0.7, seed=4)
    x = x * torch.linspace(0.1, 5, 10) + torch.linspace(-3, 8, 10)
    whole = fit_logistic(x, labels, 4)
    monkeypatch.setattr(linear, "_ROWS", 150)
    monkeypatch.setattr(linear, "_SMALL", few)
    for ours, theirs in zip(fit_logistic(x, labels, 4), whole, strict=True):
        assert not torch.equal(ours, theirs)
        torch.testing.assert_close(ours, theirs, atol=3e-2 if few == 1 else 1e-6, rtol=0)
    weight, bias = fit_logistic(torch.ones(400, 4), labels, 4)
    assert not weight.any() and bias.isfinite().all()


def test_dead_and_nearly_dead_features_do_no_harm():
    train, labels = blobs(100, 3, 8, 0.2, seed=0)
    test, truth = blobs(100, 3, 8, 0.2, seed=1)
    clean = linear.accuracy(train, labels, test, truth, 3)
    # One is constant, the other moves by a rounding error in training and by 1e-3 in the test.
    dead = torch.stack((torch.full((100,), 7.0), 1e-7 * labels), dim=1)
    moved = torch.stack((torch.full((100,), 7.0), 1e-3 * (2 - truth)), dim=1)
    assert clean > 95.0
    assert (
        linear.accuracy(torch.cat((train, dead), 1), labels, torch.cat((test, moved), 1), truth, 3)
        > 95.0
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_a_collapsed_encoder_gets_chance_and_no_error(preset):
    labels = torch.arange(20) % 2
    assert linear.accuracy(torch.ones(20, 4), labels, torch.ones(20, 4), labels, 2, preset) == 50.0


def test_logistic_needs_no_seed_and_the_others_depend_on_nothing_else(monkeypatch):
    x, labels = blobs(300, 4, 8, 0.5, seed=0)
    assert torch.equal(fit(x, labels, 4, seed=1)[0], fit(x, labels, 4, seed=2)[0])
    # A full batch of Adam depends on the seed by the order of sums alone.
    weights = [fit(x, labels, 4, "fedema", seed)[0] for seed in (1, 2)]
    torch.testing.assert_close(*weights, atol=1e-3, rtol=0)
    monkeypatch.setattr(linear, "FEDEMA", Training(linear.FEDEMA.rule, epochs=3, batch=60))
    for preset in ("dcco", "fedema"):
        first, again, other = (fit(x, labels, 4, preset, seed)[0] for seed in (1, 1, 2))
        assert torch.equal(first, again)
        assert (first - other).abs().max() > 3e-3


def test_fedema_is_torchs_adam_on_the_features_as_they_are():
    """200 epochs at a constant rate without decay, here of one full batch (appendix B.3)."""
    x, labels = blobs(40, 3, 5, 0.4, seed=0)
    x = 3 * x + 2
    weight, bias = fit(x, labels, 3, "fedema", seed=0)
    head = linear.zero_head(5, 3, x)
    rule = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(200):
        rule.zero_grad()
        torch.nn.functional.cross_entropy(head(x), labels).backward()
        rule.step()
    torch.testing.assert_close(weight, head.weight.detach(), atol=1e-4, rtol=0)
    torch.testing.assert_close(bias, head.bias.detach(), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("n", "count"), [(40, 200), (512, 200), (513, 400), (1500, 600)])
def test_fedema_counts_epochs(n, count, steps):
    fit(*blobs(n, 2, 2, 0.5, seed=0), 2, "fedema")
    assert len(steps) == count
    assert {(r.optimizer, r.weight_decay, lr) for r, lr in steps} == {("adam", 0.0, 3e-3)}


@pytest.mark.parametrize("n", [40, 600])
def test_ccl_is_torchs_sgd_with_mocos_rate_on_centred_features_of_unit_norm(n):
    """He et al. 2020, section 4.1: rate 30, momentum 0.9, no decay, a tenth at epochs 60 and 80."""
    x, labels = blobs(n, 3, 5, 0.4, seed=0)
    x = 3 * x.double() + 2
    weight, bias = fit(x, labels, 3, "ccl", seed=4)
    centred = x - x.mean(0)
    scale = centred.square().sum(1).mean().sqrt()
    head = linear.zero_head(5, 3, x)
    rule = torch.optim.SGD(head.parameters(), lr=30.0, momentum=0.9)
    falls = torch.optim.lr_scheduler.MultiStepLR(rule, [60, 80], gamma=0.1)
    cuts = [0, n] if n <= 256 else [0, 200, 400, 600]
    for epoch in range(100):
        order = torch.as_tensor(permutation(key(4, "probe", epoch), n))
        for start, stop in pairwise(cuts):
            part = order[start:stop]
            rule.zero_grad()
            loss = torch.nn.functional.cross_entropy(head(centred[part] / scale), labels[part])
            loss.backward()
            rule.step()
        falls.step()
    torch.testing.assert_close(weight, head.weight.detach() / scale)
    torch.testing.assert_close(bias, head.bias.detach() - weight @ x.mean(0))
    assert linear.accuracy(x, labels, x, labels, 3, "ccl", 4) > 90


@pytest.mark.parametrize(("n", "count"), [(256, 1), (257, 2), (600, 3)])
def test_ccls_rate_falls_to_a_tenth_at_epochs_60_and_80(n, count, steps):
    fit(*blobs(n, 2, 2, 0.5, seed=0), 2, "ccl")
    rates = [30.0] * 60 + [3.0] * 20 + [0.3] * 20
    assert [lr for _, lr in steps] == pytest.approx([lr for lr in rates for _ in range(count)])
    assert {(r.optimizer, r.momentum, r.weight_decay) for r, _ in steps} == {("sgd", 0.9, 0.0)}


@pytest.mark.parametrize("preset", PRESETS)
def test_digits_from_their_pixels(preset):
    pixels, labels = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
    pixels = pixels.float() / 16
    sides = pixels[:1000], labels[:1000], pixels[1000:], labels[1000:]
    assert linear.accuracy(*sides, 10, preset) > 85.0


@pytest.mark.parametrize(
    ("n", "count", "batch", "rate"), [(2499, 400, 128, 2.5), (2500, 1000, 512, 2.0)]
)
def test_dccos_two_rows_and_their_cosine(n, count, batch, rate, steps, monkeypatch):
    sizes, real = [], linear.batches

    def spy(*args):
        for chosen in real(*args):
            sizes.append(len(chosen))
            yield chosen

    monkeypatch.setattr(linear, "batches", spy)
    fit(*blobs(n, 2, 2, 0.5, seed=0), 2, "dcco")
    assert [lr for _, lr in steps] == [rate * cosine(step, count) for step in range(count)]
    assert {r.optimizer for r, _ in steps} == {"lars"} and sizes == [batch] * count


def test_batches_are_full_and_differ_within_an_epoch_and_between_epochs():
    training = Training(linear.DCCO_FEW.rule, steps=6, batch=3)
    steps = list(batches(0, "probe", 10, training))
    assert [len(b) for b in steps] == [3] * 6
    for epoch in (steps[:3], steps[3:]):
        assert len(set(np.concatenate(epoch).tolist())) == 9
    assert np.concatenate(steps[:3]).tolist() != np.concatenate(steps[3:]).tolist()
    whole = next(batches(0, "probe", 2, training))
    assert sorted(whole.tolist()) == [0, 1]


def test_epochs_take_every_sample_in_batches_of_nearly_equal_size():
    training = Training(linear.FEDEMA.rule, epochs=3, batch=4)
    for count, sizes in ((3, [3]), (4, [4]), (5, [2, 3]), (10, [3, 3, 4])):
        over = training.over(count)
        assert over.steps == 3 * len(sizes)
        steps = list(batches(0, "probe", count, over))
        assert [len(b) for b in steps] == sizes * 3
        epochs = [steps[i : i + len(sizes)] for i in range(0, len(steps), len(sizes))]
        assert [sorted(np.concatenate(e).tolist()) for e in epochs] == [list(range(count))] * 3
        assert len({tuple(np.concatenate(e)) for e in epochs}) > 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA")
@pytest.mark.parametrize("preset", ["dcco", "fedema", "ccl"])
def test_captured_steps_are_the_plain_ones(preset, monkeypatch):
    x, labels = (t.cuda() for t in blobs(1201, 4, 8, 0.5, seed=0))  # batches of two sizes
    captures, real = [], linear.captured
    monkeypatch.setattr(linear, "captured", lambda *a: captures.append(a[1]) or real(*a))
    heads = []
    for least in (10**9, 1):
        monkeypatch.setattr(linear, "WORTH_CAPTURING", least)
        heads.append(linear.fit(x, labels, 4, preset, seed=3))
    assert [len(sizes) for sizes in captures] == [1 if preset == "dcco" else 2]
    for plain, captured in zip(*heads, strict=True):
        assert plain.abs().max() > 0.01
        torch.testing.assert_close(captured, plain, rtol=1e-4, atol=1e-4)
