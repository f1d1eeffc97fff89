"""CCL: models averaged, banks routed (Eq. 2), negatives fused (Eq. 3), neighbours matched."""

from __future__ import annotations

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
    normal_rows,
    record_task,
    refused,
    replace_task,
    siamese,
    step,
    timeless,
    train,
    unit_rows,
    without_compiler,
)
from PIL import Image
from plain import Plain, assert_network, flat_params, loops_of, mean_network, mean_state
from rounds import assert_resumes, go, run_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedssl.algorithms.ccl import CCL, matching
from fedssl.algorithms.false_negatives import NEIGHBOURS
from fedssl.algorithms.instahide import Key, encrypt, mixture
from fedssl.data.random import choose, key
from fedssl.engines.local import LocalEngine
from fedssl.federation.client import Client
from fedssl.federation.server import Server
from fedssl.runs import split
from fedssl.runs.build import build_experiment
from fedssl.runs.loop import run
from fedssl.runs.validate import list_warnings
from fedssl.training import compiled

SIZES = (5, 9, 4)
OFF = "algorithm.remote=off algorithm.lambda=0"


@pytest.fixture(autouse=True)
def fixed_keys(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """InstaHide's keys as a function of client and round, unless a test is about their source."""
    if "system" not in request.node.name:
        fixed = lambda _, client: np.random.default_rng([client.id, client.round])  # noqa: E731
        monkeypatch.setattr(CCL, "secret", fixed)


def made(*words: str, sizes: tuple[int, ...] = SIZES) -> tuple[LocalEngine, Server]:
    config = siamese("moco", "algorithm.name=ccl", "algorithm.neighbours=3", *words)
    return engine_of(config, made_split(), groups_of(*sizes))


def banks(server: Server) -> dict[str, Tensor]:
    return server.state.get("banks", {})


@pytest.mark.parametrize("remote", ["both", "only"])
def test_one_client_has_no_remote_features(remote: str) -> None:
    results = []
    for words in (("algorithm.lambda=0", f"algorithm.remote={remote}"), OFF.split()):
        engine, server = made(*words, "server.lr=0.5", sizes=(11,))
        train(engine, server, 3)
        states = engine.states.on_host(0)
        results.append([server.weights, server.state["momentum"], server.log["loss"], *states])
    assert all(map(torch.equal, results[0][:3], results[1][:3]))
    assert results[0][3:] == results[1][3:]


class Loop(Plain):
    """A plain client that contrasts and matches with what others sent."""

    remote = torch.zeros(0, 16, dtype=torch.float64)
    now = number = 0

    def contrast(self, query: Tensor, keys: Tensor) -> Tensor:
        p: Any = self.config.algorithm
        local, both = self.queue, torch.cat((self.remote, self.queue))
        self.queue = self.remote if p.remote == "only" and len(self.remote) else both
        loss = super().contrast(query, keys)
        self.queue = local
        if p.lambda_:
            state = key(self.config.seed, "neighbours", self.now, self.client, self.number // 2)
            chosen = both[torch.from_numpy(choose(state, len(both), p.features))]
            if len(chosen) > p.neighbours:
                query = F.normalize(query, dim=1)
                loss = loss + p.lambda_ * slow(query, chosen, p.neighbours, p.temperature)
        self.number += 1
        return loss

    def bank(self) -> Tensor:
        """Features of encrypted images, by the momentum model, in batches of four."""
        generator = np.random.default_rng([self.client, self.now])
        p: Any = self.config.algorithm
        state = key(self.config.seed, "share", self.now, self.client)
        own = choose(state, len(self.images), p.features)
        rows = []
        for part in np.array_split(own, max(1, len(own) // p.batch // 4)):
            drawn = Key.draw(part, len(self.images), p.mix, self.images.shape[1:], generator)
            with torch.no_grad():
                hidden = encrypt(self.images, drawn, torch.float64)
                rows.append(F.normalize(self.target[0]((hidden + 1) / 2), dim=1))
        return torch.cat(rows)


@pytest.mark.parametrize(
    "words",
    [
        OFF,
        "algorithm.remote=both algorithm.lambda=0",
        "algorithm.remote=only algorithm.lambda=0",
        # A queue that never wraps has its keys in the order in which they came, as the loop's.
        "algorithm.remote=both algorithm.lambda=0.3 objective.queue=100",
        "algorithm.remote=only algorithm.lambda=0.3 objective.queue=100",
    ],
)
def test_it_is_what_a_plain_loop_would_do(words: str) -> None:
    """CL, CL+FF, CL+FF+NM and the further reducing variant, for three rounds."""
    engine, server = made(*words.split(), "algorithm.features=8")
    config, shares = engine.trainer.config, words != OFF
    loops = loops_of(Loop, config, *SIZES)
    for round in range(3):
        step(engine, server, round)
        for loop in loops:
            loop.number, loop.now = 0, round
            loop.round(round)
        held = [loop.bank() for loop in loops] if shares else []
        assert len(banks(server)) == len(held)
        for k, bank in enumerate(held):
            torch.testing.assert_close(banks(server)[str(k)], bank, rtol=1e-8, atol=1e-10)
        mean = mean_network(loops)
        assert_network(engine, server.weights, mean)
        slow_mean = mean_state([dict(loop.target.named_parameters()) for loop in loops], [*SIZES])
        for loop in loops:
            loop.receive(mean)
            loop.target.load_state_dict(slow_mean, strict=False)
            if shares:
                loop.remote = torch.cat([b for k, b in enumerate(held) if k != loop.client])
        momentum = flat_params(loops[0].target)
        torch.testing.assert_close(server.state["momentum"], momentum, rtol=1e-8, atol=1e-10)


def test_a_client_gets_all_banks_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eq. 2, with a client that sits out and one that joins late; more than 10 for their order."""
    trained, shared = (record_task(monkeypatch, CCL, name) for name in ("train", "share"))
    engine, server = made("algorithm.mix=2", sizes=(3,) * 12)
    last = {}
    for round, ids in enumerate([(2, 10, 1), (10, 2, 11), (0, 2)]):
        step(engine, server, round, *ids)
        for client in ids:
            others = [last[k] for k in sorted(last) if k != client]
            expected = torch.cat([torch.zeros(0, 16, dtype=torch.float64), *others])
            assert torch.equal(trained[round, client][2], expected)
        last |= {k: shared[round, k][0]["features"] for k in ids}
        assert banks(server).keys() == {str(k) for k in last}
        assert all(torch.equal(banks(server)[str(k)], t) for k, t in last.items())
    assert len(trained[2, 0][2]) == 4 * 3  # joins late: 1, 2, 10 and 11 are there


def test_plain_features_are_those_of_the_images_themselves() -> None:
    engine, server = made("algorithm.mix=1", "algorithm.share_plain=true", "algorithm.batch=4")
    step(engine, server, 0)
    target = engine.trainer.target
    target.params.copy_(engine.states[0]["target"])
    images = made_split().images[0][:5].double() / 255
    with torch.no_grad():
        expected = F.normalize(target.module((images,))[0], dim=1)
    torch.testing.assert_close(banks(server)["0"], expected)


def test_keys_come_from_the_system_and_never_twice() -> None:
    """Same seed, same client, same round: another bank every time."""
    engine, server = made()
    step(engine, server, 0)
    client = engine.client(np.array([0]), 0, remember=False)
    first, second = (engine.algorithm.share(client)["features"] for _ in range(2))
    assert not torch.isclose(first, second).all(1).any()
    other, again = made()
    step(other, again, 0)
    assert torch.equal(server.weights, again.weights)
    assert not torch.equal(banks(server)["0"], banks(again)["0"])


def slow(query: Tensor, candidates: Tensor, neighbours: int, temperature: float) -> Tensor:
    """Eq. 8 to 11 as they are printed, sample by sample and set by set."""
    total = query.new_zeros(())
    for q in query:
        cosines = [float(q.detach() @ n / (q.norm() * n.norm()).detach()) for n in candidates]
        order = sorted(range(len(candidates)), key=lambda m, all=cosines: -all[m])
        near, rest = order[:neighbours], order[neighbours:]
        for j in near:
            exps = torch.stack([torch.exp(q @ candidates[a] / temperature) for a in [j, *rest]])
            p = exps / exps.sum()
            total = total - (p * p.log()).sum() / neighbours
    return total / len(query)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("neighbours", "temperature"), [(1, 0.5), (4, 0.1), (10, 0.07)])
def test_matching_equals_a_slow_plain_evaluation(
    neighbours: int, temperature: float, seed: int
) -> None:
    query, candidates = (unit_rows(n, 5, seed + n) for n in (6, 11))
    query.requires_grad_()
    both = [f(query, candidates, neighbours, temperature) for f in (matching, slow)]
    torch.testing.assert_close(*both, rtol=1e-10, atol=1e-12)
    gradients = [torch.autograd.grad(loss, query)[0] for loss in both]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-11)


def test_matching_raises_the_similarity_to_every_neighbour() -> None:
    """Candidates at right angles: the gradient's coordinates are those of the similarities."""
    candidates = torch.eye(12, dtype=torch.float64)
    query = unit_rows(8, 12).abs().requires_grad_()
    (gradient,) = torch.autograd.grad(matching(query, candidates, 3, 0.5), query)
    near, far = (query.detach().topk(3, largest=most).indices for most in (True, False))
    assert bool((gradient.gather(1, near) < 0).all())
    assert bool((gradient.gather(1, far) > 0).all())


def test_matching_stays_finite_at_any_temperature_and_is_zero_without_candidates() -> None:
    candidates, query = unit_rows(50, 4, 1).float(), unit_rows(5, 4, 2).float().requires_grad_()
    for temperature in (1e-4, 1e3):
        loss = matching(query, candidates, 3, temperature)
        (gradient,) = torch.autograd.grad(loss, query)
        assert bool(torch.isfinite(loss)) and bool(torch.isfinite(gradient).all())
        assert float(loss.detach()) >= 0
    for few in (0, 3):
        assert float(matching(query, candidates[:few], 3, 0.1)) == 0


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation returns."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, Tensor):
                self.most = max(self.most, one.numel())
        return out


def test_no_tensor_of_matching_is_larger_than_batch_times_candidates() -> None:
    query, candidates = normal_rows(8, 16).requires_grad_(), normal_rows(400, 16)
    with Largest() as largest:
        matching(query, candidates, 100, 0.1).backward()
    assert largest.most == 400 * 16  # the candidates themselves, transposed; 2 × batch × K


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
    trained, share = record_task(monkeypatch, CCL, "train"), CCL.share
    engine, server = made("cohort.minimum=3")
    step(engine, server, 0)
    before, weights = dict(banks(server)), server.weights

    def spoiled(ccl: CCL, client: Client) -> Any:
        reply = share(ccl, client)
        bad = client.id == 1 and client.round == 1
        return {"features": spoil(reply["features"])} if bad else reply

    replace_task(monkeypatch, CCL, "share", spoiled)
    server.client_names = ["0", "south"]
    step(engine, server, 1)
    assert not torch.equal(server.weights, weights)
    assert server.warnings == [f"south shared features that are {fault}: its last ones stay"]
    assert torch.equal(banks(server)["1"], before["1"])
    assert not torch.equal(banks(server)["0"], before["0"])
    kept = torch.cat((before["1"], banks(server)["2"]))
    step(engine, server, 2)
    assert torch.equal(trained[2, 0][2], kept)


def test_without_sharing_nothing_is_gathered_and_secure_sums_are_possible() -> None:
    words = (OFF, "engine.name=flower", "privacy.secure=true", "cohort.size=5")
    assert not build_experiment(run_of("ccl", *words)).algorithm.asked(True, "each")


def test_bytes_of_features_stand_beside_those_of_the_models() -> None:
    engine, server = made("algorithm.features=6")
    model, momentum = 8 * len(server.weights), 8 * server.flat.parameter_count
    bank, all = 8 * 16 * (5 + 6 + 4), {"replied": 3, "reached": 3}
    models = {"up": 3 * (model + momentum + 8), "down": 3 * (model + momentum), **all}
    for round in range(2):
        share = {"up": bank, "down": round * 2 * bank, **all}
        traffic = step(engine, server, round).traffic
        assert traffic.by_exchange() == {"train": models, "share": share}


def test_kept_layers_of_the_momentum_model_do_not_travel() -> None:
    """FedBN: normalization stays with a client, in both models."""
    engine, server = made("algorithm.norm_policy=local")
    trainer = engine.trainer
    train(engine, server, 2)
    shared, kept = (p[p < trainer.flat.parameter_count] for p in (trainer.shared, trainer.kept))
    momentum = server.state["momentum"]
    assert len(momentum) == len(shared) < trainer.flat.parameter_count
    first, second = (engine.states[k]["target"].clone() for k in (0, 1))
    assert not torch.equal(first[kept], second[kept])
    began, begin = [], trainer.begin
    trainer.begin = lambda w, state: began.append(state["target"].clone()) or begin(w, state)
    step(engine, server, 2, 0)
    assert torch.equal(began[0][kept], first[kept])
    assert torch.equal(began[0][shared], momentum)


def test_a_resumed_run_has_the_same_weights_and_banks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = assert_resumes(run_of("ccl"), tmp_path, monkeypatch)
    assert {f"server/banks/{k}" for k in range(5)} | {"server/momentum"} <= held.keys()


def test_as_many_images_as_are_mixed_are_enough() -> None:
    session = build_experiment(run_of("ccl", "algorithm.mix=16"))
    go(session, 1)
    assert {len(bank) for bank in banks(session.server).values()} == {16}


def test_one_client_alone_is_told_that_nothing_is_remote() -> None:
    alone = "partition.clients=1 cohort.size=1"
    for words, expected in ((alone, True), ("", False), (f"{alone} {OFF}", False)):
        notes = list_warnings(build_experiment(run_of("ccl", words)))
        assert any("no remote features" in note for note in notes) == expected


def ratios(session: Any) -> dict[int, float]:
    go(session, 1)
    return session.server.client_log["false_negatives"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("algorithm.remote=both", 1 / (2 * 5)),  # 1/(m·|C|), section 4.1
        ("algorithm.remote=only", 0),
        (OFF, 1 / 2),
    ],
)
def test_false_negatives_of_exclusive_classes(words: str, expected: float) -> None:
    exclusive = "partition.name=classes partition.classes=2 cohort.size=null"
    few = "objective.queue=16 algorithm.features=16"
    session = build_experiment(run_of("ccl", exclusive, few, words))
    assert ratios(session) == pytest.approx(dict.fromkeys(range(5), 1 / 2))  # no banks yet: 1/m
    for _ in range(2):
        assert ratios(session) == pytest.approx(dict.fromkeys(range(5), expected), abs=1e-12)


@pytest.mark.parametrize("remote", ["both", "only"])
def test_false_negatives_are_those_of_the_banks_as_they_were(
    remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted image by image, with mixed classes, unequal clients, and rounds that some miss."""
    words = "partition.name=dirichlet partition.alpha=1 algorithm.mix=2 algorithm.features=7"
    session = build_experiment(run_of("ccl", words, f"algorithm.remote={remote}"))
    labels = session.dataset.train.labels.tolist()
    trainer, groups = session.trainer, session.engine.groups
    queues: dict[int, list[int]] = {k: [] for k in range(5)}
    shared: dict[int, list[int]] = {}
    renewed: dict[int, list[int]] = {}
    look, encode = trainer.encode_batch, CCL.encode

    def owner(images: Any) -> int:
        return next(k for k in range(5) if set(images) <= set(groups[k].tolist()))

    def seen_step(members: Tensor, *rest: Any) -> Any:
        queues[owner(members.tolist())] += 2 * members.tolist()
        return look(members, *rest)

    def seen_bank(ccl: CCL, w: Any, images: Tensor, own: Any, *rest: Any) -> Tensor:
        client = next(k for k in range(5) if torch.equal(images, w.images[0][groups[k]]))
        renewed.setdefault(client, []).extend(groups[client][own].tolist())
        return encode(ccl, w, images, own, *rest)

    monkeypatch.setattr(trainer, "encode_batch", seen_step)
    monkeypatch.setattr(CCL, "encode", seen_bank)
    for _ in range(4):
        for client, ratio in ratios(session).items():
            far = [i for k, bank in shared.items() if k != client for i in bank]
            near = [] if remote == "only" and far else queues[client][-20:]
            pairs = [labels[q] == labels[n] for q in groups[client] for n in near + far]
            assert ratio == pytest.approx(sum(pairs) / len(pairs))
        shared |= renewed
        renewed.clear()


@pytest.mark.parametrize("remote", ["both", "only"])
def test_neighbours_are_judged_image_by_image(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With queues that wrap, unequal clients, and rounds that some miss."""
    words = "partition.name=dirichlet partition.alpha=1 algorithm.mix=2 algorithm.features=7"
    session = build_experiment(run_of("ccl", words, f"algorithm.remote={remote}"))
    labels, groups = session.dataset.train.labels, session.engine.groups
    arrived: dict[int, list[int]] = {k: [] for k in range(5)}
    banks: dict[int, list[int]] = {}
    expected: dict[int, tuple[float, float, float]] = {}
    look, train, encode = session.trainer.encode_batch, CCL.train, CCL.encode

    def seen_step(members: Tensor, *rest: Any) -> Any:
        owner = next(k for k in range(5) if set(members.tolist()) <= set(groups[k].tolist()))
        arrived[owner] += 2 * members.tolist()
        return look(members, *rest)

    def seen_bank(ccl: CCL, w: Any, images: Tensor, own: Any, *rest: Any) -> Tensor:
        client = next(k for k in range(5) if torch.equal(images, w.images[0][groups[k]]))
        renewed.setdefault(client, []).extend(groups[client][own].tolist())
        return encode(ccl, w, images, own, *rest)

    def trained(ccl: CCL, client: Client, *sent: Any) -> Any:
        reply, own = train(ccl, client, *sent), arrived[client.id]
        steps = client.trainer.batches.per_round(client.samples)
        ring = {n % 20: image for n, image in enumerate(own)}
        there = [i for k in sorted(banks) if k != client.id for i in banks[k]]
        images = there + [ring[n] for n in range(len(ring))]
        drawn = key(client.seed, "neighbours", client.round, client.id, steps)
        chosen = choose(drawn, len(images), 7)
        with client.trainer.restored(), torch.no_grad():
            queries = look(*client._samples_of(steps)).encodings[0]
        features = torch.cat((sent[2], client.trainer.memory["queue"]))
        remote = chosen[chosen < len(there)]
        pure, near_remote, far = [], [], []
        for query, image in zip(queries, client._samples_of(steps)[0], strict=True):
            cosines = F.cosine_similarity(query[None], features[chosen])
            for n in chosen[cosines.topk(3).indices]:
                pure.append(bool(labels[images[n]] == labels[image]))
                far.append(n < len(there))
            cosines = F.cosine_similarity(query[None], features[remote])
            for n in remote[cosines.topk(min(3, len(remote))).indices.numpy()]:
                near_remote.append(bool(labels[images[n]] == labels[image]))
        if len(remote):
            expected[client.id] = (np.mean(pure), np.mean(near_remote), np.mean(far))
        return reply

    monkeypatch.setattr(session.trainer, "encode_batch", seen_step)
    monkeypatch.setattr(CCL, "encode", seen_bank)
    replace_task(monkeypatch, CCL, "train", trained)
    for round in range(4):
        renewed: dict[int, list[int]] = {}
        expected.clear()
        (cohort,) = go(session, 1)
        logged = session.server.client_log
        for place, name in enumerate(NEIGHBOURS):
            assert (name in logged) == (round > 0)
            for client, value in logged.get(name, {}).items():
                assert value == pytest.approx(expected[client][place])
        banks |= renewed
    assert len(banks) == 5 and max(map(len, arrived.values())) > 20
    # The rounds that banks are from are for the log alone: no traffic.
    model = 4 * (len(session.server.weights) + session.server.flat.parameter_count)
    assert cohort.traffic.by_exchange()["train"]["down"] == 3 * model


def test_without_the_mask_images_are_mixed_alone() -> None:
    found = []
    for words in ("algorithm.mask=false algorithm.share_plain=true", ""):
        engine, server = made(*words.split())
        step(engine, server, 0)
        found.append(banks(server)["0"])
    target, images = engine.trainer.target, made_split().images[0][:5]
    target.params.copy_(engine.states[0]["target"])
    state = key(engine.trainer.config.seed, "share", 0, 0)
    drawn = Key.draw(choose(state, 5, 4096), 5, 4, images.shape[1:], np.random.default_rng([0, 0]))
    with torch.no_grad():
        hidden = (mixture(images, drawn, torch.float64), encrypt(images, drawn, torch.float64))
        for bank, inputs in zip(found, hidden, strict=True):
            expected = F.normalize(target.module(((inputs + 1) / 2,))[0], dim=1)
            torch.testing.assert_close(bank, expected)


def test_half_of_the_mixed_images_are_of_another_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """InstaHide's key decides; and public images are read like the clients', grey of 8 pixels."""
    shades = (10, 200, 90)
    for number, shade in enumerate(shades):
        Image.new("RGB", (20, 20), (shade, shade, shade)).save(tmp_path / f"{number}.png")
    monkeypatch.setenv("FEDSSL_CACHE", str(tmp_path / "cache"))
    engine, server = made(f"algorithm.mix_root={tmp_path}")
    step(engine, server, 0)
    target, images = engine.trainer.target, made_split().images[0][:5]
    public = torch.stack([torch.full_like(images[0], int(shade)) for shade in shades])
    target.params.copy_(engine.states[0]["target"])
    state, shape = key(engine.trainer.config.seed, "share", 0, 0), images.shape[1:]
    drawn = Key.draw(choose(state, 5, 4096), 5, 4, shape, np.random.default_rng([0, 0]), 3)
    assert (drawn.members[:, :2] < 5).all() and (drawn.members[:, 2:] >= 5).all()
    with torch.no_grad():
        inputs = (encrypt(torch.cat((images, public)), drawn, torch.float64) + 1) / 2
        expected = F.normalize(target.module((inputs,))[0], dim=1)
    torch.testing.assert_close(banks(server)["0"], expected)


def test_too_few_public_images_are_refused_before_training(tmp_path: Path) -> None:
    with refused("algorithm.mix_root", str(tmp_path / "nowhere")):
        build_experiment(run_of("ccl", f"algorithm.mix_root={tmp_path / 'nowhere'}"))
    Image.new("L", (9, 9)).save(tmp_path / "one.png")
    with refused("algorithm.mix_root", str(tmp_path)):
        build_experiment(run_of("ccl", f"algorithm.mix_root={tmp_path}"))


@pytest.mark.parametrize("held", [True, False])
def test_images_without_a_label_count_only_where_a_client_holds_them(
    held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one such image among the clients' no ratio is known; elsewhere it does not matter."""
    config = run_of("ccl", "partition.fraction=0.9")
    loaded = split.load_run_dataset(config)
    members = split.split_clients(config, loaded).members
    free = np.setdiff1d(np.arange(len(loaded.train)), members)
    loaded.train.labels[int(members[0] if held else free[0])] = -1
    monkeypatch.setattr("fedssl.runs.build.load_run_dataset", lambda config: loaded)
    session = build_experiment(config)
    go(session, 1)
    assert ("false_negatives" in session.server.client_log) != held


def test_a_whole_run_with_keys_of_the_system(tmp_path: Path) -> None:
    assert run(run_of("ccl", "rounds=2"), tmp_path)["knn_top1"] > 50
    lines = timeless(tmp_path)
    assert all(0 < v < 1 for line in lines for v in line["false_negatives"].values())
    assert {*lines[1]["exchanges"]} == {"train", "share"}


def test_no_more_shapes_are_compiled_than_torch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)
    monkeypatch.setattr(compiled, "RARE", 0)
    words = "partition.name=dirichlet partition.clients=12 cohort.size=null algorithm.batch=2"
    plain = "algorithm.mix=1 algorithm.share_plain=true engine.compile=on"
    session = build_experiment(run_of("ccl", words, plain))
    go(session, 3)
    assert len(session.trainer.compiled_steps.by_shape) == compiled.MAX_SHAPES
