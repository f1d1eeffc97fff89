"""Settings that parts recommend, and what gives way to the user's words."""

from __future__ import annotations

import itertools
import typing

import pytest
from helpers import PLAIN, refused

from fedssl import config
from fedssl.config.catalogue import EncoderName
from fedssl.runs.sweep import list_runs
from fedssl.util.errors import UserError

DCCO, FEDEMA = "dcco/table1/dcco/noniid-4", "fedema/table3/fedbyol/cifar10-noniid"
MOCO = "fedema/table1/fedmocov1-program/cifar10-noniid"
GENERAL = ("default", "folder", "sites")  # recipes whose settings belong to their parts


def resolution(recipe: str, words: str) -> config.Resolution:
    return config.Resolution(config.read_recipe(recipe), words.split())


def values(settings: config.Config) -> dict[str, object]:
    return config.flatten(config.to_tree(settings))


def test_recommendations_leave_the_papers_recipes_as_they_are() -> None:
    for name in config.list_recipes():
        if name not in GENERAL:
            tree = config.read_recipe(name)
            assert config.resolve(tree) == config.build(tree), name


def test_the_default_recipe_gets_its_settings_from_its_parts() -> None:
    found, expected = (values(resolution(name, "").config) for name in ("default", PLAIN))
    assert found | {"about": ""} == expected | {"about": ""}


@pytest.mark.parametrize(
    ("recipe", "words", "expected"),
    [
        # A word brings settings along, in place of those that the recipe had for the former part.
        ("default", "algorithm.name=fedema", "objective.name=byol partition.name=dirichlet"),
        ("default", "algorithm.name=fedavg", "server.optimizer=sgd server.lr=1.0 cohort.size=None"),
        ("default", "objective.name=vicreg", "algorithm.name=dcco objective.lambda=25.0"),
        ("default", "objective.name=sigreg", "algorithm.name=dcco objective.lambda=0.01"),
        ("default", "algorithm.name=fedsc", "objective.name=spectral algorithm.local_epochs=1"),
        ("default", "data.name=folder", "data.size=64 augment.name=dcco partition.name=iid"),
        ("default", "data.name=cifar100", "data.size=None evaluate.protocols=None"),
        ("default", "data.name=stl10", "partition.name=iid"),  # most images have no label
        ("default", "data.name=mine.py:sites", "data.size=None partition.name=iid server.lr=0.001"),
        ("folder", "encoder.name=tiny", "objective.projector=[512, 512, 512] server.lr=0.001"),
        ("default", "partition.name=iid", "cohort.size=None algorithm.batch=32"),
        ("default", "encoder.name=resnet18", "encoder.groups=32 server.lr=0.001"),
        ("folder", "algorithm.name=fedema", "objective.name=byol partition.name=iid"),
        # The user's words win.
        ("default", "algorithm.name=fedema client.lr=7", "client.lr=7.0 client.optimizer=adam"),
        ("default", "algorithm.name=fedavg algorithm.local_steps=2", "algorithm.local_epochs=None"),
        ("default", "algorithm.name=fedavg partition.samples=16", "partition.name=samples"),
        # A paper's recipe keeps what it sets.
        (DCCO, "algorithm.name=fedavg", "objective.name=cco server.optimizer=adam cohort.size=128"),
        (DCCO, "data.name=digits", "data.size=16 augment.name=dcco encoder.name=resnet14"),
        (FEDEMA, "algorithm.name=fedprox", "algorithm.local_epochs=5 client.lr=0.032"),
        (FEDEMA, "encoder.name=tiny", "objective.projector=[128, 128, 128] server.lr=1.0"),
    ],
)
def test_a_word_brings_its_settings_along(recipe: str, words: str, expected: str) -> None:
    resolved = resolution(recipe, words)
    found = values(resolved.config)
    pairs = [item.rpartition("=") for item in expected.replace(", ", ",").split()]
    assert {k: str(found[k]).replace(", ", ",") for k, _, _ in pairs} == {k: v for k, _, v in pairs}
    assert not list(resolved.notes())


@pytest.mark.parametrize(
    ("recipe", "words", "note"),
    [
        ("default", "objective.name=byol", "algorithm.name=fedavg in place of dcco"),
        ("default", "partition.clients=5", "cohort.size=null in place of 32"),
        ("default", "partition.name=folder", "data.name=folder in place of digits"),
        (DCCO, "partition.name=iid", "cohort.size=null in place of 128"),
        (DCCO, "objective.name=simclr", "algorithm.name=fedavg in place of dcco"),
        (
            DCCO,
            "algorithm.name=gossip",
            "server.optimizer=sgd server.lr=1.0 in place of adam, 0.001",
        ),
        (FEDEMA, "algorithm.name=dcco", "objective.name=cco in place of byol"),
        (FEDEMA, "algorithm.name=ccl", "objective.name=moco in place of byol"),
        (FEDEMA, "objective.name=mae", "encoder.name=vit-tiny in place of resnet18"),
        (MOCO, "objective.name=simclr", "algorithm.replace=online in place of both"),
        ("folder", "objective.name=mae", "algorithm.name=fedavg in place of dcco"),
    ],
)
def test_what_contradicts_a_word_gives_way_and_a_line_says_so(
    recipe: str, words: str, note: str
) -> None:
    notes = list(resolution(recipe, words).notes())
    assert sum(line.startswith(f"{note}: ") for line in notes) == 1
    assert len(notes) == 1 + (recipe == "folder")  # the encoder of photographs, too


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("algorithm.name=dcco objective.name=byol", "objective.name", "byol"),
        ("algorithm.name=gossip server.optimizer=adam", "server.optimizer", "adam"),
        ("partition.clients=5 cohort.size=6", "cohort.size", 6),
        ("objective.name=mae encoder.name=tiny", "objective.name", "mae"),
        ("partition.name=folder data.name=digits", "partition.name", "folder"),
        ("algorithm.name=fedu objective.name=simclr", "algorithm.name", "fedu"),
        ("algorithm.name=[fedavg,dcco] objective.name=byol", "objective.name", "byol"),
    ],
)
def test_two_words_that_contradict_are_refused(words: str, key: str, value: object) -> None:
    recipe, given = config.read_recipe("default"), config.read_words(words.split())
    with refused(key, value):
        list_runs(config.with_values(recipe, given), given)


def test_a_sweep_goes_the_same_way() -> None:
    """Its words are part of its recipe, and still win."""
    given = config.read_words(["objective.name=byol", "client.lr=[0.1,0.2]"])
    runs = list_runs(config.with_values(config.read_recipe("default"), given), given)
    assert [each.algorithm.name for each in runs.values()] == ["fedavg", "fedavg"]
    assert [each.client.lr for each in runs.values()] == [0.1, 0.2]


def test_a_recipe_that_contradicts_itself_is_refused() -> None:
    tree = {"algorithm": {"name": "gossip"}, "server": {"optimizer": "adam"}}
    with refused("server.optimizer", "adam"):
        config.resolve(tree)
    with refused("server.optimizer", "adam"):
        config.resolve(tree, ["rounds=3"])


def test_each_value_says_where_it_comes_from() -> None:
    resolved = resolution("default", "objective.name=mae algorithm.batch=16")
    rows = {key: rest for key, *rest in resolved.explain(resolution("default", "").config)}
    assert rows["objective.name"] == ["mae", "cco", "word"]
    assert rows["algorithm.batch"] == ["16", "null", "word"]
    assert rows["algorithm.name"] == ["fedavg", "dcco", "objective.name=mae"]
    assert rows["encoder.name"] == ["vit-tiny", "tiny", "objective.name=mae"]
    assert rows["server.lr"] == ["1.0", "0.003", "algorithm.name=fedavg"]
    assert rows["cohort.size"] == ["null", "32", "default"]
    assert "seed" not in rows and "data.size" not in rows


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("lr=0.1", "Write server.lr=0.1 or client.lr=0.1."),
        ("batch=64", "Write algorithm.batch=64."),
        ("projector=64", "Write objective.projector=64."),
        ("epochs=3", "Write algorithm.local_epochs=3."),
        ("algorithm=fedavg", "Write algorithm.name=fedavg."),
        ("data=cifar10", "Write data.name=cifar10."),
    ],
)
def test_a_key_without_its_section_is_suggested(word: str, fix: str) -> None:
    with pytest.raises(UserError) as error:
        resolution("default", word)
    assert error.value.fix == fix


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("fedavg", "Write algorithm.name=fedavg."),
        ("cifar10", "Write data.name=cifar10."),
        ("samples", "Write partition.name=samples."),
        ("mine", "`fedssl recipes` lists them."),
    ],
)
def test_a_name_of_a_part_is_no_recipe(name: str, fix: str) -> None:
    with pytest.raises(UserError) as error:
        config.read_recipe(name)
    assert error.value.fix == fix


@pytest.mark.parametrize("sections", [("algorithm", "objective"), ("objective", "encoder")])
def test_two_names_are_refused_only_if_they_contradict_each_other(
    sections: tuple[str, str],
) -> None:
    names = {**config.VARIANTS, "encoder": typing.get_args(EncoderName)}
    for pair in itertools.product(*(names[section] for section in sections)):
        words = [f"{section}.name={name}" for section, name in zip(sections, pair, strict=True)]
        try:
            resolution("default", " ".join(words))
        except UserError as error:
            assert {error.key, error.against} == {f"{section}.name" for section in sections}, words


def test_a_default_that_a_word_contradicts_is_refused() -> None:
    """It cannot give way to a recommendation, since nothing recommends another."""
    with refused("augment.small", 2, "takes no small views"):
        config.resolve({}, ["augment.small=2"])
