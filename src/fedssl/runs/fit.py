"""Choose the settings of the recipe `sites` by the number of sites and of their images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedssl import config
from fedssl.config import VARIANTS, Privacy, Recipe
from fedssl.config.build import STORED
from fedssl.config.preprocessing import recommend_for_weights
from fedssl.config.resolve import FIT, Words
from fedssl.data.folders import find_split
from fedssl.data.places import check_root, data_root, root_error
from fedssl.federation.algorithm import Algorithm
from fedssl.models.published import find_backbone
from fedssl.objectives.cco import CCO
from fedssl.privacy.checks import FEWEST, survivors_needed
from fedssl.util.errors import UserError
from fedssl.util.status import say
from fedssl.util.text import shorten_list

ALGORITHMS = VARIANTS["algorithm"]
# Small networks first: a round sends what trains of them.
BACKBONES = ("timm/tf_efficientnet_lite0", "timm/resnet18", "timm/resnet50")
SCRATCH, VIEW = "resnet18", 64  # without given weights: the encoder, and the pixels of a view
RATES = {True: 1e-4, False: 1e-3}  # from given weights, and from random ones
MOST_SITES, LARGEST_BATCH = 64, 64  # of a round, and of a site in a step
HIDDEN, WIDTHS = (512, 512), range(512, 31, -8)  # of the projector, and of encodings


class Fit(NamedTuple):
    """Settings for some sites, and why they were chosen."""

    settings: Recipe
    reason: str


def fit_recipe(recipe: Recipe, words: Words, is_deployed: bool = False) -> Recipe:
    """Fill in what suits the sites below ``data.root`` if a recipe asks for it (`fit: sites`).

    The settings stand under ``fit`` as recommended ones, so that the user's words win. In a
    deployment the sites below ``data.root`` stand for the real ones.
    """
    if recipe.get(FIT) != "sites":
        return recipe
    given = config.flatten(config.with_values(recipe, config.read_words(words)))
    sizes = count_images(given.get("data.root"))
    encoder, start = choose_encoder(given)
    has_weights = bool(given.get("encoder.init") or encoder["encoder"].get("pretrained"))
    fit = choose_settings(list(sizes.values()), has_weights, given.get("algorithm.name"))
    names = shorten_list(list(sizes), 3)
    images = f"{min(sizes.values()):,} to {max(sizes.values()):,} images"
    say(f"{len(sizes)} sites ({names}) with {images}: {fit.reason}.")
    if start:
        say(f"{start}.")
    settings = {**fit.settings, **encoder}
    if is_deployed:
        settings["engine"] = {"sites": len(sizes)}
    return {**recipe, FIT: settings}


def count_images(root: str | None) -> dict[str, int]:
    """Return the number of image files of each site: a folder in ``root`` or ``root/train``."""
    if root is None:
        fix = "Name the folder that has a folder for each site: data.root=DIR."
        raise UserError("not given", key="data.root", fix=fix)
    data = config.Data("folder", root=root)
    check_root(data)
    below = "train" if (data_root(data) / "train").is_dir() else ""
    within = find_split(data_root(data), below).within
    loose = sum(not folders for folders in within)
    if loose or not within:
        problem = f"{loose} images are in no site's folder" if loose else "there are no images"
        fix = "Make a folder for each site, with its images at any depth."
        raise root_error(root, problem, fix)
    return dict(sorted(Counter(folders[0] for folders in within).items()))


def choose_encoder(given: Mapping[str, Any]) -> tuple[Recipe, str]:
    """Return the settings of encoder and images, and a sentence on where the encoder starts.

    ``given`` are the user's values by key: an encoder that is named there is not chosen.
    """
    name, start = given.get("encoder.name"), ""
    weights = {key: given.get(f"encoder.{key}") for key in ("init", "pretrained")}
    if name is None and not any(weights.values()):
        name, reason = find_backbone(BACKBONES)
        weights["pretrained"] = name is not None
        start = f"The encoder is {name}, with its published weights"
        if name is None:
            start = f"The encoder is a {SCRATCH} with random weights: {reason}"
    name = str(name or SCRATCH)
    chosen = {"name": name, **({"pretrained": True} if weights["pretrained"] else {})}
    size = recommend_for_weights(weights, name)[1].get("data", {}).get("size", VIEW)
    view = int(given.get("augment.size") or size)
    stored = {"size": round(view * STORED)}  # all of an image, whatever its aspect ratio
    return {"encoder": chosen, "augment": {"size": view}, "data": stored}, start


def choose_settings(sizes: Sequence[int], has_weights: bool, name: str | None = None) -> Fit:
    """Return the settings of algorithm, batch and privacy for sites with so many images each."""
    smallest, rate = min(sizes), {"lr": RATES[has_weights]}
    batch = min(smallest, LARGEST_BATCH)
    settings: Recipe = {"cohort": {"size": MOST_SITES}} if len(sizes) > MOST_SITES else {}
    chosen, reason = (name, "your choice") if name else choose_algorithm(sizes)
    if chosen == "dcco":
        protection = protect_statistics(sizes, batch)
        if protection is None and not name:
            chosen, reason = "fedema", "dcco's statistics would be of too few images"
        settings |= protection or {}
    if chosen == "dcco":
        settings["server"] = {"optimizer": "adam", **rate}
    else:
        settings["client"] = {"optimizer": "adam", **rate}
    settings["algorithm"] = {"name": chosen, "batch": batch}
    # A simulation computes all sites' steps in one pass, which large views would not fit into.
    settings.setdefault("engine", {"chunk": LARGEST_BATCH})
    images = "1 image" if batch == 1 else f"{batch} images"
    reason = f"{chosen} ({reason}), with batches of {images}"
    return Fit(settings, reason + " and secure sums" * ("privacy" in settings))


def choose_algorithm(sizes: Sequence[int]) -> tuple[str, str]:
    """Return the algorithm that suits so many sites with so many images, and its reason."""
    kinds: dict[str, type[Algorithm]] = {n: config.variant("algorithm", n) for n in ALGORITHMS}
    suits = {name: kind.suits for name, kind in kinds.items() if kind.suits is not None}
    fitting = {name: each for name, each in suits.items() if each.includes(sizes)}
    name = min(fitting, key=lambda name: fitting[name].most_sites)  # the most special one
    return name, fitting[name].reason


def protect_statistics(sizes: Sequence[int], batch: int) -> Recipe | None:
    """Return settings with which statistics of encodings tell of no single image.

    They are of more images than an encoding of that width allows, or secure sums are. ``None``:
    there are too few images.
    """
    summed = sorted(sizes)[: survivors_needed(Privacy.threshold, min(len(sizes), MOST_SITES))]
    in_sum = sum(min(size, batch) for size in summed) if len(sizes) >= FEWEST else 0
    for images in (batch, in_sum):
        losses = (CCO(CCO.Params("cco", (*HIDDEN, width))) for width in WIDTHS)
        chosen = next((loss.params for loss in losses if loss.few_images < images), None)
        if chosen is not None:
            projector = {"objective": {"name": "cco", "projector": list(chosen.projector)}}
            secure = {"privacy": {"secure": True}, "engine": {"name": "flower"}}
            return projector if images == batch else {**projector, **secure}
    return None
