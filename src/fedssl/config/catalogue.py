"""Data sets and encoders by name, with the settings that they recommend."""

from __future__ import annotations

from typing import Any, Literal

DataName = Literal[
    "digits", "fashion-mnist", "cifar10", "cifar100", "stl10", "tiny-imagenet", "folder", "paired"
]
OWN_DATA = ("folder", "paired")  # names of data that the user brings; others are published
Initializer = Literal["he", "torch"]
EncoderName = Literal["tiny", "resnet14", "resnet18", "resnet50", "vit-tiny"]
TIMM = "timm/"  # prefix of a backbone from timm

_USERS_IMAGES: dict[str, Any] = {  # they may have no labels
    "encoder": {"name": "resnet18"},
    "partition": {"name": "iid"},
    "objective.name=cco": {"objective": {"projector": [512, 512, 512]}},
    "algorithm.name=dcco": {"server": {"optimizer": "adam", "lr": 0.001}},
}
_PHOTOGRAPHS = {**_USERS_IMAGES, "data": {"size": 64}}  # they may have any size
_DATA_SETS: dict[str, dict[str, Any]] = {
    "digits": {
        "data": {"size": 16},
        "augment": {"name": "digits"},
        "objective.name=sigreg": {"objective": {"lambda": 0.01, "slices": 256}},
        "evaluate": {"protocols": ["linear@10", "linear@50", "linear@100", "linear", "knn"]},
    },
    "fashion-mnist": {"augment": {"name": "dec-ssl"}},
    "cifar10": {"augment": {"name": "dec-ssl"}},
    "cifar100": {"augment": {"name": "dec-ssl"}},
    "stl10": {"partition": {"name": "iid"}},  # most images have no label
    "folder": _PHOTOGRAPHS,
    "paired": _PHOTOGRAPHS,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "tiny": {
        "encoder": {"groups": 8},
        "objective": {"projector": [128, 128, 128]},
        "server": {"optimizer": "adam", "lr": 0.003},
    },
}


def recommend_for_data(name: str) -> dict[str, Any]:
    """Return the settings that go well with a data set; a user's own has a colon in its name."""
    return _DATA_SETS.get(name, _USERS_IMAGES if ":" in name else {})
