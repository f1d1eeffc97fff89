"""Configuration: frozen dataclasses, read from a recipe and ``key=value`` words, checked by type.

The dataclasses are the reference of the keys. Sections with a ``name`` that stands for a class
(objective, algorithm, partition) take further keys from that class's ``Params``.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import importlib
import itertools
import math
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import yaml

from fedssl.config import grid
from fedssl.util import plugins
from fedssl.util.errors import UserError, go_on

Tree = dict[str, Any]


@dataclass(frozen=True)
class Data:
    """Which images, and how they become arrays."""

    name: Literal[
        "digits",
        "fashion-mnist",
        "cifar10",
        "cifar100",
        "stl10",
        "tiny-imagenet",
        "folder",
        "paired",
    ] = "digits"
    root: str | None = None
    size: int | None = None  # pixels a side; none: as the data set has it
    # What the folder levels below train/ and test/ mean, of class, client, case; none: found out.
    levels: tuple[Literal["class", "client", "case"], ...] | None = None
    corrupt: Literal["fail", "skip"] = "fail"
    halves: bool = False  # left and right half of each image as two modalities
    labels: int | None = None  # train on that many images only, drawn evenly from the classes
    # Share of the training images, drawn evenly from the classes, that no client gets: semi
    # fine-tunes on them (FedEMA, appendix B.3), and heldout chooses by them.
    holdout: float = 0.0
    cache: str | None = None  # none: $FEDSSL_CACHE, else ~/.cache/fedssl


@dataclass(frozen=True)
class Augment:
    """A preset named after its paper; any other key replaces the preset's value."""

    name: str = "dcco"
    crop: tuple[float, float] | None = None  # area range of the random resized crop
    flip: float | None = None  # a probability, as are jitter_p and gray
    rotate: float | None = None  # degrees to either side
    jitter: tuple[float, float, float, float] | None = None  # brightness, contrast, saturation, hue
    jitter_p: float | None = None
    gray: float | None = None
    blur: tuple[float, float] | None = None  # probabilities in the first and the second view
    solarize: tuple[float, float] | None = None
    noise: float | None = None  # standard deviation, pixels being 0 to 1


class Params:
    """Keys of a section whose name stands for a class."""

    def idle_keys(self) -> dict[str, str]:
        """Keys that nothing looks at beside the section's others, and what would make them act."""
        return {}


@dataclass(frozen=True)
class PartitionParams(Params):
    """Keys of every partition."""

    name: str
    # Share of its samples that a client keeps (FedEMA, Table 12; Dec-SSL, B.7).
    fraction: float = field(default=1.0, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class SourceParams(PartitionParams):
    """Keys of partitions in which clients differ in a source of each image (Dec-SSL, C.2)."""

    # Its class; the cluster of its features; or how it was turned or stylized, which clients then
    # train on.
    source: Literal["labels", "features", "rotation", "style"] = "labels"
    sources: int = 5  # how many, of all but labels
    # Of features: encoder.safetensors, or a run's folder; none: untrained, of the run's own kind.
    encoder: str | None = None

    def idle_keys(self) -> dict[str, str]:
        """There are as many labels as classes."""
        why = "does nothing with partition.source=labels; use another partition.source"
        return {"sources": why} if self.source == "labels" else {}


Initializer = Literal["he", "torch"]
OwnEncoder = Literal["tiny", "resnet14", "resnet18", "resnet50", "vit-tiny"]
TIMM = "timm/"  # before the name of a backbone of timm's
MOST_THREADS = 1024


@dataclass(frozen=True)
class Encoder:
    """The network that is kept."""

    name: OwnEncoder | str = "tiny"  # or timm/NAME: a backbone of timm's
    # vit-tiny and timm's have norms by nature; there it is that of projectors and predictors only.
    norm: Literal["batch", "group"] = "group"
    groups: int = 32
    towers: Literal[1, 2] = 1  # two networks instead of one for the two inputs (Figure 1 b, c)
    init: str | None = None  # encoder.safetensors, or the folder of a run or an export
    # How weights are drawn: he (convolutions by He et al. 2015, fan out: torchvision's networks),
    # or torch (every layer uniform within 1/√inputs: torch's own layers).
    initializer: Initializer = "he"
    patch: int = 2  # pixels a side of vit-tiny's patches

    def __post_init__(self) -> None:
        known = typing.get_args(OwnEncoder)
        if self.name not in known and not self.name.startswith(TIMM):
            raise UserError(
                f"encoder.name={self.name}: unknown{_nearest(self.name, known)}; choose one of "
                f"{', '.join(known)}, {TIMM}NAME"
            )


@dataclass(frozen=True)
class ObjectiveParams(Params):
    """Keys of every objective."""

    name: str


@dataclass(frozen=True)
class AlgorithmParams(Params):
    """Keys of every algorithm: how long a client trains in a round."""

    name: str
    local_steps: int | None = None
    local_epochs: int | None = None
    batch: int | None = None  # none: all of a client's samples at once
    # Normalization layers: averaged like all others (running statistics too); kept by each client
    # (FedBN: they never leave it); or averaged, with statistics that start anew every round.
    norm_policy: Literal["average", "local", "reset"] = "average"

    def one_step(self, pooled: bool) -> bool:
        """Whether nothing is ever trained for two steps on end, however many samples there are.

        Where all data is ``pooled``, an epoch has batches though none were asked for.
        """
        if self.local_epochs is None:
            return self.local_steps in (None, 1)
        return self.local_epochs == 1 and self.batch is None and not pooled


@dataclass(frozen=True)
class Engine:
    """Where client work happens."""

    name: Literal["local", "flower"] = "local"
    merge: Literal["auto", "off"] = "auto"
    chunk: int = 8192  # the most images of a merged cohort in one pass
    # One compiled training step for all clients; auto: on a GPU, if the run is long enough.
    compile: Literal["auto", "on", "off"] = "auto"
    # CPU threads. A key, because the order of float sums depends on it: the same recipe gives the
    # same result whatever the machine's default is. On a CPU with many cores, raise it.
    threads: int = 2
    # Of flower:
    workers: int = 2  # processes of a simulation
    timeout: float = 600.0  # seconds that the cohort has to answer
    updates: Literal["full", "fp16"] = "full"  # how changes of the model travel to the server
    max_norm: float | None = None  # a larger change is refused
    sites: int | None = None  # how many sites a deployment waits for


@dataclass(frozen=True)
class Privacy:
    """What the server may learn of a client beyond the mean; nothing is asked for by default."""

    # The server learns sums only, of cohorts of which at least this share answers (flower).
    secure: bool = False
    threshold: float = 0.67
    # Differential privacy: noise on a sum, as a multiple of the L2 norm that contributions are
    # clipped to. Moments (DCCO) are bounded by objective.bound, and have noise of their own.
    noise: float | None = None
    clip: float = 1.0
    moments_noise: float | None = None  # none: as noise
    most_samples: int = 1  # the most samples that a client's weight counts
    delta: float = 1e-5


@dataclass(frozen=True)
class Optimizer:
    """An update rule; momentum is that of SGD and LARS."""

    optimizer: Literal["sgd", "adam", "adamw", "lars"] = "sgd"
    lr: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Cohort:
    """Who takes part in a round; neither size nor fraction: everyone."""

    size: int | None = None
    fraction: float | None = None
    minimum: int = 1
    # How replies are averaged; the others withstand some hostile clients, and weigh all the same.
    average: Literal["mean", "median", "trimmed", "krum"] = "mean"
    hostile: int = 1  # how many that may be, for trimmed and krum


@dataclass(frozen=True)
class Evaluate:
    """How the encoder is judged. ``linear@500`` is a protocol with 500 labels."""

    protocols: tuple[str, ...] | None = None  # none: knn and linear, or unlabeled without labels
    every: int = 0  # rounds between evaluations; 0: at the end only
    monitor: tuple[str, ...] | None = None  # protocols of those evaluations; none: all
    targets: tuple[float, ...] = ()  # accuracies to note the first round of (FedEMA, Table 11)
    preset: Literal["logistic", "dcco", "fedema", "ccl"] = "logistic"
    head: Literal["mlp", "linear"] = "mlp"  # of semi: as in FedEMA or as in CCL
    # Which test images per-client gives a client: those of its folder; of each class its share of
    # the training images; or any, evenly. None: by folder if the test split has client folders,
    # else matched.
    client_test: Literal["folder", "matched", "iid"] | None = None
    k: int = 20  # neighbours of knn; more than there are: all of them
    temperature: float = 0.1  # of knn
    size: int | None = None  # image size when judging; none: data.size
    tower: Literal["first", "second"] = "first"
    baselines: tuple[str, ...] = ()  # algorithms to train the same way and show beside
    drift: bool = False  # log how far local models are from the global one (Dec-SSL, B.3)


@dataclass(frozen=True)
class Checkpoint:
    """Seconds between checkpoints, more if writing takes long; 0: after every round."""

    seconds: float = 30.0


@dataclass(frozen=True)
class Config:
    """One run, complete."""

    partition: PartitionParams
    objective: ObjectiveParams
    algorithm: AlgorithmParams
    about: str = ""  # what a recipe is, in one line
    # The cell that a recipe reproduces: row, results (measure: number) and note.
    paper: Mapping[str, Any] = field(default_factory=dict)
    data: Data = Data()
    augment: Augment = Augment()
    encoder: Encoder = Encoder()
    engine: Engine = Engine()
    server: Optimizer = Optimizer("adam", 1e-3)
    client: Optimizer = Optimizer("sgd", 1.0)
    # Of learning rates, over the rounds; steps (Dec-SSL): times 0.3 at 30, 60 and 90 % of them.
    schedule: Literal["constant", "cosine", "steps"] = "cosine"
    cohort: Cohort = Cohort()
    privacy: Privacy = Privacy()
    rounds: int = 100
    seed: int = 0  # all random numbers are a function of it, but those that protect people
    device: str = "auto"  # as torch names them; auto: a GPU if there is one
    precision: Literal["auto", "bf16", "fp32", "fp64"] = "auto"  # of networks: bf16 on a GPU
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    # Where metrics go beside metrics.jsonl and TensorBoard (always, where it is installed).
    log: tuple[Literal["wandb", "mlflow"], ...] = ()


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
_SECTIONS = {
    "partition": PartitionParams,
    "objective": ObjectiveParams,
    "algorithm": AlgorithmParams,
}
ALTERNATIVES = (("local_steps", "local_epochs"), ("size", "fraction"))  # one replaces the other
DEFAULT_NAMES = {"partition": "iid", "objective": "cco", "algorithm": "dcco"}


def variant(section: str, name: str, key: str | None = None) -> Any:
    """The class behind a name, imported when it is asked for; ``key`` is who named it.

    A name that is not ours is a user's own: see ``fedssl.util.plugins``.
    """
    known = VARIANTS[section]
    if name not in known:
        where = f"{key or section + '.name'}={name}"
        return plugins.load(section, name, where, known, _SECTIONS[section])
    module, attribute = known[name].split(":")
    return getattr(importlib.import_module(module), attribute)


def recipes() -> dict[str, Path]:
    """The recipes that ship and their files (those that start with an underscore are for others).

    A file that holds a table (``fedssl.config.grid``) has a recipe for each cell:
    ``table/row/column``.
    """
    found: dict[str, Path] = {}
    for name, path in _shipped().items():
        if "/_" not in name:
            found |= dict.fromkeys(_names(name, path), path)
    return found


def matching(pattern: str) -> list[str]:
    """Recipes by name, by the table or folder that they are in, or by a pattern such as ``a/*/b``.

    A table's file that does not ship is given by its path: ``mine.yaml``, ``mine.yaml/row``.
    """
    file, path, _ = _locate(pattern)
    own = path is not None and path not in _shipped().values()
    names = _names(file, path) if own and path is not None else list(recipes())
    below = pattern.rstrip("/") + "/"
    found = [n for n in names if n == pattern or n.startswith(below) or fnmatchcase(n, pattern)]
    if not found:
        shown = pattern or '""'
        known = {parent for n in names for parent in (n, *map(str, Path(n).parents))}
        raise UserError(
            f"{shown}: no recipe has this name{_nearest(pattern, sorted(known))}; "
            "`fedssl recipes` lists what ships"
        )
    return found


def table(name: str) -> grid.Table | None:
    """The table that a name means or that a recipe is a cell of; none: it is a file of its own."""
    file, path, _ = _locate(name)
    return None if path is None else _table(file, path)


@functools.cache
def _shipped() -> dict[str, Path]:
    """Every file, by name: those without a folder first, and table2 before table10."""
    root = Path(__file__).parent / "recipes"
    files = {p.relative_to(root).with_suffix("").as_posix(): p for p in root.rglob("*.yaml")}

    def place(name: str) -> tuple[bool, list[tuple[int, str]]]:
        parts = re.findall(r"(\d*)(\D*)", name)
        return "/" in name, [(int(number or 0), text) for number, text in parts]

    return {name: files[name] for name in sorted(files, key=place)}


def _names(file: str, path: Path) -> list[str]:
    """The recipes in a file."""
    cells = _table(file, path)
    return [file] if cells is None else [f"{file}/{cell}" for cell in cells.cells()]


def _table(file: str, path: Path) -> grid.Table | None:
    tree = _read_once(path, path.stat().st_mtime_ns)
    return grid.Table.read(file, tree) if grid.is_table(tree) else None


@functools.lru_cache(maxsize=256)
def _read_once(path: Path, changed: int) -> Tree:
    """A recipe's file, which is not to be changed: a table is asked for once for each cell."""
    return read_yaml(path)


def _locate(name: str) -> tuple[str, Path | None, str]:
    """Name and path of the file that a recipe is in (none: there is none), and its cell there."""
    shipped, parts = _shipped(), name.split("/")
    for end in range(len(parts), max(0, len(parts) - 3), -1):
        file = "/".join(parts[:end])
        path = shipped.get(file.removesuffix(".yaml")) or Path(file)
        if path.is_file():
            return file, path, "/".join(parts[end:])
    return name, None, ""


def read_recipe(name: str | None, extended_by: tuple[str, ...] = ()) -> Tree:
    """A shipped recipe by name, or a YAML file by path; none: the default run.

    A recipe that ``extends`` another holds only what differs.
    """
    name = "default" if name is None else name
    if not name:  # of a shell's variable that is not set
        raise UserError('recipe "": an empty name; give one, or leave it out for the default')
    if name in extended_by:
        raise UserError(f"recipe {name}: extends itself ({' → '.join((*extended_by, name))})")
    tree, *layers = _layers(name)
    base = tree.pop("extends", None)
    start = {} if base is None else read_recipe(str(base), (*extended_by, name))
    merged = functools.reduce(_merge, [tree, *layers], start)
    own = base is not None and Path(name).suffix in (".yaml", ".yml")  # none that ships
    return _without_unused(merged, start, flat(tree)) if own else merged


def _layers(name: str) -> list[Tree]:
    """What a recipe's own file says, in the order in which it is merged."""
    file, path, cell = _locate(name)
    cells = None if path is None else _table(file, path)
    if path is None and Path(name).is_dir():
        raise UserError(f"recipe {name}: a folder, not a recipe; {_meant(name)}")
    if path is None or (cell and (cells is None or cell not in cells.cells())):
        raise UserError(
            f"recipe {name}: no such recipe or file{_nearest(name, recipes())}; "
            "`fedssl recipes` lists what ships"
        )
    if cells is None:
        return [copy.deepcopy(_read_once(path, path.stat().st_mtime_ns))]
    if not cell:
        raise UserError(
            f"recipe {name}: a table of {len(cells.cells())} recipes; name one, as in "
            f"{file}/{cells.cells()[0]}, or run them all with `fedssl reproduce {file}`"
        )
    return copy.deepcopy(cells.layers(cell))


class _Once(yaml.SafeLoader):
    """Takes a key once; of two, YAML takes the last without a word."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Where keys still stand as they are written, before others are merged in (``<<``)."""
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                first = lines[key.value]
                raise UserError(
                    f"line {line}: {key.value} stands in line {first} already; leave one out"
                )
            lines[key.value] = line
        return node


def read_yaml(path: Path) -> Tree:
    """A YAML file that holds keys and values."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Once) or {}
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected keys and values, as in `rounds: 100`")
    return tree


def resolve(recipe: Tree, words: typing.Sequence[str] = ()) -> Config:
    """A complete configuration from a recipe and the ``key=value`` words that override it."""
    return build(merged(recipe, words))


def merged(recipe: Tree, words: typing.Sequence[str]) -> Tree:
    """A recipe with the ``key=value`` words that override it, as a tree."""
    return changed(recipe, dict(map(_split, words)))


def changed(recipe: Tree, values: Mapping[str, Any]) -> Tree:
    """A recipe with other values of some keys; what these switch off goes back to its default."""
    tree = with_values(recipe, values)
    return _without_unused(tree, recipe, flat(dict(values))) if values else tree


def _without_unused(tree: Tree, recipe: Tree, given: Collection[str]) -> Tree:
    """``tree`` without what acted in ``recipe``, acts no longer, and is not ``given``."""
    for key in _unused(tree).keys() - _unused(recipe).keys() - set(given):
        section, _, name = key.partition(".")
        if name in (tree.get(section) or {}):
            tree = {**tree, section: {k: v for k, v in tree[section].items() if k != name}}
    return tree


def _unused(tree: Tree) -> dict[str, str]:
    """Keys that act in none of a recipe's runs; none of what cannot run: whoever builds it says."""
    try:
        return _idle_in_all([build(with_values(tree, own)) for own in combinations(tree)])
    except UserError:
        return {}


def swept(tree: Tree) -> dict[str, list[Any]]:
    """Keys with a list of values where one is expected (``fedssl.runs.sweep``).

    Of a key that takes a list itself, a list of lists.
    """
    found: dict[str, list[Any]] = {}
    for section, given in tree.items():
        kinds = _kinds(section, given)
        nested = {f"{section}.{k}": v for k, v in given.items()} if isinstance(given, dict) else {}
        for key, value in (nested or {section: given}).items():
            if not isinstance(value, list) or not value or key not in kinds:
                continue
            if not _takes_list(kinds[key]) or all(isinstance(item, list) for item in value):
                found[key] = value
    return found


def combinations(tree: Tree) -> Iterator[dict[str, Any]]:
    """Each combination of the values in a recipe's lists, by key; one empty where it has none."""
    lists = swept(tree)
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists, values, strict=True))


def _kinds(section: str, given: Any) -> dict[str, Any]:
    """The types of a section's keys, by their full names."""
    kind = _fields(Config).get(section)
    if section in VARIANTS and isinstance(given, dict):
        fields = _fields_of(section, given.get("name", DEFAULT_NAMES[section]))
    elif dataclasses.is_dataclass(kind):
        fields = _fields(kind)
    else:
        return {section: kind}
    return {f"{section}.{key}": own for key, own in fields.items()}


def left_out(recipe: Tree, tree: Tree) -> Iterator[str]:
    """What runs of a sweep over names go without, of the keys in ``tree`` and of its ``recipe``."""
    for section, default in DEFAULT_NAMES.items():
        both = (each.get(section) for each in (tree, recipe))
        given, before = (keys if isinstance(keys, dict) else {} for keys in both)
        names = given.get("name")
        if not isinstance(names, list):
            continue
        for key, value in given.items():
            without = [str(name) for name in names if key not in _fields_of(section, name)]
            if without:
                yield f"{section}.{key}={value}: not for {', '.join(without)}: no such key there"
        own, lost = before.get("name", default), _dropped(section, before, given) - given.keys()
        if lost and own in names:
            keys = ", ".join(f"{section}.{key}={before[key]}" for key in sorted(lost))
            yield f"{section}.name={names}: leaves out the recipe's {keys}, for {own} too"


def with_values(tree: Tree, values: Mapping[str, Any]) -> Tree:
    """A recipe with other values of some keys."""
    overrides: Tree = {}
    for name, value in values.items():
        _put(overrides, name, value)
    return _merge(tree, overrides)


def _takes_list(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple or any(map(_takes_list, typing.get_args(kind)))


def build(tree: Tree) -> Config:
    """Check every key and type of a nested mapping and fill in the defaults."""
    values: Tree = {}
    fields = _fields(Config)
    for name, value in tree.items():
        _known(name, fields, "")
        if name in VARIANTS:
            continue
        values[name] = _convert(fields[name], value, name)
    for section in VARIANTS:
        given = tree.get(section)
        if given is None:
            given = {}
        if not isinstance(given, dict):
            raise UserError(f"{section}={given}: expected keys such as {section}.name=…")
        name = plugins.settled(str(given.get("name", DEFAULT_NAMES[section])))
        values[section] = _convert(_params(section, name), {**given, "name": name}, section)
    config = Config(**values)
    config = dataclasses.replace(config, evaluate=renamed(config.evaluate, plugins.settled))
    _check(config)
    return config


def placed(config: Config) -> Config:
    """The same with paths that mean the same from any folder, as a run's folder keeps them."""
    if config.engine.sites is not None:
        return config  # in a deployment a path is for machines that are elsewhere
    partition = config.partition
    if isinstance(partition, SourceParams):
        partition = dataclasses.replace(partition, encoder=_absolute(partition.encoder))
    return dataclasses.replace(
        config,
        partition=partition,
        data=dataclasses.replace(
            config.data, root=_absolute(config.data.root), cache=_absolute(config.data.cache)
        ),
        encoder=dataclasses.replace(config.encoder, init=_absolute(config.encoder.init)),
    )


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.realpath(Path(path).expanduser())


def renamed(evaluate: Evaluate, name: Callable[[str], str]) -> Evaluate:
    """The same with other names of the protocols."""

    def each(specs: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if specs is None else tuple(map(name, specs))

    return dataclasses.replace(
        evaluate, protocols=each(evaluate.protocols), monitor=each(evaluate.monitor)
    )


def to_tree(config: Any) -> Tree:
    """The nested plain mapping of a configuration: what ``config.yaml`` holds."""
    tree: Tree = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            value = to_tree(value)
        elif isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        tree[item.name.rstrip("_")] = value
    return tree


def dump(config: Config) -> str:
    """The configuration as YAML."""
    return yaml.safe_dump(to_tree(config), sort_keys=False, allow_unicode=True)


def flat(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    out: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value and prefix + name != "paper":
            out.update(flat(value, f"{prefix}{name}."))
        else:
            out[prefix + name] = value
    return out


def without_public(algorithm: AlgorithmParams) -> AlgorithmParams:
    """The same algorithm where there are no public images, for judging only."""
    return dataclasses.replace(algorithm, public=0, align=0.0)  # type: ignore[call-arg]


def with_algorithm(config: Config, name: str) -> Config:
    """The same run under another algorithm (its own keys keep their defaults)."""
    tree = _merge(to_tree(config), {"algorithm": {"name": name}})
    tree["evaluate"]["baselines"] = []
    return build(tree)


# What numbers must be, where they are given.
_POSITIVE = (
    *("algorithm.local_steps", "algorithm.local_epochs", "algorithm.batch"),
    *("cohort.size", "cohort.minimum", "data.size", "data.labels"),
    *("engine.chunk", "engine.threads", "engine.workers", "engine.timeout"),
    *("engine.max_norm", "engine.sites", "encoder.groups", "encoder.patch"),
    *("evaluate.size", "evaluate.k", "evaluate.temperature", "server.lr", "client.lr"),
    *("privacy.noise", "privacy.moments_noise", "privacy.clip", "privacy.most_samples"),
)
_NOT_NEGATIVE = (
    *("rounds", "seed", "cohort.hostile", "evaluate.every", "checkpoint.seconds"),
    *("server.weight_decay", "client.weight_decay"),
)


def _check(config: Config) -> None:
    """What can be said without looking at the data."""
    values = flat(to_tree(config))
    for name in _POSITIVE:
        if values[name] is not None and not 0 < values[name] < math.inf:
            raise UserError(f"{name}={values[name]}: must be above 0 and finite")
    for name in _NOT_NEGATIVE:
        if values[name] < 0:
            raise UserError(f"{name}={values[name]}: must not be negative")
    for name in ("server.momentum", "client.momentum"):
        if not 0 <= values[name] < 1:
            raise UserError(f"{name}={values[name]}: must be at least 0 and below 1")
    if config.engine.threads > MOST_THREADS:  # far more crash the process
        raise UserError(f"engine.threads={config.engine.threads}: must be at most {MOST_THREADS}")
    _check_rounds(config.algorithm, config.cohort)
    _check_privacy(config.privacy)
    _check_judging(config.evaluate, config.encoder)
    if not isinstance(config.paper.get("results", {}), Mapping):
        raise UserError(f"paper.results={config.paper['results']}: expected keys and values")


def _check_rounds(algorithm: AlgorithmParams, cohort: Cohort) -> None:
    """How long clients train, and how many of them."""
    if algorithm.local_steps is not None and algorithm.local_epochs is not None:
        raise UserError(
            f"algorithm.local_steps={algorithm.local_steps} and "
            f"algorithm.local_epochs={algorithm.local_epochs}: give one of the two"
        )
    if cohort.size is not None and cohort.fraction is not None:
        raise UserError(
            f"cohort.size={cohort.size} and cohort.fraction={cohort.fraction}: give one of the two"
        )
    if cohort.fraction is not None and not 0 < cohort.fraction <= 1:
        raise UserError(f"cohort.fraction={cohort.fraction}: must be above 0 and at most 1")
    if cohort.size is not None and cohort.minimum > cohort.size:
        raise UserError(
            f"cohort.minimum={cohort.minimum}: more than cohort.size={cohort.size}; "
            "no round could ever count"
        )


def _check_privacy(privacy: Privacy) -> None:
    if not 0 < privacy.delta < 1:
        raise UserError(f"privacy.delta={privacy.delta}: must be above 0 and below 1")
    if not 0.5 < privacy.threshold <= 1:
        raise UserError(f"privacy.threshold={privacy.threshold}: must be above 0.5 and at most 1")
    if privacy.moments_noise is not None and privacy.noise is None:
        raise UserError(
            f"privacy.moments_noise={privacy.moments_noise}: without privacy.noise the updates "
            "would tell what the moments keep; set privacy.noise too"
        )


def check_used(*runs: Config, given: Collection[str] | None = None) -> None:
    """Refuse a key that is changed and acts in none of these runs: its user would believe it does.

    For new runs only: one that an older version began with such a key can go on and be judged. Of
    the latter, those that are ``given`` for judging it.
    """
    unused = _idle_in_all(runs)
    for run in runs:
        names = {section: {"name": getattr(run, section).name} for section in VARIANTS}
        standard, values, idle = flat(to_tree(build(names))), flat(to_tree(run)), _idle(run)
        for key in (key for key in idle if key in unused and key in values):
            if values[key] != standard[key] and (given is None or key in given):
                default = "null" if standard[key] is None else standard[key]
                raise UserError(
                    f"{key}={_shown(values[key])}: {idle[key]}, or leave it at {default}"
                )


def _shown(value: Any) -> str:
    """A value as a word has it."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _idle_in_all(runs: typing.Sequence[Config]) -> dict[str, str]:
    """Keys that some of these runs have and none looks at, and what would make them act."""
    known = [(_idle(run), flat(to_tree(run))) for run in runs]
    acting = {key for idle, values in known for key in values.keys() - idle.keys()}
    return {key: why for idle, _ in known for key, why in idle.items() if key not in acting}


FILES = ("folder", "paired", "tiny-imagenet")  # data sets that are files of images
NO_MOMENTUM = ("adam", "adamw")  # rules that have none
AT_SITES = "does nothing at real sites; use it in a simulation"
OF_ENGINE = {  # keys that one engine alone looks at
    "local": ("chunk",),
    "flower": ("workers", "timeout", "updates", "max_norm", "sites"),
}


def _idle(config: Config) -> dict[str, str]:
    """Keys that nothing looks at beside the others, and what would make them act."""
    found: dict[str, str] = {}
    if config.privacy.noise is None:
        why = "does nothing without noise; add privacy.noise, as in privacy.noise=4"
        found |= dict.fromkeys(("privacy.clip", "privacy.most_samples", "privacy.delta"), why)
    elif config.checkpoint.seconds:  # 0 says as much
        found["checkpoint.seconds"] = "with privacy.noise there is one after every round; use 0"
    if not config.privacy.secure:
        found["privacy.threshold"] = "does nothing without secure sums; add privacy.secure=true"
    if config.cohort.average not in ("trimmed", "krum"):
        found["cohort.hostile"] = (
            f"does nothing with cohort.average={config.cohort.average}; use cohort.average=trimmed "
            "or krum"
        )
    for side, rule in (("server", config.server.optimizer), ("client", config.client.optimizer)):
        if rule in NO_MOMENTUM:
            found[f"{side}.momentum"] = (
                f"does nothing with {side}.optimizer={rule}; use {side}.optimizer=sgd or lars"
            )
    if "client.momentum" not in found and _one_step(config):
        found["client.momentum"] = (
            "does nothing with one local step, as clients' optimizers start anew every round; add "
            "algorithm.local_steps=2 or more"
        )
    for section in VARIANTS:
        own = getattr(config, section).idle_keys()
        found |= {f"{section}.{key}": why for key, why in own.items()}
    found |= _idle_judging(config.evaluate)
    return found | _idle_images(config) | _idle_engine(config.engine)


def _one_step(config: Config) -> bool:
    """Whether no client's optimizer takes a second step, in baselines neither.

    What somebody's own algorithm does with it is not known.
    """
    runs = (config, *(with_algorithm(config, name) for name in config.evaluate.baselines))
    return all(
        run.algorithm.name in VARIANTS["algorithm"]
        and run.algorithm.one_step(variant("algorithm", run.algorithm.name).pools_data)
        for run in runs
    )


def _idle_judging(evaluate: Evaluate) -> dict[str, str]:
    """Of evaluations that there are not, and of protocols that are not asked for."""
    found: dict[str, str] = {}
    if not evaluate.every:
        found["evaluate.monitor"] = (
            "does nothing without evaluations between rounds; add evaluate.every, as in "
            "evaluate.every=10"
        )
    watched = (evaluate.monitor or ()) if evaluate.every else ()
    named = {spec.partition("@")[0] for spec in (*(evaluate.protocols or ()), *watched)}
    if "semi" not in named:
        found["evaluate.head"] = (
            "does nothing without semi; add it to evaluate.protocols, as in semi@10%"
        )
    return found


def _idle_images(config: Config) -> dict[str, str]:
    """Of data sets and encoders of other kinds, and of partitions where clients are real sites."""
    found: dict[str, str] = {}
    if config.data.name not in FILES:
        why = f"does nothing with data.name={config.data.name}, which has no files of images"
        found["data.corrupt"] = f"{why}; it is for data.name={', '.join(FILES)}"
    if config.encoder.name != "vit-tiny":
        found["encoder.patch"] = (
            f"does nothing with encoder.name={config.encoder.name}; use encoder.name=vit-tiny"
        )
    if config.engine.sites is not None:
        found |= dict.fromkeys(("partition.fraction", "partition.level"), AT_SITES)
    return found


def _of_others(engine: str) -> dict[str, str]:
    """Keys that do nothing with an engine, and the one that looks at each."""
    return {key: other for other, keys in OF_ENGINE.items() if other != engine for key in keys}


def _idle_engine(engine: Engine) -> dict[str, str]:
    """Of the other engine, and of simulations where clients are real sites."""
    found = {
        f"engine.{key}": f"does nothing with engine.name={engine.name}; use engine.name={other}"
        for key, other in _of_others(engine.name).items()
    }
    if engine.name == "local":
        found["engine.sites"] = (
            "a simulation has no sites; write an app for them with fedssl deploy init"
        )
    elif engine.sites is not None:
        found["engine.workers"] = AT_SITES
        if engine.compile == "on":  # off says as much
            found["engine.compile"] = AT_SITES
    return found


def _check_judging(evaluate: Evaluate, encoder: Encoder) -> None:
    """By what, at which size, and beside which baselines."""
    if evaluate.protocols == ():
        raise UserError("evaluate.protocols=[]: name at least one, such as knn")
    patch, size = encoder.patch, evaluate.size
    if encoder.name == "vit-tiny" and size is not None and size % patch:
        raise UserError(f"encoder.patch={patch}: does not divide evaluate.size={size}; change one")
    for name in evaluate.baselines:
        if ":" in name:  # a baseline's folder has its name
            raise UserError(
                f"evaluate.baselines={name}: takes names only; make it algorithm.name, and put "
                "what it is compared with here"
            )
        variant("algorithm", name, "evaluate.baselines")


def _params(section: str, name: str) -> Any:
    return variant(section, name).Params


def _several(name: Any) -> list[Any]:
    """The names of a sweep, or the one that there is."""
    return name if isinstance(name, list) else [name]


def _fields_of(section: str, name: Any) -> dict[str, Any]:
    """The keys under a name, or under any of several."""
    kinds = [_fields(_params(section, str(each))) for each in _several(name)]
    return {key: kind for fields in kinds for key, kind in fields.items()}


def _fields(cls: Any) -> dict[str, Any]:
    """Key → type. A trailing underscore keeps Python's keywords free: ``lambda_`` is ``lambda``."""
    hints = typing.get_type_hints(cls)
    return {f.name.rstrip("_"): hints[f.name] for f in dataclasses.fields(cls)}


def _known(name: str, fields: Mapping[str, Any], prefix: str) -> None:
    if name not in fields:
        raise UserError(
            f"{prefix}{name}: unknown key{_nearest(str(name), fields, prefix)}; "
            f"{prefix.rstrip('.') or 'the top level'} has {', '.join(fields)}"
        )


def _nearest(name: str, known: typing.Iterable[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {prefix}{close[0]}?)" if close else ""


def _split(word: str) -> tuple[str, Any]:
    if not word:  # of a shell's variable that is not set
        raise UserError('"": empty, where key=value is expected, as in rounds=100')
    name, equals, text = word.partition("=")
    if not equals and Path(word).is_dir():
        raise UserError(f"{word}: a folder, where key=value is expected; {_meant(word)}")
    if not equals or not name:
        raise UserError(f"{word}: expected key=value, as in rounds=100")
    if not text.strip():  # of a shell's variable that is not set
        raise UserError(f"{word}: has no value; give one, or {name}=null for none")
    return name, _read(text)


class _Words(yaml.SafeLoader):
    """Reads whole numbers and dates only as they would be written; in a list they may be names."""

    def written(self, node: yaml.ScalarNode) -> Any:
        """``7`` is a number, ``007``, ``2024_01`` and ``2024-01-31`` are text."""
        return int(node.value) if re.fullmatch("0|-?[1-9][0-9]*", node.value) else node.value


for _kind in ("int", "timestamp"):
    _Words.add_constructor(f"tag:yaml.org,2002:{_kind}", _Words.written)


def _read(text: str) -> Any:
    """A word's value: what YAML reads, unless that says something else than the text.

    A folder called ``2024_01``, ``2024-01-31`` or ``photos #2`` keeps its name.
    """
    try:
        value = yaml.load(text, _Words)
    except (yaml.YAMLError, ValueError):  # the latter: of numbers that there are not
        return text.strip()
    if isinstance(value, bool) or text.lstrip()[:1] in ("[", "{", '"', "'"):
        return value
    if value is None:
        return None if text.strip() in ("~", "null", "Null", "NULL") else text.strip()
    if isinstance(value, float) and not math.isfinite(value):  # .inf, which only YAML reads
        return value
    return value if str(value) == text.strip() else text.strip()


def _meant(folder: str) -> str:
    """What someone may want who gives a folder where none is expected."""
    if any((Path(folder) / name).is_file() for name in ("config.yaml", "sweep.yaml")):
        return f"to go on with the run in it: {go_on(folder)}"
    return f"for your own images: fedssl run folder data.root={folder}"


def _put(tree: Tree, name: str, value: Any) -> None:
    *sections, last = name.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise UserError(f"{name}: {section} already has a value, so it has no keys")
    tree[last] = value


def _merge(recipe: Tree, overrides: Tree) -> Tree:
    """Overrides win; a new name, rule or engine keeps only keys that mean the same under each."""
    tree = dict(recipe)
    for section, value in overrides.items():
        base = tree.get(section)
        if not isinstance(value, dict) or not isinstance(base, dict):
            tree[section] = value
            continue
        if section in VARIANTS and _renamed(base, value):
            dropped = _dropped(section, base, value)
            base = {k: v for k, v in base.items() if k not in dropped}
        if value.get("optimizer") in NO_MOMENTUM:
            base = {k: v for k, v in base.items() if k != "momentum"}
        if section == "engine" and isinstance(value.get("name"), str):
            base = {k: v for k, v in base.items() if k not in _of_others(value["name"])}
        for pair in ALTERNATIVES:
            if set(pair) & value.keys():
                base = {k: v for k, v in base.items() if k not in pair}
        tree[section] = {**base, **value}
    return tree


def _renamed(base: Tree, value: Tree) -> bool:
    """Whether ``value`` has another name; a file's may be written in several ways."""
    before, after = base.get("name"), value.get("name", base.get("name"))
    return plugins.settled(str(before)) != plugins.settled(str(after))


def _dropped(section: str, base: Tree, value: Tree) -> set[str]:
    """Keys that mean something else, or nothing, under the name in ``value``."""
    before, after = base.get("name"), value["name"]
    old, new = ({plugins.settled(str(n)) for n in _several(name)} for name in (before, after))
    if isinstance(before, list) and (new <= old or old <= new):
        # A run of a sweep, or a longer one: what is beside its names is for all that have the key.
        return _fields_of(section, before).keys() - _fields_of(section, after).keys()
    return base.keys() - _fields(_SECTIONS[section]).keys()


def _convert(kind: Any, value: Any, name: str) -> Any:
    """``value`` as the annotated type ``kind``, or one line that says what was expected."""
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise UserError(
                f"{name}={value}: expected keys such as {name}.{next(iter(_fields(kind)))}"
            )
        fields = _fields(kind)
        values: Tree = {}
        for sub, item in value.items():
            _known(sub, fields, f"{name}.")
            attribute = (
                sub + "_" if sub + "_" in {f.name for f in dataclasses.fields(kind)} else sub
            )
            values[attribute] = _convert(fields[sub], item, f"{name}.{sub}")
        return kind(**values)  # type: ignore[operator]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _convert_union(arguments, value, name)
    if origin is Literal:
        value = _as_choice(arguments, value)
        if value not in arguments or isinstance(value, bool):
            choices = ", ".join(map(str, arguments))
            hint = _nearest(str(value), map(str, arguments))
            raise UserError(f"{name}={value}: unknown{hint}; choose one of {choices}")
        return value
    if origin is tuple:
        return _convert_tuple(arguments, value, name)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise UserError(f"{name}={value}: expected keys and values")
        return value
    return _convert_scalar(kind, value, name)


def _as_choice(choices: tuple[Any, ...], value: Any) -> Any:
    """YAML reads ``off`` and ``on`` as booleans; a choice of that name is what was meant."""
    if isinstance(value, bool):
        return ("off", "on")[value] if ("off", "on")[value] in choices else value
    return value


def _convert_union(arguments: tuple[Any, ...], value: Any, name: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    kinds = [a for a in arguments if a is not type(None)]
    errors = []
    for kind in kinds:
        try:
            return _convert(kind, value, name)
        except UserError as error:
            errors.append(error)
    if len(kinds) == 1:
        raise errors[0]
    raise UserError(f"{name}={value}: expected {' or '.join(map(_described, kinds))}")


def _described(kind: Any) -> str:
    """What a type expects, in words."""
    if typing.get_origin(kind) is Literal:
        return ", ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return "a list as in [64, 32]"
    return _EXPECTED[kind]


def _convert_tuple(arguments: tuple[Any, ...], value: Any, name: str) -> Any:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")] if value else []
    if value is None:
        raise UserError(f"{name}={value}: expected a list; give [] for an empty one")
    if not isinstance(value, (list, tuple)):
        value = [value]
    if arguments[-1] is Ellipsis:
        return tuple(_convert(arguments[0], item, name) for item in value)
    if len(value) != len(arguments):
        raise UserError(f"{name}={value}: expected {len(arguments)} values, got {len(value)}")
    return tuple(_convert(a, item, name) for a, item in zip(arguments, value, strict=True))


_EXPECTED = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _convert_scalar(kind: Any, value: Any, name: str) -> Any:
    wrong = UserError(f"{name}={value}: expected {_EXPECTED[kind]}")
    if kind is bool:
        if not isinstance(value, bool):
            raise wrong
        return value
    if isinstance(value, bool) or value is None or isinstance(value, (dict, list)):
        raise wrong
    if kind is str:
        return str(value)
    try:
        return _number(kind, value)
    except OverflowError:
        digits = " of at most 18 digits" if kind is int else " below 1e308"
        raise UserError(f"{name}={value}: too large; give {_EXPECTED[kind]}{digits}") from None
    except (ValueError, TypeError):
        raise wrong from None


def _number(kind: type[int] | type[float], value: Any) -> int | float:
    """A number that may be text: YAML 1.1 reads 1e-3 so, and ``_read`` keeps 1_000."""
    if isinstance(value, str):
        try:
            value = int(value)  # by way of a float, large ones would change
        except ValueError:
            value = float(value)
    number = kind(value)
    if number != number or (kind is int and number != value):
        raise ValueError
    if kind is int and abs(number) >= 2**63:
        raise OverflowError
    return number
