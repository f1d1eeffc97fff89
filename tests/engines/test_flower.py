"""The same algorithms through Flower's messages: same weights, same states, same log.

Every task of every exchange runs in an engine made for it alone, as in a process of its own. An
algorithm that relied on what an earlier task left in memory would give other weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import relative, replace_task

pytest.importorskip("flwr")
from far import BYOL, far_session, go, one_round, small
from flwr.app import Message
from rounds import assert_sessions_agree
from scipy import stats

from fedssl.algorithms.ccl import CCL
from fedssl.engines.remote.engine import STATES
from fedssl.runs import build, checkpoint
from fedssl.runs.build import Experiment, build_experiment
from fedssl.util.trees import flatten

MOCO = (*(w for w in BYOL if "predictor" not in w), "objective.name=moco", "objective.queue=20")
BASES = {
    "cco": (),
    "byol": BYOL,
    "simsiam": (*(w for w in BYOL if "momentum" not in w), "objective.name=simsiam"),
    "moco": MOCO,
    "ccl": (*MOCO, "algorithm.name=ccl", "algorithm.neighbours=3"),
}
CASES = [
    "cco algorithm.name=dcco algorithm.local_steps=2 server.momentum=0.9",
    "cco algorithm.name=dcco objective.name=vicreg cohort.size=3",
    "cco algorithm.name=dcco cohort.average=median",
    "cco algorithm.name=fedavg algorithm.local_epochs=2 algorithm.batch=2",
    "cco algorithm.name=fedavg cohort.average=krum cohort.hostile=1",
    "cco algorithm.name=standalone server.optimizer=adam server.lr=0.001",
    "byol algorithm.name=fedavg",
    "byol algorithm.name=fedavg algorithm.replace=both algorithm.norm_policy=local",
    "byol algorithm.name=fedavg objective.stop_gradient=false algorithm.norm_policy=reset",
    "byol algorithm.name=fedema",
    "byol algorithm.name=fedema cohort.size=3 algorithm.divergence=distance",
    "byol algorithm.name=fedema algorithm.divergence=distance algorithm.norm_policy=local",
    "simsiam algorithm.name=fedema algorithm.decay=0.3,0.8",
    "byol algorithm.name=fedu algorithm.threshold=0.1",
    "byol algorithm.name=ditto",
    "moco algorithm.name=ditto algorithm.norm_policy=local",
    "moco algorithm.name=fedavg",
    "moco algorithm.name=standalone server.momentum=0.9",
    "ccl algorithm.mix=2",
    "ccl cohort.size=3 algorithm.remote=only algorithm.features=5 algorithm.norm_policy=local",
]


@pytest.fixture(autouse=True)
def new_engines_and_fixed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """InstaHide's keys are a function of client and round: the system's differ every time."""
    monkeypatch.setattr(build, "build_worker_engine", build.build_worker_engine.__wrapped__)
    monkeypatch.setattr(CCL, "secret", lambda _, c: np.random.default_rng([c.id, c.round]))


def both_of(folder: Path, case: str, *words: str) -> tuple[Experiment, Experiment]:
    """The same experiment with clients in this process, and behind messages."""
    base, *more = case.split()
    config = small(*BASES[base], *more, "engine.merge=off", *words)
    return build_experiment(config), far_session(config, folder, nodes=5)[0]


@pytest.mark.parametrize("case", CASES)
def test_both_engines_give_the_same_weights_states_and_log(case: str, tmp_path: Path) -> None:
    assert_sessions_agree(*both_of(tmp_path, case), rounds=2)


def test_in_float32_they_are_equal_to_rounding(tmp_path: Path) -> None:
    near, far = both_of(tmp_path, "byol algorithm.name=fedema", "precision=fp32")
    go(near, 3)
    go(far, 3)
    assert relative(far.server.weights, near.server.weights) < 1e-5


def test_personal_models_and_kept_norms_are_judged_from_the_states(tmp_path: Path) -> None:
    near, far = both_of(tmp_path, "byol algorithm.name=ditto algorithm.norm_policy=local")
    go(near, 2)
    go(far, 2)
    torch.testing.assert_close(
        far.models.global_model(), near.models.global_model(), rtol=1e-9, atol=1e-12
    )
    mine, theirs = near.models.personal_models(5), far.models.personal_models(5)
    assert mine.keys() == theirs.keys() and len(mine) == 5
    for client, weights in mine.items():
        torch.testing.assert_close(theirs[client], weights, rtol=1e-9, atol=1e-12)


BAD_BANKS = {
    "not finite": (lambda bank: bank / 0, "not finite"),
    "another width": (lambda bank: bank[:, :15], "shape [5, 15], expected at most"),
    "oversized": (lambda bank: bank.repeat(2, 1), "shape [10, 16], expected at most"),
    "empty": (lambda bank: bank[:0], "shape [0, 16]"),
    "one number": (lambda bank: bank[0, 0], "shape []"),
}


@pytest.mark.parametrize("kind", BAD_BANKS)
def test_a_bad_bank_costs_only_itself(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models of its client were averaged: the round counts, whatever cohort.minimum is."""
    config = small(*BASES["ccl"], "algorithm.features=5", "cohort.minimum=5")
    near, (far, _) = build_experiment(config), far_session(config, tmp_path, nodes=5)
    go(near, 1)
    spoil, reason = BAD_BANKS[kind]
    share = CCL.share
    replace_task(
        monkeypatch,
        CCL,
        "share",
        lambda a, c: {n: spoil(b) if c.id == 3 else b for n, b in share(a, c).items()},
    )
    line = one_round(far, tmp_path)
    assert not line["skipped"] and line["loss"] is not None and line["missing"] == 1
    assert line["faults"].keys() == {"3"} and reason in line["faults"]["3"]
    assert relative(far.server.weights, near.server.weights) < 1e-10
    theirs, ours = flatten(far.server.state), flatten(near.server.state)
    assert ours.keys() - theirs.keys() == {"banks/3", "classes/3", "rounds/3"}
    for name, leaf in theirs.items():
        torch.testing.assert_close(leaf, ours[name], rtol=1e-9, atol=1e-12)


def test_only_changes_of_the_main_model_travel_in_half_precision(tmp_path: Path) -> None:
    far, _ = far_session(small(*BASES["ccl"], "engine.updates=fp16"), tmp_path)
    (cohort,) = go(far, 1)
    main, momentum = len(far.server.weights), far.server.flat.parameter_count
    assert cohort.traffic.up["train"] == 5 * (2 * main + 8 * momentum + 8)
    assert cohort.traffic.up["share"] == 30 * 16 * 8


def test_updates_in_half_precision(tmp_path: Path) -> None:
    """Half the bytes, an effect within float16's rounding, and moments as they are."""
    plain, _ = far_session(small(), tmp_path / "a")
    half, _ = far_session(small("engine.updates=fp16"), tmp_path / "b")
    (full_bytes,), (half_bytes,) = ([c.traffic.up for c in go(s, 1)] for s in (plain, half))
    assert half_bytes["encode"] == full_bytes["encode"]
    assert half_bytes["descend"] < 0.26 * full_bytes["descend"]  # from float64
    start = plain.trainer.initial
    change, rounded = plain.server.weights - start, half.server.weights - start
    assert 0 < relative(rounded, change) < 2**-10
    assert float(half.server.log["loss"]) == float(plain.server.log["loss"])


def test_a_line_of_the_metrics_is_the_same(tmp_path: Path) -> None:
    mine, theirs = (one_round(session, tmp_path) for session in both_of(tmp_path, "cco"))
    assert mine | {"seconds": 0, "loss": 0} == theirs | {"seconds": 0, "loss": 0}


NOISE = ("privacy.noise=2", "privacy.clip=0.01", "objective.bound=1")


@pytest.mark.parametrize("words", [(), ("privacy.secure=true",)])
def test_noise_is_added_to_the_same_sums_of_clipped_contributions(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    """Sums on the grid are the same to the last bit, so that noise has the same law."""
    sent, asked = list[float](), list[list[tuple[int, int]]]()

    def look(asked: Message, reply: Message) -> Message:
        for name, array in reply.content.array_records["replies"].items():
            assert not name.endswith("loss")
            if name.endswith("change"):
                sent.append(float(np.linalg.norm(np.frombuffer(array.data, np.float64))))
        return reply

    def sessions(name: str, *more: str) -> list[Experiment]:
        far, grid = far_session(small(*NOISE, *words, *more), tmp_path / name)
        grid.tamper = look
        return [build_experiment(small(*NOISE, *more)), far]

    quiet = sessions("quiet", "privacy.most_samples=7")  # clients have six images
    for session in quiet:
        requests: list[tuple[int, int]] = []

        def none(count: int, sigma: int, requests: Any = requests) -> np.ndarray:
            requests.append((count, sigma))
            return np.zeros(count, dtype=np.int64)

        session.engine.aggregator.sample = none  # type: ignore[attr-defined]
        go(session, 1)
        asked.append(requests)
    assert asked[0] == asked[1] and torch.equal(*(s.server.weights for s in quiet))
    assert words or (len(sent) == 5 and 0.9 < max(sent) <= 1)  # in units of the clip

    drawn = []
    for session in sessions("noisy"):
        go(session, 1)
        assert "loss" not in session.server.log
        # Updates of norm 0.01 are nothing beside noise of 0.02 / 5 in each of 78,000 numbers.
        change = session.server.weights - session.trainer.initial
        drawn.append(change.double().numpy())
        assert np.std(drawn[-1]) == pytest.approx(0.02 / 5, rel=0.02)
    assert stats.ks_2samp(*drawn).pvalue > 1e-4


def test_what_clients_have_from_the_round_is_not_sent_again(tmp_path: Path) -> None:
    sent: dict[str, list[str]] = {}

    def look(asked: Message, reply: Message) -> Message:
        task = asked.metadata.message_type.split(".")[1]
        sent[task] = sorted(asked.content.array_records["payload"])
        return reply

    far, _ = far_session(small(), tmp_path, tamper=look)
    go(far, 1)
    assert sent["locate"] == ["0/."] and sent["encode"] == ["1/f", "1/g"]
    assert sent["descend"] == ["2/f", "2/f2", "2/fg", "2/g", "2/g2"]


def test_states_that_a_checkpoint_has_made_old_do_not_pile_up(tmp_path: Path) -> None:
    far, _ = far_session(small(*BYOL, "algorithm.name=fedema", "rounds=9"), tmp_path)
    for _ in range(5):
        go(far, 1)
        checkpoint.write(tmp_path, far)
    files = list((tmp_path / STATES / "0").iterdir())
    assert len(files) == 2  # of the round before the last checkpoint, and of the last round
