"""FedCA: all clients' projections as negatives, and features held to those of a base model."""

from __future__ import annotations

from itertools import pairwise
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
    siamese,
    step,
    timeless,
    train,
)
from PIL import Image
from plain import Plain, assert_network, loops_of, mean_network
from rounds import assert_resumes, press_ctrl_c, run_of
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
from fedssl.runs import checkpoint, reproduce
from fedssl.runs.build import build_experiment
from fedssl.runs.loop import run
from fedssl.runs.reevaluate import evaluate
from fedssl.runs.split import held_out_images, public_images
from fedssl.training.trainer import Trainer

SIZES = (5, 9, 4)
PUBLIC = range(30, 36)
OFF = "algorithm.align=0"


def made(*words: str, sizes: tuple[int, ...] = SIZES) -> tuple[LocalEngine, Server]:
    """Clients with the first of the made images, and a base model of some of the last."""
    given = ("algorithm.name=fedca", f"algorithm.public={len(PUBLIC)}", "algorithm.base_epochs=3")
    settings = siamese("simclr", *given, *words)
    engine, server = engine_of(settings, made_split(), groups_of(*sizes))
    ids, members = np.array([len(sizes)]), np.array(PUBLIC)
    lr = engine.trainer.config.client.lr
    server.public = Client(engine.trainer, members, ids, np.array([len(members)]), 0, lr, {})
    if settings.algorithm.align:
        server.state |= engine.algorithm.train_base(server)
    return engine, server


def banks(server: Server) -> dict[str, Tensor]:
    return server.state.get("banks", {})


@pytest.mark.parametrize(
    ("words", "rounds"),
    [(f"{OFF} algorithm.dictionary=0", 3), (f"{OFF} algorithm.norm_policy=reset", 1)],
    ids=["nothing is shared", "nothing is there yet"],
)
def test_without_dictionary_and_alignment_it_is_fedsimclr(words: str, rounds: int) -> None:
    engine, server = made(*words.split())
    plain = [word for word in words.split() if "norm_policy" in word]
    reference, other = engine_of(siamese("simclr", *plain), made_split(), groups_of(*SIZES))
    train(engine, server, rounds)
    train(reference, other, rounds)
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


def untraced(module: nn.Module, inputs: Tensor) -> Tensor:
    """In training mode, with copies of batch norm's statistics: its own stay."""
    state = {name: buffer.clone() for name, buffer in module.named_buffers()}
    found = functional_call(module, {**dict(module.named_parameters()), **state}, (inputs,))
    return F.normalize(found, dim=1)


def pixels(members: range) -> Tensor:
    return made_split().images[0][members.start : members.stop].double() / 255


class Loop(Plain):
    """A plain client that contrasts with a dictionary and is held to a base model."""

    dictionary, base = torch.zeros(0, 16, dtype=torch.float64), torch.zeros(0)
    number = now = 0

    def loss(self, x1: Tensor, x2: Tensor) -> Tensor:
        tower, p = self.network.towers[0], self.config.algorithm
        temperature = self.config.objective.temperature
        loss = slow_contrast((tower(x1), tower(x2)), self.dictionary, temperature)
        if p.align:
            state = key(self.config.seed, "public", self.now, self.client, self.number)
            chosen = torch.from_numpy(choose(state, len(PUBLIC), len(x1)))
            own = untraced(tower.encoder, pixels(PUBLIC)[chosen])
            apart = [((a - b) ** 2).sum() for a, b in zip(own, self.base[chosen], strict=True)]
            loss = loss + p.align * sum(apart) / len(apart)
        self.number += 1
        return loss

    def bank(self) -> Tensor:
        p: Any = self.config.algorithm
        state = key(self.config.seed, "share", self.now, self.client)
        own = choose(state, len(self.images), p.dictionary)
        parts = np.array_split(own, max(1, len(own) // p.batch))
        with torch.no_grad():
            images = self.images.double() / 255
            return torch.cat([untraced(self.network.towers[0], images[i]) for i in parts])


def slow_base() -> Tensor:
    """FedSimCLR's client training for three epochs, on the public images."""
    one = Plain(siamese("simclr", "algorithm.local_epochs=3"), made_split(), PUBLIC, len(SIZES))
    one.round(0)
    with torch.no_grad():
        return untraced(one.network.towers[0].encoder, pixels(PUBLIC))


@pytest.mark.parametrize("words", [OFF, "algorithm.align=0.7"])
def test_it_is_what_a_plain_loop_would_do(words: str) -> None:
    """Three rounds of uneven clients, one of which has more images than it shares."""
    engine, server = made(words, "algorithm.dictionary=6")
    loops = loops_of(Loop, engine.trainer.config, *SIZES)
    base = slow_base()
    if words != OFF:
        torch.testing.assert_close(server.state["base"], base, rtol=1e-8, atol=1e-10)
    for round in range(3):
        step(engine, server, round)
        for loop in loops:
            loop.number, loop.now, loop.base = 0, round, base
        losses = [loop.round(round) for loop in loops]
        mean = mean_network(loops)
        assert_network(engine, server.weights, mean)
        held = [loop.bank() for loop in loops]
        for k, bank in enumerate(held):
            torch.testing.assert_close(banks(server)[str(k)], bank, rtol=1e-8, atol=1e-10)
        assert float(server.log["loss"]) == pytest.approx(np.average(losses, weights=SIZES))
        for loop in loops:
            loop.receive(mean)
            loop.dictionary = torch.cat(held)


def test_the_alignment_alone_brings_features_to_the_bases() -> None:
    engine, server = made("algorithm.align=1")
    trainer, images, goal = engine.trainer, server.state["public"], server.state["base"]
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
        train(engine, server, 2)
        norms = [engine.states[k].get("norm", server.weights) for k in range(3)]
        results.append(torch.cat([server.weights, *norms]))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-9)


def test_the_base_model_leaves_no_trace_in_the_run() -> None:
    engine, server = made("algorithm.align=0.5")
    config = engine.trainer.config
    other, with_it = engine_of(config, made_split(), groups_of(*SIZES))
    assert engine.trainer.batches == other.trainer.batches
    with_it.state |= server.state
    train(engine, server, 2)
    train(other, with_it, 2)
    assert torch.equal(server.weights, with_it.weights)


def test_the_dictionary_is_all_banks_in_the_order_of_the_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With clients that sit out, one that joins late, and more than 10 for their order."""
    trained = record_task(monkeypatch, FedCA, "train")
    engine, server = made(OFF, sizes=(3, 2, 4, *(2,) * 9))
    last: dict[int, Tensor] = {}
    for round, ids in enumerate([(2, 10, 1), (10, 2, 11), (0, 2), (7,)]):
        step(engine, server, round, *ids)
        expected = torch.cat([normal_rows(0, 16), *(last[k] for k in sorted(last))])
        assert all(torch.equal(trained[round, client][1], expected) for client in ids)
        last |= {k: engine.states[k]["bank"] for k in ids}
        assert banks(server).keys() == {str(k) for k in last}
        assert all(torch.equal(banks(server)[str(k)], bank) for k, bank in last.items())
    assert len(expected) == 3 + 2 + 4 + 2 + 2
    for bank in last.values():
        torch.testing.assert_close(bank.norm(dim=1), torch.ones(len(bank), dtype=torch.float64))


def test_bytes_of_the_dictionary_stand_beside_those_of_the_model() -> None:
    engine, server = made("algorithm.dictionary=6")
    width, rows = server.state["base"].shape[1], 5 + 6 + 4
    down = 8 * len(server.weights) + len(PUBLIC) * (8 * 8 + 8 * width)
    all = {"replied": 3, "reached": 3}
    models = {"up": 3 * (8 * len(server.weights) + 8), "down": 3 * down, **all}
    for round, held in enumerate((0, rows)):
        share = {"up": 8 * 16 * rows, "down": 3 * 8 * 16 * held, **all}
        traffic = step(engine, server, round).traffic
        assert traffic.by_exchange() == {"train": models, "share": share}


def test_without_a_dictionary_no_projection_is_kept_or_asked_for() -> None:
    engine, server = made("algorithm.dictionary=0")
    cohort = step(engine, server, 0)
    assert not engine.client(np.array([0]), 0, remember=False).state
    assert "share" not in cohort.traffic.down
    assert [task.name for task in engine.algorithm.asked()] == ["train"]


@pytest.mark.parametrize("more", ["seed=1", "data.holdout=0.3", OFF])
def test_public_images_are_nobodys(more: str) -> None:
    session = build_experiment(run_of("fedca", more))
    public = public_images(session.config, session.dataset)
    held = held_out_images(session.config, session.dataset)
    assert bool(len(held)) == ("holdout" in more)
    assert session.public.members.tolist() == public.tolist() and session.public.id == 5
    assert len(set(public.tolist())) == 17
    assert not set(public.tolist()) & {*session.engine.groups.members.tolist(), *held.tolist()}
    if "holdout" not in more:
        assert len(session.engine.groups.members) == 80 - 17


def test_nothing_is_public_where_nothing_is_aligned() -> None:
    for align, count in (("0", 0), ("0.1", 1000)):
        settings = run_of("fedca", "algorithm.public=null", f"algorithm.align={align}")
        assert settings.algorithm.public == count
        assert config.build(config.to_tree(settings)) == settings


def test_a_resumed_run_is_the_unbroken_one_and_trains_no_base_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, trained = FedCA.train_base, []
    monkeypatch.setattr(FedCA, "train_base", lambda *given: trained.append(0) or real(*given))
    held = assert_resumes(run_of("fedca"), tmp_path, monkeypatch)
    assert len(trained) == 2  # in each of both runs
    assert held["server/public"].dtype == torch.uint8 and len(held["server/base"]) == 17
    assert {name for name in held if "banks" in name} == {f"server/banks/{k}" for k in range(5)}
    # Of data with fewer images than are public.
    assert evaluate(tmp_path / "whole", ["data.labels=10", "evaluate.protocols=knn"])["result"]


def test_ctrl_c_stops_the_base_model_at_once_and_it_is_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_of("fedca", "rounds=2")
    run(config, tmp_path / "whole")
    real, steps = Trainer.step, []

    def third_step(trainer: Trainer, *given: Any) -> Tensor:
        steps.append(0)
        if len(steps) == 3:
            press_ctrl_c()
        return real(trainer, *given)

    monkeypatch.setattr(Trainer, "step", third_step)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "cut")
    assert len(steps) == 3 and not timeless(tmp_path / "cut")
    run(config, tmp_path / "cut", resume=True)
    whole, cut = (load_file(tmp_path / name / checkpoint.FILE) for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_scale_shortens_the_base_model_too() -> None:
    recipe = config.read_recipe("ccl/table1/fedca/cifar10-iid")
    for words, share, epochs in (("", 1, 100), ("", 0.1, 10), ("", 0.001, 1), (OFF, 0.1, 100)):
        settings = config.resolve(recipe, words.split())
        assert reproduce.scaled(settings, share).algorithm.base_epochs == epochs


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
        image = Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        image.save(folder / f"{k}.png")
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
        if held is None:
            assert serve(grid, settings, out, False)["rounds"] == 2
            continue
        with refused("algorithm.public", says=f"has {held}."):
            serve(grid, settings, out, False)
        assert not grid.types  # before the sites come
    state = load_file(out / checkpoint.FILE)
    assert len(state["server/public"]) == 5
    assert [len(state[f"server/banks/{k}"]) for k in (0, 1)] == [6, 4]
    load_experiment.cache_clear()


def test_a_deployment_says_what_is_shown_to_whom(tmp_path: Path) -> None:
    own, few = (f"data.root={make_images(tmp_path / str(n), n)}" for n in (5, 4))
    app = tmp_path / "app"
    for words, held in (((), 0), ((few,), 4)):
        with refused("algorithm.public", says=f"has {held}."):
            write_app(app, "default", [*SITES, *words])
    write_app(app, "default", [*SITES, own])
    assert "**5 of these images are public**" in (app / "SERVER.md").read_text()
    sites = (app / "SITES.md").read_text()
    (line,) = [line for line in sites.splitlines() if line.startswith("- `share`")]
    assert "Projections of single images, as they are, for all other clients too" in line
