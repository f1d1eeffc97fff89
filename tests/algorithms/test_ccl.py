"""CCL: models averaged, banks routed (Eq. 2), negatives fused (Eq. 3), neighbours matched."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import engine_of, groups_of, made_split, replace_task, siamese, step
from plain import Plain, flat_params, mean_state
from torch import Tensor

from fedssl import config
from fedssl.algorithms.ccl import CCL, matching
from fedssl.algorithms.fedavg import FedAvg
from fedssl.algorithms.instahide import Key, encrypt
from fedssl.data.random import choose, key
from fedssl.engines.local import LocalEngine
from fedssl.federation.client import Client
from fedssl.federation.cohort import Cohort
from fedssl.federation.server import Server
from fedssl.federation.task import client_task, update_like
from fedssl.runs import checkpoint, split
from fedssl.runs.build import build_experiment
from fedssl.runs.loop import run
from fedssl.runs.validate import list_warnings
from fedssl.training import compiled
from fedssl.util.errors import UserError
from fedssl.util.trees import Tree, flatten

SIZES = (5, 9, 4)


@pytest.fixture(autouse=True)
def fixed_keys(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """InstaHide's keys as a function of client and round, unless a test is about their source."""
    if "system" not in request.node.name:
        monkeypatch.setattr(CCL, "secret", fixed)


def fixed(self: CCL, client: Client) -> np.random.Generator:
    return np.random.default_rng([client.id, client.round])


def ccl(*words: str) -> config.Config:
    return siamese("moco", "algorithm.name=ccl", "algorithm.neighbours=3", *words)


def made(*words: str, sizes: tuple[int, ...] = SIZES) -> tuple[LocalEngine, Server]:
    return engine_of(ccl(*words), made_split(), groups_of(*sizes))


def banks(server: Server) -> dict[str, Tensor]:
    return server.state.get("banks", {})  # type: ignore[return-value]


class FedMoCo(FedAvg):
    """FedAvg that averages momentum models as it does main ones."""

    def round(self, server: Server, cohort: Cohort) -> None:
        start = server.state.get("momentum", server.weights[: server.flat.parameter_count])
        update = cohort.mean(self.train, server.model, start)
        server.apply(update)
        server.state["momentum"] = start + update["momentum"]

    @client_task(
        seen="mean",
        reveals="update",
        reply=lambda _, trainer: {
            **update_like(trainer),
            "momentum": trainer.initial[: trainer.flat.parameter_count],
        },
    )
    def train(  # type: ignore[override]
        self, client: Client, received: Tensor, momentum: Tensor
    ) -> dict[str, Tree]:
        client.state["target"] = momentum
        reply = client.train(received)
        return {**reply, "momentum": client.state["target"] - momentum}  # type: ignore[operator]


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("algorithm.remote=off algorithm.lambda=0", SIZES),
        ("algorithm.remote=both algorithm.lambda=0", (11,)),
        ("algorithm.remote=only algorithm.lambda=0 server.lr=0.5", (11,)),
    ],
    ids=["off", "no other client", "no other client, remote only"],
)
def test_without_remote_features_and_matching_it_is_fedmoco(
    words: str, sizes: tuple[int, ...]
) -> None:
    engine, server = made(*words.split(), sizes=sizes)
    plain_words = [w for w in words.split() if not w.startswith("algorithm")]
    reference, other = engine_of(siamese("moco", *plain_words), made_split(), groups_of(*sizes))
    reference.algorithm = FedMoCo(reference.algorithm.params, reference.algorithm.objective)
    for round in range(3):
        step(engine, server, round)
        step(reference, other, round)
        assert torch.equal(server.weights, other.weights)
        assert torch.equal(server.state["momentum"], other.state["momentum"])  # type: ignore[arg-type]
        assert torch.equal(server.log["loss"], other.log["loss"])
    assert not torch.equal(server.state["momentum"], server.weights[: server.flat.parameter_count])  # type: ignore[arg-type]
    for k in range(len(sizes)):
        for name, tensor in reference.states.on_host(k).items():
            assert torch.equal(engine.states.on_host(k)[name], tensor)


class Loop(Plain):
    """A plain client that contrasts and matches with what others sent."""

    remote = torch.zeros(0, 16, dtype=torch.float64)
    mode, weight, number, now = "both", 0.0, 0, 0

    def contrast(self, query: Tensor, keys: Tensor) -> Tensor:
        local, p = self.queue, self.config.algorithm
        both = torch.cat((self.remote, local))
        alone = self.mode == "only" and len(self.remote)
        self.queue = self.remote if alone else torch.cat((local, self.remote))
        loss = super().contrast(query, keys)
        self.queue = local
        if self.weight:
            state = key(self.config.seed, "neighbours", self.now, self.client, self.number // 2)
            chosen = both[torch.from_numpy(choose(state, len(both), p.features))]  # type: ignore[attr-defined]
            if len(chosen) > p.neighbours:  # type: ignore[attr-defined]
                query = F.normalize(query, dim=1)
                loss = loss + self.weight * slow(query, chosen, p.neighbours, p.temperature)  # type: ignore[attr-defined]
        self.number += 1
        return loss

    def bank(self, round: int) -> Tensor:
        """Features of encrypted images, by the momentum model, in batches of four."""
        generator = np.random.default_rng([self.client, round])
        count, p = len(self.images), self.config.algorithm
        own = choose(key(self.config.seed, "share", round, self.client), count, p.features)  # type: ignore[attr-defined]
        rows = []
        for part in np.array_split(own, max(1, len(own) // p.batch // 4)):  # type: ignore[operator]
            drawn = Key.draw(part, count, p.mix, self.images.shape[1:], generator)  # type: ignore[attr-defined]
            with torch.no_grad():
                hidden = encrypt(self.images, drawn, torch.float64)
                rows.append(F.normalize(self.target[0]((hidden + 1) / 2), dim=1))  # type: ignore[operator]
        return torch.cat(rows)


@pytest.mark.parametrize(
    "words",
    [
        "algorithm.remote=off algorithm.lambda=0",
        "algorithm.remote=both algorithm.lambda=0",
        "algorithm.remote=only algorithm.lambda=0",
        # A queue that never wraps has its keys in the order in which they came, as the loop's.
        "algorithm.remote=both algorithm.lambda=0.3 objective.queue=100",
        "algorithm.remote=only algorithm.lambda=0.3 objective.queue=100",
    ],
)
def test_it_is_what_a_plain_loop_would_do(words: str) -> None:
    """CL, CL+FF, CL+FF+NM and the further reducing variant, for three rounds."""
    settings = ccl(*words.split(), "algorithm.features=8")
    engine, server = engine_of(settings, made_split(), groups_of(*SIZES))
    starts = np.cumsum((0, *SIZES))
    loops = [
        Loop(settings, made_split(), range(int(a), int(b)), client=k)
        for k, (a, b) in enumerate(pairwise(starts))
    ]
    p: Any = settings.algorithm
    held: list[Tensor] = []
    for round in range(3):
        step(engine, server, round)
        for loop in loops:
            loop.mode, loop.weight, loop.number, loop.now = p.remote, p.lambda_, 0, round
            if held and p.remote != "off":
                loop.remote = torch.cat([b for k, b in enumerate(held) if k != loop.client])
            loop.round(round)
        held = [loop.bank(round) for loop in loops]
        if p.remote != "off":
            for k, bank in enumerate(held):
                torch.testing.assert_close(banks(server)[str(k)], bank, rtol=1e-8, atol=1e-10)
        mean = mean_state([loop.network.state_dict() for loop in loops], list(SIZES))
        targets = [dict(loop.target.named_parameters()) for loop in loops]
        slow_mean = mean_state([{n: t.detach() for n, t in d.items()} for d in targets], [*SIZES])
        for name, tensor in mean.items():
            ours = engine.trainer.flat.named(server.weights)[name]
            torch.testing.assert_close(ours, tensor, rtol=1e-8, atol=1e-10)
        for loop in loops:
            loop.receive(mean)
            loop.target.load_state_dict(slow_mean, strict=False)
        torch.testing.assert_close(
            server.state["momentum"], flat_params(loops[0].target), rtol=1e-8, atol=1e-10
        )
    assert bool(banks(server)) == (p.remote != "off")


class Watched:
    """What each client got, round by round, and what it gave."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.got: list[tuple[int, int, Tensor]] = []
        self.gave: dict[tuple[int, int], Tensor] = {}
        train, share = CCL.train, CCL.share

        def seen_train(ccl: CCL, client: Client, *payload: Any) -> Any:
            self.got.append((client.round, client.id, payload[-1].clone()))
            return train(ccl, client, *payload)

        def seen_share(ccl: CCL, client: Client) -> Any:
            reply: Any = share(ccl, client)
            self.gave[client.round, client.id] = reply["features"]
            return reply

        replace_task(patch, CCL, "train", seen_train)
        replace_task(patch, CCL, "share", seen_share)

    def received(self, round: int) -> dict[int, Tensor]:
        return {client: remote for r, client, remote in self.got if r == round}


def test_a_client_gets_all_banks_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eq. 2, with a client that sits out and one that joins late; more than 10 for their order."""
    watched = Watched(monkeypatch)
    engine, server = made("algorithm.mix=2", sizes=(3,) * 12)
    cohorts = [(2, 10, 1), (10, 2, 11), (0, 2)]
    last: dict[int, Tensor] = {}
    for round, ids in enumerate(cohorts):
        step(engine, server, round, *ids)
        got = watched.received(round)
        assert sorted(got) == sorted(ids)
        for client, remote in got.items():
            others = [last[k] for k in sorted(last) if k != client]
            expected = torch.cat(others) if others else torch.zeros(0, 16, dtype=torch.float64)
            assert torch.equal(remote, expected)
        last |= {k: watched.gave[round, k] for k in ids}
        assert {int(k): t for k, t in banks(server).items()}.keys() == last.keys()
        assert all(torch.equal(banks(server)[str(k)], t) for k, t in last.items())
    assert len(watched.received(0)[2]) == 0
    assert len(watched.received(2)[0]) == 4 * 3  # joins late: 1, 2, 10 and 11 are there


def engine_and_round(*words: str) -> tuple[LocalEngine, Server]:
    engine, server = made(*words)
    step(engine, server, 0)
    return engine, server


def test_plain_features_are_those_of_the_images_themselves() -> None:
    engine, server = engine_and_round(
        "algorithm.mix=1", "algorithm.share_plain=true", "algorithm.batch=4"
    )
    target = engine.trainer.target
    assert target is not None
    target.params.copy_(engine.states[0]["target"])  # type: ignore[arg-type]
    images = made_split().images[0][:5].double() / 255
    with torch.no_grad():
        expected = F.normalize(target.module((images,))[0], dim=1)
    torch.testing.assert_close(banks(server)["0"], expected)


def test_keys_come_from_the_system_and_never_twice() -> None:
    """Same seed, same client, same round: another bank every time."""
    engine, server = engine_and_round()
    client = engine.client(np.array([0]), 0, remember=False)
    first, second = (engine.algorithm.share(client)["features"] for _ in range(2))  # type: ignore[attr-defined]
    assert not torch.isclose(first, second).all(1).any()
    _, again = engine_and_round()
    assert torch.equal(server.weights, again.weights)
    assert not torch.equal(banks(server)["0"], banks(again)["0"])


def slow(query: Tensor, candidates: Tensor, neighbours: int, temperature: float) -> Tensor:
    """Eq. 8 to 11 as they are printed, sample by sample and set by set."""
    total = query.new_zeros(())
    for q in query:
        cosines = [q @ n / (q.norm() * n.norm()) for n in candidates]
        order = sorted(range(len(candidates)), key=lambda m: -float(cosines[m].detach()))
        near, rest = order[:neighbours], order[neighbours:]
        for j in near:
            exps = torch.stack([torch.exp(q @ candidates[a] / temperature) for a in [j, *rest]])
            p = exps / exps.sum()
            total = total - (p * p.log()).sum() / neighbours
    return total / len(query)


def rows(count: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("neighbours", "temperature"), [(1, 0.5), (4, 0.1), (10, 0.07)])
def test_matching_equals_a_slow_plain_evaluation(
    neighbours: int, temperature: float, seed: int
) -> None:
    query, candidates = (F.normalize(rows(n, 5, seed + n), dim=1) for n in (6, 11))
    query.requires_grad_()
    ours = matching(query, candidates, neighbours, temperature)
    plain = slow(query, candidates, neighbours, temperature)
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)
    gradients = [torch.autograd.grad(loss, query)[0] for loss in (ours, plain)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-11)


def test_matching_raises_the_similarity_to_every_neighbour() -> None:
    """Candidates at right angles: the gradient's coordinates are those of the similarities."""
    candidates = torch.eye(12, dtype=torch.float64)
    query = F.normalize(rows(8, 12, 0).abs(), dim=1).requires_grad_()
    (gradient,) = torch.autograd.grad(matching(query, candidates, 3, 0.5), query)
    near, far = (query.detach().topk(3, largest=most).indices for most in (True, False))
    assert bool((gradient.gather(1, near) < 0).all())
    assert bool((gradient.gather(1, far) > 0).all())


def test_matching_stays_finite_at_any_temperature_and_is_zero_without_candidates() -> None:
    candidates = F.normalize(rows(50, 4, 1), dim=1).float()
    query = F.normalize(rows(5, 4, 2), dim=1).float().requires_grad_()
    for temperature in (1e-4, 1e3):
        loss = matching(query, candidates, 3, temperature)
        (gradient,) = torch.autograd.grad(loss, query)
        assert bool(torch.isfinite(loss)) and bool(torch.isfinite(gradient).all())
        assert float(loss.detach()) >= 0
    for few in (0, 3):
        assert float(matching(query, candidates[:few], 3, 0.1)) == 0


def test_no_tensor_of_matching_is_larger_than_batch_times_candidates() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for one in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(one, Tensor):
                    self.most = max(self.most, one.numel())
            return out

    batch, count, width, neighbours = 8, 400, 16, 100
    query, candidates = rows(batch, width, 0).requires_grad_(), rows(count, width, 1)
    with Largest() as largest:
        matching(query, candidates, neighbours, 0.1).backward()
    assert largest.most == count * width  # the candidates themselves, transposed; 2 × batch × K


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda bank: bank.index_fill(0, torch.tensor([2]), torch.nan), "not finite"),
        (lambda bank: 1.05 * bank, "longer than 1"),  # would outweigh all others' negatives
    ],
)
def test_a_bad_bank_is_dropped_and_the_round_goes_on(
    spoil: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    engine, server = made("cohort.minimum=3")
    step(engine, server, 0)
    before, weights, share = dict(banks(server)), server.weights, CCL.share

    def spoiled(ccl: CCL, client: Client) -> Any:
        reply: Any = share(ccl, client)
        bad = client.id == 1 and client.round == 1
        return {"features": spoil(reply["features"])} if bad else reply

    replace_task(monkeypatch, CCL, "share", spoiled)
    server.client_names = ["0", "south"]
    step(engine, server, 1)
    assert not torch.equal(server.weights, weights)
    assert server.warnings == [f"south shared features that are {fault}: its last ones stay"]
    assert torch.equal(banks(server)["1"], before["1"])
    assert not torch.equal(banks(server)["0"], before["0"])
    step(engine, server, 2)
    expected = torch.cat((before["1"], watched.gave[1, 2]))
    assert torch.equal(watched.received(2)[0], expected)


def test_without_sharing_nothing_is_gathered_and_secure_sums_are_possible() -> None:
    off = ("algorithm.remote=off", "algorithm.lambda=0", "engine.name=flower")
    session = build_experiment(small(*off, "privacy.secure=true", "cohort.size=5"))
    assert not session.algorithm.asked(True, "each")


def test_bytes_of_features_stand_beside_those_of_the_models() -> None:
    engine, server = made("algorithm.features=6")
    model, momentum = 8 * len(server.weights), 8 * server.flat.parameter_count
    lines = []
    for round in range(2):
        lines.append(step(engine, server, round).traffic.by_exchange())
    bank = [8 * 16 * rows for rows in (5, 6, 4)]
    all = {"replied": 3, "reached": 3}
    models = {"up": 3 * (model + momentum + 8), "down": 3 * (model + momentum), **all}
    share = {"up": sum(bank), **all}
    assert lines[0] == {"train": models, "share": {**share, "down": 0}}
    assert lines[1] == {"train": models, "share": {**share, "down": 2 * sum(bank)}}


def test_kept_layers_of_the_momentum_model_do_not_travel() -> None:
    """FedBN: normalization stays with a client, in both models."""
    engine, server = made("algorithm.norm_policy=local")
    trainer = engine.trainer
    assert trainer.shared is not None and trainer.kept is not None
    for round in range(2):
        step(engine, server, round)
    shared = trainer.shared[trainer.shared < trainer.flat.parameter_count]
    assert len(server.state["momentum"]) == len(shared) < trainer.flat.parameter_count  # type: ignore[arg-type]
    kept = trainer.kept[trainer.kept < trainer.flat.parameter_count]
    targets = [engine.states[k]["target"] for k in range(3)]
    assert not torch.equal(targets[0][kept], targets[1][kept])  # type: ignore[index]
    before = targets[0].clone()  # type: ignore[union-attr]
    seen: list[Tensor] = []
    begin = trainer.begin

    def watch(weights: Tensor, keep: Any) -> None:
        seen.append(keep["target"].clone())
        begin(weights, keep)

    trainer.begin = watch  # type: ignore[method-assign]
    momentum = server.state["momentum"]
    step(engine, server, 2, 0)
    assert torch.equal(seen[0][kept], before[kept])
    assert torch.equal(seen[0][shared], momentum)  # type: ignore[arg-type]


SMALL = (
    "rounds=4", "data.size=8", "data.labels=80", "partition.name=iid", "partition.clients=5",
    "cohort.size=3", "encoder.norm=batch", "algorithm.name=ccl", "algorithm.local_epochs=1",
    "algorithm.batch=6", "algorithm.neighbours=3", "objective.name=moco", "objective.queue=20",
    "objective.projector=32,16", "server.optimizer=sgd", "server.lr=1", "client.lr=0.05",
    "evaluate.protocols=knn", "evaluate.baselines=[]", "engine.threads=1", "checkpoint.seconds=0",
)  # fmt: skip


def small(*words: str) -> config.Config:
    return config.resolve(config.read_recipe(None), [*SMALL, *words])


def test_a_resumed_run_has_the_same_weights_and_banks(tmp_path: Path) -> None:
    whole, cut = build_experiment(small()), build_experiment(small())
    for session in (whole, cut):
        for _ in range(2):
            one_round(session)
    checkpoint.write(tmp_path, cut)
    again = build_experiment(small())
    assert checkpoint.read(tmp_path, again)
    for session in (whole, again):
        for _ in range(2):
            one_round(session)
    assert torch.equal(whole.server.weights, again.server.weights)
    assert torch.equal(whole.server.state["momentum"], again.server.state["momentum"])  # type: ignore[arg-type]
    assert banks(whole.server).keys() == banks(again.server).keys()
    assert all(torch.equal(t, banks(again.server)[k]) for k, t in banks(whole.server).items())


def one_round(session: Any) -> None:
    server = session.server
    step(session.engine, server, server.round, *session.draw_cohort(server.round))
    server.round += 1


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("algorithm.features=1 algorithm.lambda=0", "algorithm.features", 1),
        ("algorithm.neighbours=20", "algorithm.neighbours", 20),
        ("algorithm.features=3", "algorithm.neighbours", 3),
        ("algorithm.mix=1", "algorithm.mix", 1),
        ("algorithm.share_plain=true", "algorithm.mix", 4),
        ("algorithm.remote=off", "algorithm.lambda", 0.1),
        ("algorithm.mix=17", "algorithm.name", "ccl"),  # a client has 16 images
        ("partition.clients=80 cohort.size=5", "algorithm.name", "ccl"),
        ("objective.name=byol objective.queue=null", "objective.queue", None),
        ("cohort.average=median", "cohort.average", "median"),  # it does not cover features
        ("privacy.noise=1", "privacy.noise", 1),
        ("privacy.secure=true engine.name=flower", "privacy.secure", True),
    ],
)
def test_bad_settings_are_refused(words: str, key: str, value: object) -> None:
    with pytest.raises(UserError) as error:
        build_experiment(small(*words.split()))
    assert error.value.key == key
    assert value is None or error.value.value == value


def test_as_many_images_as_are_mixed_are_enough() -> None:
    session = build_experiment(small("algorithm.mix=16"))
    one_round(session)
    assert {len(bank) for bank in banks(session.server).values()} == {16}


def test_one_client_alone_is_told_that_nothing_is_remote() -> None:
    alone, off = "partition.clients=1 cohort.size=1", "algorithm.remote=off algorithm.lambda=0"
    for words, expected in ((alone, True), ("", False), (f"{alone} {off}", False)):
        notes = list_warnings(build_experiment(small(*words.split())))
        assert any("no remote features" in note for note in notes) == expected


def test_other_objectives_are_refused() -> None:
    settings = siamese("byol", "algorithm.name=ccl")
    with pytest.raises(UserError) as error:
        engine_of(settings, made_split(), groups_of(4))
    assert error.value.key == "objective.name" and "objective.name=moco" in error.value.fix


def ratios(session: Any) -> dict[int, float]:
    one_round(session)
    found: Any = session.server.client_log.pop("false_negatives")
    return dict(found)


EXCLUSIVE = (
    *("partition.name=classes", "partition.classes=2", "cohort.size=null"),
    *("objective.queue=16", "algorithm.features=16"),
)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("algorithm.remote=both", 1 / (2 * 5)),  # 1/(m·|C|), section 4.1
        ("algorithm.remote=only", 0),
        ("algorithm.remote=off algorithm.lambda=0", 1 / 2),
    ],
)
def test_false_negatives_of_exclusive_classes(words: str, expected: float) -> None:
    session = build_experiment(small(*EXCLUSIVE, *words.split()))
    assert ratios(session) == pytest.approx(dict.fromkeys(range(5), 1 / 2))  # no banks yet: 1/m
    for _ in range(2):
        assert ratios(session) == pytest.approx(dict.fromkeys(range(5), expected), abs=1e-12)


@pytest.mark.parametrize("remote", ["both", "only"])
def test_false_negatives_are_those_of_the_banks_as_they_were(
    remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted image by image, with mixed classes, unequal clients, and rounds that some miss."""
    words = ("partition.name=dirichlet", "partition.alpha=1", "algorithm.mix=2")
    session = build_experiment(small(*words, f"algorithm.remote={remote}", "algorithm.features=7"))
    assert session.dataset.train.labels is not None
    labels, trainer, groups = (
        session.dataset.train.labels.tolist(),
        session.trainer,
        session.engine.groups,
    )
    queues: dict[int, list[int]] = {k: [] for k in range(5)}
    shared: dict[int, list[int]] = {}
    now: list[int] = []
    look, encode, train = trainer.encode_batch, CCL.encode, CCL.train

    def seen_train(ccl: CCL, client: Client, *payload: Any) -> Any:
        now.append(client.id)
        return train(ccl, client, *payload)

    def seen_step(members: Tensor, *rest: Any) -> Any:
        queues[now[-1]] += 2 * members.tolist()
        return look(members, *rest)

    def seen_bank(ccl: CCL, w: Any, images: Tensor, own: Any, secret: Any) -> Tensor:
        client = next(k for k in range(5) if torch.equal(images, w.images[0][groups[k]]))
        renewed.setdefault(client, []).extend(groups[client][own].tolist())
        return encode(ccl, w, images, own, secret)

    replace_task(monkeypatch, CCL, "train", seen_train)
    monkeypatch.setattr(trainer, "encode_batch", seen_step)
    monkeypatch.setattr(CCL, "encode", seen_bank)
    for _ in range(4):
        renewed: dict[int, list[int]] = {}
        for client, ratio in ratios(session).items():
            far = [i for k, bank in shared.items() if k != client for i in bank]
            near = [] if remote == "only" and far else queues[client][-20:]
            pairs = [labels[q] == labels[n] for q in groups[client] for n in near + far]
            assert ratio == pytest.approx(sum(pairs) / len(pairs))
        shared |= renewed


@pytest.mark.parametrize("held", [True, False])
def test_images_without_a_label_count_only_where_a_client_holds_them(
    held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one such image among the clients' no ratio is known; elsewhere it does not matter."""
    loaded = split.load_run_dataset(small("partition.fraction=0.9"))
    labels = loaded.train.labels
    assert labels is not None
    groups = split.split_clients(small("partition.fraction=0.9"), loaded)
    free = np.setdiff1d(np.arange(len(labels)), groups.members)
    labels[int(groups.members[0] if held else free[0])] = -1
    monkeypatch.setattr("fedssl.runs.build.load_run_dataset", lambda config: loaded)
    session = build_experiment(small("partition.fraction=0.9"))
    one_round(session)
    assert ("false_negatives" in session.server.client_log) != held


def test_a_whole_run_with_keys_of_the_system(tmp_path: Path) -> None:
    assert run(small("rounds=2"), tmp_path)["knn_top1"] > 50
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < v < 1 for line in lines for v in line["false_negatives"].values())
    assert {*lines[1]["exchanges"]} == {"train", "share"}


@pytest.mark.parametrize(
    "words",
    ["", "algorithm.remote=only", "algorithm.lambda=0", "algorithm.remote=off algorithm.lambda=0"],
)
def test_compiled_steps_are_the_plain_ones(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler returns its input; tests/training/test_compiled.py runs torch's own."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(compiled, "RARE", 3)
    monkeypatch.setattr(CCL, "secret", lambda *_: np.random.default_rng(5))
    given = ("cohort.size=null", "precision=fp64", *words.split())
    plain, fast = (
        build_experiment(small(*given)),
        build_experiment(small(*given, "engine.compile=on")),
    )
    for _ in range(4):
        one_round(plain)
        one_round(fast)
    assert plain.server.client_log == fast.server.client_log
    torch.testing.assert_close(plain.server.log, fast.server.log, rtol=1e-9, atol=1e-11)
    for name, leaf in flatten(plain.server.state).items():
        torch.testing.assert_close(flatten(fast.server.state)[name], leaf, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(fast.server.weights, plain.server.weights, rtol=1e-9, atol=1e-11)
    replays = fast.trainer.compiled_steps.by_shape
    assert 1 <= len(replays) <= 4 and all(
        r.function == fast.algorithm.loss for r in replays.values()
    )  # type: ignore[attr-defined]
    assert not plain.trainer.compiled_steps.by_shape


def test_no_more_shapes_are_compiled_than_torch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(compiled, "RARE", 0)
    words = ("partition.name=dirichlet", "partition.clients=12", "algorithm.mix=1")
    more = ("algorithm.share_plain=true", "cohort.size=null", "algorithm.batch=2")
    session = build_experiment(small(*words, *more, "engine.compile=on"))
    for _ in range(3):
        one_round(session)
    assert len(session.trainer.compiled_steps.by_shape) == compiled.MAX_SHAPES
