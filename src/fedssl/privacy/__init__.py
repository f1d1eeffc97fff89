"""What a server may learn of its clients: plain, robust and noisy means, and secure sums."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from fedssl.algorithms.dcco import DCCO
from fedssl.algorithms.standalone import Standalone
from fedssl.config import Config
from fedssl.federation.aggregate import Aggregator
from fedssl.federation.algorithm import Algorithm
from fedssl.federation.sampling import cohort_size
from fedssl.objectives.base import Objective
from fedssl.objectives.moments import MomentObjective
from fedssl.training.batches import Batches
from fedssl.util.errors import UserError
from fedssl.util.text import shorten_list

FEW = 2  # images whose means and products tell each one, of whatever they are
NAMED = 5  # clients that are named


class SumsOnly(Aggregator):
    """The server sees sums alone: no client's number for the log is asked for."""

    allows_client_logs = False


def build_aggregator(config: Config, algorithm: Algorithm, clients: int, cohort: int) -> Aggregator:
    """How replies are averaged, with ``cohort`` of ``clients`` clients in a round."""
    check(config, algorithm)
    if config.privacy.secure:
        _check_many(cohort)
        _check_installed()
    if config.privacy.noise is not None:
        from fedssl.privacy.noise import Noisy

        return Noisy(config, algorithm, clients, cohort)
    if config.cohort.average != "mean":
        from fedssl.privacy.robust import Robust

        return Robust(config.cohort, cohort)
    return SumsOnly() if config.privacy.secure else Aggregator()


def check(config: Config, algorithm: Algorithm) -> None:
    """Refuse combinations in which one promise breaks another."""
    privacy, rule = config.privacy, config.cohort.average
    if rule != "mean":
        _check_robust(rule, algorithm)
    if rule != "mean" and algorithm.gathers:
        raise UserError(
            f"cohort.average={rule} with algorithm.name={algorithm.params.name}: its server passes "
            f"on each client's own reply ({', '.join(algorithm.gathers)}), which no robust mean "
            "looks at; use cohort.average=mean"
        )
    asked = "privacy.secure=true" if privacy.secure else f"privacy.noise={privacy.noise}"
    if not privacy.secure and privacy.noise is None:
        return
    if rule != "mean":
        raise UserError(
            f"cohort.average={rule} with {asked}: "
            + (
                "a robust mean compares the clients' replies, which a secure sum never shows"
                if privacy.secure
                else "the noise is made for a sum in which every client's share is bounded"
            )
            + "; use cohort.average=mean, or leave the other out"
        )
    if algorithm.gathers:
        raise UserError(
            f"algorithm.name={algorithm.params.name} with {asked}: its server sees each client's "
            f"own reply ({', '.join(algorithm.gathers)}), not only sums; use another algorithm"
        )
    if algorithm.pools_data:
        raise UserError(
            f"algorithm.name={algorithm.params.name} with {asked}: it has all data in one place; "
            "use another algorithm, or leave it out"
        )
    if privacy.noise is not None:
        _check_noise(config, algorithm)
    if privacy.secure:
        _check_secure(config)
    if config.engine.updates == "fp16":
        raise UserError(
            f"engine.updates=fp16 with {asked}: what is clipped or summed in secret travels in the "
            "numbers that this was proven for; use engine.updates=full"
        )


@dataclass(frozen=True)
class Replies:
    """Those to these exchanges; made of ``most`` images or fewer, they tell of single images."""

    tasks: tuple[str, ...]
    most: int
    changes: bool  # of the weights; else statistics of encodings

    def tell(self, images: int) -> str:
        """What such replies do that are made of so many images."""
        if self.changes:
            return "may tell the image itself, by published attacks"
        return "are its encoding" if images == 1 else "can tell the encoding of each"


def kinds(config: Config, algorithm: Algorithm) -> list[Replies]:
    """The replies that can tell of single images; those that do it of more images come first.

    Several steps on one image count as one step does: nothing else is in the change. A change by
    more images is harder to read, by no proof.
    """
    if algorithm.pools_data or not shares(algorithm):
        return []
    asked = (*algorithm.asked(config.privacy.secure), *algorithm.gathers)
    statistics = tuple(task for task in asked if task in algorithm.statistics)
    rest = (*algorithm.statistics, *algorithm.varying)  # the latter are of single images anyway
    changes = tuple(task for task in asked if task not in rest)
    found = Replies(statistics, few_images(algorithm.objective), False), Replies(changes, 1, True)
    return [replies for replies in found if replies.tasks]


def shares(algorithm: Algorithm) -> bool:
    """Whether anything but a loss leaves a client; somebody's own algorithm may reply more."""
    alone = not algorithm.has_global and not algorithm.gathers
    return not (alone and type(algorithm).reply_like is Standalone.reply_like)


def telling(config: Config, replies: Replies, sizes: Sequence[int]) -> dict[int, int]:
    """The clients whose replies tell of single images: how many images these are made of.

    Noise does not help: the server adds it. Of a secure sum nobody sees a client's part, and these
    are the clients of the smallest one that there may be, if they tell it together.
    """
    batches = Batches.from_config(config.algorithm, config.seed)
    # A round that averages one image trains on this one alone, and the other way round.
    used = {k: batches.averaged(size) for k, size in enumerate(sizes)}
    if config.privacy.secure and used:
        least = sorted(used, key=lambda k: used[k])[: fewest(config, len(used))]
        return {k: used[k] for k in least} if sum(used[k] for k in least) <= replies.most else {}
    return {k: images for k, images in used.items() if images <= replies.most}


def few_images(objective: Objective) -> int:
    """Statistics over so many images, or fewer, can tell the encoding of each.

    They are then no fewer numbers than the encodings: of two views of N images these are 2 N d, and
    the moments are d² + 4 d, or with both views' own products 2 d² + 3 d that differ. Where the
    moments leave something open, the network tells it, which the server has: a ReLU before its last
    layer makes many of that layer's inputs 0 and none negative (docs/privacy.md).
    """
    if not isinstance(objective, MomentObjective):
        return FEW
    width = objective.params.projector[-1]
    return width + 1 if objective.within_tower else width // 2 + 2


def survivors_needed(share: float, clients: int) -> int:
    """Return how many clients of a secure sum must answer: at least three, and over half.

    In a sum of two, each knows the other's part. Every site checks this number by itself.
    ``privacy.threshold`` is above one half.
    """
    return max(3, math.ceil(share * clients))


def fewest(config: Config, clients: int) -> int:
    """How few clients a round's first secure sum may be of.

    ``cohort.minimum`` does not count: it is looked at when the server has the sum.
    """
    return survivors_needed(config.privacy.threshold, cohort_size(config, clients))


def told(
    config: Config, algorithm: Algorithm, sizes: Sequence[int], names: Sequence[str] = ()
) -> str | None:
    """What is said of them, to whoever runs, reads or publishes; none: there are no such clients.

    Of ``names`` those that are only the clients' numbers are left out.
    """
    said: dict[str, list[str]] = {}
    for replies, single in _found(config, algorithm, sizes):
        images = (sum if config.privacy.secure else max)(single.values())
        made = _made(config, images, single, len(sizes), names)
        said.setdefault(made, []).append(replies.tell(images))
    return "; ".join(f"{made} {' and '.join(tell)}" for made, tell in said.items()) or None


def _found(
    config: Config, algorithm: Algorithm, sizes: Sequence[int]
) -> Iterator[tuple[Replies, dict[int, int]]]:
    """The replies that do tell of single images, and whose they are."""
    for replies in kinds(config, algorithm):
        if single := telling(config, replies, sizes):
            yield replies, single


def _made(
    config: Config, images: int, single: Collection[int], clients: int, names: Sequence[str]
) -> str:
    """Which replies or sums, of how many images and clients."""
    if config.privacy.secure:
        return f"sums that may be of {images} images ({len(single)} clients)"
    made = "one image" if images == 1 else f"at most {images} images"
    return f"replies of {made} ({_who(single, clients, names)})"


def _who(single: Collection[int], clients: int, names: Sequence[str]) -> str:
    """How many clients, and some of their names."""
    who = f"{len(single):,} of {clients:,} clients"
    who = f"all {clients:,} clients" if len(single) == clients else who
    own = [names[k] for k in single if k < len(names) and names[k] != str(k)]
    return f"{who}: {shorten_list(own, NAMED)}" if own else who


def remedy(config: Config, algorithm: Algorithm, sizes: Sequence[int]) -> str:
    """What would help where replies tell of single images, of what this run could do."""
    found = list(_found(config, algorithm, sizes))
    most = max(replies.most for replies, _ in found)
    number = "one image" if most == 1 else f"{most:,} images"
    if config.privacy.secure:
        return f"more than {number} in a sum (more clients a round, or more images of each)"
    clients = {k for _, single in found for k in single}
    keys = ", ".join(_limits(config, most, [sizes[k] for k in clients]))
    ways = [f"more than {number} a client in a round" + (f" ({keys})" if keys else "")]
    if _sums_hide(config, algorithm, sizes):
        flower = "" if config.engine.name == "flower" else " with engine.name=flower"
        ways.append(f"privacy.secure=true{flower}")
    return ", or ".join(ways)


def _limits(config: Config, most: int, sizes: Sequence[int]) -> Iterator[str]:
    """The keys that keep clients of these sizes at ``most`` images a round, or fewer."""
    batch = config.algorithm.batch
    if batch is not None and any(size > min(batch, most) for size in sizes):
        yield "algorithm.batch"
    if any(size <= most for size in sizes):
        known = {"samples": "partition.samples", "clients": "fewer partition.clients"}
        yield from [key for name, key in known.items() if hasattr(config.partition, name)][:1]


def _sums_hide(config: Config, algorithm: Algorithm, sizes: Sequence[int]) -> bool:
    """Whether secure sums are possible here, and none of them could tell of single images."""
    hidden = in_sums(config, algorithm, len(sizes))
    return hidden is not None and not any(_found(hidden, algorithm, sizes))


def in_sums(config: Config, algorithm: Algorithm, clients: int | None) -> Config | None:
    """The same under secure sums; none: they are refused beside its other keys.

    As far as that goes without the number of ``clients``, where it is not known.
    """
    engine, privacy = replace(config.engine, name="flower"), replace(config.privacy, secure=True)
    hidden = replace(config, engine=engine, privacy=privacy)
    try:
        check(hidden, algorithm)
        if clients is not None:
            _check_many(cohort_size(config, clients))
    except UserError:
        return None
    return hidden


def _check_many(cohort: int) -> None:
    """Refuse sums that hide nothing."""
    if cohort < 3:
        raise UserError(
            f"privacy.secure=true with {cohort} clients a round: of a sum of two, each knows the "
            "other's part; take at least 3 clients a round"
        )


def _check_installed() -> None:
    """What secure sums are computed with."""
    if not all(map(importlib.util.find_spec, ("cryptography", "Crypto"))):
        raise UserError(
            "privacy.secure=true: the packages cryptography and pycryptodome are not installed; "
            "pip install 'fedssl[flower]'"
        )


def _check_secure(config: Config) -> None:
    """What needs to look at single replies, or has nothing to hide them from."""
    if config.engine.name == "local":
        raise UserError(
            "privacy.secure=true with engine.name=local: one process holds every client, so "
            "nothing would be secret; use engine.name=flower"
        )
    if getattr(config.algorithm, "clusters", 1) > 1:
        raise UserError(
            f"privacy.secure=true with algorithm.name={config.algorithm.name}: it sums by cluster, "
            "and the sum of a cluster with one client is that client's change; use "
            "algorithm.clusters=1, or another algorithm"
        )
    if config.engine.max_norm is not None:
        raise UserError(
            f"engine.max_norm={config.engine.max_norm:g} with privacy.secure=true: the server sees "
            "no client's change, so it can refuse none; leave one of the two out"
        )


def _check_robust(rule: str, algorithm: Algorithm) -> None:
    """There must be something to average."""
    if algorithm.pools_data or not algorithm.has_global:
        raise UserError(
            f"cohort.average={rule} with algorithm.name={algorithm.params.name}: it averages no "
            "clients' models, so there is nothing to protect; use cohort.average=mean"
        )


def _check_noise(config: Config, algorithm: Algorithm) -> None:
    """Every release must be bounded and counted."""
    noise, name = config.privacy.noise, algorithm.params.name
    if config.evaluate.baselines:
        raise UserError(
            f"evaluate.baselines={','.join(config.evaluate.baselines)} with privacy.noise={noise}: "
            "they would tell of the same clients again, and ε counts one run; set "
            "evaluate.baselines=[]"
        )
    if config.evaluate.drift:
        raise UserError(
            f"evaluate.drift=true with privacy.noise={noise}: it logs how far each client's own "
            "model is from the global one, without noise; leave it out"
        )
    if not algorithm.has_global:
        raise UserError(
            f"algorithm.name={name} with privacy.noise={noise}: nothing is shared that noise could "
            "protect; leave privacy.noise out"
        )
    if config.algorithm.norm_policy == "local":
        raise UserError(
            f"algorithm.norm_policy=local with privacy.noise={noise}: the exported encoder would "
            "have the mean of the clients' own layers, without noise; use average or reset"
        )
    if isinstance(algorithm, DCCO) and algorithm.bound("encode") is None:
        raise UserError(
            f"algorithm.name={name} with privacy.noise={noise}: the moments of encodings without "
            "a bound have none either; set objective.bound, as in objective.bound=1"
        )
    if algorithm.weight == "uniform" and config.privacy.most_samples > 1:
        raise UserError(
            f"privacy.most_samples={config.privacy.most_samples} with algorithm.name={name}: here "
            "all clients count alike, and the larger noise would protect nothing; use "
            "privacy.most_samples=1"
        )
    moments = config.privacy.moments_noise
    if moments is not None and all(algorithm.bound(task) is None for task in algorithm.means):
        raise UserError(
            f"privacy.moments_noise={moments}: algorithm.name={name} shares no moments; leave it "
            "out, or use algorithm.name=dcco (with evaluate.baselines=[])"
        )
