"""Sections of the configuration as frozen dataclasses: the reference of the keys.

Sections with a ``name`` that stands for a class (objective, algorithm, partition) take further
keys from that class's ``Params``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fedssl.config.images import LARGEST_IMAGE, Augment, Data, Encoder
from fedssl.config.keys import key
from fedssl.config.variants import (
    LARGEST_SEED,
    AlgorithmParams,
    ObjectiveParams,
    PartitionParams,
)


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
        2,
        gt=0,
        le=1024,
        affects="speed",
        needs="name=flower",
        help="Number of processes of a simulation.",
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
        "client has more images. Of two replies neither counts.",
    )
    max_samples: int = key(
        10_000_000, gt=0, needs="sites", help="Refuse a site that claims to have more images."
    )
    sites: int | None = key(
        None,
        gt=0,
        le=100_000,
        needs="name=flower",
        help="Number of sites of a deployment. `null`: simulation.",
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
        le=1e6,
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
        le=1e6,
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
    accountant: Literal["rdp", "pld"] = key(
        "rdp",
        affects="monitoring",
        needs="noise",
        help="Computation of ε. `rdp`: Rényi divergences. `pld`: distributions of the privacy "
        "loss, which give a smaller ε for the same noise.",
    )
    budget: float | None = key(
        None,
        gt=0,
        needs="noise",
        help="Largest ε of all runs on the same images together. The run ends before the round "
        "that would exceed it.",
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
    decay: Literal["all", "matrices"] = key(
        "all",
        needs="weight_decay",
        help="Parameters that decay: all, or those of two and more dimensions, without biases and "
        "normalization. `lars` decays only the latter.",
    )
    layer_decay: float = key(
        1.0,
        gt=0,
        le=1,
        help="Factor of the learning rate from each block of the encoder to the block before it. "
        "Heads and the last block have the full rate.",
    )
    clip_norm: float | None = key(
        None, gt=0, help="Largest L2 norm of a step's gradient; a longer one is scaled down."
    )
    warmup: int = key(
        0,
        ge=0,
        help="Rounds in which the learning rate rises evenly to its value. The schedule follows.",
    )


@dataclass(frozen=True)
class Cohort:
    """The clients of a round; with neither size nor fraction, all clients."""

    size: int | None = key(
        None,
        gt=0,
        instead_of="fraction",
        help="Number of clients in a round; all, if there are fewer.",
    )
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
    guard: Literal["knn", "unlabeled"] | None = key(
        None,
        needs="every",
        help="Compare the encoder with the one that it started as, on the images of "
        "`data.holdout`, and keep the best. `knn`: by labels. `unlabeled`: by the share of images "
        "whose two augmented views are matched.",
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
        ge=2,
        le=LARGEST_IMAGE,
        affects="evaluation",
        help="Height and width of images in evaluation. `null`: those of a view.",
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
        0,
        ge=0,
        le=LARGEST_SEED,
        help="Random seed of everything except privacy noise and encryption keys.",
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
