"""Sections of the configuration as frozen dataclasses: the reference of the keys.

Sections with a ``name`` that stands for a class (objective, algorithm, partition) take further
keys from that class's ``Params``.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fedssl.config import plugins
from fedssl.config.catalogue import TIMM, DataName, Initializer, EncoderName
from fedssl.config.keys import key
from fedssl.config.variants import AlgorithmParams, ObjectiveParams, PartitionParams
from fedssl.util.errors import UserError, suggest


def _check_name(key: str, name: str, known: tuple[str, ...], *others: str) -> None:
    """Refuse a name that is neither fedssl's nor that of a user's own object."""
    if name not in known and not plugins.is_own(name):
        fix = f"Choose one of {', '.join((*known, *others))}, or FILE.py:NAME."
        raise UserError(f"unknown{suggest(name, known)}", key=key, value=name, fix=fix)


@dataclass(frozen=True)
class Data:
    """The images, and how they become arrays."""

    name: DataName | str = key(
        "digits",
        help="Data set. `folder` and `paired` read images of your own, `FILE.py:NAME` calls a "
        "function of your own.",
    )
    root: str | None = key(
        None,
        path=True,
        affects="location",
        help="Folder of the images. Data sets that fedssl downloads need none.",
    )
    size: int | None = key(
        None,
        gt=0,
        help="Height and width of images in pixels. `null`: the size of the data set.",
    )
    levels: tuple[Literal["class", "client", "case"], ...] | None = key(
        None,
        needs="name=folder|paired",
        help="Meaning of each folder level below `train/` and `test/`, from the top: "
        "`client,class` is `train/<site>/<class>/`. `null`: detected.",
    )
    corrupt: Literal["fail", "skip"] = key(
        "fail",
        needs="name=folder|paired|tiny-imagenet",
        help="What happens with an image that cannot be read: stop, or leave it out.",
    )
    val: bool = key(
        False,
        needs="name=folder",
        help="Read the validation images in `val/`, on which `evaluate.preset=derm` chooses.",
    )
    halves: bool = key(False, help="Use the left and right half of each image as two modalities.")
    labels: int | None = key(
        None,
        gt=0,
        help="Train on this many images only, drawn evenly from the classes. `null`: on all.",
    )
    holdout: float = key(
        0.0,
        ge=0,
        lt=1,
        help="Share of the training images that no client gets, drawn evenly from the classes. "
        "The protocol `semi` fine-tunes on them (FedEMA, appendix B.3); `heldout` evaluates on "
        "them.",
    )
    cache: str | None = key(
        None,
        path=True,
        affects="nothing",
        help="Folder for decoded images, downloads and compiled code. `null`: `$FEDSSL_CACHE`, "
        "else `~/.cache/fedssl`.",
    )

    def __post_init__(self) -> None:
        _check_name("data.name", self.name, typing.get_args(DataName))


@dataclass(frozen=True)
class Augment:
    """Augmentation of training images: a preset, and keys that replace its values."""

    name: str = key(
        "dcco",
        help="Preset, named after the paper that uses it. `FILE.py:NAME`: a function of your own.",
    )
    crop: tuple[float, float] | None = key(
        None,
        gt=0,
        le=1,
        help="Smallest and largest area of a random resized crop, as shares of the image.",
    )
    flip: float | None = key(None, ge=0, le=1, help="Probability of a horizontal flip.")
    rotate: float | None = key(
        None, ge=0, le=180, help="Largest random rotation to either side, in degrees."
    )
    jitter: tuple[float, float, float, float] | None = key(
        None, ge=0, help="Strength of changes of brightness, contrast, saturation and hue."
    )
    jitter_p: float | None = key(None, ge=0, le=1, help="Probability of colour jitter.")
    gray: float | None = key(None, ge=0, le=1, help="Probability of conversion to grayscale.")
    blur: tuple[float, float] | None = key(
        None, ge=0, le=1, help="Probabilities of Gaussian blur in the first and in the second view."
    )
    solarize: tuple[float, float] | None = key(
        None, ge=0, le=1, help="Probabilities of solarization in the first and in the second view."
    )
    noise: float | None = key(
        None, ge=0, help="Standard deviation of Gaussian noise. Pixels are between 0 and 1."
    )


@dataclass(frozen=True)
class Encoder:
    """The network that a run trains and keeps."""

    name: EncoderName | str = key(
        "tiny",
        help="Architecture. `timm/NAME`: a backbone from timm. `FILE.py:NAME`: a module of your "
        "own.",
    )
    norm: Literal["batch", "group"] = key(
        "group",
        help="Normalization layers. With `group`, convolutions have weight standardization. "
        "`vit-tiny` and backbones from timm keep their normalization; there the key applies to "
        "projector and predictor.",
    )
    groups: int = key(32, gt=0, help="Number of groups of group normalization.")
    towers: Literal[1, 2] = key(
        1,
        help="Number of networks: one for both views or modalities, or one for each.",
    )
    init: str | None = key(
        None,
        path=True,
        help="Weights to start from: `encoder.safetensors`, or the folder of a run or an export.",
    )
    initializer: Initializer = key(
        "he",
        help="Random initial weights. `he`: He et al. 2015, as torchvision's ResNets. `torch`: "
        "uniform within 1/√inputs, as torch's layers.",
    )
    patch: int = key(2, gt=0, needs="name=vit-tiny", help="Height and width of patches in pixels.")

    def __post_init__(self) -> None:
        if not self.name.startswith(TIMM):
            _check_name("encoder.name", self.name, typing.get_args(EncoderName), f"{TIMM}NAME")


@dataclass(frozen=True)
class Engine:
    """The place where clients run."""

    name: Literal["local", "flower"] = key(
        "local",
        affects="rounding",
        help="`local`: in this process. `flower`: in processes or on machines of Flower.",
    )
    merge: Literal["auto", "off"] = key(
        "auto",
        affects="rounding",
        help="Compute a round in one pass over all clients. `auto`: where the result is the "
        "same. `off`: client by client.",
    )
    chunk: int = key(
        8192,
        gt=0,
        affects="speed",
        needs="name=local",
        help="Largest number of images in one pass of a merged round.",
    )
    compile: Literal["auto", "on", "off"] = key(
        "auto",
        affects="rounding",
        help="Compile the training step. `auto`: on a GPU, if the run is long enough.",
    )
    threads: int | Literal["auto"] = key(
        "auto",
        gt=0,
        le=1024,  # far more crash the process
        affects="rounding",
        help="CPU threads. `auto`: `OMP_NUM_THREADS`, else the cores of the machine. The run's "
        "`config.yaml` has the number, and `--resume` keeps it: results are reproducible only with "
        "the same number of threads.",
    )
    workers: int = key(
        2, gt=0, affects="speed", needs="name=flower", help="Number of processes of a simulation."
    )
    timeout: float = key(
        600.0,
        gt=0,
        affects="speed",
        needs="name=flower",
        help="Seconds that clients have to answer. Later replies are missing from the round.",
    )
    updates: Literal["full", "fp16"] = key(
        "full",
        affects="rounding",
        needs="name=flower",
        help="Number format in which model updates travel to the server.",
    )
    max_norm: float | None = key(
        None, gt=0, needs="name=flower", help="Refuse model updates with a larger L2 norm."
    )
    max_ratio: float | None = key(
        100.0,
        gt=1,
        needs="name=flower",
        help="Refuse a reply that is so many times larger than the median of the round's replies, "
        "by the root mean square of its numbers. An update may also be larger by as much as its "
        "client has more images.",
    )
    max_samples: int = key(
        10_000_000, gt=0, needs="sites", help="Refuse a site that claims to have more images."
    )
    sites: int | None = key(
        None, gt=0, needs="name=flower", help="Number of sites of a deployment. `null`: simulation."
    )


@dataclass(frozen=True)
class Privacy:
    """Secure aggregation and differential privacy; both are off by default."""

    secure: bool = key(False, help="Secure aggregation: the server sees only sums over clients.")
    threshold: float = key(
        0.67,
        gt=0.5,
        le=1,
        needs="secure",
        help="Share of a cohort that must answer for a secure sum to be opened.",
    )
    noise: float | None = key(
        None,
        gt=0,
        help="Differential privacy: standard deviation of the noise on a sum, as a multiple of "
        "`privacy.clip`.",
    )
    clip: float = key(
        1.0,
        gt=0,
        needs="noise",
        help="L2 norm to which a client's contribution is clipped. `objective.bound` bounds "
        "moments.",
    )
    moments_noise: float | None = key(
        None,
        gt=0,
        needs="noise",
        help="Noise on statistics of encodings, as a multiple of their bound. "
        "`null`: as `privacy.noise`.",
    )
    most_samples: int = key(
        1, gt=0, needs="noise", help="Largest number of samples that count in a client's weight."
    )
    delta: float = key(
        1e-5, gt=0, lt=1, needs="noise", help="δ of the reported (ε, δ) privacy budget."
    )


@dataclass(frozen=True)
class Optimizer:
    """The optimizer: `server` applies the mean update, `client` trains at each client."""

    optimizer: Literal["sgd", "adam", "adamw", "lars"] = key("sgd", help="Optimizer.")
    lr: float = key(1.0, gt=0, help="Learning rate.")
    momentum: float = key(
        0.0,
        ge=0,
        lt=1,
        needs="optimizer=sgd|lars",
        help="Share of the previous step that is added.",
    )
    weight_decay: float = key(0.0, ge=0, help="Weight decay.")


@dataclass(frozen=True)
class Cohort:
    """The clients of a round; with neither size nor fraction, all clients."""

    size: int | None = key(None, gt=0, instead_of="fraction", help="Number of clients in a round.")
    fraction: float | None = key(
        None, gt=0, le=1, help="Share of clients in a round, as an alternative to `cohort.size`."
    )
    minimum: int = key(1, gt=0, help="Skip a round with fewer replies.")
    dropout: float = key(
        0.0,
        ge=0,
        lt=1,
        help="Probability that a client leaves the round before an exchange, drawn from `seed`. "
        "Simulates replies that do not come.",
    )
    average: Literal["mean", "median", "trimmed", "krum"] = key(
        "mean",
        help="Average of the replies. All but `mean` withstand some hostile clients and give "
        "clients equal weights.",
    )
    hostile: int = key(
        1, ge=0, needs="average=trimmed|krum", help="Number of hostile clients to withstand."
    )


@dataclass(frozen=True)
class Evaluate:
    """Evaluation of the encoder."""

    protocols: tuple[str, ...] | None = key(
        None,
        nonempty=True,
        affects="evaluation",
        help="Protocols after training, such as `knn`, `linear`, `linear@500` (with 500 labels) or "
        "`semi@10%`. `null`: `knn` and `linear`, or `unlabeled` and `transfer` if there are no "
        "labels.",
    )
    every: int = key(
        0,
        ge=0,
        affects="monitoring",
        help="Rounds between evaluations during training. 0: evaluate only at the end.",
    )
    monitor: tuple[str, ...] | None = key(
        None,
        affects="monitoring",
        needs="every",
        help="Protocols during training. `null`: `evaluate.protocols`.",
    )
    targets: tuple[float, ...] = key(
        (),
        affects="monitoring",
        help="Accuracies in percent. The run records the first round that reaches each (FedEMA, "
        "Table 11).",
    )
    preset: Literal["logistic", "dcco", "derm", "fedema", "ccl"] = key(
        "logistic",
        affects="evaluation",
        help="Training of linear probe and fine-tuning. `logistic`: logistic regression; others: "
        "as in the paper. `derm`: fine-tuning as for DCCO's Table 2, with rate and steps chosen on "
        "validation images (`data.val=true`), and labelled cases drawn regardless of their class.",
    )
    head: Literal["mlp", "linear"] = key(
        "mlp", affects="evaluation", help="Classifier of `semi`: as in FedEMA or as in CCL."
    )
    client_test: Literal["folder", "matched", "iid"] | None = key(
        None,
        affects="evaluation",
        help="Test images of a client in `per-client`. `folder`: those in its folder. `matched`: "
        "the same share of each class as its training images. `iid`: an even random part. `null`: "
        "`folder` if the test split has client folders, else `matched`.",
    )
    k: int = key(
        20, gt=0, affects="evaluation", help="Number of neighbours of `knn`, at most all images."
    )
    temperature: float = key(0.1, gt=0, affects="evaluation", help="Temperature of `knn`.")
    size: int | None = key(
        None,
        gt=0,
        affects="evaluation",
        help="Height and width of images in evaluation. `null`: `data.size`.",
    )
    tower: Literal["first", "second"] = key(
        "first", affects="evaluation", help="Network to evaluate where there are two."
    )
    baselines: tuple[str, ...] = key(
        (),
        affects="monitoring",
        help="Algorithms to train with the same settings, for comparison.",
    )
    show_training_images: bool = key(
        False,
        affects="nothing",
        help="Show training images in the report where there are no test images. Only people who "
        "may see them should get the report.",
    )
    drift: bool = key(
        False,
        affects="monitoring",
        help="Log the distance of local models from the global model (Dec-SSL, B.3).",
    )


@dataclass(frozen=True)
class Checkpoint:
    """When the run writes a checkpoint."""

    seconds: float = key(
        30.0,
        ge=0,
        finite=False,
        affects="speed",
        help="Seconds between checkpoints, more if writing takes long. 0: after every round.",
    )


@dataclass(frozen=True)
class Config:
    """One run, complete."""

    partition: PartitionParams
    objective: ObjectiveParams
    algorithm: AlgorithmParams
    about: str = key("", affects="nothing", help="Description of the recipe in one line.")
    paper: Mapping[str, Any] = key(
        default_factory=dict,
        affects="nothing",
        help="Table cell that the recipe reproduces: row, results (measure: number) and note.",
    )
    data: Data = Data()
    augment: Augment = Augment()
    encoder: Encoder = Encoder()
    engine: Engine = Engine()
    server: Optimizer = Optimizer("adam", 1e-3)
    client: Optimizer = Optimizer("sgd", 1.0)
    schedule: Literal["constant", "cosine", "steps"] = key(
        "cosine",
        help="Learning rates over the rounds. `constant`: unchanged. `cosine`: down to 0. `steps`: "
        "times 0.3 after 30%, 60% and 90% of the "
        "rounds (Dec-SSL).",
    )
    cohort: Cohort = Cohort()
    privacy: Privacy = Privacy()
    rounds: int = key(100, ge=0, help="Number of rounds.")
    seed: int = key(
        0, ge=0, help="Random seed of everything except privacy noise and encryption keys."
    )
    device: str = key(
        "auto",
        affects="speed",
        help="Device, as torch names it: `cpu`, `cuda`, `cuda:1`. `auto`: a GPU if there is one.",
    )
    precision: Literal["auto", "bf16", "fp32", "fp64"] = key(
        "auto",
        affects="rounding",
        help="Number format of networks. `auto`: `bf16` on a GPU, `fp32` on a CPU.",
    )
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    log: tuple[Literal["wandb", "mlflow"], ...] = key(
        (),
        affects="nothing",
        help="Loggers beside `metrics.jsonl` and TensorBoard, which is used where it is installed.",
    )

    @property
    def split_seed(self) -> int:
        """The seed of every draw of images; ``seed`` draws everything else."""
        return self.seed if self.partition.seed is None else self.partition.seed
