"""Describe a run in one sentence."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from fedssl.config import OWN_DATA, Config, SourceParams, variant
from fedssl.runs.reader import RunReader

# Settings of a partition that go without saying.
USUAL = {field.name: field.default for field in dataclasses.fields(SourceParams)}


def describe(run: RunReader, seed: bool = False) -> str:
    """Describe what was trained, how and on what; with its seed where runs stand together."""
    config = run.settings
    size = f" at {config.data.size} pixels" if config.data.size else ""
    towers = " (two towers)" if config.encoder.towers == 2 else ""
    text = (
        f"{_class_name(config, 'algorithm')} with {_class_name(config, 'objective')} trains a "
        f"{config.encoder.name} encoder{towers} on {_images(config)}{size}"
    )
    clients = len(run.clients) or getattr(config.partition, "clients", None)
    if clients:
        text += f", divided over {clients:,} clients ({_partition(run)})"
    text += f", {_cohort(config, clients)}in {config.rounds} rounds of {_local_work(config)}"
    return f"{text} (seed {config.seed})." if seed else f"{text}."


def _class_name(config: Config, section: Literal["algorithm", "objective"]) -> str:
    """Return the name of an algorithm or an objective as it is written in its paper."""
    return variant(section, getattr(config, section).name).__name__


def _images(config: Config) -> str:
    if config.engine.sites is not None:  # images in data.root are only for evaluation
        return "the sites' own images"
    if config.data.name in OWN_DATA:
        return f"the images of {Path(config.data.root or '').name}"
    return config.data.name


def _partition(run: RunReader) -> str:
    keys = dict(run.tree["partition"])
    name = keys.pop("name")
    usual = {**USUAL, "clients": keys.get("clients")}
    if keys.get("source", "labels") == "labels":
        usual["sources"] = keys.get("sources")
    shown = [f"{k}={v}" for k, v in keys.items() if v not in (None, False) and v != usual.get(k)]
    return f"partition {name}{': ' * bool(shown)}{', '.join(shown)}"


def _cohort(config: Config, clients: int | None) -> str:
    if config.cohort.size and (clients is None or config.cohort.size < clients):
        return f"{config.cohort.size} of them at a time, "
    if config.cohort.fraction:
        return f"{100 * config.cohort.fraction:g}% of them at a time, "
    return ""


def _local_work(config: Config) -> str:
    keys = config.algorithm
    count, unit = keys.local_steps or 1, "step"
    if keys.local_epochs:
        count, unit = keys.local_epochs, "epoch"
    text = f"{count} local {unit}{'s' * (count != 1)}"
    return f"{text} in batches of {keys.batch}" if keys.batch else text
