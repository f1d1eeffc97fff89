"""Names of published networks' tensors, turned into timm's and torchvision's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import accumulate

import torch
from torch import Tensor

from fedssl.models.encoders import ResNet

Rule = tuple[str, str | Callable[[re.Match[str]], str]]

_HF_RESNET: tuple[Rule, ...] = (
    (r"embedder\.embedder\.convolution", "conv1"),
    (r"embedder\.embedder\.normalization", "bn1"),
    (r"encoder\.stages\.(\d+)\.layers", lambda m: f"layer{int(m[1]) + 1}"),
    (r"layer\.(\d+)\.convolution", lambda m: f"conv{int(m[1]) + 1}"),
    (r"layer\.(\d+)\.normalization", lambda m: f"bn{int(m[1]) + 1}"),
    (r"shortcut\.convolution", "downsample.0"),
    (r"shortcut\.normalization", "downsample.1"),
)
# ViT and DINOv2; timm's own reader of DINOv2's tokens and gated layers does the rest.
_HF_VIT: tuple[Rule, ...] = (
    (r"embeddings\.(cls_token|mask_token|register_tokens)", r"\1"),
    (r"embeddings\.position_embeddings", "pos_embed"),
    (r"embeddings\.patch_embeddings\.projection", "patch_embed.proj"),
    (r"encoder\.layer\.", "blocks."),
    (r"attention\.attention\.(query|key|value)", r"attn.\1"),
    (r"attention\.output\.dense", "attn.proj"),
    (r"intermediate\.dense", "mlp.fc1"),
    (r"output\.dense", "mlp.fc2"),
    (r"layernorm_before", "norm1"),
    (r"layernorm_after", "norm2"),
    (r"layer_scale(\d)\.lambda1", r"ls\1.gamma"),
    (r"mlp\.weights_in", "mlp.w12"),
    (r"mlp\.weights_out", "mlp.w3"),
    (r"layernorm\.", "norm."),
)
_TORCHVISION_VIT: tuple[Rule, ...] = (
    (r"class_token", "cls_token"),
    (r"encoder\.pos_embedding", "pos_embed"),
    (r"conv_proj", "patch_embed.proj"),
    (r"encoder\.layers\.encoder_layer_(\d+)", r"blocks.\1"),
    (r"ln_(\d)", r"norm\1"),
    (r"self_attention\.in_proj_", "attn.qkv."),
    (r"self_attention\.out_proj", "attn.proj"),
    (r"mlp\.(0|linear_1)\.", "mlp.fc1."),
    (r"mlp\.(3|linear_2)\.", "mlp.fc2."),
    (r"encoder\.ln\.", "norm."),
)
# nn.Sequential(*list(resnet.children())[:-1]), as in lightly's examples.
_CHILDREN: tuple[Rule, ...] = (
    (r"(^|(?<!downsample)\.)0\.weight$", r"\1conv1.weight"),
    (r"(^|(?<!downsample)\.)1\.(\w+)$", r"\1bn1.\2"),
    (r"(^|\.)([4-7])\.(\d+\.[a-z])", lambda m: f"{m[1]}layer{int(m[2]) - 3}.{m[3]}"),
)
LAYOUTS: dict[str, tuple[Rule, ...]] = {
    "": (),
    "Hugging Face's ResNet": _HF_RESNET,
    "Hugging Face's ViT or DINOv2": _HF_VIT,
    "torchvision's ViT": _TORCHVISION_VIT,
    "a sequence of ResNet's parts": _CHILDREN,
}


def rename(tensors: dict[str, Tensor], rules: tuple[Rule, ...]) -> dict[str, Tensor]:
    """Return tensors by the names that the rules make; prefixes stay."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    return _join_attention(renamed)


def _join_attention(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join queries, keys and values into one tensor, as timm has them."""
    joined: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".attn.query." in name:
            parts = [name.replace("query", part) for part in ("query", "key", "value")]
            if all(part in tensors for part in parts):
                joined[name.replace("query", "qkv")] = torch.cat([tensors[p] for p in parts])
        elif ".attn.key." not in name and ".attn.value." not in name:
            joined[name] = tensor
    return joined


def torchvision_names(resnet: ResNet) -> dict[str, str]:
    """Return torchvision's name of each tensor of our ResNet with the large stem."""
    return {name: "".join(_translate(resnet, name)) for name in resnet.state_dict()}


def _translate(resnet: ResNet, name: str) -> Iterator[str]:
    part, number, rest = name.split(".", 2)
    if part == "stem":
        yield f"{('conv1', 'bn1')[int(number)]}.{rest}"
        return
    ends = list(accumulate(resnet.depths))
    stage = next(i for i, end in enumerate(ends) if int(number) < end)
    yield f"layer{stage + 1}.{int(number) - ends[stage] + resnet.depths[stage]}."
    side, place, last = rest.split(".", 2)
    if side == "shortcut":
        yield f"downsample.{place}.{last}"
    else:  # convolution, norm and ReLU in turn
        yield f"{('conv', 'bn')[int(place) % 3]}{int(place) // 3 + 1}.{last}"
