"""Partitions, objectives and algorithms: names that stand for a class, and their common keys."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from fedssl.config import plugins
from fedssl.config.keys import Recipe, key, key_types

if TYPE_CHECKING:
    from fedssl.config.schema import Config


LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class PartParams:
    """Facts that every algorithm, objective and partition has beside its keys."""

    recommended: ClassVar[Recipe] = {}
    """The settings that go well with the part, as in a recipe (:mod:`fedssl.config.resolve`).

    ``{"objective.name=cco": {…}}`` has settings for one objective only.
    """

    def check(self, config: Config) -> None:
        """Refuse a configuration that this part cannot go with, as far as that needs no images."""


@dataclass(frozen=True)
class PartitionParams(PartParams):
    """Keys of every partition."""

    recommended: ClassVar[Recipe] = {"algorithm": {"batch": 32}}

    name: str = key("iid", help="How training images are divided among clients.")
    fraction: float = key(
        1.0,
        gt=0,
        le=1,
        kw_only=True,
        help="Share of its samples that a client keeps (FedEMA, Table 12; Dec-SSL, B.7).",
    )
    minimum: int = key(
        1,
        gt=0,
        kw_only=True,
        help="Leave out clients with fewer images, such as cases of one photo: contrastive losses "
        "and CCO within a client need two.",
    )
    seed: int | None = key(
        None,
        ge=0,
        le=LARGEST_SEED,
        kw_only=True,
        help="Seed of the draws of images: those of each client, held-out and public images, and "
        "labelled images. `null`: `seed`. With a number, runs that differ in `seed` have the same "
        "images at each client.",
    )


@dataclass(frozen=True, kw_only=True)
class SourceParams(PartitionParams):
    """Keys of partitions in which clients differ in a source of each image (Dec-SSL, C.2)."""

    source: Literal["labels", "features", "rotation", "style"] = key(
        "labels",
        help="Property in which clients differ: the class of an image, the cluster of its "
        "features, its rotation or its style. Clients train on the rotated or stylized images.",
    )
    sources: int = key(
        5,
        ge=2,
        needs="source=features|rotation|style",
        help="Number of clusters, rotations or styles.",
    )
    encoder: str | None = key(
        None,
        path=True,
        needs="source=features",
        help="Encoder whose features are clustered: a run's folder or `encoder.safetensors`. "
        "`null`: an untrained encoder of the run's architecture.",
    )
    encoder_recipe: str | None = key(
        None,
        needs="source=features",
        affects="nothing",
        help="Recipe of that encoder: `fedssl reproduce` trains it first, once for all rows, "
        "unless `partition.encoder` is given.",
    )


@dataclass(frozen=True)
class ObjectiveParams(PartParams):
    """Keys of every objective."""

    recommended: ClassVar[Recipe] = {"algorithm": {"name": "fedavg"}}

    name: str = key("cco", help="Loss that clients minimize.")


@dataclass(frozen=True)
class AlgorithmParams(PartParams):
    """Keys of every algorithm: how long a client trains in a round."""

    recommended: ClassVar[Recipe] = {
        "objective": {"name": "simclr"},
        "partition": {"name": "dirichlet", "balanced": True},
        "algorithm": {"local_epochs": 1},
        "client": {"optimizer": "adam", "lr": 0.001},
        "server": {"optimizer": "sgd", "lr": 1.0},
    }

    name: str = key("dcco", help="Federated algorithm: the messages between server and clients.")
    local_steps: int | None = key(
        None,
        gt=0,
        instead_of="local_epochs",
        help="Training steps of a client in a round. `null`: see `algorithm.local_epochs`.",
    )
    local_epochs: int | None = key(
        None,
        gt=0,
        help="Epochs of a client in a round, as an alternative to `algorithm.local_steps`. "
        "Both `null`: one step.",
    )
    batch: int | None = key(
        None, gt=0, help="Number of images in a local step. `null`: all images of the client."
    )
    norm_policy: Literal["average", "local", "reset"] = key(
        "average",
        help="Normalization layers. `average`: averaged like other layers, running statistics "
        "included. `local`: each client keeps its own (FedBN). `reset`: averaged, with running "
        "statistics that start anew every round.",
    )

    def scaled(self, share: float) -> Self:
        """Return the keys for a share of the rounds: other training that takes long shrinks too."""
        return self


VARIANTS: dict[str, dict[str, str]] = {
    "partition": {
        "iid": "fedssl.data.partition:Iid",
        "samples": "fedssl.data.dirichlet:Samples",
        "classes": "fedssl.data.partition:Classes",
        "dirichlet": "fedssl.data.dirichlet:Dirichlet",
        "skew": "fedssl.data.partition:Skew",
        "folder": "fedssl.data.partition:Folder",
    },
    "objective": {
        "cco": "fedssl.objectives.cco:CCO",
        "vicreg": "fedssl.objectives.vicreg:VICReg",
        "sigreg": "fedssl.objectives.sigreg:SIGReg",
        "spectral": "fedssl.objectives.spectral:Spectral",
        "simclr": "fedssl.objectives.simclr:SimCLR",
        "moco": "fedssl.objectives.moco:MoCo",
        "simsiam": "fedssl.objectives.simsiam:SimSiam",
        "byol": "fedssl.objectives.byol:BYOL",
        "rotation": "fedssl.objectives.rotation:Rotation",
        "deepcluster": "fedssl.objectives.deepcluster:DeepCluster",
        "swav": "fedssl.objectives.swav:SwAV",
        "mae": "fedssl.objectives.mae:MAE",
        "supervised": "fedssl.objectives.supervised:Supervised",
    },
    "algorithm": {
        "dcco": "fedssl.algorithms.dcco:DCCO",
        "fedsc": "fedssl.algorithms.fedsc:FedSC",
        "fedavg": "fedssl.algorithms.fedavg:FedAvg",
        "fedu": "fedssl.algorithms.fedu:FedU",
        "fedema": "fedssl.algorithms.fedema:FedEMA",
        "ditto": "fedssl.algorithms.ditto:Ditto",
        "fedprox": "fedssl.algorithms.fedprox:FedProx",
        "scaffold": "fedssl.algorithms.scaffold:Scaffold",
        "ldawa": "fedssl.algorithms.ldawa:LDAWA",
        "featarc": "fedssl.algorithms.featarc:FeatARC",
        "gossip": "fedssl.algorithms.gossip:Gossip",
        "ccl": "fedssl.algorithms.ccl:CCL",
        "fedca": "fedssl.algorithms.fedca:FedCA",
        "centralized": "fedssl.algorithms.centralized:Centralized",
        "standalone": "fedssl.algorithms.standalone:Standalone",
    },
}
BASE_PARAMS: dict[str, type[PartitionParams | ObjectiveParams | AlgorithmParams]] = {
    "partition": PartitionParams,
    "objective": ObjectiveParams,
    "algorithm": AlgorithmParams,
}
DEFAULT_NAMES = {section: params.name for section, params in BASE_PARAMS.items()}


def variant(section: str, name: str, key: str | None = None) -> Any:
    """Import the class with a name: one of fedssl's, or a plug-in. ``key`` is for errors."""
    paths = VARIANTS[section]
    if name not in paths:
        place = (key or f"{section}.name", name)
        return plugins.load(section, name, place, paths, BASE_PARAMS[section])
    module, attribute = paths[name].split(":")
    return getattr(importlib.import_module(module), attribute)


def as_names(name: Any) -> list[Any]:
    """Return the names of a sweep, or the single name, as a list."""
    return name if isinstance(name, list) else [name]


def key_types_under(section: str, name: Any) -> dict[str, Any]:
    """Return the types of the keys under a name, or under any of several."""
    kinds = [key_types(variant(section, str(each)).Params) for each in as_names(name)]
    return {key: kind for fields in kinds for key, kind in fields.items()}
