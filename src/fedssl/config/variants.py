"""Names that stand for a class: partitions, objectives and algorithms."""

from __future__ import annotations

import importlib
from typing import Any

from fedssl.config import plugins
from fedssl.config.keys import key_types
from fedssl.config.schema import AlgorithmParams, ObjectiveParams, PartitionParams

VARIANTS: dict[str, dict[str, str]] = {
    "partition": {
        "iid": "fedssl.data.partition:Iid",
        "samples": "fedssl.data.partition:Samples",
        "classes": "fedssl.data.partition:Classes",
        "dirichlet": "fedssl.data.partition:Dirichlet",
        "skew": "fedssl.data.partition:Skew",
        "folder": "fedssl.data.partition:Folder",
    },
    "objective": {
        "cco": "fedssl.objectives.cco:CCO",
        "vicreg": "fedssl.objectives.vicreg:VICReg",
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
        "fedavg": "fedssl.algorithms.fedavg:FedAvg",
        "fedu": "fedssl.algorithms.fedu:FedU",
        "fedema": "fedssl.algorithms.fedema:FedEMA",
        "ditto": "fedssl.algorithms.ditto:Ditto",
        "fedprox": "fedssl.algorithms.fedprox:FedProx",
        "featarc": "fedssl.algorithms.featarc:FeatARC",
        "gossip": "fedssl.algorithms.gossip:Gossip",
        "ccl": "fedssl.algorithms.ccl:CCL",
        "fedca": "fedssl.algorithms.fedca:FedCA",
        "centralized": "fedssl.algorithms.centralized:Centralized",
        "standalone": "fedssl.algorithms.standalone:Standalone",
    },
}
BASE_PARAMS = {
    "partition": PartitionParams,
    "objective": ObjectiveParams,
    "algorithm": AlgorithmParams,
}
DEFAULT_NAMES = {"partition": "iid", "objective": "cco", "algorithm": "dcco"}


def variant(section: str, name: str, key: str | None = None) -> Any:
    """The class behind a name, imported when it is asked for; ``key`` is who named it.

    A name that is not ours is a user's own: see ``fedssl.config.plugins``.
    """
    known = VARIANTS[section]
    if name not in known:
        place = (key or f"{section}.name", name)
        return plugins.load(section, name, place, known, BASE_PARAMS[section])
    module, attribute = known[name].split(":")
    return getattr(importlib.import_module(module), attribute)


def params_class(section: str, name: str) -> Any:
    """Return the class of a variant's keys."""
    return variant(section, name).Params


def as_names(name: Any) -> list[Any]:
    """The names of a sweep, or the one that there is."""
    return name if isinstance(name, list) else [name]


def key_types_under(section: str, name: Any) -> dict[str, Any]:
    """The keys under a name, or under any of several."""
    kinds = [key_types(params_class(section, str(each))) for each in as_names(name)]
    return {key: kind for fields in kinds for key, kind in fields.items()}
