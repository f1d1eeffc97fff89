"""FeatARC: alignment (Algorithm 2), assignment and a mean for each cluster (Algorithm 1)."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    engine_of,
    groups_of,
    made_split,
    refused,
    relative,
    settings,
    siamese,
    step,
    timeless,
    train,
)
from plain import Plain, assert_network, cosine
from rounds import assert_resumes, run_of
from sklearn.datasets import load_digits
from torch import Tensor

from fedssl import config as configuration
from fedssl.algorithms import featarc as module
from fedssl.algorithms.featarc import FeatARC
from fedssl.config import Config
from fedssl.data.dataset import Split
from fedssl.data.places import DEBIAN_FASHION
from fedssl.engines.local import LocalEngine
from fedssl.federation.server import Server
from fedssl.runs import reevaluate
from fedssl.runs.build import build_experiment

SIZES = (4, 7, 5, 6, 8)


def featarc(*words: str, objective: str = "simclr") -> Config:
    """From starts of their own, so that in most tests clients stay where they begin."""
    own = ("algorithm.name=featarc", "algorithm.start=apart", "algorithm.local_epochs=1")
    return siamese(objective, *own, *words)


def made(*words: str, objective: str = "simclr") -> tuple[LocalEngine, Server]:
    return engine_of(featarc(*words, objective=objective), made_split(), groups_of(*SIZES))


def models(engine: LocalEngine, server: Server) -> list[Tensor]:
    return [m.clone() for m in engine.algorithm.models(server)]


class Loop(Plain):
    """A plain client whose loss has the alignment term; group norm, so that images stay apart."""

    weight, wide = 0.0, False

    def receive(self, state: dict[str, Tensor], target: bool = False) -> None:
        super().receive(state, target)
        self.frozen = copy.deepcopy(self.network)

    def views(self, epoch: int, chosen: Tensor) -> tuple[Tensor, Tensor]:
        self.now = self.images[chosen].double() / 255
        return super().views(epoch, chosen)

    def loss(self, x1: Tensor, x2: Tensor) -> Tensor:
        with torch.no_grad():
            goal = self.frozen.towers[0].encoder(self.now)
            if not self.wide:
                goal = self.encoded(self.frozen, self.now)
        own = [cosine(self.encoded(self.network, x), goal).mean() for x in (x1, x2)]
        return super().loss(x1, x2) - self.weight * (own[0] + own[1]) / 2

    def encoded(self, network: Any, x: Tensor) -> Tensor:
        z: Tensor = network.towers[0](x)
        return network.predictors[0](z) if len(network.predictors) else z


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ("simclr", "objective.projector=32,96"),  # as wide as the encoder
        ("simclr", "objective.projector=32,16"),
        ("byol", "objective.projector=32,96 objective.predictor=24,96"),
        ("byol", "objective.projector=32,16 objective.predictor=24,16"),
    ],
)
def test_the_alignment_term_in_a_plain_loop(objective: str, words: str) -> None:
    config = featarc(
        *("encoder.norm=group", "algorithm.clusters=1", "algorithm.lambda=0.7", *words.split()),
        objective=objective,
    )
    engine, server = engine_of(config, made_split(), groups_of(9))
    assert engine.trainer.network.towers[0].encoder.features == 96
    loop = Loop(config, made_split(), range(9))
    loop.weight, loop.wide = 0.7, words.endswith("96")
    for round in range(2):
        loop.receive(engine.trainer.flat.named(server.weights.clone()))
        loss = loop.round(round)
        step(engine, server, round)
        assert float(server.log["loss"]) == pytest.approx(loss, rel=1e-9)
        assert_network(engine, server.weights, loop.network.state_dict())


def test_clusters_start_apart_and_clients_by_their_numbers() -> None:
    engine, server = made("algorithm.clusters=3")
    starts, n = models(engine, server), engine.trainer.flat.parameter_count
    assert torch.equal(starts[0], engine.trainer.initial)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert relative(starts[a][:n], starts[b][:n]) > 0.5
    assert all(torch.equal(s[n:], starts[0][n:]) for s in starts)  # statistics
    drawn = models(*made("algorithm.clusters=3", "encoder.initializer=torch"))  # smaller, all three
    for torchs, he in zip(drawn, starts, strict=True):
        assert torchs[:n].norm() < 0.9 * he[:n].norm()
    assert all(map(torch.equal, models(*made("algorithm.clusters=3")), starts))
    assert not torch.equal(models(*made("algorithm.clusters=3", "seed=1"))[1], starts[1])
    step(engine, server, 0)
    assert server.client_log["cluster"] == {0: 0, 1: 1, 2: 2, 3: 0, 4: 1}


@pytest.mark.parametrize("policy", ["average", "local"])
def test_a_client_goes_where_features_are_nearest_to_its_last_models(policy: str) -> None:
    """Cosines of encoders in evaluation of group norm: every image by itself."""
    words = (f"algorithm.norm_policy={policy}", "encoder.norm=group", "algorithm.clusters=3")
    engine, server = made(*words)
    step(engine, server, 0)
    found = models(engine, server)
    images = made_split().images[0][16:22].double() / 255  # of client 3
    client = engine.client(np.array([3]), 1, remember=False)
    sent = {str(j): m if server.shared is None else m[server.shared] for j, m in enumerate(found)}
    for blend in (0, 1, 2):
        noise = 0.02 * torch.randn(len(found[0]), generator=torch.Generator().manual_seed(blend))
        client.state["network"] = found[blend] + noise.double()
        near = []
        for weights in (
            client.state["network"],
            *(client.full_weights(sent[str(j)]) for j in range(3)),
        ):
            engine.trainer.load(weights)
            tower = engine.trainer.network.towers[0]
            with torch.no_grad():
                near.append(F.normalize(tower.encoder(images), dim=1))
        closest = int(np.argmax([float((near[0] * z).sum(1).mean()) for z in near[1:]]))
        assert engine.algorithm.assign(client, sent)[0] == closest == blend


@pytest.mark.parametrize("lambda_", [0, 1])
def test_means_are_over_the_members_that_are_there(lambda_: int) -> None:
    """Unequal sizes, two clients absent, and each counts as much as any other."""
    engine, server = made(f"algorithm.lambda={lambda_}", "server.lr=0.5", "schedule=constant")
    step(engine, server, 0)
    before = models(engine, server)
    kept = engine.states.on_host(1)
    changes: dict[int, list[Tensor]] = {0: [], 1: []}
    for k in (0, 2, 3):
        client = engine.client(np.array([k]), 1, remember=False)
        reply = engine.algorithm.train(client, {"0": before[0], "1": before[1]})
        own = int(reply["members"].argmax())
        assert own == k % 2 and not reply["change"][1 - own].any()
        changes[own].append(reply["change"][own])
        last = client.state["network"]  # what the next assignment goes by
        assert relative(last, before[own] + reply["change"][own]) < 1e-12
    assert [len(changes[j]) for j in (0, 1)] == [2, 1]
    server.client_log.clear()
    step(engine, server, 1, 0, 2, 3)
    assert server.client_log["cluster"] == {0: 0, 2: 0, 3: 1}
    for j, weights in enumerate(models(engine, server)):
        expected = before[j] + 0.5 * torch.stack(changes[j]).mean(0)
        n = engine.trainer.flat.parameter_count
        assert relative(weights[:n], expected[:n]) < 1e-12
        assert relative(weights[:n], before[j][:n]) > 1e-4
    assert all(torch.equal(kept[name], leaf) for name, leaf in engine.states.on_host(1).items())


@pytest.mark.parametrize(
    ("words", "clusters"),
    [
        ("server.momentum=0.9", 2),
        ("server.optimizer=adam server.lr=0.01", 2),
        ("", 1),
        ("algorithm.norm_policy=local server.momentum=0.5", 1),
        ("algorithm.norm_policy=reset", 1),
    ],
)
def test_each_cluster_is_a_federation_of_its_own(words: str, clusters: int) -> None:
    given = ("algorithm.lambda=0", f"algorithm.clusters={clusters}", *words.split())
    engine, server = made(*given, objective="byol")
    starts = models(engine, server)
    train(engine, server, 3)
    assert server.client_log["cluster"] == {k: k % clusters for k in range(5)}
    fedavg = ("algorithm.local_epochs=1", "algorithm.weight=uniform", *words.split())
    for number, found in enumerate(models(engine, server)):
        config, members = siamese("byol", *fedavg), range(number, 5, clusters)
        other, alone = engine_of(config, made_split(), groups_of(*SIZES))
        alone.weights = starts[number]
        for round in range(3):
            step(other, alone, round, *members)
        assert relative(found, alone.weights) < 1e-9
        for name, value in other.states.on_host(number).items():
            assert relative(engine.states.on_host(number)[name].double(), value.double()) < 1e-8


def test_an_empty_cluster_keeps_its_model() -> None:
    engine, server = made("server.momentum=0.9", "client.lr=0.02")
    step(engine, server, 0)
    before = models(engine, server)
    for round in (1, 2):
        step(engine, server, round, 0, 2)
        after = models(engine, server)
        assert torch.equal(after[1], before[1]) and not torch.equal(after[0], before[0])
    assert server.warnings == ["clusters: 0 has 0 2 4, 1 has 1 3"]
    step(engine, server, 3)
    assert not torch.equal(models(engine, server)[1], before[1])


@pytest.mark.parametrize("objective", ["byol", "moco"])
def test_who_changes_cluster_leaves_target_and_memory_behind(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, server = made("algorithm.lambda=0", objective=objective)
    step(engine, server, 0)
    received = {str(j): m for j, m in enumerate(models(engine, server))}
    targets = []
    for chosen in (0, 1):
        client = engine.client(np.array([0]), 1, remember=False)
        monkeypatch.setattr(FeatARC, "assign", lambda *_, chosen=chosen: (chosen, None))
        fresh = engine.client(np.array([0]), 1, remember=False)
        for name in ("target", "memory"):
            fresh.state.pop(name, None)
        fresh.train_from(received[str(chosen)], fresh.state)
        engine.algorithm.train(client, received)
        targets.append(torch.equal(client.state["target"], fresh.state["target"]))
        if objective == "moco":
            kept, new = (int(c.state["memory"]["seen"]) for c in (client, fresh))
            assert (kept == new) == (chosen == 1)
    assert targets == [False, True]


@pytest.mark.parametrize("policy", ["average", "local", "reset"])
def test_a_clients_own_part_is_left_out_of_its_clusters_model(policy: str) -> None:
    """Clusters of three and two, then of two and one; the others' models by hand."""
    words = ("client.lr=0.001", f"algorithm.norm_policy={policy}")  # so low that nobody moves
    engine, server = made("algorithm.leave_out=true", *words)
    n, shared = engine.trainer.flat.parameter_count, server.shared

    def others(k: int, cluster: int) -> Tensor:
        client = engine.client(np.array([k]), server.round + 1, remember=False)
        models = engine.algorithm.models(server)
        sent = {str(j): m if shared is None else m[shared] for j, m in enumerate(models)}
        sent |= engine.algorithm.latest(server)
        return client.full_weights(engine.algorithm.others(client, sent, cluster))[:n]

    def trained(*ids: int) -> Tensor:
        return torch.stack([engine.states.on_host(k)["network"][:n] for k in ids]).mean(0)

    def same(found: Tensor, expected: Tensor) -> bool:
        kept = engine.trainer.kept
        free = torch.ones(n, dtype=torch.bool)
        if kept is not None:
            free[kept[kept < n]] = False
        return relative(found[free], expected[free]) < 1e-12

    step(engine, server, 0)
    assert same(others(0, 0), trained(2, 4)) and same(others(4, 0), trained(0, 2))
    assert same(others(1, 1), trained(3)) and same(others(0, 1), trained(1, 3))
    step(engine, server, 1, 0, 2, 3)
    assert same(others(0, 0), trained(2)) and same(others(2, 0), trained(0))
    assert same(others(3, 1), trained(3))  # alone: nothing is left without it
    assert same(others(4, 0), trained(0, 2)) and same(others(1, 1), trained(3))  # not of this step


def test_a_part_can_be_left_out_of_plain_means_only() -> None:
    with refused("algorithm.leave_out", True):
        made("algorithm.leave_out=true", "server.momentum=0.5")


GROUPS = (0, 1, 0, 0, 0, 1, 1, 1)  # two of them do not begin with their like: i mod 2
EACH = 220


def planted() -> Split:
    """Digits, all different, as they are for some clients and a quarter turned for the others."""
    images = torch.from_numpy(load_digits().images[: EACH * len(GROUPS)] * 15).to(torch.uint8)
    parts = images[:, None].split(EACH)
    return Split((torch.cat([x.rot90(g, (2, 3)) for x, g in zip(parts, GROUPS, strict=True)]),))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_planted_groups_are_found_and_kept(norm: str, seed: int) -> None:
    """Four clients a cluster, one of them of the other group, from one network.

    Let a round move a client's model by its group's step and noise σ, and the groups' steps be D
    apart. The wrong cluster's mean is then at 9/16 D² + 3/4 σ² from its model, the right one's at
    1/16 D² + 5/4 σ²: it goes where it belongs if D > σ. A step on all images keeps σ small.
    """
    words = (
        *("algorithm.start=alike", "objective.projector=96,96", f"encoder.norm={norm}"),
        *(f"algorithm.batch={EACH}", "augment.name=flip", "client.lr=0.01", "client.momentum=0"),
        *("client.weight_decay=0", "schedule=constant", "precision=fp32", f"seed={seed}"),
    )
    engine, server = engine_of(featarc(*words), planted(), groups_of(*[EACH] * len(GROUPS)))
    path, logged, warned = [], [], list[str]()
    for round in range(4):
        server.clear_log()
        step(engine, server, round)
        path.append(tuple(int(c) for c in server.client_log["cluster"].values() if c is not None))
        logged.append([float(server.log[name]) for name in ("moves", "members_0", "members_1")])
        warned += server.warnings
    assert path == [(0, 1) * 4, *[GROUPS] * 3]
    assert logged == [[0, 4, 4], [2, 4, 4], [0, 4, 4], [0, 4, 4]]
    assert warned == [
        "clusters: 0 has 0 2 4 6, 1 has 1 3 5 7",
        "clusters: 0 has 0 2 3 4, 1 has 1 5 6 7",
    ]


@pytest.mark.slow
@pytest.mark.skipif(not DEBIAN_FASHION.is_dir(), reason="needs dataset-fashion-mnist")
@pytest.mark.parametrize("seed", [0, 1])
def test_groups_are_found_with_the_papers_optimizer_and_batches(seed: int) -> None:
    """The trial of docs/papers/decssl.md: three clients' images stand upside down."""
    words = (
        *("data.labels=12000", "data.size=16", "partition.clients=6", "partition.source=rotation"),
        *("partition.sources=2", "algorithm.batch=256", "algorithm.local_epochs=5", "rounds=3"),
        *("evaluate.protocols=knn", "engine.threads=1", f"seed={seed}"),
    )
    recipe = configuration.read_recipe("decssl/small/featarc/skewed")
    session = build_experiment(configuration.resolve(recipe, words))
    assert session.config.client.optimizer == "adam" and session.config.client.lr == 1e-3
    for round in range(2):
        session.server.clear_log()
        step(session.engine, session.server, round)
        chosen = [int(c) for c in session.server.client_log["cluster"].values() if c is not None]
        assert chosen == ([0, 0, 0, 1, 1, 1] if round else [0, 1] * 3)


@pytest.mark.parametrize(
    ("names", "before", "after"),
    [
        ([str(k) for k in range(50)], "0 has 25, 1 has 25", "0 has 0, 1 has 50"),
        (["north", "south", "7"], "0 has north 7, 1 has south", "0 has none, 1 has north south 7"),
    ],
)
def test_clusters_are_shown_when_they_change(names: list[str], before: str, after: str) -> None:
    engine, server = made()
    server.client_names = names
    for number in (0, 1, 1):
        server.client_log["cluster"] = {k: float(k % 2 or number) for k in range(len(names))}
        engine.algorithm.show_clusters(server)
    assert server.warnings == [f"clusters: {before}", f"clusters: {after}"]


def test_a_masked_autoencoders_visible_features_are_aligned_with_the_whole_images() -> None:
    """The targets and the term of one batch, by the encoder itself."""
    words = ("objective.name=mae", "encoder.name=vit-tiny", "encoder.patch=2", "augment.name=none")
    steps = ("algorithm.name=featarc", "algorithm.clusters=1", "algorithm.lambda=0.7")
    engine, server = engine_of(
        settings(*words, *steps, "algorithm.local_epochs=1", "algorithm.batch=6"),
        made_split(),
        groups_of(6),
    )
    client = engine.client(np.array([0]), 0, remember=False)
    engine.trainer.load(server.weights)
    encoder = engine.trainer.network.towers[0].encoder
    images = made_split().images[0][:6].double() / 255
    with torch.no_grad():
        whole = encoder(images)
    goal = module.compute_targets(client, server.weights)
    assert relative(goal, whole) < 1e-12
    batch = client.encode_step(0)
    visible, rebuilt, pixels = (e.detach() for e in batch.encodings)
    assert visible.shape == whole.shape and relative(visible, whole) > 1e-3
    algorithm = engine.algorithm
    expected = F.mse_loss(rebuilt, pixels) - 0.7 * cosine(visible, goal).mean()
    assert float(algorithm.loss(batch, goal)) == pytest.approx(float(expected), rel=1e-12)
    step(engine, server, 0)
    assert relative(server.weights, engine.trainer.initial) > 1e-4


@pytest.mark.parametrize("objective", ["deepcluster", "supervised", "rotation"])
def test_other_objectives_are_aligned_too(objective: str) -> None:
    results = []
    for lambda_ in (0, 0.5, 0.5):
        config = settings(
            *(f"objective.name={objective}", "algorithm.name=featarc", "algorithm.local_epochs=2"),
            *(f"algorithm.lambda={lambda_}", "algorithm.batch=4", "client.lr=0.05"),
        )
        results.append(train(*engine_of(config, made_split(), groups_of(*SIZES)), 2))
    assert bool(torch.isfinite(results[1]).all()) and torch.equal(results[1], results[2])
    assert relative(results[1], results[0]) > 1e-4


@pytest.mark.parametrize("policy", ["average", "local"])
def test_each_client_is_judged_by_its_clusters_model(policy: str) -> None:
    words = (f"algorithm.norm_policy={policy}", "cohort.size=null")
    session = build_experiment(run_of("featarc", *words))
    engine = session.engine
    step(engine, session.server, 0)
    results = session.evaluator.evaluate_clients(session.models)
    found, scores = models(engine, session.server), []
    for k in range(5):
        expected = found[k % 2]
        if policy == "local":
            expected[session.trainer.kept] = engine.states[k]["norm"]
        own = session.models.personal_model(k)
        assert torch.equal(own, expected)
        scores.append(session.evaluator._score_clients(expected)[k])
    assert results["per-client_personal_top1"] == pytest.approx(np.nanmean(scores))
    assert results.keys() >= {"per-client_global_top1", "per-client_personal_worst"}


def test_a_run_logs_clusters_resumes_to_the_same_and_can_be_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = assert_resumes(run_of("featarc", "server.momentum=0.5"), tmp_path, monkeypatch)
    assert held.keys() >= {"server/clusters/1/weights", "rule/momentum"}
    note = json.loads((tmp_path / "whole/encoder.json").read_text())
    assert note["model"].startswith("global: that of cluster 0")
    lines = timeless(tmp_path / "whole")
    assert all(len(line["cluster"]) == 4 for line in lines)
    assert all(set(line["cluster"].values()) <= {0, 1} for line in lines)
    traffic = lines[0]["exchanges"]["train"]
    size = 4 * len(held["weights"])  # of a model; each way one for each cluster
    assert traffic["down"] == 4 * 2 * size and abs(traffic["up"] - 4 * 2 * size) < 100
    summary = json.loads((tmp_path / "whole/summary.json").read_text())
    again = reevaluate.evaluate(tmp_path / "whole", ["evaluate.protocols=per-client"])
    shown = again["result, personal"]["per-client_top1"]
    assert shown == pytest.approx(summary["per-client_personal_top1"])
    words = ["data.labels=40", "evaluate.protocols=knn"]  # on other data there is one client
    assert "knn_top1" in reevaluate.evaluate(tmp_path / "whole", words)["result, personal"]


def test_images_that_are_looked_at_by_themselves_go_in_passes_of_any_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unlike those of which batch norm sees a batch as in training."""
    engine, server = made("algorithm.batch=2", "encoder.norm=batch")
    step(engine, server, 0)
    client = engine.client(np.array([4]), 1, remember=False)  # of 8 images
    seen: list[int] = []
    encoder = engine.trainer.network.towers[0].encoder
    encoder.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    whole, goal = (
        look(client, server.weights) for look in (module.compute_features, module.compute_targets)
    )
    monkeypatch.setattr("fedssl.data.dataset.PIXELS_PER_PASS", 3 * 8 * 8)
    assert relative(module.compute_features(client, server.weights), whole) < 1e-12
    assert torch.equal(module.compute_targets(client, server.weights), goal)
    assert seen == [8, 2, 2, 2, 2, 3, 3, 2, 2, 2, 2, 2]
