from contextlib import nullcontext

import numpy as np
import pytest
import torch
from evaluation import data_of
from helpers import refused

from fedssl.config import Evaluate
from fedssl.data.dataset import Groups, Split
from fedssl.evaluate import linear
from fedssl.evaluate.per_client import PerClient, accuracies, deal_tests, summarize

MODES = ("matched", "iid", "folder", None)


def split(labels, clients=None):
    labels = torch.as_tensor(labels)
    images = torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8)
    return Split((images,), labels, None if clients is None else np.asarray(clients))


def by_class(train, *holdings):
    """Clients that hold so many training images of each class, taken in order."""
    labels, members, used = train.labels.numpy(), [], {}
    for holding in holdings:
        mine = []
        for c, count in enumerate(holding):
            at = used.get(c, 0)
            mine += np.flatnonzero(labels == c)[at : at + count].tolist()
            used[c] = at + count
        members.append(mine)
    sizes = [len(m) for m in members]
    return Groups(np.concatenate(members).astype(np.int64), np.cumsum([0, *sizes]))


def counts(dealt, test, classes):
    labels = test.labels.numpy()
    return [np.bincount(labels[dealt[k]], minlength=classes).tolist() for k in range(len(dealt))]


def dealing(mode, groups, train, test, classes=4, seed=0):
    settings = Evaluate(protocols=("per-client",), client_test=mode)
    return data_of(settings, train, test, classes, seed=seed, clients=groups)


def deal(*case, **options):
    return deal_tests(dealing(*case, **options))


TRAIN = split(np.arange(400) % 4)  # 100 of each class
TEST = split(np.arange(80) % 4)  # 20 of each class


def test_matched_gives_each_client_its_share_of_every_class():
    groups = by_class(TRAIN, (100, 0, 0, 10), (0, 50, 0, 10), (0, 50, 0, 20))
    dealt = deal("matched", groups, TRAIN, TEST)
    assert counts(dealt, TEST, 4) == [[20, 0, 0, 5], [0, 10, 0, 5], [0, 10, 0, 10]]
    # Nobody holds class 2; every other test image belongs to exactly one client.
    assert sorted(dealt.members.tolist()) == np.flatnonzero(np.arange(80) % 4 != 2).tolist()


def test_matched_rounds_up_or_down_and_by_the_seed():
    groups = by_class(TRAIN, (33, 0, 0, 0), (33, 0, 0, 0), (34, 0, 0, 0))
    seen = set()
    for seed in range(20):
        dealt = deal("matched", groups, TRAIN, TEST, seed=seed)
        sizes = tuple(dealt.sizes)
        assert sum(sizes) == 20 and set(sizes) <= {6, 7}
        seen.add(sizes)
    assert len(seen) > 1


def test_matched_with_more_clients_than_test_images_is_fair():
    groups = by_class(TRAIN, *[(1, 0, 0, 0)] * 100)
    total = sum(deal("matched", groups, TRAIN, TEST, seed=s).sizes for s in range(60))
    assert total.sum() == 60 * 20
    assert total.min() >= 1 and total.max() <= 30


def test_iid_is_even_and_random():
    groups = by_class(TRAIN, *[(10, 0, 0, 0)] * 7)
    dealt = deal("iid", groups, TRAIN, TEST)
    assert set(dealt.sizes) == {11, 12}
    assert sorted(dealt.members.tolist()) == list(range(80))
    assert min(len(set((dealt[k] % 4).tolist())) for k in range(7)) > 1


@pytest.mark.parametrize("mode", ["folder", None])
def test_folder_gives_each_client_its_own_folder(mode):
    # Folder 2 has no training image, folder 1 no test image.
    train = split([0, 1, 0, 1, 0, 1], clients=[3, 1, 3, 0, 1, 0])
    test = split([0, 1, 0, 1, 1], clients=[2, 3, 0, 3, 0])
    _, owners = np.unique(train.clients, return_inverse=True)
    groups = Groups.from_labels(owners, 3)
    dealt = deal(mode, groups, train, test, 2)
    assert [sorted(dealt[k].tolist()) for k in range(3)] == [[2, 4], [], [1, 3]]


def test_without_a_mode_clients_that_are_no_folders_are_matched():
    train = split([0, 0, 1, 1], clients=[0, 1, 0, 1])
    test = split([0, 0, 1, 1], clients=[0, 1, 0, 1])
    mixed = Groups(np.array([0, 1, 2, 3]), np.array([0, 2, 4]))
    halves = Groups(np.array([0, 2, 1, 3]), np.array([0, 1, 2, 4]))  # one folder, two clients
    assert counts(deal(None, mixed, train, test, 2), test, 2) == [[2, 0], [0, 2]]
    assert counts(deal(None, halves, train, test, 2), test, 2) == [[1, 0], [0, 1], [1, 1]]
    folders = Groups(np.array([0, 2, 1, 3]), np.array([0, 2, 4]))
    own = deal(None, folders, train, test, 2)
    assert [sorted(own[k].tolist()) for k in range(2)] == [[0, 2], [1, 3]]
    plain = deal(None, folders, train, split([0, 0, 1, 1]), 2)
    assert counts(plain, test, 2) == [[1, 1], [1, 1]]


@pytest.mark.parametrize("mode", MODES)
def test_the_same_seed_deals_the_same_and_unlabelled_images_go_to_nobody(mode):
    train = split(np.arange(40) % 2, clients=np.arange(40) % 4)
    test = split(np.where(np.arange(40) < 12, -1, np.arange(40) % 2), clients=np.arange(40) % 4)
    groups = Groups.from_labels(np.arange(40) % 4, 4)
    first, again = (deal(mode, groups, train, test, 2, seed=1) for _ in range(2))
    assert np.array_equal(first.members, again.members)
    assert np.array_equal(first.offsets, again.offsets)
    assert sorted(first.members.tolist()) == list(range(12, 40))
    if mode in ("matched", "iid"):
        other = deal(mode, groups, train, test, 2, seed=2)
        assert not np.array_equal(first.members, other.members)


def test_training_images_without_a_label_do_not_count():
    train = split([0, -1, -1, -1, 0, -1])
    groups = Groups(np.arange(6), np.array([0, 4, 6]))
    assert deal("matched", groups, train, split([0] * 10), 1).sizes.tolist() == [5, 5]


TESTED = "no client would get a labelled test image"
BY_CLASS = by_class(TRAIN, (100, 0, 0, 0), (0, 100, 0, 0))
FOLDERS = split(np.arange(400) % 4, clients=np.arange(400) // 200)
TESTS = split(np.arange(80) % 4, clients=np.arange(80) // 40)
ELSEWHERE = split(np.arange(80) % 4, clients=np.full(80, 2))
HALVES, WRONG = (Groups(np.arange(400), np.array([0, at, 400])) for at in (200, 100))
SPARSE = split(np.where(np.arange(400) < 200, -1, np.arange(400) % 4))
NOBODY = Groups(np.arange(200), np.array([0, 100, 200]))


@pytest.mark.parametrize(
    ("mode", "groups", "train", "test", "problem"),
    [
        *((mode, BY_CLASS, TRAIN, TEST, None) for mode in ("matched", "iid", None)),
        ("folder", HALVES, FOLDERS, TESTS, None),
        ("iid", NOBODY, SPARSE, TEST, None),
        ("folder", HALVES, FOLDERS, TEST, "the test split has no client folders"),
        ("folder", HALVES, TRAIN, TESTS, "not the client folders of the training split"),
        ("folder", WRONG, FOLDERS, TESTS, "not the client folders of the training split"),
        *((mode, HALVES, FOLDERS, ELSEWHERE, TESTED) for mode in ("folder", None)),
        ("matched", NOBODY, SPARSE, TEST, "no client holds a labelled training image"),
        (None, BY_CLASS, TRAIN, split(np.full(10, 3)), TESTED),
    ],
)
def test_what_cannot_be_dealt_is_refused(mode, groups, train, test, problem):
    expected = refused("evaluate.client_test", says=problem) if problem else nullcontext()
    with expected:
        PerClient("per-client").check(dealing(mode, groups, train, test))


def blobs(labels, classes, seed):
    generator = torch.Generator().manual_seed(seed)
    features = torch.eye(classes)[labels.clamp(min=0)]
    return features + 0.1 * torch.randn(features.shape, generator=generator)


def test_scores_are_those_of_one_probe_on_each_clients_test_images():
    labels, truth = torch.arange(60) % 3, torch.arange(30) % 3
    features, queries = blobs(labels, 3, 0), blobs(truth, 3, 1)
    queries[truth == 2] = -queries[truth == 2]  # class 2 cannot be recognized
    tests = Groups(np.array([0, 3, 6, 1, 2, 5, 8]), np.array([0, 3, 3, 5, 7]))
    result = accuracies(linear.fit(features, labels, 3), queries, truth, tests)
    np.testing.assert_array_equal(result, [100.0, np.nan, 50.0, 0.0])


def test_summary_is_over_the_clients_that_have_tests():
    result = summarize("x", np.array([80.0, np.nan, 60.0, 100.0]))
    assert result == pytest.approx({"x_top1": 80, "x_worst": 60, "x_spread": (800 / 3) ** 0.5})
    assert summarize("x", np.array([50.0]))["x_spread"] == 0.0
