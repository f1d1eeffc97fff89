"""Clients that differ in clusters of features, rotations and styles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import made_split, refused
from numpy.typing import NDArray
from partitions import groups_of
from rounds import assert_both_engines_agree
from safetensors.torch import save_file
from torch import Tensor

from fedssl import config as configuration
from fedssl.cli import main
from fedssl.config import Config
from fedssl.data import heterogeneity
from fedssl.data.client_table import count_labels
from fedssl.data.dataset import Dataset, Split
from fedssl.data.heterogeneity import STYLES, alter_training_images, find_clusters
from fedssl.data.load import load_dataset
from fedssl.data.random import key
from fedssl.evaluate import linear, per_client
from fedssl.evaluate.features import extract
from fedssl.models.network import Heads, Tower, build
from fedssl.runs.build import build_experiment
from fedssl.runs.sources import find_sources as assign
from fedssl.runs.split import split_clients
from fedssl.runs.validate import check_deployment, list_warnings

ROTATION = ("partition.name=skew", "partition.source=rotation", "partition.sources=4")
STYLE = ("partition.name=skew", "partition.source=style", "partition.sources=10")
CLUSTERS = ("partition.name=skew", "partition.source=features", "partition.sources=3")


def resolved(*words: str) -> Config:
    return configuration.resolve(configuration.read_recipe(None), words)


def made(count: int = 40, channels: int = 1, size: int = 8) -> Dataset:
    split = made_split(count, channels, size)
    return Dataset("made", split, split, ("a", "b", "c", "d"))


def sources(words: tuple[str, ...], dataset: Dataset) -> tuple[tuple[str, ...], Tensor, Tensor]:
    """The names of the sources, the source of each image, and the images that clients get."""
    config = resolved(*words)
    found = assign(config, dataset)
    altered = alter_training_images(config.partition, dataset, config.seed)
    return found.names, found.labels, altered.train.images[0]


# Rotation and style ----------------------------------------------------------------------------


@pytest.mark.parametrize("words", [ROTATION, STYLE])
def test_sources_are_even_drawn_by_seed_and_independent_of_the_class(words: tuple[str]) -> None:
    dataset = made(4003)
    names, of, _ = sources(words, dataset)
    assert dataset.train.labels is not None
    sizes = torch.bincount(of, minlength=len(names))
    assert int(sizes.max() - sizes.min()) <= 1
    for c in range(4):
        share = torch.bincount(of[dataset.train.labels == c]) / 1000
        assert float((share - 1 / len(sizes)).abs().max()) < 0.06
    again, other = (sources((*words, f"seed={s}"), dataset)[1] for s in (0, 1))
    assert torch.equal(of, again) and not torch.equal(of, other)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_each_image_is_turned_by_its_sources_angle(channels: int) -> None:
    """Four sources are quarter turns, which torch does without arithmetic."""
    dataset = made(channels=channels)
    names, of, turned = sources(ROTATION, dataset)
    assert names == ("0°", "90°", "180°", "270°")
    for before, after, k in zip(dataset.train.images[0], turned, of.tolist(), strict=True):
        assert torch.equal(after, torch.rot90(before, k, (1, 2)))  # counter-clockwise


def test_five_angles_divide_the_circle() -> None:
    """Figure 10: a spot at the right edge moves counter-clockwise by 2π/5 a source."""
    images = torch.zeros(50, 1, 33, 33, dtype=torch.uint8)
    images[:, :, 15:18, 27:30] = 255
    words = ("partition.name=dirichlet", "partition.source=rotation")
    names, of, turned = sources(words, Dataset("spot", Split((images,)), None))
    assert names == ("0°", "72°", "144°", "216°", "288°")
    for i, k in enumerate(of.tolist()):
        y, x = (np.average(np.arange(33), weights=turned[i, 0].sum(1 - d)) for d in (0, 1))
        angle = np.degrees(np.arctan2(16 - y, x - 16)) % 360
        assert abs((angle - 72 * k + 180) % 360 - 180) < 1.5
        assert np.hypot(16 - y, x - 16) == pytest.approx(12, abs=0.2)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_styles_are_all_different_and_the_images_own(channels: int) -> None:
    """An image's style is its source's; the first style is none, and no two are near."""
    dataset = made(count=100, channels=channels, size=12)
    names, of, styled = sources(STYLE, dataset)
    assert names == tuple(STYLES)
    plain = dataset.train.images[0]
    for i, k in enumerate(of.tolist()):
        every = [style(plain[i : i + 1].float()).clamp(0, 255) for style in STYLES.values()]
        apart = [float((styled[i] - image).abs().mean()) for image in every]
        assert apart[k] < 0.51
        assert min(apart[:k] + apart[k + 1 :]) > 5
    assert torch.equal(styled[of == 0], plain[of == 0])


def test_both_modalities_are_altered_and_the_rest_is_not() -> None:
    dataset = made()
    one = dataset.train.images[0]
    pairs = replace(dataset, train=replace(dataset.train, images=(one, one)))
    turned = alter_training_images(resolved(*ROTATION).partition, pairs, 0)
    assert torch.equal(*turned.train.images) and not torch.equal(turned.train.images[0], one)
    assert turned.test is pairs.test and turned.train.labels is pairs.train.labels
    for words in (("partition.name=skew",), CLUSTERS, ("partition.name=iid",)):
        assert alter_training_images(resolved(*words).partition, dataset, 0) is dataset


@pytest.mark.parametrize("words", [ROTATION, (*STYLE[:2], "partition.sources=4")])
def test_clients_train_on_altered_images(words: tuple[str]) -> None:
    """One source a client, in the very images that it trains on."""
    config = resolved(
        *words, "partition.clients=4", "cohort.size=null", "data.name=digits", "rounds=1"
    )
    plain = load_dataset(config.data, config.seed)
    session = build_experiment(config)
    own, test = session.trainer.images[0].cpu(), session.dataset.test
    assert test is not None and plain.test is not None
    assert torch.equal(test.images[0], plain.test.images[0])
    assert torch.equal(session.evaluator.data.train.images[0], own)
    for k in range(4):
        part = torch.from_numpy(session.engine.groups[k])
        before = plain.train.images[0][part]
        if words is ROTATION:
            wanted = torch.rot90(before, k, (2, 3))
        else:
            wanted = list(STYLES.values())[k](before.float())
            wanted = wanted.round().clamp(0, 255).to(torch.uint8)
        assert torch.equal(own[part], wanted)


@pytest.mark.parametrize("size", [8, 12])
def test_each_client_is_judged_on_test_images_like_its_own(size: int) -> None:
    words = ("partition.clients=4", "cohort.size=null", "data.size=8", "evaluate.client_test=iid")
    config = resolved(*ROTATION, *words, f"evaluate.size={size}", "evaluate.protocols=per-client")
    session = build_experiment(config)
    plain = load_dataset(config.data, config.seed, size).test
    assert plain is not None and plain.labels is not None
    for k in range(4):
        mine = torch.from_numpy(session.evaluator.client_tests[k])
        wanted = torch.rot90(plain.images[0][mine], k, (2, 3))
        assert len(mine) > 50 and torch.equal(session.evaluator.client_test_images[mine], wanted)
    encoder, evaluator = session.tower().encoder, session.evaluator
    train, tests = evaluator.data.train, evaluator.client_tests
    assert train.labels is not None
    head = linear.fit(extract(encoder, train.images[0]), train.labels, 10)
    features = extract(encoder, evaluator.client_test_images)
    wanted_scores = per_client.accuracies(head, features, plain.labels, tests)
    np.testing.assert_allclose(evaluator._score_clients(session.trainer.initial), wanted_scores)


def test_test_images_have_a_clients_sources_in_their_shares() -> None:
    """Three quarters and a quarter; a client with one test image; images that are nobody's."""
    of, groups = np.array([0, 0, 1, 0, 2, 2]), groups_of([0, 1, 2, 3], [4, 5])
    tests = groups_of([9, 3, 5, 1, 0, 2, 4, 8], [7])
    found = per_client.sources(tests, groups, of, 11, seed=0)
    assert sorted(found[tests[0]].tolist()) == [0] * 6 + [1] * 2
    assert found[7] == 2 and found[6] == found[10] == -1
    others = {tuple(per_client.sources(tests, groups, of, 11, seed)) for seed in range(4)}
    assert len(others) > 1


def test_held_out_and_public_images_keep_their_source() -> None:
    """The partition sees the sources of the images that are left, not of the first ones."""
    words, dataset = (*ROTATION, "partition.clients=4", "data.holdout=0.3"), made(200)
    groups, (_, of, _) = split_clients(resolved(*words), dataset), sources(words, dataset)
    assert len(groups.members) < 200
    assert ((count_labels(groups, of.numpy()) > 0) == np.eye(4, dtype=bool)).all()


@pytest.mark.parametrize("source", ["rotation", "features"])
def test_both_engines_have_the_same_images_and_clients(source: str, tmp_path: Path) -> None:
    words = f"name=skew source={source} sources=3 beta=0.6 clients=6".split()
    partition = [f"partition.{word}" for word in words]
    objective = ("objective.name=simclr", "objective.projector=16,8")
    assert_both_engines_agree(tmp_path, *partition, *objective)


# Clusters --------------------------------------------------------------------------------------


def test_features_are_reduced_to_thirty_numbers_of_one_variance() -> None:
    """Without planted clusters, the result depends on each number that k-means sees."""
    from sklearn.cluster import KMeans
    from sklearn.decomposition import PCA

    features = np.random.default_rng(0).normal(size=(300, 64)).astype("f4")
    state = key(7, "clusters") % 2**32

    def reference(width: int, whiten: bool = True) -> list[int]:
        reduced = PCA(width, whiten=whiten, random_state=state).fit_transform(features)
        return KMeans(5, n_init=10, random_state=state).fit_predict(reduced).tolist()

    found = find_clusters(features, 5, seed=7).tolist()
    assert found == reference(30)
    assert found != reference(29) and found != reference(31) and found != reference(30, False)
    assert len(find_clusters(features[:, :3], 5, seed=7)) == 300  # fewer than 30 are all kept


def patterns(count: int = 60) -> Dataset:
    """Unlabeled images of three planted kinds: rows, columns, and a corner."""
    grid = torch.arange(8)
    rows = (grid[:, None] % 2 * torch.ones(8)).long()
    corner = (grid[:, None] < 4) & (grid < 4)
    kinds = torch.stack((rows, rows.T, corner.long()))[torch.arange(count) % 3]
    noise = torch.randint(0, 20, (count, 8, 8), generator=torch.Generator().manual_seed(0))
    images = (kinds * 200 + noise).to(torch.uint8)[:, None]
    return Dataset("kinds", Split((images,)), None)


def test_clusters_of_an_untrained_encoder_need_no_labels() -> None:
    config, dataset = resolved(*CLUSTERS, "partition.clients=3"), patterns(900)
    groups = split_clients(config, dataset)
    assert sorted(set((groups[k] % 3).tolist()).pop() for k in range(3)) == [0, 1, 2]
    assert groups.sizes.tolist() == [300] * 3
    assert np.array_equal(split_clients(config, dataset).members, groups.members)


def test_clusters_of_an_untrained_encoder_are_warned_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["data.name=digits", "data.size=8", "encoder.name=tiny", "encoder.groups=8"]
    for source, warned in (("features", True), ("rotation", False)):
        chosen = ["partition.name=skew", "partition.clients=3", f"partition.source={source}"]
        assert main(["partition", *words, *chosen]) == 0
        assert ("partition.encoder=RUN" in capsys.readouterr().err) == warned
        experiment = build_experiment(resolved(*words, *chosen, "cohort.size=null"))
        assert any("partition.encoder=RUN" in w for w in list_warnings(experiment)) == warned
    given = resolved(*CLUSTERS, "partition.encoder=run").partition
    assert not list(heterogeneity.describe_clusters(given))
    (line,) = heterogeneity.describe_clusters(
        resolved(*CLUSTERS, "partition.encoder_recipe=my/encoder").partition
    )
    assert "fedssl run my/encoder --out RUN" in line


def test_clusters_of_a_given_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own kind of network, from its run's folder, whatever the run's own is."""
    theirs, dataset = resolved("seed=3"), made()
    network = build(theirs.encoder, (1,), 8, lambda *_: Heads(torch.nn.Identity()), 3)
    tower = network.towers[0]
    assert isinstance(tower, Tower)
    save_file(dict(tower.encoder.state_dict()), tmp_path / "encoder.safetensors")
    (tmp_path / "config.yaml").write_text(configuration.dump(theirs))
    own = (*CLUSTERS, "encoder.norm=batch")
    seen: list[NDArray[np.float32]] = []
    real = heterogeneity.find_clusters

    def spy(features: NDArray[np.float32], count: int, seed: int) -> NDArray[np.int64]:
        seen.append(features)
        return real(features, count, seed)

    monkeypatch.setattr(heterogeneity, "find_clusters", spy)
    for end in ("", "/encoder.safetensors"):
        assign(resolved(*own, f"partition.encoder={tmp_path}{end}"), dataset)
        assert np.array_equal(seen.pop(), extract(tower.encoder, dataset.train.images[0]).numpy())
    # Without the configuration beside it, it has to be of the run's own kind.
    (tmp_path / "config.yaml").unlink()
    with refused("partition.encoder", tmp_path, "encoder.norm"):
        assign(resolved(*own, f"partition.encoder={tmp_path}"), dataset)


# Refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ("mood", "partition.source"),
        ("features partition.sources=5000", "partition.sources"),
        ("rotation partition.sources=5000", "partition.sources"),
        ("rotation partition.sources=1", "partition.sources"),
        ("style partition.sources=11", "partition.sources"),
        ("features partition.encoder=nowhere", "partition.encoder"),
    ],
)
def test_refusals_before_training(source: str, key: str) -> None:
    words = f"partition.name=skew cohort.size=null partition.source={source}"
    with refused(key):
        build_experiment(resolved(*words.split()))


def test_a_deployment_refuses_sources_and_leaves_out_a_recipes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("engine.name=flower", "engine.sites=3", *ROTATION)
    with refused("partition.source", "rotation"):
        check_deployment(resolved(*words))
    check_deployment(resolved(*words, "partition.source=labels"))
    rotated, plain = "decssl/figure11/rotation/alpha-5", "decssl/figure2/dec-ssl/labels-5"
    capsys.readouterr()
    for name in (rotated, plain):
        words = ("engine.sites=3", "algorithm.norm_policy=average")
        assert main(["deploy", "init", str(tmp_path / name), name, *words]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fedssl: {rotated}: partition.source=rotation is left out")


def test_a_note_says_what_is_uneven(capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"partition.{word}" for word in ("name=dirichlet", "clients=20", "alpha=0.02")]
    assert main(["partition", *words, "partition.balanced=true"]) == 0
    assert "no draw of 1000" in capsys.readouterr().err
    session = build_experiment(resolved(*words, "partition.balanced=true", "cohort.size=null"))
    assert any("no draw of 1000" in note for note in list_warnings(session))


@pytest.mark.parametrize("name", ["a.jpg", "nowhere/a.png"])
def test_a_picture_that_cannot_be_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["partition", "--out", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.startswith(f"fedssl: --out {tmp_path / name}: ")
