"""Warnings about replies that could reveal single images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import PLAIN, engine_of, groups_of, load, made_split, settings, step
from image_folders import gradient, save
from torch import Tensor, nn

from fedssl import config as configuration
from fedssl.config import Config
from fedssl.deploy.instructions import write_site_instructions
from fedssl.deploy.introduction import Introduction
from fedssl.deploy.recipe import adapt_recipe
from fedssl.deploy.server import build_server_experiment
from fedssl.encoder import hub
from fedssl.encoder.load import load_encoder
from fedssl.engines.local import LocalEngine
from fedssl.federation.algorithm import Algorithm, build_algorithm
from fedssl.federation.client import Client, Trained
from fedssl.objectives.batch import EncodedBatch
from fedssl.objectives.moments import Centre, SecondMomentObjective
from fedssl.objectives.sigreg import SIGReg
from fedssl.privacy import secure
from fedssl.privacy.leakage import describe_leaks, find_leaks, list_risks
from fedssl.report.history import read_history
from fedssl.report.messages import Sheet
from fedssl.runs import loop
from fedssl.runs.build import build_experiment
from fedssl.runs.reader import RunReader
from fedssl.runs.validate import describe_privacy
from fedssl.util.trees import Tree, flatten

MOMENTS = load("benchmarks/moments.py")
SIZES = (1, 2, 3, 20)
SITES = ["engine.sites=3", "cohort.size=null"]
OTHER = "algorithm.name=fedavg objective.name=simsiam"
GOSSIP = "algorithm.name=gossip server.optimizer=sgd server.lr=1"
HEAD = ("objective.projector=32,16",)
SMALL = [
    *("partition.name=samples", "partition.alpha=0", "cohort.size=6", "rounds=1", "device=cpu"),
    *("objective.projector=16,8", "evaluate.protocols=knn", "evaluate.baselines=[]"),
    "engine.threads=1",
]


def few_images(algorithm: Algorithm) -> int:
    return algorithm.tasks()["encode"].few_images(algorithm)


def found(words: str, reveals: str = "encoding", sizes: Sequence[int] = SIZES) -> dict[int, int]:
    """The clients whose replies tell of single images, and how many images each uses."""
    config = settings(*words.split())
    leaks = find_leaks(config, build_algorithm(config), sizes)
    return next((images for risk, images in leaks if risk.reveals == reveals), {})


FEW = {0: 1, 1: 2, 2: 3}


@pytest.mark.parametrize(
    ("words", "images", "clients"),
    [
        ("", FEW, [0]),
        ("objective.name=sigreg objective.slices=2 algorithm.batch=16", {**FEW, 3: 16}, [0]),
        ("objective.name=sigreg objective.slices=2 algorithm.batch=17", FEW, [0]),
        ("objective.name=vicreg objective.projector=32,16", FEW, [0]),
        ("objective.name=vicreg objective.projector=32,19", {**FEW, 3: 20}, [0]),
        ("objective.projector=32,32,64", {**FEW, 3: 20}, [0]),
        ("algorithm.local_steps=5", FEW, [0]),  # on this image alone
        ("algorithm.batch=1", dict.fromkeys(range(4), 1), [0, 1, 2, 3]),
        ("algorithm.batch=1 algorithm.local_steps=2", {0: 1, 1: 2, 2: 2, 3: 2}, [0]),
        ("algorithm.batch=1 algorithm.local_epochs=1", FEW, [0]),
        ("algorithm.batch=2 algorithm.local_epochs=2", {0: 1, 1: 2, 2: 2}, [0]),  # leaves one out
        ("algorithm.batch=10", {**FEW, 3: 10}, [0]),
        ("algorithm.batch=11", FEW, [0]),
        ("objective.bound=1 privacy.noise=1", FEW, [0]),  # noise: by the server
        ("cohort.average=median", FEW, [0]),
        ("engine.name=flower privacy.secure=true", FEW, []),  # three are a sum
        ("engine.name=flower privacy.secure=true algorithm.batch=8", FEW, []),
        ("algorithm.name=fedavg objective.name=byol", {}, [0]),
        ("algorithm.name=gossip objective.name=byol", {}, [0]),
        ("algorithm.name=standalone objective.name=byol", {}, []),  # a loss
        ("algorithm.name=centralized objective.name=byol", {}, []),  # all images are in one place
    ],
)
def test_whose_replies_are_of_single_images(
    words: str, images: dict[int, int], clients: list[int]
) -> None:
    """Statistics tell the encodings of few images, and a change of the weights tells one image."""
    assert found(words) == images
    assert found(words, "image") == dict.fromkeys(clients, 1)


@pytest.mark.parametrize("name", configuration.VARIANTS["algorithm"])
def test_changes_of_weights_are_known_as_such(name: str) -> None:
    named = {"dcco": "cco", "ccl": "moco", "fedca": "simclr", "fedsc": "spectral"}
    objective = named.get(name, "byol")
    config = settings(f"algorithm.name={name}", f"objective.name={objective}", *HEAD)
    algorithm = build_algorithm(config)
    trainer = engine_of(config, made_split(), groups_of(4, 4))[0].trainer
    asked = algorithm.asked(False, "mean", "each")
    changes = {t.name for t in asked if "change" in t.expected_reply(algorithm, trainer)}
    risks = list_risks(config, algorithm)
    known = {task for risk in risks if risk.reveals == "image" for task in risk.tasks}
    assert known == (set() if algorithm.pools_data else changes)
    assert bool(known) == (name not in ("standalone", "centralized"))


@pytest.mark.parametrize(
    ("words", "sizes", "images"),
    [
        ("", (9, 3, 2, 1), {3: 1, 2: 2, 1: 3}),  # 3 of 4 are enough for a sum
        ("", (9, 8, 2, 1), {}),
        ("privacy.threshold=1", (7, 2, 1, 1), {}),
        ("cohort.minimum=4", (3, 2, 1, 9), {2: 1, 1: 2, 0: 3}),
        ("cohort.size=3", (9, 9, 9, 9, 2, 2, 2), {4: 2, 5: 2, 6: 2}),
        ("algorithm.batch=1", (9, 9, 9), {0: 1, 1: 1, 2: 1}),
        ("", (1,) * 14, dict.fromkeys(range(10), 1)),
        ("", (1,) * 15, {}),
        ("", (), {}),
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
    for k in range(len(SIZES)):
        encodings, reply = answered(engine, k, server.weights)
        assert single.get(k, 20) == len(encodings)
        if len(encodings) <= 2:
            solved = first_views(reply)
            if (solved[0] - encodings[0]).norm() > (solved[1] - encodings[0]).norm():
                solved = solved.flip(0)  # nobody can tell the order
            torch.testing.assert_close(solved[: len(encodings)], encodings, rtol=0, atol=1e-5)


def answered(engine: LocalEngine, client: int, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The first views' encodings that a client sees in a round, and what the server gets."""
    one = engine.client(np.array([client]), 0, remember=False)
    objective, seen = engine.algorithm.objective, []
    real, zero = objective.moments, torch.zeros(objective.params.projector[-1]).double()

    def spy(batch: EncodedBatch, given: Centre) -> dict[str, Tensor]:
        seen.append(batch.encodings[0])
        return real(batch, given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objective, "moments", spy)
        reply = engine.algorithm.encode(one, weights, {"f": zero, "g": zero})
    return torch.cat(seen), reply


def first_views(moments: dict[str, Tensor]) -> Tensor:
    """Solved for two images, in any order; of one, it twice."""
    f, both = moments["f"], moments["fg"] - torch.outer(moments["f"], moments["g"])
    squares = moments["f2"] if "f2" in moments else torch.diagonal(moments["ff"])
    half = (squares - f**2).clamp_min(0).sqrt() * both[:, both.abs().sum(0).argmax()].sign()
    return torch.stack((f + half, f - half))


@pytest.mark.parametrize(
    ("words", "images"),
    [
        ("objective.projector=32,32,32", 3),
        ("objective.projector=32,32,32", 18),
        ("objective.projector=64,64,64", 12),
        ("objective.projector=32,32,32 objective.name=vicreg", 6),
        ("objective.projector=32,32,32 objective.bound=1", 5),
    ],
)
def test_the_network_tells_the_encodings_of_more(words: str, images: int) -> None:
    config = settings(*words.split())
    assert images <= few_images(build_algorithm(config))
    engine, server = engine_of(config, made_split(), groups_of(images))
    encodings, reply = answered(engine, 0, server.weights)
    objective = engine.algorithm.objective
    assert isinstance(objective, SecondMomentObjective)
    real = objective.bounded(encodings)
    assert found_again(real, solved(reply, images, last_layer(engine)))


def test_characteristic_functions_tell_the_encodings_without_the_network() -> None:
    """They leave no rotation open, so a plain descent finds both views of every image."""
    words = ("objective.name=sigreg", "objective.slices=100", "objective.projector=32,32,16")
    engine, server = engine_of(settings(*words), made_split(), groups_of(3))
    encodings, reply = answered(engine, 0, server.weights)
    objective = engine.algorithm.objective
    assert isinstance(objective, SIGReg) and len(encodings) <= objective.few_images
    client = engine.client(np.array([0]), 0, remember=False)
    start = torch.randn(6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = (0.3 * start).requires_grad_()
    search = torch.optim.LBFGS([found], max_iter=500, line_search_fn="strong_wolfe")

    def missed() -> Tensor:
        search.zero_grad()
        batch = EncodedBatch((found[:3], found[3:]), draw=client.draw)
        total = 1e4 * (objective.moments(batch, {})["cf"] - reply["cf"]).square().sum()
        total.backward()
        return total

    search.step(missed)
    assert found_again(encodings, found[:3].detach())


def test_a_secure_sum_over_few_images_tells_their_encodings() -> None:
    sizes = (1, 2, 2)
    words = "engine.name=flower privacy.secure=true objective.projector=32,32,32"
    config = settings(*words.split())
    assert found(words, sizes=sizes) == dict(enumerate(sizes))
    engine, server = engine_of(config, made_split(), groups_of(*sizes))
    each = [answered(engine, k, server.weights) for k in range(3)]
    vectors = [secure.encode(reply, size, 3) for size, (_, reply) in zip(sizes, each, strict=True)]
    total, images = secure.decode(sum(vectors[1:], vectors[0]), each[0][1])  # masks cancel in it
    assert images == 5 and isinstance(total, dict)
    real = torch.cat([encodings for encodings, _ in each])
    moments = {name: value / images for name, value in total.items()}
    assert found_again(real, solved(moments, 5, last_layer(engine)))


@pytest.mark.parametrize(
    ("words", "images"),
    [
        ("objective.projector=32,32,128", 66),
        ("objective.projector=32,32,128 objective.bound=1", 66),
        ("objective.projector=32,32,128 objective.name=vicreg", 129),
        ("objective.projector=32,32,1", 2),
        ("objective.projector=32,32,127 objective.name=spectral", 32),
        ("objective.projector=32,32,128 objective.name=sigreg", 128),
        ("objective.projector=32,32,500 objective.name=sigreg objective.slices=600", 19),
    ],
)
def test_of_so_many_images_the_statistics_are_no_fewer_numbers(words: str, images: int) -> None:
    """Than the encodings of two views: of products of a view with itself half are the same."""
    config = settings(*words.split())
    engine, _ = engine_of(config, made_split(), groups_of(4))
    reply = flatten(
        engine.algorithm.tasks()["encode"].expected_reply(engine.algorithm, engine.trainer)
    )
    width = engine.algorithm.objective.params.projector[-1]
    own = [reply[name] for name in ("ff", "gg", "r") if name in reply]
    twice = sum(matrix.numel() - width for matrix in own) // 2
    numbers = sum(leaf.numel() for leaf in reply.values()) - twice
    assert few_images(engine.algorithm) == numbers // (2 * width) == images


def last_layer(engine: LocalEngine) -> nn.Linear:
    tower = engine.trainer.network.towers[0]
    return [module for module in tower.modules() if isinstance(module, nn.Linear)][-1]


def found_again(real: Tensor, solved: Tensor) -> bool:
    """Each of them, in whatever order."""
    assert torch.pdist(real).min() > 0.1
    return bool((torch.cdist(real, solved).amin(1) < 1e-4).all())


def solved(moments: dict[str, Tensor], images: int, layer: nn.Linear) -> Tensor:
    """From moments about the origin."""
    centre = {name: torch.zeros_like(moments[name]) for name in ("f", "g")}
    return MOMENTS.solve(moments, centre, images, layer)[0]


def uploaded(words: str) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """Return the inputs of each client's last layer in a round, and how that layer changed."""
    config = settings("engine.merge=off", *words.split())
    engine, server = engine_of(config, made_split(), groups_of(*SIZES))
    layer = last_layer(engine)
    weight, bias = (span for span in engine.trainer.flat.learned if span.owner is layer)
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
    single = found(words, "image")
    for client, (inputs, weight, bias) in uploaded(words).items():
        row = bias.abs().argmax()
        error = (weight[row] / bias[row] - inputs[0]).norm() / inputs[0].norm()
        assert error < 1e-9 if client in single else error > 1e-3


def test_of_two_views_through_one_tower_it_tells_the_plane() -> None:
    single = found("", "image")
    for client, (inputs, weight, _) in uploaded("").items():
        _, sizes, rows = torch.linalg.svd(weight)
        plane = rows[:2]
        away = (inputs - inputs @ plane.T @ plane).norm() / inputs.norm()
        flat = bool(sizes[2] < 1e-9 * sizes[0])
        assert flat == (client in single)
        assert away < 1e-9 if flat else away > 1e-3


def small(*words: str) -> Config:
    return configuration.resolve(configuration.read_recipe(None), [*SMALL, *words])


LEAKY = ("partition.samples=1", "partition.clients=12")
ALL = (
    "Privacy: clients use one image per round, so the server could recover each image's encoding "
    "and the image. See docs/privacy.md."
)


def test_leaks_are_shown_in_the_report_and_on_the_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    loop.run(small(*LEAKY), out)
    assert "Privacy" not in capsys.readouterr().err  # the digits are public
    assert verdict(out).endswith(ALL) and ALL in card(out)
    named(out, oslo=1, berlin=3, rome=7)
    assert "2 of 3 clients (oslo, berlin) use at most 3 images per round" in verdict(out)
    assert "1 of 3 clients (oslo) use one image per round" in verdict(out)
    assert "2 of 3 clients use at most 3 images per round" in card(out)
    assert "oslo" not in card(out)  # names may be those of people
    named(out, oslo=8, berlin=9, rome=7)
    assert "Privacy: " not in verdict(out) + card(out)


def test_secure_sums_over_few_images_are_a_leak(tmp_path: Path) -> None:
    secure = ("engine.name=flower", "privacy.secure=true")
    few = small(*secure, *LEAKY)
    (line,) = leaks_of(few)
    assert line.startswith("Privacy: a secure sum may cover only 5 images, so the server could")
    assert not leaks_of(small(*secure, "partition.samples=2", "partition.clients=12"))
    out = tmp_path / "run"
    loop.run(small(*LEAKY), out)
    (out / "config.yaml").write_text(configuration.dump(few))  # Flower's processes take long
    assert verdict(out).endswith(line) and line in card(out)


def leaks_of(config: Config) -> list[str]:
    experiment = build_experiment(config)
    note = describe_leaks(
        config, experiment.algorithm, experiment.engine.groups.sizes.tolist(), experiment.names
    )
    return [] if note is None else [note]


def verdict(out: Path) -> str:
    return Sheet(RunReader(out), read_history(RunReader(out))).verdict


def card(out: Path) -> str:
    return hub.write_model_card(RunReader(out), load_encoder(out))


def named(out: Path, **sizes: int) -> None:
    rows = [{"client": k, "name": n, "samples": s} for k, (n, s) in enumerate(sizes.items())]
    (out / "clients.json").write_text(json.dumps(rows))


@pytest.mark.parametrize(
    "words",
    [
        ("partition.samples=7",),
        ("partition.samples=2", "algorithm.name=fedavg"),
        ("partition.samples=1", "algorithm.name=standalone", "objective.name=simsiam"),
    ],
)
def test_runs_without_a_leak_say_nothing(words: tuple[str, ...]) -> None:
    assert not leaks_of(small(*words))


def test_a_deployments_server_names_the_sites() -> None:
    sites = [Introduction(n, n, k, (1,), 16, 16) for n, k in (("a", 99), ("ward", 4), ("c", 67))]
    experiment = build_server_experiment(adapt_recipe(PLAIN, SITES), sites)
    line = (
        "Privacy: the server could recover encodings of single images (ward). Details: report.html."
    )
    assert describe_privacy(experiment) == line


def test_one_short_line_of_privacy_on_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for site in range(3):
        for k in range(2 + 200 * (site == 0)):
            save(tmp_path / f"photos/site{site}/{k}.png", gradient(16, 16))
    words = [
        *("data.name=folder", f"data.root={tmp_path / 'photos'}", "partition.name=folder"),
        *("data.levels=client", f"data.cache={tmp_path}", "evaluate.protocols=unlabeled"),
        *("algorithm.batch=64", "evaluate.baselines=fedavg", "cohort.size=3"),
    ]
    kept = [word for word in SMALL if not word.startswith("partition")]
    settings = configuration.resolve(configuration.read_recipe(None), [*kept, *words])
    loop.run(settings, tmp_path / "run")
    lines = [line for line in capsys.readouterr().err.splitlines() if "Privacy" in line]
    assert lines == [
        "Privacy: the server could recover encodings of single images (site1, site2). "
        "Details: report.html."
    ]


@pytest.mark.parametrize(
    ("words", "said", "not_said"),
    [
        ("", "A site with at most 66 images sends single images' encodings**: `locate` and", ""),
        ("", "A site with one image sends changes of the weights that are made of one image**", ""),
        ("", "learns only sums over the sites (which hide this if they are over more than 66", ""),
        ("algorithm.batch=50 algorithm.local_epochs=1", "A site with at most 99 images sends", ""),
        ("cohort.average=median", "Take part with more than 66 images. **Secure sums are", ""),
        ("algorithm.batch=66", "With `algorithm.batch=66` every site sends single images'", ""),
        ("algorithm.batch=1", "With `algorithm.batch=1` every site sends changes of the", ""),
        ("algorithm.batch=67", "A site with at most 66 images", "every site sends"),
        ("engine.sites=2", "with more than 66 images. **Secure sums are off** (and", ""),
        ("privacy.secure=true", "But a sum may be over 3 sites: if a round uses at most 66", ""),
        ("privacy.secure=true engine.sites=99", "These replies are masked", "a sum may be over"),
        (f"{OTHER} algorithm.batch=1", "of one image**, in `train`: they may reveal", ""),
        (f"{OTHER} privacy.secure=true", "These replies are masked", "a sum may be over"),
        (f"{OTHER} {GOSSIP}", "Take part with more than one image. **Secure sums are not", ""),
        ("algorithm.name=fedavg", "", "made of one image"),  # of one image there is no such loss
        (f"{OTHER} encoder.norm=batch", "", "made of one image"),  # nor a batch
        ("algorithm.name=ccl objective.name=moco", "", "made of one image"),  # nor a mixture
    ],
)
def test_sites_are_told(words: str, said: str, not_said: str) -> None:
    config = adapt_recipe(PLAIN, [*SITES, *words.split()])
    text = " ".join(write_site_instructions(config, "default", None).split())
    assert said in text and (not_said or "no such words") not in text
    if said:
        hidden = any(word in words for word in ("secure", "median", "gossip", "sites=2"))
        assert ("single images' encodings" in text) == (OTHER not in words)
        has_batch = words.endswith(("batch=66", "batch=1"))
        assert ("operator for a batch above" in text) == has_batch
        assert ("`privacy.secure=true`: the server then learns only sums" in text) == (not hidden)
