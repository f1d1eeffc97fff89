"""A user's own algorithm, objective, partition and protocol, from files and from packages."""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from helpers import refused
from rounds import run_and_resume

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


def settings(*words: str) -> config.Config:
    common = [*SMALL, "evaluate.protocols=knn", "checkpoint.seconds=0"]
    return config.resolve(config.read_recipe(None), [*common, *words])


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in metrics.read(out)]


def test_the_examples_momentum_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At momentum 0 it is FedAvg, otherwise not; and a resumed run still has its velocity."""
    common, own = ("objective.name=simclr", "partition.samples=16"), f"{OWN}/algorithm.py:Momentum"
    for name, *words in (("fedavg", "engine.merge=off"), (own, "algorithm.momentum=0")):
        out = tmp_path / name.rpartition(":")[2]
        loop.run(settings(f"algorithm.name={name}", *common, *words), out)
    assert losses(tmp_path / "Momentum") == losses(tmp_path / "fedavg")
    run_and_resume(settings(f"algorithm.name={own}", *common), tmp_path, monkeypatch)
    assert losses(tmp_path / "whole")[-1] != losses(tmp_path / "fedavg")[-1]
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut")


def test_the_commands_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (OWN / "README.md").read_text().replace("\\\n", " ")
    commands = [
        shlex.split(line)[1:] for line in text.splitlines() if line.startswith("fedssl run")
    ]
    assert len(commands) == 5
    monkeypatch.chdir(OWN.parents[1])
    for number, words in enumerate(commands):
        quick = ["rounds=1", "evaluate.baselines=[]", "data.size=8", "engine.threads=1"]
        assert main([*words, *quick, "--out", str(tmp_path / str(number))]) == 0


FEDAVG = "from fedssl.algorithms.fedavg import FedAvg\nclass Own(FedAvg):\n"
SIMCLR = "from fedssl.objectives.simclr import SimCLR\nclass Own(SimCLR):\n"
IID = "from fedssl.data.partition import Iid\nclass Own(Iid):\n"
LIST = f"""from dataclasses import dataclass, field
{FEDAVG}    @dataclass(frozen=True)
    class Params(FedAvg.Params):
        beta: list[int] = field(default_factory=list)
"""


def fails(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends with one line of this beginning, and code 2."""
    assert main(["run", *SMALL, *words]) == 2
    *above, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fedssl: {said}"), line
    shows_traceback(above, raises=": line " in line or "SyntaxError" in line)


def shows_traceback(above: list[str], raises: bool) -> None:
    """Where code of the user's raised, its traceback comes before the line, without our files."""
    assert bool(above) == raises, above
    assert not any(str(Path(config.__file__).parents[1]) in line for line in above)
    if raises:
        assert any("mine.py" in line for line in above), above


def test_keys_of_ones_own_are_checked_as_ours_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, path = f"algorithm.name={OWN}/algorithm.py:Momentum", tmp_path / "mine.py"
    fails([own, "algorithm.momentum=high"], "algorithm.momentum=high: not a number", capsys)
    typo = "algorithm.momentun: unknown key (did you mean algorithm.momentum?)"
    fails([own, "algorithm.momentun=0.5"], typo, capsys)
    fails([own, "algorithm.momentum=2"], "algorithm.momentum=2.0: out of range", capsys)
    path.write_text(LIST)
    words = [f"algorithm.name={path}:Own", "algorithm.beta=1"]
    fails(words, "algorithm.beta=1: a key cannot have the type list[int]", capsys)


REFUSED = [
    ("algorithm", None, "FileNotFoundError: [Errno 2] No such file or directory: '"),
    ("algorithm", "x = 1", "AttributeError: module 'mine_"),
    ("algorithm", "class Own: pass", "not a subclass of fedssl.federation.algorithm.Algorithm"),
    ("objective", "Own = 3", "not a subclass of fedssl.objectives.base.Objective"),
    ("algorithm", "\n\nraise ValueError('two\\nlines')", "line 3: ValueError: two lines. Correct"),
    ("algorithm", "import sys\nsys.exit()", "line 2: SystemExit. Correct it."),
    ("objective", "import sys\nsys.exit(0)", "line 2: SystemExit: 0. Correct it."),
    ("algorithm", "import no_such_module", "line 1: ModuleNotFoundError: No module named"),
    ("algorithm", "a = 1\ndef (:", "SyntaxError: invalid syntax (mine.py, line 2)"),
    (
        "algorithm",
        "from fedssl.federation.algorithm import Algorithm\nclass Own(Algorithm): pass",
        "lacks round",
    ),
    ("algorithm", f"{FEDAVG}    class Params: pass", "needs a dataclass Params"),
    ("algorithm", LIST.replace("    @dataclass(frozen=True)\n", ""), "needs a dataclass Params"),
    (
        "algorithm",
        LIST.replace("default_factory=list", "kw_only=True"),
        "TypeError: Own.Params.",
    ),
    ("algorithm", LIST.replace("list[int]", "Fraction"), "NameError: name 'Fraction'"),
    ("algorithm", f"{FEDAVG}    def __init__(self, params): pass", "cannot be called with params"),
    ("algorithm", f"{FEDAVG}    def round(self, server): pass", "round cannot be called with ser"),
    ("algorithm", f"{FEDAVG}    def train(self, *_): pass", "Own.train overrides a task of client"),
    ("objective", f"{SIMCLR}    def loss(self): pass", "loss cannot be called with batch ("),
    ("objective", f"{SIMCLR}    def heads(self, a, b, c, d): pass", "heads cannot be called with"),
    ("objective", f"{SIMCLR}    views = 3", "views = 3, and an image has 1 or 2"),
    ("partition", f"{IID}    split = None", "lacks split"),
    ("partition", f"{IID}    def split(self, split): pass", "split cannot be called with split"),
    ("partition", f"{IID}    def __init__(self): pass", "cannot be called with params (too many"),
    ("protocol", "class Own: pass", "cannot be called with train_features, train_labels, test_fe"),
    ("protocol", "def Own(a, b): pass", "cannot be called with train_features, train_labels, tes"),
]


@pytest.mark.parametrize(("section", "source", "said"), REFUSED)
def test_a_file_that_will_not_do_is_one_line_before_the_first_round(
    section: str,
    source: str | None,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, out = tmp_path / "mine.py", tmp_path / "run"
    if source is not None:
        path.write_text(source + "\n")
    key = "evaluate.protocols" if section == "protocol" else f"{section}.name"
    words = ["algorithm.name=fedavg", "objective.name=simclr", f"{key}={path}:Own"]
    fails([*words, "--out", str(out)], f"{key}={path}:Own: {said}", capsys)
    assert not out.exists()


def test_other_names_that_will_not_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, theirs = tmp_path / "mine.py", tmp_path / "theirs.py"
    for file in (mine, theirs):
        file.write_text("def f(*a): return {'top1': 1}\nknn = linear = f\n")
    protocols = "evaluate.protocols="
    fails(["algorithm.name=mine.py"], "algorithm.name=mine.py: unknown. Choose one of dcco", capsys)
    word = "algorithm.name=no.such.module:Own"
    fails([word], f"{word}: ModuleNotFoundError: No module named 'no'", capsys)
    word = f"evaluate.baselines={mine}:Own"
    fails([word], f"{word}: a file cannot be a baseline", capsys)
    for spec, said in (
        ("f@many", "the number of labels must be a whole number"),
        ("knn", "fedssl has"),  # in tables of several runs its numbers would stand in our column
        ("linear@10", "fedssl has"),
    ):
        fails([f"{protocols}{mine}:{spec}"], f"{protocols}{mine}:{spec}: {said}", capsys)
    fails([f"{protocols}[{mine}:f,{theirs}:f]"], f"{protocols}{theirs}:f: ", capsys)
    assert parse_protocol(f"{mine}:f@10%").amount == 0.1


def test_a_file_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    """In a notebook's session the same file is one module."""
    path = tmp_path / "mine.py"
    path.write_text("def f(*a): return 1\n")
    first = plugins.load("protocol", f"{path}:f", ("key", "value"), ())
    assert plugins.load("protocol", f"{path}:f", ("key", "value"), ()) is first
    path.write_text("def f(*a): return 2\n")
    os.utime(path, ns=(1, 1))
    assert plugins.load("protocol", f"{path}:f", ("key", "value"), ())() == 2


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 5", "returned int, not numbers by name"),
        ("return {'a': 'b'}", "ValueError: could not convert string to float: 'b'"),
        ("return {'a': float('nan')}", "f_a is nan, not a finite number"),
        ("return 1 / 0", "line 2: ZeroDivisionError"),
    ],
)
def test_a_protocol_that_fails_is_said_in_one_line(body: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"def f(*a):\n    {body}\n")
    function = plugins.load("protocol", f"{path}:f", ("key", "value"), ())
    with refused("evaluate.protocols", f"{path}:f", said):
        plugins.call_protocol(function, f"{path}:f")


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
    params = config.build({"partition": {"name": name}}).partition
    split = Split((torch.zeros(8, 1, 2, 2, dtype=torch.uint8),), torch.zeros(8).long())
    with refused("partition.name", name, GROUPS[result]):
        partition(params, split, 1, 0)


@pytest.mark.parametrize(
    ("section", "source", "method"),
    [
        ("algorithm", FEDAVG, "validate"),
        ("algorithm", FEDAVG, "round"),
        ("objective", SIMCLR, "loss"),
        ("partition", IID, "split"),
    ],
)
def test_what_ones_own_methods_raise_has_its_traceback_and_our_line(
    section: str, source: str, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "mine.py", tmp_path / "run"
    path.write_text(f"{source}    def {method}(self, *a, **k):\n        return 1 / 0\n")
    key, said = f"{section}.name={path}:Own", "line 4: ZeroDivisionError: division by zero."
    words = ["algorithm.name=fedavg", "objective.name=simclr", "evaluate.protocols=knn", key]
    even = ["partition.name=iid", "partition.clients=8"]
    assert main(["run", *SMALL, *even, *words, "--out", str(out)]) == 2
    printed = capsys.readouterr().err
    trains = method in ("round", "loss")
    more = " Then continue with --resume." if trains else ""
    assert printed.splitlines()[-1] == f"fedssl: {key}: {said} Correct it.{more}"
    assert f'File "{path}", line 4, in {method}\n    return 1 / 0' in printed
    assert out.exists() == trains
    if section == "partition":
        assert main(["partition", key]) == 2
        assert f"{key}: {said}" in capsys.readouterr().err
    if trains:
        path.write_text(f"{source}    pass\n")
        assert main(["run", "--resume", "--out", str(out)]) == 0


def test_a_decorator_decides_what_is_taken() -> None:
    @functools.wraps(lambda a, b, rng: None)
    def wrapper(*given: object) -> None:
        pass

    assert plugins.find_call_error(wrapper, 1, 2) is None
    assert plugins.find_call_error(lambda a, b, rng: None, 1, 2) is not None


def test_an_error_of_ours_keeps_its_traceback(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import numpy\nfrom fedssl.config import plugins\n"
        "def ours(*a): return plugins.short_name(3)\n"
        "def theirs(*a): return numpy.array_split([1], 0)\n"
    )
    names = ("ours", "theirs")
    ours, theirs = (plugins.load("protocol", f"{path}:{n}", ("key", n), ()) for n in names)
    with pytest.raises(AttributeError) as caught, plugins.translate_errors():
        ours()
    assert "key=theirs" in caught.value.__notes__[0]  # what it returns may be the cause
    # Raised in numpy, by a call of theirs.
    with refused("key", "theirs", "line 4: ValueError: number sec"), plugins.translate_errors():
        theirs()
    with pytest.raises(ZeroDivisionError), plugins.translate_errors():
        _ = 1 / 0


def installed(folder: Path, package: str, group: str, *points: str) -> None:
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *points]))


def test_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package's name works; ours wins; what two packages offer is refused."""
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
        chosen = settings(f"algorithm.name={name}").algorithm.name
        return str(config.variant("algorithm", chosen).__module__)

    assert kind("new") == "their_package" == kind("their_package:Theirs")
    assert kind("fedavg") == "fedssl.algorithms.fedavg"
    assert parse_protocol("theirs@50").amount == 50
    with pytest.raises(UserError, match=r"algorithm.name=two: several packages have it"):
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
    words += [f"encoder.name={OWN}/encoder.py:Small"]
    words += [f"augment.name={OWN}/augmentation.py:dim_and_hide"]
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
        "config = read_config(text)\n"
        "print(config.algorithm.name, config.algorithm.momentum)\n"
        "from fedssl.models.encoders import encoder\n"
        "print(config.encoder.name, encoder(config.encoder, 1, 16).features, config.augment.name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=app, capture_output=True, text=True, check=True
    )
    momentum, encoder = done.stdout.splitlines()
    assert momentum.split() == ["fedssl_app.own_1:Momentum", "0.7"]
    assert encoder.split() == ["fedssl_app.own_3:Small", "64", "fedssl_app.own_4:dim_and_hide"]


ALGORITHM = """
import torch
from fedssl.federation.algorithm import Algorithm
from fedssl.federation.task import client_task

class Own(Algorithm):
    def round(self, server, cohort):
        {round}

    @client_task(seen="{seen}", reveals="update")
    def train(self, client, received):
        {train}
"""
ROUND, TRAIN = "server.apply(cohort.mean(self.train, server.model))", "client.train(received)"


def algorithm(round: str = ROUND, train: str = f"return {TRAIN}", seen: str = "mean") -> str:
    return ALGORITHM.format(round=round, train=train, seen=seen)


GATHERS = "cohort.gather(self.train, server.model)"
MISTAKES = {
    "gather asks for train, which is declared with seen=mean. Use": algorithm(GATHERS),
    "mean asks for train, which is declared with seen=each. Use": algorithm(seen="each"),
    "train does not take the client and 2 arguments": algorithm(
        "cohort.mean(self.train, server.model, server.model)"
    ),
    "train is not a task of clients. Declare it": algorithm("cohort.mean('train', server.model)"),
    "train returned: change: shape [": algorithm(
        train=f"return {{k: v[..., :-1] if v.ndim else v for k, v in {TRAIN}.items()}}"
    ),
    "holds change, extra, loss, expected change, loss": algorithm(
        train=f"return {{**{TRAIN}, 'extra': torch.zeros(())}}"
    ),
    "train returned: NoneType, expected tensors by name": algorithm(train=TRAIN),
    "train returned: loss: float": algorithm(train=f"return {{**{TRAIN}, 'loss': 1.0}}"),
    "server.state['count'] is of type int, not a tensor; keep torch.tensor(…). Then": algorithm(
        f"{ROUND}; server.state['count'] = 1"
    ),
    "client.state['seen']['names'] is of type list, not a tensor": algorithm(
        train=f"client.state['seen'] = {{'names': ['a']}}; return {TRAIN}"
    ),
    "client.state[0] has no name that a file can hold; use a text without /. Then": algorithm(
        train=f"client.state[client.round] = received.clone(); return {TRAIN}"
    ),
    "server.state['a/b'] has no name": algorithm(f"{ROUND}; server.state['a/b'] = server.model"),
    "the loss is a tensor of shape [": SIMCLR
    + "    def loss(self, batch): return batch.encodings[0].sum(1)",
    "the loss is float": SIMCLR + "    def loss(self, batch): return 1.5",
    "the loss is nothing that has a gradient": SIMCLR
    + "    def loss(self, batch): return super().loss(batch).detach()",
}


@pytest.mark.parametrize("says", MISTAKES)
def test_what_own_code_returns_is_checked_in_one_line(
    says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, source = tmp_path / "own.py", MISTAKES[says]
    file.write_text(source)
    section = "objective" if source.startswith(SIMCLR) else "algorithm"
    words = ["algorithm.name=fedavg", "objective.name=simclr", f"{section}.name={file}:Own"]
    assert main(["run", *SMALL, *words, "--out", str(tmp_path / "run")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("fedssl: ") and says in lines[-1]
    assert not any("Traceback" in line for line in lines)


def test_what_was_done_before_a_state_that_no_file_holds_is_not_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told in its round, not when the next checkpoint is due, which may be the last."""
    file, out = tmp_path / "own.py", tmp_path / "run"
    file.write_text(algorithm(f"{ROUND}; server.state |= {{'seen': 1}} if server.round else {{}}"))
    words = [*SMALL, f"algorithm.name={file}:Own", "evaluate.protocols=knn", "checkpoint.seconds=0"]
    assert main(["run", *words, "--out", str(out)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(
        f"fedssl: algorithm.name={file}:Own: server.state['seen'] is of type int"
    )
    assert [line["round"] for line in metrics.read(out)] == [1]
    file.write_text(algorithm())
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
    run_and_resume(settings(f"algorithm.name={file}:Own"), tmp_path, monkeypatch)
    whole, cut = ((tmp_path / name / "encoder.safetensors") for name in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()


def test_noise_is_not_bypassed_by_gathering(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.py"
    words = [*SMALL, "privacy.noise=4", f"algorithm.name={file}:Own", "objective.name=simclr"]
    for seen, said in (
        ("mean", "cohort.gather asks for train"),
        ("each", "sees each client's reply to train"),
    ):
        file.write_text(algorithm(GATHERS, seen=seen))
        os.utime(file, ns=(len(said), len(said)))
        assert main(["run", *words, "--out", str(tmp_path / seen)]) == 2
        assert said in capsys.readouterr().err
