# PYTHON_ARGCOMPLETE_OK
"""The command line. Torch is imported when a command needs it, so that ``--help`` is quick.

Completion in bash, zsh and fish: ``eval "$(register-python-argcomplete fedssl)"``, with the extra
``completion``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from fedssl import __version__
from fedssl import config as configuration
from fedssl.runs.api import fresh_folder as _fresh_folder
from fedssl.runs.api import recipe_of
from fedssl.util import streams
from fedssl.util.errors import CONTINUE, TrainingError, UserError, go_on
from fedssl.util.outputs import FULL
from fedssl.util.process import wait_briefly

EXAMPLES = """examples:
  fedssl run                                  DCCO on scikit-learn's digits, in under a minute
  fedssl run rounds=50 seed=1 --out runs/a    the same with other keys
  fedssl run dcco/cifar100-noniid-4           a row of a paper's table
  fedssl run --resume --out runs/a            go on after Ctrl-C or a crash
  fedssl run folder data.root=DIR             your own images
  fedssl recipes fedema/table3                a table's recipes, with the paper's numbers
  fedssl reproduce fedema/table3 --scale 0.1  all of them, with a tenth of the rounds

your own algorithm:  fedssl run algorithm.name=path/to/file.py:Name
completion:          eval "$(register-python-argcomplete fedssl)"
"""
REPRODUCE = """examples:
  fedssl reproduce fedema/table3                          every cell of a table, one after another
  fedssl reproduce fedema/table3/fedbyol                  one row
  fedssl reproduce 'fedema/table3/*/cifar10-noniid'       one column
  fedssl reproduce 'fedema/table3/*/cifar10-noniid' --scale 0.05 data.name=digits \
      data.size=16 encoder.name=tiny objective.projector=[64,32]   a rehearsal on a CPU
  fedssl reproduce mine.yaml                              a table of your own

The same command goes on after Ctrl-C; what is finished is not run again.
"""


RUNS = "a run's folder, or one of a sweep or a table, for all its runs"
COCO = (
    "holds annotations/instances_NAME.json with its images in the folder NAME, for one NAME that "
    "begins with train and one that begins with val, such as train2017 and val2017"
)
DEPLOY = """examples:
  fedssl deploy init app default engine.sites=3 cohort.size=null
  fedssl deploy init app mine.yaml engine.sites=5 privacy.secure=true

Then read app/SERVER.md, and send app/SITES.md to the sites.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0, 1 (training failed), 2 (a mistake to mend)."""
    streams.keep()
    options: argparse.Namespace | None = None
    try:
        options = _parse(arguments)
        wait_briefly()
        code = int(options.command(options))
        sys.stdout.flush()  # what does not fit on a full disk is found while it can be said
        return code
    except UserError as error:
        print(f"fedssl: {error}", file=sys.stderr)
        return 2
    except TrainingError as error:
        print(f"fedssl: {error}", file=sys.stderr)
        return 1
    except PermissionError as error:
        if not isinstance(error.filename, str | bytes):
            raise
        # Of a file that could not be made, it is the folder that does not allow it.
        path = Path(os.fsdecode(error.filename))
        place = next(p for p in (path, *path.parents) if os.path.lexists(p))
        print(f"fedssl: {place}: not allowed; change its permissions", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in FULL:
            raise
        where = f"{error.filename}: " if error.filename else ""
        then = CONTINUE if hasattr(options, "resume") else "try again"
        print(f"fedssl: {where}{error.strerror}; make room, then {then}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fedssl: stopped", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and for which command; its commands are parsers like it."""

    def __init__(self, *arguments: Any, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        self.set_defaults(parser=self)  # of a command: it replaces the one above

    def error(self, message: str) -> NoReturn:
        """Without the usage, which is several lines."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Like ``parse_args``, which alone takes no key=value words after an option."""
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what could come next
        _complete(parser)
    options, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(options, "words") or any(word.startswith("-") for word in rest)):
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.words = [*options.words, *rest]
    return options


def _complete(parser: argparse.ArgumentParser) -> None:
    """Answer and exit, where argcomplete is installed."""
    with contextlib.suppress(ImportError):
        import argcomplete

        argcomplete.autocomplete(parser)


def _completed(argument: argparse.Action, how: str) -> None:
    """Say which function of ``fedssl.cli.completion`` knows what could stand here."""

    def completer(prefix: str, **known: Any) -> list[str]:
        from fedssl.cli import completion

        return list(getattr(completion, how)(prefix, **known))

    argument.completer = completer  # type: ignore[attr-defined]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fedssl",
        description="Train image encoders on unlabeled images that stay where they are.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fedssl {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="train, judge, and leave a run's folder")
    _add_words(run)
    run.add_argument("--out", type=_path, metavar="DIR", help="the run's folder (default: runs/…)")
    run.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    run.set_defaults(command=_run)

    recipes = commands.add_parser("recipes", help="what ships, and which row of which paper it is")
    pattern = recipes.add_argument(
        "pattern", nargs="?", metavar="PREFIX", help="a table, a folder, or a pattern such as a/*/b"
    )
    _completed(pattern, "recipes")
    recipes.set_defaults(command=_recipes)
    _add_reproduce(commands)

    evaluate = commands.add_parser("evaluate", help="judge a run again, from its last checkpoint")
    evaluate.add_argument("run", type=_path, metavar="RUN", help="a run's folder")
    words = evaluate.add_argument(
        "words", nargs="*", default=[], metavar="key=value", help="evaluate.* or data.* keys"
    )
    _completed(words, "judging")
    evaluate.set_defaults(command=_evaluate)

    partition = commands.add_parser("partition", help="who holds what, as a table and a picture")
    _add_words(partition)
    partition.add_argument(
        "--out", type=_path, metavar="FILE.png", help="draw it: a bar a client, a colour a class"
    )
    partition.set_defaults(command=_partition)
    _add_report(commands)
    _add_use(commands)
    _add_detect(commands)
    _add_deploy(commands)
    _add_theory(commands)
    doctor = commands.add_parser("doctor", help="what is installed and found here, what is missing")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_report(commands: argparse._SubParsersAction[_Parser]) -> None:
    report = commands.add_parser("report", help="runs as one page of HTML that needs no network")
    report.add_argument("runs", nargs="+", metavar="RUN", help=RUNS)
    report.add_argument(
        "--out",
        type=_path,
        metavar="FILE.html",
        help="default: report.html in the run, or above several",
    )
    report.set_defaults(command=_report)
    compare = commands.add_parser("compare", help="runs beside each other, as a table")
    compare.add_argument("runs", nargs="+", metavar="RUN", help=RUNS)
    compare.set_defaults(command=_compare)


def _add_use(commands: argparse._SubParsersAction[_Parser]) -> None:
    export = commands.add_parser("export", help="a run's encoder for use elsewhere")
    export.add_argument(
        "run", type=_path, metavar="RUN",
        help="a run's folder, or a client's model: RUN/personal/client-0.safetensors",
    )  # fmt: skip
    export.add_argument(
        "--format", required=True, choices=("safetensors", "torchscript", "onnx", "hf")
    )
    export.add_argument(
        "--out", type=_path, metavar="PATH", help="a file or folder (default: RUN/export/…)"
    )
    export.set_defaults(command=_export)

    embed = commands.add_parser("embed", help="images in, embeddings out")
    embed.add_argument("run", type=_path, metavar="RUN", help="a run's folder, or an exported one")
    embed.add_argument("images", metavar="IMAGES", help="a folder, a file, or a pattern in quotes")
    embed.add_argument(
        "--to", type=_path, default=Path("embeddings.parquet"), metavar="FILE",
        help="a .parquet, .csv or .npz file (default: embeddings.parquet)",
    )  # fmt: skip
    _add_device(embed)
    embed.set_defaults(command=_embed)

    search = commands.add_parser("search", help="the images nearest to one image")
    search.add_argument("run", type=_path, metavar="RUN", help="a run's folder, or an exported one")
    search.add_argument("query", type=_path, metavar="QUERY", help="an image")
    search.add_argument("images", metavar="IMAGES", help="a folder, a file, or a pattern in quotes")
    search.add_argument("--top", type=int, default=10, help="how many (default: 10)")
    search.add_argument(
        "--html", type=_path, metavar="FILE.html", help="also a page that shows the images"
    )
    _add_device(search)
    search.set_defaults(command=_search)


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=256, help="images at once (default: 256)")
    parser.add_argument("--device", default="auto")


def _add_reproduce(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "reproduce",
        help="run a paper's table and show it beside the paper's numbers",
        epilog=REPRODUCE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    pattern = parser.add_argument(
        "pattern", metavar="PATTERN", help="a recipe, a table, or a pattern"
    )
    _completed(pattern, "recipes")
    words = parser.add_argument(
        "words", nargs="*", default=[], metavar="key=value", help="keys to change in all"
    )
    _completed(words, "keys")
    parser.add_argument("--scale", default="1", metavar="S", help="share of the rounds, up to 1")
    parser.add_argument(
        "--out", type=_path, metavar="DIR", help="where the runs' folders go (runs/reproduce)"
    )
    parser.set_defaults(command=_reproduce)


def _add_detect(commands: argparse._SubParsersAction[_Parser]) -> None:
    detect = commands.add_parser(
        "detect", help="fine-tune Mask R-CNN from a run's encoder, on data in COCO's format"
    )
    detect.add_argument("run", type=_path, metavar="RUN", help="a run's folder")
    detect.add_argument("data", type=_path, metavar="DIR", help=COCO)
    detect.add_argument("--steps", type=int, default=9000)
    detect.add_argument("--batch", type=int, default=4)
    detect.add_argument("--lr", type=float, default=0.005)
    detect.add_argument("--size", type=int, default=256, help="the shorter side of images")
    detect.add_argument("--seed", type=int, default=0)
    detect.add_argument("--random", action="store_true", help="random weights, to compare with")
    detect.add_argument("--device", default="auto")
    detect.set_defaults(command=_detect)


def _add_deploy(commands: argparse._SubParsersAction[_Parser]) -> None:
    deploy = commands.add_parser("deploy", help="run a recipe on real machines, through Flower")
    actions = deploy.add_subparsers(title="actions", required=True, metavar="ACTION")
    init = actions.add_parser(
        "init",
        help="write a Flower app, with instructions for the server and the sites",
        epilog=DEPLOY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    init.add_argument("folder", type=_path, metavar="DIR", help="a new folder")
    recipe = init.add_argument("recipe", metavar="RECIPE", help="a recipe's name or file")
    _completed(recipe, "recipes")
    words = init.add_argument(
        "words", nargs="*", default=[], metavar="key=value", help="keys to change"
    )
    _completed(words, "keys")
    init.set_defaults(command=_deploy_init)


def _add_theory(commands: argparse._SubParsersAction[_Parser]) -> None:
    theory = commands.add_parser("theory", help="the Dec-SSL paper's linear model, solved")
    actions = theory.add_subparsers(title="actions", required=True, metavar="ACTION")
    shown = actions.add_parser(
        "representability", help="which directions each source's solution has (Figure 3)"
    )
    shown.add_argument("--d", type=int, default=256, help="dimension of the data")
    shown.add_argument("--k", type=int, default=3, help="number of sources")
    shown.add_argument("--seed", type=int, default=0)
    shown.add_argument("--out", type=_path, metavar="FILE.png", help="draw it")
    shown.set_defaults(command=_representability)


def _path(text: str) -> Path:
    """An argument; a shell's variable that is not set is nowhere, which Path takes for here."""
    if not text:
        raise argparse.ArgumentTypeError(
            "an empty name; give one, or . for the folder that you are in"
        )
    return Path(text)


def _add_words(parser: argparse.ArgumentParser) -> None:
    words = parser.add_argument(
        "words",
        nargs="*",
        default=[],
        metavar="RECIPE key=value",
        help="a recipe's name or file (default: the digits demonstration), and keys to change",
    )
    _completed(words, "words")


def _resolve(words: Sequence[str], resumed: Path | None = None) -> tuple[str, configuration.Config]:
    """Recipe and configuration from the words of a command.

    Without a recipe's name, words change the configuration of the run that is resumed.
    """
    recipe = words[0] if words and "=" not in words[0] else None
    name, tree = recipe_of(recipe, resumed)
    return name, configuration.resolve(tree, words[1:] if recipe else words)


def _deploy_init(options: argparse.Namespace) -> int:
    from fedssl.deploy import app as deploy

    deploy.init(options.folder, options.recipe, options.words)
    print(f"{options.folder}: written; read {options.folder / 'SERVER.md'} next")
    return 0


def _detect(options: argparse.Namespace) -> int:
    from fedssl.contrib import detection
    from fedssl.runs.session import pick_device

    names = ("steps", "batch", "lr", "size", "seed", "random")
    settings = detection.Settings(**{name: getattr(options, name) for name in names})
    found = detection.detect(options.run, options.data, settings, pick_device(options.device))
    print("   ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in found.items()))
    return 0


def _representability(options: argparse.Namespace) -> int:
    from fedssl.contrib import theory

    if options.out is not None and options.out.suffix.lower() != ".png":
        raise UserError(f"--out {options.out}: a picture is a PNG file; use a name such as out.png")
    table = theory.compare(options.d, options.k, options.seed)
    print(theory.report(table, options.d))
    if options.out is not None:
        theory.draw(options.out, table, options.d)
        print(f"\n{options.out}")
    return 0


def _run(options: argparse.Namespace) -> int:
    if options.resume and options.out is None:
        folder = next((word for word in options.words if Path(word).is_dir()), None)
        hint = "" if folder is None else f" (did you mean --out {folder}?)"
        raise UserError(f"--resume: say which run with --out DIR{hint}")
    swept = _swept(options)
    if swept is not None:
        return _sweep(*swept, options)
    name, settings = _resolve(options.words, options.out if options.resume else None)
    if not options.resume:
        configuration.check_used(settings)
    out = options.out or _fresh_folder(name)

    from fedssl import report
    from fedssl.runs import run
    from fedssl.util import tables

    if not options.resume and _held(out) is None:
        run.check_alone(out)
    try:
        summary = run.run(settings, out, options.resume)
    except (run.Interrupted, KeyboardInterrupt):
        return _stopped(out)
    try:
        print(tables.result(summary, settings))
    finally:  # the run is finished, whether or not its table finds room
        report.leave(out)
    print(f"\n{tables.closing(summary)}\n{out}")
    return 0


def _swept(options: argparse.Namespace) -> tuple[str, configuration.Tree, list[str]] | None:
    """A recipe's name, tree, and what its runs go without, if it is a sweep.

    It is if keys hold lists, or --out is a sweep's folder.
    """
    named = bool(options.words) and "=" not in options.words[0]
    words = options.words[1:] if named else options.words
    held = _held(options.out) if options.resume else None
    name = options.words[0] if named else "default"
    if named or held is None:
        recipe = configuration.read_recipe(name)
    else:
        recipe = configuration.read_yaml(held)
    tree = configuration.merged(recipe, words)
    # Without lists, words for a sweep's folder are no run either: a sweep says what is wrong.
    goes_on = held is not None and held.name == "sweep.yaml"
    if not goes_on and not configuration.swept(tree):
        return None
    return name, tree, list(configuration.left_out(recipe, tree))


def _held(out: Path) -> Path | None:
    """The file that says what a folder holds: a sweep, or a run; none: neither."""
    from fedssl.runs import run

    files = ("sweep.yaml", "config.yaml")
    return next((out / file for file in files if run.holds(out, file)), None)


def _stopped(out: Path) -> int:
    """By Ctrl-C, wherever that found the run: how to go on, if it had begun."""
    hint = "" if _held(out) is None else f"; continue with: {go_on(out)}"
    print(f"fedssl: stopped{hint}", file=sys.stderr)
    return 130


def _sweep(
    name: str, tree: configuration.Tree, notes: Sequence[str], options: argparse.Namespace
) -> int:
    from fedssl.runs import run, sweep

    out = options.out or _fresh_folder(name)
    try:
        found = sweep.sweep(tree, out, options.resume, notes)
    except (run.Interrupted, KeyboardInterrupt):
        return _stopped(out)
    if found:
        print(sweep.table(found))
    print(f"\n{len(found)} of {len(sweep.runs(tree))} runs\n{out}")
    return 0 if len(found) == len(sweep.runs(tree)) else 1


def _recipes(options: argparse.Namespace) -> int:
    from fedssl.util import tables

    print(tables.recipes(options.pattern))
    return 0


def _reproduce(options: argparse.Namespace) -> int:
    from fedssl.runs import reproduce

    jobs = reproduce.plan(options.pattern, options.words, options.scale, options.out)
    try:
        failed = reproduce.work(jobs)
    except (reproduce.Interrupted, KeyboardInterrupt):
        finished = [job for job in jobs if job.summary() is not None]
        if finished:
            print(reproduce.report(finished, options.words))
        print("fedssl: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    print(reproduce.report(jobs, options.words))
    return 1 if failed else 0


def _report(options: argparse.Namespace) -> int:
    from fedssl import report

    print(report.write(options.runs, options.out))
    return 0


def _compare(options: argparse.Namespace) -> int:
    from fedssl.report import compare

    print(compare.table(options.runs))
    return 0


def _export(options: argparse.Namespace) -> int:
    from fedssl.encoder import export

    for line in export.export(options.run, options.format, options.out):
        print(line)
    return 0


def _embed(options: argparse.Namespace) -> int:
    from fedssl.encoder import embed

    done = embed.embed(options.run, options.images, options.to, options.batch, options.device)
    print(f"{done} image{'s' * (done != 1)}: {options.to}")
    return 0


def _search(options: argparse.Namespace) -> int:
    from fedssl.encoder import embed

    found = embed.search(
        options.run, options.query, options.images, options.top, options.html,
        options.batch, options.device,
    )  # fmt: skip
    for path, similarity in found:
        print(f"{similarity:.3f}  {embed.text(path)}")
    if options.html is not None:
        print(f"\n{options.html}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from fedssl.contrib import doctor

    print(doctor.report())
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from fedssl.runs.reevaluate import evaluate
    from fedssl.util import tables

    print(tables.rows(evaluate(options.run, options.words)))
    return 0


def _partition(options: argparse.Namespace) -> int:
    _, settings = _resolve(options.words)
    if options.out is not None and options.out.suffix.lower() != ".png":
        raise UserError(f"--out {options.out}: a picture is a PNG file; use a name such as out.png")

    from fedssl.data import datasets, picture, sources
    from fedssl.data.partition import client_names, table, uneven
    from fedssl.runs.session import client_data, pick_device

    dataset = datasets.load(settings.data, settings.seed)
    found = sources.assign(settings, dataset, pick_device(settings.device))
    groups = client_data(settings, dataset, found)
    labels = None if found.of is None else found.of.numpy()
    names = client_names(settings.partition, groups, dataset)
    print(table(groups, labels, found.names, len(dataset.train), names, found.word))
    for note in uneven(settings.partition, groups.sizes):
        print(f"fedssl: {note}", file=sys.stderr)
    if options.out is not None:
        picture.draw(options.out, groups, labels, found.names, names)
        print(f"\n{options.out}")
    return 0
