"""Keys, types, names and the sentences that a mistake gets."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from helpers import refused

from fedssl import config
from fedssl.util.errors import UserError


def resolve(*words: str, recipe: str | None = None) -> config.Config:
    return config.resolve(config.read_recipe(recipe), words)


LARGE = str(10**400)


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("rounds=2.5", "rounds", 2.5),
        ("server.lr=fast", "server.lr", "fast"),
        ("server.lr=nan", "server.lr", "nan"),
        ("server.lr=0", "server.lr", 0),
        ("server.lr=inf", "server.lr", float("inf")),
        ("objective.projector=[]", "objective.projector", ()),
        ("objective.projector=8,-3", "objective.projector", (8, -3)),
        ("evaluate.baselines=null", "evaluate.baselines", None),
        ("evaluate.protocols=[]", "evaluate.protocols", ()),
        ("paper.results=5", "paper.results", 5),
        ("server.momentum=1", "server.momentum", 1),
        ("data.halves=maybe", "data.halves", "maybe"),
        ("precision=fp8", "precision", "fp8"),
        ("cohort.minimum=40", "cohort.minimum", 40),
        ("rounds.x=1", "rounds", {"x": 1}),
        ("data=cifar10", "data", "cifar10"),
        ("rounds=1e400", "rounds", "1e400"),
        (f"rounds={2**63}", "rounds", 2**63),
        (f"server.lr={LARGE}", "server.lr", int(LARGE)),
        (f"seed={'9' * 5000}", "seed", "9" * 5000),  # more digits than Python reads
        ("client.weight_decay=1e39", "client.weight_decay", 1e39),
        ("algorithm.name=fedprox algorithm.mu=1e39", "algorithm.mu", 1e39),
        ("privacy.noise=1e39", "privacy.noise", 1e39),
        ("engine.timeout=1e10", "engine.timeout", 1e10),
        ("rounds=1000000000000", "rounds", 10**12),
        ("data.size=1000000000", "data.size", 10**9),
        ("evaluate.size=1", "evaluate.size", 1),  # torch cannot reduce color images to one pixel
        ("objective.projector=1000000", "objective.projector", (10**6,)),
        ("engine.sites=1000000000", "engine.sites", 10**9),
        ("engine.workers=1000000", "engine.workers", 10**6),
        (f"data.root={'x' * 256}", "data.root", "x" * 256),
        (f"data.cache={'x/' * 2048}", "data.cache", "x/" * 2048),
        (f"rounds={'[' * 3000}", "rounds", "[" * 3000),
        (f"rounds={'[' * 900}{']' * 900}", "rounds", f"{'[' * 900}{']' * 900}"),
        ("algorithm.local_epochs=2 algorithm.local_steps=1", "algorithm.local_steps", 1),
        ("cohort.fraction=0.5 cohort.size=4", "cohort.size", 4),
    ],
)
def test_an_error_has_the_key_the_value_and_a_fix(word: str, key: str, value: object) -> None:
    with pytest.raises(UserError) as error:
        resolve(*word.split())
    assert (error.value.key, error.value.value) == (key, value)
    assert error.value.fix and "\n" not in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("algorithm.nmae=dcco", "algorithm.nmae: unknown key (did you mean algorithm.name?)"),
        ("roundss=3", "roundss: unknown key (did you mean rounds?)"),
        ("objective.name=barlow", "objective.name=barlow: unknown. Choose one of cco, vicreg"),
        ("algorithm.name=fedavgg", "algorithm.name=fedavgg: unknown (did you mean fedavg?)"),
        ("encoder.name=resnet99", "encoder.name=resnet99: unknown"),
        ("rounds", '"rounds" is not key=value'),
        ("evaluate.baselines=fedfoo", "evaluate.baselines=fedfoo: unknown"),
        ("encoder.init=", "encoder.init=: no value. Give a value, or encoder.init=null for none"),
    ],
)
def test_an_unknown_name_is_one_line(word: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        resolve(word)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("privacy.clip=5", "privacy.clip"),
        ("evaluate.monitor=knn", "evaluate.monitor"),
        ("cohort.average=median cohort.hostile=3", "cohort.hostile"),
        ("engine.name=flower engine.chunk=64", "engine.chunk"),
        ("partition.name=skew partition.sources=3", "partition.sources"),
        ("algorithm.name=fedema algorithm.lambda=1 algorithm.tau=0.5", "algorithm.tau"),
    ],
)
def test_a_key_without_effect_is_a_warning(words: str, key: str) -> None:
    (warning,) = config.find_idle_keys(resolve(*words.split()))
    assert warning.startswith(f"{key} has no effect without {key.split('.')[0]}.")


@pytest.mark.parametrize(
    "words",
    [
        "privacy.noise=4 privacy.clip=2",
        "partition.name=skew partition.source=style partition.sources=3",
        "algorithm.name=ccl algorithm.neighbours=3 algorithm.temperature=1 algorithm.mix=2",
        "evaluate.monitor=knn evaluate.every=5",
    ],
)
def test_a_key_with_effect_is_no_warning(words: str) -> None:
    assert not list(config.find_idle_keys(resolve(*words.split())))


def test_every_key_has_a_description() -> None:
    for section, names in config.VARIANTS.items():
        for name in names:
            settings = config.resolve({section: {"name": name}})
            assert not [key for key, fact in config.declarations(settings) if not fact.help]


def test_keys_know_what_they_affect() -> None:
    assert config.keys_affecting(resolve(), "speed", "nothing") == {
        *("about", "checkpoint.seconds", "data.cache", "device", "log", "paper"),
        "evaluate.show_training_images",
        *("data.stream", "engine.chunk", "engine.timeout", "engine.workers"),
    }
    skewed = resolve("partition.name=skew")
    paths = ["partition.encoder", "data.root", "data.cache", "encoder.init"]
    assert config.path_keys(skewed) == paths


def test_another_rule_leaves_the_recipes_momentum() -> None:
    recipe = "fedema/table3/fedbyol/cifar10-noniid"
    swapped = resolve("client.optimizer=adam", recipe=recipe)
    assert (resolve(recipe=recipe).client.momentum, swapped.client.momentum) == (0.9, 0)
    assert resolve("client.optimizer=lars", recipe=recipe).client.momentum == 0.9


def test_another_engine_leaves_what_the_recipe_has_for_its_own(tmp_path: Path) -> None:
    recipe = str(tmp_path / "a.yaml")
    words = "name: flower, workers: 4, timeout: 5, updates: fp16, max_norm: 2, threads: 1"
    Path(recipe).write_text(f"extends: default\nengine: {{{words}}}\n")
    assert resolve("engine.name=flower", recipe=recipe) == resolve(recipe=recipe)
    local = resolve("engine.name=local", recipe=recipe)
    assert local.engine == config.Engine(threads=1)
    with pytest.raises(UserError, match=r"engine.name=\[local\]: unknown"):
        resolve("engine.name=[local]", recipe=recipe)


def test_every_number_has_its_limits() -> None:
    """Below them it would fail in the middle of a run, or do nothing."""
    kinds: dict[str, object] = {}
    for section in config.key_types(config.Config):
        if section not in (*config.VARIANTS, "augment"):
            kinds |= config.sweeps.section_types(section, None)
    numbers = {key for key, kind in kinds.items() if kind in (int, float, int | None, float | None)}
    numbers |= {"algorithm.batch", "algorithm.local_epochs", "algorithm.local_steps"}
    assert len(numbers) > 30
    for key in numbers:
        with pytest.raises(UserError) as error:
            resolve(f"{key}=-1")
        assert (error.value.key, error.value.value) == (key, -1)


def test_a_users_alternative_replaces_the_recipes() -> None:
    assert resolve("algorithm.local_epochs=2").algorithm.local_steps is None
    assert resolve("cohort.fraction=0.5").cohort.size is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rounds: 1\nseed: 1\nrounds: 2\n", "not valid YAML (line 3: rounds is in line 1 already)"),
        ("server: {lr: 1, lr: 2}\n", "not valid YAML (line 1: lr is in line 1 already)"),
        ("data: {name: folder, root: 2024-13-45}", "not valid YAML"),  # a date that there is not
        ("rounds: [1\n", "not valid YAML"),
        ("- 1\n", "not keys and values"),
        ("extends: mine.yaml\n", "extends itself (mine.yaml → mine.yaml)"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_recipe(
    text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(text or "")
    with pytest.raises(UserError) as error:
        resolve(recipe="mine.yaml") if text else config.read_yaml(tmp_path)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "lr", "momentum"),
    [
        ("server:\n  <<: {lr: 1}\n  <<: {momentum: 0.5}\n", 1, 0.5),
        ("client: &a {lr: 1}\nserver: {<<: *a, lr: 2}\n", 2, 0),  # it replaces the merged one
        ("extends: default\nserver: {lr: 0.5}\n", 0.5, 0),
    ],
)
def test_files_merge(text: str, lr: float, momentum: float, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    server = resolve("server.optimizer=sgd", recipe=str(tmp_path / "a.yaml")).server
    assert (server.lr, server.momentum) == (lr, momentum)


def test_values_as_people_write_them() -> None:
    settings = resolve(
        "server.lr=1e-3",
        "engine.merge=off",
        "evaluate.protocols=knn,linear@100",
        "partition.alpha=inf",
    )
    assert settings.server.lr == 0.001
    assert settings.engine.merge == "off"  # YAML reads a bare off as false
    assert settings.evaluate.protocols == ("knn", "linear@100")
    assert settings.partition.alpha == float("inf")
    assert resolve("objective.projector=[64, 32]").objective.projector == (64, 32)
    assert resolve("partition.alpha=.inf").partition.alpha == float("inf")
    assert resolve("rounds=1_000").rounds == resolve("rounds=1e3").rounds == 1000
    assert resolve("data.root=~").data.root is resolve("data.root=null").data.root is None
    assert resolve("data.halves=true").data.halves is True
    large = 2**53 + 1  # not a float
    assert resolve(f"seed={large}").seed == resolve(f"seed='{large}'").seed == large


@pytest.mark.parametrize(
    "name",
    [
        *("2024", "2024_01", "2024-01-31", "2024-13-45", "010", "1.50", "12:30", "0x10"),
        *("photos #2", "site: A", "- x", "&a b", "!x", "[old] photos", "~/photos", "9" * 255),
        *("#2", "---", "&a"),
    ],
)
def test_a_name_stays_as_it_is_written(name: str) -> None:
    assert resolve(f"data.root={name}").data.root == name
    assert resolve(f"data.root= {name} ").data.root == name
    assert resolve(f'data.root="{name}"').data.root == name


def test_names_in_a_list_stay_as_they_are_written() -> None:
    tree = config.apply_words({}, ["data.root=[2024_01, 010, 2024-01-31]", "seed=[0, -1, 10]"])
    assert config.find_sweep(tree) == {
        "data.root": ["2024_01", "010", "2024-01-31"],
        "seed": [0, -1, 10],
    }


def test_a_new_name_keeps_no_key_of_the_old_one_but_every_key_of_the_user() -> None:
    settings = resolve("objective.name=simclr", "algorithm.name=fedavg", "encoder.name=resnet18")
    assert settings.objective.projector == (256, 256, 128)
    # The default recipe's λ = 2 is CCO's; VICReg's λ is another weight.
    assert resolve("objective.name=vicreg").objective.lambda_ == 25
    assert resolve("partition.name=dirichlet").partition.alpha == 0.5
    with pytest.raises(UserError, match=r"objective\.lambda: unknown key"):
        resolve("objective.name=simclr", "objective.lambda=3")


def test_lambda_is_the_papers_letter() -> None:
    settings = resolve("objective.lambda=7")
    assert settings.objective.lambda_ == 7.0
    assert config.to_tree(settings)["objective"]["lambda"] == 7.0


def test_every_number_has_a_largest_value() -> None:
    """Keys that declare no bound have one too, so that float32 and 32 bits hold it."""
    for section, names in config.VARIANTS.items():
        for name in names:
            params = config.variant(section, name).Params
            for key, fact in (
                *config.facts_of(params).items(),
                *config.declarations(config.Config),
            ):
                assert fact.allows(float("inf")) == (not fact.finite)
                assert fact.is_bounded or not (fact.allows(1e10) or fact.allows(2**31)), key
                assert fact.is_bounded or fact.allows(1e9), key


@pytest.mark.parametrize(
    "text",
    [
        f"about: {'[' * 5000}{']' * 5000}",
        f"about: {'[' * 30}{']' * 30}",
        "".join(f"{' ' * level}a:\n" for level in range(2000)),
        "about: &a [*a]",
        "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n" for a, b in pairwise("abcdefghij"))
        + "about: *j",
        "seed: 0\x00",
    ],
)
def test_yaml_that_python_cannot_take_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with refused(None, says=f"{tmp_path / 'a.yaml'}: "):
        config.read_yaml(tmp_path / "a.yaml")


def test_a_zero_byte_is_refused() -> None:
    with refused("data.root"):
        config.build({"data": {"name": "folder", "root": "a\0b"}})
