"""A run in words: what was run, and how far it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedssl.config import plugins
from fedssl.report import compare
from fedssl.report.curves import History
from fedssl.runs.record import Run, section

NAMES = {
    "dcco": "DCCO",
    "fedavg": "FedAvg",
    "fedu": "FedU",
    "fedema": "FedEMA",
    "ditto": "Ditto",
    "fedprox": "FedProx",
    "featarc": "FeatARC",
    "gossip": "Gossip",
    "ccl": "CCL",
    "fedca": "FedCA",
    "centralized": "Centralized training",
    "standalone": "Standalone training",
    "cco": "CCO",
    "vicreg": "VICReg",
    "simclr": "SimCLR",
    "moco": "MoCo",
    "simsiam": "SimSiam",
    "byol": "BYOL",
    "rotation": "rotation prediction",
    "deepcluster": "DeepCluster",
    "swav": "SwAV",
    "mae": "MAE",
    "supervised": "labels",
}


def called(tree: Mapping[str, Any], name: str) -> str:
    """What a section names, as people write it."""
    own = str(section(tree, name).get("name", "unknown"))
    return NAMES.get(own, plugins.short_name(own))


def sentence(run: Run, seed: bool = False) -> str:
    """What was run, in one sentence, from the configuration as it stands in the folder."""
    tree = run.tree
    data, encoder = section(tree, "data"), section(tree, "encoder")
    size = f" at {data['size']} pixels" if data.get("size") else ""
    towers = " (two towers)" if encoder.get("towers") == 2 else ""
    text = (
        f"{called(tree, 'algorithm')} with {called(tree, 'objective')} trains a "
        f"{encoder.get('name', 'unknown')} encoder{towers} on {_images(tree)}{size}"
    )
    clients = len(run.clients) or section(tree, "partition").get("clients")
    if clients:
        text += f", divided over {clients:,} clients ({_partition(tree)})"
    rounds = tree.get("rounds")
    text += f", {_cohort(tree)}in {rounds} rounds of {_local(tree)}"
    return f"{text} (seed {tree.get('seed', 0)})." if seed else f"{text}."


def _images(tree: Mapping[str, Any]) -> str:
    """The data set by its name; one's own images by their folder's."""
    own = section(tree, "data")
    if section(tree, "engine").get("sites"):  # those in data.root only judge
        return "the sites' own images"
    if own.get("name") not in compare.OWN:
        return called(tree, "data")
    last = Path(str(own.get("root") or "")).name
    return f"the images of {last}" if last else "images of one's own"


def _partition(tree: Mapping[str, Any]) -> str:
    own = section(tree, "partition")
    usual = {"name": None, "clients": None, "fraction": 1.0, "source": "labels", "encoder": None}
    if own.get("source", "labels") == "labels":
        usual["sources"] = own.get("sources")
    said = [
        f"{key} {value}"
        for key, value in own.items()
        if value not in (None, False) and key not in ("name", "clients") and value != usual.get(key)
    ]
    return ", ".join([str(own.get("name", "unknown")), *said])


def _cohort(tree: Mapping[str, Any]) -> str:
    own = section(tree, "cohort")
    if own.get("size"):
        return f"{own['size']} of them at a time, "
    if own.get("fraction"):
        return f"{100 * own['fraction']:g} % of them at a time, "
    return ""


def _local(tree: Mapping[str, Any]) -> str:
    own = section(tree, "algorithm")
    steps, epochs, batch = own.get("local_steps"), own.get("local_epochs"), own.get("batch")
    what = f"{epochs} local epochs" if epochs else f"{steps or 1} local steps"
    what = what.removesuffix("s") if what.startswith("1 ") else what
    return f"{what} in batches of {batch}" if batch else what


def state(run: Run, history: History) -> tuple[str, bool]:
    """How far the run is, and whether a reader should take care."""
    said = [_far(run, history)]
    if history.problem:
        said.append(f"metrics.jsonl could not be read to its end ({history.problem}).")
    text = " ".join(filter(None, said))
    return text, bool(text)


def _far(run: Run, history: History) -> str:
    if run.config is None:
        done = "It is finished" if run.finished else f"It has {history.rounds} rounds"
        return (
            f"This run is of another version of fedssl, or needs a file that is not here "
            f"({run.problem}). {done}; what its files say is shown, and the rest is left out."
        )
    if not run.finished:
        return (
            f"Not finished: round {history.rounds:,} of {run.config.rounds:,}. The numbers are "
            "those of its last evaluation, if there was one."
        )
    return ""
