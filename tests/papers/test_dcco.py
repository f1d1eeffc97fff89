"""The DCCO paper's own claims, at small size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    HEADS,
    engine_of,
    groups_of,
    load,
    made_split,
    refused,
    relative,
    settings,
    train,
)
from rounds import go

from fedssl import config as configuration
from fedssl.data.dataset import Split
from fedssl.engines.local import LocalEngine
from fedssl.federation.client import Client
from fedssl.federation.sampling import check_client_sizes
from fedssl.federation.server import Server
from fedssl.runs.build import build_experiment

SPECTRAL = "spectral objective.projector=32,32,16"
OWN = f"{Path(__file__).resolve().parents[2]}/examples/own/moments.py:CodingRate"
OWN += " objective.projector=32,32,16"
UNEVEN = (1, 5, 2, 7, 1, 4)
SIGREG = "sigreg objective.projector=32,32,16 objective.slices=50"


def made(
    *words: str, sizes: tuple[int, ...] = UNEVEN, split: Split | None = None
) -> tuple[LocalEngine, Server]:
    return engine_of(settings(*words), split or made_split(), groups_of(*sizes))


def change(engine: LocalEngine, server: Server, rounds: int = 1) -> torch.Tensor:
    return train(engine, server, rounds) - engine.trainer.initial


def loss_of_a_round(*words: str, bias: float = 0.0) -> float:
    engine, server = made(*words, "precision=fp32")
    engine.trainer.flat.named(server.weights)["towers.0.head.6.bias"].fill_(bias)
    train(engine, server, rounds=1)
    return float(server.log["loss"])


@pytest.mark.parametrize(
    "objective",
    [
        "cco",
        "vicreg",
        SIGREG,
        f"{SIGREG} augment.small=2",
        SPECTRAL,
        OWN,
    ],
)
@pytest.mark.parametrize("merge", ["off", "auto"])
def test_appendix_a_a_round_is_a_centralized_step_on_the_union(objective: str, merge: str) -> None:
    words = f"objective.name={objective}".split()
    federated = change(*made(*words, f"engine.merge={merge}"))
    # The union as one client: its samples keep their owners, so that the views are the same.
    engine, server = made(*words, "algorithm.name=fedavg")
    union = engine.client(np.arange(len(UNEVEN)), 0, remember=False)
    union.sizes = np.array([union.samples])
    server.apply(engine.algorithm.train(union, server.weights))
    centralized = server.weights - engine.trainer.initial
    assert centralized.norm() > 0.01
    assert relative(federated, centralized) < 1e-9


@pytest.mark.parametrize("encoder", ["tiny", "resnet14", "resnet18"])
def test_merged_is_client_by_client_with_the_papers_network(encoder: str) -> None:
    words = (f"encoder.name={encoder}", "encoder.groups=32", "objective.projector=64,64,32")
    merges = (f"engine.merge={merge}" for merge in ("auto", "off"))
    changes = [change(*made(*words, merge, sizes=(1, 3, 2))) for merge in merges]
    assert relative(*changes) < 1e-9


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize(
    "words",
    [
        "algorithm.name=dcco objective.name=cco",
        "algorithm.name=dcco objective.name=vicreg",
        f"algorithm.name=dcco objective.name={SPECTRAL}",
        f"algorithm.name=dcco objective.name={SIGREG} augment.small=1 augment.small_size=5",
        "algorithm.name=fedprox algorithm.mu=3 objective.name=cco",
        *(f"objective.name={name}" for name in ("cco", "vicreg", "supervised", "rotation")),
        f"objective.name={SIGREG}",
        f"objective.name={SPECTRAL}",
        *(f"objective.name={name} {' '.join(HEADS[name])}" for name in ("simclr", "simsiam")),
        "objective.name=swav objective.projector=32,16 objective.prototypes=6,3",
        "objective.name=swav objective.projector=32,16 augment.small=2 augment.small_size=5",
        "objective.name=mae encoder.name=vit-tiny",
    ],
)
def test_every_declaration_of_exact_on_union(words: str) -> None:
    results = []
    for merge in ("engine.merge=auto", "engine.merge=off", "engine.chunk=6"):
        given = ("algorithm.name=fedavg", "server.momentum=0.9", *words.split(), merge)
        engine, server = made(*given, sizes=(3, 5, 2, 7, 2))
        results.append(change(engine, server, rounds=3))
        assert engine.merges == (merge != "engine.merge=off")
    assert results[1].norm() > 1e-3
    assert relative(results[0], results[1]) < 1e-9
    assert relative(results[2], results[1]) < 1e-9


@pytest.mark.parametrize(
    "words",
    [
        "algorithm.local_steps=2",
        "algorithm.batch=2",
        "encoder.norm=batch",
        "client.optimizer=adam",
        *(
            f"algorithm.name=fedavg objective.name={n} {' '.join(HEADS[n])}"
            for n in ("byol", "moco")
        ),
        "algorithm.name=fedavg objective.name=swav objective.queue=4",
        "algorithm.name=fedavg objective.name=deepcluster",
    ],
)
def test_nothing_else_is_merged(words: str) -> None:
    assert not made(*words.split())[0].merges


def test_batch_norm_would_indeed_break_the_union() -> None:
    """The predicate is needed: with batch norm merged and client-by-client rounds differ."""
    changes = []
    for forced in (False, True):
        engine, server = made("encoder.norm=batch", sizes=(4, 4, 4))
        engine.merges = forced
        changes.append(change(engine, server))
    assert relative(*changes) > 1e-3


def test_naive_fedavg_of_cco_is_not_centralized_unless_a_client_has_everything() -> None:
    """Section 3.3: without sharing statistics the equivalence is lost."""

    def apart(*sizes: int) -> float:
        naive = change(*made("algorithm.name=fedavg", sizes=sizes))
        return relative(naive, change(*made(sizes=sizes)))

    assert apart(3, 5, 2, 7) > 0.1 and apart(12) < 1e-9


def test_clients_count_by_the_samples_in_their_statistics() -> None:
    """N_k of Eq. 3: of 7 samples one epoch in batches of 4 uses 4."""
    engine, server = made("algorithm.local_epochs=1", "algorithm.batch=4", sizes=(7, 4, 2))
    algorithm, model = engine.algorithm, server.model
    alone = [algorithm.locate(engine.client(np.array([k]), 0, False), model)["f"] for k in range(3)]
    together = engine.cohort(np.arange(3), 0).mean(algorithm.locate, model)["f"]
    assert relative(together, (4 * alone[0] + 4 * alone[1] + 2 * alone[2]) / 10) < 1e-12


@pytest.mark.parametrize("fresh", ["true", "false"])
def test_two_local_steps_by_hand(fresh: str) -> None:
    """SGD on ⟨⟩_A + share · (⟨⟩_k − ⟨⟩_k as sent), and without the second term if not fresh."""
    words = ("algorithm.local_steps=2", "algorithm.radius=1e9", "client.lr=1e-5")
    engine, server = made(*words, f"algorithm.fresh={fresh}", sizes=(4, 6))
    objective, trainer = engine.trainer.objective, engine.trainer
    clients = [engine.client(np.array([k]), 0, remember=False) for k in range(2)]
    centre = server.state["centre"] = {k: torch.zeros(16, dtype=torch.float64) for k in "fg"}

    def moments_of(client: Client, step: int) -> dict[str, torch.Tensor]:
        return objective.moments(client.encode_step(step), centre)

    trainer.load(server.weights)
    with torch.no_grad():
        sent = [[moments_of(client, step) for step in range(2)] for client in clients]
    total = {k: (4 * sent[0][0][k] + 6 * sent[1][0][k]) / 10 for k in sent[0][0]}
    share = 0.5 if fresh == "true" else 0.0  # one of two clients
    expected = torch.zeros_like(server.weights)
    for client, before, weight in zip(clients, sent, (0.4, 0.6), strict=True):
        trainer.load(server.weights)
        for step in range(2):
            trainer.flat.gradient.zero_()
            own = moments_of(client, step)
            moved = {k: share * (own[k] - before[step][k]).detach() for k in own}
            combined = {k: own[k] + (total[k] + moved[k] - own[k].detach()) for k in own}
            objective.loss_of(combined, centre).backward()
            trainer.flat.params.add_(trainer.flat.gradient, alpha=-trainer.config.client.lr)
        expected += weight * (trainer.flat.vector - server.weights)
    assert relative(change(engine, server), expected) < 1e-9
    assert server.log["local_loss"] != server.log["loss"] or fresh == "false"


def test_a_local_step_beyond_the_radius_is_undone() -> None:
    steps = ("algorithm.local_steps=4", "client.momentum=0.5")
    none = change(*made(*steps, "algorithm.radius=1e-9"))
    assert relative(none, change(*made("client.momentum=0.5"))) < 1e-12
    assert relative(change(*made(*steps, "client.lr=1e-6")), none) > 0.1


def test_fresh_moments_stay_finite_where_stale_ones_run_away() -> None:
    words = ("algorithm.local_steps=3", "client.lr=0.05")
    assert change(*made(*words, "algorithm.fresh=false")).norm() > 1e6
    one, several = change(*made("client.lr=0.05")), change(*made(*words))
    assert several.norm() < 3 * one.norm()


def test_the_script_that_measures_local_steps_does_what_the_program_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = load("results/local_steps.py")
    monkeypatch.setattr(script.Rounds, "epoch", lambda self, round, step: 3 * round + step)
    words = ("precision=fp64", "data.labels=60", "partition.samples=5", "cohort.size=4")
    keys = ("algorithm.local_steps=3", "algorithm.radius=0.15", "client.lr=3e-6")
    recipe = configuration.read_recipe(None)
    experiment = build_experiment(configuration.resolve(recipe, [*script.FIXED, *words, *keys]))
    rounds = script.Rounds(experiment, 3, 0.15, 3e-6)
    there, losses = rounds.train(2)
    go(experiment, 2)
    start = experiment.trainer.initial
    assert relative(experiment.server.weights - start, there - start) < 1e-9
    assert 0 < sum(rounds.kept) < len(rounds.kept)
    assert losses[-1] == pytest.approx(float(experiment.server.log["loss"]))


def test_stale_moments_are_warned_about() -> None:
    engine, _ = made("algorithm.local_steps=2", "algorithm.fresh=false")
    assert "algorithm.fresh=false" in next(
        iter(engine.algorithm.validate(engine.trainer.config, 6))
    )


def test_dcco_learns_where_the_centre_matters() -> None:
    """A bias a thousand times the spread changes nothing, in float32 and in the first round too."""
    assert loss_of_a_round(bias=1000.0) == pytest.approx(loss_of_a_round(), rel=0.02)


def test_a_client_of_one_sample_is_fine_for_dcco_and_refused_for_fedavg() -> None:
    """The dashes of Table 1."""
    sizes = np.array([4, 1, 4])
    check_client_sizes(made()[0].algorithm, sizes)
    for objective in ("cco", "simclr", "vicreg", "sigreg"):
        engine, _ = made("algorithm.name=fedavg", f"objective.name={objective}")
        with refused("algorithm.name", "fedavg", says="client 1 holds 1 image"):
            check_client_sizes(engine.algorithm, sizes)


@pytest.mark.parametrize("objective", ["simclr", "supervised"])
def test_dcco_refuses_losses_of_single_samples(objective: str) -> None:
    with refused("objective.name", objective, says="cco, vicreg, sigreg or spectral"):
        made(f"objective.name={objective}")


@pytest.mark.parametrize("towers", [1, 2])
def test_all_three_forms_of_figure_1(towers: int) -> None:
    """One network or two, and two modalities: a round is exact in each form."""
    (images,) = made_split().images
    for split in (made_split(), Split((images, 255 - images))):
        changes = []
        for merge in ("auto", "off"):
            words = (f"encoder.towers={towers}", f"engine.merge={merge}")
            engine, server = made(*words, split=split)
            changes.append(change(engine, server))
        assert relative(*changes) < 1e-9
    assert len(engine.trainer.network.towers) == towers


@pytest.mark.parametrize("steps", [2, 3])
def test_the_value_of_the_combined_statistics_is_the_cohorts_at_every_step(steps: int) -> None:
    """So the loss of a round cannot depend on how many local steps it has (float32 too)."""
    one, several = (
        loss_of_a_round("client.lr=0.5", f"algorithm.local_steps={n}") for n in (1, steps)
    )
    assert several == pytest.approx(one, rel=1e-4)
