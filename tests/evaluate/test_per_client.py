import numpy as np
import pytest
import torch
from evaluation import data_of

from fedssl.config import Evaluate
from fedssl.data.dataset import Groups, Split
from fedssl.evaluate import linear
from fedssl.evaluate.per_client import PerClient, accuracies, deal, summary
from fedssl.util.errors import UserError

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


TRAIN = split(np.arange(400) % 4)  # 100 of each class
TEST = split(np.arange(80) % 4)  # 20 of each class


def test_matched_gives_each_client_its_share_of_every_class():
    groups = by_class(TRAIN, (100, 0, 0, 10), (0, 50, 0, 10), (0, 50, 0, 20))
    dealt = deal("matched", groups, TRAIN, TEST, 4, seed=0)
    assert counts(dealt, TEST, 4) == [[20, 0, 0, 5], [0, 10, 0, 5], [0, 10, 0, 10]]
    # Nobody holds class 2; every other test image belongs to exactly one client.
    assert sorted(dealt.members.tolist()) == np.flatnonzero(np.arange(80) % 4 != 2).tolist()


def test_matched_rounds_up_or_down_and_by_the_seed():
    groups = by_class(TRAIN, (33, 0, 0, 0), (33, 0, 0, 0), (34, 0, 0, 0))
    seen = set()
    for seed in range(20):
        dealt = deal("matched", groups, TRAIN, TEST, 4, seed)
        sizes = tuple(dealt.sizes)
        assert sum(sizes) == 20 and set(sizes) <= {6, 7}
        seen.add(sizes)
    assert len(seen) > 1


def test_matched_with_more_clients_than_test_images_is_fair():
    groups = by_class(TRAIN, *[(1, 0, 0, 0)] * 100)
    total = sum(deal("matched", groups, TRAIN, TEST, 4, s).sizes for s in range(60))
    assert total.sum() == 60 * 20
    assert total.min() >= 1 and total.max() <= 30


def test_iid_is_even_and_random():
    groups = by_class(TRAIN, *[(10, 0, 0, 0)] * 7)
    dealt = deal("iid", groups, TRAIN, TEST, 4, seed=0)
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
    dealt = deal(mode, groups, train, test, 2, seed=0)
    assert [sorted(dealt[k].tolist()) for k in range(3)] == [[2, 4], [], [1, 3]]


def test_without_a_mode_clients_that_are_no_folders_are_matched():
    train = split([0, 0, 1, 1], clients=[0, 1, 0, 1])
    test = split([0, 0, 1, 1], clients=[0, 1, 0, 1])
    mixed = Groups(np.array([0, 1, 2, 3]), np.array([0, 2, 4]))
    halves = Groups(np.array([0, 2, 1, 3]), np.array([0, 1, 2, 4]))  # one folder, two clients
    assert counts(deal(None, mixed, train, test, 2, 0), test, 2) == [[2, 0], [0, 2]]
    assert counts(deal(None, halves, train, test, 2, 0), test, 2) == [[1, 0], [0, 1], [1, 1]]
    folders = Groups(np.array([0, 2, 1, 3]), np.array([0, 2, 4]))
    own = deal(None, folders, train, test, 2, 0)
    assert [sorted(own[k].tolist()) for k in range(2)] == [[0, 2], [1, 3]]
    plain = deal(None, folders, train, split([0, 0, 1, 1]), 2, 0)
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
    assert deal("matched", groups, train, split([0] * 10), 1, 0).sizes.tolist() == [5, 5]


def check(mode, groups, train, test):
    settings = Evaluate(protocols=("per-client",), client_test=mode)
    PerClient("per-client").check(data_of(settings, train, test, 4, clients=groups))


def refused(mode, groups, train, test):
    """The key and the problem."""
    with pytest.raises(UserError) as caught:
        check(mode, groups, train, test)
    return caught.value.key, caught.value.problem


def test_what_cannot_be_dealt_is_refused():
    groups = by_class(TRAIN, (100, 0, 0, 0), (0, 100, 0, 0))
    key, no_test = "evaluate.protocols", "the test split has no labels"
    for mode in MODES:
        assert refused(mode, groups, TRAIN, None) == (key, "there is no test split")
        for test in (split(np.full(80, -1)), Split(TEST.images)):
            assert refused(mode, groups, TRAIN, test) == (key, no_test)
    for mode in ("matched", "iid", None):
        check(mode, groups, TRAIN, TEST)
        for train in (Split(TRAIN.images), split(np.full(400, -1))):
            problem = "the training split needs labels of at least two classes"
            assert refused(mode, groups, train, TEST) == (key, problem)


def test_folder_needs_client_folders_on_both_sides():
    groups = Groups(np.arange(400), np.array([0, 200, 400]))
    train = split(np.arange(400) % 4, clients=np.arange(400) // 200)
    test = split(np.arange(80) % 4, clients=np.arange(80) // 40)
    key = "evaluate.client_test"
    check("folder", groups, train, test)
    assert refused("folder", groups, train, TEST) == (key, "the test split has no client folders")
    wrong = Groups(np.arange(400), np.array([0, 100, 400]))
    for clients, side in ((groups, TRAIN), (wrong, train)):
        problem = "the clients are not the client folders of the training split"
        assert refused("folder", clients, side, test) == (key, problem)
    elsewhere = split(np.arange(80) % 4, clients=np.full(80, 2))
    for mode in ("folder", None):
        problem = "no client would get a labelled test image"
        assert refused(mode, groups, train, elsewhere) == (key, problem)


def test_matched_needs_clients_with_labels_that_are_tested():
    train = split(np.where(np.arange(400) < 200, -1, np.arange(400) % 4))
    unlabelled = Groups(np.arange(200), np.array([0, 100, 200]))
    check("iid", unlabelled, train, TEST)
    problem = "no client holds a labelled training image"
    assert refused("matched", unlabelled, train, TEST) == ("evaluate.client_test", problem)
    one_class = by_class(TRAIN, (50, 0, 0, 0), (50, 0, 0, 0))
    _, problem = refused(None, one_class, TRAIN, split(np.full(10, 3)))
    assert problem == "no client would get a labelled test image"


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
    result = summary("global", np.array([80.0, np.nan, 60.0, 100.0]))
    assert result == pytest.approx(
        {
            "per-client_global_top1": 80.0,
            "per-client_global_worst": 60.0,
            "per-client_global_spread": (800 / 3) ** 0.5,
        }
    )
    assert summary("own", np.array([50.0]))["per-client_own_spread"] == 0.0
