"""Nothing is silent for two seconds: lines in a log file, a live line on a terminal."""

from __future__ import annotations

import sys
import time

import pytest

from fedssl.util import status


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silences of a twentieth of a second."""
    monkeypatch.setattr(status, "SILENCE", 0.05)
    monkeypatch.setattr(status, "LIVE_AFTER", 0.05)
    monkeypatch.setattr(status, "TICK", 0.01)
    status.note_output()


def test_a_log_file_names_the_stages_after_a_silence(capsys: pytest.CaptureFixture[str]) -> None:
    with status.stage("evaluating"):
        with status.stage("decoding images", 100) as stage:
            stage.advance(25)
            time.sleep(0.2)
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("evaluating: decoding images: 25 of 100 (")
    assert lines[0].endswith("s left)")
    assert lines[-1].startswith("evaluating (")


def test_short_stages_in_a_row_are_not_silent(capsys: pytest.CaptureFixture[str]) -> None:
    for name in "abcdefghij":
        with status.stage(name):
            time.sleep(0.03)  # each is shorter than the silence
    assert len(capsys.readouterr().err.splitlines()) >= 2


def test_output_starts_a_new_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "SILENCE", 10.0)
    monkeypatch.setattr(status._display, "last", time.monotonic() - 20)
    assert status.is_due()
    status.note_output()
    assert not status.is_due()


def test_a_long_run_has_a_short_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with status.stage("training"):
        monkeypatch.setattr(status._display, "begun", time.monotonic() - 3600)
        time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_a_terminal_has_one_live_line_that_goes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with status.stage("compiling"):
        time.sleep(0.2)
        status.say("a line")
    said = capsys.readouterr().err
    assert "\rcompiling (0 s)" in said and said.count("\n") == 1
    assert said.rsplit("\r", 2)[1].strip() == ""  # the live line is blank at the end


def test_a_stage_that_fails_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError), status.stage("failing"):
        raise ValueError
    time.sleep(0.1)
    assert capsys.readouterr().err == "" and status._display.stages == []


def test_a_terminal_breaks_a_line_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    for is_terminal, lines in ((False, 1), (True, 2)):
        monkeypatch.setattr(status, "is_terminal", lambda shown=is_terminal: shown)
        status.say("the server could recover it")
        assert len(capsys.readouterr().err.splitlines()) == lines
