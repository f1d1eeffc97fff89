from __future__ import annotations

import torch
from torch import nn

from fedssl.models.flat import Flat


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_parameters_gradients_and_buffers_are_views() -> None:
    net = module()
    flat = Flat(net)
    assert flat.parameters == 12 + 4 + 8 + 8 + 2
    assert len(flat.vector) == flat.parameters + 8  # running mean and variance
    x = torch.rand(5, 3)
    before = flat.vector.clone()
    flat.gradient.zero_()
    net(x).square().sum().backward()
    expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    torch.testing.assert_close(flat.gradient, torch.cat([g.flatten() for g in expected]))
    assert not torch.equal(flat.vector[flat.parameters :], before[flat.parameters :])
    flat.vector.copy_(torch.arange(len(before), dtype=torch.float32))
    assert net[0].weight[0, 1] == 1 and net[2].bias[1] == flat.parameters - 1
    assert net[1].running_mean[0] == flat.parameters


def test_named_reads_any_vector_of_the_same_layout() -> None:
    net = module()
    flat = Flat(net)
    vector = torch.arange(len(flat.vector), dtype=torch.float32)
    named = flat.named(vector)
    assert set(named) == {k for k in net.state_dict() if "num_batches" not in k}
    assert torch.equal(torch.cat([t.flatten() for t in named.values()]), vector)


def test_gradients_do_not_leak_between_backward_passes() -> None:
    net = nn.Linear(2, 1)
    flat = Flat(net)
    for _ in range(2):
        flat.gradient.zero_()
        net(torch.ones(1, 2)).sum().backward()
    torch.testing.assert_close(flat.gradient, torch.ones(3))
