"""A run: the loop over rounds, the files that it leaves, and the summary that it ends with."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedssl import __version__, config
from fedssl.config import Config, plugins
from fedssl.contrib import drift
from fedssl.data.dataset import Dataset
from fedssl.data.places import name_images
from fedssl.engines.flower.environment import require_flower
from fedssl.federation.driver import RoundResult, run_round
from fedssl.models.weights import SUFFIXES
from fedssl.runs import checkpoint, loggers
from fedssl.runs.api import give_back
from fedssl.runs.build import Experiment, build_experiment
from fedssl.runs.deployed import SITES, format_command
from fedssl.runs.metrics import Metrics, Overhead, for_one, read
from fedssl.runs.progress import Progress
from fedssl.runs.record import Run
from fedssl.runs.validate import is_deployed, list_warnings
from fedssl.util.devices import name_device
from fedssl.util.errors import TrainingError, UserError, format_resume
from fedssl.util.files import save, write_json, write_text, writing
from fedssl.util.text import name_client

MOST_PERSONAL_FILES = 100
TRACES = ("metrics.jsonl", "sweep.yaml")  # of a run and of a sweep; others have a config.yaml too
WAIT = "wait for its end, or end it"


class Interrupted(Exception):
    """Ctrl-C or a polite kill: the checkpoint is written, the run can be resumed."""


def run(settings: Config, out: Path, resume: bool = False) -> dict[str, Any]:
    """Train, judge, and leave the run's folder; returns the summary.

    Baselines (``evaluate.baselines``) are runs of their own in ``out/baselines/NAME``.
    """
    folders = {out: settings}
    for name in sorted(set(settings.evaluate.baselines) - {settings.algorithm.name}):
        folders[out / "baselines" / name] = config.with_algorithm(settings, name)
    # All are checked before the first leaves anything on the disk.
    try:
        experiments = {
            folder: open_run(own, folder, resume and (folder == out or started(folder)))
            for folder, own in folders.items()
        }
    except BaseException:
        give_back(out)
        raise
    with contextlib.ExitStack() as stack:
        for folder in folders:
            stack.enter_context(
                checkpoint.locked(folder / checkpoint.LOCK, f"--out {folder}", WAIT)
            )
        for folder, own in folders.items():
            start_folder(experiments[folder], own, folder, resume)
        metrics = {
            folder: stack.enter_context(_metrics(experiment, folders[folder], folder))
            for folder, experiment in experiments.items()
        }
        with _stop_signals() as stop, plugins.translate_errors(can_resume=True):
            for folder, experiment in experiments.items():
                work = functools.partial(train, experiment, folder, stop, metrics[folder])
                experiment.engine.drive(work)
        summaries = {
            folder: finish(experiment, folder) for folder, experiment in experiments.items()
        }
        for folder, summary in summaries.items():
            metrics[folder].conclude(summary)
    summary = summaries.pop(out)
    if summaries:
        summary["baselines"] = {folder.name: row["result"] for folder, row in summaries.items()}
        write_json(out / "summary.json", summary)
    return summary


def carry_out(experiment: Experiment, settings: Config, out: Path, resume: bool) -> dict[str, Any]:
    """One run of a experiment whose clients are elsewhere."""
    start_folder(experiment, settings, out, resume)
    with _metrics(experiment, settings, out) as metrics:
        with _stop_signals() as stop, plugins.translate_errors(can_resume=True):
            experiment.engine.drive(functools.partial(train, experiment, out, stop, metrics))
        summary = finish(experiment, out)
        metrics.conclude(summary)
    return summary


def _metrics(
    experiment: Experiment, settings: Config, out: Path
) -> contextlib.AbstractContextManager[Metrics]:
    return contextlib.closing(Metrics(out, experiment.server.round, settings.rounds, settings))


def open_run(settings: Config, out: Path, resume: bool) -> Experiment:
    """A experiment for a folder that is free, or that holds the same run when resuming."""
    check_here(settings, out)
    check_folder(settings, out, resume)
    loggers.require(settings)
    if settings.engine.name == "flower":
        require_flower()
    overhead = Overhead()
    with plugins.translate_errors(), overhead.timed("prepare"):
        experiment = build_experiment(settings)
    experiment.overhead = overhead
    if resume:
        what = "=".join(name_images(settings.data))
        check_clients(experiment, out, what, "start a new run in another folder")
        if checkpoint.of_other_images(out, experiment.dataset, "test"):
            raise UserError(
                f"{what}: the test images are not those of {out}; put them back as they were, or "
                "judge it on others by fedssl evaluate"
            )
        check_moved(settings, out, experiment.dataset)
    return experiment


def check_here(settings: Config, out: Path | None = None) -> None:
    """Refuse clients that are real sites: only Flower reaches these. ``out``: of a run."""
    if not is_deployed(settings):
        return
    fix = "write an app for them with fedssl deploy init, or leave it out"
    if out is not None and (out / SITES).exists():
        fix = f"go on with {format_command(out, 'resume=true')}"
    raise UserError(f"engine.sites={settings.engine.sites}: sites are elsewhere; {fix}")


def check_folder(settings: Config, out: Path, resume: bool) -> None:
    """Refuse a folder that holds another run, or none to resume, or that is among the images."""
    _check_name(out)
    _check_place(settings.data, out)
    if started(out):
        if not resume:
            raise _taken(out)
        check_same(settings, Run(out).settings, out)
    elif holds(out, "sweep.yaml"):
        raise UserError(
            f"--out {out}: holds a sweep; choose another folder, or go on with the sweep: "
            f"{format_resume(out)}"
        )
    elif resume:
        raise UserError(f"--resume: {out} holds no run; start it without --resume")


def check_alone(out: Path) -> None:
    """Refuse a folder of other runs: whoever reads it would take it for this one, or mix them."""
    for file in sorted(file for name in TRACES for file in out.glob(f"*/{name}")):
        raise UserError(
            f"--out {out}: holds other runs ({file.parent.name}); name a folder for this one, as "
            f"in --out {out / 'NAME'}"
        )


def _check_place(data: config.Data, out: Path) -> None:
    """A run's folder would be taken for a client, and its pictures for images."""
    if data.name not in ("folder", "paired") or data.root is None:
        return
    place, root = out.absolute().resolve(), Path(data.root).expanduser().resolve()
    if root in (place, *place.parents):
        raise UserError(
            f"--out {out}: lies in data.root={data.root}, among the images; name a folder "
            "elsewhere with --out"
        )


def _check_name(out: Path) -> None:
    try:
        str(out).encode()
    except UnicodeEncodeError:  # it stands in files and on the screen, which are UTF-8
        shown = os.fsencode(out).decode(errors="backslashreplace")
        raise UserError(f"--out {shown}: the name is not UTF-8; choose another folder") from None


def holds(out: Path, file: str) -> bool:
    """Whether a folder has this file; what nobody can look into is refused."""
    try:
        return (out / file).exists()
    except OSError as error:  # somebody else's folder, or a name that is too long
        raise UserError(
            f"--out {out}: cannot be read ({error.strerror}); choose another folder"
        ) from None


def started(out: Path) -> bool:
    """Whether a folder holds a run."""
    return holds(out, "config.yaml")


def _taken(out: Path) -> UserError:
    return UserError(
        f"--out {out}: holds another run; choose another folder, or continue it with --resume"
    )


def start_folder(experiment: Experiment, settings: Config, out: Path, resume: bool) -> None:
    """Write the configuration as it is given, and go to the checkpoint if there is one."""
    with writing(f"--out {out}"):
        out.mkdir(parents=True, exist_ok=True)
        if resume and started(out):
            _note(settings, out)
        else:
            _claim(out, config.dump(config.with_absolute_paths(settings)))
            write_json(out / "clients.json", clients(experiment))
    experiment.engine.open(out)
    if resume and not checkpoint.read(out, experiment) and any(read(out)):
        print(f"fedssl: no checkpoint in {out}: it starts again at round 1", file=sys.stderr)


def _claim(out: Path, text: str) -> None:
    """Write the configuration, unless another run has come first since the folder was checked."""
    path = out / "config.yaml"
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError:
        raise _taken(out) from None
    try:
        with file:
            file.write(text)
    except OSError:
        path.unlink()  # half of it would look like a run
        raise


def clients(experiment: Experiment) -> list[dict[str, Any]]:
    """Who is behind the numbers of clients in metrics, personal models and states."""
    each = zip(experiment.names, experiment.clients.sizes.tolist(), strict=True)
    return [{"client": k, "name": name, "samples": size} for k, (name, size) in enumerate(each)]


def check_clients(experiment: Experiment, out: Path, what: str, otherwise: str) -> None:
    """A run that goes on, or is judged again, has the clients and the images that it had.

    Clients' states are kept by number, and which images are held out goes by their order.
    """
    both = Run(out).clients, clients(experiment)
    if [row["name"] for row in both[0]] == list(map(str, range(len(both[0])))):
        # Numbers, or of an older version that knew no better: names would say that all are new.
        both = both[0], [{**row, "name": str(row["client"])} for row in both[1]]
    before, after = ({row["name"]: row["samples"] for row in rows} for rows in both)
    fix = f"put the images back as they were, or {otherwise}"
    # Who came or went is named first: the held-out images of all others change with that.
    names = sorted({**before, **after}, key=lambda name: name in before and name in after)
    for name in names if before else ():  # none: a run of an older version
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        had = f"had {old} images in {out}" if name in before else f"was not in {out}"
        has = f"has {new}" if name in after else "is not there"
        raise UserError(f"{what}: {name_client([name], 0)} {had} and {has} now; {fix}")
    if checkpoint.of_other_images(out, experiment.dataset):
        raise UserError(
            f"{what}: the training images are not those of {out} (some were added, removed, "
            f"renamed or replaced); {fix}"
        )


def check_same(new: Config, old: Config, out: Path) -> None:
    """A resumed run keeps every key that its result depends on.

    Of a simulation's images ``check_moved`` says, once they are loaded, whether they are the same.
    """
    free = config.keys_affecting(new, "evaluation", "monitoring", "speed", "nothing")
    if new.engine.sites is None:
        free |= config.keys_affecting(new, "location")
    before, after = (
        config.flatten(config.to_tree(config.with_absolute_paths(each))) for each in (old, new)
    )
    for name in sorted({**before, **after}):
        if before.get(name) != after.get(name) and name not in free:
            raise _changed(name, before.get(name), after.get(name), out)


def _changed(name: str, before: object, after: object, out: Path) -> UserError:
    return UserError(
        f"{name} was {before} in {out} and is now {after}; leave it as it was, or start a new run "
        "in another folder"
    )


def moved(settings: Config, out: Path) -> tuple[str | None, str | None] | None:
    """Where the run in ``out`` had its images and where they are now; none: in the same place."""
    before, now = (
        config.with_absolute_paths(each).data.root for each in (Run(out).settings, settings)
    )
    return None if before == now else (before, now)


def check_moved(settings: Config, out: Path, dataset: Dataset) -> None:
    """Images in another place are the run's if its checkpoint knows their files.

    Without a checkpoint it has not been trained on any.
    """
    places, trained = moved(settings, out), (out / checkpoint.FILE).exists()
    if places is not None and trained and not checkpoint.of_same_images(out, dataset):
        raise _changed("data.root", *places, out)


def _note(settings: Config, out: Path) -> None:
    """Write down what a run goes on with, if that is something else than before."""
    before, now = (config.with_absolute_paths(each) for each in (Run(out).settings, settings))
    if now != before:
        write_text(out / "config.yaml", config.dump(now))


def note_place(settings: Config, out: Path) -> None:
    """Of a run that may be finished: where its images and their cache are now, and nothing else."""
    before, given = Run(out).settings, settings.data
    data = replace(before.data, root=given.root, cache=given.cache)
    _note(replace(before, data=data), out)


def train(experiment: Experiment, out: Path, stop: list[int], metrics: Metrics) -> None:
    """The loop over rounds."""
    server, settings = experiment.server, experiment.config
    saved, cost = time.monotonic(), 0.0
    title = plugins.short_name(settings.algorithm.name)
    shown = Progress(title, settings.rounds, server.round)
    with contextlib.closing(shown) as progress, _without_hints():
        for note in list_warnings(experiment):
            progress.say(note)
        compiles = experiment.trainer.compiles or experiment.trainer.compiles_passes
        if compiles and server.round < settings.rounds:
            progress.say("compiling the training step, once: a minute or two")
            torch.compiler.reset()  # torch gives up after eight shapes, former runs' counted in
        if not (out / checkpoint.FILE).exists():
            with experiment.overhead.timed("prepare"):
                experiment.algorithm.prepare(server, experiment.public)
            experiment.algorithm.check_state("server", server.state)
            with experiment.overhead.timed("checkpoint"):
                checkpoint.write(out, experiment)  # one to go back to, from the first round on
        while server.round < settings.rounds:
            line = one_round(experiment, out, progress)
            every, monitor = settings.evaluate.every, settings.evaluate.monitor
            # At the end all protocols run anyway.
            more = monitor is not None or server.round < settings.rounds
            if every and server.round % every == 0 and more and experiment.evaluator.is_possible:
                with experiment.overhead.timed("evaluate"):
                    line |= experiment.evaluator.evaluate_result(experiment.models, monitor)
            others = experiment.overhead.take()
            metrics.write(line | ({"overhead": others} if others else {}))
            # Large states take their time: at most a fiftieth of the run goes into writing them.
            wait = settings.checkpoint.seconds and max(settings.checkpoint.seconds, 50 * cost)
            if settings.privacy.noise is not None:
                wait = 0  # what was released must not be forgotten
            if time.monotonic() - saved >= wait or stop or server.round == settings.rounds:
                started = time.monotonic()
                with experiment.overhead.timed("checkpoint"):
                    checkpoint.write(out, experiment)
                saved = time.monotonic()
                cost = saved - started
            if stop and server.round < settings.rounds:
                raise Interrupted
            progress.update(server.round, line["loss"], line["images"], line["skipped"])
    experiment.engine.rest()


@contextlib.contextmanager
def _without_hints() -> Iterator[None]:
    """Without what torch says of settings that are meant as they are, when it compiles."""
    with warnings.catch_warnings():
        for hint in ("TensorFloat32 tensor cores", "The AccumulateGrad node's stream"):
            warnings.filterwarnings("ignore", hint)
        yield


def one_round(experiment: Experiment, out: Path, progress: Progress) -> dict[str, Any]:
    """Run one round; return its line for the metrics."""
    server, started = experiment.server, time.perf_counter()
    if experiment.trainer.watched is not None:
        experiment.trainer.watched.clear()
    cohort = experiment.engine.cohort(draw(experiment, server.round), server.round)
    try:
        with experiment.trainer.tuned():
            result = run_round(experiment.algorithm, server, cohort)
    except torch.OutOfMemoryError:
        raise _no_memory(experiment, out) from None
    if result.skipped is not None:
        progress.say(f"round {result.number} skipped: {result.skipped}")
    for warning in result.warnings:
        progress.say(f"round {result.number}: {warning}")
    for client, fault in result.faults.items():
        progress.say(f"round {result.number}: no reply of {experiment.names[client]}: {fault}")
    draw(experiment, server.round)  # a GPU is still at work; reading the loss waits for it
    # Where clients are seen only through noise, no loss leaves them.
    loss = None if result.loss is None else float(result.loss)
    if loss is not None and not math.isfinite(loss):
        raise TrainingError(
            f"round {result.number}: the loss is {loss}; training is unstable with these "
            f"settings (server.lr={experiment.config.server.lr}, "
            f"client.lr={experiment.config.client.lr}); lower one or both. {checkpoint.kept(out)}"
        )
    faults = {str(client): fault for client, fault in result.faults.items()}
    return {
        "round": result.number,
        "loss": loss,
        "seconds": round(time.perf_counter() - started, 6),
        "images": _images(experiment, result),
        "clients": len(result.asked),
        "missing": result.missing,
        "skipped": result.skipped is not None,
        **({"faults": faults} if faults else {}),
        **traffic_line(result),
        **experiment.engine.aggregator.compute_privacy(),
        **{name: float(value) for name, value in result.log.items() if name != "loss"},
        **{name: {str(k): v for k, v in each.items()} for name, each in result.client_log.items()},
        **drift.measure(experiment),
    }


def _no_memory(experiment: Experiment, out: Path) -> UserError:
    """What to lower; a run's batch is its own, so that takes a new one."""
    chunk, batch = experiment.config.engine.chunk, experiment.config.algorithm.batch
    now = "all images of a client" if batch is None else batch
    fix = f"lower algorithm.batch (now {now}) and start a new run in another folder"
    if experiment.engine.merges:
        fix = f"lower engine.chunk (now {chunk}). {checkpoint.kept(out)}."
    return UserError(
        "out of memory",
        key="device",
        value=experiment.trainer.device,
        fix=fix[0].upper() + fix[1:],
        can_resume=experiment.engine.merges,
    )


def draw(experiment: Experiment, round: int) -> NDArray[np.int64]:
    """Who takes part in a round; remembered until then, so that it can be drawn ahead."""
    if experiment.drawn is None or experiment.drawn[0] != round:
        experiment.drawn = (round, experiment.draw_cohort(round))
    return experiment.drawn[1]


def traffic_line(result: RoundResult) -> dict[str, Any]:
    """Bytes over all clients, for one that took part in every exchange, and by exchange."""
    moved, clients = result.traffic, len(result.asked)
    exchanges = {
        task: {
            **{"up": moved.up[task], "down": moved.down[task]},
            **{"replied": len(moved.replied[task]), "reached": len(moved.reached[task])},
        }
        for task in moved.down
    }
    one = {
        way: round(sum(for_one(own, way, clients) for own in exchanges.values()))
        for way in ("up", "down")
    }
    return {
        "bytes_up": sum(moved.up.values()),
        "bytes_down": sum(moved.down.values()),
        "bytes_up_per_client": one["up"],
        "bytes_down_per_client": one["down"],
        "exchanges": exchanges,
    }


def _images(experiment: Experiment, result: RoundResult) -> int:
    sizes = experiment.engine.groups.sizes[result.answered]
    batches, passes = experiment.trainer.batches, experiment.algorithm.passes
    if batches.size is None:
        return int(sizes.sum()) * batches.per_round(1) * passes
    return sum(batches.images(int(size)) for size in sizes) * passes


def finish(experiment: Experiment, out: Path) -> dict[str, Any]:
    """Judge the result and an untrained network, and write encoder and summary."""
    rows = {}
    with experiment.overhead.timed("evaluate"):
        if experiment.evaluator.is_possible:
            rows["untrained"] = experiment.evaluator.evaluate_untrained(experiment.untrained())
        if experiment.evaluator.is_possible and experiment.config.encoder.init is not None:
            rows["initial"] = experiment.evaluator.evaluate(experiment.trainer.initial)
        result = (
            experiment.evaluator.evaluate_result(experiment.models)
            if experiment.evaluator.is_possible
            else {}
        )
    export(experiment, out)
    if experiment.trainer.watched:
        drift.draw_features(drift.looks(experiment), experiment.names, out / "local-features.png")
    totals = Metrics.totals(out, experiment.overhead.take())
    settings = experiment.config.evaluate
    watched = settings.monitor or (
        experiment.evaluator.protocols if experiment.evaluator.is_possible else ()
    )
    measure = "linear_top1" if "linear" in watched else "knn_top1"
    reached = Metrics.first_rounds(out, settings.targets, measure, result)
    summary: dict[str, Any] = {
        **result,
        "rounds": experiment.server.round,
        **totals,
        **experiment.engine.aggregator.compute_privacy(),
        **reached,
        **(
            {"per_client": experiment.evaluator.client_scores}
            if experiment.evaluator.client_scores
            else {}
        ),
        "judged": experiment.models.result,
        "result": result,
        **rows,
        "norm_layers": norm_layers(experiment),
        "merged": experiment.engine.merges,
        "seed": experiment.config.seed,
        "parameters": experiment.trainer.flat.parameter_count,
        "device": name_device(experiment.trainer.device),
        "precision": experiment.trainer.precision,
        "torch": torch.__version__,
        "fedssl": __version__,
    }
    write_json(out / "summary.json", summary)
    if experiment.algorithm.personal is None and experiment.trainer.kept is None:
        checkpoint.forget_clients(out, experiment)
    return summary


def norm_layers(experiment: Experiment) -> str:
    """Whose normalization layers the judged models have."""
    if experiment.trainer.kept is None:
        return "the model's own"
    own, mean = "each client's own", "the mean of the clients'"
    if experiment.models.result == "global":
        return mean
    return f"{own}; of the global model {mean}" if experiment.algorithm.has_global else own


def shared_norms(experiment: Experiment) -> bool:
    """Whether the global model's normalization layers are a mean that training never made."""
    return experiment.trainer.kept is not None and experiment.algorithm.has_global


def export(experiment: Experiment, out: Path) -> None:
    """The encoder that is the result, with a note that says what it is."""
    towers = experiment.config.encoder.towers
    weights, model = experiment.models.global_model(), experiment.algorithm.model
    if shared_norms(experiment):
        model += ", normalization layers: the mean of its clients'"
    personal = experiment.models.personal_models(MOST_PERSONAL_FILES)
    for client, own in personal.items():
        _save_towers(experiment, own, out / "personal", f"client-{client}", towers)
    if not experiment.algorithm.has_global:
        first, weights = next(iter(personal.items()))
        model = f"personal, client {first}: there is no global model"
    _save_towers(experiment, weights, out, "encoder", towers)
    files = [f"encoder{suffix}.safetensors" for suffix in SUFFIXES[:towers]]
    for name in files:
        (out / name).chmod(0o644)  # unlike clients' models, it is for others to read
    images = experiment.dataset.train.images
    note = {
        "model": model,
        "algorithm": plugins.short_name(experiment.config.algorithm.name),
        "objective": plugins.short_name(experiment.config.objective.name),
        "encoder": config.to_tree(experiment.config.encoder),
        "features": experiment.tower().encoder.features,
        "channels": [i.shape[1] for i in images],
        "size": list(images[0].shape[2:]),
        "input": "pixels divided by 255, no further normalization",
        "files": files,
        "personal": [f"personal/client-{k}.safetensors" for k in personal],
    }
    write_json(out / "encoder.json", note)


def _save_towers(
    experiment: Experiment, weights: torch.Tensor, out: Path, name: str, towers: int
) -> None:
    experiment.trainer.load(weights)
    for tower, suffix in enumerate(SUFFIXES[:towers]):
        state = experiment.tower(tower).encoder.state_dict()
        tensors = {key: value.detach().clone().cpu() for key, value in state.items()}
        save(out / f"{name}{suffix}.safetensors", tensors, {})


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """A list that fills when the user asks to stop; asking twice stops at once."""
    asked: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        print("stopping after this round (again: at once)", file=sys.stderr)

    numbers = (signal.SIGINT, signal.SIGTERM)
    try:
        before = [signal.signal(number, handle) for number in numbers]
    except ValueError:  # not the main thread: whoever runs us keeps the signals
        yield asked
        return
    try:
        yield asked
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)
