"""``fedssl doctor``: what is installed and found here, what is missing, and how to get it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

from fedssl import __version__
from fedssl.config import plugins
from fedssl.util.text import format_bytes

# What an extra brings, with what it is for.
EXTRAS = {
    "tensorboard": ("tensorboard", "curves while it trains"),
    "flwr": ("flower", "engine.name=flower, deployment"),
    "cryptography": ("flower", "secure sums"),
    "pycryptodome": ("flower", "secure sums"),
    "dp-accounting": ("privacy", "privacy.noise"),
    "pycocotools": ("detection", "fedssl detect"),
    "onnx": ("export", "fedssl export --format onnx"),
    "onnxscript": ("export", "fedssl export --format onnx"),
    "onnxruntime": ("export", "fedssl export --format onnx"),
    "pandas": ("frames", "Run.metrics"),
    "pyarrow": ("frames", "fedssl embed --to FILE.parquet"),
    "matplotlib": ("frames", "plots of Run.metrics"),
    "timm": ("timm", "timm's backbones"),
    "wandb": ("wandb", "log=wandb"),
    "mlflow": ("mlflow", "log=mlflow"),
    "argcomplete": ("completion", 'then eval "$(register-python-argcomplete fedssl)"'),
}
LEAST_ROOM = 5e9  # bytes; tiny-imagenet and its prepared images take about this


def report() -> str:
    """The whole page."""
    parts = {
        "versions": list(_versions()),
        "devices": list(_devices()),
        "optional packages": list(_packages()),
    }
    if _torch() is not None:  # without it, nothing of fedssl runs that knows of these
        parts |= {
            "data sets": list(_data()),
            "disk": list(_disk()),
            "own algorithms, objectives, partitions, protocols": list(_plugins()),
        }
    widths = [max(len(line[i]) for lines in parts.values() for line in lines) for i in (0, 1)]
    shown = [_part(title, lines, widths) for title, lines in parts.items() if lines]
    missing = [line[0] for lines in parts.values() for line in lines if line[1] == "missing"]
    ending = f"missing: {', '.join(missing)} (how to get each stands above)"
    return "\n\n".join([*shown, ending if missing else "nothing is missing"])


def _part(title: str, lines: list[list[str]], widths: list[int]) -> str:
    first, second = widths
    body = [f"  {a:<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in lines]
    return "\n".join([title, *body])


def _torch() -> ModuleType | None:
    try:
        import torch
    except (ImportError, OSError):  # not there, or broken
        return None
    return torch


def _versions() -> Iterator[list[str]]:
    torch = _torch()
    yield ["fedssl", __version__, str(Path(__file__).parents[1])]
    yield ["python", platform.python_version(), sys.executable]
    if torch is None:
        yield ["torch", "missing", "pip install torch; nothing trains without it"]
    else:
        yield ["torch", torch.__version__, ""]
    for name in ("torchvision", "scikit-learn", "numpy"):
        yield [name, _version(name) or "missing", "" if _version(name) else "pip install fedssl"]
    if torch is not None:
        yield ["CUDA", torch.version.cuda or "none", "what torch was built with"]
    driver = Path("/proc/driver/nvidia/version")
    if driver.is_file():
        found = re.search(r"\s(\d+\.\d+[\d.]*)\s", driver.read_text(encoding="utf-8"))
        yield ["NVIDIA driver", found[1] if found else "unknown", ""]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> Iterator[list[str]]:
    torch = _torch()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield ["cpu", f"{usable} cores", "a run uses engine.threads=2 of them unless told otherwise"]
    if torch is None:
        return
    if not torch.cuda.is_available():
        yield ["gpu", "none", "device=auto takes the CPU"]
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        yield [f"cuda:{number}", format_bytes(gpu.total_memory), gpu.name]


def _packages() -> Iterator[list[str]]:
    for package, (extra, purpose) in EXTRAS.items():
        version = _version(package)
        how = "" if version else f"; pip install 'fedssl[{extra}]'"
        yield [package, version or "missing", f"{purpose}{how}"]


def _data() -> Iterator[list[str]]:
    """Where each data set is looked for; nothing is opened or fetched."""
    from fedssl import config
    from fedssl.data.places import list_folders
    from fedssl.data.standard import ARRAYS

    data = config.Data()
    yield ["digits", "found" if _version("scikit-learn") else "missing", "come with scikit-learn"]
    for name in (*ARRAYS, "tiny-imagenet"):
        folders = list_folders(data, name)
        place = next((folder for folder in folders if folder.is_dir()), folders[-1])
        # A download is there whole or not at all.
        if place.is_dir():
            yield [name, "found", str(place)]
        else:
            yield [name, "not here", f"fetched to {place} when first used, or set data.root"]


def _disk() -> Iterator[list[str]]:
    from fedssl import config
    from fedssl.data.places import cache_folder

    cache = cache_folder(config.Data())
    for what, path in (("this folder", Path.cwd()), ("FEDSSL_CACHE", cache)):
        there = next(p for p in (path, *path.parents) if p.exists())
        free = shutil.disk_usage(there).free
        note = "" if free > LEAST_ROOM else ", which is little for large data sets"
        yield [what, f"{format_bytes(free)} free", f"{path}{note}"]


def _plugins() -> Iterator[list[str]]:
    """What installed packages add; of a name that is ours, ours is taken."""
    from fedssl.config import VARIANTS
    from fedssl.evaluate import NAMES

    for section in plugins.GROUPS:
        ours = NAMES if section == "protocol" else tuple(VARIANTS[section])
        for name, points in plugins.list_entry_points(section).items():
            packages = " and ".join(sorted(p.dist.name if p.dist else p.value for p in points))
            state = f"offered by {packages}"
            if name in ours:
                state += "; not used, as fedssl has this name itself"
            elif len(points) > 1:
                state += "; neither is used, as the name is not clear"
            yield [name, section, state]
