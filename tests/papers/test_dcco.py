"""The DCCO paper's own claims, at small size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import HEADS, engine_of, groups_of, made_split, relative, settings, train

from fedssl.federation.sampling import check_client_sizes
from fedssl.util.errors import UserError

UNEVEN = (1, 5, 2, 7, 1, 4)


def change_after_one_round(*words: str, sizes: tuple[int, ...] = UNEVEN) -> torch.Tensor:
    engine, server = engine_of(settings(*words), made_split(), groups_of(*sizes))
    return train(engine, server, rounds=1) - engine.trainer.initial


@pytest.mark.parametrize("objective", ["cco", "vicreg"])
@pytest.mark.parametrize("merge", ["off", "auto"])
def test_appendix_a_a_round_is_a_centralized_step_on_the_union(objective: str, merge: str) -> None:
    name = f"objective.name={objective}"
    federated = change_after_one_round(name, f"engine.merge={merge}")
    # The union as one client: its samples keep their owners, so that the views are the same.
    one = settings(name, "algorithm.name=fedavg")
    engine, server = engine_of(one, made_split(), groups_of(*UNEVEN))
    union = engine.client(np.arange(len(UNEVEN)), 0, remember=False)
    union.sizes = np.array([union.samples])
    server.apply(engine.algorithm.train(union, server.weights))
    centralized = server.weights - engine.trainer.initial
    assert centralized.norm() > 0.1
    assert relative(federated, centralized) < 1e-9


@pytest.mark.parametrize(
    "encoder", ["tiny", "resnet14", "resnet18"], ids=["tiny", "resnet14", "resnet18"]
)
def test_merged_is_client_by_client_with_the_papers_network(encoder: str) -> None:
    words = (f"encoder.name={encoder}", "encoder.groups=32", "objective.projector=64,64,32")
    changes = [
        change_after_one_round(*words, f"engine.merge={merge}", sizes=(1, 3, 2))
        for merge in ("auto", "off")
    ]
    assert relative(*changes) < 1e-9


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize(
    "words",
    [
        "algorithm.name=dcco objective.name=cco",
        "algorithm.name=dcco objective.name=vicreg",
        "algorithm.name=fedprox algorithm.mu=3 objective.name=cco",
        *(f"objective.name={name}" for name in ("cco", "vicreg", "supervised", "rotation")),
        *(f"objective.name={name} {' '.join(HEADS[name])}" for name in ("simclr", "simsiam")),
        "objective.name=swav objective.projector=32,16 objective.prototypes=6,3",
        "objective.name=mae encoder.name=vit-tiny",
    ],
)
def test_every_declaration_of_exact_on_union(words: str) -> None:
    results = []
    for merge in ("engine.merge=auto", "engine.merge=off", "engine.chunk=6"):
        given = ("algorithm.name=fedavg", "server.momentum=0.9", *words.split(), merge)
        engine, server = engine_of(settings(*given), made_split(), groups_of(3, 5, 2, 7, 2))
        results.append(train(engine, server, rounds=3) - engine.trainer.initial)
        assert engine.merges == (merge != "engine.merge=off")
    assert results[1].norm() > 1e-3
    assert relative(results[0], results[1]) < 1e-9
    assert relative(results[2], results[1]) < 1e-9


@pytest.mark.parametrize(
    "word",
    [
        "algorithm.local_steps=2",
        "algorithm.batch=2",
        "encoder.norm=batch",
        "client.optimizer=adam",
    ],
)
def test_nothing_else_is_merged(word: str) -> None:
    engine, _ = engine_of(settings(word), made_split(), groups_of(4, 4))
    assert not engine.merges


def test_batch_norm_would_indeed_break_the_union() -> None:
    """The predicate is needed: with batch norm merged and client-by-client rounds differ."""
    changes = []
    for forced in (False, True):
        config = settings("encoder.norm=batch")
        engine, server = engine_of(config, made_split(), groups_of(4, 4, 4))
        engine.merges = forced
        changes.append(train(engine, server, rounds=1) - engine.trainer.initial)
    assert relative(*changes) > 1e-3


def test_naive_fedavg_of_cco_is_not_centralized() -> None:
    """Section 3.3: without sharing statistics the equivalence is lost."""
    dcco = change_after_one_round(sizes=(3, 5, 2, 7))
    naive = change_after_one_round("algorithm.name=fedavg", sizes=(3, 5, 2, 7))
    assert relative(naive, dcco) > 0.1


def test_one_client_with_everything_is_fedavg() -> None:
    dcco = change_after_one_round(sizes=(12,))
    assert relative(dcco, change_after_one_round("algorithm.name=fedavg", sizes=(12,))) < 1e-9


def test_several_local_steps_use_combined_statistics_at_every_step() -> None:
    """By hand: two SGD steps on ⟨⟩_k + sg(⟨⟩_A − ⟨⟩_k), the aggregate staying as it was sent."""
    config = settings("algorithm.local_steps=2")
    engine, server = engine_of(config, made_split(), groups_of(4, 6))
    objective, trainer = engine.trainer.objective, engine.trainer
    clients = [engine.client(np.array([k]), 0, remember=False) for k in range(2)]
    centre = server.state["centre"] = {k: torch.zeros(16, dtype=torch.float64) for k in "fg"}

    def moments_of(client, step):
        return objective.moments(client.encode_step(step).encodings, centre)

    trainer.load(server.weights)
    with torch.no_grad():
        sent = [moments_of(client, 0) for client in clients]
    total = {k: (4 * sent[0][k] + 6 * sent[1][k]) / 10 for k in sent[0]}
    expected = torch.zeros_like(server.weights)
    for client, weight in zip(clients, (0.4, 0.6), strict=True):
        trainer.load(server.weights)
        for step in range(2):
            trainer.flat.gradient.zero_()
            own = moments_of(client, step)
            objective.loss_of(
                {k: own[k] + (total[k] - own[k]).detach() for k in own}, centre
            ).backward()
            trainer.flat.params.add_(trainer.flat.gradient, alpha=-config.client.lr)
        expected += weight * (trainer.flat.vector - server.weights)
    start = server.weights
    assert relative(train(engine, server, rounds=1) - start, expected) < 1e-9


def test_dcco_learns_where_the_centre_matters() -> None:
    """A bias a thousand times the spread changes nothing, in float32 and in the first round too."""
    losses = []
    for bias in (0.0, 1000.0):
        config = settings("precision=fp32")
        engine, server = engine_of(config, made_split(), groups_of(*UNEVEN))
        named = engine.trainer.flat.named(server.weights)
        named["towers.0.head.6.bias"].fill_(bias)
        train(engine, server, rounds=1)
        losses.append(float(server.log["loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_a_client_of_one_sample_is_fine_for_dcco_and_refused_for_fedavg() -> None:
    """The dashes of Table 1."""
    sizes = np.array([4, 1, 4])
    engine, _ = engine_of(settings(), made_split(), groups_of(*sizes))
    check_client_sizes(engine.algorithm, sizes)
    for objective in ("cco", "simclr", "vicreg"):
        config = settings("algorithm.name=fedavg", f"objective.name={objective}")
        engine, _ = engine_of(config, made_split(), groups_of(*sizes))
        with pytest.raises(UserError, match="client 1 holds 1 image") as refused:
            check_client_sizes(engine.algorithm, sizes)
        assert refused.value.key == "algorithm.name"


@pytest.mark.parametrize("objective", ["simclr", "supervised"])
def test_dcco_refuses_losses_of_single_samples(objective: str) -> None:
    with pytest.raises(UserError, match=rf"objective\.name={objective}.*cco or vicreg"):
        engine_of(settings(f"objective.name={objective}"), made_split(), groups_of(4, 4))


@pytest.mark.parametrize("towers", [1, 2])
def test_all_three_forms_of_figure_1(towers: int) -> None:
    """One network or two, and two modalities: a round is exact in each form."""
    from fedssl.data.dataset import Split

    both = made_split(), made_split(size=8)
    paired = Split((both[0].images[0], 255 - both[1].images[0]))
    for split in (made_split(), paired):
        changes = []
        for merge in ("auto", "off"):
            config = settings(f"encoder.towers={towers}", f"engine.merge={merge}")
            engine, server = engine_of(config, split, groups_of(*UNEVEN))
            changes.append(train(engine, server, rounds=1) - engine.trainer.initial)
        assert relative(*changes) < 1e-9
    assert len(engine.trainer.network.towers) == towers


@pytest.mark.parametrize("steps", [2, 3])
def test_the_value_of_the_combined_statistics_is_the_cohorts_at_every_step(steps: int) -> None:
    """So the loss of a round cannot depend on how many local steps it has (float32 too)."""
    losses = []
    for count in (1, steps):
        config = settings(f"algorithm.local_steps={count}", "precision=fp32", "client.lr=0.5")
        engine, server = engine_of(config, made_split(), groups_of(6, 4, 5))
        train(engine, server, rounds=1)
        losses.append(float(server.log["loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
