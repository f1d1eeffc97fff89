"""FeatARC: alignment (Algorithm 2), assignment and a mean for each cluster (Algorithm 1)."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import engine_of, groups_of, made_split, relative, settings, siamese, step, timeless
from plain import Plain, cosine
from rounds import assert_compiled_is_plain, assert_sessions_agree, run_and_resume
from safetensors.torch import load_file
from torch import Tensor

from fedssl import config as configuration
from fedssl.algorithms import featarc as module
from fedssl.algorithms.featarc import FeatARC
from fedssl.algorithms.fedavg import FedAvg
from fedssl.config import AlgorithmParams, Config
from fedssl.data.dataset import Split
from fedssl.engines.local import LocalEngine
from fedssl.federation.algorithm import build_algorithm
from fedssl.federation.server import Server
from fedssl.objectives.base import Objective
from fedssl.runs import checkpoint, reevaluate
from fedssl.runs.build import build_experiment
from fedssl.util.errors import UserError

SIZES = (4, 7, 5, 6, 8)


def featarc(*words: str, objective: str = "simclr") -> Config:
    """From starts of their own, so that in most tests clients stay where they begin."""
    own = ("algorithm.name=featarc", "algorithm.start=apart", "algorithm.local_epochs=1")
    return siamese(objective, *own, *words)


def made(*words: str, objective: str = "simclr") -> tuple[LocalEngine, Server]:
    return engine_of(featarc(*words, objective=objective), made_split(), groups_of(*SIZES))


def models(engine: LocalEngine, server: Server) -> list[Tensor]:
    assert isinstance(engine.algorithm, FeatARC)
    return [m.clone() for m in engine.algorithm.models(server)]


class Unweighted(FedAvg):
    """FedAvg in which a client counts as much as any other."""

    def __init__(self, params: AlgorithmParams, objective: Objective) -> None:
        super().__init__(params, objective)
        self.weight = "uniform"


@pytest.mark.parametrize(
    "words",
    ["", "algorithm.norm_policy=local server.momentum=0.5", "algorithm.norm_policy=reset"],
)
def test_one_cluster_without_alignment_is_fedavg(words: str) -> None:
    alone = ("algorithm.clusters=1", "algorithm.lambda=0", *words.split())
    for sizes in (SIZES, (6, 6, 6)):  # of one size, FedAvg's own weights are equal
        config = featarc(*alone, objective="byol")
        engine, server = engine_of(config, made_split(), groups_of(*sizes))
        plain_words = ("algorithm.local_epochs=1", *words.split())
        other, plain = engine_of(siamese("byol", *plain_words), made_split(), groups_of(*sizes))
        if sizes == SIZES:
            other.algorithm = Unweighted(other.algorithm.params, other.algorithm.objective)
        for round in range(2):
            step(engine, server, round)
            step(other, plain, round)
            assert relative(server.weights, plain.weights) < 1e-12
            assert float(server.log["loss"]) == pytest.approx(float(plain.log["loss"]), rel=1e-12)
            assert sizes != SIZES or torch.equal(server.weights, plain.weights)
        for name, value in other.states.on_host(1).items():
            assert relative(engine.states.on_host(1)[name].double(), value.double()) < 1e-10


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
    assert engine.trainer.network.towers[0].encoder.features == 96  # type: ignore[union-attr]
    loop = Loop(config, made_split(), range(9))
    loop.weight, loop.wide = 0.7, words.endswith("96")
    for round in range(2):
        loop.receive(engine.trainer.flat.named(server.weights.clone()))
        loss = loop.round(round)
        step(engine, server, round)
        assert float(server.log["loss"]) == pytest.approx(loss, rel=1e-9)
        after = engine.trainer.flat.named(server.weights)
        for name, tensor in loop.network.state_dict().items():
            assert (after[name] - tensor).norm() < 1e-9 * tensor.norm() + 1e-11, name


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
            engine.trainer.load(weights)  # type: ignore[arg-type]
            tower: Any = engine.trainer.network.towers[0]
            with torch.no_grad():
                near.append(F.normalize(tower.encoder(images), dim=1))
        closest = int(np.argmax([float((near[0] * z).sum(1).mean()) for z in near[1:]]))
        assert engine.algorithm.assign(client, sent)[0] == closest == blend  # type: ignore[attr-defined]


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
        reply: Any = engine.algorithm.train(client, {"0": before[0], "1": before[1]})  # type: ignore[attr-defined]
        own = int(reply["members"].argmax())
        assert own == k % 2 and not reply["change"][1 - own].any()
        changes[own].append(reply["change"][own])
        last: Any = client.state["network"]  # what the next assignment goes by
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


@pytest.mark.parametrize("rule", ["server.momentum=0.9", "server.optimizer=adam server.lr=0.01"])
def test_each_cluster_is_a_federation_of_its_own(rule: str) -> None:
    engine, server = made("algorithm.lambda=0", *rule.split(), objective="byol")
    starts = models(engine, server)
    for round in range(3):
        step(engine, server, round)
    assert server.client_log["cluster"] == {k: k % 2 for k in range(5)}
    for number, members in enumerate(((0, 2, 4), (1, 3))):
        config = siamese("byol", "algorithm.local_epochs=1", *rule.split())
        other, alone = engine_of(config, made_split(), groups_of(*SIZES))
        other.algorithm = Unweighted(other.algorithm.params, other.algorithm.objective)
        alone.weights = starts[number]
        for round in range(3):
            step(other, alone, round, *members)
        assert relative(models(engine, server)[number], alone.weights) < 1e-9


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
        engine.algorithm.train(client, received)  # type: ignore[attr-defined]
        targets.append(torch.equal(client.state["target"], fresh.state["target"]))  # type: ignore[arg-type]
        if objective == "moco":
            kept, new = (int(cast(Any, c.state["memory"])["seen"]) for c in (client, fresh))
            assert (kept == new) == (chosen == 1)
    assert targets == [False, True]


GROUPS = (0, 1, 0, 0, 0, 1, 1, 1)  # two of them do not begin with their like: i mod 2
EACH = 220


def planted() -> Split:
    """Digits, all different, as they are for some clients and a quarter turned for the others."""
    from sklearn.datasets import load_digits

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
    path = []
    for round in range(4):
        server.client_log.clear()
        step(engine, server, round)
        path.append(tuple(int(c) for c in server.client_log["cluster"].values() if c is not None))
    assert path == [(0, 1) * 4, *[GROUPS] * 3]
    assert server.warnings == [
        "clusters: 0 has 0 2 4 6, 1 has 1 3 5 7",
        "clusters: 0 has 0 2 3 4, 1 has 1 5 6 7",
    ]


@pytest.mark.parametrize(
    ("names", "clients", "shown"),
    [
        ([], 50, ["0 has 25, 1 has 25", "0 has 0, 1 has 50"]),
        (
            ["north", "south", "7"],
            3,
            ["0 has north 7, 1 has south", "0 has none, 1 has north south 7"],
        ),
    ],
)
def test_clusters_are_shown_when_they_change(
    names: list[str], clients: int, shown: list[str]
) -> None:
    engine, server = made()
    algorithm: Any = engine.algorithm
    server.client_names = names
    for number in (0, 1, 1):
        server.client_log["cluster"] = {k: float(k % 2 or number) for k in range(clients)}
        algorithm.show_clusters(server)
    assert server.warnings == [f"clusters: {each}" for each in shown]


@pytest.mark.parametrize("objective", ["deepcluster", "supervised", "rotation"])
def test_other_objectives_are_aligned_too(objective: str) -> None:
    results = []
    for lambda_ in (0, 0.5, 0.5):
        config = settings(
            *(f"objective.name={objective}", "algorithm.name=featarc", "algorithm.local_epochs=2"),
            *(f"algorithm.lambda={lambda_}", "algorithm.batch=4", "client.lr=0.05"),
        )
        engine, server = engine_of(config, made_split(), groups_of(*SIZES))
        for round in range(2):
            step(engine, server, round)
        results.append(server.weights)
    assert bool(torch.isfinite(results[1]).all()) and torch.equal(results[1], results[2])
    assert relative(results[1], results[0]) > 1e-4


def test_what_has_no_projection_cannot_be_aligned() -> None:
    mae = ("objective.name=mae", "encoder.name=vit-tiny", "encoder.patch=4")
    config = settings("algorithm.name=featarc", *mae, "algorithm.lambda=0")
    build_algorithm(config)
    with pytest.raises(UserError) as error:
        build_algorithm(settings("algorithm.name=featarc", *mae))
    assert error.value.key == "algorithm.lambda"


SMALL = (
    *("rounds=3", "data.size=8", "data.labels=80", "partition.name=iid", "partition.clients=5"),
    *("cohort.size=4", "encoder.norm=batch", "algorithm.local_epochs=1", "algorithm.batch=6"),
    *("server.optimizer=sgd", "server.lr=1", "client.lr=0.05", "client.momentum=0.9"),
    *("evaluate.protocols=per-client,knn", "evaluate.baselines=[]", "engine.threads=1"),
    *("checkpoint.seconds=0", "algorithm.name=featarc", "objective.name=byol"),
    *("objective.projector=32,16", "objective.predictor=24,16"),
)


def small(*words: str) -> Config:
    return configuration.resolve(configuration.read_recipe(None), [*SMALL, *words])


@pytest.mark.parametrize("policy", ["average", "local"])
def test_each_client_is_judged_by_its_clusters_model(policy: str) -> None:
    session = build_experiment(small(f"algorithm.norm_policy={policy}", "cohort.size=null"))
    engine: Any = session.engine
    step(engine, session.server, 0)
    results = session.evaluator.evaluate_clients(session.models)
    found, scores = models(engine, session.server), []
    for k in range(5):
        expected = found[k % 2]
        if policy == "local":
            expected[session.trainer.kept] = engine.states[k]["norm"]
        own = session.models.personal_model(k)
        assert own is not None and torch.equal(own, expected)
        scores.append(session.evaluator._score_clients(expected)[k])
    assert results["per-client_personal_top1"] == pytest.approx(np.nanmean(scores))
    assert results.keys() >= {"per-client_global_top1", "per-client_personal_worst"}


def test_a_run_logs_clusters_resumes_to_the_same_and_can_be_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small("server.momentum=0.5")
    summary = run_and_resume(config, tmp_path, monkeypatch)
    note = json.loads((tmp_path / "whole/encoder.json").read_text())
    assert note["model"].startswith("global: that of cluster 0")
    whole, cut = (load_file(tmp_path / name / checkpoint.FILE) for name in ("whole", "cut"))
    assert whole.keys() == cut.keys() >= {"server/clusters/1/weights", "rule/momentum"}
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    lines = [timeless(tmp_path / name) for name in ("whole", "cut")]
    assert lines[0] == lines[1]
    assert all(len(line["cluster"]) == 4 for line in lines[0])
    assert all(set(line["cluster"].values()) <= {0, 1} for line in lines[0])
    size = 4 * len(whole["weights"])  # of a model; each way one for each cluster
    assert lines[0][0]["exchanges"]["train"]["down"] == 4 * 2 * size
    assert abs(lines[0][0]["exchanges"]["train"]["up"] - 4 * 2 * size) < 100
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
    encoder = cast(Any, engine.trainer.network.towers[0]).encoder
    encoder.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    whole, goal = (
        look(client, server.weights) for look in (module.compute_features, module.compute_targets)
    )
    monkeypatch.setattr("fedssl.data.dataset.PIXELS_PER_PASS", 3 * 8 * 8)
    assert relative(module.compute_features(client, server.weights), whole) < 1e-12
    assert torch.equal(module.compute_targets(client, server.weights), goal)
    assert seen == [8, 2, 2, 2, 2, 3, 3, 2, 2, 2, 2, 2]


def test_compiled_steps_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedssl.training import compiled

    monkeypatch.setattr(compiled, "RARE", 0)
    assert_compiled_is_plain(
        featarc("algorithm.clusters=1", "algorithm.batch=4", "algorithm.local_epochs=2"),
        monkeypatch,
    )


@pytest.mark.parametrize("words", ["", "cohort.size=3 algorithm.norm_policy=local"])
def test_both_engines_agree(words: str, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from far import BYOL, far_session
    from far import small as far_small

    config = far_small(*BYOL, "algorithm.name=featarc", "server.momentum=0.5", *words.split())
    near, (far, _) = build_experiment(config), far_session(config, tmp_path)
    assert_sessions_agree(near, far)
    assert near.server.client_log["cluster"] and "clusters" in near.server.state
    mine, other = near.models.personal_models(5), far.models.personal_models(5)
    assert mine.keys() == other.keys() and len(mine) >= 3
    assert all(relative(other[k], mine[k]) < 1e-10 for k in mine)


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("algorithm.clusters=6", "algorithm.clusters", 6),  # of 5 clients
        ("cohort.average=median", "cohort.average", "median"),
        ("privacy.noise=1", "privacy.noise", 1),
    ],
)
def test_bad_settings_are_refused(words: str, key: str, value: object) -> None:
    with pytest.raises(UserError) as error:
        build_experiment(small(*words.split()))
    assert error.value.key == key and error.value.value == value


def test_secure_sums_are_enough_for_one_cluster(tmp_path: Path) -> None:
    """Of several, the sum of one with a single client would be that client's change."""
    pytest.importorskip("flwr")
    from far import far_session, go
    from far import small as far_small

    words = ("objective.name=simclr", "algorithm.name=featarc", "algorithm.local_epochs=1")
    with pytest.raises(UserError, match="a group may be one client"):
        far_session(far_small(*words, "privacy.secure=true"), tmp_path / "refused")
    words += ("algorithm.clusters=1",)
    plain, _ = far_session(far_small(*words), tmp_path / "plain")
    secure, _ = far_session(far_small(*words, "privacy.secure=true"), tmp_path / "secure")
    go(plain, 2)
    go(secure, 2)
    ours, theirs = (s.server.weights for s in (plain, secure))
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-8)
    assert plain.server.client_log and not secure.server.client_log
