"""Every recipe that ships is what its paper says, and runs to its end on small made data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedssl import config
from fedssl.data.dataset import Split
from fedssl.data.partition import partition
from fedssl.evaluate import collaborative
from fedssl.evaluate.linear import Training
from fedssl.evaluate.registry import NAMES
from fedssl.runs import loop
from fedssl.runs.build import build_experiment
from fedssl.util.errors import UserError

CLASSES = {"cifar10": 10, "cifar100": 100, "fashion-mnist": 10}
PERSONAL = ("ditto", "standalone", "featarc")
TREES = {name: config.read_recipe(name) for name in config.list_recipes()}
for name in ("default", "folder", "sites"):  # these leave most settings to their parts
    full = config.flatten(config.to_tree(config.resolve(TREES[name])))
    TREES[name] = config.with_values({}, {k: v for k, v in full.items() if v is not None})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train/<class>/<case>/<image> with two images a case: read with or without the case level."""
    root = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    for split, cases in (("train", 10), ("test", 2), ("val", 2)):
        for label in range(4):
            for case in range(cases):
                place = root / split / f"class{label}" / f"case{case:03}"
                place.mkdir(parents=True)
                for image in range(2):
                    pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(place / f"{image}.png")
    return root


# What makes a recipe slow, and numbers that need not be tried one by one.
SMALLER = {
    "data": {"size": 8, "labels": 16, "holdout": 0.1},
    "encoder": {"name": "tiny", "groups": 8},
    "partition": {
        "clients": 2,
        "classes": 2,
        "fraction": 0.5,
        "samples": 4,
        "alpha": 0.5,
        "beta": 0.5,
    },
    "objective": {"projector": [16, 16], "predictor": [16, 16], "queue": 32},
    "algorithm": {"batch": 20, "local_epochs": 1, "lambda": 0.5, "tau": 0.7, "decay": 0.5},
    "client": {"lr": 0.01},
    "server": {"lr": 0.01},
    "evaluate": {"every": 1, "size": 12, "k": 5},
}
# Defaults that are too large for small data.
OWN_KEYS: dict[str, dict[str, Any]] = {
    "moco": {"queue": 32},
    "swav": {"prototypes": [6]},
    "deepcluster": {"clusters": [4, 3]},
    "fedca": {"public": 8, "base_epochs": 1, "dictionary": 6},
}
ALWAYS = {"data.size", "encoder.name", "encoder.groups", "client.lr", "server.lr"}


def shrunk(name: str) -> dict[str, Any]:
    """The recipe with everything small that makes it slow, and little else changed."""
    rounds = min(2, TREES[name].get("rounds", 2))  # a network that is only fine-tuned has none
    tree = {k: v for k, v in TREES[name].items() if k not in ("about", "paper")}
    tree["rounds"] = rounds
    digits = tree["data"]["name"] == "digits" or tree["data"].get("halves", False)
    for section, numbers in SMALLER.items():
        given = tree.get(section, {})
        # A weight of 0 and λ = auto are cases of their own.
        less = {k: v for k, v in numbers.items() if given.get(k) or f"{section}.{k}" in ALWAYS}
        tree[section] = given | {k: v for k, v in less.items() if given.get(k) != "auto"}
    tree["data"]["name"] = "digits" if digits else "folder"
    if tree["objective"]["name"] in ("byol", "simsiam", "moco", "simclr"):
        tree["objective"] |= {"projector": [16, 16]}
    if tree["objective"]["name"] in ("byol", "simsiam"):
        tree["objective"] |= {"predictor": [16, 16]}
    tree["objective"] |= OWN_KEYS.get(tree["objective"]["name"], {})
    tree["algorithm"] |= OWN_KEYS.get(tree["algorithm"]["name"], {})
    if tree["algorithm"]["name"] == "gossip" or tree["algorithm"].get("leave_out"):
        tree["server"]["lr"] = 1.0
    if tree["objective"]["name"] == "mae":
        tree["encoder"]["name"] = "vit-tiny"
    if tree["partition"] == {"name": "iid", "clients": 2} and name != "folder":
        tree["partition"] = {"name": "classes", "clients": 2, "classes": 2}
    if "cohort" in tree:
        tree["cohort"] = {"size": 1 if "clients" in tree["partition"] else 8}
    if "protocols" in tree["evaluate"]:
        few = [_fewer(spec, 20 if digits else 8) for spec in tree["evaluate"]["protocols"]]
        few = [spec for spec in few if not digits or spec != "linear"]  # slow on all digits
        tree["evaluate"]["protocols"] = list(dict.fromkeys(few))
    return tree


def _fewer(spec: str, labels: int) -> str:
    name, at, _ = spec.partition("@")
    if NAMES[name].option == "share":
        return f"{name}@50%" if name == "collaborative" else f"{name}@10%"
    return f"{name}@{labels}" if at else name


def options(tree: dict[str, Any]) -> set[tuple[str, str]]:
    """Every key of a configuration, with its value where that is a word and not a number."""
    found = set()
    for name, value in config.flatten(tree).items():
        for item in value if name == "evaluate.protocols" else [value]:
            is_number = isinstance(item, int | float) and not isinstance(item, bool)
            found.add((name, "" if is_number else str(item)))
    return found


def covering() -> list[str]:
    """Few recipes that together use every key and word of all recipes."""
    used = {name: options(tree) for name, tree in SMALL.items()}
    left, chosen = set().union(*used.values()), []
    while left:
        chosen.append(max(used, key=lambda name: (len(used[name] & left), name)))
        left -= used[chosen[-1]]
    return chosen


def reported(tree: dict[str, Any]) -> set[str]:
    """The results of a run, by its configuration alone."""
    evaluate, found = tree.get("evaluate", {}), set()
    for spec in evaluate.get("protocols") or ["knn", "linear"]:
        if spec != "per-client":
            found.add(f"{spec}_top1")
            continue
        if tree["algorithm"]["name"] != "standalone":
            found.add("per-client_global_top1")
        if tree["algorithm"]["name"] in PERSONAL:
            found.add("per-client_personal_top1")
        found |= {f"per-client_lambda-{v:g}_top1" for v in tree["algorithm"].get("also", ())}
    return found | {f"rounds_to_{target}" for target in evaluate.get("targets", ())}


# Without classes: tests/runs/test_fit.py runs it.
SMALL = {name: shrunk(name) for name in TREES if name != "sites"}


@pytest.mark.parametrize("name", covering())
def test_recipe_runs(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tree = Training.over, SMALL[name]
    monkeypatch.setattr(Training, "over", lambda self, n: replace(real(self, n), steps=5))
    monkeypatch.setattr(collaborative, "ROUNDS", 2)
    words = ["engine.threads=1", f"data.cache={tmp_path.parent / 'cache'}"]
    if tree["data"]["name"] == "folder":
        words.append(f"data.root={folder}")
    summary = loop.run(config.resolve(tree, words), tmp_path / "run")
    assert summary["rounds"] == tree["rounds"]
    assert reported(tree) <= summary.keys()


def test_every_recipe_is_valid_and_measures_what_its_paper_prints() -> None:
    for name, tree in TREES.items():
        settings = config.resolve(tree)
        assert settings.about, name
        assert not list(config.find_idle_keys(settings)), name
        assert config.build(config.to_tree(settings)) == settings, name
        assert set(tree.get("paper", {}).get("results", {})) <= reported(tree), name
        partition = tree.get("partition", {})
        if partition.get("name") == "classes":
            sets, classes = partition["clients"] * partition["classes"], CLASSES[settings.data.name]
            assert sets % classes == 0 and sets >= classes, name


def test_every_combination_can_start(folder: Path, tmp_path: Path) -> None:
    """Methods, data and options that a recipe puts together are accepted together."""
    seen = {json.dumps(tree, sort_keys=True): tree for tree in SMALL.values()}
    for tree in seen.values():
        words = ["engine.threads=1", f"data.cache={tmp_path}"]
        if tree["data"]["name"] == "folder":
            words.append(f"data.root={folder}")
        build_experiment(config.resolve(tree, words))


SHAPES = {
    "cifar10": (50_000, 10),
    "cifar100": (50_000, 100),
    "fashion-mnist": (60_000, 10),
    "stl10": (5_000, 10),
    "tiny-imagenet": (100_000, 200),
}


def divided(name: str) -> tuple[str, str] | None:
    """The data set and the partition of a recipe, where it goes by labels or made sources."""
    tree = TREES[name]
    known = tree.get("data", {}).get("name") in SHAPES and not tree["data"].get("halves")
    if not known or tree.get("partition", {}).get("name") in (None, "iid", "folder"):
        return None
    return tree["data"]["name"], json.dumps(tree["partition"], sort_keys=True)


@pytest.mark.parametrize(
    ("data", "keys"), sorted({found for name in TREES if (found := divided(name))})
)
def test_data_of_the_papers_size_can_be_divided(data: str, keys: str) -> None:
    """Small stand-ins do not show a client without a sample or a class that is too small."""
    params = config.build({"partition": json.loads(keys)}).partition
    total, classes = SHAPES[data]
    if getattr(params, "source", "labels") != "labels":
        classes = params.sources
    split = Split((torch.zeros(total, 1, 1, 1, dtype=torch.uint8),), torch.arange(total) % classes)
    sizes = partition(params, split, classes, seed=0).sizes
    assert sizes.min() >= 1


# Typed from the papers, a cell or two of every table.
@pytest.mark.parametrize(
    ("name", "measure", "number"),
    [
        ("fedema/table1/fedmocov2/cifar100-noniid", "linear_top1", 57.47),
        ("fedema/table2/fedbyol-update-both/4-classes", "linear_top1", 78.77),
        ("fedema/table3/fedbyol/cifar10-noniid", "linear_top1", 79.44),
        ("fedema/table3/fedema-auto/cifar100-noniid", "linear_top1", 61.78),
        ("fedema/table3/centralized/cifar100-iid", "linear_top1", 65.54),
        ("fedema/table4/fedu/cifar10-10pct", "semi@10%_top1", 77.06),
        ("fedema/table4/fedema-1/cifar100-1pct", "semi@1%_top1", 32.49),
        ("fedema/table5/resnet18-fedsimsiam/cifar10-iid", "linear_top1", 81.46),
        ("fedema/table5/resnet50-fedema-0.8/cifar10-noniid", "linear_top1", 85.29),
        ("fedema/table6/fedema/8of80-cifar100-noniid", "linear_top1", 43.05),
        ("fedema/table7/resnet50-fedsimsiam/cifar10-10pct", "semi@10%_top1", 15.25),
        ("fedema/table7/resnet18-fedmocov1/cifar100-10pct", "semi@10%_top1", 43.49),
        ("fedema/table8/fedsimsiam/40-classes", "linear_top1", 51.08),
        ("fedema/table9/without-ema-stop-gradient/cifar10-noniid", "linear_top1", 11.97),
        ("fedema/table10/fedema/batch-16", "linear_top1", 74.03),
        ("fedema/table11/fedema/epochs-20", "rounds_to_70", 8),
        ("fedema/table11/fedema/epochs-5", "rounds_to_80", 80),
        ("fedema/table12/fedbyol/20-clients-25pct", "linear_top1", 63.95),
        ("fedema/figure9/fedema/rounds-400", "linear_top1", 86.51),
        ("fedema/figure10b/encoder-0.9/predictor-0.9", "linear_top1", 54.52),
        ("perfcl/table1/fedsimsiam/cifar100", "linear_top1", 43.59),
        ("perfcl/table2/fedbyol/lambda-0.5", "per-client_personal_top1", 79.36),
        ("dcco/table1/dcco/noniid-1", "finetune@5000_top1", 51.5),
        ("dcco/table1/contrastive-fedavg/iid-8", "linear@500_top1", 27.8),
        ("dcco/table1/cco-fedavg/noniid-16", "linear@5000_top1", 30.7),
        ("dcco/table1/centralized/pooled", "linear@500_top1", 34.0),
        ("dcco/table1/supervised-500/pooled", "head_top1", 13.1),
        ("dcco/table2/dcco/clients-256", "finetune@3057_top1", 51.1),
        ("dcco/table2/contrastive-fedavg/clients-64", "finetune@1524_top1", 38.9),
        ("dcco/table2/supervised/pooled", "finetune_top1", 39.2),
        ("perfcl/table3/fedsimclr/lambda-0", "per-client_personal_top1", 54.16),
        ("perfcl/table3-fedprox/fedsimclr/lambda-0", "per-client_global_top1", 54.16),
        ("perfcl/table2-fedprox/fedsimsiam/lambda-0.5", "per-client_global_top1", 72.94),
        ("dcco/appendix-c/byol/group-norm", "linear@5000_top1", 3),
        ("fedema/table5/resnet50-fedca/cifar100-noniid", "linear_top1", 42.34),
        ("decssl/table2-top/featarc/noniid", "per-client_personal_top1", 84.63),
        ("ccl/table1/fedrot/cifar10-noniid1", "linear_top1", 75.88),
        ("ccl/table1/feddc/cifar100-noniid2", "linear_top1", 47.21),
        ("ccl/table1/fedswav/fmnist-iid", "linear_top1", 89.63),
        ("ccl/table1/fedca/cifar100-iid", "linear_top1", 48.93),
        ("ccl/table1/ccl/cifar10-iid", "linear_top1", 88.90),
        ("ccl/table1/ccl/fmnist-noniid2", "linear_top1", 90.08),
        ("ccl/table1/centralized/cifar100-iid", "linear_top1", 63.72),
        ("ccl/table1/supervised/cifar10-noniid1", "head_top1", 60.60),
        ("ccl/table2/ccl/cifar100-iid", "semi@1%_top1", 40.71),
        ("ccl/table2/fedsimclr/fmnist-noniid1", "semi@10%_top1", 90.41),
        ("ccl/table2/centralized/fmnist-iid", "semi@1%_top1", 86.78),
        ("ccl/table3/ccl/cifar10-noniid1", "collaborative@1%_top1", 59.30),
        ("ccl/table3/fedca/fmnist-iid", "collaborative@10%_top1", 91.57),
        ("ccl/table3/supervised/cifar100-noniid1", "collaborative@10%_top1", 33.26),
        ("ccl/figure4/cl-ff/cifar10-noniid1", "semi@1%_top1", 66.12),
    ],
)
def test_the_papers_numbers(name: str, measure: str, number: float) -> None:
    assert TREES[name]["paper"]["results"][measure] == number


@pytest.mark.parametrize("column", ["cifar10-noniid1", "fmnist-noniid1"])
def test_ccls_plain_contrastive_learning_is_one_definition(column: str) -> None:
    """In Table 1, where the paper has no such row, it is that of Figure 4."""
    one, other, own = (
        replace(config.build(TREES[f"ccl/{row}/{column}"]), about="", paper={})
        for row in ("table1/fedmoco", "figure4/cl", "table1/fedmoco-own")
    )
    assert replace(one, evaluate=other.evaluate) == other
    assert own.algorithm.name == "fedavg" and own.objective == one.objective


@pytest.mark.parametrize(("setting", "holders"), [("noniid1", 2), ("noniid2", 1)])
@pytest.mark.parametrize(("data", "classes"), [("cifar10", 10), ("cifar100", 100), ("fmnist", 10)])
def test_ccls_settings_are_equally_skewed_and_classes_overlap_in_the_first(
    data: str, classes: int, setting: str, holders: int
) -> None:
    """Every client lacks 80 % of the classes, as the paper's supervised row asks for."""
    params = config.build(TREES[f"ccl/table1/ccl/{data}-{setting}"]).partition
    labels = torch.arange(2000) % classes
    split = Split((torch.zeros(2000, 1, 1, 1, dtype=torch.uint8),), labels)
    groups = partition(params, split, classes, seed=0)
    counts = np.stack(
        [np.bincount(labels[groups[k]], minlength=classes) for k in range(len(groups))]
    )
    assert ((counts > 0).sum(0) == holders).all()
    away = np.abs(counts / counts.sum(1, keepdims=True) - 1 / classes).sum(1) / 2
    np.testing.assert_allclose(away, 0.8, atol=0.01)


def test_a_cell_is_base_table_column_and_row() -> None:
    tree = TREES["fedema/table6/fedema/8of80-cifar100-noniid"]
    assert tree["paper"]["row"] == (
        "FedEMA Table 6, FedEMA (autoscaler), 8 of 80 clients, CIFAR-100 non-IID"
    )
    assert tree["client"]["lr"] == 0.032 and tree["rounds"] == 800  # base, column
    assert tree["algorithm"] == {
        "name": "fedema", "local_epochs": 2, "batch": 128, "lambda": "auto", "tau": 0.7,
    }  # fmt: skip
    assert tree["partition"] == {"name": "classes", "clients": 80, "classes": 20}
    assert TREES["fedema/table3/fedbyol/cifar10-noniid"]["paper"]["note"] == "± 0.99"


def test_cells_that_the_paper_lacks_are_no_recipes_and_unprinted_ones_have_no_number() -> None:
    assert "fedema/table3/centralized/cifar10-noniid" not in TREES
    assert "rounds_to_80" not in TREES["fedema/table11/fedema/epochs-1"]["paper"]["results"]
    assert "ccl/table2/centralized/cifar10-noniid1" not in TREES
    figures = [n for n in TREES if "fedema/figure" in n and "figure9" not in n]
    numbered = [n for n in figures if "results" in TREES[n]["paper"]]
    assert numbered == ["fedema/figure10b/encoder-0.9/predictor-0.9"]
    assert TREES[figures[0]]["paper"]["note"] == "the figure prints no number"


@pytest.mark.parametrize(
    ("key", "paper"),
    [
        ("fedema/table2/fedbyol-update-both/2-classes", {"algorithm.replace": "both"}),
        (
            "fedema/table6/fedbyol/5of20-cifar10-iid",
            {"algorithm.replace": "both", "cohort.size": 5},
        ),
        ("fedema/table9/without-ema/cifar10-iid", {"objective.momentum": 1}),
        ("fedema/table1/fedmocov1/cifar10-noniid", {"augment.name": "moco-v1"}),
        # As EasyFL's applications/fedssl has them.
        (
            "fedema/table1/fedmocov1-program/cifar10-noniid",
            {
                "augment.name": "moco-v1",
                "objective.projector": [128],
                "algorithm.replace": "both",
                "schedule": "constant",
            },
        ),
        (
            "fedema/table1/fedmocov2-program/cifar100-noniid",
            {
                "augment.name": "fedema",
                "objective.projector": [512, 128],
                "algorithm.replace": "both",
                "schedule": "cosine",
            },
        ),
        (
            "fedema/table1/fedsimclr-program/cifar10-noniid",
            {"objective.preset": "fedema", "objective.joint": True},
        ),
        ("fedema/table8/fedbyol/100-classes", {"partition.classes": 100, "data.name": "cifar100"}),
        ("fedema/table4/fedu/cifar10-1pct", {"data.holdout": 0.01, "evaluate.head": "mlp"}),
        (
            "dcco/table1/dcco/iid-8",
            {"partition.samples": 8, "partition.alpha": 1000, "cohort.size": 64},
        ),
        ("dcco/table1/standalone/noniid-16", {"partition.alpha": 0, "partition.clients": 5}),
        ("dcco/table1/supervised-500/pooled", {"data.labels": 500, "rounds": 200}),
        ("dcco/table2/contrastive-fedavg/clients-256", {"server.lr": 0.6, "cohort.size": 256}),
        ("dcco/table2/cco-fedavg/clients-64", {"server.lr": 0.15, "partition.minimum": 2}),
        ("dcco/table2/supervised/pooled", {"rounds": 0, "evaluate.preset": "derm"}),
        ("ccl/table2/fedsimclr/cifar10-iid", {"evaluate.head": "linear"}),
        ("ccl/figure4/cl/cifar10-noniid1", {"evaluate.head": "linear"}),
        *(
            (f"ccl/{row}", {"augment.name": "flip", "augment.crop": [0.08, 1.0]})
            for row in (
                *("table1/supervised/fmnist-iid", "table1/fedrot/cifar10-noniid2"),
                *("table2/fedrot/cifar100-iid", "table3/fedrot/cifar10-iid"),
            )
        ),
        ("ccl/table1/fedsimclr/cifar10-iid", {"augment.name": "fedema"}),
        ("ccl/table1/ccl/cifar100-noniid1", {"partition.clients": 10, "partition.classes": 20}),
        ("ccl/table1/ccl/cifar100-noniid2", {"partition.clients": 5, "partition.classes": 20}),
        ("fedema/table12/fedema/5-clients-25pct", {"partition.fraction": 0.25}),
        ("fedema/table12/fedema/20-clients-25pct", {"partition.clients": 20}),
        ("decssl/small/dec-sl/iid", {"evaluate.protocols": ["head"]}),
        ("decssl/small/dec-slrep/iid", {"evaluate.protocols": ["linear", "head"]}),
        ("decssl/small/featarc/skewed", {"algorithm.name": "featarc", "partition.beta": 0}),
        ("perfcl/table3/fedbyol/lambda-0.1", {"algorithm.lambda": 0.1, "rounds": 200}),
        ("perfcl/table3-fedprox/fedbyol/lambda-0.1", {"algorithm.mu": 0.1, "rounds": 200}),
        ("perfcl/table2/fedbyol/lambda-5", {"augment.name": "simclr", "augment.noise": 0.05}),
        ("fedema/figure10b/encoder-0.3/predictor-0.7", {"algorithm.decay": [0.3, 0.7]}),
    ],
)
def test_the_papers_settings(key: str, paper: dict[str, Any]) -> None:
    flat = config.flatten(TREES[key])
    assert {name: flat[name] for name in paper} == paper


@pytest.mark.parametrize("table", ["table2", "table3"])
def test_each_grid_of_perfcl_compares_one_kind_of_model_at_five_weights(table: str) -> None:
    readings = {table: ("lambda", "personal"), f"{table}-fedprox": ("mu", "global")}
    for file, (key, model) in readings.items():
        cells = {name: TREES[name] for name in config.match_recipes(f"perfcl/{file}")}
        weights = [tree["algorithm"][key] for tree in cells.values()]
        assert weights == 3 * [0, 0.1, 0.5, 1, 5]
        if model == "personal":
            column = {"table2": "cifar10", "table3": "cifar100"}[table]
            for name, tree in cells.items():  # one run has the numbers of the grid's row
                row, weight = name.split("/")[2], tree["algorithm"][key]
                whole = TREES[f"perfcl/ditto/{row}/{column}"]
                measure = "personal" if weight == 0 else f"lambda-{weight}"
                number = whole["paper"]["results"].get(f"per-client_{measure}_top1")
                assert number == tree["paper"].get("results", {}).get("per-client_personal_top1")
                assert whole["algorithm"]["also"] == [0.1, 0.5, 1, 5]
        printed = [set(tree["paper"].get("results", {})) for tree in cells.values()]
        assert set().union(*printed) == {f"per-client_{model}_top1"}
        for name, tree in cells.items():
            assert f"per-client_{model}_top1" in reported(tree), name


TABLE = """
table: Paper Table 1
measure: knn_top1
rounds: 3
columns:
  a: {seed: 1, rounds: 5}
  b: {title: B, measure: linear_top1}
rows:
  one: {paper: [1.5 ± 0.1, 2], cells: {b: {seed: 7}}, rounds: 4}
  two: {note: a remark}
  three: {paper: [-, ~]}
"""


def test_a_table_of_ones_own_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(TABLE)
    names = [n.removeprefix(f"{path}/") for n in config.match_recipes(str(path))]
    assert names == ["one/a", "one/b", "two/a", "two/b", "three/b"]
    assert config.match_recipes(f"{path}/*/b") == [f"{path}/{n}/b" for n in ("one", "two", "three")]
    assert config.match_recipes(f"{path}/two") == [f"{path}/two/{n}" for n in ("a", "b")]
    assert config.read_recipe(f"{path}/one/a") == {
        "rounds": 4,
        "seed": 1,
        "paper": {"row": "Paper Table 1, one, a", "results": {"knn_top1": 1.5}, "note": "± 0.1"},
    }
    assert config.read_recipe(f"{path}/two/a")["rounds"] == 5  # the table has 3, row one 4
    assert config.read_recipe(f"{path}/one/b")["seed"] == 7
    assert config.read_recipe(f"{path}/one/b")["paper"]["results"] == {"linear_top1": 2.0}
    assert config.read_recipe(f"{path}/two/a")["paper"]["note"] == "a remark"


def test_reading_a_recipe_gives_one_a_copy() -> None:
    name = "fedema/table1/fedsimclr/cifar10-noniid"
    before = json.dumps(config.read_recipe(name))
    config.read_recipe(name)["client"]["lr"] = 5
    config.read_recipe(name)["evaluate"]["protocols"].append("x")  # from the base
    config.read_recipe(name)["objective"]["name"] = "x"  # from the table
    assert json.dumps(config.read_recipe(name)) == before


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("[-, ~]", "[1]", "rows.three.paper=[1]: not one number per column. Give a list of 2"),
        ("[-, ~]", "[1, much]", "column b=much: not a number"),
        (
            "cells: {b:",
            "cells: {c:",
            "cells: not columns with keys below them. Use the columns a, b",
        ),
        ("measure: knn_top1", "schedule: constant", "a number without a measure"),
        ("rows:", "rows: 1\nx:", "rows: not names without / and keys"),
        ("  two: {note: a remark}", "  two: 5", "rows: not names without / and keys"),
    ],
)
def test_mistakes_in_a_table(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(TABLE.replace(old, new))
    with pytest.raises(UserError) as error:
        for name in config.match_recipes(str(path)):
            config.read_recipe(name)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("fedema/table3", "a table of 22 recipes. Name one, such as fedema/table3/standalone/"),
        ("fedema/table3/fedbyol", "did you mean fedema/table3/fedbyol/"),
        ("fedema/table3/fedbyol/cifar10-nonid", "did you mean fedema/table3/fedbyol/cifar10-"),
        ("dcco/halves-fashion-mnist/x", "no such recipe or file"),
    ],
)
def test_names_that_are_no_recipe(name: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        config.read_recipe(name)
    assert sentence in str(error.value)


def test_earlier_names_mean_the_recipes_of_today() -> None:
    earlier = config.read_yaml(Path(config.__file__).parent / "recipes" / "_renamed.yaml")
    assert set(earlier.values()) <= TREES.keys() and not set(earlier) & TREES.keys()
    for old, new in earlier.items():
        assert config.read_recipe(old) == TREES[new]
        assert config.match_recipes(old) == [new]
    assert config.read_recipe("dcco/derm-64.yaml") == TREES["dcco/table2/dcco/clients-64"]
    assert len(config.match_recipes("dcco/cifar100-*")) == 23
    folder = {"dcco/cifar100-iid-8-cco-fedavg": "dcco/table1/cco-fedavg/iid-8"}
    assert folder.items() <= earlier.items()


def test_a_prefix_is_a_whole_part_of_the_name() -> None:
    assert len(config.match_recipes("fedema/table1")) == 16  # and none of tables 10 to 12
    assert len(config.match_recipes("fedema/table3/*/cifar10-noniid")) == 5
    assert config.match_recipes("default") == ["default"]
    with pytest.raises(UserError, match=r"did you mean fedema/table3\?"):
        config.match_recipes("fedema/tabel3")
