"""Clients behind Flower's messages give what clients in this process do."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import relative

pytest.importorskip("flwr")
from far import BYOL, far_session, go, small
from rounds import assert_both_engines_agree

from fedssl.util.errors import UserError

OWN = Path(__file__).resolve().parents[2] / "examples/own"
EPOCHS = "algorithm.local_epochs=1 algorithm.batch=3"
SIMCLR = "objective.name=simclr objective.projector=[32,16]"
FEDBYOL = f"{' '.join(BYOL)} objective.projector=[32,16]"
FEDCA = (
    f"{SIMCLR} algorithm.name=fedca algorithm.public=8 algorithm.local_epochs=1 algorithm.batch=2 "
    "algorithm.base_epochs=2 algorithm.dictionary=3 algorithm.align=0.5"
)
FEATARC = f"{FEDBYOL} algorithm.name=featarc server.momentum=0.5"
GOSSIP = f"{FEDBYOL} algorithm.name=gossip algorithm.topology=tree"
MINE = "objective.name=simclr objective.projector=[32,128] algorithm.local_steps=2"
CASES = [
    "cohort.dropout=0.3",
    "algorithm.name=dcco encoder.norm=group algorithm.local_epochs=1 algorithm.batch=4 "
    "data.labels=40 partition.clients=6",
    "algorithm.name=dcco objective.name=sigreg objective.slices=20 encoder.norm=group "
    "augment.small=1 algorithm.local_steps=2 data.labels=40 partition.clients=6",
    "algorithm.name=fedsc objective.name=spectral algorithm.local_epochs=2 algorithm.batch=3",
    f"algorithm.name=dcco objective.name={OWN}/moments.py:CodingRate encoder.norm=group",
    f"{GOSSIP} cohort.dropout=0.2",
    f"{SIMCLR} algorithm.name=fedprox algorithm.mu=2 algorithm.local_epochs=2 algorithm.batch=3",
    f"{SIMCLR} algorithm.name=scaffold algorithm.local_epochs=2 algorithm.batch=3 cohort.size=3",
    f"{SIMCLR} algorithm.name=ldawa algorithm.local_epochs=2 algorithm.batch=3",
    FEDCA,
    f"{FEDCA} cohort.size=3 algorithm.norm_policy=local",
    f"{FEDCA} data.halves=true encoder.towers=2 encoder.norm=group",
    f"{FEDCA} algorithm.align=0 algorithm.norm_policy=reset",
    f"{FEDCA} algorithm.dictionary=0",
    FEATARC,
    f"{FEATARC} cohort.size=3 algorithm.norm_policy=local",
    GOSSIP,
    f"{GOSSIP} cohort.size=3 algorithm.norm_policy=local",
    f"{MINE} algorithm.name={OWN}/algorithm.py:Momentum algorithm.momentum=0.5",
    f"{MINE} algorithm.name={OWN}/personal.py:Mixture server.momentum=0.5",
    f"{MINE} algorithm.name={OWN}/features.py:Shared algorithm.batch=4",
    f"{EPOCHS} objective.name=rotation",
    f"{EPOCHS} objective.name=mae encoder.name=vit-tiny data.size=8 encoder.patch=4",
    f"{EPOCHS} objective.name=deepcluster objective.projector=32,16 objective.clusters=3,2,4",
    f"{EPOCHS} objective.name=swav objective.projector=32,16 objective.prototypes=6 "
    "objective.queue=5",
]


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize("words", CASES)
def test_both_engines_agree(words: str, tmp_path: Path) -> None:
    near, far = assert_both_engines_agree(tmp_path, words)
    if "featarc" in words:
        assert near.server.client_log["cluster"] and "clusters" in near.server.state
        mine, other = near.models.personal_models(5), far.models.personal_models(5)
        assert mine.keys() == other.keys() and len(mine) >= 3
        assert all(relative(other[k], mine[k]) < 1e-10 for k in mine)


def test_secure_sums_are_enough_for_one_cluster_of_featarc(tmp_path: Path) -> None:
    """Several clients per sum: a sum of one would be that client's change."""
    words = ("objective.name=simclr", "algorithm.name=featarc", "algorithm.local_epochs=1")
    with pytest.raises(UserError, match="a group may be one client"):
        far_session(small(*words, "privacy.secure=true"), tmp_path / "refused")
    words += ("algorithm.clusters=1",)
    plain, _ = far_session(small(*words), tmp_path / "plain")
    secure, _ = far_session(small(*words, "privacy.secure=true"), tmp_path / "secure")
    go(plain, 2)
    go(secure, 2)
    assert (plain.server.weights - secure.server.weights).abs().max() < 1e-8
    assert plain.server.client_log and not secure.server.client_log
