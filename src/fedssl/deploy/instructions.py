"""Write the instructions of an app: SITES.md for administrators, SERVER.md for the operator."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from fedssl import __version__
from fedssl.config import Config, plugins
from fedssl.federation.algorithm import build_algorithm
from fedssl.federation.sampling import cohort_size
from fedssl.privacy.checks import allows_secure_sums, smallest_sum
from fedssl.privacy.exchanges import describe_protection, list_exchanges
from fedssl.privacy.leakage import Risk, list_risks
from fedssl.runs.folder import CONNECTION, PACKAGE
from fedssl.training.batches import Batches
from fedssl.util.text import format_bytes

if TYPE_CHECKING:
    from fedssl.deploy.estimate import Traffic

FLOWER = "1.41.0"  # the version that these commands were tried with
TEMPLATES = Path(__file__).with_name("templates")


def fill(template: str, **values: object) -> str:
    """Fill in a file of ``templates/``."""
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    return Template(text).substitute(values, version=__version__, flower=FLOWER, package=PACKAGE)


def sites(config: Config, recipe: str, moved: Traffic | None = None) -> str:
    """Instructions for a site's administrator; ``moved`` is what a round costs, where known."""
    square, algorithm = "all of one square size", plugins.short_name(config.algorithm.name)
    if config.data.size is not None:
        square = f"of any size: they are cut to a square and resized to {config.data.size} pixels"
    damaged = "One damaged image keeps this site, and so the run, from starting (last table)."
    if config.data.corrupt == "skip":
        damaged = "Damaged images are left out, and the log names them (`data.corrupt=skip`)."
    return fill(
        "SITES.md",
        recipe=recipe,
        algorithm=algorithm,
        sites=config.engine.sites,
        rounds=config.rounds,
        square=square,
        damaged=damaged,
        extras=extras(config),
        exchanges=list_exchanges(config),
        amount=_amount(config, moved),
        others=_others(config),
        encoding=_encoding(config),
        single=_single(config),
        protection=describe_protection(config),
    )


def server(config: Config, folder: Path) -> str:
    """Instructions for the server's operator."""
    quoted, out = (shlex.quote(str(path)) for path in (folder, folder / "run"))
    judged = (
        f"Encoders are judged with the labelled images in `{config.data.root}` (`data.root`)."
        if config.data.root
        else "The server has no images, so encoders are not judged; labelled images of your own in "
        "`data.root` change that."
    )
    if public := getattr(config.algorithm, "public", 0):
        judged += f"\n**{public} of these images are public**: every site gets them."
    return fill(
        "SERVER.md",
        sites=config.engine.sites,
        timeout=f"{config.engine.timeout:g}",
        judged=judged,
        extras=",".join((extras(config), *config.log)),
        connection=CONNECTION,
        run=folder / "run",
        quoted_run=out,
        quoted_app=quoted,
    )


def extras(config: Config) -> str:
    """What has to be installed with the package."""
    return "flower" if config.privacy.noise is None else "flower,privacy"


def _amount(config: Config, moved: Traffic | None) -> str:
    """How many bytes a site sends and receives."""
    if moved is None:
        return "**How much** a round moves is not known beforehand; `sent.jsonl` (below) has it."
    kind, rounds = build_algorithm(config), config.rounds
    up, down = sum(moved.up.values()), sum(moved.down.values())
    about = "at most" if any(task.reveals == "features" for task in kind.asked()) else "about"
    first = f", and {_parts(moved.first)} more in the run's first round" if moved.first else ""
    drawn = " (sites are drawn at random)" * (_round_size(config) != config.engine.sites)
    keys = ", the keys of the sums" * config.privacy.secure
    text = (
        f"**How much.** In a round that it takes part in{drawn}, a site sends {about} "
        f"{format_bytes(up)} ({_parts(moved.up)}){first}. It receives {about} "
        f"{format_bytes(down)}. In all {rounds:,} rounds these are {format_bytes(up * rounds)} and "
        f"{format_bytes(down * rounds)}. This is counted for images with three channels. Flower's "
        f"own messages, encryption{keys} and what is done again after a fault come on top."
    )
    return textwrap.fill(text, 100)


def _parts(moved: Mapping[str, int]) -> str:
    return ", ".join(f"`{task}` {format_bytes(count)}" for task, count in moved.items())


def _round_size(config: Config) -> int:
    """How many sites a round asks."""
    assert config.engine.sites is not None
    return cohort_size(config, config.engine.sites)


def _others(config: Config) -> str:
    """What comes to the other sites of what a site sends."""
    kind = build_algorithm(config)
    asked = kind.asked(config.privacy.secure)
    statistics = [task for task in asked if task.reveals == "statistics"]
    told = [task.name for task in statistics]
    own = [task.name for task in asked if task.reveals == "features"]
    noise = "" if config.privacy.noise is None else ", all with the noise"
    text = "**What the other sites get** is what the server makes of all replies: the next model"
    text += f", and the means of {_quoted(told)} over a round's sites" if told else ""
    text += f", and each site's own {_quoted(own)}" if own else ""
    text += f"{noise}."
    if noise:
        return textwrap.fill(text, 100)
    text += " Sites that put their parts together may take these out of a mean"
    text += ": with two sites a round each may find the other's." * (_round_size(config) == 2)
    text += ": what is left is the others'." * (_round_size(config) != 2)
    if told:
        few = max(task.few_images(kind) for task in statistics)
        text += (
            f" If a round's sites use at most {few} images together, whoever has these means can "
            "compute each image's encoding."
        )
    return textwrap.fill(text, 100)


def _quoted(tasks: Sequence[str]) -> str:
    return " and ".join(f"`{task}`" for task in tasks)


def _encoding(config: Config) -> str:
    """What an encoding is, where any leave the site, if only in means."""
    kind = build_algorithm(config)
    asked = kind.asked(config.privacy.secure)
    if not any(task.reveals in ("statistics", "features") for task in asked):
        return ""
    width = getattr(kind.objective.params, "projector", (0,))[-1]
    text = (
        f"An **encoding** (also: features, a projection) is a list of {width:,} numbers that the "
        "network computes from an image. It is not the image, but images that look alike have "
        "encodings that are alike: whoever has one, and the network, as the server does, can tell "
        "whether a picture is that image, or like it. Published methods have drawn pictures that "
        "resemble the image from such numbers of other networks."
    )
    return textwrap.fill(text, 100) + "\n\n"


def _single(config: Config) -> str:
    """What a site with few images must know, where its replies tell of single ones."""
    kind = build_algorithm(config)
    risks = list_risks(config, kind)
    found = [(risk, _most_images(config, kind, risk.few_images)) for risk in risks]
    said = [_sends(config, replies, most) for replies, most in found if most != 0]
    if not said:
        return ""
    said.append(_remedy(config, any(most is None for _, most in found), found[0][0].few_images))
    return textwrap.fill(" ".join(said), 100) + "\n\n"


def _sends(config: Config, replies: Risk, most: int | None) -> str:
    """What a site with at most ``most`` images sends; none: every site."""
    who = "A site with one image" if most == 1 else f"A site with at most {most} images"
    if most is None:
        who = f"With `algorithm.batch={config.algorithm.batch}` every site"
    tasks = _quoted(replies.tasks)
    if replies.reveals == "image":
        what = f"{who} sends changes of the weights that are made of one image"
        return f"**{what}**, in {tasks}: they may reveal the image itself, by published attacks."
    return (
        f"**{who} sends single images' encodings**: in {tasks} go means over the images that a "
        "round uses here. Over one image they are its encoding, and from those over up to "
        f"{replies.few_images} images each encoding can be computed."
    )


def _most_images(config: Config, kind: Any, most: int) -> int | None:
    """The most images of a site whose replies are made of at most ``most``; 0: of none; none: any.

    A pass leaves out less than a batch.
    """
    batches = Batches.from_config(config.algorithm, config.seed)
    if batches.averaged(sys.maxsize) <= most:
        return None
    sizes = (
        size for size in range(1, most + (batches.size or 1) + 1) if batches.averaged(size) <= most
    )
    return max((size for size in sizes if _takes_part(config, kind, size)), default=0)


def _takes_part(config: Config, kind: Any, size: int) -> bool:
    """Whether a site with so many images is not refused."""
    return size >= kind.minimum_images and (size > 1 or config.encoder.norm != "batch")


def _remedy(config: Config, everyone: bool, few: int) -> str:
    """What helps where replies of up to ``few`` images tell of each, everyone's or small sites'."""
    assert config.engine.sites is not None
    images = "one image" if few == 1 else f"{few} images"
    least = smallest_sum(config, config.engine.sites)
    if config.privacy.secure:
        text = "This leaves masked, and the server learns only sums over the sites (below)."
        if least <= few:
            text += (
                f" But a sum may be over {least} sites: if a round uses at most {few} images of "
                "these together, it tells their encodings."
            )
        return text
    fix = f"Take part with more than {images}"
    if everyone:
        fix = f"Ask the server's operator for a batch above {images}, or for none"
    if allows_secure_sums(config, build_algorithm(config), config.engine.sites):
        fix += ", or for" if everyone else ", or ask the server's operator for"
        fix += " `privacy.secure=true`: the server then learns only sums over the sites"
        if least <= few:
            fix += f" (which hide this where they are over more than {few} images)"
    return f"{fix}."
