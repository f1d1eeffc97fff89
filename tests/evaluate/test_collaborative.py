"""Protocol ``collaborative``: who has which labels, and that it is plain supervised FedAvg."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import groups_of, made_split, refused, settings, timeless
from safetensors.torch import load_file
from torch import nn

from fedssl import config
from fedssl.data.dataset import Dataset, Groups, Split
from fedssl.data.random import key, permutation
from fedssl.deploy.introduction import Introduction
from fedssl.deploy.server import build_server_experiment
from fedssl.evaluate import collaborative
from fedssl.evaluate.collaborative import configure, draw_images
from fedssl.evaluate.linear import zero_head
from fedssl.federation.sampling import cohort_size
from fedssl.models.flat_weights import FlatWeights
from fedssl.runs import loop
from fedssl.runs.build import assemble, build_experiment
from fedssl.runs.reevaluate import evaluate
from fedssl.runs.validate import list_warnings

SPEC = "collaborative@50%"
CLASSES = tuple("abcd")


def made(*words, sizes=(40,)):
    """A session of made images, of which clients hold ``sizes``."""
    dataset = Dataset("made", made_split(sum(sizes)), made_split(24), CLASSES)
    words = (f"evaluate.protocols={SPEC}", "augment.name=none", "engine.threads=1", *words)
    return assemble(settings(*words), dataset, groups_of(*sizes))


def digits(*words):
    small = ("rounds=2", "cohort.size=null", "partition.name=iid", "partition.clients=5")
    small += ("objective.projector=32,32,16", "evaluate.baselines=[]", "engine.threads=1")
    recipe = config.read_recipe(None)
    return config.resolve(recipe, [*small, "evaluate.protocols=collaborative@10%", *words])


def evaluate_initial(session):
    return session.evaluator.evaluate(session.trainer.initial)


def federation(session, spec=SPEC):
    """The engine in which a session's protocol has fine-tuned."""
    return session.evaluator._protocols[spec]._engine


@pytest.fixture
def short(monkeypatch):
    """Two rounds, so that a session can be judged often."""
    monkeypatch.setattr(collaborative, "ROUNDS", 2)


# Which images -----------------------------------------------------------------------------------


def labels_of(*labels):
    images = torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8)
    return Split((images,), torch.tensor(labels))


def draw(train, groups, share, *words):
    """Clients label images of their own, each of them once."""
    drawn = draw_images(settings(*words), groups, train, share)
    for k in range(len(groups)):
        assert set(drawn[k].tolist()) <= set(groups[k].tolist())
    assert len(set(drawn.members.tolist())) == len(drawn.members)
    assert (train.labels.numpy()[drawn.members] >= 0).all()
    return drawn


@pytest.mark.parametrize("seed", range(5))
def test_each_client_labels_its_share_of_each_of_its_classes(seed):
    train = labels_of(*[0] * 100, *[0] * 30, *[1] * 70, *[c for c in range(10) for _ in range(29)])
    drawn = draw(train, groups_of(100, 100, 290), 0.1, f"seed={seed}")
    assert drawn.sizes.tolist() == [10, 10, 29]
    counts = [np.bincount(train.labels.numpy()[drawn[k]], minlength=10) for k in range(3)]
    assert counts[0][0] == 10
    assert counts[1][:2].tolist() == [3, 7]
    assert set(counts[2]) <= {2, 3}


ALL, SOME = labels_of(*np.arange(146) % 3), labels_of(*[-1] * 30, *np.arange(20) % 2, *[-1] * 10, 0)


@pytest.mark.parametrize(
    ("train", "groups", "share", "words", "sizes"),
    [
        (ALL, (29, 100, 9, 1, 7), 0.29, (), [8, 29, 2, 1, 2]),
        (ALL, (29, 100, 9, 1, 7), 0.01, (), [1, 1, 1, 1, 1]),
        (ALL, (29, 100, 9, 1, 7), 0.01, ("encoder.norm=batch",), [2, 2, 2, 0, 2]),
        (SOME, (50, 10, 1), 0.5, (), [10, 0, 1]),  # only images with a label count
    ],
)
def test_shares_are_rounded_down_but_not_to_nothing(train, groups, share, words, sizes):
    assert draw(train, groups_of(*groups), share, *words).sizes.tolist() == sizes


def test_which_images_depends_on_the_seed_alone_and_all_have_the_same_chance():
    train, groups = labels_of(*np.arange(60) % 4), groups_of(40, 20)
    drawn = [draw(train, groups, 0.1, f"seed={s}") for s in (0, 0, *range(400))]
    assert np.array_equal(drawn[0].members, drawn[1].members)
    seen = np.bincount(np.concatenate([d.members for d in drawn[2:]]), minlength=60)
    assert seen.min() > 15 and seen.max() < 70  # 40 on average
    assert len({tuple(d.members.tolist()) for d in drawn}) == 400  # and in any company


# Training ---------------------------------------------------------------------------------------


def slow(tower, images, labels, groups, head, seed):
    """FedAvg of SGD with two rates, client by client and batch by batch."""
    for round in range(collaborative.ROUNDS):
        factor = 0.5 * (1 + np.cos(np.pi * round / collaborative.ROUNDS))
        replies = []
        for client in range(len(groups)):
            model, own = copy.deepcopy((tower, head)), groups[client]
            body, top = (m.train() for m in model)
            lr = collaborative.RULE.lr * factor
            rates = [
                {"params": body.parameters(), "lr": lr},
                {"params": top.parameters(), "lr": 20 * lr},
            ]
            rule = torch.optim.SGD(rates, momentum=0.9)
            for epoch in range(collaborative.EPOCHS):
                order = np.arange(len(own))
                if len(own) > collaborative.BATCH:
                    number = round * collaborative.EPOCHS + epoch
                    order = permutation(key(seed, "shuffle", client, number), len(own))
                batch = min(collaborative.BATCH, len(own))
                for start in range(0, len(own) - batch + 1, batch):
                    chosen = own[order[start : start + batch]]
                    loss = nn.functional.cross_entropy(top(body(images[chosen])), labels[chosen])
                    rule.zero_grad()
                    loss.backward()
                    rule.step()
            replies.append(model)
        sizes = groups.sizes / groups.sizes.sum()
        for i, part in enumerate((tower, head)):
            states = [reply[i].state_dict() for reply in replies]
            mean = {n: sum(w * s[n] for w, s in zip(sizes, states, strict=True)) for n in states[0]}
            part.load_state_dict(mean, strict=False)  # torch adds batch norm's counter
    return tower, head


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("sizes", [(40,), (26, 6, 14)])
def test_it_is_plain_fedavg_by_samples_from_the_encoder(sizes, norm, monkeypatch):
    """With one client, centralized training on its labelled images."""
    monkeypatch.setattr(collaborative, "ROUNDS", 3)
    monkeypatch.setattr(collaborative, "BATCH", 5)
    session = made(f"encoder.norm={norm}", "seed=3", sizes=sizes)
    encoder = session.evaluator.tower(session.trainer.initial).encoder
    drawn = draw_images(session.config, session.clients, session.dataset.train, 0.5)
    assert drawn.sizes.tolist() == [n // 2 for n in sizes]
    head = nn.Linear(encoder.features, 4, dtype=torch.float64)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    images = session.dataset.train.images[0].double() / 255
    start = copy.deepcopy(encoder).double()
    body, top = slow(start, images, session.dataset.train.labels, drawn, head, 3)
    score = evaluate_initial(session)[f"{SPEC}_top1"]
    nested = federation(session)
    found = nested.trainer.flat.named(collaborative.train(nested, encoder, 4))
    expected = FlatWeights(body).named()
    assert (expected["layers.0.weight"] - encoder.layers[0].weight).abs().max() > 1e-4
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[f"towers.0.encoder.{name}"], tensor, atol=1e-9, rtol=1e-7, msg=name
        )
    scale = 20**0.5
    torch.testing.assert_close(scale * found["towers.0.head.layer.weight"], top.weight.detach())
    torch.testing.assert_close(scale * found["towers.0.head.layer.bias"], top.bias.detach())
    test = session.dataset.test
    with torch.no_grad():
        logits = top.eval()(body.eval()(test.images[0].double() / 255))
    right = (logits.argmax(1) == test.labels).double().mean().item()
    assert score == pytest.approx(100 * right)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_without_a_round_it_is_the_judged_encoder_and_a_classifier_of_zeros(norm, monkeypatch):
    monkeypatch.setattr(collaborative, "ROUNDS", 0)
    session = made(f"encoder.norm={norm}", "precision=fp32")
    weights = session.trainer.initial + 0.01 * torch.arange(len(session.trainer.initial)).sin()
    # The model that was judged before leaves nothing.
    assert evaluate_initial(session) == {f"{SPEC}_top1": 25.0}
    nested, encoder = federation(session), session.evaluator.tower(weights).encoder
    found = nested.trainer.flat.named(collaborative.train(nested, encoder, 4))
    for name, tensor in FlatWeights(encoder).named().items():
        assert torch.equal(found[f"towers.0.encoder.{name}"], tensor)
    assert not found["towers.0.head.layer.weight"].any()
    assert not found["towers.0.head.layer.bias"].any()


def test_every_judgement_starts_anew_and_changes_nothing_here(short):
    session = made("encoder.norm=batch", "client.momentum=0.9", sizes=(20, 20))
    before, random = session.trainer.initial.clone(), torch.get_rng_state()
    first = evaluate_initial(session)
    nested = federation(session)
    session.evaluator.evaluate(session.trainer.initial * 0.5)
    assert evaluate_initial(session) == first
    assert federation(session) is nested
    encoder = session.evaluator.tower(before).encoder
    start = copy.deepcopy(encoder.state_dict())
    weights = [collaborative.train(nested, encoder, 4) for _ in range(2)]
    assert torch.equal(*weights)
    assert all(torch.equal(start[n], v) for n, v in encoder.state_dict().items())
    assert torch.equal(session.trainer.initial, before)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_trained_encoder_is_worth_more_than_a_random_one(monkeypatch):
    """At equal steps: one that has already been tuned on other labels starts far ahead."""
    monkeypatch.setattr(collaborative, "ROUNDS", 8)
    spec = "collaborative@40%"
    session = build_experiment(digits(f"evaluate.protocols={spec}"))
    evaluate_initial(session)
    weights, tuned = session.trainer.initial.clone(), federation(session, spec).trainer.flat
    for name, tensor in session.trainer.flat.named(weights).items():
        if ".encoder." in name:
            tensor.copy_(tuned.named()[name])
    monkeypatch.setattr(collaborative, "ROUNDS", 4)
    session = build_experiment(digits())
    random, trained = (session.evaluator.evaluate(w) for w in (session.trainer.initial, weights))
    name = "collaborative@10%_top1"
    assert trained[name] > random[name] + 20


# The federation ---------------------------------------------------------------------------------


def test_of_the_run_only_the_federation_stays():
    given = settings(
        "encoder.towers=2", "encoder.norm=batch", "algorithm.norm_policy=local",
        "partition.clients=30", "cohort.size=30", "cohort.minimum=4", "cohort.average=median",
        "privacy.noise=1",
        "engine.name=flower", "engine.updates=fp16", "engine.max_norm=3", "engine.merge=off",
        "seed=7", "precision=bf16", "evaluate.size=24", "rounds=9",
    )  # fmt: skip
    own = configure(given, clients=12)
    assert (own.algorithm.name, own.objective.name) == ("fedavg", "supervised")
    assert (own.algorithm.norm_policy, own.algorithm.batch) == ("average", 32)
    assert own.algorithm.local_epochs == 2 and own.rounds == 50
    assert own.cohort == config.Cohort(size=12)
    assert own.privacy == config.Privacy() and own.evaluate.size is None
    assert own.engine == replace(config.Engine(), merge="off")
    assert own.encoder == replace(given.encoder, towers=1)
    assert (own.client.optimizer, own.client.lr, own.client.momentum) == ("sgd", 0.03, 0.9)
    assert (own.server.optimizer, own.server.lr, own.schedule) == ("sgd", 1.0, "cosine")
    assert (own.seed, own.precision) == (7, "bf16")
    assert configure(settings("cohort.fraction=0.2"), 12).cohort.fraction == 0.2

    for words, flip, crop in (
        (("augment.name=digits",), 0.0, (0.5, 1.0)),
        (("augment.name=fedema",), 0.5, (0.08, 1.0)),
        (("augment.name=fedema", "augment.flip=0", "augment.crop=0.3,1"), 0.0, (0.3, 1.0)),
        (("augment.name=none",), 0.0, (1.0, 1.0)),
    ):  # images are flipped and cropped as the run does it, and nothing else
        expected = config.Augment("none", flip=flip, crop=crop)
        assert configure(settings(*words), 5).augment == expected


@pytest.fixture
def seen(monkeypatch):
    """Each engine and encoder, instead of training with them; their score is their number."""
    seen = []

    def spy(engine, encoder, classes):
        seen.append((engine, encoder))
        return engine.trainer.initial

    monkeypatch.setattr(collaborative, "train", spy)
    monkeypatch.setattr(collaborative, "head_accuracy", lambda *_: float(len(seen)))
    return seen


def tune(session, seen):
    """The engine and the encoder of one evaluation."""
    evaluate_initial(session)
    return seen.pop()


def test_clients_without_labels_are_left_out_and_noted(seen):
    train = made_split(36)
    train.labels[20:30] = -1
    dataset = Dataset("made", train, made_split(8), CLASSES)
    words = ("evaluate.protocols=collaborative@10%", "evaluate.monitor=collaborative@10%")
    session = assemble(settings(*words, "cohort.size=4"), dataset, groups_of(20, 10, 3, 3))
    assert [note for note in list_warnings(session) if not note.startswith("Privacy: ")] == [
        "collaborative@10%: 1 of 4 clients have too few labelled images and are left out",
        "collaborative@10%: small clients label more than their share, in all 15.4% of the images",
    ]
    own, _ = tune(session, seen)
    assert own.groups.sizes.tolist() == [2, 1, 1]
    assert cohort_size(own.trainer.config, 3) == 3
    assert list(list_warnings(made(sizes=(20, 20)))) == []


def test_centralized_training_is_tuned_in_the_partition_without_held_out_images(seen):
    words = ("algorithm.name=centralized", "partition.name=classes", "partition.clients=5")
    own, _ = tune(build_experiment(digits(*words, "data.holdout=0.5")), seen)
    labels = own.trainer.labels.numpy()
    kinds = [set(labels[own.groups[k]].tolist()) for k in range(5)]
    assert len(own.groups) == 5
    assert max(map(len, kinds)) == 2 and len(set.union(*kinds)) == 10
    assert 65 <= len(labels) <= 71  # 10 % of half of 1437, rounded down for each of five


def test_the_judged_tower_sees_its_own_images(seen):
    words = ("encoder.towers=2", "data.halves=true", "evaluate.tower=second")
    session = build_experiment(digits(*words))
    own, encoder = tune(session, seen)
    train = session.dataset.train
    part = draw_images(session.config, session.clients, train, 0.1).members
    (images,) = own.trainer.images
    assert torch.equal(images, train.images[1][part])
    assert torch.equal(own.trainer.labels, train.labels[part])
    second = session.tower(1).encoder
    assert torch.equal(next(encoder.parameters()), next(second.parameters()))
    assert len(own.trainer.network.towers) == 1


def test_images_have_the_size_of_judging_and_the_network_stays(seen):
    session = build_experiment(digits("evaluate.size=24", "encoder.name=resnet14"))
    assert tune(session, seen)[0].trainer.images[0].shape[2:] == (24, 24)
    large = replace(session.dataset, train=made_split(20, size=96), test=made_split(8, size=96))
    session = assemble(session.config, large, groups_of(20))
    assert session.tower().encoder.stem[0].kernel_size == (7, 7)
    small = replace(session.dataset, train=made_split(20), test=made_split(8))
    session.evaluator.data = replace(session.evaluator.data, dataset=small)
    network = tune(session, seen)[0].trainer.network
    assert network.towers[0].encoder.stem[0].kernel_size == (7, 7)


def test_personal_models_are_averaged(seen):
    words = ("algorithm.name=standalone", "objective.name=simclr", "objective.projector=32,16")
    session = build_experiment(
        digits(*words, "evaluate.protocols=collaborative@10%,collaborative@5%")
    )
    session.server.round = 0
    session.algorithm.round(session.server, session.engine.cohort(np.arange(5), 0))
    result = session.evaluator.evaluate_result(session.models)
    assert result == {"collaborative@10%_top1": 5.0, "collaborative@5%_top1": 6.0}
    engines = [own for own, _ in seen]
    assert len(engines) == 10 and len(set(map(id, engines))) == 2


# Runs -------------------------------------------------------------------------------------------

MOCO = (
    "objective.name=moco", "objective.projector=32,16", "objective.queue=64", "rounds=2",
    "algorithm.name=fedavg", "algorithm.local_epochs=1",
    "encoder.norm=batch", "client.momentum=0.9", "server.optimizer=sgd", "server.lr=1",
    "evaluate.every=1", "checkpoint.seconds=0", "data.labels=400", "algorithm.batch=32",
)  # fmt: skip


def test_watching_a_run_does_not_change_it(short, tmp_path):
    folders = {name: tmp_path / name for name in ("knn", "collaborative@10%")}
    for name, out in folders.items():
        loop.run(digits(*MOCO, "evaluate.protocols=knn", f"evaluate.monitor={name}"), out)
    plain, watched = map(timeless, folders.values())
    assert all(0 < line["collaborative@10%_top1"] <= 100 for line in watched)
    assert [a["loss"] for a in plain] == [a["loss"] for a in watched]
    for file in ("checkpoint/state.safetensors", "encoder.safetensors"):
        a, b = (load_file(out / file) for out in folders.values())
        assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_rows_of_a_run_and_of_judging_it_again(short, tmp_path):
    first = loop.run(digits("rounds=1", "data.labels=400"), tmp_path / "a")
    words = ("rounds=0", "data.labels=400", f"encoder.init={tmp_path / 'a'}")
    after = loop.run(digits(*words), tmp_path / "b")
    assert set(first["result"]) == {"collaborative@10%_top1"}
    assert after["initial"] == after["result"] == first["result"]
    assert after["untrained"] == first["untrained"]
    again = evaluate(tmp_path / "a", ["evaluate.protocols=collaborative@10%,collaborative@20%"])
    assert set(again["result"]) == {"collaborative@10%_top1", "collaborative@20%_top1"}
    assert again["result"]["collaborative@10%_top1"] == first["collaborative@10%_top1"]
    with refused("evaluate.protocols", "collaborative@10%", says="needs the run's own clients"):
        evaluate(tmp_path / "a", ["data.labels=100"])


# Refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["protocols", "monitor"])
def test_what_could_not_be_tuned_is_refused_before_training(name):
    spec = "collaborative@5%"
    words = ("evaluate.protocols=unlabeled", f"evaluate.{name}={spec}")
    train, test, few = made_split(40), made_split(8), made_split(40)
    few.labels[4:] = -1
    cases = replace(train, cases=np.arange(40) % 20, labels=torch.arange(40) % 20 % 4)
    everyone = groups_of(40)
    nobody = Groups(np.arange(4, 40), np.array([0, 36]))
    single = Groups(np.array([0, 4, 5, 1, 6, 7]), np.array([0, 3, 6]))
    for given, tested, groups, own, problem in (
        (cases, test, everyone, (), "needs single images"),
        (train, replace(test, cases=np.arange(8)), everyone, (), "needs single images"),
        (train, replace(test, labels=None), everyone, (), "the test split has no labels"),
        (train, None, everyone, (), "there is no test split"),
        (few, test, everyone, (), "would all be of one class"),
        (few, test, nobody, (), "no client holds a labelled training image"),
        *(
            (few, test, single, (f"algorithm.name={a}", "encoder.norm=batch"), "holds two labelled")
            for a in ("dcco", "centralized")
        ),
    ):
        with refused(f"evaluate.{name}", spec, says=problem):
            assemble(settings(*words, *own), Dataset("made", given, tested, CLASSES), groups)


def test_a_deployments_server_refuses_before_the_first_round():
    sites = [Introduction(f"{k}", f"ward {k}", 10, (1,), 8, 8) for k in range(2)]
    words = ("engine.name=flower", "engine.sites=2", f"evaluate.protocols={SPEC}")
    with refused("evaluate.protocols", SPEC):
        build_server_experiment(settings(*words), sites)
    assert build_server_experiment(settings(*words[:2]), sites).names == ["ward 0", "ward 1"]


def test_a_scaled_layer_learns_faster_by_the_square_of_the_factor():
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.arange(6) % 2
    layers = [zero_head(3, 2, x) for _ in range(2)]
    heads = (layers[0], collaborative.Scaled(layers[1], 3.0))
    for head, lr in zip(heads, (0.9, 0.1), strict=True):
        rule = torch.optim.SGD(head.parameters(), lr=lr, momentum=0.9)
        for _ in range(4):
            rule.zero_grad()
            nn.functional.cross_entropy(head(x), y).backward()
            rule.step()
    torch.testing.assert_close(heads[0](x), heads[1](x))
