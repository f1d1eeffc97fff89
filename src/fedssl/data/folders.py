"""The user's own folders of image files: their classes, clients, cases and pairs."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

import numpy as np
import torch

from fedssl import config
from fedssl.data.dataset import Dataset, Ints, Split
from fedssl.data.decode import Storage, decode_splits, list_failures
from fedssl.data.image_files import File, Row, digest_names, find_images, image_extensions
from fedssl.data.places import cache_folder, data_root, root_error
from fedssl.data.records import ENDINGS, Record, find_records, list_frames
from fedssl.data.stored import place_images
from fedssl.util.errors import UserError
from fedssl.util.text import printable, shorten_list

UNUSED = ("val", "valid", "validation")  # folders for neither training nor evaluation
MOST_EMPTIED = 20  # clients without a readable image that a warning names

Within = list[tuple[str, ...]]  # the folders that each sample lies in, from the top


@dataclass(frozen=True)
class SplitFiles:
    """One split: its samples, the folders that each lies in, and every folder with its path."""

    rows: list[Row]
    within: Within
    folders: dict[tuple[str, ...], str]
    labels: list[str | None] | None = None  # of images in archives and tables


def load_folder(data: config.Data) -> Dataset:
    """Load the images below ``data.root``, or below its ``train`` and ``test``."""
    root = data_root(data)
    below = _find_splits(root)
    if data.val:
        if "test" not in below or not (root / "val").is_dir():
            fix = "Add val/ beside train/ and test/, or set data.val=false."
            raise UserError("there are no validation images", key="data.val", value=True, fix=fix)
        below["val"] = "val"
    files = {split: find_split(root, folder) for split, folder in below.items()}
    if not any(part.rows for part in files.values()):
        files = find_record_splits(root, below)
    if data.frames == "all":
        files = {split: _list_frames(root, part) for split, part in files.items()}
    levels = _levels(data, files["train"], (root / "train").is_dir())
    if "class" not in levels:
        files, levels = _use_labels(files, levels)
    return load_files(data, files, levels)


def load_paired(data: config.Data) -> Dataset:
    """Load two folders, one for each modality, whose files correspond by their names."""
    root = data_root(data)
    names, layouts = _find_modalities(root)
    files, unpaired = {}, {}
    for split in layouts[0] | layouts[1]:
        sides = [
            find_split(root, layout[split]) if split in layout else SplitFiles([], [], {})
            for layout in layouts
        ]
        files[split], single = _pair_files(root, names, sides)
        unpaired.update(single)
    if unpaired and data.corrupt == "fail":
        raise UserError(
            f"{len(unpaired)} files below {root} have no partner: {list_failures(unpaired)}",
            key="data.corrupt",
            value="fail",
            fix="Add the partners, or leave such files out with data.corrupt=skip.",
        )
    has_train = any(layout["train"] != name for name, layout in zip(names, layouts, strict=True))
    return load_files(data, files, _levels(data, files["train"], has_train), unpaired)


def _find_splits(root: Path) -> dict[str, str]:
    """Map each split to its folder below ``root``; without train/ everything is training data."""
    if (root / "train").is_dir():
        return {split: split for split in ("train", "test") if (root / split).is_dir()}
    if (root / "test").is_dir():
        raise root_error(root, "there is test/ but no train/", "Add train/, or rename test/.")
    if root.name == "train" and (root.parent / "test").is_dir():
        fix = f"Use the folder above: data.root={root.parent}."
        raise root_error(root, "there is test/ beside it", fix)
    return {"train": ""}


def find_split(root: Path, below: str) -> SplitFiles:
    """Find the images in one folder below ``root``."""
    files, folders = find_images(root, below)
    depth = len(below.split("/")) if below else 0
    return SplitFiles(
        [(file,) for file in files],
        [tuple(file.path.split("/")[depth:-1]) for file in files],
        {tuple(folder.split("/")[depth:]): folder for folder in folders},
    )


def find_record_splits(root: Path, below: Mapping[str, str]) -> dict[str, SplitFiles]:
    """Find the images in archives and tables; each of these counts as a folder.

    Without train/, the name of a file may begin with its split, as in ``train-00000.parquet``.
    """
    found = {split: find_records(root, folder) for split, folder in below.items()}
    if list(below.values()) == [""]:
        named: dict[str, list[Record]] = {}
        for record in found["train"]:
            start = re.match("[a-z]+", PurePath(record.file.holder).name)
            named.setdefault(start[0] if start else "", []).append(record)
        if "train" in named and named.keys() <= {"train", "test", *UNUSED}:
            found = {split: named[split] for split in ("train", "test") if split in named}
    depths = {split: len(PurePath(folder).parts) for split, folder in below.items()}
    return {
        split: SplitFiles(
            [(record.file,) for record in records],
            [_list_parts(record.file.holder)[depths.get(split, 0) :] for record in records],
            {},
            [record.label for record in records],
        )
        for split, records in found.items()
    }


def _list_parts(holder: str) -> tuple[str, ...]:
    return PurePath(holder).with_suffix("").parts


def _list_frames(root: Path, part: SplitFiles) -> SplitFiles:
    """Return a row for each frame of files that have several."""
    pairs = [
        (frame, within)
        for (file,), within in zip(part.rows, part.within, strict=True)
        for frame in ([file] if file.holder else list_frames(root, file))
    ]
    rows: list[Row] = [(frame,) for frame, _ in pairs]
    return SplitFiles(rows, [within for _, within in pairs], part.folders, part.labels)


def _use_labels(
    files: dict[str, SplitFiles], levels: tuple[str, ...]
) -> tuple[dict[str, SplitFiles], tuple[str, ...]]:
    """Make labels of archives and tables the topmost level, if all images have one."""
    labels = [label for part in files.values() for label in part.labels or ()]
    if not any(label is not None for label in labels):
        return files, levels
    missing = labels.count(None)
    if missing:
        _warn_once(f"labels are not used: {missing} of {len(labels)} images have none")
        return files, levels
    for split, part in files.items():
        within = [(str(a), *b) for a, b in zip(part.labels or (), part.within, strict=True)]
        files[split] = replace(part, within=within)
    return files, ("class", *levels)


def _levels(data: config.Data, train: SplitFiles, has_train: bool) -> tuple[str, ...]:
    """Return what folders mean; by default those in train/ are classes if they hold all images."""
    if data.levels is not None or train.labels is not None:
        return data.levels or ()
    return ("class",) if has_train and all(train.within) else ()


# Images that would be left out -----------------------------------------------------------------


def check_all_used(data: config.Data) -> None:
    """Refuse a site's folder if images beside train/ would be left out; nobody there sees notes."""
    root = data_root(data)
    if not (root / "train").is_dir():
        return
    used = ("train", "test", *UNUSED)  # or known not to be used, as everywhere
    others = sorted(each.name for each in root.iterdir() if each.name not in used)
    lost = [path for name in others for path in _find_below(root, name)]
    if lost:
        problem = f"{len(lost)} images are not below train/, and only those in there would be used"
        public = f"{problem}; move them there, or rename train"
        problem = f"{problem} ({shorten_list(lost, 3)})"
        raise root_error(data.root, problem, "Move them there, or rename train.", public)


def _find_below(root: Path, name: str) -> list[str]:
    """Return the images in one place; none where this process may not look (lost+found)."""
    if name.startswith("."):
        return []
    if not (root / name).is_dir():
        return [name] if Path(name).suffix.lower() in image_extensions() else []
    try:
        return [file.path for file in find_images(root, name)[0]]
    except UserError:
        return []


def describe_unused(data: config.Data) -> Iterator[str]:
    """Yield a note for each folder beside train/ that is usually a split, and is not used."""
    root = data_root(data)
    has_test = (root / "test").is_dir()
    rest = "Evaluation uses test/." if has_test else "Rename it to test to evaluate with it."
    for name in UNUSED if (root / "train").is_dir() else ():
        if (root / name).is_dir() and not (data.val and name == "val"):
            yield f"data.root={root}: {name}/ is not used. {rest}"
    unread = _count_unread(root)
    if unread:
        counts = [f"{count} {ending or 'without an ending'}" for ending, count in unread]
        yield f"data.root={root}: these files are not read: {shorten_list(counts, 5)}."


def _count_unread(root: Path) -> list[tuple[str, int]]:
    """Count files that are not images, by ending; archives and tables if there are images."""
    endings = Counter[str]()
    for _, below, names in os.walk(root):
        below[:] = [name for name in below if not name.startswith(".")]
        endings.update(PurePath(name).suffix.lower() for name in names if name[0] != ".")
    is_image = image_extensions() & endings.keys()
    known = image_extensions() if is_image else ENDINGS
    return sorted((end, count) for end, count in endings.items() if end not in known)


# Pairs -----------------------------------------------------------------------------------------


def _find_modalities(root: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return two names and, for each, split → folder: train/NAME, NAME/train or NAME."""
    # A folder called train beside test/ may be trained on alone.
    above = _find_splits(root) if (root / "train").is_dir() else {"train": ""}
    names = _two_folders(root, above["train"])
    if not above["train"]:
        below = [_find_splits(root / name) for name in names]
        return names, [
            {split: f"{name}/{folder}".rstrip("/") for split, folder in layout.items()}
            for name, layout in zip(names, below, strict=True)
        ]
    for split in above:
        others = _two_folders(root, split)
        if others != names:
            called = f"{', '.join(names)} in train/ and {', '.join(others)} in {split}/"
            raise root_error(root, f"the modalities are called {called}", "Rename the folders.")
    return names, [{split: f"{split}/{name}" for split in above} for name in names]


def _two_folders(root: Path, below: str) -> list[str]:
    folders = (path for path in (root / below).iterdir() if path.is_dir())
    names = sorted(path.name for path in folders if not path.name.startswith("."))
    if len(names) == 2:
        return names
    place = f"{below}/" if below else "the folder"
    problem = f"{place} holds {len(names)} folders{': ' * bool(names)}{', '.join(names)}"
    raise root_error(root, problem, "Use exactly two folders, one for each modality.")


def _pair_files(
    root: Path, names: Sequence[str], sides: Sequence[SplitFiles]
) -> tuple[SplitFiles, dict[str, str]]:
    """Pair files by path without ending; return the pairs, and the files without a partner."""
    first, second = (_by_stem(root, side) for side in sides)
    both = [stem for stem in first if stem in second]
    unpaired = {
        file.path: f"no partner in {other}"
        for stems, others, other in ((first, second, names[1]), (second, first, names[0]))
        for stem, file in stems.items()
        if stem not in others
    }
    rows: list[Row] = [(first[stem], second[stem]) for stem in both]
    folders = sides[0].folders | sides[1].folders
    return SplitFiles(rows, [stem[:-1] for stem in both], folders), unpaired


def _by_stem(root: Path, side: SplitFiles) -> dict[tuple[str, ...], File]:
    stems: dict[tuple[str, ...], File] = {}
    for (file,), within in zip(side.rows, side.within, strict=True):
        stem = (*within, Path(file.path).stem)
        if stem in stems:
            alike = f"{stems[stem].path} and {file.path} differ only in their ending"
            raise root_error(root, f"{alike}, so their partner is not clear", "Rename one.")
        stems[stem] = file
    return stems


# From files to a data set ----------------------------------------------------------------------


def load_files(
    data: config.Data,
    files: Mapping[str, SplitFiles],
    levels: tuple[str, ...],
    unpaired: Mapping[str, str] | None = None,
) -> Dataset:
    """Decode files, and number their classes, clients and cases by their folders."""
    unpaired = unpaired or {}
    for split, part in files.items():
        _check_files(data, split, part, levels)
    classes = _folder_names("class", levels, [files["train"]])
    for split, part in files.items():
        unknown = set(_folder_names("class", levels, [part])) - set(classes)
        if unknown:
            problem = f"{split}/ has classes that train/ lacks: {', '.join(sorted(unknown))}"
            fix = f"Add them to train/, or remove them from {split}/."
            raise root_error(data.root, problem, fix)
    rows = {split: part.rows for split, part in files.items()}
    decoded = decode_splits(
        *(data_root(data), rows, Storage.from_config(data), cache_folder(data), data.name),
        unpaired,
    )
    if decoded.deep:
        _warn_once(
            f"{decoded.deep} images below {data_root(data).resolve()} have more than 8 bits, and "
            "are stored with 8. data.window=CENTER,WIDTH selects the values that are kept."
        )
    read = {split: _keep_readable(part, decoded.unreadable) for split, part in files.items()}
    _report_unreadable(data, files, read, {**unpaired, **decoded.unreadable})
    lost = set(classes) - set(_folder_names("class", levels, [read["train"]]))
    if lost:
        problem = f"no training image of the class {min(lost)} can be read"
        raise root_error(data.root, problem, "Replace one, or remove the class.")
    clients = _folder_names("client", levels, read.values())
    splits = {
        split: replace(
            _number_samples(part.within, levels, classes, clients),
            images=tuple(place_images(each, data.stream) for each in decoded.images[split]),
            sizes=tuple(torch.from_numpy(each.map()) for each in decoded.sizes.get(split, ()))
            or None,
        )
        for split, part in read.items()
    }
    digests = {split: digest_names(part.rows) for split, part in read.items()}
    train, test, val = splits["train"], splits.get("test"), splits.get("val")
    return Dataset(data.name, train, test, _to_text(classes), _to_text(clients), digests, val)


def _check_files(data: config.Data, split: str, part: SplitFiles, levels: tuple[str, ...]) -> None:
    """Check that there are images, that each lies below all levels, and no folder is empty."""
    if not part.rows:
        public = f"no {'pairs of images' if data.name == 'paired' else 'images'} for {split}"
        problem = f"{public}, in any format that Pillow reads, at any depth"
        raise root_error(data.root, problem, "Add images, or use another folder.", public)
    for row, within in zip(part.rows, part.within, strict=True):
        if len(within) < len(levels):
            level = levels[len(within)]
            raise UserError(
                f"{row[0].path} lies in no {level} folder",
                f"data.levels={','.join(levels)}: an image lies in no {level} folder",
                key="data.levels",
                value=levels,
                fix="Move it into one, or change data.levels.",
            )
    for depth, level in enumerate(levels, start=1):
        used = {within[:depth] for within in part.within}
        for folder, path in part.folders.items():
            if len(folder) == depth and folder not in used:
                problem = f"the {level} folder {path} holds no image"
                raise root_error(data.root, problem, "Remove it, or fill it.")


def _keep_readable(part: SplitFiles, unreadable: Mapping[str, str]) -> SplitFiles:
    """Return the samples that were decoded."""
    kept = [i for i, row in enumerate(part.rows) if all(f.path not in unreadable for f in row)]
    return SplitFiles([part.rows[i] for i in kept], [part.within[i] for i in kept], part.folders)


def _report_unreadable(
    data: config.Data,
    files: Mapping[str, SplitFiles],
    read: Mapping[str, SplitFiles],
    unreadable: Mapping[str, str],
) -> None:
    """Refuse files that cannot be read or, with ``data.corrupt=skip``, warn about them."""
    if not unreadable:
        return
    before, after = _list_paths(files), _list_paths(read)
    total = len(before | unreadable.keys())
    count, names = f"{len(unreadable)} of {total} images", list_failures(unreadable)
    if data.corrupt == "fail":
        raise UserError(
            f"{count} below {data.root} cannot be read: {names}",
            f"data.corrupt=fail: {count} cannot be read; data.corrupt=skip leaves such files out",
            key="data.corrupt",
            value="fail",
            fix="Replace them, or leave such files out with data.corrupt=skip.",
        )
    emptied = _list_parents(before) - _list_parents(after)
    topmost = sorted(printable(folder) for folder in emptied if folder.parent not in emptied)
    gone = f"; no image is left in {shorten_list(topmost, MOST_EMPTIED)}" if topmost else ""
    _warn_once(f"left out {count} below {data_root(data).resolve()}: {names}{gone}")


def _list_paths(files: Mapping[str, SplitFiles]) -> set[str]:
    return {file.path for part in files.values() for row in part.rows for file in row}


def _list_parents(paths: Iterable[str]) -> set[PurePath]:
    return {parent for path in paths for parent in PurePath(path).parents}


@functools.cache
def _warn_once(text: str) -> None:
    """Print a warning; a run loads its images again for its baselines and at other sizes."""
    print(f"warning: {text}", file=sys.stderr)


def _number_samples(
    within: Within,
    levels: tuple[str, ...],
    classes: Sequence[str],
    clients: Sequence[str],
) -> Split:
    """Give samples, without images, the numbers of their class, client and case folders."""

    def number(level: str, names: Sequence[str]) -> Ints | None:
        if level not in levels:
            return None
        numbers, column = {name: i for i, name in enumerate(names)}, levels.index(level)
        return np.array([numbers[folders[column]] for folders in within], np.int64)

    labels, cases = number("class", classes), None
    if "case" in levels:
        seen: dict[tuple[str, ...], int] = {}  # numbers in order of appearance
        places = (folders[: len(levels)] for folders in within)
        cases = np.array([seen.setdefault(place, len(seen)) for place in places], np.int64)
    return Split(
        (),
        None if labels is None else torch.from_numpy(labels),
        number("client", clients),
        cases,
    )


def _folder_names(
    level: str, levels: tuple[str, ...], parts: Iterable[SplitFiles]
) -> tuple[str, ...]:
    """Return the sorted names of the folders at one level."""
    if level not in levels:
        return ()
    column = levels.index(level)
    return tuple(sorted({folders[column] for part in parts for folders in part.within}))


def _to_text(names: Iterable[str]) -> tuple[str, ...]:
    """Return folder names that a UTF-8 file can hold."""
    return tuple(map(printable, names))
