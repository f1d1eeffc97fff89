"""Who sends the encodings of single images, and where that is said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import engine_of, groups_of, made_split, settings
from numpy.typing import NDArray
from scipy.optimize import least_squares
from torch import Tensor
from torch.nn import functional

from fedssl import config as configuration
from fedssl import deploy, hub, privacy, run
from fedssl.config import Config
from fedssl.deployment import Introduction, server_session
from fedssl.encoder import load_encoder
from fedssl.engines.local import LocalEngine
from fedssl.objectives.base import Centre
from fedssl.report import curves, exchanges
from fedssl.runs import Run
from fedssl.session import prepare

SIZES = (1, 2, 3, 9)
SITES = ["engine.sites=3", "cohort.size=null"]
SMALL = [
    *("partition.name=samples", "partition.alpha=0", "cohort.size=6", "rounds=1", "device=cpu"),
    *("objective.projector=16,8", "evaluate.protocols=knn", "evaluate.baselines=[]"),
    "engine.threads=1",
]


def found(*words: str) -> dict[int, int]:
    config = settings(*words)
    return privacy.telling(config, deploy.algorithm_of(config), SIZES)


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
    assert found(*words.split()) == images


@pytest.mark.parametrize("objective", ["cco", "vicreg"])
@pytest.mark.parametrize("words", ["", "algorithm.batch=1", "algorithm.batch=2"])
def test_their_replies_do_tell_the_encodings(objective: str, words: str) -> None:
    config = settings(f"objective.name={objective}", "objective.projector=32,32,16", *words.split())
    engine, server = engine_of(config, made_split(), groups_of(*SIZES))
    single = privacy.telling(config, engine.algorithm, SIZES)
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


def small(*words: str) -> Config:
    return configuration.resolve(configuration.read_recipe(None), [*SMALL, *words])


def test_a_run_says_it_on_the_screen_in_the_report_and_on_the_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    run.run(small("partition.samples=1", "partition.clients=12"), out)
    said = (
        "in a round, the replies of all 12 clients to “locate” and “encode” are made of one image: "
        "they are its encoding"
    )
    assert capsys.readouterr().err.count(f"dcco: {said} (docs/privacy.md)\n") == 1
    assert exchanges.sheet(Run(out), curves.read(Run(out))).verdict.endswith(f". But {said}.")
    assert said in hub.model_card(Run(out), load_encoder(out))
    named(out, oslo=1, berlin=2, rome=3)
    tells = "“locate” and “encode” are made of at most 2 images: they tell the encoding of each."
    verdict = exchanges.sheet(Run(out), curves.read(Run(out))).verdict
    assert verdict.endswith(f"the replies of 2 of 3 clients (oslo, berlin) to {tells}")
    card = hub.model_card(Run(out), load_encoder(out))
    assert f"the replies of 2 of 3 clients to {tells}" in card
    assert "oslo" not in card  # names may be those of people
    named(out, oslo=3, berlin=4, rome=3)
    assert "are made of" not in hub.model_card(Run(out), load_encoder(out))
    assert "are made of" not in exchanges.sheet(Run(out), curves.read(Run(out))).verdict


def named(out: Path, **sizes: int) -> None:
    rows = [{"client": k, "name": n, "samples": s} for k, (n, s) in enumerate(sizes.items())]
    (out / "clients.json").write_text(json.dumps(rows))


def test_nothing_is_said_where_it_does_not_happen() -> None:
    for words in (
        ["partition.samples=3"],
        ["partition.samples=2", "algorithm.name=fedavg"],
    ):
        assert not any("are made of" in note for note in prepare(small(*words)).notes())


def test_a_deployments_server_names_the_sites() -> None:
    sites = [Introduction(n, n, k, (1,), 16, 16) for n, k in (("a", 4), ("ward", 1), ("c", 5))]
    notes = list(server_session(deploy.settle("default", SITES), sites).notes())
    said = "dcco: in a round, the replies of 1 of 3 clients (ward) to “locate” and “encode” are"
    assert [note for note in notes if note.startswith(said)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "A site with at most 2 images sends single images' encodings**: in `locate` and"),
        ("objective.bound=1", "A site with at most 6 images sends single images' encodings**"),
        ("algorithm.batch=2 algorithm.local_epochs=1", "A site with at most 3 images sends"),
        ("algorithm.batch=2 algorithm.local_steps=2", "A site with at most 3 images sends"),
        (
            "cohort.average=median",
            "can be computed. Take part with more images. Secure sums are not",
        ),
        ("algorithm.batch=1", "With `algorithm.batch=1` every site sends single images'"),
        ("privacy.secure=true", "They leave masked, and the server learns only sums over"),
        ("algorithm.name=fedavg", None),
    ],
)
def test_sites_are_told(words: str, said: str | None) -> None:
    config = deploy.settle("default", [*SITES, *words.split()])
    text = " ".join(deploy.sites(config, "default").split())
    assert (said or "") in text and ("single images' encodings" in text) == (said is not None)
    wanted = said is not None and "secure" not in words and "median" not in words
    assert ("operator for a larger batch" in text) == (words == "algorithm.batch=1")
    assert ("`privacy.secure=true`: the server then learns only sums" in text) == wanted
