"""The Dec-SSL paper's section 4.1, at small size, on real images."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedssl import config, run
from fedssl.data import datasets


@pytest.mark.skipif(not datasets.DEBIAN_FASHION.is_dir(), reason="needs dataset-fashion-mnist")
def test_label_skew_costs_self_supervision_less_than_supervision(tmp_path: Path) -> None:
    """Ten local epochs, two classes a client or all; each beside its own result with all."""

    def lost(row: str, measure: str) -> float:
        found = []
        for column in ("iid", "skewed"):
            recipe = config.read_recipe(f"decssl/small/{row}/{column}")
            words = ["data.labels=600", "rounds=2", "algorithm.batch=60", "engine.threads=1"]
            settings = config.resolve(recipe, [*words, f"evaluate.protocols={measure}"])
            found.append(run.run(settings, tmp_path / row / column)["result"][f"{measure}_top1"])
        return found[0] - found[1]

    supervised, own = lost("dec-sl", "head"), lost("dec-ssl", "linear")
    # Three seeds had 14 to 17 points against 0.3 to 1.3.
    assert supervised > own + 5 and supervised > 10
