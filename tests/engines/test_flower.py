"""The same algorithms through Flower's messages: same weights, same states, same log."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import relative

pytest.importorskip("flwr")
from far import BYOL, far_session, go, one_round, small, states_of

from fedssl.session import prepare

CASES = [
    "algorithm.name=dcco",
    "algorithm.name=dcco algorithm.local_steps=2 server.momentum=0.9",
    "algorithm.name=dcco objective.name=vicreg cohort.size=3",
    "algorithm.name=fedavg objective.name=cco algorithm.local_epochs=2 algorithm.batch=2",
    "algorithm.name=standalone server.optimizer=adam server.lr=0.001",
    "byol algorithm.name=fedavg",
    "byol algorithm.name=fedavg algorithm.norm_policy=local",
    "byol algorithm.name=fedema",
    "byol algorithm.name=fedema cohort.size=3 algorithm.divergence=distance",
    "byol algorithm.name=fedu algorithm.threshold=0.1",
    "byol algorithm.name=ditto",
    "byol algorithm.name=fedavg objective.name=moco objective.queue=20 objective.predictor=null",
    "algorithm.name=dcco cohort.average=median",
    "algorithm.name=fedavg cohort.average=krum cohort.hostile=1",
]


def words_of(case: str) -> list[str]:
    words = [word for word in case.split() if word != "objective.predictor=null"]
    if "byol" in words:
        words.remove("byol")
        moco = "objective.name=moco" in words
        words = [w for w in BYOL if not (moco and "predictor" in w)] + words
    return words


@pytest.mark.parametrize("case", CASES)
def test_both_engines_give_the_same_weights_states_and_log(case: str, tmp_path: Path) -> None:
    config = small(*words_of(case), "engine.merge=off")
    near = prepare(config)
    far, grid = far_session(config, tmp_path)
    both = list(zip(go(near, 3), go(far, 3), strict=True))
    assert relative(far.server.weights, near.server.weights) < 1e-10 or "standalone" in case
    assert near.engine.states is not far.engine.states
    theirs, ours = states_of(far), states_of(near)
    assert theirs.keys() == ours.keys()
    for client, state in ours.items():
        assert theirs[client].keys() == state.keys()
        for name, value in state.items():
            np.testing.assert_allclose(theirs[client][name], value, rtol=1e-9, atol=1e-12)
    assert float(far.server.log["loss"]) == pytest.approx(float(near.server.log["loss"]), rel=1e-10)
    assert far.server.clients.keys() == near.server.clients.keys()
    for name, each in near.server.clients.items():
        for client, value in each.items():
            theirs_here = far.server.clients[name][client]
            assert theirs_here == (value if value is None else pytest.approx(value, rel=1e-8))
    for here, there in both:
        assert dict(there.traffic.up) == dict(here.traffic.up)
        assert dict(there.traffic.down) == dict(here.traffic.down)
        assert there.traffic.missing == 0 and not there.traffic.faults
    algorithm = far.algorithm
    tasks = {name.split(".")[1] for name in grid.types}
    assert tasks <= {*algorithm.means, *algorithm.gathers, *algorithm.logs}


@pytest.mark.parametrize("case", ["algorithm.name=dcco", "byol algorithm.name=fedema"])
def test_in_float32_they_are_equal_to_rounding(case: str, tmp_path: Path) -> None:
    config = small(*words_of(case), "precision=fp32", "engine.merge=off")
    near, (far, _) = prepare(config), far_session(config, tmp_path)
    go(near, 3)
    go(far, 3)
    assert relative(far.server.weights, near.server.weights) < 1e-5


def test_personal_models_and_kept_norms_are_judged_from_the_states(tmp_path: Path) -> None:
    config = small(*words_of("byol algorithm.name=ditto algorithm.norm_policy=local"))
    near, (far, _) = prepare(config), far_session(config, tmp_path)
    go(near, 2)
    go(far, 2)
    torch.testing.assert_close(far.global_weights(), near.global_weights(), rtol=1e-9, atol=1e-12)
    mine, theirs = near.personal(5), far.personal(5)
    assert mine.keys() == theirs.keys() and len(mine) == 5
    for client, weights in mine.items():
        torch.testing.assert_close(theirs[client], weights, rtol=1e-9, atol=1e-12)


def test_updates_in_half_precision(tmp_path: Path) -> None:
    """Half the bytes, an effect within float16's rounding, and moments as they are."""
    plain, _ = far_session(small(), tmp_path / "a")
    half, _ = far_session(small("engine.updates=fp16"), tmp_path / "b")
    (full_bytes,), (half_bytes,) = ([c.traffic.up for c in go(s, 1)] for s in (plain, half))
    assert half_bytes["encode"] == full_bytes["encode"]
    assert half_bytes["descend"] < 0.26 * full_bytes["descend"]  # from float64
    start = plain.work.initial
    change, rounded = plain.server.weights - start, half.server.weights - start
    assert 0 < relative(rounded, change) < 2**-10
    assert float(half.server.log["loss"]) == float(plain.server.log["loss"])


def test_a_line_of_the_metrics_is_the_same(tmp_path: Path) -> None:
    config = small("engine.merge=off")
    near, (far, _) = prepare(config), far_session(config, tmp_path)
    mine, theirs = one_round(near, tmp_path), one_round(far, tmp_path)
    assert mine.keys() == theirs.keys()
    changing = {"seconds", "loss"}
    assert {k: v for k, v in mine.items() if k not in changing} == {
        k: v for k, v in theirs.items() if k not in changing
    }
