"""``fedssl evaluate``: judge a run's encoder again, under other protocols or on other data."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedssl import checkpoint, config
from fedssl.errors import UserError
from fedssl.evaluate import collaborations
from fedssl.session import prepare
from fedssl.tables import models

FILE = "evaluations.jsonl"


def evaluate(run: Path, words: Sequence[str]) -> dict[str, dict[str, float]]:
    """The rows of a run's result and of an untrained network; also appended to the run's folder."""
    known = run / "config.yaml"
    if not known.is_file():
        raise UserError(f"{run}: holds no run (no config.yaml in it)")
    for word in words:
        if not word.startswith(("evaluate.", "data.", "device=")):
            raise UserError(f"{word}: only evaluate.*, data.* and device can change here")
        if word.startswith("data.holdout"):
            raise UserError(f"{word}: what was held out of training is decided when it starts")
    settings = config.resolve(config.read_yaml(known), words)
    if any(word.startswith("data.") for word in words):
        # Other data need not be divisible in the run's way; judging an encoder needs no clients.
        if "per-client" in (settings.evaluate.protocols or ()):
            raise UserError(
                "evaluate.protocols=per-client: judges the run's own clients, so on its own data; "
                "leave the data.* keys out"
            )
        for words_of in collaborations(settings.evaluate):
            raise UserError(
                f"{words_of}: fine-tunes at the run's own clients, so on its own data; leave the "
                "data.* keys out"
            )
        if getattr(settings.algorithm, "public", 0):
            settings = replace(settings, algorithm=config.without_public(settings.algorithm))
        whole = config.build({"partition": {"name": "iid", "clients": 1}})
        settings = replace(
            settings,
            partition=whole.partition,
            cohort=whole.cohort,
            engine=replace(settings.engine, name="local", max_norm=None, updates="full"),
            privacy=whole.privacy,
        )
    session = prepare(settings, trains=False)
    session.engine.open(run)
    if not checkpoint.read(run, session):
        raise UserError(f"{run}: has no checkpoint yet; let it run, or resume it")
    rows = {"untrained": session.judge(session.untrained()), "result": session.judge_result()}
    line: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "rounds": session.server.round,
        "changed": list(words),
        "rows": rows,
    }
    try:
        with (run / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:  # the numbers are still worth seeing
        print(f"fedssl: {run / FILE}: not written ({error.strerror})", file=sys.stderr)
    shown = models("result", rows["result"], session.algorithm.judges)
    return {"untrained": rows["untrained"], **shown}
