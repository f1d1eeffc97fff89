"""All protocols by name, and those that a configuration asks for."""

from __future__ import annotations

from dataclasses import replace

from fedssl.config import Evaluate, plugins
from fedssl.data.dataset import Split
from fedssl.evaluate.base import PROTOCOLS, EvaluationData, Protocol, split_spec
from fedssl.evaluate.collaborative import Collaborative
from fedssl.evaluate.finetune import FineTuned
from fedssl.evaluate.head import Head
from fedssl.evaluate.heldout import HeldOut, check_share
from fedssl.evaluate.knn import KNN
from fedssl.evaluate.per_client import PerClient
from fedssl.evaluate.plugin import PluginProtocol
from fedssl.evaluate.probe import LinearProbe
from fedssl.evaluate.semi import SemiSupervised
from fedssl.evaluate.transfer import Transfer
from fedssl.evaluate.unlabeled import Unlabeled
from fedssl.util.errors import UserError

MONITOR = "evaluate.monitor"
NAMES: dict[str, type[Protocol]] = {
    each.name: each
    for each in (
        *(KNN, LinearProbe, FineTuned, SemiSupervised, HeldOut, Collaborative),
        *(Head, PerClient, Unlabeled, Transfer),
    )
}
TARGETS = ("knn", "linear")  # the accuracies that evaluate.targets are compared with


def parse_protocol(spec: str, key: str = PROTOCOLS) -> Protocol:
    """Return the protocol of a spec such as ``knn``, ``linear@500`` or ``semi@10%``.

    Errors name ``key`` as the place of the spec.

    >>> parse_protocol("linear@500").amount, parse_protocol("semi@10%").amount
    (500, 0.1)
    """
    name, option = split_spec(spec)
    if name in NAMES:
        return NAMES[name](spec, option, key)
    plugins.load("protocol", name, (key, spec), NAMES)
    if plugins.short_name(name) in NAMES:  # its measures would be taken for ours
        fix = "Rename yours."
        raise UserError("fedssl has a protocol of this name", key=key, value=spec, fix=fix)
    return PluginProtocol(spec, option, key)


def list_protocols(settings: Evaluate) -> list[Protocol]:
    """Return all protocols that a configuration names, after and during training."""
    specs = [(spec, PROTOCOLS) for spec in settings.protocols or ()]
    specs += [(spec, MONITOR) for spec in settings.monitor or ()]
    return [parse_protocol(spec, key) for spec, key in specs]


def choose_protocols(
    settings: Evaluate, train: Split, test: Split | None, has_head: bool = False
) -> tuple[str, ...]:
    """Return the protocols of a configuration.

    By default these are kNN and linear, or ``unlabeled`` and ``transfer`` without classes, and the
    network's own classifier if it has one.
    """
    if settings.protocols is not None:
        return settings.protocols
    labels = train.full_labels
    has_classes = len(labels[labels >= 0].unique()) > 1
    has_labels = test is not None and bool((test.full_labels >= 0).any())
    specs = ("knn", "linear") if has_labels and has_classes else ("unlabeled", "transfer")
    return (*specs, "head") if has_head else specs


def find_chooser(settings: Evaluate) -> str:
    """Return the measure by which settings may be chosen: no test image is in it; else empty."""
    protocols = (parse_protocol(spec) for spec in settings.protocols or ())
    return next((each.measure for each in protocols if isinstance(each, HeldOut)), "")


def check_holdout(settings: Evaluate, holdout: float) -> None:
    """Check that images for choices are not trained on; this needs no data."""
    for protocol in list_protocols(settings):
        if isinstance(protocol, HeldOut):
            check_share(protocol, holdout)


def check_protocols(data: EvaluationData, has_head: bool = False) -> None:
    """Check, before any training, that the data allows all protocols."""
    settings = data.settings
    specs = choose_protocols(settings, data.train, data.test)
    protocols = list_protocols(replace(settings, protocols=specs))
    for protocol in protocols:
        if isinstance(protocol, Head) and not has_head:
            objective = data.config.objective.name
            raise protocol.error(f"objective {objective} trains no classifier", "Use linear.")
        protocol.check(data)
    _check_names(protocols)
    if settings.monitor == ():
        fix = "Name one, such as knn, or leave it out."
        raise UserError("no protocol", key=MONITOR, value=(), fix=fix)
    if settings.targets:
        _check_targets(settings, specs if settings.monitor is None else settings.monitor)


def _check_names(protocols: list[Protocol]) -> None:
    """Check that no two have one name: measures are called after their protocol."""
    specs: dict[str, str] = {}
    for protocol in protocols:
        name = plugins.short_name(protocol.spec)
        if specs.setdefault(name, protocol.spec) != protocol.spec:
            raise protocol.error(f"{specs[name]} is called {name} too", "Rename one.")


def _check_targets(settings: Evaluate, monitored: tuple[str, ...]) -> None:
    """Check that there are evaluations to compare with targets."""
    key, value = "evaluate.targets", settings.targets
    if not settings.every:
        fix = "Set evaluate.every, the rounds between evaluations."
        raise UserError("nothing is evaluated during training", key=key, value=value, fix=fix)
    if not set(TARGETS) & set(monitored):
        problem = f"only {', '.join(monitored)} is evaluated during training"
        fix = "Add linear or knn, of all labels, to evaluate.monitor."
        raise UserError(problem, key=key, value=value, fix=fix)
