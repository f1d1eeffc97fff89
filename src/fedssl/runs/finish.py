"""Finish a run: evaluate it, and write the summary and the encoder that is its result."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import torch

from fedssl import __version__, config
from fedssl.config import plugins
from fedssl.data.client_table import mean_distance
from fedssl.evaluate import drift
from fedssl.evaluate.unlabeled import Unlabeled
from fedssl.models.inputs import Input
from fedssl.models.trainable import merge_factors
from fedssl.models.weights import SUFFIXES
from fedssl.runs import checkpoint, metrics, outcome
from fedssl.runs.build import Experiment, describe_images
from fedssl.runs.folder import check_present
from fedssl.util.device import name_device
from fedssl.util.files import save_tensors, write_json
from fedssl.util.status import stage

MOST_PERSONAL_FILES = 100


def list_clients(experiment: Experiment) -> list[dict[str, Any]]:
    """Return the number, name and samples of each client."""
    each = zip(experiment.names, experiment.clients.sizes.tolist(), strict=True)
    return [{"client": k, "name": name, "samples": size} for k, (name, size) in enumerate(each)]


def finish_run(experiment: Experiment, out: Path) -> dict[str, Any]:
    """Evaluate the result and an untrained network; write encoder and summary."""
    experiment.models.best = experiment.guard.best
    rows, result = _evaluate(experiment)
    check_present(out)
    with stage("writing the encoder"):
        export(experiment, out)
    models, evaluator, trainer = experiment.models, experiment.evaluator, experiment.trainer
    measure = outcome.find_measure(rows.get("untrained", {}), result)
    if measure is not None and result[measure] < rows["untrained"][measure]:
        rows["unlabeled"] = _measure_without_labels(experiment)
    if trainer.watched:
        features = drift.extract_features(models, evaluator)
        drift.draw_features(features, experiment.names, out / "local-features.png")
    settings = experiment.config.evaluate
    watched = settings.monitor or (evaluator.protocols if evaluator.is_possible else ())
    target = "linear_top1" if "linear" in watched else "knn_top1"
    summary: dict[str, Any] = {
        **result,
        "rounds": experiment.server.round,
        **metrics.totals(out, experiment.overhead.take()),
        **experiment.engine.aggregator.compute_privacy(),
        **(experiment.budget.summarize() if experiment.budget is not None else {}),
        **metrics.first_rounds(out, settings.targets, target, result),
        **({"per_client": evaluator.client_scores} if evaluator.client_scores else {}),
        **experiment.guard.summarize(),
        "judged": models.result,
        "result": result,
        **rows,
        "norm_layers": _describe_norms(experiment),
        "merged": experiment.engine.merges,
        **_measure_label_distance(experiment),
        "seed": experiment.config.seed,
        "parameters": trainer.flat.parameter_count,
        "device": name_device(trainer.device),
        "precision": trainer.precision,
        "torch": torch.__version__,
        "fedssl": __version__,
    }
    write_json(out / "summary.json", summary)
    # A run may get more rounds, which need the states: with a constant rate, or a larger budget.
    may_go_on = experiment.config.schedule == "constant" or "budget_spent" in summary
    has_personal = models.has_personal or models.has_further
    if not has_personal and not may_go_on:
        checkpoint.forget_clients(out, experiment)
    return summary


def _measure_without_labels(experiment: Experiment) -> dict[str, dict[str, float]]:
    """Measure what can explain a result below the untrained encoder: have features collapsed?"""
    evaluator = experiment.evaluator
    with experiment.overhead.timed("evaluate"), stage("looking for the reason of a low result"):
        return {
            "untrained": evaluator.evaluate(experiment.untrained(), (Unlabeled.name,)),
            "result": evaluator.evaluate_result(experiment.models, (Unlabeled.name,)),
        }


def _measure_label_distance(experiment: Experiment) -> dict[str, float]:
    """Measure how different the clients' labels are, in a simulation with labelled images."""
    if experiment.server.census is None:
        return {}
    labels = experiment.dataset.train.full_labels.numpy()
    return {"label_distance": mean_distance(experiment.clients, labels)}


def _evaluate(experiment: Experiment) -> tuple[dict[str, Any], dict[str, float]]:
    """Measure untrained and given weights, by row, and the result."""
    evaluator, rows = experiment.evaluator, dict[str, Any]()
    if not evaluator.is_possible:
        return {}, {}
    with experiment.overhead.timed("evaluate"):
        with stage("evaluating an untrained encoder"):
            rows["untrained"] = evaluator.evaluate_untrained(experiment.untrained())
        if experiment.starts_from_given:
            with stage("evaluating the given encoder"):
                rows["initial"] = evaluator.evaluate(experiment.trainer.initial)
        with stage("evaluating the trained encoder"):
            return rows, evaluator.evaluate_result(experiment.models)


def _describe_norms(experiment: Experiment) -> str:
    """Describe which normalization layers the evaluated models have."""
    models, personal, mean = experiment.models, "each client's own", "the mean of the clients'"
    if models.kept is None:
        return "the model's own"
    if models.result == "global":
        return mean
    return (
        f"{personal}; of the global model {mean}"
        if models.algorithm.result.has_global
        else personal
    )


def export(experiment: Experiment, out: Path) -> None:
    """Write the encoder that is the result, and a note that describes it."""
    settings, models = experiment.config, experiment.models
    towers = settings.encoder.towers
    weights, model = models.global_model(), experiment.algorithm.result.description
    if models.has_mean_norms:
        model += ", normalization layers: the mean of its clients'"
    personal = models.personal_models(MOST_PERSONAL_FILES)
    for client, each in personal.items():
        _save_towers(experiment, each, out / "personal", f"client-{client}")
    if not experiment.algorithm.result.has_global:
        first, weights = next(iter(personal.items()))
        model = f"personal, client {first}: there is no global model"
    _save_towers(experiment, weights, out, "encoder")
    files = [f"encoder{suffix}.safetensors" for suffix in SUFFIXES[:towers]]
    for name in files:
        (out / name).chmod(0o644)  # unlike clients' models, it is for others to read
    input = cast(Input, experiment.tower().encoder.input)
    note = {
        "model": model,
        "algorithm": plugins.short_name(settings.algorithm.name),
        "objective": plugins.short_name(settings.objective.name),
        "encoder": config.to_tree(settings.encoder),
        "features": experiment.tower().encoder.features,
        **describe_images(settings, experiment.dataset),
        "input": f"pixels divided by 255; {input.describe()}",
        "files": files,
        "personal": [f"personal/client-{k}.safetensors" for k in personal],
    }
    write_json(out / "encoder.json", note)


def _save_towers(experiment: Experiment, weights: torch.Tensor, out: Path, name: str) -> None:
    experiment.trainer.load(weights)
    for tower, suffix in enumerate(SUFFIXES[: experiment.config.encoder.towers]):
        state = merge_factors(copy.deepcopy(experiment.tower(tower).encoder)).state_dict()
        tensors = {key: value.detach().clone().cpu() for key, value in state.items()}
        save_tensors(out / f"{name}{suffix}.safetensors", tensors, {})
