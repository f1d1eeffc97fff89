import numpy as np
import pytest
import torch
from torch import nn

from fedssl.evaluate.features import Labelled, average, extract, pool_cases, units
from fedssl.util.errors import TrainingError, UserError


def bytes_of(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def test_extract_is_the_encoder_on_pixels_from_0_to_1_whatever_the_batch(monkeypatch):
    monkeypatch.setattr("fedssl.data.dataset.PIXELS_PER_PASS", 4 * 2 * 2)
    images = bytes_of(11, 3, 2, 2)
    features = extract(nn.Flatten(), images)
    assert features.dtype == torch.float32
    torch.testing.assert_close(features, images.flatten(1).float() / 255)


def test_extract_works_in_evaluation_mode_without_gradients_and_restores_each_mode():
    encoder = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.Dropout(0.5))
    encoder.train()
    encoder[3].eval()
    before = encoder[1].running_mean.clone()
    first = extract(encoder, bytes_of(8, 1, 2, 2))
    assert torch.equal(encoder[1].running_mean, before)
    assert not first.requires_grad
    assert [m.training for m in encoder] == [True, True, True, False]
    assert torch.equal(first, extract(encoder, bytes_of(8, 1, 2, 2)))


def test_extract_takes_the_encoders_own_precision_and_answers_in_float32():
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).double()
    assert extract(encoder, bytes_of(3, 1, 2, 2)).dtype == torch.float32


def test_features_that_are_not_finite_are_refused():
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    nn.init.constant_(encoder[1].weight, float("nan"))
    with pytest.raises(TrainingError, match="not finite"):
        extract(encoder, bytes_of(3, 1, 2, 2))


def test_cases_are_means_of_their_images_in_the_order_of_case_numbers():
    features = torch.tensor([[1.0, 0], [10, 2], [3, 4], [20, 6], [5, 8]])
    labels = torch.tensor([1, 0, 1, 0, 1])
    pooled, case_labels = pool_cases(features, labels, np.array([7, 2, 7, 2, 7]))
    assert pooled.tolist() == [[15, 4], [3, 4]]
    assert case_labels.tolist() == [0, 1]


def test_images_without_a_label_are_left_out_with_and_without_cases():
    features = torch.arange(8.0).view(4, 2)
    for cases, expected, classes in (
        (None, features[[0, 2]], [1, 1]),
        (np.array([0, 0, 0, 1]), features[[1]], [1]),
    ):
        pooled, labels = pool_cases(features, torch.tensor([1, -1, 1, -1]), cases)
        assert torch.equal(pooled, expected)
        assert labels.tolist() == classes


def test_a_case_with_two_labels_is_refused():
    with pytest.raises(UserError, match=r"^case 5: image 3 has another label.*$"):
        units(torch.tensor([0, 1, 2, 1]), np.array([4, 3, 5, 5]))


def test_average_passes_gradients_to_every_image_of_a_case():
    x = torch.ones(3, 1, requires_grad=True)
    average(x, np.array([2, 1])).sum().backward()
    assert x.grad.flatten().tolist() == [0.5, 0.5, 1.0]


def test_some_of_the_cases():
    groups, labels = units(torch.tensor([0, 1, 0, 2, 1]), np.array([0, 1, 0, 2, 1]))
    part = Labelled(torch.zeros(5, 1, 1, 1), groups, labels).take(np.array([2, 0]))
    assert [part.groups[k].tolist() for k in range(2)] == [[3], [0, 2]]
    assert part.labels.tolist() == [2, 0]
