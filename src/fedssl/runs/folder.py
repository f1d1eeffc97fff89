"""A run's folder: create it, lock it, and check that a resumed run is the same run."""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedssl import config
from fedssl.config import Config, Recipe
from fedssl.runs.reader import LOCK, RunReader
from fedssl.util.errors import UserError, format_resume
from fedssl.util.files import explain_write_errors, write_text

if TYPE_CHECKING:
    from fedssl.data.dataset import Dataset

SWEEP = "sweep.yaml"
TRACES = ("metrics.jsonl", SWEEP)  # of a run and of a sweep; others have a config.yaml too
# A deployed run: its app's package, its list of sites, the server's name in Flower's config.toml.
PACKAGE, SITES, CONNECTION = "fedssl_app", "sites.json", "fedssl"

_UNUSED: set[Path] = set()  # folders that were made for runs that have not started


def read_recipe(name: str | None, resumed: Path | None = None) -> tuple[str, Recipe]:
    """Return a recipe's name and keys; without a name, those of the run that is resumed."""
    if name is None and resumed is not None and (resumed / "config.yaml").exists():
        return "run", config.read_yaml(resumed / "config.yaml")
    return name or "default", config.read_recipe(name)


# Create ------------------------------------------------------------------------------------------


def make_folder(name: str) -> Path:
    """Make a new folder in ``runs/``, named after a recipe and the time."""
    # Only the file's name of a path; a shipped recipe and a table's cell have their whole name.
    path, yaml, cell = name.partition(".yaml")
    label = (Path(path).name + cell if yaml else path).replace("/", "-")
    stem = Path("runs") / f"{label}-{time.strftime('%Y%m%d-%H%M%S')}"
    out, number = stem, 2
    while not _make(out):  # another may start in the same second
        out, number = stem.with_name(f"{stem.name}-{number}"), number + 1
    _UNUSED.add(out.absolute())
    atexit.register(remove_unused, out.absolute())
    return out


def _make(folder: Path) -> bool:
    """Make a folder; return false if it exists."""
    try:
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir()
    except FileExistsError:
        if folder.parent.is_dir():
            return False
        raise UserError(f"{folder.parent} is not a folder", fix="Give --out DIR.") from None
    except OSError as error:
        problem = f"{folder} cannot be written ({error.strerror})"
        raise UserError(problem, fix="Give another folder with --out DIR.") from None
    return True


def remove_unused(folder: Path) -> None:
    """Remove a folder that ``make_folder`` made if it is empty, and ``runs/`` if that is empty."""
    if folder.absolute() in _UNUSED:
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()
            folder.parent.rmdir()


@contextlib.contextmanager
def lock(
    folder: Path,
    key: str = "--out",
    kind: str = "run",
    fix: str = "Wait for its end, or end it.",
) -> Iterator[None]:
    """Hold a folder for this process alone, however the process before ended.

    ``key`` is the option that named the folder, ``kind`` what works in it.
    """
    import fcntl

    with explain_write_errors(key, folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+", encoding="utf-8")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            number = file.read().strip() or "unknown"
            raise UserError(
                f"a {kind} is at work there (process {number})",
                key=key,
                value=folder,
                fix=fix,
            ) from None
        except OSError:
            pass  # some network disks have no locks
        file.truncate(0)
        with contextlib.suppress(OSError):  # a full disk; the number is only for the error above
            os.write(file.fileno(), f"{os.getpid()}\n".encode())
        yield


def claim(out: Path, settings: Config) -> None:
    """Write the configuration, unless another run has come first since the folder was checked."""
    path = out / "config.yaml"
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError:
        raise _taken(out) from None
    try:
        with file:
            file.write(config.dump(config.with_absolute_paths(settings)))
    except OSError:
        path.unlink()  # half of it would look like a run
        raise


def update_config(settings: Config, out: Path) -> None:
    """Write the configuration that a run continues with, if it differs."""
    before, now = (config.with_absolute_paths(each) for each in (RunReader(out).settings, settings))
    if now != before:
        write_text(out / "config.yaml", config.dump(now))


def update_places(settings: Config, out: Path) -> None:
    """Write where the images and their cache are now, and nothing else, for a run that may be
    finished.
    """
    before, given = RunReader(out).settings, settings.data
    data = replace(before.data, root=given.root, cache=given.cache)
    update_config(replace(before, data=data), out)


def format_deploy_command(out: Path, key: str) -> str:
    """Format the command that starts the app whose run is in ``out``, with a ``--run-config``."""
    app = out.resolve().parent
    named = shlex.quote(str(app)) if (app / PACKAGE).is_dir() else "APP"
    return f"flwr run {named} {CONNECTION} --stream --run-config {shlex.quote(key)}"


# Check -------------------------------------------------------------------------------------------


def has_file(out: Path, file: str) -> bool:
    """Return whether a folder has this file; refuse a folder that cannot be read."""
    try:
        return (out / file).exists()
    except OSError as error:  # somebody else's folder, or a name that is too long
        raise UserError(
            f"cannot be read ({error.strerror})",
            key="--out",
            value=out,
            fix="Choose another folder.",
        ) from None


def is_started(out: Path) -> bool:
    """Return whether a folder holds a run."""
    return has_file(out, "config.yaml")


def check_folder(settings: Config, out: Path, resume: bool) -> None:
    """Check that a folder is free, or holds the same run if it is resumed."""
    _check_name(out)
    _check_place(settings.data, out)
    if is_started(out):
        if not resume:
            raise _taken(out)
        check_settings(settings, RunReader(out).settings, out)
    elif has_file(out, SWEEP):
        raise UserError(
            "holds a sweep",
            key="--out",
            value=out,
            fix=f"Choose another folder, or continue the sweep: {format_resume(out)}",
        )
    elif resume:
        raise UserError(f"{out} holds no run", key="--resume", fix="Start it without --resume.")


def check_alone(out: Path) -> None:
    """Check that a folder holds no other runs: a reader would mix them."""
    for file in sorted(file for name in TRACES for file in out.glob(f"*/{name}")):
        raise UserError(
            f"holds other runs ({file.parent.name})",
            key="--out",
            value=out,
            fix=f"Use a folder of its own, such as --out {out / 'NAME'}.",
        )


def _check_place(data: config.Data, out: Path) -> None:
    """Check that the folder is not among the images: it would be taken for a client."""
    if data.name not in ("folder", "paired") or data.root is None:
        return
    place, root = out.absolute().resolve(), Path(data.root).expanduser().resolve()
    if root in (place, *place.parents):
        raise UserError(
            f"lies in data.root={data.root}, among the images",
            key="--out",
            value=out,
            fix="Choose a folder elsewhere.",
        )


def _check_name(out: Path) -> None:
    try:
        str(out).encode()
    except UnicodeEncodeError:  # it stands in files and on the screen, which are UTF-8
        shown = os.fsencode(out).decode(errors="backslashreplace")
        fix = "Choose another folder."
        raise UserError("the name is not UTF-8", key="--out", value=shown, fix=fix) from None


def _taken(out: Path) -> UserError:
    fix = "Choose another folder, or continue the run with --resume."
    return UserError("holds another run", key="--out", value=out, fix=fix)


def check_settings(new: Config, old: Config, out: Path) -> None:
    """Check that a resumed run keeps every key that changes its result.

    Where the images of a simulation are may change; ``check_images`` compares their content.
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


def _changed(key: str, before: object, after: object, out: Path) -> UserError:
    return UserError(
        f"was {before} in {out}",
        key=key,
        value=after,
        fix="Leave it as it was, or start a new run in another folder.",
    )


def find_move(settings: Config, out: Path) -> tuple[str | None, str | None] | None:
    """Return where the run had its images and where they are now; ``None`` if it is one place."""
    before, now = (
        config.with_absolute_paths(each).data.root for each in (RunReader(out).settings, settings)
    )
    return None if before == now else (before, now)


def check_moved(settings: Config, out: Path, dataset: Dataset) -> None:
    """Check images in another place: the checkpoint knows the run's files.

    A run without a checkpoint has not been trained on any.
    """
    from fedssl.runs import checkpoint

    places, is_trained = find_move(settings, out), (out / checkpoint.FILE).exists()
    if places is not None and is_trained and not checkpoint.has_same_images(out, dataset):
        raise _changed("data.root", *places, out)


def check_images(out: Path, dataset: Dataset, where: tuple[str, object], fix: str) -> None:
    """Check that the training images are those of the run. ``where`` is a key and its value."""
    from fedssl.runs import checkpoint

    if checkpoint.has_other_images(out, dataset):
        raise UserError(
            f"the training images are not those of {out}: some were added, removed, renamed or "
            "replaced",
            key=where[0],
            value=where[1],
            fix=fix,
        )


def check_clients(
    out: Path,
    clients: list[dict[str, Any]],
    dataset: Dataset,
    where: tuple[str, object],
    otherwise: str,
) -> None:
    """Check that a run has the clients and the images that it had.

    Clients' states are stored by number, and the order of images says which are held out.
    """
    fix = f"Put the images back as they were, or {otherwise}."
    before, after = (_count_samples(rows) for rows in (RunReader(out).clients, clients))
    # Clients that came or went are named first: the held-out images of others change with them.
    names = sorted({**before, **after}, key=lambda name: name in before and name in after)
    for name in names if before else ():  # a run that was killed at once has none
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        had = f"had {old} images in {out}" if name in before else f"was not in {out}"
        has = f"has {new}" if name in after else "is not there"
        client = f"client {name}" if name.isdecimal() else name
        raise UserError(f"{client} {had} and {has} now", key=where[0], value=where[1], fix=fix)
    check_images(out, dataset, where, fix)


def _count_samples(rows: list[dict[str, Any]]) -> Mapping[str, int]:
    return {row["name"]: row["samples"] for row in rows}
