"""Weights of other programs: the same embeddings as there, or a refusal in one line."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from helpers import refused
from safetensors.torch import save_file
from torch import Tensor, nn

from fedssl import config
from fedssl.config import Encoder
from fedssl.models.encoders import encoder
from fedssl.models.network import Heads, Network, Tower, build
from fedssl.models.published import load_published

SIZE = 96
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
VIT = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}


def shake(module: nn.Module) -> nn.Module:
    """Give every tensor other numbers than those of a new network."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=generator) - 0.5
                tensor.mul_(1 + noise / 5).add_(noise / 20 * (tensor.dim() < 2))
    return module.eval()


def start(init: Path | str, name: str, size: int = SIZE, **keys: Any) -> Network:
    settings = Encoder(name, **{"norm": "frozen", "init": str(init), **keys})
    return build(settings, (3,), size, lambda *_: Heads(nn.Identity()), 0)


@torch.no_grad()
def embed(network: Network, images: Tensor) -> Tensor:
    tower = network.towers[0]
    assert isinstance(tower, Tower)
    return tower.encoder.eval()(images)


def images(size: int = SIZE) -> Tensor:
    return torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(2))


def whole(tensors: dict[str, Tensor]) -> Any:
    return tensors


def nested(tensors: dict[str, Tensor]) -> Any:
    """A training checkpoint: an optimizer's tensors, prefixes, a head."""
    model = {f"module.backbone.{name}": tensor for name, tensor in tensors.items()}
    model["module.head.weight"] = torch.zeros(3, 4)
    return {"epoch": 3, "model": model, "optimizer": {"state": {0: {"m": torch.zeros(5)}}}}


def lightning(tensors: dict[str, Tensor]) -> Any:
    """lightly's: a momentum network follows the backbone, and both have heads."""
    names = {f"backbone.{n}": t for n, t in tensors.items()}
    names |= {f"backbone_momentum.{n}": t + 1 for n, t in tensors.items()}
    names["projection_head.layers.0.weight"] = torch.zeros(2, 2)
    return {"state_dict": names, "pytorch-lightning_version": "2.0"}


@pytest.mark.parametrize("wrap", [whole, nested, lightning])
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_torchvisions_resnets_give_the_same_features(
    name: str, wrap: Callable[[dict[str, Tensor]], Any], tmp_path: Path
) -> None:
    theirs = shake(torchvision.models.get_model(name))
    torch.save(wrap(theirs.state_dict()), tmp_path / "weights.pth")
    theirs.fc = nn.Identity()
    network = start(tmp_path / "weights.pth", name)
    with torch.no_grad():
        expected = theirs(images())
    torch.testing.assert_close(embed(network, images()), expected, rtol=1e-5, atol=1e-5)
    count = sum("num_batches" not in key for key in theirs.state_dict())
    assert f"{count} of {count} tensors loaded" in network.start
    assert not network.has_batch_norm


def test_a_sequence_of_a_resnets_parts_is_recognized(tmp_path: Path) -> None:
    theirs = shake(torchvision.models.resnet18())
    parts = nn.Sequential(*list(theirs.children())[:-1])
    torch.save({"state_dict": nn.ModuleDict({"backbone": parts}).state_dict()}, tmp_path / "a.ckpt")
    for name in ("resnet18", "timm/resnet18"):
        network = start(tmp_path / "a.ckpt", name)
        with torch.no_grad():
            expected = parts(images()).flatten(1)
        torch.testing.assert_close(embed(network, images()), expected, rtol=1e-5, atol=1e-5)


def test_torchvisions_transformer_becomes_timms(tmp_path: Path) -> None:
    theirs = torchvision.models.VisionTransformer(32, 16, 2, 3, 192, 768, num_classes=7)
    shake(theirs)
    torch.save(theirs.state_dict(), tmp_path / "vit.pth")
    theirs.heads = nn.Identity()
    network = small_vit(tmp_path / "vit.pth", depth=2)
    with torch.no_grad():
        expected = theirs(images(32))
    torch.testing.assert_close(embed(network, images(32)), expected, rtol=1e-4, atol=1e-4)


def small_vit(init: Path, depth: int) -> Network:
    """A ViT-Tiny of timm's with fewer layers, which has no name of its own."""
    name = "timm/vit_tiny_patch16_224"
    network = build(Encoder(name), (3,), 32, lambda *_: Heads(nn.Identity()), 0)
    tower = network.towers[0]
    assert isinstance(tower, Tower)
    del tower.encoder.body.blocks[depth:]
    from fedssl.models.checkpoints import load_checkpoint

    network.start = load_checkpoint(tower.encoder, init, str(init))
    return network


def hugging_face(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    if kind == "resnet":
        settings = transformers.ResNetConfig(layer_type="basic", depths=[2, 2, 2, 2])
        settings.hidden_sizes, settings.embedding_size = [64, 128, 256, 512], 64
        return transformers.ResNetModel(settings)
    if kind == "vit":
        settings = transformers.ViTConfig(**VIT, image_size=32, patch_size=16, num_hidden_layers=2)
        settings.layer_norm_eps = 1e-6
        return transformers.ViTModel(settings)
    size = {"hidden_size": 384, "num_attention_heads": 6, "image_size": 28, "patch_size": 14}
    if kind == "dinov2":
        return transformers.Dinov2Model(transformers.Dinov2Config(**size))
    registers = transformers.Dinov2WithRegistersConfig(**size, num_register_tokens=4)
    return transformers.Dinov2WithRegistersModel(registers)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kind", ["resnet", "vit", "dinov2", "registers"])
def test_hugging_faces_models_give_the_same_features(kind: str, file: str, tmp_path: Path) -> None:
    theirs = shake(hugging_face(kind))
    theirs.save_pretrained(tmp_path)
    if file.endswith("bin"):
        from safetensors.torch import load_file

        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / file)
        (tmp_path / "model.safetensors").unlink()
    size = {"resnet": SIZE, "vit": 32}.get(kind, 28)
    with torch.no_grad():
        out = theirs(images(size))
    if kind == "resnet":
        network, expected = start(tmp_path, "resnet18"), out.pooler_output.flatten(1)
    elif kind == "vit":
        network, expected = small_vit(tmp_path, depth=2), out.last_hidden_state[:, 0]
    else:
        name = {"dinov2": "", "registers": "_reg4"}[kind]
        network = start(tmp_path, f"timm/vit_small_patch14{name}_dinov2", 28)
        expected = out.last_hidden_state[:, 0]
    torch.testing.assert_close(embed(network, images(size)), expected, rtol=1e-3, atol=1e-3)
    assert "Hugging Face's" in network.start


def test_positions_are_resized_to_the_images(tmp_path: Path) -> None:
    theirs = shake(timm.create_model("vit_tiny_patch16_224", img_size=64))
    torch.save(theirs.state_dict(), tmp_path / "vit.pth")
    network = start(tmp_path / "vit.pth", "timm/vit_tiny_patch16_224", 32)
    resized = timm.create_model(
        "vit_tiny_patch16_224",
        pretrained=True,
        img_size=32,
        num_classes=0,
        pretrained_cfg_overlay={"file": str(tmp_path / "vit.pth")},
    )
    with torch.no_grad():
        torch.testing.assert_close(embed(network, images(32)), resized.eval()(images(32)))


def resnet_file(tmp_path: Path, name: str = "resnet18") -> Path:
    torch.save(torchvision.models.get_model(name).state_dict(), tmp_path / "resnet.pth")
    return tmp_path / "resnet.pth"


@pytest.mark.parametrize(
    ("name", "file", "size", "norm", "says"),
    [
        ("resnet18", "resnet34", SIZE, "frozen", "not in the encoder: layer1.2"),
        ("resnet50", "resnet18", SIZE, "frozen", "missing: layer1.0.conv3"),
        ("resnet18", "resnet18", 32, "frozen", "conv1.weight has the shape (64, 3, 7, 7) in place"),
        ("resnet18", "resnet18", SIZE, "group", "Use encoder.norm=frozen or batch."),
        ("timm/vit_tiny_patch16_224", "resnet18", 32, "frozen", "0 of the encoder's 150 tensors"),
    ],
)
def test_a_file_of_another_network_is_refused(
    name: str, file: str, size: int, norm: str, says: str, tmp_path: Path
) -> None:
    with refused("encoder.init", says=says):
        start(resnet_file(tmp_path, file), name, size, norm=norm)


class Stranger:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code of a stranger",))


def test_no_code_of_a_file_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"state_dict": {}, "callback": Stranger()}, tmp_path / "a.ckpt")
    (tmp_path / "b.ckpt").write_bytes(pickle.dumps(Stranger()))
    for name in ("a.ckpt", "b.ckpt"):
        with refused("encoder.init", says="could run code of strangers"):
            start(tmp_path / name, "resnet18")
    assert "stranger" not in capsys.readouterr().out
    (tmp_path / "c.pth").write_bytes(b"no weights")
    with refused("encoder.init"):
        start(tmp_path / "c.pth", "resnet18")
    with refused("encoder.init", says="no such file"):
        start(tmp_path / "d.pth", "resnet18")


def test_images_are_normalized_inside_of_the_encoder() -> None:
    mean, std = IMAGENET
    settings = Encoder("resnet18", norm="frozen", mean=mean, std=std)
    plain = Encoder("resnet18", norm="frozen")
    ours, bare = (encoder(each, 3, SIZE).eval() for each in (settings, plain))
    bare.load_state_dict(ours.state_dict(), strict=True)  # it has no further state
    normalize = torchvision.transforms.Normalize(mean, std)
    assert torch.equal(ours(images()), bare(normalize(images())))
    grey = encoder(settings, 1, SIZE).eval()
    grey.load_state_dict(ours.state_dict(), strict=True)
    assert torch.equal(grey(images()[:, :1]), ours(images()[:, :1].repeat(1, 3, 1, 1)))
    with refused("encoder.mean", says="2 channels"):
        encoder(settings, 2, SIZE)


def publish(cache: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Put weights of a timm model into a cache like the Hugging Face hub's."""
    theirs = shake(timm.create_model(name))
    known = timm.get_pretrained_cfg(name)
    assert known is not None
    folder = cache / f"models--{known.hf_hub_id.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    save_file(theirs.state_dict(), folder / "snapshots" / ("0" * 40) / "model.safetensors")
    import huggingface_hub.constants
    import huggingface_hub.file_download

    for module in (huggingface_hub.constants, huggingface_hub.file_download):
        if hasattr(module, "HF_HUB_CACHE"):
            monkeypatch.setattr(module, "HF_HUB_CACHE", str(cache))
    theirs.reset_classifier(0)
    return theirs


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "mobilenetv3_small_050"])
def test_published_weights_come_from_the_hubs_cache(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = publish(tmp_path, name, monkeypatch)
    size = 224
    settings = config.resolve({}, [f"encoder.name=timm/{name}", "encoder.pretrained=true"])
    known = timm.data.resolve_model_data_config(theirs)
    assert settings.encoder.norm == "frozen" and settings.data.size == known["input_size"][-1]
    assert (settings.encoder.mean, settings.encoder.std) == (known["mean"], known["std"])
    assert settings.data.interpolation == known["interpolation"] == "bicubic"
    network = build(settings.encoder, (1,), size, lambda *_: Heads(nn.Identity()), 0)
    assert network.start.startswith("encoder.pretrained=true: ")
    normalize = torchvision.transforms.Normalize(known["mean"], known["std"])
    grey = images(size)[:, :1]
    with torch.no_grad():
        expected = theirs(normalize(grey.repeat(1, 3, 1, 1)))
    torch.testing.assert_close(embed(network, grey), expected, rtol=1e-4, atol=1e-4)


def test_published_weights_that_are_not_there_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    tried: list[str] = []

    def fail(self: object, address: str, **options: Any) -> None:
        tried.append(address)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "get_session", lambda: type("S", (), {"head": fail})())
    publish(tmp_path, "resnet10t", monkeypatch)
    body = encoder(Encoder("timm/resnet18", norm="frozen"), 3, 32)
    with refused("encoder.pretrained", says="cannot be downloaded (no network)"):
        load_published(body)  # type: ignore[arg-type]
    assert len(tried) == 1


def test_a_note_says_the_preprocessing_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "image_mean": [0.1, 0.2, 0.3],
                "image_std": [0.4, 0.5, 0.6],
                "resample": 3,
                "size": {"shortest_edge": 256},
                "crop_size": {"height": 224, "width": 224},
            }
        )
    )
    words = ["encoder.name=resnet18", f"encoder.init={tmp_path}"]
    found = config.resolve({}, words)
    assert (found.encoder.mean, found.encoder.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert found.data.size == 224 and found.encoder.norm == "frozen"
    assert found.data.interpolation == "bicubic"
    own = config.resolve({}, [*words, "encoder.mean=0.5", "encoder.std=0.25", "data.size=96"])
    assert (own.encoder.mean, own.encoder.std, own.data.size) == ((0.5,), (0.25,), 96)
    found = config.resolve({}, ["encoder.name=resnet18", f"encoder.init={resnet_file(tmp_path)}"])
    assert (found.encoder.mean, found.encoder.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    (tmp_path / "preprocessor_config.json").unlink()
    found = config.resolve({}, ["encoder.name=resnet18", f"encoder.init={resnet_file(tmp_path)}"])
    assert (found.encoder.mean, found.encoder.std) == IMAGENET


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("encoder.pretrained=true",), "encoder.pretrained"),
        (
            ("encoder.name=timm/resnet18", "encoder.pretrained=true", "encoder.init=a"),
            "encoder.pretrained",
        ),
        (("encoder.mean=0.5,0.5,0.5", "encoder.std=0.5"), "encoder.mean"),
        (("encoder.mean=0.5",), "encoder.mean"),
        (("encoder.mean=0.5", "encoder.std=0"), "encoder.std"),
    ],
)
def test_keys_that_contradict_each_other(words: tuple[str, ...], key: str) -> None:
    with refused(key):
        config.resolve({}, words)
