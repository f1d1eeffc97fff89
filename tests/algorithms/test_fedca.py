"""FedCA: all clients' projections as negatives, and features held to those of a base model."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import engine_of, groups_of, made_split, replace_task, siamese, step
from PIL import Image
from plain import Plain, mean_state
from rounds import assert_sessions_agree, run_and_resume
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call

from fedssl import config
from fedssl.algorithms.fedca import FedCA, encode, misalignment
from fedssl.data.random import choose, key
from fedssl.deploy.recipe import adapt_recipe
from fedssl.deploy.write import write_app
from fedssl.engines.local import LocalEngine
from fedssl.federation.client import Client
from fedssl.federation.server import Server
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.simclr import SimCLR
from fedssl.runs import checkpoint
from fedssl.runs.build import Experiment, build_experiment
from fedssl.runs.loop import run
from fedssl.runs.reevaluate import evaluate
from fedssl.runs.split import held_out_images, public_images
from fedssl.util.errors import UserError

SIZES = (5, 9, 4)
PUBLIC = range(30, 36)


def fedca(*words: str) -> config.Config:
    given = ("algorithm.name=fedca", f"algorithm.public={len(PUBLIC)}", "algorithm.base_epochs=3")
    return siamese("simclr", *given, *words)


def made(*words: str, sizes: tuple[int, ...] = SIZES) -> tuple[LocalEngine, Server]:
    """Clients with the first of the made images, and a base model of some of the last."""
    settings = fedca(*words)
    engine, server = engine_of(settings, made_split(), groups_of(*sizes))
    server.public = public_of(engine)
    begin(engine.algorithm, server)
    return engine, server


def begin(algorithm: Any, server: Server) -> None:
    """Train the base model, as the first round does."""
    if algorithm.params.align:
        server.state |= algorithm.train_base(server)


def public_of(engine: LocalEngine) -> Client:
    ids, lr = np.array([len(engine.groups)]), engine.trainer.config.client.lr
    members = np.array(PUBLIC)
    return Client(engine.trainer, members, ids, np.array([len(members)]), 0, lr, {})


def banks(server: Server) -> dict[str, Tensor]:
    return server.state.get("banks", {})  # type: ignore[return-value]


def rows(count: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, dtype=torch.float64, generator=generator)


OFF = "algorithm.align=0"


@pytest.mark.parametrize(
    ("words", "rounds"),
    [(f"{OFF} algorithm.dictionary=0", 3), (f"{OFF} algorithm.norm_policy=reset", 1)],
    ids=["nothing is shared", "nothing is there yet"],
)
def test_without_dictionary_and_alignment_it_is_fedsimclr(words: str, rounds: int) -> None:
    engine, server = made(*words.split())
    plain = [word for word in words.split() if "norm_policy" in word]
    reference, other = engine_of(siamese("simclr", *plain), made_split(), groups_of(*SIZES))
    for round in range(rounds):
        step(engine, server, round)
        step(reference, other, round)
        assert torch.equal(server.weights, other.weights)
        assert torch.equal(server.log["loss"], other.log["loss"])
    assert bool(banks(server)) == ("dictionary=0" not in words)
    assert server.state.keys() <= {"banks"}


def slow_contrast(views: tuple[Tensor, ...], dictionary: Tensor, temperature: float) -> Tensor:
    """−log e^{s(i,j)/τ} / (Σ_{k≠i} e^{s(i,k)/τ} + Σ_d e^{s(i,d)/τ}), encoding by encoding."""
    z = [row / row.norm() for view in views for row in view]
    n, total = len(views[0]), views[0].new_zeros(())
    for i, own in enumerate(z):
        others = [own @ other for k, other in enumerate(z) if k != i]
        denominator = sum(torch.exp(s / temperature) for s in [*others, *(dictionary @ own)])
        partner = z[(i + n) % (2 * n)]
        total = total - torch.log(torch.exp(own @ partner / temperature) / denominator)
    return total / len(z)


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_the_contrast_equals_a_slow_plain_evaluation(count: int, temperature: float) -> None:
    objective = SimCLR(SimCLR.Params("simclr", temperature=temperature))
    views = rows(4, 6, 1).requires_grad_(), rows(4, 6, 2).requires_grad_()
    dictionary = F.normalize(rows(count, 6, 3), dim=1)
    ours = objective.contrast(views, dictionary)
    plain = slow_contrast(views, dictionary, temperature)
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)
    for mine, theirs in zip(*(torch.autograd.grad(x, views) for x in (ours, plain)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-11)
    assert torch.equal(objective.loss(EncodedBatch(views)), objective.contrast(views)), (
        "the batch alone"
    )
    assert torch.equal(objective.loss(EncodedBatch(views)), ours) == (count == 0)


def untraced(module: nn.Module, inputs: Tensor) -> Tensor:
    """In training mode, with copies of batch norm's statistics: its own stay."""
    state = {name: buffer.clone() for name, buffer in module.named_buffers()}
    found = functional_call(module, {**dict(module.named_parameters()), **state}, (inputs,))
    return F.normalize(found, dim=1)


class Loop(Plain):
    """A plain client that contrasts with a dictionary and is held to a base model."""

    dictionary, base = torch.zeros(0, 16, dtype=torch.float64), torch.zeros(0)
    number, now = 0, 0

    def loss(self, x1: Tensor, x2: Tensor) -> Tensor:
        tower, p = self.network.towers[0], self.config.algorithm
        temperature = self.config.objective.temperature  # type: ignore[attr-defined]
        loss = slow_contrast((tower(x1), tower(x2)), self.dictionary, temperature)
        if p.align:  # type: ignore[attr-defined]
            state = key(self.config.seed, "public", self.now, self.client, self.number)
            chosen = torch.from_numpy(choose(state, len(PUBLIC), len(x1)))
            own = untraced(tower.encoder, pixels(PUBLIC)[chosen])
            apart = [((a - b) ** 2).sum() for a, b in zip(own, self.base[chosen], strict=True)]
            loss = loss + p.align * sum(apart) / len(apart)  # type: ignore[attr-defined]
        self.number += 1
        return loss

    def bank(self) -> Tensor:
        count, p = len(self.images), self.config.algorithm
        state = key(self.config.seed, "share", self.now, self.client)
        own = choose(state, count, p.dictionary)  # type: ignore[attr-defined]
        parts = np.array_split(own, max(1, len(own) // p.batch))  # type: ignore[operator]
        with torch.no_grad():
            images = self.images.double() / 255
            return torch.cat([untraced(self.network.towers[0], images[i]) for i in parts])


def pixels(members: range) -> Tensor:
    return made_split().images[0][members.start : members.stop].double() / 255


def slow_base() -> Tensor:
    """FedSimCLR's client training for three epochs, on the public images."""
    one = Plain(siamese("simclr", "algorithm.local_epochs=3"), made_split(), PUBLIC, len(SIZES))
    one.round(0)
    with torch.no_grad():
        return untraced(one.network.towers[0].encoder, pixels(PUBLIC))


@pytest.mark.parametrize("words", [OFF, "algorithm.align=0.7"])
def test_it_is_what_a_plain_loop_would_do(words: str) -> None:
    """Three rounds of uneven clients, one of which has more images than it shares."""
    settings = fedca(*words.split(), "algorithm.dictionary=6")
    engine, server = made(*words.split(), "algorithm.dictionary=6")
    starts = np.cumsum((0, *SIZES))
    loops = [
        Loop(settings, made_split(), range(int(a), int(b)), client=k)
        for k, (a, b) in enumerate(pairwise(starts))
    ]
    base = slow_base()
    if words != OFF:
        torch.testing.assert_close(server.state["base"], base, rtol=1e-8, atol=1e-10)
    for round in range(3):
        step(engine, server, round)
        for loop in loops:
            loop.number, loop.now, loop.base = 0, round, base
        losses = [loop.round(round) for loop in loops]
        mean = mean_state([loop.network.state_dict() for loop in loops], list(SIZES))
        held = [loop.bank() for loop in loops]
        for k, bank in enumerate(held):
            torch.testing.assert_close(banks(server)[str(k)], bank, rtol=1e-8, atol=1e-10)
        for name, tensor in mean.items():
            ours = engine.trainer.flat.named(server.weights)[name]
            torch.testing.assert_close(ours, tensor, rtol=1e-8, atol=1e-10)
        assert float(server.log["loss"]) == pytest.approx(np.average(losses, weights=SIZES))
        for loop in loops:
            loop.receive(mean)
            loop.dictionary = torch.cat(held)


def test_the_alignment_alone_brings_features_to_the_bases() -> None:
    engine, server = made("algorithm.align=1")
    trainer = engine.trainer
    images: Tensor = server.state["public"]  # type: ignore[assignment]
    goal: Tensor = server.state["base"]  # type: ignore[assignment]
    trainer.load(trainer.initial)
    apart = []
    for _ in range(20):
        with torch.no_grad():
            apart.append((encode(trainer, images) - goal).norm(dim=1))
        trainer.flat.gradient.zero_()
        misalignment(trainer, images, goal).backward()
        trainer.flat.params.sub_(trainer.flat.gradient, alpha=0.2)
    means = [float(a.mean()) for a in apart]
    assert all(after < before for before, after in pairwise(means)) and means[-1] < means[0] / 2
    assert bool((apart[-1] < apart[0]).all())


@pytest.mark.parametrize("policy", ["average", "local", "reset"])
def test_public_images_leave_no_trace_in_batch_norms_statistics(policy: str) -> None:
    """With a weight of next to nothing they could change nothing else."""
    results = []
    for align in ("0", "1e-12"):
        engine, server = made(f"algorithm.align={align}", f"algorithm.norm_policy={policy}")
        for round in range(2):
            step(engine, server, round)
        norms = [engine.states[k].get("norm", server.weights) for k in range(3)]
        results.append(torch.cat([server.weights, *norms]))  # type: ignore[list-item]
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-9)


def test_the_base_model_leaves_no_trace_in_the_run() -> None:
    engine, server = made("algorithm.align=0.5")
    other, with_it = engine_of(fedca("algorithm.align=0.5"), made_split(), groups_of(*SIZES))
    batches = other.trainer.batches
    assert engine.trainer.batches == batches and torch.equal(server.weights, with_it.weights)
    with_it.state |= server.state
    for round in range(2):
        step(engine, server, round)
        step(other, with_it, round)
    assert torch.equal(server.weights, with_it.weights)


def watch(patch: pytest.MonkeyPatch) -> dict[tuple[int, int], Tensor]:
    """What each client got as dictionary, by round and client."""
    got: dict[tuple[int, int], Tensor] = {}
    train = FedCA.train

    def seen(self: FedCA, client: Client, received: Tensor, dictionary: Tensor, *rest: Any) -> Any:
        got[client.round, client.id] = dictionary.clone()
        return train(self, client, received, dictionary, *rest)

    replace_task(patch, FedCA, "train", seen)
    return got


def test_the_dictionary_is_all_banks_in_the_order_of_the_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With clients that sit out, one that joins late, and more than 10 for their order."""
    got = watch(monkeypatch)
    engine, server = made(OFF, sizes=(3, 2, 4, *(2,) * 9))
    last: dict[int, Tensor] = {}
    for round, ids in enumerate([(2, 10, 1), (10, 2, 11), (0, 2), (7,)]):
        step(engine, server, round, *ids)
        expected = torch.cat([rows(0, 16, 0), *(last[k] for k in sorted(last))])
        for client in ids:
            assert torch.equal(got[round, client], expected)
        last |= {k: engine.states[k]["bank"] for k in ids}  # type: ignore[misc]
        assert banks(server).keys() == {str(k) for k in last}
        assert all(torch.equal(banks(server)[str(k)], bank) for k, bank in last.items())
    assert len(got[0, 2]) == 0 and len(got[3, 7]) == 3 + 2 + 4 + 2 + 2
    for bank in last.values():
        torch.testing.assert_close(bank.norm(dim=1), torch.ones(len(bank), dtype=torch.float64))


def test_bytes_of_the_dictionary_stand_beside_those_of_the_model() -> None:
    engine, server = made("algorithm.dictionary=6")
    width = server.state["base"].shape[1]  # type: ignore[union-attr]
    down = 8 * len(server.weights) + len(PUBLIC) * (8 * 8 + 8 * width)
    all = {"replied": 3, "reached": 3}
    models = {"up": 3 * (8 * len(server.weights) + 8), "down": 3 * down, **all}
    rows = 5 + 6 + 4
    for round, held in enumerate((0, rows)):
        line = step(engine, server, round).traffic.by_exchange()
        share = {"up": 8 * 16 * rows, "down": 3 * 8 * 16 * held, **all}
        assert line == {"train": models, "share": share}


SMALL = (
    "rounds=4", "data.size=8", "data.labels=80", "partition.name=iid", "partition.clients=5",
    "cohort.size=3", "encoder.norm=batch", "algorithm.name=fedca", "algorithm.local_epochs=1",
    "algorithm.batch=6", "algorithm.public=17", "algorithm.base_epochs=2", "objective.name=simclr",
    "algorithm.dictionary=9", "objective.projector=32,16", "server.optimizer=sgd", "server.lr=1",
    "client.lr=0.05", "evaluate.protocols=knn", "evaluate.baselines=[]", "engine.threads=1",
    "checkpoint.seconds=0",
)  # fmt: skip


def small(*words: str) -> config.Config:
    return config.resolve(config.read_recipe(None), [*SMALL, *words])


@pytest.mark.parametrize("more", ["seed=1", "data.holdout=0.2", OFF])
def test_public_images_are_nobodys(more: str) -> None:
    session = build_experiment(small(more))
    public = public_images(session.config, session.dataset)
    assert session.public is not None and session.public.members.tolist() == public.tolist()
    members = session.engine.groups.members
    assert len(public) == len(set(public.tolist())) == 17 and session.public.id == 5
    assert not set(public.tolist()) & set(members.tolist())
    if "holdout" not in more:
        assert len(members) == 80 - 17
    session.server.public = session.public
    begin(session.algorithm, session.server)
    if more == OFF:
        assert not session.server.state
    else:
        assert torch.equal(session.server.state["public"], session.trainer.images[0][public])  # type: ignore[arg-type]


def test_what_is_held_out_is_not_public() -> None:
    session = build_experiment(small("data.holdout=0.3"))
    held = held_out_images(session.config, session.dataset)
    assert len(held) and not {*held} & {*public_images(session.config, session.dataset)}


def test_a_run_can_be_judged_on_data_smaller_than_its_public_set(tmp_path: Path) -> None:
    run(small("rounds=1"), tmp_path)
    assert evaluate(tmp_path, ["data.labels=10", "evaluate.protocols=knn"])["result"]


def test_nothing_is_public_where_nothing_is_aligned() -> None:
    words = [word for word in SMALL if "public" not in word]
    for align, count in (("0", 0), ("0.1", 1000)):
        settings = config.resolve(config.read_recipe(None), [*words, f"algorithm.align={align}"])
        assert settings.algorithm.public == count  # type: ignore[attr-defined]
        again = config.build(config.to_tree(settings))
        assert again == settings


def whole(out: Path) -> dict[str, Tensor]:
    return load_file(out / checkpoint.FILE)


def test_a_resumed_run_is_the_unbroken_one_and_trains_no_base_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, trained = FedCA.train_base, []
    monkeypatch.setattr(FedCA, "train_base", lambda *given: trained.append(0) or real(*given))
    summary = run_and_resume(small(), tmp_path, monkeypatch)
    assert summary["rounds"] == 4 and summary["knn_top1"] > 40
    mine, theirs = whole(tmp_path / "whole"), whole(tmp_path / "cut")
    assert len(trained) == 2 and mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    assert mine["server/public"].dtype == torch.uint8 and len(mine["server/base"]) == 17
    assert {name for name in mine if "banks" in name} == {f"server/banks/{k}" for k in range(5)}


def begun(session: Experiment) -> Experiment:
    session.server.public = session.public
    begin(session.algorithm, session.server)
    return session


FAR = (
    *("objective.name=simclr", "algorithm.name=fedca", "algorithm.public=8", "algorithm.batch=2"),
    *("algorithm.base_epochs=2", "algorithm.dictionary=3", "algorithm.align=0.5"),
    *("algorithm.local_epochs=1", "encoder.norm=batch"),
)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "cohort.size=3 algorithm.norm_policy=local",
        "data.halves=true encoder.towers=2 encoder.norm=group",
        "algorithm.align=0 algorithm.norm_policy=reset",
        "algorithm.dictionary=0",
    ],
)
def test_both_engines_give_the_same(words: str, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    import far

    settings = far.small(*FAR, *words.split())
    near = begun(build_experiment(settings))
    away = begun(far.far_session(settings, tmp_path)[0])
    assert_sessions_agree(near, away)
    assert ("base" in near.server.state) == ("align=0" not in words)
    assert ("0" in banks(near.server)) == ("dictionary=0" not in words)


BAD_BANKS = {
    "another width": (lambda bank: bank[:, :15], "shape [3, 15], expected at most"),
    "oversized": (lambda bank: bank.repeat(2, 1), "shape [6, 16], expected at most"),
}


@pytest.mark.parametrize("kind", BAD_BANKS)
def test_a_bad_bank_is_refused_and_costs_only_itself(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr")
    import far

    spoil, reason = BAD_BANKS[kind]
    share = FedCA.share
    replace_task(
        monkeypatch,
        FedCA,
        "share",
        lambda a, c: {n: spoil(b) if c.id == 3 else b for n, b in share(a, c).items()},  # type: ignore[no-untyped-call]
    )
    session = begun(far.far_session(far.small(*FAR, "cohort.minimum=5"), tmp_path, nodes=5)[0])
    line = far.one_round(session, tmp_path)
    assert not line["skipped"] and line["loss"] is not None and line["missing"] == 1
    assert line["faults"].keys() == {"3"} and reason in line["faults"]["3"]
    assert banks(session.server).keys() == {"0", "1", "2", "4"}


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("algorithm.public=1", "algorithm.public", 1),
        ("algorithm.public=80", "algorithm.public", 80),  # none is left for the clients
        ("algorithm.public=1000", "algorithm.public", 1000),
        ("algorithm.dictionary=1", "algorithm.dictionary", 1),
        ("objective.name=cco", "objective.name", "cco"),
        ("partition.clients=63", "algorithm.name", "fedca"),  # a client has one image
        ("privacy.noise=1", "privacy.noise", 1),
    ],
)
def test_bad_settings_are_refused(words: str, key: str, value: object) -> None:
    with pytest.raises(UserError) as error:
        build_experiment(small(*words.split()))
    assert error.value.key == key and error.value.value == value


def test_without_a_dictionary_no_projection_is_kept_or_asked_for() -> None:
    engine, server = made("algorithm.dictionary=0")
    cohort = step(engine, server, 0)
    assert not engine.client(np.array([0]), 0, remember=False).state
    assert "share" not in cohort.traffic.down
    assert [task.name for task in engine.algorithm.asked()] == ["train"]


SITES = (
    *("engine.sites=2", "cohort.size=null", "encoder.groups=4", "objective.projector=[32,16]"),
    *("rounds=2", "engine.threads=1", "engine.timeout=5", "objective.name=simclr", "client.lr=0.1"),
    *("algorithm.name=fedca", "algorithm.public=5", "algorithm.base_epochs=2"),
    "evaluate.protocols=unlabeled",
)


def make_images(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True)
    generator = np.random.default_rng(count)
    for k in range(count):
        Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(
            folder / f"{k}.png"
        )
    return folder


def test_a_deployment_shows_the_sites_images_of_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr")
    from far import Here

    from fedssl.deploy.server import serve
    from fedssl.deploy.site import client_app, load_experiment

    for name in ("STATE", "CACHE"):
        monkeypatch.setenv(f"FEDSSL_{name}", str(tmp_path / name))
    make_images(tmp_path / "server" / "train", 5)
    data = [{"data": str(make_images(tmp_path / name, n))} for name, n in (("a", 6), ("b", 4))]
    own = f"data.root={tmp_path / 'server'}"
    for more, held in (("data.root=null", 0), (f"{own} algorithm.public=6", 5), (own, None)):
        settings = adapt_recipe("default", [*SITES, *more.split()])
        load_experiment.cache_clear()
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(config.dump(settings))
        grid, out = Here(client_app(recipe), data), tmp_path / f"run-{held}"
        if held is not None:
            with pytest.raises(UserError, match=rf"has {held}\.") as error:
                serve(grid, settings, out, False)
            assert error.value.key == "algorithm.public"
            assert not grid.types  # before the sites come
            continue
        summary, state = serve(grid, settings, out, False), whole(out)
        assert summary["rounds"] == 2 and len(state["server/public"]) == 5
        assert [len(state[f"server/banks/{k}"]) for k in (0, 1)] == [6, 4]
    load_experiment.cache_clear()


def test_a_deployment_says_what_is_shown_to_whom(tmp_path: Path) -> None:
    own, few = (make_images(tmp_path / str(count), count) for count in (5, 4))
    for words, held in (((), 0), ((f"data.root={few}",), 4)):
        with pytest.raises(UserError, match=rf"has {held}\.") as error:
            write_app(tmp_path / "app", "default", [*SITES, *words])
        assert error.value.key == "algorithm.public"
    write_app(tmp_path / "app", "default", [*SITES, f"data.root={own}"])
    assert "**5 of these images are public**" in (tmp_path / "app" / "SERVER.md").read_text()
    sites = (tmp_path / "app" / "SITES.md").read_text()
    (line,) = [line for line in sites.splitlines() if line.startswith("- `share`")]
    assert "Projections of single images, as they are, for all other clients too" in line
