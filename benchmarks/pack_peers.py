"""Pack what benchmarks/peers.py needs for a machine without network: packages.tar.xz, 40 MB.

    python benchmarks/pack_peers.py OUT.tar.xz [--python 3.12]

Flower, Ray, pfl-research and what they need, for Linux on x86-64, without Ray's Java and pages and
without packages that come with torch. There: ``mkdir packages && tar -xJf OUT.tar.xz -C packages``,
and ``PYTHONPATH=src:packages``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

WANTED = ["flwr[simulation]==1.41.0", "multiprocess<0.71", "dp-accounting<0.6", "prv-accountant"]
ALONE = ["pfl==0.6.0"]  # it asks for an older `wheel`, which nothing imports
PLATFORMS = ["manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"]
LEFT_OUT = ("numpy-", "scipy-", "uv-", "uvloop-", "watchfiles-", "typing_extensions-", "mpmath-")
RAY_LEFT_OUT = ("jars", "dashboard/client", "rllib", "serve", "cpp", "llm", "train", "tune")


def download(folder: Path, python: str) -> None:
    """Fetch the wheels."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:"]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    command += [f"--python-version={python}", "-d", str(folder)]
    subprocess.run([*command, *WANTED], check=True)
    subprocess.run([*command, "--no-deps", *ALONE], check=True)


def unpack(wheel: Path, out: Path) -> None:
    """Unpack what is needed of a wheel, with the modes of its files."""
    skipped = tuple(f"ray/{part}/" for part in RAY_LEFT_OUT)
    with zipfile.ZipFile(wheel) as archive:
        for item in archive.infolist():
            if item.is_dir() or item.filename.startswith(skipped) or ".data/" in item.filename:
                continue
            target = out / item.filename
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(item))
            target.chmod(item.external_attr >> 16 & 0o777 | 0o600)


def main() -> None:
    """Download, unpack and pack."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT.tar.xz")
    parser.add_argument("--python", default="3.12", help="version on that machine")
    o = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheels, packages = Path(folder) / "wheels", Path(folder) / "packages"
        download(wheels, o.python)
        for wheel in sorted(wheels.glob("*.whl")):
            if not wheel.name.startswith(LEFT_OUT):
                unpack(wheel, packages)
        with tarfile.open(o.out, "w:xz", preset=9) as archive:
            archive.add(packages, ".")


if __name__ == "__main__":
    main()
