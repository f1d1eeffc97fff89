"""The bytes in SITES.md equal those that runs count."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
from image_folders import save_noise

pytest.importorskip("flwr")
from far import far_session, one_round, small

from fedssl import config as configuration
from fedssl.algorithms.fedavg import FedAvg
from fedssl.deploy import estimate
from fedssl.deploy.recipe import adapt_recipe, check_recipe
from fedssl.deploy.write import write_app
from fedssl.runs import loop, metrics
from fedssl.runs.build import Experiment, assemble
from fedssl.util.text import format_bytes

SITES = 3
BYOL = "objective.name=byol objective.projector=32,16 encoder.norm=batch algorithm.batch=4"
SMALL = [
    "data.size=16", "encoder.name=tiny", "encoder.groups=8", "objective.projector=32,16",
    "cohort.size=null", "augment.name=flip", "rounds=2", "engine.threads=1", "device=cpu",
    "evaluate.baselines=[]", "evaluate.protocols=unlabeled",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """<site>/<image>."""
    root = tmp_path_factory.mktemp("images")
    save_noise(root, *map(str, range(SITES)))
    return root


def planned(*words: str) -> estimate.Traffic:
    moved = check_recipe(adapt_recipe("default", [*SMALL, f"engine.sites={SITES}", *words]))
    assert moved is not None
    return moved


@pytest.mark.parametrize(
    "words",
    [
        "algorithm.name=dcco",
        "algorithm.name=dcco objective.name=vicreg objective.projector=32,16",
        "algorithm.name=dcco objective.bound=1 privacy.noise=0.001 privacy.most_samples=4",
        f"algorithm.name=fedavg {BYOL}",
        f"algorithm.name=fedprox {BYOL}",
        f"algorithm.name=fedu {BYOL}",
        f"algorithm.name=fedema {BYOL}",
        f"algorithm.name=fedema {BYOL} privacy.noise=0.001",  # nothing for the log
        f"algorithm.name=ditto {BYOL}",
        f"algorithm.name=featarc {BYOL}",
        f"algorithm.name=gossip {BYOL} server.optimizer=sgd server.lr=1",
        "algorithm.name=ccl objective.name=moco objective.projector=32,16 algorithm.features=4 "
        "algorithm.neighbours=2 algorithm.mix=2",
        "algorithm.name=fedca objective.name=simclr objective.projector=32,16 algorithm.public=2 "
        "algorithm.base_epochs=1 algorithm.dictionary=4",
        "algorithm.name=fedca objective.name=simclr objective.projector=32,16 algorithm.align=0 "
        "algorithm.dictionary=0",
    ],
)
def test_a_run_counts_what_a_site_was_told(words: str, folder: Path, tmp_path: Path) -> None:
    given = words.split()
    here = [f"data.root={folder}", f"data.cache={tmp_path / 'cache'}"]
    there = ["data.name=folder", "data.levels=client", "partition.name=folder"]
    real = configuration.resolve(configuration.read_recipe(None), [*SMALL, *there, *here, *given])
    loop.run(real, tmp_path / "run")
    moved = planned(*given, *(here if "public" in words else []))
    first, *_, last = (line["exchanges"] for line in metrics.read(tmp_path / "run"))
    for way in ("up", "down"):
        said = getattr(moved, way)
        assert said.keys() == last.keys()
        # Numbers for the log are of either precision.
        assert all(abs(said[task] - last[task][way] / SITES) <= 12 for task in said), (said, last)
    only = {task: own["up"] / SITES for task, own in first.items() if task not in moved.up}
    assert moved.first == only


@pytest.mark.parametrize(
    "words",
    [
        "objective.bound=1 privacy.noise=9 privacy.most_samples=1000000",  # of no weight
        "cohort.average=trimmed cohort.hostile=1",  # which no single reply is enough for
    ],
)
def test_one_site_is_enough_for_a_number(words: str) -> None:
    """With noise as large as this, a sum would seldom be left of weights as small, four times."""
    plain = planned("objective.bound=1") if "bound" in words else planned()
    for _ in range(3):
        assert sum(planned(*words.split()).up.values()) == pytest.approx(
            sum(plain.up.values()), abs=4
        )


@pytest.mark.parametrize(
    ("words", "keys"),
    [("engine.updates=full", 0), ("engine.updates=fp16", 0), ("privacy.secure=true", 4000)],
)
def test_messages_count_the_same(words: str, keys: int, tmp_path: Path) -> None:
    """``keys``: the most bytes that a secure sum of five adds to the masked numbers."""
    config = small("engine.name=flower", words)
    far, _ = far_session(config, tmp_path)

    def again(weights: bool) -> Experiment:
        return assemble(config, far.dataset, far.engine.groups, weights=weights)

    one_round(far, tmp_path)
    line = one_round(far, tmp_path)
    moved = estimate.estimate_traffic(again(True), lambda: again(False))
    for way in ("up", "down"):
        said = getattr(moved, way)
        assert said.keys() == line["exchanges"].keys()
        for task, own in line["exchanges"].items():
            assert 0 <= own[way] / 5 - said[task] <= keys


def told(folder: Path, words: str = "") -> str:
    """The text of SITES.md."""
    write_app(folder, "default", [*SMALL, f"engine.sites={SITES}", *words.split()])
    return " ".join((folder / "SITES.md").read_text().split())


def test_a_site_is_told(tmp_path: Path) -> None:
    text, moved = told(tmp_path, "rounds=1000"), planned()
    up, down = sum(moved.up.values()), sum(moved.down.values())
    parts = ", ".join(f"`{task}` {format_bytes(moved.up[task])}" for task in ("encode", "descend"))
    assert (
        f"a site sends about {format_bytes(up)} ({parts}), and `locate` "
        f"{format_bytes(moved.first['locate'])} more in the run's first round. It receives about "
        f"{format_bytes(down)}. All 1,000 rounds together: {format_bytes(1000 * up)} sent and "
        f"{format_bytes(1000 * down)} received."
    ) in text
    assert "drawn at random" not in text and "keys of the secure" not in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("cohort.size=2", "that it takes part in (sites are drawn at random), a site sends about"),
        ("privacy.secure=true", "own messages, encryption, the keys of the secure sums and rounds"),
        ("algorithm.name=ccl objective.name=moco", "a site sends at most"),
        ("data.size=null", "**How much** a round moves is not known beforehand."),
    ],
)
def test_what_goes_with_the_number(words: str, said: str, tmp_path: Path) -> None:
    assert said in told(tmp_path, words)


def test_an_algorithm_that_takes_no_zeros_costs_only_the_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(FedAvg, "round", Mock(side_effect=ZeroDivisionError))
    assert "**How much** a round moves" in told(tmp_path, "algorithm.name=fedavg")
