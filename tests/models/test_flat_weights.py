from __future__ import annotations

import torch
from torch import nn

from fedssl.models.flat_weights import FlatWeights


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_parameters_gradients_and_buffers_are_views() -> None:
    net = module()
    flat = FlatWeights(net)
    assert flat.parameter_count == 12 + 4 + 8 + 8 + 2
    assert len(flat.vector) == flat.parameter_count + 8  # running mean and variance
    x = torch.rand(5, 3)
    before = flat.vector.clone()
    expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    for _ in range(2):  # nothing leaks into the second pass
        flat.gradient.zero_()
        net(x).square().sum().backward()
        torch.testing.assert_close(flat.gradient, torch.cat([g.flatten() for g in expected]))
    assert not torch.equal(flat.vector[flat.parameter_count :], before[flat.parameter_count :])


def test_spans_lie_end_to_end_and_name_their_owner() -> None:
    net = module()
    flat = FlatWeights(net)
    assert [s.start for s in flat.spans[1:]] == [s.stop for s in flat.spans[:-1]]
    assert flat.spans[0].start == 0 and flat.spans[-1].stop == len(flat.vector)
    owners = dict(net.named_modules())
    for span in flat.spans:
        assert span.owner is owners[span.name.rpartition(".")[0]]
        assert span.tensor.shape == span.shape and span.tensor.numel() == span.stop - span.start
        assert span.tensor.data_ptr() == flat.vector[span.start :].data_ptr()
        assert isinstance(span.tensor, nn.Parameter) == (span.stop <= flat.parameter_count)
    named = flat.named(torch.arange(len(flat.vector)))  # any vector of the same layout
    assert set(named) == {k for k in net.state_dict() if "num_batches" not in k}
    assert torch.cat([t.flatten() for t in named.values()]).tolist() == [*range(len(flat.vector))]


def test_of_finds_layers_by_type_with_their_statistics() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.GroupNorm(1, 2), nn.Linear(2, 2))
    flat = FlatWeights(net)
    assert [s.name for s in flat.of(nn.Conv2d)] == ["0.weight", "0.bias"]
    norms = flat.of(nn.BatchNorm2d, nn.GroupNorm)
    assert [s.name for s in norms] == [
        "1.weight", "1.bias", "2.weight", "2.bias", "1.running_mean", "1.running_var"
    ]  # fmt: skip
    assert flat.of(nn.LayerNorm) == []
