"""Build the package, install the wheel into an environment of its own, and run it there."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
DATA = ("config/recipes/**/*.yaml", "*/templates/*", "py.typed")  # that are not Python files


def run(*command: str | Path, folder: Path) -> str:
    """Run a command outside of the repository; return what it printed."""
    done = subprocess.run(
        list(map(str, command)), cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the source distribution, and the wheel that is built from it."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("package")
    files = run("git", "ls-files", folder=ROOT).split("\n")
    for name in filter(None, files):  # a copy, because the build writes into its sources
        copy = folder / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    # Without isolation nothing is downloaded; setuptools is what pyproject.toml asks for.
    options = ("--no-isolation", "--outdir", "dist")
    run(sys.executable, "-m", "build", *options, "source", folder=folder)
    return folder / "dist"


@pytest.mark.slow
def test_pypi_takes_the_files(built: Path) -> None:
    pytest.importorskip("twine")
    files = sorted(built.iterdir())
    assert [file.suffix for file in files] == [".whl", ".gz"]
    printed = run(sys.executable, "-m", "twine", "check", "--strict", *files, folder=built)
    assert printed.count("PASSED") == 2


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_no_other(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src" / "fedssl"
    patterns = ("**/*.py", *DATA)
    expected = {
        f"fedssl/{path.relative_to(source).as_posix()}"
        for pattern in patterns
        for path in source.glob(pattern)
        if path.is_file()
    }
    assert {name for name in names if not name.partition("/")[0].endswith(".dist-info")} == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        inside = {name.partition("/")[2] for name in file.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= inside


def link_requirements(wheel: Path, site: Path) -> None:
    """Link what a wheel requires, and what that requires, from this environment: no download."""
    archive = zipfile.ZipFile(wheel)
    (text,) = (archive.read(n) for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    waiting = [(each, "") for each in message_from_bytes(text).get_all("Requires-Dist", [])]
    done: set[str] = set()
    while waiting:
        line, extra = waiting.pop()
        required = Requirement(line)
        is_needed = required.marker is None or required.marker.evaluate({"extra": extra})
        if line in done or not is_needed:
            continue
        done.add(line)
        distribution = metadata.distribution(required.name)
        extras = ("", *required.extras)
        waiting += [(each, name) for each in distribution.requires or () for name in extras]
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(str(distribution.locate_file(name)))


@pytest.mark.slow
def test_the_installed_wheel_runs(built: Path, tmp_path: Path) -> None:
    """In an empty environment that has what the wheel says it requires, and nothing else."""
    (wheel,) = built.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", "empty", folder=tmp_path)
    python = tmp_path / "empty" / "bin" / "python"
    (site,) = (tmp_path / "empty").glob("lib/python*/site-packages")
    link_requirements(wheel, site)
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--no-index", wheel, folder=tmp_path)
    code = "import fedssl; print(fedssl.__file__)"
    assert str(site) in run(python, "-I", "-c", code, folder=tmp_path)
    fedssl = tmp_path / "empty" / "bin" / "fedssl"
    isolated = ("env", "-u", "PYTHONPATH")  # the tests' own may have the source
    printed = run(*isolated, fedssl, "run", "rounds=2", "--out", "run", folder=tmp_path)
    assert "untrained" in printed and (tmp_path / "run" / "report.html").is_file()
    version = run(*isolated, fedssl, "--version", folder=tmp_path).split()[-1]
    assert version == metadata.version("fedssl")
    listed = run(*isolated, fedssl, "recipes", folder=tmp_path)
    assert listed == run(sys.executable, "-m", "fedssl", "recipes", folder=tmp_path)
