import math

import pytest
import torch
from evaluation import data_of, evaluate
from torch import nn

from fedssl.config import Evaluate
from fedssl.data.dataset import Split
from fedssl.evaluate import unlabeled
from fedssl.evaluate.unlabeled import alignment, effective_rank, uniformity, views_matched


def cloud(n, d, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def unit(row):
    length = math.hypot(*row)
    return [x / length for x in row]


def square_distance(a, b):
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))


def test_effective_rank_of_a_round_cloud_is_its_dimension():
    corners = torch.cat((torch.eye(6), -torch.eye(6)))
    assert effective_rank(corners) == pytest.approx(6)
    # Where the cloud lies does not matter, only how wide it is.
    assert effective_rank(corners + 50) == pytest.approx(6, abs=1e-4)


def test_effective_rank_of_a_line_is_one_and_of_a_point_is_zero():
    line = cloud(100, 1) * torch.tensor([[1.0, -2.0, 3.0]]) + 5
    assert effective_rank(line) == pytest.approx(1, abs=1e-4)
    point = torch.full((100, 3), 0.1)
    assert effective_rank(point) == 0.0
    assert effective_rank(point + 1e-8 * cloud(100, 3)) == 0.0  # rounding, not spread
    assert effective_rank(torch.zeros(100, 3)) == 0.0


@pytest.mark.parametrize("rows", [7, 100])
def test_effective_rank_of_features_that_are_read_in_parts(rows, monkeypatch):
    x = cloud(100, 5) * torch.tensor([1.0, 2, 3, 4, 5]) + 7
    whole = effective_rank(x)
    monkeypatch.setattr(unlabeled, "ROWS", rows)
    assert effective_rank(x) == pytest.approx(whole, rel=1e-12)
    point = torch.full((100, 3), 0.1)
    assert effective_rank(point + 1e-8 * cloud(100, 3)) == 0.0


def test_effective_rank_by_hand():
    # Widths 3 : 1, so shares 3/4 and 1/4.
    cross = torch.tensor([[3.0, 0], [-3, 0], [0, 1], [0, -1]])
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert effective_rank(cross) == pytest.approx(math.exp(entropy))


def test_effective_rank_with_fewer_samples_than_features_is_that_of_the_singular_values():
    x = cloud(10, 40)
    sigma = torch.linalg.svdvals((x - x.mean(0)).double())[:-1]
    share = sigma / sigma.sum()
    expected = math.exp(-(share * share.log()).sum())
    assert effective_rank(x) == pytest.approx(expected, rel=1e-6)


def test_uniformity_by_a_double_loop():
    rows = [unit(row) for row in (5 * cloud(30, 4)).tolist()]
    terms = [math.exp(-2 * square_distance(rows[i], rows[j])) for i in range(30) for j in range(i)]
    assert uniformity(5 * cloud(30, 4)) == pytest.approx(math.log(sum(terms) / len(terms)))


def test_alignment_by_a_loop():
    first, second = 3 * cloud(30, 4, seed=0), cloud(30, 4, seed=1)
    pairs = zip(first.tolist(), second.tolist(), strict=True)
    expected = sum(square_distance(unit(a), unit(b)) for a, b in pairs) / 30
    assert alignment(first, second) == pytest.approx(expected)
    assert alignment(first, 2 * first) == pytest.approx(0, abs=1e-12)


def measure(images, views, seed=3):
    settings = Evaluate(protocols=("unlabeled",))
    return evaluate(nn.Flatten(), data_of(settings, Split((images,)), None, 0, seed=seed), views)


def test_views_get_the_images_their_numbers_and_both_views(monkeypatch):
    monkeypatch.setattr(unlabeled, "SAMPLES", 8)
    monkeypatch.setattr(unlabeled, "BATCH", 5)
    images = torch.arange(20, dtype=torch.uint8)[:, None, None, None].expand(20, 2, 1, 1)
    calls = []

    def views(part, index, view):
        assert torch.equal(part[:, 0, 0, 0].long(), index)
        calls.append((view, index.tolist()))
        x = part.float() + 1
        x[:, view] *= 2
        return x

    result = measure(images, views)
    assert [(view, len(index)) for view, index in calls] == [(0, 5), (0, 3), (1, 5), (1, 3)]
    assert calls[0][1] + calls[1][1] == calls[2][1] + calls[3][1]
    # (2, 1) and (1, 2), each over √5: 0.4.
    assert result["alignment"] == pytest.approx(0.4)
    # All plain images lie on one ray.
    assert result["uniformity"] == pytest.approx(0, abs=1e-6)
    assert result["effective_rank"] == pytest.approx(1, abs=1e-3)


def test_measures_depend_on_the_seed_by_the_choice_of_images_alone(monkeypatch):
    monkeypatch.setattr(unlabeled, "SAMPLES", 16)
    images = (255 * cloud(60, 4).sigmoid()).to(torch.uint8).view(60, 1, 2, 2)

    def views(part, index, view):
        return part.float() + view * index[:, None, None, None]

    first, again, other = (measure(images, views, seed) for seed in (0, 0, 1))
    assert first == again
    same = {name for name in first if first[name] == other[name]}
    assert same - {"views_matched"} == {"effective_rank"}  # all views of these images match


def test_views_matched_by_hand_and_by_chance():
    first = torch.eye(4)
    assert views_matched(first, 3 * first) == 100
    assert views_matched(first, first[[1, 0, 2, 3]]) == 50
    assert views_matched(torch.ones(4, 2), torch.ones(4, 2)) <= 25  # one point matches by chance
    near = first + 0.1 * cloud(4, 4)
    assert views_matched(near, first) == views_matched(7 * near, 0.2 * first)
