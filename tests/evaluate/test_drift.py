"""How far local models are from the global one; and that looking changes nothing."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import groups_of, made_split, refused, settings
from PIL import Image, ImageDraw
from sklearn.decomposition import PCA

from fedssl import config
from fedssl.data.charts import palette
from fedssl.data.dataset import Dataset
from fedssl.evaluate import drift
from fedssl.runs import loop
from fedssl.runs.build import assemble

WORDS = (
    *("algorithm.name=fedavg", "algorithm.local_epochs=1", "algorithm.batch=4"),
    *("objective.name=simclr", "objective.projector=32,16", "client.lr=0.1", "engine.threads=1"),
    *("evaluate.protocols=knn", "evaluate.drift=true"),
)


def session(*words, sizes=(8, 12, 20)):
    train = made_split(sum(sizes))
    dataset = Dataset("made", train, made_split(12), tuple("abcd"))
    return assemble(settings(*WORDS, *words), dataset, groups_of(*sizes))


def one_round(made):
    line = loop.run_one_round(made, Path(), print)
    return line | drift.measure(made.models, made.evaluator)


def distance(made, a, b):
    return sum(drift.layer_distances(made.trainer.flat, a, b).values())


def test_distances_are_those_of_the_models():
    made = session()
    before = made.server.weights.clone()
    line = one_round(made)
    watched, named = made.trainer.watched, made.trainer.flat.named
    assert sorted(watched) == [0, 1, 2]
    central = named(made.server.weights)
    mean = sum(n * watched[k] for k, n in enumerate((8, 12, 20))) / 40
    torch.testing.assert_close(mean, made.server.weights)
    layers = [*(f"encoder.layers.{i}" for i in (0, 3, 6)), "head.0", "head.3"]
    for client, own in watched.items():
        assert not torch.equal(own, before)
        total = 0.0
        for layer in layers:
            names = [n for n in central if n.startswith(f"towers.0.{layer}.")]
            squares = [float((named(own)[n] - central[n]).square().sum()) for n in names]
            total += sum(squares) ** 0.5
        assert line["local_weight_distance"][str(client)] == pytest.approx(total)
    each = list(line["local_weight_distance"].values())
    assert sum(line["layer_distance"].values()) == pytest.approx(np.mean(each))
    apart = [distance(made, watched[a], watched[b]) for a, b in ((0, 1), (0, 2), (1, 2))]
    assert line["between_clients_weight_distance"] == pytest.approx(np.mean(apart))
    images = made.dataset.train.images[0].float() / 255
    with torch.no_grad():
        local, shared = (
            made.evaluator.tower(weights).encoder(images)
            for weights in (watched[1], made.server.weights)
        )
    expected = float((local - shared).norm(dim=1).mean())
    assert line["local_feature_distance"]["1"] == pytest.approx(expected, rel=1e-5)


def test_where_there_are_several_global_models_each_client_is_compared_with_its_own():
    """FeatARC with clusters that start apart, and clients that keep their norm layers."""
    made = session(
        *("algorithm.name=featarc", "algorithm.clusters=2", "algorithm.start=apart"),
        *("encoder.norm=batch", "algorithm.norm_policy=local"),
    )
    line = one_round(made)
    watched, kept, states = made.trainer.watched, made.trainer.kept, made.engine.states
    numbers = [int(states.on_host(k)["cluster"]) for k in range(3)]
    assert set(numbers) == {0, 1}
    clusters = made.algorithm.models(made.server)
    for number in (0, 1):
        members = [k for k in range(3) if numbers[k] == number]
        mean = torch.stack([states.on_host(k)["norm"] for k in members]).mean(dim=0)
        model, other = (made.models.global_model(clusters[n]) for n in (number, 1 - number))
        torch.testing.assert_close(model[kept], mean)
        for k in members:
            expected = distance(made, watched[k], model)
            assert line["local_weight_distance"][str(k)] == pytest.approx(expected)
            assert distance(made, watched[k], other) > expected
    ((a, b),) = [c for c in ((0, 1), (0, 2), (1, 2)) if numbers[c[0]] == numbers[c[1]]]
    apart = distance(made, watched[a], watched[b])  # who is in another cluster does not count
    assert line["between_clients_weight_distance"] == pytest.approx(apart)
    names = drift.extract_features(made.models, made.evaluator)
    assert {name for name in names if name.startswith("global")} == {"global", "global 1"}


def test_cka_is_blind_to_rotation_and_scale_and_nothing_else():
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(50, 6, generator=generator) for _ in range(2))
    turn = torch.linalg.qr(torch.randn(6, 6, generator=generator))[0]
    assert drift.cka(x, 3 * x @ turn + 1) == pytest.approx(1)
    assert drift.cka(x, noise) < 0.5
    assert np.isnan(drift.cka(x, torch.ones(50, 6)))


def test_looking_changes_no_round():
    watched, plain = session(), session("evaluate.drift=false")
    for _ in range(2):
        one_round(watched)
        assert "local_cka" not in one_round(plain)
    assert torch.equal(watched.server.weights, plain.server.weights)


def test_only_some_of_many_clients():
    made = session(sizes=(4,) * 12)
    line = one_round(made)
    assert len(line["local_cka"]) == 10


def test_the_picture_and_the_metrics_of_a_run(tmp_path):
    small = ["rounds=2", "data.labels=60", "data.size=8", "partition.name=iid", "cohort.size=null"]
    small += ["partition.clients=3", "encoder.groups=8", "evaluate.baselines=[]", *WORDS]
    loop.run(config.resolve(config.read_recipe(None), small), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < v <= 1 for line in lines for v in line["local_cka"].values())
    with Image.open(tmp_path / "local-features.png") as image:
        colours = {c for _, c in image.convert("RGB").getcolors(1 << 20) or ()}
    drawn = palette(10)
    assert {*drawn[:4]} <= colours and drawn[4] not in colours  # the global model and three clients


def test_the_pictures_clients_have_their_names(tmp_path, monkeypatch):
    words = []
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda _, at, text, *__: words.append(text))
    features = {name: torch.rand(4, 3) for name in ("global", "global 1", "0", "2")}
    drift.draw_features(features, ["a very long name", "b", "3"], tmp_path / "a.png")
    assert words == ["global", "global 1", "a very long ", "client 3"]


@pytest.mark.parametrize("installed", [False, True])
def test_features_are_drawn_by_umap_of_twenty_numbers_where_it_is_installed(installed, monkeypatch):
    seen = []

    class UMAP:
        def __init__(self, n_components, random_state):
            assert (n_components, random_state) == (2, 0)

        def fit_transform(self, rows):
            seen.append(rows)
            return rows[:, 18:]

    monkeypatch.setitem(sys.modules, "umap", types.SimpleNamespace(UMAP=UMAP))
    monkeypatch.setattr(drift, "find_spec", lambda name: installed or None)
    rows = torch.randn(60, 40, generator=torch.Generator().manual_seed(0)).double()
    found, reference = drift.flatten(rows), PCA(20).fit_transform(rows.numpy())
    if installed:
        np.testing.assert_allclose(np.abs(seen[0]), np.abs(reference), atol=1e-9)
    expected = reference[:, 18:] if installed else reference[:, :2]
    np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=1e-9)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm.local_epochs=null", "algorithm.batch=null"], "a merged cohort"),
        (["algorithm.name=centralized"], "centralized has no clients"),
        (["engine.name=flower"], "never come here whole"),
    ],
)
def test_where_there_are_no_local_models_it_is_refused(words, message):
    with refused("evaluate.drift", says=message):
        session(*words)
