"""Fill in the templates of an app: SITES.md for sites, SERVER.md for the operator, and its code."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedssl import __version__
from fedssl.config import TIMM, Config, plugins
from fedssl.deploy.site import needs_copy
from fedssl.federation.algorithm import Algorithm, build_algorithm
from fedssl.federation.sampling import cohort_size
from fedssl.federation.task import ClientTask
from fedssl.privacy.checks import allows_secure_sums, smallest_sum, survivors_needed
from fedssl.privacy.exchanges import list_exchanges
from fedssl.privacy.leakage import Risk, list_risks
from fedssl.runs.folder import CONNECTION, PACKAGE
from fedssl.training.batches import Batches
from fedssl.util.templates import load_templates
from fedssl.util.text import format_bytes

if TYPE_CHECKING:
    from fedssl.deploy.estimate import Traffic

FLOWER = "1.41.0"  # the version that these commands were tried with
NODE_CONFIG = 'data="/srv/images"'
WEIGHTS = ' weights="/home/YOU/fedssl/encoder.safetensors"'
SUM_KEYS = ' key="/home/YOU/fedssl/site.key" peers="/home/YOU/fedssl/peers"'


def fill_template(template: str, **values: object) -> str:
    """Fill in a file of ``templates/``."""
    return TEMPLATES.get_template(template).render(
        values, version=__version__, flower=FLOWER, package=PACKAGE
    )


def required_extras(config: Config) -> list[str]:
    """List the extras that have to be installed with the package."""
    has_noise, is_timm = config.privacy.noise is not None, config.encoder.name.startswith(TIMM)
    return ["flower", *(["privacy"] if has_noise else []), *(["timm"] if is_timm else [])]


def write_site_instructions(config: Config, recipe: str, traffic: Traffic | None) -> str:
    """Write SITES.md for a site's administrator; ``traffic`` is that of a round, if known."""
    algorithm, sites = build_algorithm(config), config.engine.sites
    assert sites is not None
    size = cohort_size(config, sites)
    threshold = survivors_needed(config.privacy.threshold, size)
    asked = algorithm.asked(config.privacy.secure, "mean", "each")
    statistics = [task for task in asked if task.reveals == "statistics"]
    features = [task for task in asked if task.reveals == "features"]
    return fill_template(
        "SITES.md",
        recipe=recipe,
        algorithm=plugins.short_name(config.algorithm.name),
        config=config,
        round_size=size,
        extras=",".join(required_extras(config)),
        node_config=NODE_CONFIG + WEIGHTS * needs_copy(config) + SUM_KEYS * config.privacy.secure,
        needs_copy=needs_copy(config),
        messages=list_exchanges(config),
        traffic=traffic,
        statistics=_names(statistics),
        own=_names(features),
        prepared=" ".join(task.images(algorithm) for task in features),
        gathers=_names(task for task in asked if task.seen == "each"),
        width=getattr(algorithm.objective.params, "projector", (0,))[-1],
        few=max((task.few_images(algorithm) for task in statistics), default=None),
        risks=list(_find_risks(config, algorithm)),
        smallest_sum=smallest_sum(config, sites),
        threshold=threshold,
        # More of them could have two sums, or subtract all parts but one.
        helpers=min(2 * threshold - size - 1, threshold - 2),
        can_sum=allows_secure_sums(config, algorithm, sites),
    )


def write_server_instructions(config: Config, folder: Path) -> str:
    """Write SERVER.md for the server's operator."""
    return fill_template(
        "SERVER.md",
        config=config,
        public=getattr(config.algorithm, "public", 0),
        needs_copy=needs_copy(config),
        extras=",".join((*required_extras(config), *config.log)),
        connection=CONNECTION,
        run=folder / "run",
        quoted_run=shlex.quote(str(folder / "run")),
        quoted_app=shlex.quote(str(folder)),
    )


def _find_risks(config: Config, algorithm: Algorithm) -> Iterator[tuple[Risk, int | None]]:
    """Yield risks of sites with few images, and the most images of a site at risk."""
    for risk in list_risks(config, algorithm):
        largest = _largest_site(config, algorithm, risk.few_images)
        if largest != 0:
            yield risk, largest


def _largest_site(config: Config, algorithm: Algorithm, few: int) -> int | None:
    """Return the most images of a site whose replies are made of at most ``few``.

    A pass leaves out less than a batch. 0: there is no such site. None: every site is one.
    """
    batches = Batches.from_config(config.algorithm, config.seed)
    if batches.averaged(sys.maxsize) <= few:
        return None
    candidates = range(1, few + (batches.size or 1) + 1)
    sizes = [size for size in candidates if batches.averaged(size) <= few]
    smallest = max(algorithm.minimum_images, 2 if config.encoder.norm == "batch" else 1)
    return max((size for size in sizes if size >= smallest), default=0)  # smaller ones are refused


def _names(tasks: Iterable[ClientTask]) -> list[str]:
    return [task.name for task in tasks]


def _format_tasks(tasks: Iterable[str]) -> str:
    return " and ".join(f"`{task}`" for task in tasks)


def _format_parts(parts: Mapping[str, int]) -> str:
    return ", ".join(f"`{task}` {format_bytes(count)}" for task, count in parts.items())


TEMPLATES = load_templates(
    Path(__file__).with_name("templates"),
    {"bytes": format_bytes, "tasks": _format_tasks, "parts": _format_parts},
)
