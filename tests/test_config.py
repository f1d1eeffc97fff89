"""Keys, types, names and the sentences that a mistake gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedssl import config
from fedssl.util.errors import UserError

OWN = f"{Path(__file__).parent.parent / 'examples/own/algorithm.py'}:Momentum"


def resolve(*words: str, recipe: str | None = None) -> config.Config:
    return config.resolve(config.read_recipe(recipe), words)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("algorithm.nmae=dcco", "algorithm.nmae: unknown key (did you mean algorithm.name?)"),
        ("roundss=3", "roundss: unknown key (did you mean rounds?)"),
        ("rounds=many", "rounds=many: expected a whole number"),
        ("rounds=2.5", "rounds=2.5: expected a whole number"),
        ("rounds=-1", "rounds=-1: must not be negative"),
        ("server.lr=fast", "server.lr=fast: expected a number"),
        ("server.lr=nan", "server.lr=nan: expected a number"),
        ("server.lr=0", "server.lr=0.0: must be above 0"),
        ("server.lr=inf", "server.lr=inf: must be above 0 and finite"),
        ("objective.lambda=-1", "objective.lambda=-1.0: must be finite and not negative"),
        ("objective.projector=[]", "objective.projector=[]: expected the widths"),
        ("objective.projector=8,-3", "objective.projector=[8, -3]: expected the widths"),
        ("evaluate.baselines=null", "evaluate.baselines=None: expected a list; give [] for an"),
        ("evaluate.protocols=[]", "evaluate.protocols=[]: name at least one"),
        ("paper.results=5", "paper.results=5: expected keys and values"),
        ("1=2", "1: unknown key"),
        ("server.momentum=1", "server.momentum=1.0: must be at least 0 and below 1"),
        ("data.halves=maybe", "data.halves=maybe: expected true or false"),
        ("objective.name=barlow", "objective.name=barlow: unknown; choose one of cco, vicreg"),
        ("algorithm.name=fedavgg", "algorithm.name=fedavgg: unknown (did you mean fedavg?)"),
        ("encoder.name=resnet99", "encoder.name=resnet99: unknown"),
        ("precision=fp8", "precision=fp8: unknown"),
        ("cohort.size=0", "cohort.size=0: must be above 0"),
        ("cohort.minimum=40", "cohort.minimum=40: more than cohort.size=32"),
        ("rounds", "rounds: expected key=value"),
        ("rounds.x=1", "rounds={'x': 1}: expected a whole number"),
        ("data=cifar10", "data=cifar10: expected keys such as data.name"),
        ("objective.temperature=0.1", "objective.temperature: unknown key"),
        ("evaluate.baselines=fedfoo", "evaluate.baselines=fedfoo: unknown"),
        ("data.levels=class,kind", "data.levels=kind: unknown"),
        ("encoder.init=", "encoder.init=: has no value; give one, or encoder.init=null for none"),
        ("rounds=1e400", "rounds=1e400: too large; give a whole number of at most 18 digits"),
        (f"rounds={2**63}", f"rounds={2**63}: too large; give a whole number"),
        (f"server.lr={10**400}", f"server.lr={10**400}: too large; give a number below"),
        (f"seed={'9' * 5000}", "999: too large; give a whole number"),  # more than Python reads
        ("engine.threads=100000", "engine.threads=100000: must be at most 1024"),
    ],
)
def test_a_mistake_is_one_line_that_names_key_value_and_fix(word: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        resolve(word)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("privacy.clip=5", "privacy.clip=5.0: does nothing without noise; add privacy.noise"),
        ("privacy.most_samples=5", "privacy.most_samples=5: does nothing without noise; add"),
        ("privacy.delta=0.1", "privacy.delta=0.1: does nothing without noise; add privacy.noise"),
        ("privacy.threshold=0.9", "privacy.threshold=0.9: does nothing without secure sums; add"),
        ("server.momentum=0.9", "server.momentum=0.9: does nothing with server.optimizer=adam;"),
        (
            "client.optimizer=adamw client.momentum=0.9",
            "client.momentum=0.9: does nothing with client.optimizer=adamw; use",
        ),
        (
            "client.momentum=0.9",
            "client.momentum=0.9: does nothing with one local step, as clients' optimizers start "
            "anew every round; add algorithm.local_steps=2 or more, or leave it at 0.0",
        ),
        ("client.optimizer=lars client.momentum=0.9", "client.momentum=0.9: does nothing with one"),
        ("algorithm.local_steps=null client.momentum=0.9", "client.momentum=0.9: does nothing"),
        ("algorithm.local_epochs=1 client.momentum=0.9", "client.momentum=0.9: does nothing with"),
        ("algorithm.name=centralized client.momentum=0.9", "client.momentum=0.9: does nothing"),
        (
            "algorithm.name=fedca algorithm.align=0 client.momentum=0.9",
            "client.momentum=0.9: does nothing with one local step",
        ),
        (
            "evaluate.monitor=knn,linear",
            "evaluate.monitor=knn,linear: does nothing without evaluations between rounds; add "
            "evaluate.every, as in evaluate.every=10, or leave it at null",
        ),
        (
            "evaluate.head=linear",
            "evaluate.head=linear: does nothing without semi; add it to evaluate.protocols, as in "
            "semi@10%, or leave it at mlp",
        ),
        ("evaluate.head=linear evaluate.monitor=semi@10%", "evaluate.monitor=semi@10%: does"),
        ("cohort.hostile=3", "cohort.hostile=3: does nothing with cohort.average=mean; use"),
        ("cohort.average=median cohort.hostile=3", "cohort.hostile=3: does nothing with cohort."),
        ("engine.sites=3", "engine.sites=3: a simulation has no sites; write an app for them"),
        ("engine.workers=4", "engine.workers=4: does nothing with engine.name=local; use engine."),
        (
            "engine.timeout=5",
            "engine.timeout=5.0: does nothing with engine.name=local; use engine.name=flower, or "
            "leave it at 600.0",
        ),
        ("engine.updates=fp16", "engine.updates=fp16: does nothing with engine.name=local; use"),
        ("engine.max_norm=2", "engine.max_norm=2.0: does nothing with engine.name=local; use"),
        (
            "engine.name=flower engine.chunk=64",
            "engine.chunk=64: does nothing with engine.name=flower; use engine.name=local, or",
        ),
        (
            "privacy.noise=4 checkpoint.seconds=60",
            "checkpoint.seconds=60.0: with privacy.noise there is one after every round; use 0, or",
        ),
        ("data.corrupt=skip", "data.corrupt=skip: does nothing with data.name=digits, which has"),
        ("encoder.patch=4", "encoder.patch=4: does nothing with encoder.name=tiny; use encoder."),
        (
            "partition.name=skew partition.sources=3",
            "partition.sources=3: does nothing with partition.source=labels; use another",
        ),
        (
            "algorithm.name=fedema algorithm.lambda=1 algorithm.tau=0.5",
            "algorithm.tau=0.5: does nothing with algorithm.lambda=1.0; use algorithm.lambda=auto",
        ),
        (
            "algorithm.name=fedema algorithm.decay=0.9 algorithm.tau=0.5",
            "algorithm.tau=0.5: does nothing with algorithm.decay=[0.9]; use algorithm.lambda=auto",
        ),
        (
            "algorithm.name=gossip algorithm.edge_probability=0.5",
            "algorithm.edge_probability=0.5: does nothing with algorithm.topology=cycle; use topol",
        ),
        (
            "algorithm.name=ccl algorithm.lambda=0 algorithm.neighbours=3",
            "algorithm.neighbours=3: does nothing with algorithm.lambda=0; use an algorithm.lambda",
        ),
        (
            "algorithm.name=ccl algorithm.lambda=0 algorithm.temperature=1",
            "algorithm.temperature=1.0: does nothing with algorithm.lambda=0; use",
        ),
        (
            "algorithm.name=ccl algorithm.lambda=0 algorithm.remote=off algorithm.features=8",
            "algorithm.features=8: does nothing with algorithm.remote=off; use algorithm.remote=b",
        ),
        (
            "algorithm.name=ccl algorithm.lambda=0 algorithm.remote=off algorithm.mix=2",
            "algorithm.mix=2: does nothing with algorithm.remote=off; use algorithm.remote=both",
        ),
        (
            "algorithm.name=featarc algorithm.clusters=1 algorithm.start=apart",
            "algorithm.start=apart: does nothing with algorithm.clusters=1; use more algorithm.cl",
        ),
        (
            "algorithm.name=fedca algorithm.align=0 algorithm.base_epochs=5",
            "algorithm.base_epochs=5: does nothing with algorithm.align=0; use an algorithm.align",
        ),
    ],
)
def test_a_key_that_would_do_nothing_is_refused(words: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        config.check_used(resolve(*words.split()))
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_a_key_that_acts_in_one_run_of_several_is_used() -> None:
    clipped = resolve("privacy.clip=5")
    noisy = resolve("privacy.clip=5", "privacy.noise=4")
    config.check_used(clipped, noisy)
    config.check_used(resolve("privacy.clip=1", "server.momentum=0", "cohort.hostile=1"))
    with pytest.raises(UserError, match=r"privacy.clip=5"):
        config.check_used(resolve(), clipped)
    drawn = resolve("algorithm.name=gossip", "algorithm.edge_probability=0.5")
    with pytest.raises(UserError, match=r"algorithm.edge_probability=0.5"):
        config.check_used(resolve(), drawn)  # which has no such key


@pytest.mark.parametrize(
    "words",
    [
        "privacy.noise=4 checkpoint.seconds=0",
        "data.name=folder data.corrupt=skip",
        "encoder.name=vit-tiny encoder.patch=4",
        "partition.name=skew partition.source=style partition.sources=3",
        "algorithm.name=fedema algorithm.tau=0.5",
        "algorithm.name=gossip algorithm.topology=random algorithm.edge_probability=0.5",
        "algorithm.name=ccl algorithm.neighbours=3 algorithm.temperature=1 algorithm.mix=2",
        "algorithm.name=featarc algorithm.start=apart",
        "algorithm.name=fedca algorithm.base_epochs=5",
        "engine.name=flower engine.compile=on engine.workers=4",
        "client.momentum=0.9 algorithm.local_steps=2",
        "client.momentum=0.9 algorithm.local_epochs=2",
        "client.momentum=0.9 algorithm.local_epochs=1 algorithm.batch=2",
        "client.momentum=0.9 algorithm.local_epochs=1 algorithm.name=centralized",
        "client.momentum=0.9 algorithm.local_epochs=1 evaluate.baselines=centralized",
        "client.momentum=0.9 algorithm.name=fedca",  # whose base model trains for epochs
        f"client.momentum=0.9 algorithm.name={OWN}",  # which may do with it what it likes
        "evaluate.monitor=knn evaluate.every=5",
        "evaluate.head=linear evaluate.protocols=knn,semi@10%",
        "evaluate.head=linear evaluate.monitor=semi@10% evaluate.every=5",
    ],
)
def test_a_key_that_acts_is_not_refused(words: str) -> None:
    config.check_used(resolve(*words.split()))


def test_another_rule_leaves_the_recipes_momentum() -> None:
    recipe = "fedema/table3/fedbyol/cifar10-noniid"
    swapped = resolve("client.optimizer=adam", recipe=recipe)
    assert (resolve(recipe=recipe).client.momentum, swapped.client.momentum) == (0.9, 0)
    config.check_used(swapped)
    assert resolve("client.optimizer=lars", recipe=recipe).client.momentum == 0.9
    with pytest.raises(UserError, match=r"client.momentum=0.5: does nothing"):
        config.check_used(resolve("client.optimizer=adam", "client.momentum=0.5", recipe=recipe))


def test_another_engine_leaves_what_the_recipe_has_for_its_own(tmp_path: Path) -> None:
    recipe = str(tmp_path / "a.yaml")
    words = "name: flower, workers: 4, timeout: 5, updates: fp16, max_norm: 2, threads: 1"
    Path(recipe).write_text(f"extends: default\nengine: {{{words}}}\n")
    config.check_used(resolve(recipe=recipe))
    assert resolve("engine.name=flower", recipe=recipe) == resolve(recipe=recipe)
    local = resolve("engine.name=local", recipe=recipe)
    assert local.engine == config.Engine(threads=1)
    config.check_used(local)
    with pytest.raises(UserError, match=r"engine.timeout=7.0: does nothing"):
        config.check_used(resolve("engine.name=local", "engine.timeout=7", recipe=recipe))
    with pytest.raises(UserError, match=r"engine.name=\['local'\]: unknown"):
        resolve("engine.name=[local]", recipe=recipe)


def test_a_file_may_merge_twice(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("server:\n  <<: {lr: 1}\n  <<: {momentum: 0.5}\n")
    assert resolve("server.optimizer=sgd", recipe=str(tmp_path / "a.yaml")).server.momentum == 0.5


def test_every_number_has_its_limits() -> None:
    """Below them it would fail in the middle of a run, or do nothing."""
    kinds: dict[str, object] = {}
    for section in config.key_types(config.Config):
        if section not in (*config.VARIANTS, "augment"):
            kinds |= config.sweeps.section_types(section, None)
    numbers = {key for key, kind in kinds.items() if kind in (int, float, int | None, float | None)}
    numbers |= {"algorithm.batch", "algorithm.local_epochs", "algorithm.local_steps"}
    assert len(numbers) > 30
    for key in numbers - {"data.holdout"}:  # which has its limits where data is loaded
        with pytest.raises(UserError, match=rf"^{key}=-1(\.0)?: must"):
            resolve(f"{key}=-1")


def test_alternatives_exclude_each_other_and_the_users_replaces_the_recipes() -> None:
    assert resolve("algorithm.local_epochs=2").algorithm.local_steps is None
    assert resolve("cohort.fraction=0.5").cohort.size is None
    with pytest.raises(UserError, match="give one of the two"):
        resolve("algorithm.local_epochs=2", "algorithm.local_steps=1")
    with pytest.raises(UserError, match="give one of the two"):
        resolve("cohort.fraction=0.5", "cohort.size=4")


def test_a_recipe_that_extends_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"extends: {path}\n")
    with pytest.raises(UserError, match="extends itself"):
        resolve(recipe=str(path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rounds: 1\nseed: 1\nrounds: 2\n", "line 3: rounds stands in line 1 already; leave one"),
        ("server: {lr: 1, lr: 2}\n", "line 1: lr stands in line 1 already"),
    ],
)
def test_a_key_that_a_file_has_twice(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        resolve(recipe=str(path))
    assert str(error.value).startswith(f"{path}: {said}") and "\n" not in str(error.value)


def test_a_key_that_replaces_a_merged_one_is_there_once(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("server: &a {lr: 1}\nclient: {<<: *a, lr: 2}\n")
    settings = resolve(recipe=str(path))
    assert (settings.server.lr, settings.client.lr) == (1, 2)


def test_fraction_must_be_a_fraction() -> None:
    for bad in ("0", "1.5", "-0.1"):
        with pytest.raises(UserError, match=r"cohort\.fraction"):
            config.build({"cohort": {"fraction": bad}})


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
    assert settings.partition.alpha == float("inf")  # type: ignore[attr-defined]
    assert resolve("objective.projector=[64, 32]").objective.projector == (64, 32)  # type: ignore[attr-defined]
    assert resolve("partition.alpha=.inf").partition.alpha == float("inf")  # type: ignore[attr-defined]
    assert resolve("rounds=1_000").rounds == resolve("rounds=1e3").rounds == 1000
    large = 2**53 + 1  # not a float
    assert resolve(f"seed={large}").seed == resolve(f"seed='{large}'").seed == large


@pytest.mark.parametrize(
    "name",
    [
        *("2024", "2024_01", "2024-01-31", "2024-13-45", "010", "1.50", "12:30", "0x10"),
        *("photos #2", "site: A", "- x", "&a b", "!x", "[old] photos", "~/photos", "9" * 5000),
        *("#2", "---", "&a"),
    ],
)
def test_a_name_stays_as_it_is_written(name: str) -> None:
    assert resolve(f"data.root={name}").data.root == name
    assert resolve(f"data.root= {name} ").data.root == name
    assert resolve(f'data.root="{name}"').data.root == name


def test_names_in_a_list_stay_as_they_are_written() -> None:
    tree = config.merged({}, ["data.root=[2024_01, 010, 2024-01-31]", "seed=[0, -1, 10]"])
    assert config.swept(tree) == {
        "data.root": ["2024_01", "010", "2024-01-31"],
        "seed": [0, -1, 10],
    }


@pytest.mark.parametrize(
    ("recipe", "word", "key"),
    [
        ("decssl/figure5/cluster/alpha-5", "algorithm.clusters=1", "algorithm.start"),
        ("fedema/figure10a/tau-0.5/cifar10-noniid", "algorithm.lambda=0.8", "algorithm.tau"),
        ("fedema/figure10a/tau-0.5/cifar10-noniid", "evaluate.every=0", "evaluate.monitor"),
        ("ccl/table2/ccl/cifar10-iid", "evaluate.protocols=knn", "evaluate.head"),
        ("fedema/table11/fedema/epochs-1", "algorithm.batch=null", "client.momentum"),
    ],
)
def test_what_a_word_switches_off_of_a_recipe_goes(recipe: str, word: str, key: str) -> None:
    tree = config.read_recipe(recipe)

    def values(*words: str) -> dict[str, object]:
        return config.flat(config.to_tree(config.resolve(tree, words)))

    config.check_used(config.resolve(tree, [word]))
    before, after = values(), values(word)
    assert {name for name in before if before[name] != after[name]} == {word.split("=")[0], key}
    with pytest.raises(UserError, match=f"{key}=.*: does nothing"):
        config.check_used(config.resolve(tree, [word, f"{key}={config.unused.show(before[key])}"]))


def test_what_values_of_a_sweep_switch_off_of_a_recipe_goes_if_all_do() -> None:
    tree = config.read_recipe("fedema/table11/fedema/epochs-1")

    def runs(word: str) -> list[config.Config]:
        swept = config.merged(tree, [word, "seed=[0,1]"])
        return [config.build(config.with_values(swept, own)) for own in config.combinations(swept)]

    for word, momentum in (("algorithm.batch=null", 0.0), ("algorithm.batch=[null,64]", 0.9)):
        found = runs(word)
        config.check_used(*found)
        assert {run.client.momentum for run in found} == {momentum}


def test_a_key_that_a_recipe_itself_switches_off_stays_to_be_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("client: {momentum: 0.9}\nalgorithm: {name: fedavg}\n")
    with pytest.raises(UserError, match=r"client.momentum=0.9: does nothing"):
        config.check_used(resolve("algorithm.local_steps=1", recipe=str(path)))


def test_nothing_and_truth() -> None:
    for word in ("data.root=~", "data.root=null"):
        assert resolve(word).data.root is None
    assert resolve("data.halves=true", "data.size=16").data.halves is True


def test_a_file_with_a_date_that_there_is_not(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("data: {name: folder, root: 2024-13-45}")
    with pytest.raises(UserError, match=r"mine.yaml: not valid YAML"):
        config.read_yaml(path)
    with pytest.raises(UserError, match="cannot be read"):
        config.read_yaml(tmp_path)


def test_a_new_name_keeps_no_key_of_the_old_one_but_every_key_of_the_user() -> None:
    settings = resolve("objective.name=simclr", "algorithm.name=fedavg")
    assert settings.objective.projector == (256, 256, 128)  # type: ignore[attr-defined]
    assert settings.algorithm.local_steps == 1  # means the same under every algorithm
    # The default recipe's λ = 2 is CCO's; VICReg's λ is another weight.
    assert resolve("objective.name=vicreg").objective.lambda_ == 25  # type: ignore[attr-defined]
    assert resolve("partition.name=dirichlet").partition.alpha == 0.5  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"objective\.lambda: unknown key"):
        resolve("objective.name=simclr", "objective.lambda=3")


def test_lambda_is_the_papers_letter() -> None:
    settings = resolve("objective.lambda=7")
    assert settings.objective.lambda_ == 7.0  # type: ignore[attr-defined]
    assert config.to_tree(settings)["objective"]["lambda"] == 7.0


def test_recipes_from_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: default\nrounds: 7\nserver: {lr: 0.5}\n")
    settings = resolve(recipe=str(path))
    assert (settings.rounds, settings.server.lr, settings.server.optimizer) == (7, 0.5, "adam")
    path.write_text("rounds: [1\n")
    with pytest.raises(UserError, match="not valid YAML"):
        resolve(recipe=str(path))
    path.write_text("- 1\n")
    with pytest.raises(UserError, match="expected keys and values"):
        resolve(recipe=str(path))
    with pytest.raises(UserError, match="no such recipe or file"):
        resolve(recipe="dcco/cifar100-noniid-5")


def test_what_a_file_switches_off_of_the_recipe_that_it_extends_goes(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    base = "extends: fedema/table3/fedbyol/cifar10-noniid\n"
    own.write_text(base + "evaluate: {every: 0}\nalgorithm: {local_steps: 1}\n")
    settings = config.resolve(config.read_recipe(str(own)))
    assert settings.evaluate.monitor is None and settings.client.momentum == 0
    config.check_used(settings)
    own.write_text(base + "evaluate: {every: 0, monitor: [linear]}\n")  # meant, so it is said
    with pytest.raises(UserError, match=r"evaluate\.monitor=linear: does nothing"):
        config.check_used(config.resolve(config.read_recipe(str(own))))
