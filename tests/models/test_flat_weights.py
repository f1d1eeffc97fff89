from __future__ import annotations

import torch
from torch import nn

from fedssl.models.flat_weights import FlatWeights, positions


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_parameters_gradients_and_buffers_are_views() -> None:
    net = module()
    flat = FlatWeights(net)
    assert flat.parameter_count == 12 + 4 + 8 + 8 + 2
    assert len(flat.vector) == flat.parameter_count + 8  # running mean and variance
    x = torch.rand(5, 3)
    before = flat.vector.clone()
    flat.gradient.zero_()
    net(x).square().sum().backward()
    expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    torch.testing.assert_close(flat.gradient, torch.cat([g.flatten() for g in expected]))
    assert not torch.equal(flat.vector[flat.parameter_count :], before[flat.parameter_count :])
    flat.vector.copy_(torch.arange(len(before), dtype=torch.float32))
    assert net[0].weight[0, 1] == 1 and net[2].bias[1] == flat.parameter_count - 1
    assert net[1].running_mean[0] == flat.parameter_count


def test_named_reads_any_vector_of_the_same_layout() -> None:
    net = module()
    flat = FlatWeights(net)
    vector = torch.arange(len(flat.vector), dtype=torch.float32)
    named = flat.named(vector)
    assert set(named) == {k for k in net.state_dict() if "num_batches" not in k}
    assert torch.equal(torch.cat([t.flatten() for t in named.values()]), vector)


def test_gradients_do_not_leak_between_backward_passes() -> None:
    net = nn.Linear(2, 1)
    flat = FlatWeights(net)
    for _ in range(2):
        flat.gradient.zero_()
        net(torch.ones(1, 2)).sum().backward()
    torch.testing.assert_close(flat.gradient, torch.ones(3))


def test_spans_lie_end_to_end_and_name_their_owner() -> None:
    net = module()
    flat = FlatWeights(net)
    assert [s.start for s in flat.spans[1:]] == [s.stop for s in flat.spans[:-1]]
    assert flat.spans[0].start == 0 and flat.spans[-1].stop == len(flat.vector)
    owners = dict(net.named_modules())
    for span in flat.spans:
        prefix, _, last = span.name.rpartition(".")
        assert span.owner is owners[prefix]
        tensor = getattr(span.owner, last)
        assert tensor.shape == span.shape and tensor.numel() == span.stop - span.start
        assert tensor.data_ptr() == flat.vector[span.start :].data_ptr()
        assert isinstance(tensor, nn.Parameter) == (span.stop <= flat.parameter_count)
    assert torch.equal(flat.params, flat.vector[: flat.parameter_count])


def test_of_finds_layers_by_type_with_their_statistics() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.GroupNorm(1, 2), nn.Linear(2, 2))
    flat = FlatWeights(net)
    assert [s.name for s in flat.of(nn.Conv2d)] == ["0.weight", "0.bias"]
    norms = flat.of(nn.BatchNorm2d, nn.GroupNorm)
    assert [s.name for s in norms] == [
        "1.weight", "1.bias", "2.weight", "2.bias", "1.running_mean", "1.running_var"
    ]  # fmt: skip
    assert flat.of(nn.LayerNorm) == []


def test_positions_are_the_places_in_the_vector() -> None:
    net = module()
    flat = FlatWeights(net)
    places = positions(flat.of(nn.BatchNorm1d))
    flat.vector.zero_()
    flat.vector[places] = 1
    assert all(bool((t == 1).all()) for t in net[1].state_dict().values() if t.is_floating_point())
    assert not net[0].weight.any() and not net[2].bias.any()
    assert len(places) == 4 * 4 and positions([]).tolist() == []
