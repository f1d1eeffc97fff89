"""Whose replies tell of single images, and where that is said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import engine_of, groups_of, made_split, settings, step
from numpy.typing import NDArray
from scipy.optimize import least_squares
from torch import Tensor, nn
from torch.nn import functional

from fedssl import config as configuration
from fedssl import deploy, hub, privacy, run
from fedssl.client import Client, Trained
from fedssl.config import Config
from fedssl.deployment import Introduction, server_session
from fedssl.encoder import load_encoder
from fedssl.engines.local import LocalEngine
from fedssl.objectives.base import Centre
from fedssl.privacy import secure
from fedssl.report import curves, exchanges
from fedssl.runs import Run
from fedssl.session import prepare
from fedssl.trees import Tree

SIZES = (1, 2, 3, 9)
SITES = ["engine.sites=3", "cohort.size=null"]
OTHER = "algorithm.name=fedavg objective.name=simsiam"
RECONSTRUCTED = "published attacks have reconstructed images from such changes of weights"
HEAD = ("objective.projector=32,16",)
SMALL = [
    *("partition.name=samples", "partition.alpha=0", "cohort.size=6", "rounds=1", "device=cpu"),
    *("objective.projector=16,8", "evaluate.protocols=knn", "evaluate.baselines=[]"),
    "engine.threads=1",
]


def found(words: str, changes: bool = False, sizes: Sequence[int] = SIZES) -> dict[int, int]:
    """The clients whose statistics, or changes of the weights, tell of single images."""
    config = settings(*words.split())
    for replies in privacy.kinds(config, deploy.algorithm_of(config)):
        if replies.changes == changes:
            return privacy.telling(config, replies, sizes)
    return {}


@pytest.mark.parametrize(
    ("words", "images"),
    [
        ("", {0: 1, 1: 2}),
        ("objective.name=vicreg", {0: 1, 1: 2}),
        ("algorithm.batch=1", {0: 1, 1: 1, 2: 1, 3: 1}),
        ("algorithm.batch=1 algorithm.local_steps=2", {0: 1, 1: 2, 2: 2, 3: 2}),
        ("algorithm.batch=1 algorithm.local_steps=3", {0: 1, 1: 2}),
        ("algorithm.batch=1 algorithm.local_epochs=1", {0: 1, 1: 2}),
        ("algorithm.batch=2 algorithm.local_epochs=2", {0: 1, 1: 2, 2: 2}),  # one of 3 is left out
        ("algorithm.batch=3", {0: 1, 1: 2}),
        ("objective.bound=1 privacy.noise=1", {0: 1, 1: 2, 2: 3}),  # noise: by the server
        ("cohort.average=median", {0: 1, 1: 2}),
        ("engine.name=flower privacy.secure=true", {}),
        ("algorithm.name=fedavg", {}),
        ("algorithm.name=fedavg objective.name=byol", {}),
    ],
)
def test_whose_statistics_are_of_single_images(words: str, images: dict[int, int]) -> None:
    assert found(words) == images


@pytest.mark.parametrize(
    ("words", "clients"),
    [
        ("", [0]),
        ("algorithm.name=fedavg objective.name=simsiam", [0]),
        ("algorithm.local_steps=5", [0]),  # on this image alone
        ("algorithm.batch=1", [0, 1, 2, 3]),
        ("algorithm.batch=1 algorithm.local_steps=2", [0]),
        ("algorithm.batch=1 algorithm.local_epochs=1", [0]),
        ("objective.bound=1 privacy.noise=1", [0]),
        ("cohort.average=median", [0]),
        ("algorithm.name=gossip objective.name=byol", [0]),
        ("algorithm.name=standalone objective.name=byol", []),  # a loss
        ("algorithm.name=centralized objective.name=byol", []),  # all images are in one place
        ("engine.name=flower privacy.secure=true", []),
    ],
)
def test_whose_changes_are_made_of_one_image(words: str, clients: list[int]) -> None:
    assert found(words, changes=True) == dict.fromkeys(clients, 1)


@pytest.mark.parametrize("name", configuration.VARIANTS["algorithm"])
def test_changes_of_weights_are_known_as_such(name: str) -> None:
    objective = {"dcco": "cco", "ccl": "moco", "fedca": "simclr"}.get(name, "byol")
    config = settings(f"algorithm.name={name}", f"objective.name={objective}", *HEAD)
    algorithm = deploy.algorithm_of(config)
    work = engine_of(config, made_split(), groups_of(4, 4))[0].work
    asked = (*algorithm.means, *algorithm.gathers)
    changes = {task for task in asked if "change" in algorithm.reply_like(task, work)}
    known = {t for own in privacy.kinds(config, algorithm) if own.changes for t in own.tasks}
    assert known == (set() if algorithm.pools_data else changes)
    assert bool(known) == (name not in ("standalone", "centralized"))


@pytest.mark.parametrize(
    ("words", "sizes", "images"),
    [
        ("objective.bound=1", (9, 3, 2, 1), {3: 1, 2: 2, 1: 3}),  # 3 of 4 are enough for a sum
        ("objective.bound=1", (9, 4, 2, 1), {}),
        ("objective.bound=1 privacy.threshold=1", (3, 2, 1, 1), {}),
        ("objective.bound=1 cohort.minimum=4", (3, 2, 1, 9), {2: 1, 1: 2, 0: 3}),
        ("objective.bound=1 cohort.size=3", (9, 9, 9, 9, 2, 2, 2), {4: 2, 5: 2, 6: 2}),
        ("objective.bound=1 algorithm.batch=1", (9, 9, 9), {0: 1, 1: 1, 2: 1}),
        ("objective.bound=1", (1,) * 8, dict.fromkeys(range(6), 1)),
        ("objective.bound=1", (1,) * 9, {}),
        ("objective.bound=1", (), {}),
        ("", (1, 1, 1), {}),
    ],
)
def test_sums_over_few_images(words: str, sizes: Sequence[int], images: dict[int, int]) -> None:
    assert found(f"engine.name=flower privacy.secure=true {words}", sizes=sizes) == images


@pytest.mark.parametrize("objective", ["cco", "vicreg"])
@pytest.mark.parametrize("words", ["", "algorithm.batch=1", "algorithm.batch=2"])
def test_their_replies_do_tell_the_encodings(objective: str, words: str) -> None:
    config = settings(f"objective.name={objective}", "objective.projector=32,32,16", *words.split())
    engine, server = engine_of(config, made_split(), groups_of(*SIZES))
    single = found(f"objective.name={objective} {words}")
    zero = torch.zeros(16, dtype=torch.float64)
    for k in range(len(SIZES)):
        encodings, reply = answered(engine, k, server.weights, {"f": zero, "g": zero})
        assert single.get(k, 3) == min(len(encodings), 3)
        if k in single:
            solved = first_views(reply)
            if (solved[0] - encodings[0]).norm() > (solved[1] - encodings[0]).norm():
                solved = solved.flip(0)  # nobody can tell the order
            torch.testing.assert_close(solved[: len(encodings)], encodings, rtol=0, atol=1e-5)


def answered(
    engine: LocalEngine, client: int, weights: Tensor, centre: Centre
) -> tuple[Tensor, dict[str, Tensor]]:
    """The first views' encodings that a client sees in a round, and what the server gets."""
    one = engine.client(np.array([client]), 0, remember=False)
    real, seen = engine.algorithm.objective.moments, []

    def spy(encodings: Sequence[Tensor], given: Centre) -> dict[str, Tensor]:
        seen.append(encodings[0])
        return real(encodings, given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.algorithm.objective, "moments", spy)
        reply = engine.algorithm.encode(one, weights, centre)
    return torch.cat(seen), reply


def first_views(moments: dict[str, Tensor]) -> Tensor:
    """Solved for two images, in any order; of one, it twice."""
    f, both = moments["f"], moments["fg"] - torch.outer(moments["f"], moments["g"])
    squares = moments["f2"] if "f2" in moments else torch.diagonal(moments["ff"])
    half = (squares - f**2).clamp_min(0).sqrt() * both[:, both.abs().sum(0).argmax()].sign()
    return torch.stack((f + half, f - half))


@pytest.mark.parametrize("images", [3, 5])
def test_a_bound_tells_the_encodings_of_some_more(images: int) -> None:
    config = settings("objective.bound=1", "objective.projector=64,32")
    assert images <= privacy.few_images(config)
    engine, server = engine_of(config, made_split(), groups_of(images))
    zero = torch.zeros(32, dtype=torch.float64)
    encodings, reply = answered(engine, 0, server.weights, {"f": zero, "g": zero})
    assert encodings.norm(dim=1).min() > 1  # so that all are scaled to the bound
    real = functional.normalize(encodings)
    assert (torch.cdist(real, turned(reply, images)).amin(1) < 1e-4).all()
    assert torch.pdist(real).min() > 0.01


def test_a_secure_sum_over_few_images_tells_their_encodings() -> None:
    sizes = (1, 2, 2)
    words = "engine.name=flower privacy.secure=true objective.bound=1 objective.projector=64,32"
    assert found(words, sizes=sizes) == dict(enumerate(sizes))
    engine, server = engine_of(settings(*words.split()), made_split(), groups_of(*sizes))
    zero = torch.zeros(32, dtype=torch.float64)
    each = [answered(engine, k, server.weights, {"f": zero, "g": zero}) for k in range(3)]
    vectors = [secure.encode(reply, size, 3) for size, (_, reply) in zip(sizes, each, strict=True)]
    total, images = secure.decode(sum(vectors[1:], vectors[0]), each[0][1])  # masks cancel in it
    assert images == 5 and isinstance(total, dict)
    real = functional.normalize(torch.cat([encodings for encodings, _ in each]))
    solved = turned({name: value / images for name, value in total.items()}, 5)
    assert (torch.cdist(real, solved).amin(1) < 1e-4).all()
    assert torch.pdist(real).min() > 0.01


def turned(moments: dict[str, Tensor], images: int) -> Tensor:
    """First views from means and products, turned such that all norms are 1."""
    f, g, rank = moments["f"], moments["g"], images - 1
    left, size, right = torch.linalg.svd((moments["fg"] - torch.outer(f, g)) * images)
    a, b = (x[:, :rank] * size[:rank].sqrt() for x in (left, right.T))
    pairs = [(i, j) for i in range(rank) for j in range(i, rank)]
    products = torch.stack([a[:, i] * a[:, j] * (2 - (i == j)) for i, j in pairs], 1)
    spread = (moments["f2"] - f**2)[:, None] * images
    solved = torch.linalg.lstsq(products, spread).solution[:, 0]
    inner = torch.zeros(rank, rank).double()
    for (i, j), value in zip(pairs, solved, strict=True):
        inner[i, j] = inner[j, i] = value
    root = torch.linalg.cholesky(inner)
    a, b = a @ root, b @ torch.linalg.inv(root).T
    plane = torch.linalg.svd(torch.eye(images).double() - 1 / images)[0][:, :rank]

    def views(angles: NDArray[np.float64], flip: int) -> tuple[Tensor, Tensor]:
        skew = torch.from_numpy(angles).reshape(rank, rank)
        turn = torch.linalg.matrix_exp(skew - skew.T)
        turn[:, 0] *= -1 if flip else 1
        return f + plane @ turn @ a.T, g + plane @ turn @ b.T

    def missed(angles: NDArray[np.float64], flip: int) -> NDArray[np.float64]:
        return (torch.cat([x.norm(dim=1) for x in views(angles, flip)]) - 1).numpy()

    generator = np.random.default_rng(0)
    tries = [(generator.normal(size=rank * rank), k % 2) for k in range(20)]
    ends = [(least_squares(missed, start, args=(flip,), xtol=1e-15), flip) for start, flip in tries]
    best, flip = min(ends, key=lambda end: float(end[0].cost))
    return views(best.x, flip)[0]


def uploaded(words: str) -> dict[int, tuple[list[Tensor], Tensor, Tensor]]:
    """Of each client's change in a round: what its last layer got, and how that layer changed."""
    config = settings("engine.merge=off", *words.split())
    engine, server = engine_of(config, made_split(), groups_of(*SIZES))
    tower = engine.work.network.towers[0]
    layer = [module for module in tower.modules() if isinstance(module, nn.Linear)][-1]
    weight, bias = (span for span in engine.work.flat.learned if span.owner is layer)
    got: list[Tensor] = []
    layer.register_forward_pre_hook(lambda _, given: got.append(given[0].detach()))
    real, sent = Client.reply, {}

    def spy(client: Client, trained: Trained, received: Tensor) -> dict[str, Tree]:
        reply = real(client, trained, received)
        sent[client.id] = (got[-1], weight.of(reply["change"]), bias.of(reply["change"]))
        return reply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "reply", spy)
        step(engine, server, 0)
    return sent


@pytest.mark.parametrize(
    "words",
    [
        "algorithm.name=fedavg objective.name=supervised",  # one view, and the encoder's features
        "encoder.towers=2",  # DCCO, each view through a tower of its own
        "encoder.towers=2 algorithm.batch=1",
    ],
)
def test_the_change_of_one_image_tells_what_a_layer_got(words: str) -> None:
    """The gradients are δ xᵀ and δ: of more images, sums of such."""
    single = found(words, changes=True)
    for client, (inputs, weight, bias) in uploaded(words).items():
        row = bias.abs().argmax()
        error = (weight[row] / bias[row] - inputs[0]).norm() / inputs[0].norm()
        assert error < 1e-9 if client in single else error > 1e-3


def test_of_two_views_through_one_tower_it_tells_the_plane() -> None:
    single = found("", changes=True)
    for client, (inputs, weight, _) in uploaded("").items():
        _, sizes, rows = torch.linalg.svd(weight)
        plane = rows[:2]
        away = (inputs - inputs @ plane.T @ plane).norm() / inputs.norm()
        flat = bool(sizes[2] < 1e-9 * sizes[0])
        assert flat == (client in single)
        assert away < 1e-9 if flat else away > 1e-3


def small(*words: str) -> Config:
    return configuration.resolve(configuration.read_recipe(None), [*SMALL, *words])


def test_a_run_says_it_on_the_screen_in_the_report_and_on_the_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    run.run(small("partition.samples=1", "partition.clients=12"), out)
    said = (
        "in a round, the replies of all 12 clients to “locate” and “encode” are made of one image: "
        "they are its encoding; the replies of all 12 clients to “descend” are made of one image: "
        f"{RECONSTRUCTED}"
    )
    assert capsys.readouterr().err.count(f"dcco: {said} (docs/privacy.md)\n") == 1
    assert verdict(out).endswith(f". But {said}.")
    assert f"**Single images**: {said}." in card(out)
    named(out, oslo=1, berlin=2, rome=3)
    tells = "“locate” and “encode” are made of at most 2 images: they tell the encoding of each"
    change = f"“descend” are made of one image: {RECONSTRUCTED}."
    assert f"the replies of 2 of 3 clients (oslo, berlin) to {tells};" in verdict(out)
    assert verdict(out).endswith(f"; the replies of 1 of 3 clients (oslo) to {change}")
    counted = f"the replies of 2 of 3 clients to {tells}; the replies of 1 of 3 clients to"
    assert counted in card(out)
    assert "oslo" not in card(out)  # names may be those of people
    named(out, oslo=3, berlin=4, rome=3)
    assert "are made of" not in card(out) + verdict(out)


def test_a_run_of_another_algorithm_says_it_of_changes(tmp_path: Path) -> None:
    words = ("algorithm.name=fedavg", "objective.name=simsiam", "partition.samples=1")
    out, config = tmp_path / "run", small(*words, "partition.clients=12")
    said = "in a round, the replies of all 12 clients to “train” are made of one image: "
    run.run(config, out)
    assert f"fedavg: {said}{RECONSTRUCTED} (docs/privacy.md)" in prepare(config).notes()
    assert verdict(out).endswith(f". But {said}{RECONSTRUCTED}.")
    assert f"**Single images**: {said}{RECONSTRUCTED}." in card(out)


def test_a_run_with_secure_sums_over_few_images_says_it(tmp_path: Path) -> None:
    hidden = ("engine.name=flower", "privacy.secure=true", "objective.bound=1")
    few = small(*hidden, "partition.samples=1", "partition.clients=12")
    said = (
        "in a round, the sums of replies to “encode” may be made of 5 images, of 5 clients: they "
        "tell the encoding of each"
    )
    assert f"dcco: {said} (docs/privacy.md)" in prepare(few).notes()
    many = small(*hidden, "partition.samples=2", "partition.clients=12")
    assert not any("be made of" in note for note in prepare(many).notes())
    out = tmp_path / "run"
    run.run(small("objective.bound=1", "partition.samples=1", "partition.clients=12"), out)
    (out / "config.yaml").write_text(configuration.dump(few))  # Flower's processes take long
    assert verdict(out).endswith(f"learned only sums over the clients. But {said}.")
    assert f"**Single images**: {said}." in card(out)


def verdict(out: Path) -> str:
    return exchanges.sheet(Run(out), curves.read(Run(out))).verdict


def card(out: Path) -> str:
    return hub.model_card(Run(out), load_encoder(out))


def named(out: Path, **sizes: int) -> None:
    rows = [{"client": k, "name": n, "samples": s} for k, (n, s) in enumerate(sizes.items())]
    (out / "clients.json").write_text(json.dumps(rows))


def test_nothing_is_said_where_it_does_not_happen() -> None:
    for words in (
        ["partition.samples=3"],
        ["partition.samples=2", "algorithm.name=fedavg"],
        ["partition.samples=1", "algorithm.name=standalone", "objective.name=simsiam"],
    ):
        assert not any("made of" in note for note in prepare(small(*words)).notes())


def test_a_deployments_server_names_the_sites() -> None:
    sites = [Introduction(n, n, k, (1,), 16, 16) for n, k in (("a", 4), ("ward", 1), ("c", 5))]
    notes = list(server_session(deploy.settle("default", SITES), sites).notes())
    said = "dcco: in a round, the replies of 1 of 3 clients (ward) to “locate” and “encode” are"
    assert [note for note in notes if note.startswith(said)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "A site with at most 2 images sends single images' encodings**: in `locate` and"),
        ("", "A site with one image sends changes of the weights that are made of one image**, in"),
        ("objective.bound=1", "A site with at most 6 images sends single images' encodings**"),
        ("algorithm.batch=2 algorithm.local_epochs=1", "A site with at most 3 images sends"),
        ("algorithm.batch=2 algorithm.local_steps=2", "A site with at most 3 images sends"),
        ("cohort.average=median", "of weights. Take part with more images. Secure sums are not"),
        ("algorithm.batch=1", "With `algorithm.batch=1` every site sends single images'"),
        ("algorithm.batch=1", "With `algorithm.batch=1` every site sends changes of the weights"),
        ("algorithm.batch=2", "A site with one image sends changes of the weights"),
        ("privacy.secure=true", "This leaves masked, and the server learns only sums over"),
        (
            "privacy.secure=true objective.bound=1",
            "(below). But a sum may be over 3 sites: if a round uses at most 6 images of these",
        ),
        (f"{OTHER} algorithm.batch=1", "of one image**, in `train`: published attacks have"),
        (f"{OTHER} privacy.secure=true", "of weights. This leaves masked, and the server learns"),
        (f"{OTHER} algorithm.name=gossip", "of weights. Take part with more images. Secure sums"),
    ],
)
def test_sites_are_told(words: str, said: str) -> None:
    text = told(words)
    assert said in text
    assert ("single images' encodings" in text) == (OTHER not in words)
    assert ("a sum may be over" in text) == ("a sum may be over" in said)
    hidden = any(word in words for word in ("secure", "median", "gossip"))
    assert ("operator for a larger batch" in text) == ("batch" in words and "local" not in words)
    assert ("`privacy.secure=true`: the server then learns only sums" in text) == (not hidden)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("algorithm.name=fedavg", "made of one image"),  # of one image there is no such loss
        ("privacy.secure=true objective.bound=1 engine.sites=9", "But a sum may be over"),
        (f"{OTHER} privacy.secure=true", "But a sum may be over"),
    ],
)
def test_sites_are_not_told_what_cannot_be(words: str, said: str) -> None:
    assert said not in told(words)


def told(words: str) -> str:
    config = deploy.settle("default", [*SITES, *words.split()])
    return " ".join(deploy.sites(config, "default").split())
