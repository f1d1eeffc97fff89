"""Evaluate an encoder: one file a protocol, and ``evaluate_encoder`` to run several."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedssl.config import Evaluate, plugins
from fedssl.data.dataset import Groups, Split
from fedssl.evaluate import finetune, heldout, knn, linear, semi, unlabeled
from fedssl.evaluate.features import Labelled, extract, pool_cases, top1, units
from fedssl.evaluate.unlabeled import Views
from fedssl.util.errors import UserError

FEW_LABEL = ("knn", "linear", "finetune")  # these take a number of labels, as in linear@500
ACCURACIES = ("knn", "linear")  # what evaluate.targets are compared with
SHARES = ("semi", "heldout", "collaborative")  # these take a share of them, as in semi@10%
# head is the accuracy of a network's own classifier, and the other two need the clients: whoever
# trained them measures all three, not ``evaluate_encoder``.
NAMES = (*FEW_LABEL, *SHARES, "head", "per-client", "unlabeled")


def parse(spec: str, key: str = "evaluate.protocols") -> tuple[str, int | float | None]:
    """Name of a protocol, and its number of labels, or the share of them that some take.

    >>> parse("linear@500"), parse("knn"), parse("semi@10%"), parse("linear@1%")
    (('linear', 500), ('knn', None), ('semi', 0.1), ('linear', 0.01))
    """
    place, colon, end = spec.rpartition(":")
    name, at, amount = end.partition("@")
    name = place + colon + name
    own = name not in NAMES
    if own:
        plugins.load("protocol", name, (key, spec), NAMES)
        if plugins.short_name(name) in NAMES:  # its numbers would be taken for ours
            raise UserError(f"{key}={spec}: fedssl has a protocol of this name; rename yours")
    if name in SHARES or ((own or name in FEW_LABEL) and amount.endswith("%")):
        return name, _share(spec, name, amount, key)
    if not at:
        return name, None
    if not own and name not in FEW_LABEL:
        raise UserError(f"{key}={spec}: {name} takes no number of labels")
    if not (amount.isascii() and amount.isdecimal() and int(amount) > 0):
        raise UserError(
            f"{key}={spec}: the number of labels must be a whole number above 0, as in {name}@500"
        )
    return name, int(amount)


def _share(spec: str, name: str, text: str, key: str) -> float:
    """The share that a percentage stands for."""
    # As 10e-2, so that 0.7 % is the same float as data.holdout=0.007; 0.7 / 100 is not.
    found = re.fullmatch(r"(\d+(?:\.\d+)?)%", text, re.ASCII)
    share = float(f"{found[1]}e-2") if found else 0.0
    if not 0 < share < 1:
        raise UserError(
            f"{key}={spec}: {name} needs the share of the labels, above 0 % and below 100 %, "
            f"as in {name}@10%"
        )
    return share


def collaborations(settings: Evaluate) -> dict[str, float]:
    """The shares of labels that ``collaborative`` is asked for, by the words that ask for them."""
    return _shares(settings, "collaborative")


def _shares(settings: Evaluate, wanted: str) -> dict[str, float]:
    """The shares that one protocol is asked for, by the words that ask for them."""
    keys = {"protocols": settings.protocols or (), "monitor": settings.monitor or ()}
    words = [(f"evaluate.{key}", spec) for key in keys for spec in keys[key]]
    parsed = {f"{key}={spec}": parse(spec, key) for key, spec in words}
    return {k: float(share or 0) for k, (name, share) in parsed.items() if name == wanted}


def chooser(settings: Evaluate) -> str:
    """The measure that settings may be chosen by, as no test image enters it; empty: none."""
    found = (f"{s}_top1" for s in settings.protocols or () if parse(s)[0] == "heldout")
    return next(found, "")


def check_heldout(settings: Evaluate, holdout: float) -> None:
    """Refuse to choose on images that are trained on; no data is needed to see that."""
    for where, share in _shares(settings, "heldout").items():
        _check_kept(where, share, holdout)


def protocols(settings: Evaluate, train: Split, test: Split | None) -> tuple[str, ...]:
    """The protocols that a recipe names; none: kNN and linear, or unlabeled without classes."""
    if settings.protocols is not None:
        return settings.protocols
    usable = test is not None and _kinds(test) > 0 and _kinds(train) > 1
    return ("knn", "linear") if usable else ("unlabeled",)


def check(
    settings: Evaluate,
    train: Split,
    test: Split | None,
    classes: int,
    *,
    holdout: float = 0.0,
    names: Sequence[str] = (),
) -> None:
    """Refuse, before any training, what could not be judged after it.

    ``names`` are those of the classes, for errors.
    """
    check_heldout(settings, holdout)
    named = protocols(settings, train, test)
    for spec in named:
        _check_spec(spec, "evaluate.protocols", train, test, classes, holdout, names)
    _check_labels(*named, *(settings.monitor or ()))
    if settings.monitor == ():
        raise UserError("evaluate.monitor=[]: name at least one, such as knn, or leave it out")
    for spec in settings.monitor or ():
        _check_spec(spec, "evaluate.monitor", train, test, classes, holdout, names)
    _check_targets(settings, named if settings.monitor is None else settings.monitor)


def notes(settings: Evaluate, train: Split, test: Split | None, classes: int) -> Iterator[str]:
    """What a user should know before an encoder is judged."""
    if settings.k == Evaluate.k:  # a data set may well be smaller than what nobody chose
        return
    named = (*protocols(settings, train, test), *(settings.monitor or ()))
    for spec in dict.fromkeys(spec for spec in named if parse(spec)[0] == "knn"):
        count = len(_draw(train, spec, classes, 0))
        if settings.k > count:
            yield f"evaluate.k={settings.k}: {spec} has only {count} labelled samples; all vote"


def _check_spec(
    spec: str,
    key: str,
    train: Split,
    test: Split | None,
    classes: int,
    holdout: float,
    names: Sequence[str],
) -> None:
    name, amount = parse(spec, key)
    where = f"{key}={spec}"
    if name == "unlabeled":
        if len(train) < 2:
            raise UserError(f"{where}: needs at least two training images, not {len(train)}")
        return
    if name != "heldout" and (test is None or not _kinds(test)):
        missing = "there is no test split" if test is None else "the test split has no labels"
        raise UserError(f"{where}: {missing}; use {key}=[unlabeled]")
    if _kinds(train) < 2:
        raise UserError(
            f"{where}: the training split needs labels of at least two classes; "
            f"use {key}=[unlabeled]"
        )
    if test is not None:
        _units(test)
    if name == "collaborative":
        return  # its labels are drawn from those of each client
    if name == "semi" and amount is not None and holdout:
        _check_holdout(where, amount, holdout, train)
    if name == "heldout" and train.cases is not None:
        raise UserError(
            f"{where}: labels go by case here, and data.holdout keeps single images; leave it out"
        )
    drawn = _draw(train, spec, classes, 0, key, names)
    if name == "heldout" and len(drawn) < 2 * classes:
        labels = train.full_labels
        fix = "take a larger share, here and as data.holdout"
        if torch.bincount(labels[labels >= 0]).min() < 2:
            fix = "there is a class that has no more, so name other protocols"
        raise UserError(
            f"{where}: is one image of each class, and halves of them are compared; {fix}"
        )


def _check_labels(*specs: str) -> None:
    """Measures are called after their protocol, so no two may have one name."""
    known: dict[str, str] = {}
    for spec in specs:
        label = plugins.short_name(spec)
        if known.setdefault(label, spec) != spec:
            raise UserError(
                f"evaluate.protocols={spec}: {known[label]} is called {label} too; rename one"
            )


def _check_holdout(where: str, share: float, holdout: float, train: Split) -> None:
    """What ``semi`` fine-tunes on must not have been trained on (FedEMA, appendix B.3)."""
    if train.cases is not None:
        raise UserError(
            f"{where}: data.holdout={holdout} keeps images out of pretraining, but labels go by "
            "case here; set data.holdout=0"
        )
    _check_kept(where, share, holdout)


def _check_kept(where: str, share: float, holdout: float) -> None:
    if share > holdout:
        raise UserError(
            f"{where}: data.holdout={holdout} keeps fewer images out of pretraining; "
            f"set data.holdout={share:g} when the run starts"
        )


def _check_targets(settings: Evaluate, monitored: tuple[str, ...]) -> None:
    if not settings.targets:
        return
    where = f"evaluate.targets={','.join(f'{target:g}' for target in settings.targets)}"
    if not settings.every:
        raise UserError(f"{where}: needs evaluate.every, the rounds between evaluations")
    if not set(ACCURACIES) & set(monitored):
        raise UserError(
            f"{where}: needs linear or knn, of all labels, among the protocols of "
            f"evaluate.monitor, not only {', '.join(monitored)}"
        )


def evaluate_encoder(
    encoder: nn.Module,
    train: Split,
    test: Split | None,
    classes: int,
    settings: Evaluate,
    seed: int,
    device: torch.device | str,
    *,
    views: Views,
    modality: int = 0,
    holdout: float = 0.0,
    probes: list[linear.Head] | None = None,
) -> dict[str, float]:
    """Every measure by name, such as ``{"knn_top1": 93.1, "linear@500_top1": 62.0}``.

    A protocol of the user's own is a function of the features and labels of the training images,
    those of the test images, the number of classes and the seed; it returns numbers by name.
    ``unlabeled`` looks at the training images, so that its numbers do not depend on whether there
    is a test split. ``probes`` takes the classifier of ``linear`` with all labels.
    """
    check(settings, train, test, classes, holdout=holdout)
    learn = _Side(encoder, train, modality, device)
    judged = None if test is None else _Side(encoder, test, modality, device)
    results: dict[str, float] = {}
    for spec in protocols(settings, train, test):
        name, _ = parse(spec)
        if name == "unlabeled":
            images = train.images[modality]
            results |= unlabeled.measures(encoder, images, learn.features, views, seed, device)
        if name == "heldout":
            drawn = learn.take(_draw(train, spec, classes, seed))
            results[f"{spec}_top1"] = heldout.accuracy(*drawn, classes, seed)
        own = name not in NAMES
        if not (own or name in (*FEW_LABEL, "semi")) or judged is None:
            continue
        chosen = _draw(train, spec, classes, seed)
        if own:
            function = plugins.load("protocol", name, ("evaluate.protocols", spec), NAMES)
            # It may change what it gets; take has made copies already.
            sides = (*learn.take(chosen), *(side.clone() for side in judged.pooled))
            results |= plugins.call_protocol(function, spec, *sides, classes, seed)
            continue
        if name == "knn":
            score = knn.accuracy(
                *learn.take(chosen), *judged.pooled, classes, settings.k, settings.temperature
            )
        elif name == "linear":
            head = linear.fit(*learn.take(chosen), classes, settings.preset, seed)
            score = top1(linear.predict(head, judged.pooled[0]), judged.pooled[1])
            if probes is not None and spec == name:
                probes[:] = [head]
        elif name == "finetune":
            part = learn.labelled.take(chosen)
            score = finetune.accuracy(
                encoder, part, judged.labelled, classes, seed, device, settings.preset
            )
        else:
            part = learn.labelled.take(chosen)
            score = semi.accuracy(
                encoder, part, judged.labelled, classes, settings.head, seed, device
            )
        results[f"{spec}_top1"] = score
    return results


class _Side:
    """One split seen by one encoder; everything is computed once, when it is first asked for."""

    def __init__(
        self, encoder: nn.Module, split: Split, modality: int, device: torch.device | str
    ) -> None:
        self.encoder = encoder
        self.split = split
        self.images = split.images[modality]
        self.device = device

    @functools.cached_property
    def features(self) -> Tensor:
        """Of every image."""
        return extract(self.encoder, self.images, device=self.device)

    @functools.cached_property
    def pooled(self) -> tuple[Tensor, Tensor]:
        """Features and labels of the labelled cases."""
        return pool_cases(self.features, self.split.full_labels, self.split.cases)

    @functools.cached_property
    def labelled(self) -> Labelled:
        """The labelled cases, in the order of ``pooled``."""
        return Labelled(self.images, *_units(self.split))

    def take(self, chosen: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Features and labels of some of the labelled cases."""
        features, labels = self.pooled
        index = torch.as_tensor(chosen, device=features.device)
        return features[index], labels[index]


def _draw(
    train: Split,
    spec: str,
    classes: int,
    seed: int,
    key: str = "evaluate.protocols",
    names: Sequence[str] = (),
) -> NDArray[np.int64]:
    """Which cases have a label: all, or as many as the protocol says, the same for each of them."""
    from fedssl.data.labels import draw_labels, draw_share

    _, amount = parse(spec, key)
    groups, labels = _units(train)
    if amount is None:
        return np.arange(len(labels))
    if isinstance(amount, int):
        return draw_labels(labels, amount, classes, seed, key=key, value=spec, names=names).numpy()
    # By the images' own numbers, as data.holdout draws: so they are among those that it keeps.
    drawn = train.full_labels if train.cases is None else labels
    chosen = draw_share(drawn, amount, classes, seed, key=key, value=spec, names=names).numpy()
    return chosen if train.cases is not None else np.searchsorted(groups.members, chosen)


def _units(split: Split) -> tuple[Groups, Tensor]:
    return units(split.full_labels, split.cases)


def _kinds(split: Split) -> int:
    """How many different labels a split has."""
    labels = split.full_labels
    return len(labels[labels >= 0].unique())
