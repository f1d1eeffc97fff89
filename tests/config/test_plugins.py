"""A user's own algorithm, objective, partition and protocol, from files and from packages."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fedssl import config
from fedssl.cli import main
from fedssl.config import plugins
from fedssl.data.dataset import Split
from fedssl.data.partition import partition
from fedssl.evaluate.registry import parse_protocol
from fedssl.runs import loop, metrics
from fedssl.util.errors import UserError

OWN = Path(__file__).parents[2] / "examples" / "own"
SMALL = [
    *("rounds=3", "data.size=8", "objective.projector=16,8", "evaluate.baselines=[]"),
    *("engine.threads=1", "cohort.size=3", "client.lr=0.1"),
]
ALL = [
    *("algorithm.name=algorithm.py:Momentum", "algorithm.momentum=0.5"),
    *("objective.name=objective.py:Uniform", "objective.weight=0.5"),
    *("partition.name=partition.py:Halving", "partition.clients=4"),
    "evaluate.protocols=[protocol.py:nearest_mean,protocol.py:nearest_mean@100]",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All four examples in one run, named as from their folder."""
    out = tmp_path_factory.mktemp("own") / "run"
    before = Path.cwd()
    os.chdir(OWN)
    try:
        assert main(["run", *SMALL, *ALL, "checkpoint.seconds=0", "--out", str(out)]) == 0
    finally:
        os.chdir(before)
    return out


def test_all_examples_run_from_the_command_line(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    names = {"nearest_mean_top1", "nearest_mean_top3", "nearest_mean@100_top1"}
    assert names <= summary["result"].keys()
    one, three = summary["nearest_mean_top1"], summary["nearest_mean_top3"]
    assert 50 < one < three <= 100
    assert summary["nearest_mean@100_top1"] != one  # other images' labels
    clients = json.loads((run / "clients.json").read_text())
    assert [c["samples"] for c in clients] == [719, 360, 180, 179]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and all(line["exchanges"]["train"]["up"] > 0 for line in lines)


def test_the_folder_keeps_absolute_paths_so_that_everything_works_from_elsewhere(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = yaml.safe_load((run / "config.yaml").read_text())
    assert tree["algorithm"]["name"] == f"{OWN.resolve() / 'algorithm.py'}:Momentum"
    assert tree["algorithm"]["momentum"] == 0.5 and tree["objective"]["weight"] == 0.5
    assert tree["evaluate"]["protocols"][1] == f"{OWN.resolve() / 'protocol.py'}:nearest_mean@100"
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", str(run)]) == 0
    again = json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1])
    assert again["rows"]["result"] == json.loads((run / "summary.json").read_text())["result"]
    # Named in another way, it is the same: nothing is taken to have changed.
    words = [*SMALL, "algorithm.name=" + os.path.relpath(OWN / "algorithm.py") + ":Momentum"]
    assert main(["run", *words, "--resume", "--out", str(run)]) == 0
    assert main(["run", "algorithm.momentum=0.4", "--resume", "--out", str(run)]) == 2
    assert "algorithm.momentum=0.4: was 0.5" in capsys.readouterr().err


def losses(out: Path, name: str, *words: str) -> list[float]:
    keys = [f"algorithm.name={name}", "evaluate.protocols=knn", "objective.name=simclr"]
    assert main(["run", *SMALL, *keys, "partition.samples=16", *words, "--out", str(out)]) == 0
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_the_examples_momentum_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At momentum 0 it is FedAvg, otherwise not; and a resumed run still has its velocity."""
    own = f"{OWN}/algorithm.py:Momentum"
    plain = losses(tmp_path / "plain", "fedavg", "engine.merge=off")
    assert losses(tmp_path / "none", own, "algorithm.momentum=0") == plain
    whole = losses(tmp_path / "whole", own)
    assert whole[-1] != plain[-1]
    real = loop.run_one_round

    def killed(experiment: Any, *rest: Any) -> dict[str, Any]:
        if experiment.server.round == 2:
            raise SystemExit
        return real(experiment, *rest)

    monkeypatch.setattr(loop, "run_one_round", killed)
    with pytest.raises(SystemExit):
        losses(tmp_path / "cut", own, "checkpoint.seconds=0")
    monkeypatch.setattr(loop, "run_one_round", real)
    assert losses(tmp_path / "cut", own, "checkpoint.seconds=0", "--resume") == whole


def test_the_commands_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (OWN / "README.md").read_text().replace("\\\n", " ")
    commands = [
        shlex.split(line)[1:] for line in text.splitlines() if line.startswith("fedssl run")
    ]
    assert len(commands) == 3
    monkeypatch.chdir(OWN.parents[1])
    for number, words in enumerate(commands):
        quick = ["rounds=1", "evaluate.baselines=[]", "data.size=8", "engine.threads=1"]
        assert main([*words, *quick, "--out", str(tmp_path / str(number))]) == 0


def test_keys_of_ones_own_are_checked_as_ours_are(capsys: pytest.CaptureFixture[str]) -> None:
    own = f"algorithm.name={OWN}/algorithm.py:Momentum"
    for word, said in (
        ("algorithm.momentum=high", "algorithm.momentum=high:"),
        ("algorithm.momentun=0.5", "did you mean algorithm.momentum?"),
        ("algorithm.momentum=2", "algorithm.momentum=2.0: out of range"),
    ):
        assert main(["run", own, word]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1


BAD = {
    "missing": (None, r"cannot be read \(No such file"),
    "nothing": ("x = 1\n", "nothing there is called Own. The file has no class or function"),
    "other": ("class Other: pass\n", "nothing there is called Own. The file has Other"),
    "kind": (
        "class Own: pass\n",
        "not a subclass of fedssl.federation.algorithm.Algorithm",
    ),
    "value": ("Own = 3\n", "not a subclass of"),
    "raises": ("\n\nraise ValueError('two\\nlines')\n", "line 3: ValueError: two lines$"),
    "import": ("import no_such_module\n", "line 1: ModuleNotFoundError: No module named"),
    "syntax": ("a = 1\ndef (:\n", "line 2: SyntaxError: "),
    "exit": ("import sys\nsys.exit('bye')\n", "line 2: SystemExit: bye"),
    "abstract": (
        "from fedssl.federation.algorithm import Algorithm\nclass Own(Algorithm): pass\n",
        "lacks round",
    ),
    "decorator": (
        "from fedssl.algorithms.fedavg import FedAvg\n"
        "class Own(FedAvg):\n    class Params(FedAvg.Params):\n        beta: float = 1.0\n",
        r"Params needs the decorator @dataclass\(frozen=True\)",
    ),
    "params": (
        "from fedssl.algorithms.fedavg import FedAvg\nclass Own(FedAvg):\n    class Params: pass\n",
        "needs a class Params that builds on fedssl.config.AlgorithmParams",
    ),
    "type": (
        "from dataclasses import dataclass, field\n"
        "from fedssl.algorithms.fedavg import FedAvg\n"
        "class Own(FedAvg):\n    @dataclass(frozen=True)\n    class Params(FedAvg.Params):\n"
        "        beta: list[int] = field(default_factory=list)\n",
        "Params.beta has a type that keys cannot have",
    ),
    "default": (
        "from dataclasses import dataclass, field\n"
        "from fedssl.algorithms.fedavg import FedAvg\n"
        "class Own(FedAvg):\n    @dataclass(frozen=True)\n    class Params(FedAvg.Params):\n"
        "        beta: float = field(kw_only=True)\n",
        "Params.beta needs a default",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_will_not_do_is_said_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, said = BAD[name]
    path = tmp_path / "mine.py"
    if source is not None:
        path.write_text(source)
    out = tmp_path / "run"
    assert main(["run", f"algorithm.name={path}:Own", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"algorithm.name={path}:Own: " in error
    assert re.search(said, error.strip()) and not out.exists()


def test_other_names_that_will_not_do(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("class Own: pass\ndef f(*a): pass\n")
    for words, said in (
        (["algorithm.name=mine.py"], r"a file without a name in it. Give mine.py:NAME"),
        (["algorithm.name=no.such.module:Own"], "ModuleNotFoundError"),
        ([f"partition.name={mine}:Own"], "a partition is a class with a method split"),
        ([f"objective.name={mine}:Own"], "not a subclass of fedssl.objectives.base.Objective"),
        ([f"evaluate.baselines={mine}:Own"], "evaluate.baselines=.*a file cannot be a baseline"),
    ):
        with pytest.raises(UserError, match=said):
            config.resolve(config.read_recipe(None), words)
    with pytest.raises(UserError, match="a protocol is a function"):
        parse_protocol(f"{mine}:Own")
    with pytest.raises(UserError, match="whole number above 0"):
        parse_protocol(f"{mine}:f@many")
    assert parse_protocol(f"{mine}:f@10%").amount == 0.1


def test_a_file_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    """As in a notebook's session; the same file is one module."""
    path = tmp_path / "mine.py"
    path.write_text("def f(*a): return 1\n")
    first = plugins.load("protocol", f"{path}:f", ("key", "value"), ())
    assert plugins.load("protocol", f"{path}:f", ("key", "value"), ()) is first
    path.write_text("def f(*a): return 2\n")
    os.utime(path, ns=(1, 1))
    assert plugins.load("protocol", f"{path}:f", ("key", "value"), ())() == 2


def test_a_protocol_that_fails_is_said_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    for body, said in (
        ("return 5", "returned int, not numbers by name"),
        ("return {'a': 'b'}", "a is 'b', not a number"),
        ("return {'a': float('nan')}", "a is nan, not a finite number"),
        ("return {'a': 10**400}", "not a number"),
        ("return 1 / 0", "line 2: ZeroDivisionError"),
    ):
        path.write_text(f"def f(*a):\n    {body}\n")
        os.utime(path, ns=(len(body), len(body)))
        function = plugins.load("protocol", f"{path}:f", ("key", "value"), ())
        with pytest.raises(UserError, match=said):
            plugins.call_protocol(function, f"{path}:f")


def test_two_protocols_of_one_name_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, path = tmp_path / "mine.py", tmp_path / "theirs.py"
    for file in (first, path):
        file.write_text("def near(*a): return {'top1': 1}\n")
    words = [f"evaluate.protocols=[{first}:near,{path}:near]", "--out", str(tmp_path / "run")]
    assert main(["run", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"fedssl: evaluate.protocols={path}:near: ") and f"{first}:near" in said


@pytest.mark.parametrize("spec", ["knn", "linear@10"])
def test_a_protocol_may_not_be_called_like_one_of_fedssls(
    spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In tables of several runs its numbers would stand in the column of ours."""
    path = tmp_path / "mine.py"
    path.write_text("def knn(*a): return {'top1': 1}\nlinear = knn\n")
    words = [f"evaluate.protocols={path}:{spec}", "--out", str(tmp_path / "run")]
    assert main(["run", *words]) == 2
    assert capsys.readouterr().err.startswith(
        f"fedssl: evaluate.protocols={path}:{spec}: fedssl has"
    )


GROUPS = {
    "[[0], [1]]": "split returned list",
    "Groups([0, 1], [0, 2])": "members and offsets are not arrays of integers",
    "Groups(np.array([0, 1]), np.linspace(0, 2, 2))": "members and offsets are not arrays",
    "Groups(np.array([0, 1]), np.array([1, 2]))": "offsets do not start at 0",
    "Groups(np.array([0, 1]), np.array([0, 9]))": "offsets do not start at 0",
    "Groups(np.array([0, 1]), np.array([0, 2, 2]))": "a client has no sample",
    "Groups(np.array([0, 99]), np.array([0, 1, 2]))": "members name samples beyond the 8",
    "Groups(np.array([0, 0]), np.array([0, 1, 2]))": "two clients have the same sample",
}


@pytest.mark.parametrize("result", GROUPS)
def test_the_groups_of_a_users_partition_are_checked(result: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import numpy as np\nfrom fedssl.data.dataset import Groups\n"
        f"{IID}    def split(self, split, classes, seed):\n        return {result}\n"
    )
    name = f"{path}:Own"
    settings = config.build({"partition": {"name": name}})
    split = Split((torch.zeros(8, 1, 2, 2, dtype=torch.uint8),), torch.zeros(8).long())
    with pytest.raises(UserError) as error:
        partition(settings.partition, split, 1, 0)
    assert (error.value.key, error.value.value) == ("partition.name", name)
    assert error.value.problem.startswith(GROUPS[result])


FEDAVG = "from fedssl.algorithms.fedavg import FedAvg\nclass Own(FedAvg):\n"
TASK = "from fedssl.federation.task import client_task\n" + FEDAVG
SIMCLR = "from fedssl.objectives.simclr import SimCLR\nclass Own(SimCLR):\n"
IID = "from fedssl.data.partition import Iid\nclass Own(Iid):\n"
FAILS = "    def {}(self, *a, **k):\n        return 1 / 0\n"
RAISING = {
    "algorithm.__init__": FEDAVG,
    "algorithm.validate": FEDAVG,
    "algorithm.round": FEDAVG,
    "objective.__init__": SIMCLR,
    "objective.loss": SIMCLR,
    "partition.split": IID,
}


@pytest.mark.parametrize("where", RAISING)
def test_what_ones_own_methods_raise_is_said_in_one_line(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section, method = where.split(".")
    path, out = tmp_path / "mine.py", tmp_path / "run"
    path.write_text(RAISING[where] + FAILS.format(method))
    key = f"{section}.name={path}:Own"
    words = ["algorithm.name=fedavg", "objective.name=simclr", "evaluate.protocols=knn", key]
    even = ["partition.name=iid", "partition.clients=8"]
    assert main(["run", *SMALL, *even, *words, "--out", str(out)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    trains = method in ("round", "loss")
    assert f"fedssl: {key}: line 4: ZeroDivisionError: division by zero" in error
    assert error.endswith("Correct it. Then continue with --resume.") == trains
    assert out.exists() == trains
    if section == "partition":
        assert main(["partition", key]) == 2
        assert f"{key}: line 4: ZeroDivisionError" in capsys.readouterr().err
    if trains:
        path.write_text(RAISING[where] + "    pass\n")
        assert main(["run", "--resume", "--out", str(out)]) == 0


MISFITS = {
    "algorithm.__init__": (FEDAVG, "self, params", "cannot be called with params, objective (too"),
    "algorithm.round": (FEDAVG, "self, server", "round cannot be called with server, cohort (too"),
    "algorithm.train": (TASK, "self, client", "train does not take the client and 1 arguments"),
    "objective.loss": (SIMCLR, "self", "loss cannot be called with batch ("),
    "objective.heads": (SIMCLR, "self, a, b, c, d", "(missing a required argument: 'd')"),
    "partition.split": (IID, "self, split", "split cannot be called with split, classes, seed ("),
    "partition.__init__": (IID, "self", "cannot be called with params (too many positional"),
    "evaluate.f": ("\n\n", "a, b", "cannot be called with train_features, train_labels, test_fea"),
}


def test_a_decorator_decides_what_is_taken() -> None:
    @functools.wraps(lambda a, b, rng: None)
    def wrapper(*given: object) -> None:
        pass

    assert plugins.find_call_error(wrapper, 1, 2) is None
    assert plugins.find_call_error(lambda a, b, rng: None, 1, 2) is not None


@pytest.mark.parametrize("where", MISFITS)
def test_what_takes_other_arguments_is_refused_before_the_first_round(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section, method = where.split(".")
    source, takes, says = MISFITS[where]
    path, out = tmp_path / "mine.py", tmp_path / "run"
    body = f"def {method}({takes}):\n    raise AssertionError\n"
    if source == TASK:
        body = f"@client_task(seen='mean', reveals='update')\n{body}"
    path.write_text(source + (body if section == "evaluate" else textwrap.indent(body, "    ")))
    key = "evaluate.protocols" if section == "evaluate" else f"{section}.name"
    own = f"{key}={path}:{'f' if section == 'evaluate' else 'Own'}"
    words = ["algorithm.name=fedavg", "objective.name=simclr", "evaluate.protocols=knn", own]
    assert main(["run", *SMALL, *words, "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"fedssl: {own}: ") and says in said and said.count("\n") == 1
    assert not out.exists() or (method == "train" and not any(metrics.read(out)))


def test_an_error_of_ours_keeps_its_traceback(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import numpy\nfrom fedssl.config import plugins\n"
        "def ours(*a): return plugins.short_name(3)\n"
        "def theirs(*a): return numpy.array_split([1], 0)\n"
    )
    names = ("ours", "theirs")
    ours, theirs = (plugins.load("protocol", f"{path}:{n}", ("key", n), ()) for n in names)
    with pytest.raises(AttributeError), plugins.translate_errors():
        ours()
    said = (
        r"^key=theirs: line 4: ValueError: number sections"  # raised in numpy, by a call of theirs
    )
    with pytest.raises(UserError, match=said), plugins.translate_errors():
        theirs()
    with pytest.raises(ZeroDivisionError), plugins.translate_errors():
        _ = 1 / 0
    path.write_text("from fedssl.algorithms.fedavg import FedAvg as Own\n")  # nothing of their own
    os.utime(path, ns=(1, 1))
    plugins.load("algorithm", f"{path}:Own", ("key", "own"), ())
    assert not any(map(plugins._is_ours, plugins._FILES))


def installed(folder: Path, package: str, group: str, *points: str) -> None:
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *points]))


def test_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package's name works; ours wins; two packages' is refused, naming both."""
    (tmp_path / "their_package.py").write_text(
        "from fedssl.algorithms.fedavg import FedAvg\n"
        "class Theirs(FedAvg): pass\n"
        "def f(*a): return {'top1': 1}\n"
    )
    group = "fedssl.algorithms"
    installed(
        tmp_path, "first", group, *(f"{n} = their_package:Theirs" for n in ("new", "fedavg", "two"))
    )
    installed(tmp_path, "second", group, "two = their_package:Theirs", "bad = their_package:Nope")
    installed(tmp_path, "third", "fedssl.protocols", "theirs = their_package:f")
    monkeypatch.syspath_prepend(tmp_path)

    def kind(name: str) -> str:
        words = [f"algorithm.name={name}"]
        settings = config.resolve(config.read_recipe(None), words)
        return str(config.variant("algorithm", settings.algorithm.name).__module__)

    assert kind("new") == "their_package" == kind("their_package:Theirs")
    assert kind("fedavg") == "fedssl.algorithms.fedavg"
    assert parse_protocol("theirs@50").amount == 50
    with pytest.raises(UserError, match=r"algorithm.name=two: first and second both have it"):
        kind("two")
    with pytest.raises(UserError, match=r"algorithm.name=bad: AttributeError"):
        kind("bad")
    with pytest.raises(UserError, match=r"unknown \(did you mean new\?\).*fedavg.*new"):
        kind("newt")


def test_a_deployment_takes_the_files_along(tmp_path: Path) -> None:
    """Sites load them from the app, where no path of this machine means anything."""
    app, mine = tmp_path / "app", tmp_path / "mine.py"
    mine.write_bytes((OWN / "algorithm.py").read_bytes())
    words = [f"algorithm.name={mine}:Momentum", f"objective.name={OWN}/objective.py:Uniform"]
    more = ["engine.sites=3", "cohort.size=null", "algorithm.momentum=0.7"]
    assert main(["deploy", "init", str(app), "default", *words, *more]) == 0
    mine.unlink()
    texts = [path.read_text() for path in app.rglob("*") if path.is_file()]
    assert not any(str(mine) in text or str(OWN) in text for text in texts)
    code = (
        "from fedssl_app import client_app\n"
        "from fedssl.deploy.site import read_config\n"
        "from pathlib import Path\n"
        "text = Path('fedssl_app/recipe.yaml').read_text()\n"
        "print(read_config(text).algorithm.name, read_config(text).algorithm.momentum)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=app, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["fedssl_app.own_1:Momentum", "0.7"]


MISTAKES = """
import torch
from fedssl.federation.algorithm import Algorithm
from fedssl.federation.task import client_task
from fedssl.data.dataset import Split
from fedssl.data.partition import partition
from fedssl.data.partition import Iid
from fedssl.objectives.simclr import SimCLR


class Base(Algorithm):
    def round(self, server, cohort):
        server.apply(cohort.mean(self.train, server.model))

    @client_task(seen="mean", reveals="update")
    def train(self, client, received):
        return client.train(received)


class Gathers(Base):
    def round(self, server, cohort):
        replies = cohort.gather(self.train, server.model).values()
        server.apply({"change": sum(r["change"] for r in replies) / len(replies)})


class Averages(Base):
    @client_task(seen="each", reveals="update")
    def train(self, client, received):
        return client.train(received)


class Logs(Base):
    def round(self, server, cohort):
        cohort.mean(self.train, server.model, server.model)


class Misspelt(Base):
    def round(self, server, cohort):
        server.apply(cohort.mean("train", server.model))


class Short(Base):
    @client_task(seen="mean", reveals="update")
    def train(self, client, received):
        reply = client.train(received)
        return {**reply, "change": reply["change"][:-1]}


class More(Base):
    @client_task(seen="mean", reveals="update")
    def train(self, client, received):
        return {**client.train(received), "extra": torch.zeros(())}


class Nothing(Base):
    @client_task(seen="mean", reveals="update")
    def train(self, client, received):
        client.train(received)


class Float(Base):
    @client_task(seen="mean", reveals="update")
    def train(self, client, received):
        return {**client.train(received), "loss": 1.0}


class Counts(Base):
    def round(self, server, cohort):
        super().round(server, cohort)
        server.state["count"] = server.state.get("count", 0) + 1


class Overrides(Base):
    def train(self, client, received):
        return client.train(received)


class Remembers(Base):
    @client_task(seen="mean", reveals="update")
    def train(self, client, received):
        client.state["seen"] = {"names": ["a"]}
        return super().train(client, received)


class Numbered(Base):
    @client_task(seen="mean", reveals="update")
    def train(self, client, received):
        client.state[client.round] = received.clone()
        return super().train(client, received)


class Slashed(Base):
    def round(self, server, cohort):
        super().round(server, cohort)
        server.state["a/b"] = torch.zeros(1)


class Vector(SimCLR):
    def loss(self, batch):
        return batch.encodings[0].sum(1)


class Number(SimCLR):
    def loss(self, batch):
        return 1.5


class Detached(SimCLR):
    def loss(self, batch):
        return super().loss(batch).detach()


class Three(SimCLR):
    views = 3


class Returns(SimCLR):
    def heads(self, *arguments):
        return None
"""
SAYS = {
    "algorithm": {
        "Gathers": "gather asks for train, which is declared with seen=mean. Use cohort.mean",
        "Averages": "mean asks for train, which is declared with seen=each. Use cohort.gather",
        "Logs": "train does not take the client and 2 arguments",
        "Misspelt": "train is not a task of clients. Declare it with @client_task.",
        "Short": "train returned: change: shape [",
        "More": "holds change, extra, loss, expected change, loss",
        "Nothing": "train returned: NoneType, expected tensors by name",
        "Float": "train returned: loss: float, expected a tensor",
        "Counts": "server.state['count'] is of type int, not a tensor; keep torch.tensor(…). Then",
        "Overrides": "Overrides.train overrides a task of clients without declaring it",
        "Remembers": "client.state['seen']['names'] is of type list, not a tensor; keep",
        "Numbered": "client.state[0] has no name that a file can hold; use a text without /. Then",
        "Slashed": "server.state['a/b'] has no name that a file can hold",
    },
    "objective": {
        "Vector": "the loss is a tensor of shape [",
        "Number": "the loss is float",
        "Detached": "the loss is nothing that has a gradient",
        "Three": "views = 3, and an image has 1 or 2",
    },
}


@pytest.mark.parametrize(
    ("section", "name", "says"),
    [(section, name, says) for section, each in SAYS.items() for name, says in each.items()],
)
def test_what_own_code_returns_is_checked_in_one_line(
    section: str, name: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.py"
    file.write_text(MISTAKES)
    words = [
        *SMALL,
        "algorithm.name=fedavg",
        "objective.name=simclr",
        f"{section}.name={file}:{name}",
    ]
    assert main(["run", *words, "--out", str(tmp_path / "run")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("fedssl: ") and says in lines[-1]
    assert not any("Traceback" in line for line in lines)


def test_what_was_done_before_a_state_that_no_file_holds_is_not_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told in its round, not when the next checkpoint is due, which may be the last."""
    file, out = tmp_path / "own.py", tmp_path / "run"
    late = "        if server.round == 1:\n            server.state['seen'] = {}\n"
    plain = FEDAVG + "    def round(self, server, cohort):\n        super().round(server, cohort)\n"
    file.write_text(plain + late.format("7"))
    words = [*SMALL, f"algorithm.name={file}:Own", "evaluate.protocols=knn", "checkpoint.seconds=0"]
    assert main(["run", *words, "--out", str(out)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(
        f"fedssl: algorithm.name={file}:Own: server.state['seen'] is of type int"
    )
    assert [line["round"] for line in metrics.read(out)] == [1]
    file.write_text(plain)
    assert main(["run", "--resume", "--out", str(out)]) == 0
    assert "starts again" not in capsys.readouterr().err
    assert [line["round"] for line in metrics.read(out)] == [1, 2, 3]


SHARES = """
import torch
from fedssl.algorithms.fedavg import FedAvg
from fedssl.federation.task import client_task

class Own(FedAvg):
    def round(self, server, cohort):
        before = server.state.get("before", {"all": server.weights})["all"]
        super().round(server, cohort)
        server.weights = torch.lerp(before, server.weights, 0.5)
        server.state["before"] = {"all": server.weights, "head": server.weights[:10]}

    @client_task(seen="mean", reveals="update")
    def train(self, client, received):
        client.state["first"] = client.state.get("first", received)
        client.state["again"] = client.state["first"]
        return super().train(client, received)

    def exact_on_union(self, work):
        return False
"""


def test_a_state_may_be_the_model_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files hold no memory that two tensors share; a resume ends with the same bits."""
    file = tmp_path / "own.py"
    file.write_text(SHARES)
    words = [*SMALL, f"algorithm.name={file}:Own", "evaluate.protocols=knn", "checkpoint.seconds=0"]
    assert main(["run", *words, "--out", str(tmp_path / "whole")]) == 0
    real = loop.run_one_round

    def once(experiment: Any, *rest: Any) -> dict[str, Any]:
        if experiment.server.round == 1:
            raise KeyboardInterrupt
        return real(experiment, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "run_one_round", once)
        assert main(["run", *words, "--out", str(tmp_path / "cut")]) == 130
    assert main(["run", "--resume", "--out", str(tmp_path / "cut")]) == 0
    whole, cut = ((tmp_path / name / "encoder.safetensors") for name in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()


def test_noise_is_not_bypassed_by_gathering(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.py"
    file.write_text(MISTAKES)
    words = [*SMALL, "privacy.noise=4", f"algorithm.name={file}:Gathers", "objective.name=simclr"]
    assert main(["run", *words, "--out", str(tmp_path / "run")]) == 2
    assert "cohort.gather asks for train" in capsys.readouterr().err
    file.write_text(MISTAKES.replace('seen="mean"', 'seen="each"'))
    assert main(["run", *words, "--out", str(tmp_path / "other")]) == 2
    assert "sees each client's reply to train" in capsys.readouterr().err


def test_an_error_of_ours_names_the_own_code_in_use(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(MISTAKES)
    words = [*SMALL, "algorithm.name=fedavg", f"objective.name={file}:Returns"]
    with pytest.raises(Exception) as caught:
        main(["run", *words, "--out", str(tmp_path / "run")])
    assert any("own.py:Returns" in note for note in caught.value.__notes__)
