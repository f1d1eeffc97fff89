"""Sections of the configuration as frozen dataclasses: the reference of the keys.

Sections with a ``name`` that stands for a class (objective, algorithm, partition) take further
keys from that class's ``Params``.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fedssl.util.errors import UserError, suggest

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
        """Return keys that have no effect with ``source=labels``."""
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
                f"encoder.name={self.name}: unknown{suggest(self.name, known)}; choose one of "
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
