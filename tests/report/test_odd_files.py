"""Files of other versions, or spoiled ones: a page or one line, never a traceback."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from made_runs import again, made, scored

from fedssl import report
from fedssl.cli import main
from fedssl.report import curves
from fedssl.report.compare import compare
from fedssl.report.sections import Page
from fedssl.runs.record import Run


def figures(path: Path) -> Any:
    """The page's data as a browser reads it, which knows no NaN."""

    def refused(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    text = report.write([path], None).read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    return json.loads(found[1], parse_constant=refused)


@pytest.mark.parametrize(
    "bad", [math.nan, math.inf, -math.inf, 10**400], ids=["nan", "inf", "-inf", "huge"]
)
def test_one_bad_number_leaves_all_figures(bad: float, trained: Path, tmp_path: Path) -> None:
    own = json.loads((trained / "summary.json").read_text())
    result = own["result"] | {"mine_top1": bad}
    scores = {"global": own["per_client"]["global"] | {"0": bad}}
    odd = {"result": result, "untrained": {"knn_top1": bad}, "per_client": scores,
           "baselines": {"fedavg": {"knn_top1": bad}}, "images_per_second": bad}  # fmt: skip
    path = again(trained, tmp_path / "a", odd)
    (path / "encoder.safetensors").unlink()  # the map is not in question
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines[0] |= {"images": 1e10, "seconds": 1e-308}  # their ratio is no number either
    lines[1] |= {"loss": bad, "mu": {"0": bad}, "images": bad, "bytes_up": bad}
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = figures(path)
    assert set(found) == {"dots", "lines", "bars", "clients"}
    assert [row["name"] for row in found["dots"][0]] == ["dcco"]
    panels = {panel["title"]: panel["series"][0] for panel in found["lines"]}
    assert panels["Loss"]["x"] == [1, 3] and "mu" not in panels
    assert "0" not in found["clients"][0][0]["names"]
    assert "mine_top1" not in compare([Run(path)]).rows[0].values
    seen = (path / "report.html").read_text()
    assert "it could not be made" not in seen and "nan %" not in seen and "inf %" not in seen


def test_a_figure_refuses_what_a_browser_cannot_read() -> None:
    page = Page([])
    with pytest.raises(ValueError, match="not JSON compliant"):
        page.figure("dots", [math.nan], "")
    assert page.data == {}


@pytest.mark.parametrize("content", ["[]", "null", "[1, 2]", "3", '"text"'])
def test_a_summary_of_another_kind(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made(tmp_path / "a", (), scored(90), ({"round": 1, "loss": 2.0},))
    (path / "summary.json").write_text(content)
    assert main(["compare", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"summary.json: holds {content}, not keys and values" in said and said.count("\n") == 1
    assert main(["report", str(path)]) == 0
    text = (path / "report.html").read_text()
    assert "summary.json: holds" in text and "Loss" in text


def test_lines_that_are_of_no_round_are_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made(tmp_path / "a")
    good = (b'{"round": 1, "knn_top1": 70.5}', b'{"round": 2, "loss": 1, "caf\xe9": 3}')
    bad = (b'{"round": "x"}', b'{"round": true}', b'{"round": null}', b"[]", b"\xff\xfe")
    (path / "metrics.jsonl").write_bytes(b"\n".join((*bad, *good, b"")))
    assert [line["round"] for line in Run(path).lines()] == [1, 2]
    assert main(["compare", str(path)]) == 0
    said = capsys.readouterr().out
    assert "not finished: 2 of 200" in said and "70.5 %" in said
    assert len(figures(path)["lines"]) == 3


def test_metrics_that_cannot_be_taken_are_said(tmp_path: Path) -> None:
    path = made(tmp_path / "a", (), None, ({"round": 1, "loss": 2.5}, {"round": 10**30, "loss": 1}))
    history = curves.read(Run(path))
    assert history.problem.startswith("OverflowError") and history.plain["loss"].values[0] == 2.5
    text = report.write([path], None).read_text()
    assert "metrics.jsonl could not be read to its end (OverflowError" in text


def test_a_notebook_shows_a_run_of_another_version(tmp_path: Path) -> None:
    path = again(made(tmp_path / "first"), tmp_path / "a", algorithm="dcco", objective=None)
    (path / "summary.json").write_text(json.dumps({"result": {"knn_top1": 90.0, "note": "good"}}))
    shown = Run(path)._repr_html_()
    assert "<td>90.00</td>" in shown and "good" not in shown
    (path / "summary.json").write_text(json.dumps({"result": [1]}))
    assert "<th>rounds</th>" in Run(path)._repr_html_()
