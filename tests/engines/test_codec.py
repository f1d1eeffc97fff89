"""Trees through bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedssl.engines.remote.codec import MalformedError, Packed, pack, unpack, unpack_like
from fedssl.util.trees import flatten

TYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
]
shapes = st.lists(st.integers(0, 4), max_size=3)
tensors = st.builds(
    lambda shape, kind, seed: (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(50).to(kind)
    ),
    shapes,
    st.sampled_from(TYPES),
    st.integers(0, 99),
)
names = st.text("abc", min_size=1, max_size=3)
trees = st.recursive(
    tensors, lambda child: st.dictionaries(names, child, min_size=1, max_size=3), max_leaves=6
)


@given(trees)
def test_what_arrives_is_what_was_sent(tree) -> None:  # type: ignore[no-untyped-def]
    there = flatten(unpack(pack(tree)))
    here = flatten(tree)
    assert there.keys() == here.keys()
    for name, tensor in here.items():
        assert there[name].dtype == tensor.dtype and there[name].shape == tensor.shape
        assert torch.equal(there[name], tensor)


def test_not_contiguous_and_with_a_gradient() -> None:
    tensor = torch.arange(6.0).view(2, 3).t().requires_grad_()
    there = unpack(pack(tensor))
    assert isinstance(there, torch.Tensor)
    assert torch.equal(there, tensor.detach()) and not there.requires_grad


def test_only_the_named_leaf_travels_as_float16() -> None:
    tree = {"change": torch.linspace(-1, 1, 5), "loss": torch.tensor(0.1)}
    packed = pack(tree, half=("change",))
    assert packed["change"].dtype == "float16" and packed["loss"].dtype == "float32"
    back = unpack_like(packed, tree, half=("change",))
    assert back["change"].dtype == torch.float32  # type: ignore[union-attr]
    torch.testing.assert_close(back["change"], tree["change"], rtol=2**-11, atol=0)
    assert torch.equal(back["loss"], tree["loss"])  # type: ignore[arg-type]
    tree["change"] += 1e6
    with pytest.raises(MalformedError, match="not finite"):  # beyond float16's range
        unpack_like(pack(tree, half=("change",)), tree, half=("change",))


def test_the_largest_messages_of_the_papers() -> None:
    """d = 4096 moments: 64 MB in float32; and a network of 36 million numbers."""
    for tree in ({"fg": torch.rand(4096, 4096)}, torch.rand(36_000_000)):
        there = flatten(unpack(pack(tree)))
        for name, tensor in flatten(tree).items():
            assert torch.equal(there[name], tensor)


def test_fewer_rows_are_taken_only_of_tasks_that_vary() -> None:
    like, fewer = {"x": torch.zeros(5, 2)}, pack({"x": torch.ones(3, 2)})
    assert unpack_like(fewer, like, varying=True)["x"].shape == (3, 2)  # type: ignore[union-attr]
    with pytest.raises(MalformedError, match=r"shape \[3, 2\], expected \[5, 2\]"):
        unpack_like(fewer, like)


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        *((Packed("float32", (2,), bytes(length)), "truncated") for length in (0, 7)),
        *((Packed("float32", (2,), bytes(length)), "oversized") for length in (9, 16)),
        (Packed("complex64", (1,), bytes(8)), "unknown type"),
        (Packed("float32", (-1,), bytes(4)), "shape"),
    ],
)
def test_what_is_no_tensor_is_refused(packed: Packed, message: str) -> None:
    with pytest.raises(MalformedError, match=message):
        unpack({"a": packed})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"b": torch.zeros(2)}, "holds b, expected a"),
        ({"a": torch.zeros(2).half()}, "type float16, expected float32"),
    ],
)
def test_another_tensor_than_expected_is_refused(tree: Any, message: str) -> None:
    with pytest.raises(MalformedError, match=message):
        unpack_like(pack(tree), {"a": torch.zeros(2)})
