"""Places of images on this machine: the user's folder, the cache, installed data sets."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from fedssl import config
from fedssl.config import plugins
from fedssl.util.errors import UserError

DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")


def data_root(data: config.Data) -> Path:
    """Return the folder that ``data.root`` names."""
    return Path(data.root or "").expanduser()


def cache_folder(data: config.Data) -> Path:
    """Return the folder of decoded images, downloads and compiled code."""
    return Path(data.cache or os.environ.get("FEDSSL_CACHE") or "~/.cache/fedssl").expanduser()


def state_home() -> Path:
    """Return the folder of what must outlive runs: records of sites, and privacy that was spent."""
    return Path(os.environ.get("FEDSSL_STATE") or "~/.local/state/fedssl").expanduser()


def list_folders(data: config.Data, name: str) -> list[Path]:
    """Return folders that may hold a standard data set; it is downloaded to the last one."""
    debian = [DEBIAN_FASHION] if name == "fashion-mnist" else []
    return [*debian, cache_folder(data) / "downloads" / name]


def name_images(data: config.Data) -> tuple[str, str]:
    """Return the key that says which images are used, and its value, for errors about them."""
    return ("data.name", data.name) if data.root is None else ("data.root", data.root)


def use_local_copy(data: config.Data) -> config.Data:
    """Point ``data.root`` at the copy on this machine; never download."""
    is_here = data.name in ("digits", *config.OWN_DATA) or plugins.is_own(data.name)
    if data.root is not None or is_here:
        return data
    folders = list_folders(data, data.name)
    for folder in folders:
        if folder.is_dir():
            return dataclasses.replace(data, root=str(folder))
    problem = f"is not in {' or '.join(map(str, folders))}, and nothing is downloaded here"
    fix = "Set data.root to its folder."
    raise UserError(problem, key="data.name", value=data.name, fix=fix)


def check_root(data: config.Data) -> None:
    """Check that ``data.root`` is given where it is needed, and is a folder that can be read."""
    if data.root is None:
        if data.name in config.OWN_DATA:
            fix = "Set data.root to the folder with the images."
            raise UserError("data.root is not set", key="data.name", value=data.name, fix=fix)
        return
    if data.name == "digits":
        fix = "Leave it out, or set data.name=folder for your own images."
        raise root_error(data.root, "the digits come with scikit-learn, not from a folder", fix)
    root = data_root(data)
    if not root.exists():
        problem, fix = "no such folder", f"Correct the path; it means {root.absolute()}."
    elif not root.is_dir():
        problem, fix = "a file, not a folder", "Name the folder that holds the images."
    elif not os.access(root, os.R_OK | os.X_OK):
        problem, fix = "not readable", "Change the folder's permissions."
    else:
        return
    raise root_error(data.root, problem, fix, problem)


def root_error(
    root: Path | str | None, problem: str, fix: str, public: str | None = None
) -> UserError:
    """Return an error about ``data.root``; a site sends only ``public`` to its server."""
    return UserError(problem, public, key="data.root", value=root, fix=fix)
