from __future__ import annotations

import pytest

from fedssl.util.errors import UserError

LINES = {
    "cohort.size=9: there are 5 clients. Use at most 5": UserError(
        "there are 5 clients", fix="Use at most 5", key="cohort.size", value=9
    ),
    "--out runs/a: already holds a run": UserError(
        "already holds a run", key="--out", value="runs/a"
    ),
    "encoder.init=null: not set": UserError("not set", key="encoder.init", value=None),
    "privacy.secure=true: needs 3 sites": UserError(
        "needs 3 sites", key="privacy.secure", value=True
    ),
    "objective.projector=[32,16]: too short": UserError(
        "too short", key="objective.projector", value=(32, 16)
    ),
    "data: no images": UserError("no images", key="data"),
    "no images. Add some": UserError("no images", fix="Add some"),
}


@pytest.mark.parametrize("line", LINES)
def test_the_line_names_key_value_problem_and_fix(line: str) -> None:
    assert str(LINES[line]) == line
