from __future__ import annotations

import pytest
import torch

from fedssl.util import trees


def test_mean_meets_by_name_whatever_the_order() -> None:
    a = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor(1.0)}
    b = {"y": torch.tensor(5.0), "x": torch.tensor([3.0, 6.0])}
    mean, weight = trees.mean([(1, a), (3, b)])
    assert weight == 4
    assert mean["x"].tolist() == [2.5, 5.0] and float(mean["y"]) == 4.0
    assert a["x"].tolist() == [1.0, 2.0], "replies are left as they were"


@pytest.mark.parametrize(
    "other",
    [{"x": torch.zeros(3)}, {"x": torch.zeros(())}, {"y": torch.zeros(2)}, torch.zeros(2), {}],
)
def test_replies_of_other_shape_or_name_are_refused(other: trees.Tree) -> None:
    with pytest.raises(TypeError, match="differ"):
        trees.mean([(1, {"x": torch.zeros(2)}), (1, other)])


def test_flatten_and_back() -> None:
    tree = {"a": {"b": torch.ones(2), "c": {"d": torch.zeros(1)}}, "e": torch.ones(3)}
    flat = trees.flatten(tree)
    assert set(flat) == {"a/b", "a/c/d", "e"}
    back = trees.flatten(trees.unflatten(flat))
    assert all(torch.equal(flat[k], back[k]) for k in flat)
    assert trees.count_bytes(tree) == 4 * 6


def test_the_mean_of_nothing_is_an_error() -> None:
    with pytest.raises(trees.NothingToAverage):
        trees.mean([])


def test_scaled_trees_have_the_same_names_and_new_leaves() -> None:
    tree = {"b": torch.ones(2), "a": {"d": torch.tensor(3), "c": torch.ones(1).double()}, "e": {}}
    half = trees.flatten(trees.scale(tree, 0.5))
    assert {name: leaf.tolist() for name, leaf in half.items()} == {
        "b": [0.5, 0.5], "a/d": 1.5, "a/c": [0.5],
    }  # fmt: skip
    assert half["a/c"].dtype == torch.float64 and tree["b"].tolist() == [1, 1]
    assert trees.scale({}, 0.5) == {}
