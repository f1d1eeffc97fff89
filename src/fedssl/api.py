"""Train, sweep and evaluate from Python, as the command line does, with your own objects."""

from __future__ import annotations

import contextlib
import copy
import html
import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fedssl import config
from fedssl.config import Recipe, plugins
from fedssl.runs.folder import SWEEP, make_folder, read_recipe
from fedssl.runs.metrics import is_number
from fedssl.runs.reader import RunReader, section
from fedssl.util.errors import UserError, resume_hint
from fedssl.util.tuning import shorten_thread_waits

if TYPE_CHECKING:
    import pandas
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from torch.utils.data import Dataset

    from fedssl.encoder.load import ImageEncoder
    from fedssl.runs.build import Experiment

    Module = nn.Module | Callable[..., nn.Module] | str
    Augment = Callable[[Tensor, Callable[[int], Tensor]], Tensor] | str
    Images = Dataset[Any] | Tensor | NDArray[Any] | tuple[Any, Any] | Iterable[Any]
    Clients = Sequence[Images] | Mapping[str, Images] | Images | str

IN_MEMORY = "folder"  # the recipe of images that are passed in Python


class Run(RunReader):
    """A run's folder, finished or not.

    >>> run = fedssl.Run("runs/first")
    >>> run.finished, run.summary["rounds"]
    (True, 2)
    >>> run.evaluate("knn").columns.tolist()
    ['knn_top1']

    A run that was trained with objects of yours needs them again for ``encoder``, ``evaluate``
    and ``export``: ``Run(path, encoder=module, clients=datasets)``. The run that ``fedssl.train``
    returns has them. A run whose parts have names of files finds them by itself.

    Attributes:
        path: The folder.
        name: The folder's own name.
        tree: The contents of ``config.yaml``.
        settings: The configuration, with checked values: ``run.settings.rounds``.
        summary: The contents of ``summary.json``; empty before the run has ended.
        finished: True if the run has ended.
        rounds: The number of rounds so far.
        clients: Number, name and samples of each client.
        baselines: The runs that ``evaluate.baselines`` left beside this one.
        metrics: A frame with a row for each round.
        encoder: The trained encoder.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        encoder: Module | None = None,
        augment: Augment | None = None,
        clients: Clients | None = None,
        test: Images | None = None,
    ) -> None:
        super().__init__(path)
        self._objects = _Objects(encoder, augment, clients, test)

    @property
    def metrics(self) -> pandas.DataFrame:
        """The rounds of ``metrics.jsonl``; nested numbers are columns such as
        ``exchanges.train.up``.

        Needs pandas (the extra ``frames``).
        """
        frame = _pandas("Run.metrics").DataFrame([config.flatten(line) for line in self.lines()])
        return frame.set_index("round") if len(frame) else frame

    @property
    def baselines(self) -> list[Self]:
        """The runs that ``evaluate.baselines`` left beside this one."""
        runs = super().baselines
        for run in runs:
            run._objects = self._objects
        return runs

    @cached_property
    def encoder(self) -> ImageEncoder:
        """The trained encoder with its preprocessing, as ``fedssl.load_encoder`` returns it."""
        from fedssl.encoder.load import load_encoder

        with self._objects.held():
            return load_encoder(self.path)

    def evaluate(self, *protocols: str | Iterable[str], **keys: Any) -> pandas.DataFrame:
        """Evaluate the run again, as ``fedssl evaluate`` does: a row for each model.

        Args:
            protocols: Names such as ``"knn"``, or a list of them; by default those of the run.
            keys: Keys of ``evaluate`` and ``data``, such as ``evaluate__k=5``.

        Needs pandas (the extra ``frames``).
        """
        from fedssl.runs.reevaluate import evaluate

        frames = _pandas("Run.evaluate")
        lists = [[given] if isinstance(given, str) else given for given in protocols]
        named = {"evaluate.protocols": [name for names in lists for name in names]} if lists else {}
        values = {**named, **_dotted(keys)}
        words = [f"{key}={json.dumps(value, default=str)}" for key, value in values.items()]
        with self._objects.held():
            return frames.DataFrame.from_dict(evaluate(self.path, words), orient="index")

    def export(self, format: str = "safetensors", out: str | Path | None = None) -> Path:
        """Export the encoder as ``fedssl export`` does; return the folder or file.

        Args:
            format: ``"safetensors"``, ``"torchscript"``, ``"onnx"`` or ``"hf"``.
            out: The folder or file to write; by default ``export/FORMAT`` in the run's folder.
        """
        from fedssl.encoder.export import export

        with self._objects.held():
            for _ in export(self.path, format, None if out is None else Path(out)):
                pass
        return self.path / "export" / format if out is None else Path(out)

    def _repr_html_(self) -> str:
        """Show the run in a notebook."""
        result = section(self.summary, "result")
        shown = {
            "run": str(self.path),
            "algorithm": plugins.short_name(str(section(self.tree, "algorithm").get("name", ""))),
            "objective": plugins.short_name(str(section(self.tree, "objective").get("name", ""))),
            "rounds": f"{self.rounds}{'' if self.finished else ', not finished'}",
            **{str(k): f"{v:.2f}" for k, v in result.items() if is_number(v)},
        }
        rows = (
            f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in shown.items()
        )
        return f"<table>{''.join(rows)}</table>"


class Round:
    """A round that has ended, as callbacks of ``fedssl.train`` get it.

    >>> def watch(round: fedssl.Round) -> None:
    ...     weights = next(round.encoder.parameters())
    ...     round.metrics["first_layer"] = float(weights.norm())

    Attributes:
        number: The number of the round, from 1 on.
        metrics: The round's line of ``metrics.jsonl``: loss, bytes, seconds. Numbers that a
            callback adds are logged, too.
        encoder: A copy of the encoder so far.
    """

    def __init__(self, experiment: Experiment, metrics: dict[str, Any]) -> None:
        self._experiment = experiment
        self.number: int = metrics["round"]
        self.metrics = metrics

    @cached_property
    def encoder(self) -> ImageEncoder:
        """A copy of the encoder so far."""
        from fedssl.encoder.load import ImageEncoder
        from fedssl.runs.build import describe_images

        experiment, models = self._experiment, self._experiment.models
        tower = copy.deepcopy(experiment.evaluator.tower(models.global_model()))
        note = {
            "model": f"global, after round {self.number}",
            "encoder": config.to_tree(experiment.config.encoder),
            "features": experiment.tower().encoder.features,
            **describe_images(experiment.config, experiment.dataset),
        }
        return ImageEncoder(tower.encoder.cpu().float(), note, 0).eval()


class _RoundCallback:
    """Calls a user's function after every round."""

    def __init__(self, function: Callable[[Round], object], experiment: Experiment) -> None:
        self.function, self.experiment = function, experiment

    def after_round(self, line: dict[str, Any]) -> None:
        """Call it with the round's metrics, which it may add to."""
        self.function(Round(self.experiment, line))
        line.update({k: v.item() for k, v in line.items() if hasattr(v, "item")})  # of torch, numpy


def train(
    recipe: str | Path | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    *,
    encoder: Module | None = None,
    augment: Augment | None = None,
    clients: Clients | None = None,
    test: Images | None = None,
    callbacks: Sequence[Callable[[Round], object]] = (),
    **overrides: Any,
) -> Run:
    """Train, evaluate, and leave a run's folder, as ``fedssl run`` does.

    >>> run = fedssl.train("default", rounds=2, algorithm__name="fedavg")
    >>> run.summary["rounds"]
    2

    Args:
        recipe: The name of a recipe, a file, or the keys themselves:
            ``{"extends": "default", "rounds": 5}``. By default the digits demonstration or, with
            ``clients``, the recipe ``folder``.
        out: The run's folder; by default a new one in ``runs/``.
        resume: Continue the run in ``out``, by its own configuration if no recipe is given.
        encoder: Your own ``torch.nn.Module`` from images to features ``[N, d]``, a function that
            makes one, or the name of an encoder. A module keeps its weights as the start.
        augment: Your own function ``augment(images, draw)`` from a batch of float images to a
            batch of views, or the name of a preset. ``draw(n)`` returns ``n`` uniform random
            numbers per image, the same ones after a resume and on every device.
        clients: Your images: a list of data sets, one per client, or a mapping by the client's
            name. A data set is a torch ``Dataset``, a tensor ``[N, channels, height, width]``, or
            a pair of such a tensor and labels. A single data set is divided by ``partition__…``.
        test: A data set with labels, for the evaluation.
        callbacks: Functions that are called after each round with a :class:`fedssl.Round`.
        overrides: Keys, with two underscores for a dot: ``server__lr=0.1``.

    A mistake is a :class:`fedssl.util.errors.UserError`.
    """
    shorten_thread_waits()
    if callable(callbacks):
        fix = "Give a list of functions: callbacks=[function]."
        raise UserError("a function, not a list", key="callbacks", fix=fix)
    objects = _Objects(encoder, augment, clients, test)
    name, base, words = _read_keys(recipe, out, resume, objects, overrides)
    for key, values in config.find_sweep(config.with_values(base, words)).items():
        fix = "Use fedssl.sweep."
        raise UserError("a list of values is a sweep", key=key, value=values, fix=fix)
    settings = config.resolve(base, words)
    objects.check(settings)
    folder = make_folder(name) if out is None else Path(out)

    from fedssl import report
    from fedssl.runs import loop

    def make(function: Callable[[Round], object]) -> loop.MakeCallback:
        return lambda experiment: _RoundCallback(function, experiment)

    with objects.held():
        with _explain_resume("train", folder):
            loop.run(settings, folder, resume, list(map(make, callbacks)))
        report.write_page_or_warn(folder)
    return Run(folder, encoder=encoder, augment=augment, clients=clients, test=test)


def sweep(
    recipe: str | Path | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    *,
    encoder: Module | None = None,
    augment: Augment | None = None,
    clients: Clients | None = None,
    test: Images | None = None,
    **overrides: Any,
) -> pandas.DataFrame:
    """Train a run for each combination of values; return a frame with a row for each run.

    >>> frame = fedssl.sweep("default", rounds=1, server__lr=[0.001, 0.01], evaluate__baselines=[])
    >>> frame[["server.lr", "knn_top1"]].shape
    (2, 2)

    Keys with a list of values are varied; a key that takes a list needs a list of lists. The frame
    has a column for each of these keys, one for each measure, and ``path``, the run's folder. A run
    that failed has no measures. The arguments are those of ``fedssl.train``; with ``resume`` only
    runs that are not finished are trained. Needs pandas (the extra ``frames``).
    """
    frames = _pandas("fedssl.sweep")
    shorten_thread_waits()
    objects = _Objects(encoder, augment, clients, test)
    name, base, words = _read_keys(recipe, out, resume, objects, overrides)
    tree = config.with_values(base, words)
    is_sweep = bool(config.find_sweep(tree))
    if not is_sweep and not (resume and out is not None and (Path(out) / SWEEP).is_file()):
        fix = "Give a list, such as seed=[0, 1], or use fedssl.train."
        raise UserError("no key has a list of values", fix=fix)

    from fedssl.runs import sweep as sweeps

    for settings in sweeps.list_runs(tree, words).values():
        objects.check(settings)
    folder = make_folder(name) if out is None else Path(out)
    notes = list(config.find_omissions(base, tree))
    with objects.held(), _explain_resume("sweep", folder):
        summaries = sweeps.sweep(tree, folder, resume, notes, words)
    ran = config.read_yaml(folder / SWEEP)  # a resumed sweep may have its keys in another order
    rows = [
        {**values, **section(summaries.get(run, {}), "result"), "path": str(folder / run)}
        for run, values in zip(
            sweeps.list_runs(ran, words), config.combine_values(ran), strict=True
        )
    ]
    return frames.DataFrame(rows)


def evaluate(
    run: Run | str | Path, *protocols: str | Iterable[str], **keys: Any
) -> pandas.DataFrame:
    """Evaluate a run again, as ``fedssl evaluate`` does; return a frame with a row for each model.

    >>> frame = fedssl.evaluate("runs/first", "knn", evaluate__k=5)
    >>> frame.index.tolist()
    ['untrained', 'result']

    Args:
        run: The run, or its folder.
        protocols: Names such as ``"knn"``, or a list of them; by default those of the run.
        keys: Keys of ``evaluate`` and ``data``, with two underscores for a dot.

    Needs pandas (the extra ``frames``).
    """
    return (run if isinstance(run, Run) else Run(run)).evaluate(*protocols, **keys)


class _Objects:
    """Objects of the user's that stand in for an encoder, an augmentation and a data set."""

    def __init__(self, encoder: Any, augment: Any, clients: Any, test: Any) -> None:
        if test is not None and (clients is None or isinstance(clients, str)):
            fix = "Pass the training images with clients=…, or leave it out."
            raise UserError("test images without those of clients", key="test", fix=fix)
        is_pool = not isinstance(clients, list | Mapping)
        self.are_clients = clients is not None and not is_pool
        images = clients
        if clients is not None and not isinstance(clients, str):
            images = {"clients": clients} | ({} if test is None else {"test": test})
        given = {"encoder.name": encoder, "augment.name": augment, "data.name": images}
        self.names = {key: value for key, value in given.items() if isinstance(value, str)}
        self.by_key = {k: v for k, v in given.items() if v is not None and k not in self.names}
        for key, value in self.by_key.items():
            is_data = key == "data.name"
            self.names[key] = plugins.MEMORY + "clients" if is_data else plugins.name_object(value)

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which their names stand for them."""
        return plugins.hold_objects(self.by_key)

    def check(self, settings: config.Config) -> None:
        """Refuse objects that other processes would need."""
        if self.by_key and settings.engine.name != "local":
            key = next(iter(self.by_key))
            problem = "an object of this process cannot be sent to others (engine.name=flower)"
            fix = f"Put it in a file and use {key}=FILE.py:NAME, or engine.name=local."
            raise UserError(problem, key=key, value=self.names[key], fix=fix)


def _read_keys(
    recipe: str | Path | Mapping[str, Any] | None,
    out: str | Path | None,
    resume: bool,
    objects: _Objects,
    overrides: Mapping[str, Any],
) -> tuple[str, Recipe, dict[str, Any]]:
    """Return a recipe's name, its keys, and the keys that the objects and overrides set."""
    if resume and out is None:
        raise UserError("the run's folder is missing", key="resume", value=resume, fix="Give out.")
    if out == "":  # which Path takes for the current folder
        raise UserError("out is an empty name", fix='Give a name, or "." for this folder.')
    has_images = "data.name" in objects.by_key
    resumed = Path(out) if resume and out is not None else None
    if recipe is None and resumed is None and has_images:
        recipe = IN_MEMORY
    name, base = _read_recipe(recipe, resumed)
    values: dict[str, Any] = dict(objects.names)
    if objects.are_clients and resumed is None:
        values["partition.name"] = "folder"
    values |= _dotted(overrides)
    from fedssl.runs.fit import fit_recipe

    return name, fit_recipe(base, values), values


def _read_recipe(
    recipe: str | Path | Mapping[str, Any] | None, resumed: Path | None
) -> tuple[str, Recipe]:
    """Return a recipe's name and keys; without one, those of the run that is resumed."""
    if not isinstance(recipe, Mapping):
        return read_recipe(None if recipe is None else str(recipe), resumed)
    keys = dict(recipe)
    base = keys.pop("extends", None)
    if base is None:
        return "own", config.with_values({}, keys)
    return "own", config.with_values(config.read_recipe(str(base)), keys)


@contextlib.contextmanager
def _explain_resume(function: str, folder: Path) -> Iterator[None]:
    """Say in errors, and when the user stops it, how to continue in Python."""
    from fedssl.runs import loop

    again = f"continue with fedssl.{function}(out={str(folder)!r}, resume=True)"
    try:
        with resume_hint(f"Then {again}."):
            yield
    except loop.Interrupted:
        raise KeyboardInterrupt(f"stopped; {again}") from None


def _dotted(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys as recipes have them: ``algorithm__name`` is ``algorithm.name``."""
    return {name.replace("__", "."): value for name, value in keys.items()}


def _pandas(name: str) -> Any:
    try:
        return importlib.import_module("pandas")
    except ImportError:
        raise UserError(f"{name} needs pandas", fix="pip install 'fedssl[frames]'") from None
