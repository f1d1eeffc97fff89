"""How far local models are from the global one; and that looking changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import groups_of, made_split, settings
from PIL import Image, ImageDraw

from fedssl.data.charts import palette
from fedssl.data.dataset import Dataset
from fedssl.evaluate import drift
from fedssl.runs import loop
from fedssl.runs.build import Experiment, assemble
from fedssl.util.errors import UserError

WORDS = (
    *("algorithm.name=fedavg", "algorithm.local_epochs=1", "algorithm.batch=4"),
    *("objective.name=simclr", "objective.projector=32,16", "client.lr=0.1", "engine.threads=1"),
    *("evaluate.protocols=knn", "evaluate.drift=true"),
)


def session(*words: str, sizes: tuple[int, ...] = (8, 12, 20)) -> Experiment:
    train = made_split(sum(sizes))
    dataset = Dataset("made", train, made_split(12), tuple("abcd"))
    return assemble(settings(*WORDS, *words), dataset, groups_of(*sizes))


def one_round(made: Experiment) -> dict[str, object]:
    line = loop.run_one_round(made, Path(), print)
    return line | drift.measure(made.models, made.evaluator)


def test_distances_are_those_of_the_models() -> None:
    made = session()
    before = made.server.weights.clone()
    line = one_round(made)
    watched, named = made.trainer.watched, made.trainer.flat.named
    assert watched is not None and sorted(watched) == [0, 1, 2]
    central = named(made.server.weights)
    mean = sum(n * watched[k] for k, n in enumerate((8, 12, 20))) / 40  # type: ignore[operator]
    torch.testing.assert_close(mean, made.server.weights)
    for client, own in watched.items():
        assert not torch.equal(own, before)
        total = 0.0
        for layer in (
            "encoder.layers.0",
            "encoder.layers.3",
            "encoder.layers.6",
            "head.0",
            "head.3",
        ):
            names = [n for n in central if n.startswith(f"towers.0.{layer}.")]
            squares = [float((named(own)[n] - central[n]).square().sum()) for n in names]
            total += sum(squares) ** 0.5
        assert line["local_weight_distance"][str(client)] == pytest.approx(total)  # type: ignore[index]
    layers: dict[str, float] = line["layer_distance"]  # type: ignore[assignment]
    each: dict[str, float] = line["local_weight_distance"]  # type: ignore[assignment]
    assert sum(layers.values()) == pytest.approx(np.mean(list(each.values())))
    apart = [
        sum(drift.layer_distances(made.trainer.flat, watched[a], watched[b]).values())
        for a, b in ((0, 1), (0, 2), (1, 2))
    ]
    assert line["between_clients_weight_distance"] == pytest.approx(np.mean(apart))
    encoder = made.evaluator.tower(watched[1]).encoder
    images = made.dataset.train.images[0].float() / 255
    with torch.no_grad():
        features = encoder(images) - made.evaluator.tower(made.server.weights).encoder(images)
    found: dict[str, float] = line["local_feature_distance"]  # type: ignore[assignment]
    assert found["1"] == pytest.approx(float(features.norm(dim=1).mean()), rel=1e-5)


def test_where_there_are_several_global_models_each_client_is_compared_with_its_own() -> None:
    """FeatARC with clusters that start apart, and clients that keep their norm layers."""
    made = session(
        *("algorithm.name=featarc", "algorithm.clusters=2", "algorithm.start=apart"),
        *("encoder.norm=batch", "algorithm.norm_policy=local"),
    )
    line = one_round(made)
    watched, kept, states = made.trainer.watched, made.trainer.kept, made.engine.states
    assert watched is not None and kept is not None
    numbers = [int(states.on_host(k)["cluster"]) for k in range(3)]
    assert set(numbers) == {0, 1}
    clusters = made.algorithm.models(made.server)  # type: ignore[attr-defined]
    for number in (0, 1):
        members = [k for k in range(3) if numbers[k] == number]
        norms = [states.on_host(k)["norm"] for k in members]
        mean = torch.stack(norms).mean(dim=0)
        model, other = (made.models.global_model(clusters[n]) for n in (number, 1 - number))
        torch.testing.assert_close(model[kept], mean)
        for k in members:
            expected = sum(drift.layer_distances(made.trainer.flat, watched[k], model).values())
            assert line["local_weight_distance"][str(k)] == pytest.approx(expected)  # type: ignore[index]
            assert (
                sum(drift.layer_distances(made.trainer.flat, watched[k], other).values()) > expected
            )
    names = {
        name
        for name in drift.extract_features(made.models, made.evaluator)
        if name.startswith("global")
    }
    assert names == {"global", "global 1"}


def test_cka_is_blind_to_rotation_and_scale_and_nothing_else() -> None:
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(50, 6, generator=generator) for _ in range(2))
    turn = torch.linalg.qr(torch.randn(6, 6, generator=generator))[0]
    assert drift.cka(x, 3 * x @ turn + 1) == pytest.approx(1)
    assert drift.cka(x, noise) < 0.5
    assert np.isnan(drift.cka(x, torch.ones(50, 6)))


def test_looking_changes_no_round() -> None:
    watched, plain = session(), session("evaluate.drift=false")
    for _ in range(2):
        one_round(watched)
        assert "local_cka" not in one_round(plain)
    assert torch.equal(watched.server.weights, plain.server.weights)


def test_only_some_of_many_clients() -> None:
    made = session(sizes=(4,) * 12)
    line = one_round(made)
    assert len(line["local_cka"]) == 10  # type: ignore[arg-type]


def test_the_picture_and_the_metrics_of_a_run(tmp_path: Path) -> None:
    from fedssl import config

    small = ["rounds=2", "data.labels=60", "data.size=8", "partition.name=iid", "cohort.size=null"]
    small += ["partition.clients=3", "encoder.groups=8", "evaluate.baselines=[]", *WORDS]
    loop.run(config.resolve(config.read_recipe(None), small), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < v <= 1 for line in lines for v in line["local_cka"].values())
    with Image.open(tmp_path / "local-features.png") as image:
        colours = {c for _, c in image.convert("RGB").getcolors(1 << 20) or ()}
    drawn = palette(10)
    assert {*drawn[:4]} <= colours and drawn[4] not in colours  # the global model and three clients


def test_the_pictures_clients_have_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: list[str] = []
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda _, at, text, *__: words.append(text))
    features = {name: torch.rand(4, 3) for name in ("global", "global 1", "0", "2")}
    drift.draw_features(features, ["a very long name", "b", "3"], tmp_path / "a.png")
    assert words == ["global", "global 1", "a very long ", "client 3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["algorithm.local_epochs=null", "algorithm.batch=null"],
            "a merged cohort",
        ),
        (["algorithm.name=centralized"], "centralized has no clients"),
        (["engine.name=flower"], "never come here whole"),
    ],
)
def test_where_there_are_no_local_models_it_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        session(*words)
    assert "\n" not in str(error.value)
