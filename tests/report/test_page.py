"""The page in a real browser, and what it says in plain text."""

from __future__ import annotations

import html
import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from made_runs import NASTY, again, made, scored

import fedssl
from fedssl import config, report
from fedssl.cli import main
from fedssl.report import curves
from fedssl.runs.reader import RunReader
from fedssl.util.errors import UserError


def block(text: str) -> dict[str, list[Any]]:
    """The data of all figures, by kind."""
    figures: dict[str, list[Any]] = {}
    pattern = r'data-kind="(\w+)"><script type="application/json">(.*?)</script>'
    for kind, data in re.findall(pattern, text, re.S):
        figures.setdefault(kind, []).append(json.loads(data, parse_constant=pytest.fail))
    return figures


def plain(text: str) -> str:
    """Return the text that a reader without scripts sees."""
    text = re.sub(r"<(script|style).*?</\1>", " ", text, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


@pytest.fixture(scope="session")
def one(trained: Path) -> Path:
    return report.write_page([trained])


@pytest.fixture(scope="session")
def two(trained: Path, named: Path) -> Path:
    return report.write_page([named, trained], named / "two.html")


class Opened:
    """A page with all that it complained of and asked for."""

    def __init__(self, browser: Any, path: Path, width: int = 1400, **options: Any) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        started = time.monotonic()
        self.page.goto(path.as_uri())
        self.seconds = time.monotonic() - started
        self.path = path

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        asked = [url for url in self.requests if not url.startswith("data:")]
        assert self.complaints == []
        assert asked == [self.path.as_uri()]
        self.page.close()

    def width(self) -> int:
        return self.page.evaluate("document.documentElement.scrollWidth")


@pytest.fixture
def opened(browser: Any, one: Path) -> Iterator[Opened]:
    with Opened(browser, one) as found:
        yield found


def test_every_figure_has_marks(opened: Opened) -> None:
    figures = opened.page.locator(".plot")
    marks = figures.evaluate_all(
        "all => all.map(f => [f.dataset.kind, f.querySelectorAll("
        "'.curve, .point, .bar, circle').length])"
    )
    assert {kind for kind, _ in marks} == {"lines", "dots", "bars", "clients", "map"}
    assert all(count > 0 for _, count in marks), marks
    assert dict(marks)["map"] == 359  # one a test image of digits


def test_the_map_shows_the_image_under_the_pointer(opened: Opened, one: Path) -> None:
    look = block(one.read_text())["map"][0]
    svg = opened.page.locator("figure.map svg").first
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    side, at = box["width"], 5
    x, y = look["points"][at]
    opened.page.mouse.move(box["x"] + 14 + x * (side - 28), box["y"] + 14 + (1 - y) * (side - 28))
    tip = opened.page.locator("#tip")
    assert tip.is_visible()
    thumb = tip.locator(".thumb")
    style = thumb.evaluate(
        "t => [getComputedStyle(t).backgroundImage, t.getBoundingClientRect().width]"
    )
    assert style[0].startswith('url("data:image/png;base64,') and style[1] > 60
    assert thumb.evaluate("t => new Promise(done => { const i = new Image();"
        "i.onload = () => done(i.width); i.onerror = () => done(0);"
        "i.src = getComputedStyle(t).backgroundImage.slice(5, -2); })") >= 16 * 19  # fmt: skip
    assert tip.inner_text().strip() == look["classes"][look["labels"][at]]
    opened.page.mouse.move(5, 5)
    assert not tip.is_visible()
    svg.focus()
    opened.page.keyboard.press("ArrowRight")
    assert thumb.is_visible()
    opened.page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_a_curve_shows_the_value_under_the_pointer(opened: Opened, trained: Path) -> None:
    svg = opened.page.locator("figure.lines svg").first
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] - 14, box["y"] + 50)
    last = list(RunReader(trained).lines())[-1]
    text = opened.page.locator("#tip").inner_text()
    assert "round 3" in text and f"{last['loss']:.5g}" in text


@pytest.mark.parametrize(
    ("kind", "mark"), [("lines", ".curve"), ("map", ".point"), ("bars", ".bar")]
)
def test_the_legend_hides_and_shows_a_series(
    browser: Any, one: Path, two: Path, kind: str, mark: str
) -> None:
    with Opened(browser, two if kind == "lines" else one) as opened:  # curves are of several runs
        figure = opened.page.locator(f"figure.{kind}:has(.legend)").first
        before = figure.locator(mark).count()
        button = figure.locator(".legend button").first
        button.click()
        assert figure.locator(mark).count() < before
        assert button.get_attribute("aria-pressed") == "false"
        button.click()
        assert figure.locator(mark).count() == before


@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_overflow(browser: Any, two: Path, width: int, scheme: str) -> None:
    with Opened(browser, two, width, color_scheme=scheme) as found:
        assert found.width() == width
        # What is wider than the screen is so inside a box that scrolls.
        out = found.page.evaluate(
            "w => [...document.querySelectorAll('main *')].filter(n => !n.closest('.wide, pre, "
            ".legend, details') && n.getBoundingClientRect().right > w + 1).map(n => n.outerHTML)",
            width,
        )
        assert out == []
        ground, ink = found.page.evaluate(
            "['backgroundColor', 'color'].map(k => getComputedStyle(document.body)[k])"
        )
        levels = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ground, ink)]
        assert (levels[0] > levels[1]) == (scheme == "light")
        assert len(found.page.screenshot(full_page=True)) > 10_000


def test_a_narrow_screen_says_that_a_table_scrolls(browser: Any, two: Path) -> None:
    for width, hinted in ((390, True), (1400, False)):
        with Opened(browser, two, width) as found:
            found.page.wait_for_timeout(100)
            hints = found.page.locator("section#result .scroll, section#messages .scroll")
            assert hints.count() > 1 and hints.first.is_visible() == hinted


def test_curves_that_do_not_change_are_a_sentence(tmp_path: Path) -> None:
    bytes_of = {1: (1_040_000, 500), 2: (1_000_000, 900)}
    lines = tuple(
        {"round": k, "loss": 3.0 - k, "epsilon": 2.5, "bytes_up": up, "bytes_down": down}
        for k, (up, down) in bytes_of.items()
    )
    text = report.write_page([made(tmp_path / "a", (), None, lines)]).read_text()
    drawn = {panel["title"]: panel["series"][0]["y"] for panel in block(text)["lines"]}
    assert drawn == {"Loss": [2.0, 1.0], "Bytes down per round, all clients": [500, 900]}
    assert "Bytes up per round, all clients: 1.0 MB ε spent: 2.5" in plain(text)


def test_the_page_begins_with_what_was_learned(tmp_path: Path) -> None:
    text = plain(report.write_page([made(tmp_path / "a", (), scored(70, 80))]).read_text())
    learned = "-10.0 points against an untrained encoder (knn). Likely reason: too few rounds"
    assert learned in text and text.index(learned) < text.index("Result")
    assert "Accuracy of each client" not in text  # no client was evaluated


def test_print_is_black_on_white(browser: Any, two: Path) -> None:
    with Opened(browser, two, 720, color_scheme="dark") as found:
        found.page.emulate_media(media="print", color_scheme="dark")
        ground = found.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == "rgb(255, 255, 255)"
        assert not found.page.locator("nav").is_visible()
        assert found.width() == 720


def test_markup_in_names_is_shown_as_text(browser: Any, two: Path) -> None:
    with Opened(browser, two) as found:
        assert found.page.title() == "2 runs · fedssl"
        assert found.page.locator("img").count() == 0
        assert NASTY in found.page.locator("figure.map .legend").first.inner_text()
        svg = found.page.locator("figure.bars svg").first
        svg.focus()
        found.page.keyboard.press("ArrowDown")
        assert NASTY in found.page.locator("#tip").inner_text()


def test_a_run_on_folders(two: Path, named: Path) -> None:
    """Names that are markup are escaped, and clients are called by their folders."""
    text = two.read_text()
    assert "<img" not in text
    assert "</script><script>document" not in text and "<!--" not in text.split("-->")[0][15:]
    assert NASTY in block(text)["map"][0]["classes"]
    single = report.write_page([named], named / "one.html").read_text()
    assert "&lt;/script&gt;&lt;script&gt;" in single and "<img" not in single
    assert NASTY in plain(single)
    lines = {panel["title"]: panel for panel in block(single)["lines"]}
    drawn = lines["Divergence of client and server"]["series"]
    assert [own["name"] for own in drawn] == ["mean", "north", f"south{NASTY}"]
    assert "client 0" not in single and "client 1" not in single
    assert "trains a tiny encoder on the images of data" in plain(single)
    assert 'class="about"' not in single


def test_numbers_equal_the_files(one: Path, trained: Path) -> None:
    text, run = one.read_text(), RunReader(trained)
    lines, data = list(run.lines()), block(text)
    panels = {panel["title"]: panel for panel in data["lines"]}
    loss = panels["Loss"]["series"][0]
    assert loss["x"] == [line["round"] for line in lines]
    assert loss["y"] == [line["loss"] for line in lines]
    knn = panels["Accuracy"]["series"][0]
    assert knn["y"] == [line["knn_top1"] for line in lines if "knn_top1" in line]
    speed = panels["Images per second"]["series"][0]
    assert speed["y"] == pytest.approx([line["images"] / line["seconds"] for line in lines])
    rows = {row["name"]: row["mean"] for row in data["dots"][0]}
    assert rows == {
        "dcco": run.summary["knn_top1"],
        "untrained": run.summary["untrained"]["knn_top1"],
    }
    own = data["clients"][0][0]
    assert (
        dict(zip(own["names"], own["scores"], strict=True)) == (run.summary["per_client"]["global"])
    )
    assert sum(map(sum, data["bars"][0]["held"])) == sum(own["samples"] for own in run.clients)
    seen = plain(text)
    assert f"dcco {run.summary['knn_top1']:.1f} %" in seen.replace("\xa0", " ")
    scores = run.summary["per_client"]["global"]
    assert f"{min(scores.values()):.1f} (client " in seen
    assert f"{max(scores.values()):.1f} (client " in seen
    assert f"{lines[0]['loss']:.6g} (1)" in seen and f"{lines[-1]['loss']:.6g} (3)" in seen
    total = sum(line["bytes_up"] for line in lines)
    assert f"{total:,} bytes" in text
    encode = sum(line["exchanges"]["encode"]["up"] for line in lines)
    assert f"{encode:,} bytes" in text


def test_the_text_of_the_page(one: Path, trained: Path) -> None:
    seen = plain(one.read_text())
    for text in (
        "DCCO with CCO trains a tiny encoder on digits at 16 pixels, divided over 6 clients "
        "(partition dirichlet: alpha=0.5), 4 of them at a time, in 3 rounds of 1 local step.",
        "lambda: 2",
        f"fedssl run {trained}/config.yaml",
        config.read_yaml(trained / "config.yaml")["about"],
        "Encodings: the numbers that",
        "(0: all clients have the same mixture)",
        "t-SNE (keeps neighbours",
    ):
        assert text in seen
    assert re.search(r"Parameters \d+,\d{3} in the whole network", seen)
    assert seen.count("This section shows test images: send this page only to people") == 2
    assert one.stat().st_mode & 0o777 == 0o600


def test_a_run_without_labels_shows_no_accuracy(trained: Path, tmp_path: Path) -> None:
    own = {"effective_rank": 9.5, "alignment": 0.25, "uniformity": -2.0}
    more = {"seconds": 12.5, "overhead": {"checkpoint": 0.25, "evaluate": 3}}
    run = again(trained, tmp_path / "run", {"untrained": own, "result": own, **more})
    (run / "encoder.safetensors").unlink()  # no map: it is drawn elsewhere
    seen = plain(report.write_page([run]).read_text())
    assert "Effective rank: the number of directions" in seen and "9.50" in seen
    assert "Top-1 accuracy" not in seen
    assert "rounds 12.5, checkpoint 0.25, evaluate 3" in seen


def test_a_few_clients_are_named(opened: Opened) -> None:
    names = opened.page.locator("#clients svg text.place title").all_text_contents()
    scores = next(own for own in block(opened.path.read_text())["clients"])[0]
    order = sorted(zip(scores["scores"], scores["names"], strict=True), key=lambda pair: pair[0])
    assert names == [name for _, name in order] and len(names) == 6


def test_queries_are_of_different_classes(one: Path) -> None:
    rows = one.read_text().split('<div class="row">')[1:]
    assert len(rows) >= 6
    queries = [re.search(r'aria-label="([^"]*)"', row)[1] for row in rows]  # type: ignore[index]
    assert len(set(queries)) == len(queries)
    for row, query in zip(rows, queries, strict=True):
        cells = re.findall(r'<span class="cell (right|wrong)">.*?aria-label="(\S+)', row, re.S)
        assert len(cells) == 10
        assert all((kind == "right") == (name == query) for kind, name in cells)


def test_an_unfinished_run(trained: Path, tmp_path: Path) -> None:
    half = again(trained, tmp_path / "half", rounds=50)
    for name in ("summary.json", "encoder.safetensors", "encoder.json"):
        (half / name).unlink()
    seen = plain(report.write_page([half]).read_text())
    assert "Not finished: round 3 of 50" in seen
    assert "the run has not ended" in seen
    last = [line["knn_top1"] for line in RunReader(half).lines() if "knn_top1" in line][-1]
    assert f"dcco {last:.1f} %" in seen.replace("\xa0", " ")
    for name in ("metrics.jsonl", "clients.json"):
        (half / name).unlink()
    seen = plain(report.write_page([half]).read_text())
    assert "Not finished: round 0 of 50" in seen and "no round has ended yet" in seen


@pytest.mark.parametrize("bad", [math.nan, math.inf, 10**400], ids=["nan", "inf", "huge"])
def test_a_number_that_is_not_finite_leaves_all_figures(
    bad: float, trained: Path, tmp_path: Path
) -> None:
    own = json.loads((trained / "summary.json").read_text())
    result = own["result"] | {"mine_top1": bad}
    scores = {"global": own["per_client"]["global"] | {"0": bad}}
    odd = {"result": result, "untrained": {"knn_top1": bad}, "per_client": scores,
           "baselines": {"fedavg": {"knn_top1": bad}}, "images_per_second": bad}  # fmt: skip
    path = again(trained, tmp_path / "a", odd)
    (path / "encoder.safetensors").unlink()  # no map
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines[0] |= {"images": 1e10, "seconds": 1e-308}  # a ratio that is not finite
    lines[1] |= {"loss": bad, "mu": {"0": bad}, "images": bad, "bytes_up": bad}
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = report.write_page([path]).read_text()
    figures = block(text)
    assert set(figures) == {"dots", "lines", "bars", "clients"}
    assert [row["name"] for row in figures["dots"][0]] == ["dcco"]
    panels = {panel["title"]: panel["series"][0] for panel in figures["lines"]}
    assert panels["Loss"]["x"] == [1, 3] and "0" not in figures["clients"][0][0]["names"]
    assert "it could not be made" not in text and "nan %" not in text and "inf %" not in text


def test_missing_data_leaves_the_other_sections(named: Path, tmp_path: Path) -> None:
    gone = again(named, tmp_path / "gone", data__root=str(tmp_path / "nowhere"))
    text = report.write_page([gone]).read_text()
    assert "data.root" in plain(text).split("Map of images")[-1]
    # Sizes are in the run's own folder.
    assert block(text)["bars"][0]["sizes"] == [12, 12] and "map" not in block(text)


def lengthened(source: Path, out: Path, rounds: int) -> Path:
    """The run with many more rounds, and one peak that nobody may lose."""
    long = again(source, out, rounds=rounds)
    line = json.loads((source / "metrics.jsonl").read_text().splitlines()[0])
    del line["round"], line["loss"]
    rest = json.dumps(line | {"divergence": {"0": 0.5, "3": 0.25}})[1:]
    with (long / "metrics.jsonl").open("w") as file:
        for k in range(1, rounds + 1):
            loss = 1e6 if k == rounds // 3 else 5 + (k * 7919 % 1000) / 1000
            file.write(f'{{"round": {k}, "loss": {loss}, {rest}\n')
    return long


@pytest.mark.slow
def test_a_hundred_thousand_rounds(browser: Any, trained: Path, tmp_path: Path) -> None:
    path = report.write_page([lengthened(trained, tmp_path / "long", 100_000)])
    assert path.stat().st_size < 15e6
    with Opened(browser, path) as found:
        assert found.seconds < 3
        assert found.page.locator("figure.lines .curve").count() >= 1
    loss = block(path.read_text())["lines"][0]["series"][0]
    assert len(loss["x"]) <= curves.MOST_POINTS
    assert (loss["x"][0], loss["x"][-1]) == (1, 100_000)
    assert loss["y"][loss["x"].index(100_000 // 3)] == 1e6


@pytest.mark.slow
def test_fifty_runs(browser: Any, trained: Path, tmp_path: Path) -> None:
    long = lengthened(trained, tmp_path / "r0", 1000)
    runs = [long, *(again(long, tmp_path / f"r{k}", seed=k % 5, rounds=1000 + k // 5)
                    for k in range(1, 50))]  # fmt: skip
    for run in runs[1:]:
        (run / "encoder.safetensors").unlink()
    path = report.write_page(runs, tmp_path / "all.html")
    assert path.stat().st_size < 15e6
    with Opened(browser, path) as found:
        assert found.seconds < 3
        assert found.width() == 1400
        assert found.page.locator("figure.lines").first.locator(".curve").count() == 50
    assert [len(row["each"]) for row in block(path.read_text())["dots"][0]][:10] == [5] * 10


def test_an_output_that_cannot_be_written(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    bad = tmp_path / "file" / "report.html"
    assert main(["report", str(trained), "--out", str(bad)]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert str(bad.parent) in said and "cannot be written" in said
    with pytest.raises(UserError):
        report.write_page([trained], tmp_path)


TINY = ("rounds=1", "evaluate.baselines=[]", "evaluate.protocols=knn")


@pytest.mark.page
def test_a_run_leaves_its_page(tmp_path: Path) -> None:
    assert main(["run", *TINY, "--out", str(tmp_path / "a")]) == 0
    assert "Map of images" in (tmp_path / "a/report.html").read_text()
    keys: dict[str, Any] = {"evaluate__baselines": [], "evaluate__protocols": ["knn"]}
    fedssl.train(out=tmp_path / "b", rounds=1, **keys)
    assert (tmp_path / "b/report.html").exists()


@pytest.mark.page
def test_a_run_does_not_fail_for_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, said in (
        (UserError("no room"), "no room"),
        (ZeroDivisionError("of all\nthings"), "ZeroDivisionError: of all things"),
    ):
        monkeypatch.setattr(report, "write_page", Mock(side_effect=error))
        report.write_page_or_warn(tmp_path)
        assert capsys.readouterr().err == f"fedssl: no report.html: {said}\n"


def test_the_page_of_several_runs_lies_above_them(tmp_path: Path) -> None:
    runs = [made(tmp_path / name) for name in ("a", "b/c")]
    assert report.write_page(runs[:1]) == tmp_path / "a/report.html"
    assert report.write_page(runs) == tmp_path / "report.html"
    inside = made(tmp_path / "a/baselines/fedavg")
    assert report.write_page([runs[0], inside]) == tmp_path / "report.html"
    with pytest.raises(UserError) as error:
        report.write_page(runs, runs[0] / "config.yaml")
    assert "config.yaml" in str(error.value)
