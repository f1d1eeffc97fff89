"""Settings that an algorithm or an objective refuses before the first round, in one line."""

from __future__ import annotations

import pytest
from helpers import refused
from rounds import assert_refused, run_of

from fedssl.runs.build import build_experiment

MAE = "data.size=8 objective.name=mae encoder.name=vit-tiny"
SWAV = "objective.name=swav objective.projector=32,16 objective.prototypes=6"
CLUSTERS = "objective.name=deepcluster objective.projector=32,16 objective.clusters=3,2,4"


@pytest.mark.parametrize(
    ("method", "words", "key", "value"),
    [
        ("ccl", "algorithm.features=1 algorithm.lambda=0", "algorithm.features", 1),
        ("ccl", "algorithm.neighbours=20", "algorithm.neighbours", 20),
        ("ccl", "algorithm.features=3", "algorithm.neighbours", 3),
        ("ccl", "algorithm.mix=1", "algorithm.mix", 1),
        ("ccl", "algorithm.share_plain=true", "algorithm.mix", 4),
        ("ccl", "algorithm.remote=off", "algorithm.lambda", 0.1),
        ("ccl", "algorithm.mix=17", "algorithm.name", "ccl"),  # a client has 16 images
        ("ccl", "partition.clients=80 cohort.size=5", "algorithm.name", "ccl"),
        ("ccl", "objective.name=byol objective.queue=null", "objective.queue", ...),
        ("ccl", "cohort.average=median", "cohort.average", "median"),  # it does not cover features
        ("ccl", "privacy.noise=1", "privacy.noise", 1.0),
        ("ccl", "privacy.secure=true engine.name=flower", "privacy.secure", True),
        ("fedca", "algorithm.public=1", "algorithm.public", 1),
        ("fedca", "algorithm.public=80", "algorithm.public", 80),  # none is left for the clients
        ("fedca", "algorithm.public=1000", "algorithm.public", 1000),
        ("fedca", "algorithm.dictionary=1", "algorithm.dictionary", 1),
        ("fedca", "objective.name=cco", "objective.name", "cco"),
        ("fedca", "partition.clients=63", "algorithm.name", "fedca"),  # a client has one image
        ("fedca", "privacy.noise=1", "privacy.noise", 1.0),
        ("gossip", "algorithm.name=scaffold client.momentum=0.9", "client.momentum", 0.9),
        ("gossip", "algorithm.name=scaffold client.optimizer=adam", "client.optimizer", "adam"),
        (
            "gossip",
            "algorithm.name=scaffold algorithm.norm_policy=local",
            "algorithm.norm_policy",
            "local",
        ),
        ("gossip", "algorithm.name=fedsc objective.name=cco", "objective.name", "cco"),
        (
            "gossip",
            "algorithm.name=fedsc objective.name=spectral objective.bound=null privacy.noise=1",
            "privacy.noise",
            1.0,
        ),
        ("featarc", "algorithm.clusters=6", "algorithm.clusters", 6),  # of 5 clients
        ("featarc", "cohort.average=median", "cohort.average", "median"),
        ("featarc", "privacy.noise=1", "privacy.noise", 1.0),
        ("gossip", "algorithm.topology=ring", "algorithm.topology", "ring"),
        (
            "gossip",
            "algorithm.topology=random algorithm.edge_probability=0.01",
            "algorithm.topology",
            "random",
        ),
        ("gossip", "server.optimizer=adam", "server.optimizer", "adam"),
        ("gossip", "server.lr=0.5", "server.lr", 0.5),
        ("gossip", "server.momentum=0.9", "server.momentum", 0.9),
        ("gossip", "cohort.average=median", "cohort.average", "median"),
        ("gossip", "privacy.noise=1", "privacy.noise", 1.0),
    ],
)
def test_settings_of_algorithms(method: str, words: str, key: str, value: object) -> None:
    with refused(key, value):
        build_experiment(run_of(method, words))


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("objective.name=byol algorithm.name=ccl", "objective.name"),
        ("objective.name=rotation encoder.towers=2", "encoder.towers"),
        ("objective.name=rotation evaluate.protocols=head", "evaluate.protocols"),
        (f"{MAE} encoder.name=tiny", "objective.name"),
        (f"{MAE} encoder.towers=2", "encoder.towers"),
        (f"{MAE} encoder.patch=5", "encoder.patch"),
        (f"{MAE} evaluate.protocols=head", "evaluate.protocols"),
        (f"{MAE} algorithm.name=dcco", "objective.name"),
        (f"{MAE} algorithm.name=fedca", "objective.name"),
        (f"{CLUSTERS} algorithm.batch=2 engine.compile=on", "engine.compile"),
        (f"{CLUSTERS} algorithm.name=dcco", "objective.name"),
        (f"{SWAV} algorithm.batch=1", "algorithm.batch"),
        ("objective.name=simclr augment.small=2", "augment.small"),
        (f"{SWAV} data.size=8 augment.small=2 encoder.name=vit-tiny", "encoder.patch"),
    ],
)
def test_settings_of_objectives(words: str, key: str) -> None:
    assert_refused(*words.split(), key=key)
