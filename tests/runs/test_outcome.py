"""What a run says it learned: gains with labels, verdicts without, and likely reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedssl import config
from fedssl.cli import main
from fedssl.runs import loop
from fedssl.runs.outcome import Comparison, Outcome, judge_run, read_losses
from fedssl.runs.reader import RunReader

GOOD = {"effective_rank": 58.2, "alignment": 0.08, "uniformity": -0.37, "views_matched": 12.7}
UNTRAINED = {"effective_rank": 75.7, "alignment": 0.09, "uniformity": -0.20, "views_matched": 5.6}


def judge(
    out: Path, summary: dict[str, Any], losses: tuple[float, ...] = (), *words: str
) -> Outcome:
    """Judge a run's folder made of these numbers, of 1,000 images."""
    out.mkdir(exist_ok=True)
    settings = config.resolve(config.read_recipe(None), words)
    (out / "config.yaml").write_text(config.dump(settings))
    (out / "summary.json").write_text(json.dumps(summary))
    (out / "clients.json").write_text(json.dumps([{"client": 0, "name": "0", "samples": 1000}]))
    lines = ({"round": k, "loss": loss} for k, loss in enumerate(losses, start=1))
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcome = judge_run(RunReader(out))
    assert outcome is not None
    return outcome


def labelled(ours: float, untrained: float = 50.0, **more: Any) -> dict[str, Any]:
    return {
        "result": {"linear@10_top1": ours, "knn_top1": 1.0},
        "untrained": {"linear@10_top1": untrained, "knn_top1": 99.0},
        **more,
    }


def unlabeled(ours: dict[str, float], **more: Any) -> dict[str, Any]:
    return {"result": ours, "untrained": UNTRAINED, **more}


def test_a_gain_is_named_with_its_labels_and_baselines(tmp_path: Path) -> None:
    more = {"baselines": {"fedavg": {"linear@10_top1": 62.2}}, "initial": {"linear@10_top1": 90.0}}
    outcome = judge(tmp_path, labelled(83.4, **more))
    assert outcome == Outcome(
        "better",
        "+33.4 points over an untrained encoder with 10 labels (linear), "
        "-6.6 against the given encoder, +21.2 over fedavg.",
    )


FALLING = (9.0, 8.0, 7.0, 6.0, 5.0, 4.0)
FLAT = (9.0, 5.0, 4.0, 4.0, 4.0, 4.0)
COLLAPSED = {**GOOD, "uniformity": -0.01}


@pytest.mark.parametrize(
    ("losses", "ours", "words", "said"),
    [
        (FALLING[::-1], GOOD, (), "the loss rose from 4 to 9. Lower server.lr (now 0.003)."),
        (FALLING[::-1], GOOD, ("server.optimizer=sgd",), "Lower client.lr (now 1)."),
        (FALLING, COLLAPSED, (), "the embeddings collapse"),
        (FALLING, GOOD, (), "too few rounds, the loss was still falling. Try rounds=400."),
        ((), GOOD, (), "too few rounds. Try rounds=400."),
        (FLAT, GOOD, (), "The augmentation may not suit these images."),
    ],
)
def test_a_loss_of_accuracy_has_a_likely_reason(
    losses: tuple[float, ...],
    ours: dict[str, float],
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
) -> None:
    rows = {"result": ours, "untrained": UNTRAINED}
    outcome = judge(tmp_path, labelled(46.0, unlabeled=rows), losses, *words)
    assert outcome.verdict == "worse"
    assert outcome.sentence.startswith("-4.0 points against an untrained encoder")
    assert said in outcome.sentence


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "better"),
        ({"views_matched": 6.5}, "unclear"),  # of 1,000 images
        ({"views_matched": 2.0}, "worse"),
        ({"effective_rank": 20.0}, "worse"),  # whatever is matched
        ({"uniformity": -0.04}, "worse"),
        ({"effective_rank": 0.0, "views_matched": 0.0}, "worse"),  # one point
    ],
)
def test_a_verdict_without_labels(changes: dict[str, float], verdict: str, tmp_path: Path) -> None:
    outcome = judge(tmp_path, unlabeled(GOOD | changes))
    assert outcome.verdict == verdict
    words = {"better": "Probably better", "worse": "orse than", "unclear": "Cannot say"}
    assert words[verdict] in outcome.sentence


def test_more_images_make_a_small_difference_certain() -> None:
    ours = GOOD | {"views_matched": 8.0}
    assert Comparison(ours, UNTRAINED, 300).verdict == "unclear"
    assert Comparison(ours, UNTRAINED, 2000).verdict == "better"


def test_the_given_encoder_is_compared_too(tmp_path: Path) -> None:
    better = GOOD | {"views_matched": 40.0}
    sentence = judge(tmp_path, unlabeled(GOOD, initial=better)).sentence
    assert "Probably better than an untrained encoder" in sentence
    assert "Probably worse than the given encoder" in sentence


def test_the_loss_is_part_of_a_verdict_without_labels(tmp_path: Path) -> None:
    assert "The loss rose" in judge(tmp_path, unlabeled(GOOD), FALLING[::-1]).sentence
    assert "still falling" in judge(tmp_path, unlabeled(GOOD), FALLING).sentence
    assert "The loss fell" in judge(tmp_path, unlabeled(GOOD), FLAT).sentence


def test_losses_that_are_not_shared_say_nothing() -> None:
    assert read_losses([{"round": k, "loss": None} for k in range(9)]) is None
    assert read_losses([{"round": k, "loss": 1.0} for k in range(4)]) is None


QUICK = (
    *("rounds=2", "cohort.size=4", "data.size=8", "objective.projector=32,32,16"),
    *("evaluate.protocols=knn", "evaluate.baselines=[]", "engine.threads=1"),
)


@pytest.mark.page
def test_the_last_lines_say_what_was_learned_and_where_the_report_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my run"
    assert main(["run", *QUICK, "--out", str(out)]) == 0
    learned, report = capsys.readouterr().out.splitlines()[-2:]
    assert "points over an untrained encoder (knn)." in learned.replace("against", "over")
    assert report == f"Report: {(out / 'report.html').as_uri()}" and "%20" in report


def test_a_run_below_the_untrained_encoder_measures_why(tmp_path: Path) -> None:
    settings = config.resolve(config.read_recipe(None), [*QUICK, "server.lr=3"])
    summary = loop.run(settings, tmp_path / "run")
    assert summary["knn_top1"] < summary["untrained"]["knn_top1"]
    assert Comparison(*map(summary["unlabeled"].get, ("result", "untrained")), 1000).has_collapsed
    good = config.resolve(config.read_recipe(None), [*QUICK, "server.lr=1e-9"])
    assert "unlabeled" not in loop.run(good, tmp_path / "good")
