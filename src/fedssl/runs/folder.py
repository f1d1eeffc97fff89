"""A run's folder: create it, lock it, and check that a resumed run is the same run."""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import time
from collections.abc import Iterator, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from fedssl import config
from fedssl.config import Config, Recipe, plugins
from fedssl.runs.reader import LOCK, RunReader, read_keys
from fedssl.util.errors import UserError, format_resume
from fedssl.util.files import explain_write_errors, make_folders, remove_strays, sync, write_text
from fedssl.util.seals import seal_text
from fedssl.util.status import say
from fedssl.util.text import printable
from fedssl.util.tuning import count_threads

RUN, SWEEP = "config.yaml", "sweep.yaml"
TRACES = ("metrics.jsonl", SWEEP)  # of a run and of a sweep; others have a config.yaml too
# A deployed run: its app's package, its list of sites, the server's name in Flower's config.toml.
PACKAGE, SITES, CONNECTION = "fedssl_app", "sites.json", "fedssl"

_UNUSED: set[Path] = set()  # folders that were made for runs that have not started


def read_recipe(name: str | None, resumed: Path | None = None) -> tuple[str, Recipe]:
    """Return a recipe's name and keys; without a name, those of what is resumed in a folder."""
    if resumed is not None:
        _restore_config(resumed)
    held = None if resumed is None else find_config(resumed)
    if name is None and held is not None:
        return "run", read_keys(held, is_resumed=True)
    return name or "default", config.read_recipe(name)


def _restore_config(out: Path) -> None:
    """Write a configuration that was deleted again, from the copy in the checkpoint."""
    from fedssl.runs import checkpoint  # imported with torch, which takes a second

    if find_config(out) is None and (text := checkpoint.read_config(out)):
        say(f"{out / RUN} was missing. The checkpoint had a copy.")
        with explain_write_errors("--out", out):
            write_text(out / RUN, text)


def make_folder(name: str) -> Path:
    """Make a new folder in ``runs/``, named after a recipe and the time."""
    # Only the file's name of a path; a shipped recipe and a table's cell have their whole name.
    path, yaml, cell = name.partition(".yaml")
    label = (Path(path).name + cell if yaml else path).replace("/", "-")
    stem = out = Path("runs", f"{label}-{time.strftime('%Y%m%d-%H%M%S')}")
    number = 1
    with explain_write_errors("--out", stem):
        try:
            stem.parent.mkdir(exist_ok=True)
        except FileExistsError:
            raise UserError("runs is not a folder", fix="Give --out DIR.") from None
        while True:
            try:
                out.mkdir()
                sync(out.parent)
                break
            except FileExistsError:  # another run started in the same second
                number += 1
                out = stem.with_name(f"{stem.name}-{number}")
    _UNUSED.add(out.absolute())
    atexit.register(remove_unused, out.absolute())
    return out


def remove_unused(folder: Path) -> None:
    """Remove a folder that ``make_folder`` made if it is empty, and ``runs/`` if that is empty."""
    if folder.absolute() in _UNUSED:
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()
            folder.parent.rmdir()


@contextlib.contextmanager
def lock(
    folder: Path, key: str = "--out", fix: str = "Wait for its end, or end it."
) -> Iterator[None]:
    """Hold a folder, which the option ``key`` named, for this process alone, until it ends."""
    import fcntl

    with explain_write_errors(key, folder):
        make_folders(folder)
        file = (folder / LOCK).open("a+", encoding="utf-8")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            problem = f"a run is at work there (process {file.read().strip() or 'unknown'})"
            raise UserError(problem, key=key, value=folder, fix=fix) from None
        except OSError:
            pass  # some network disks have no locks
        file.truncate(0)
        with contextlib.suppress(OSError):  # a full disk; the number is only for the error above
            os.write(file.fileno(), f"{os.getpid()}\n".encode())
        yield


def create_config(settings: Config, out: Path) -> None:
    """Write the configuration of a new run, unless another run has come first.

    Some network disks have no locks, so only this file keeps two runs out of one folder.
    """
    try:
        write_text(out / RUN, format_config(settings), exclusive=True)
    except FileExistsError:
        check_kind(out, False, RUN)
        raise


def write_config(settings: Config, out: Path) -> None:
    """Write the configuration that a run continues with."""
    write_text(out / RUN, format_config(settings))


def format_config(settings: Config) -> str:
    """Format ``config.yaml``, with a seal."""
    return seal_text(config.dump(config.with_absolute_paths(settings)))


def check_present(out: Path) -> None:
    """Check that nobody deleted the folder of a run that is at work, before it is written to."""
    if not is_started(out):
        problem, fix = "was deleted while the run was at work", "Start the run again."
        raise UserError(problem, key="--out", value=out, fix=fix)


def remove_unfinished(out: Path) -> None:
    """Remove the files that a killed process was writing, in a folder that is locked."""
    from fedssl.runs import checkpoint

    remove_strays([out, out / "personal"])
    checkpoint.remove_unfinished(out)


def format_deploy_command(out: Path, key: str) -> str:
    """Format the command that starts the app whose run is in ``out``, with a ``--run-config``."""
    app = out.resolve().parent
    named = shlex.quote(str(app)) if (app / PACKAGE).is_dir() else "APP"
    return f"flwr run {named} {CONNECTION} --stream --run-config {shlex.quote(key)}"


# Check -------------------------------------------------------------------------------------------


def find_config(out: Path) -> Path | None:
    """Return the configuration of the sweep or run that a folder holds, if there is one."""
    return next((out / name for name in (SWEEP, RUN) if os.access(out / name, os.F_OK)), None)


def is_started(out: Path) -> bool:
    """Return whether a folder holds a run. Writing reports a folder that cannot be read."""
    return os.access(out / RUN, os.F_OK)


def check_folder(settings: Config, out: Path, resume: bool, *, is_final: bool = False) -> None:
    """Check that a folder is free, or holds the same run if it is resumed.

    A run that ``is_final`` is not evaluated again, so its evaluation must be the same, too.
    """
    check_kind(out, resume, RUN)
    data = settings.data
    if data.name in ("folder", "paired") and data.root is not None:
        place, root = out.absolute().resolve(), Path(data.root).expanduser().resolve()
        if root in (place, *place.parents):  # it would be taken for a client
            problem = f"lies in data.root={data.root}, among the images"
            raise UserError(problem, key="--out", value=out, fix="Choose a folder elsewhere.")
    if resume:
        _check_settings(settings, out, is_final)


def check_kind(out: Path, resume: bool, file: str) -> None:
    """Check that a folder is free for a run or a sweep, or holds one to resume."""
    try:
        str(out).encode()
    except UnicodeEncodeError:  # the name could not stand in the run's files
        fix = "Use another name."
        raise UserError("not UTF-8", key="--out", value=printable(out), fix=fix) from None
    held, kinds = find_config(out), {RUN: "run", SWEEP: "sweep"}
    if held is None:
        if resume:
            fix = "Start it without --resume."
            raise UserError(f"{out} holds no {kinds[file]}", key="--resume", fix=fix)
    elif held.name != file or not resume:
        fix = f"Choose another folder, or continue it: {format_resume(out)}"
        raise UserError(f"holds a {kinds[held.name]}", key="--out", value=out, fix=fix)


def check_alone(out: Path) -> None:
    """Check that a folder holds no other runs: a reader would mix them."""
    for file in sorted(file for name in TRACES for file in out.glob(f"*/{name}")):
        fix = f"Use a folder of its own, such as --out {out / 'NAME'}."
        problem = f"holds other runs ({file.parent.name})"
        raise UserError(problem, key="--out", value=out, fix=fix)


def fix_threads(settings: Config, out: Path) -> Config:
    """Replace ``engine.threads=auto`` by the number of the run in a folder, or of this machine."""
    threads = settings.engine.threads
    if threads == "auto" and is_started(out):
        threads = RunReader(out).settings.engine.threads
    return replace(settings, engine=replace(settings.engine, threads=count_threads(threads)))


def _check_rounds(settings: Config, before: Config, out: Path) -> None:
    """Check that a run which is resumed with another number of rounds can be that longer run."""
    from fedssl.runs import checkpoint

    rounds, done, key = settings.rounds, checkpoint.read_round(out), "rounds"
    if rounds < done:
        fix = f"Use at least {done}, or start a new run in another folder."
        raise UserError(f"{out} has {done} rounds already", key=key, value=rounds, fix=fix)
    if rounds != before.rounds and settings.schedule != "constant":
        problem = (
            f"with schedule={settings.schedule} the learning rate of each round depends on the "
            f"number of rounds, which was {before.rounds}"
        )
        fix = f"Start a new run from its encoder: encoder.init={out}, with --out NEW."
        raise UserError(problem, key=key, value=rounds, fix=fix)


def _check_settings(settings: Config, out: Path, is_final: bool) -> None:
    """Check that a run keeps every key that changes its result."""
    free = config.keys_affecting(settings, "speed", "nothing") | {"rounds", "privacy.budget"}
    if not is_final:
        read_keys(out / RUN, is_resumed=True)
        free |= config.keys_affecting(settings, "evaluation", "monitoring")
    if settings.engine.sites is None:  # the content of images elsewhere is compared later
        free |= config.keys_affecting(settings, "location")
    settings = fix_threads(settings, out)
    before, now = (config.with_absolute_paths(x) for x in (RunReader(out).settings, settings))
    if not is_final:
        _check_copy(before, out, free)
    _check_rounds(now, before, out)
    for key, (old, new) in find_changes(before, now, free).items():
        fix = "Leave it as it was, or start a new run in another folder."
        raise UserError(f"was {old} in {out}", key=key, value=new, fix=fix)


def _check_copy(settings: Config, out: Path, free: Set[str]) -> None:
    """Check that ``config.yaml`` is of the run that the checkpoint is of."""
    from fedssl.runs import checkpoint

    if text := checkpoint.read_config(out):
        kept = config.build(yaml.safe_load(text))
        for key, (old, new) in find_changes(kept, settings, free).items():
            # A deployment's folder may have been moved, and plug-ins with it.
            if plugins.short_name(str(old)) != plugins.short_name(str(new)):
                problem = f"{out / RUN} has {key}={new}, and the checkpoint was made with {old}"
                raise UserError(problem, fix="Delete that file: the checkpoint has a copy.")


def find_changes(before: Config, after: Config, free: Set[str]) -> dict[str, tuple[Any, Any]]:
    """Return the values of the keys in which two configurations differ, except ``free`` ones."""
    old, new = (config.flatten(config.to_tree(each)) for each in (before, after))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key) and key not in free]
    return {key: (old.get(key), new.get(key)) for key in keys}
