"""Execute what the documentation shows: every command and Python block of every page, in order.

A page's blocks run in a folder of their own, where ``docs`` and ``examples`` are the repository's.
Shown output must be printed, line by line; there may be more in between. A comment before a block
says how it runs here:

    <!-- test: rounds=2 -->           with these words more; numbers in the output may differ
    <!-- test: vary -->               numbers may differ
    <!-- test: exit 2 -->             with this exit code
    <!-- test: after start.md -->     at a page's beginning: in the folder that this page leaves
    <!-- test: skip REASON -->        not at all; the reason names the file that executes it
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import http.server
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import load, quick

from fedssl import cli
from fedssl.cli import completion
from fedssl.config import recipe_files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md"))
BLOCK = re.compile(
    r"(?:^<!-- test: (?P<how>[^>]*?) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
AFTER = re.compile(r"^<!-- test: after (\S+) -->$", re.MULTILINE)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?: (?:[kMGT]?B)\b)?")
# Files of a run, and attributes of objects, which are called like a section.
NOT_KEYS = re.compile(r"encoder\.(safetensors|json|preprocess)$|(client|cohort|server)\.\w+$")
SLOW_PAGES = {
    "privacy.md",
    "reproduce.md",
    "algorithms.md",
    "encoder.md",
    "coming-from.md",
    "evaluate.md",
}
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block, and how a test is to run it."""

    kind: str
    text: str
    how: str

    @property
    def code(self) -> int:
        return int(self.how.removeprefix("exit ")) if self.how.startswith("exit ") else 0

    @property
    def words(self) -> list[str]:
        return shlex.split(self.how) if "=" in self.how else []

    @property
    def varies(self) -> bool:
        return bool(self.words) or self.how == "vary"

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """Each command with the lines that are shown below it."""
        text = self.text.replace("\\\n", " ")
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, *shown = part.rstrip("\n").split("\n")
            yield command, [line for line in shown if line.strip()]


def written(page: str) -> str:
    """A page without its generated parts, which have tests of their own."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.sub(r"<!-- generated: .*?<!-- /generated -->", "", text, flags=re.DOTALL)


def blocks(page: str) -> list[Block]:
    return [Block(m["kind"], m["text"], m["how"] or "") for m in BLOCK.finditer(written(page))]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """The folder that a page's blocks leave, made when it is asked for."""
    done: dict[str, Path] = {}
    root = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSSL_CACHE", str(root / "cache"))
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        yield functools.partial(_folder, done, root)


def _folder(done: dict[str, Path], root: Path, page: str) -> Path:
    if page in done:
        return done[page]
    folder = root / page.removesuffix(".md").replace("/", "-")
    before = AFTER.search((DOCS / page).read_text(encoding="utf-8"))
    if before:
        shutil.copytree(_folder(done, root, before[1]), folder, symlinks=True)
    else:
        folder.mkdir()
        for name in ("docs", "examples"):
            (folder / name).symlink_to(ROOT / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe_files, "DEFAULT", "default")  # a user's recipe, not that of tests
        # One thread, whatever engine.threads says: several, on busy cores, wait for each other.
        patch.setattr(torch, "set_num_threads", lambda count: None)
        _execute(page, folder)
    done[page] = folder
    return folder


def _execute(page: str, folder: Path) -> None:
    names: dict[str, object] = {}
    for block in blocks(page):
        if block.how.startswith("skip "):
            continue
        if block.kind == "python":
            with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block.text, page, "exec"), names)
        if block.kind == "console":
            for command, shown in block.commands():
                code, printed = _run(command, block.words, folder)
                assert code == block.code, f"{page}: $ {command}\nexit code {code}\n{printed}"
                missing = not_printed(shown, printed, block.varies)
                assert missing is None, f"{page}: $ {command}\nnot printed: {missing}\n{printed}"


def _run(command: str, words: list[str], folder: Path) -> tuple[int, str]:
    """Exit code and output; our own commands in this process, which has imported torch already."""
    if not command.startswith("fedssl ") or set("|><") & set(command):
        result = subprocess.run(
            ["bash", "-c", command], cwd=folder, text=True, capture_output=True, timeout=300
        )
        return result.returncode, result.stdout + result.stderr
    arguments = shlex.split(command)[1:] + words
    printed = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        try:
            code = cli.main(arguments)
        except SystemExit as exit:
            code = int(exit.code or 0)
    return code, printed.getvalue()


def not_printed(shown: list[str], printed: str, varies: bool) -> str | None:
    """The first shown line that was not printed, after those before it."""
    lines = iter([_plain(line, varies) for line in printed.splitlines()])
    for line in shown:
        if _plain(line, varies) not in lines:
            return line
    return None


def _plain(line: str, varies: bool) -> str:
    if not varies:
        return line.rstrip()
    line = NUMBER.sub("#", line).replace("# rounds", "# round")  # the tests run one
    return re.sub(r"[ \t]+", " ", line).strip()


SHOWN = [page for page in PAGES if any(block.kind for block in blocks(page))]


@pytest.mark.parametrize("page", quick(SHOWN, *(set(SHOWN) - SLOW_PAGES)))
def test_what_a_page_shows_runs(page: str, folders: Callable[[str], Path]) -> None:
    folders(page)


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return load("docs/generate.py")


@pytest.mark.parametrize("page", PAGES)
def test_generated_parts_are_not_stale(page: str, generate: ModuleType) -> None:
    if page == "reference/commands.md" and sys.version_info >= (3, 13):
        pytest.skip("argparse words its help otherwise since Python 3.13")
    text = (DOCS / page).read_text(encoding="utf-8")
    assert text.count("<!-- generated: ") == text.count("<!-- /generated -->")
    assert generate.filled(DOCS / page) == text, "run: python docs/generate.py"


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.name)
def test_pages_at_the_top_level_link_to_files_and_headings(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text())
    for path, anchor in links:
        target = ROOT / path if path else page
        assert target.exists(), path
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
        slugs = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
        assert not anchor or anchor in slugs, f"{path}#{anchor}"


def test_the_readme_is_short_and_names_the_command_of_ci() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert "make test" in text and "make test" in (ROOT / ".ci" / "run").read_text()


def test_our_numbers_stand_beside_the_papers_with_their_images_and_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generate: ModuleType
) -> None:
    name = "fedema/table3/fedu/cifar10-noniid"
    monkeypatch.setattr(generate.results_page, "ROWS", tmp_path / "rows.jsonl")
    more = "1 more numbers of the paper are not measured yet"
    assert generate.compared(name).startswith(more)
    run = {"recipe": name, "data": "Mine: drawn", "ours": {"linear_top1": 12.26}, "heldout": None}
    run |= {"seed": 0, "rounds": 50, "paper_rounds": 100, "changed": {}}
    other = {"data": "Yours", "rounds": 100, "ours": {"knn_top1": 5.0, "linear_top1": 7.0}}
    lines = [run, run | {"seed": 1, "ours": {"linear_top1": 13.0}}, run | {"rounds": 9}]
    lines += [run | other, run | {"data": "Hers", "ours": {"knn_top1": 5.0}}]
    lines += [
        run | {"recipe": "fedema/table3/fedbyol/cifar10-noniid", "ours": {"linear_top1": 99.0}}
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ours = "12.3, 13.0 (Mine, 50 of 100 rounds); 7.0 (Yours, 100 of 100 rounds)"
    assert generate.compared(name).endswith(f"| `{name}` | linear | 80.52 | {ours} |")


def test_what_was_measured_stands_on_its_papers_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generate: ModuleType
) -> None:
    made = {"hardware": "h", "commit": "c", "date": "d"}
    command = "fedssl run fedema/table3/fedu/cifar10-noniid data.root=DIR"
    line = {"what": "x", "numbers": {"linear_top1": 12.25}, "command": command, **made}
    (tmp_path / "measured.jsonl").write_text(json.dumps(line) + "\n")
    monkeypatch.setattr(generate, "MEASURED", tmp_path / "measured.jsonl")
    assert "12.25" in generate.measured("fedema")
    assert generate.measured("ccl") == "Not measured yet."


@pytest.mark.parametrize("page", PAGES)
def test_commands_stand_where_they_are_executed(page: str) -> None:
    text = written(page)
    assert {b.kind for b in blocks(page)} <= {"console", "python", "toml", "yaml", "text"}
    assert not re.search(r"^ {4}\$? ?(fedssl|flwr|pip|python) ", text, re.MULTILINE)
    assert text.count("<!-- test:") == sum(bool(b.how) for b in blocks(page)) + len(
        AFTER.findall(text)
    )
    for block in blocks(page):
        if block.kind == "console":
            assert block.text.startswith("$ "), block.text
        if block.how.startswith("skip "):
            files = re.findall(r"[\w./-]+\.(?:py|sh)|Makefile", block.how)
            assert files, f"says not which test or script executes it: {block.how}"
            assert all((ROOT / file).is_file() for file in files), block.how


@functools.cache
def keys() -> set[str]:
    """All configuration keys, those of every objective, algorithm and partition among them."""
    return {word.removesuffix("=") for word in completion.keys("") if "." in word}


@pytest.mark.parametrize("page", PAGES)
def test_keys_and_commands_in_the_text_exist(page: str) -> None:
    text = written(page)
    sections = "|".join({key.partition(".")[0] for key in keys()})
    for span in SPAN.findall(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        words = span.split()
        for word in words:
            if found := re.match(rf"'?((?:{sections})\.[a-z_]+)(?:=|$)", word):
                assert found[1] in keys() or NOT_KEYS.match(word), f"{span}: no such key"
        if words[0] == "fedssl" and len(words) > 1 and "…" not in span:
            with contextlib.redirect_stderr(io.StringIO()) as said:
                try:
                    cli.parse(shlex.split(span)[1:])
                except SystemExit:
                    # A name of a command alone is fine; an unknown one or an unknown option is not.
                    assert "required" in said.getvalue(), f"{span}: {said.getvalue()}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("docs") / "site"
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT, text=True, capture_output=True, timeout=120,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return site


@pytest.mark.slow
def test_the_site_builds_and_names_nobody_else(site: Path) -> None:
    names = {p.relative_to(site).as_posix() for p in site.rglob("*.html")}
    assert {page.replace(".md", ".html") for page in PAGES} <= names
    assert not list(site.rglob("*.py"))
    for page in site.rglob("*.html"):
        _check_page(page)
    text = (site / "reference" / "configuration.html").read_text(encoding="utf-8")
    assert not [key for key in sorted(keys()) if f"<code>{key}</code>" not in text]
    commands = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    assert all(f"usage: fedssl {name}" in commands for name in ("run", "report", "deploy init"))


def _check_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    loads = re.findall(r"<(?:script|img|iframe|source)[^>]*\ssrc=\"?([^\"\s>]+)", text)
    loads += re.findall(r"<link[^>]*\shref=\"?([^\"\s>]+)", text)
    outside = [place for place in loads if re.match(r"(?:https?:)?//", place)]
    assert not outside, f"{page}: loads {outside}"
    assert "<!-- generated:" not in text and "<!-- test:" not in text, page
    assert not re.search(r":(?:class|meth|func):", text), page


@pytest.mark.slow
def test_pages_in_a_browser_ask_nobody_else(site: Path, browser: Any) -> None:
    handler = functools.partial(_Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here, asked, said = f"http://127.0.0.1:{server.server_port}/", [], []
    try:
        page = browser.new_page(viewport={"width": 390, "height": 800})
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        for name in ("index", "images", "reference/configuration", "papers/dcco"):
            page.goto(f"{here}{name}.html", wait_until="networkidle")
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= 390, f"{name}: {wide} pixels wide on a phone"
        page.close()
    finally:
        server.shutdown()
    assert not [url for url in asked if not url.startswith((here, "data:", "blob:"))]
    assert not said


@pytest.mark.slow
def test_the_search_works_in_a_folder(site: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 800})
    page.goto((site / "papers" / "dcco.html").as_uri())
    page.locator("input.md-search__input").press_sequentially("stop_gradient")
    found = page.locator(".md-search-result__item h1")
    found.first.wait_for(timeout=20_000)
    assert "Configuration keys" in found.all_inner_texts()
    page.close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass
