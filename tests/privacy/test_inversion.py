"""The attack of benchmarks/attacks/inversion.py, in its easiest cases and over many images."""

from __future__ import annotations

import pytest
from helpers import load

INVERSION = load("benchmarks/attacks/inversion.py")
SMALL = (*INVERSION.MOMENTS, "objective.projector=[64,64]")  # 34 images are few


@pytest.fixture(autouse=True)
def is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEPS": 12, "DRAWS": 10, "STARTS": 1, "TRIES": (100, 1)}.items():
        monkeypatch.setattr(INVERSION, name, value)


@pytest.mark.parametrize("words", [INVERSION.UPDATE, SMALL])
def test_a_reply_of_one_image_gives_the_image(words: tuple[str, ...]) -> None:
    attacker = INVERSION.Attack(INVERSION.Condition("", words), 0)
    found, members = INVERSION.attack(attacker, 2, 0.1)
    score = INVERSION.score(found, members, attacker.images)
    assert score.correlation > 0.9 and score.recognized == score.count == 2


def test_a_mean_over_many_images_does_not() -> None:
    attacker = INVERSION.Attack(INVERSION.Condition("", SMALL, 60), 0)
    found, members = INVERSION.attack(attacker, 10, 0.1)
    score = INVERSION.score(found, members, attacker.images)
    assert score.correlation < 0.7 and score.recognized <= 2 and score.count == 10
    assert attacker.error > 0.1
