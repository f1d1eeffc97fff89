"""What a server may learn of its clients: plain, robust and noisy means, and secure sums."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from fedssl.algorithms.base import Algorithm, Average
from fedssl.algorithms.dcco import DCCO
from fedssl.config import Config
from fedssl.data.images import few
from fedssl.errors import UserError
from fedssl.plan import Plan

# Images whose statistics tell each one's encoding. Means and products of N encodings leave open how
# they are turned in N - 1 dimensions: of two, nothing. Where a bound makes all norms known, there
# are 2 N - 2 more equations (their sums were known) for the turn's (N - 1)(N - 2) / 2 angles:
# enough up to six, where finitely many turns are left.
FEW, FEW_BOUNDED = 2, 6
NAMED = 5  # clients that are named


class Hidden(Average):
    """The server sees sums alone: no client's number for the log is asked for."""

    logs = False


def average(config: Config, algorithm: Algorithm, clients: int, cohort: int) -> Average:
    """How replies are averaged, with ``cohort`` of ``clients`` clients in a round."""
    check(config, algorithm)
    if config.privacy.secure and cohort < 3:
        raise UserError(
            f"privacy.secure=true with {cohort} clients a round: of a sum of two, each knows the "
            "other's part; take at least 3 clients a round"
        )
    if config.privacy.noise is not None:
        from fedssl.privacy.noise import Noisy

        return Noisy(config, algorithm, clients, cohort)
    if config.cohort.average != "mean":
        from fedssl.privacy.robust import Robust

        return Robust(config.cohort, cohort)
    return Hidden() if config.privacy.secure else Average()


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


def telling(config: Config, algorithm: Algorithm, sizes: Sequence[int]) -> dict[int, int]:
    """The clients whose statistics tell single images' encodings: how many images these are of.

    Noise does not help: the server adds it. A secure sum does: nobody sees a client's part.
    """
    if config.privacy.secure or not algorithm.statistics:
        return {}
    plan, most = Plan.from_config(config.algorithm, config.seed), few_images(config)
    used = {k: plan.averaged(size) for k, size in enumerate(sizes)}
    return {k: images for k, images in used.items() if images <= most}


def few_images(config: Config) -> int:
    """Statistics over so many images, or fewer, tell the encoding of each."""
    return FEW if getattr(config.objective, "bound", None) is None else FEW_BOUNDED


def told(
    config: Config, algorithm: Algorithm, sizes: Sequence[int], names: Sequence[str] = ()
) -> str | None:
    """What is said of them, to whoever runs, reads or publishes; none: there are no such clients.

    Of ``names`` those that are only the clients' numbers are left out.
    """
    single = telling(config, algorithm, sizes)
    if not single:
        return None
    who = f"{len(single):,} of {len(sizes):,} clients"
    who = f"all {len(sizes):,} clients" if len(single) == len(sizes) else who
    own = [names[k] for k in single if k < len(names) and names[k] != str(k)]
    who += f" ({few(own, NAMED)})" if own else ""
    asked = algorithm.asked(config.privacy.secure)
    tasks = " and ".join(f"“{task}”" for task in asked if task in algorithm.statistics)
    tell = "one image: they are its encoding"
    if max(single.values()) > 1:
        tell = f"at most {few_images(config)} images: they tell the encoding of each"
    return f"in a round, the replies of {who} to {tasks} are made of {tell}"


def _check_secure(config: Config) -> None:
    """What needs to look at single replies, or has nothing to hide them from."""
    if config.engine.name == "local":
        raise UserError(
            "privacy.secure=true with engine.name=local: one process holds every client, so "
            "nothing would be secret; use engine.name=flower"
        )
    if not all(map(importlib.util.find_spec, ("cryptography", "Crypto"))):
        raise UserError(
            "privacy.secure=true: the packages cryptography and pycryptodome are not installed; "
            "pip install 'fedssl[flower]'"
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
