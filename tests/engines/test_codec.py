"""Trees through bytes."""

from __future__ import annotations

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
    with pytest.raises(MalformedError, match="type float16, expected float32"):
        unpack_like(packed, tree)
    with pytest.raises(MalformedError, match="not finite"):  # beyond float16's range
        unpack_like(
            pack({"change": torch.full((5,), 1e6), "loss": tree["loss"]}, ("change",)),
            tree,
            ("change",),
        )


def test_the_largest_messages_of_the_papers() -> None:
    """d = 4096 moments: 64 MB in float32; and a network of 36 million numbers."""
    for tree in ({"fg": torch.rand(4096, 4096)}, torch.rand(36_000_000)):
        there = flatten(unpack(pack(tree)))
        for name, tensor in flatten(tree).items():
            assert torch.equal(there[name], tensor)


@pytest.mark.parametrize("length", [0, 7, 9, 16])
def test_bytes_must_be_as_many_as_the_shape_says(length: int) -> None:
    with pytest.raises(MalformedError, match="truncated" if length < 8 else "oversized"):
        unpack({"a": Packed("float32", (2,), bytes(length))})
