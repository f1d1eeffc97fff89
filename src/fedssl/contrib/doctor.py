"""``fedssl doctor``: list what is installed, what is missing, and how to get it."""

from __future__ import annotations

import platform
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

from fedssl import __version__
from fedssl.util.text import format_bytes
from fedssl.util.tuning import count_cores, count_threads

# Extra and purpose of each optional package.
EXTRAS = {
    "tensorboard": ("tensorboard", "curves during training"),
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
    "pydicom": ("dicom", "DICOM images"),
    "tifffile": ("tiff", "TIFF images of other than 1 or 3 channels"),
    "umap-learn": ("umap", "local-features.png of evaluate.drift"),
    "wandb": ("wandb", "log=wandb"),
    "mlflow": ("mlflow", "log=mlflow"),
    "argcomplete": ("completion", 'then eval "$(register-python-argcomplete fedssl)"'),
}
ENOUGH_DISK = 5e9  # bytes: tiny-imagenet with its prepared images
Line = tuple[str, str, str]  # name, state and remark


def report() -> str:
    """Return the whole report."""
    torch = _import_torch()
    parts = {
        "versions": _list_versions(torch),
        "devices": _list_devices(torch),
        "optional packages": _list_packages(),
    }
    if torch is not None:
        parts |= {"data sets": _list_data(), "disk": _list_disk(), "plug-ins": _list_plugins()}
    table = {title: lines for title, part in parts.items() if (lines := list(part))}
    names, states, _ = zip(*(line for lines in table.values() for line in lines), strict=True)
    first, second = max(map(len, names)), max(map(len, states))
    blocks = []
    for title, lines in table.items():
        rows = [f"  {a:<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in lines]
        blocks.append("\n".join([title, *rows]))
    missing = [name for name, state in zip(names, states, strict=True) if state == "missing"]
    lacks = f"missing: {', '.join(missing)} (see the lines above)"
    return "\n\n".join([*blocks, lacks if missing else "nothing is missing"])


def _import_torch() -> ModuleType | None:
    try:
        import torch
    except (ImportError, OSError):  # not installed, or broken
        return None
    return torch


def _list_versions(torch: ModuleType | None) -> Iterator[Line]:
    yield "fedssl", __version__, str(Path(__file__).parents[1])
    yield "python", platform.python_version(), sys.executable
    if torch is None:
        yield "torch", "missing", "pip install torch; nothing trains without it"
    else:
        yield "torch", torch.__version__, ""
    for name in ("torchvision", "scikit-learn", "numpy"):
        version = _find_version(name)
        yield name, version or "missing", "" if version else "pip install fedssl"
    if torch is not None:
        yield "CUDA", torch.version.cuda or "none", "torch was built with it"
    driver = Path("/proc/driver/nvidia/version")
    if driver.is_file():
        match = re.search(r"\s(\d+\.\d+[\d.]*)\s", driver.read_text(encoding="utf-8"))
        yield "NVIDIA driver", match[1] if match else "unknown", ""


def _find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _list_devices(torch: ModuleType | None) -> Iterator[Line]:
    threads = f"a run uses {count_threads('auto')} threads, unless engine.threads says otherwise"
    yield "cpu", f"{count_cores()} cores", threads
    if torch is None:
        return
    if not torch.cuda.is_available():
        yield "gpu", "none", "device=auto uses the CPU"
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        yield f"cuda:{number}", format_bytes(gpu.total_memory), gpu.name


def _list_packages() -> Iterator[Line]:
    for package, (extra, purpose) in EXTRAS.items():
        version = _find_version(package)
        fix = "" if version else f"; pip install 'fedssl[{extra}]'"
        yield package, version or "missing", f"{purpose}{fix}"


def _list_data() -> Iterator[Line]:
    """List the folder of each data set; nothing is opened or downloaded."""
    from fedssl import config
    from fedssl.data.places import list_folders
    from fedssl.data.standard import ARRAYS

    digits = "found" if _find_version("scikit-learn") else "missing"
    yield "digits", digits, "part of scikit-learn"
    for name in (*ARRAYS, "tiny-imagenet"):
        folders = list_folders(config.Data(), name)
        folder = next((folder for folder in folders if folder.is_dir()), folders[-1])
        if folder.is_dir():
            yield name, "found", str(folder)
        else:
            yield name, "not here", f"downloaded to {folder} at first use, or set data.root"


def _list_disk() -> Iterator[Line]:
    from fedssl import config
    from fedssl.data.places import cache_folder

    folders = {"this folder": Path.cwd(), "FEDSSL_CACHE": cache_folder(config.Data())}
    for name, folder in folders.items():
        existing = next(p for p in (folder, *folder.parents) if p.exists())
        free = shutil.disk_usage(existing).free
        remark = "" if free > ENOUGH_DISK else ", too little for large data sets"
        yield name, f"{format_bytes(free)} free", f"{folder}{remark}"


def _list_plugins() -> Iterator[Line]:
    """List the algorithms, objectives, partitions and protocols of installed packages."""
    from fedssl.config import VARIANTS, plugins
    from fedssl.evaluate.registry import NAMES

    for section in plugins.GROUPS:
        built_in = NAMES if section == "protocol" else tuple(VARIANTS[section])
        for name, points in plugins.list_entry_points(section).items():
            packages = " and ".join(sorted(p.dist.name if p.dist else p.value for p in points))
            state = f"offered by {packages}"
            if name in built_in:
                state += "; not used, because fedssl has this name itself"
            elif len(points) > 1:
                state += "; not used, because the name is ambiguous"
            yield name, section, state
