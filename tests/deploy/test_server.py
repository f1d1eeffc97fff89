"""A run on real sites, with Flower's apps and messages in this process.

Real processes on loopback are in examples/deployment: they take minutes.
"""

from __future__ import annotations

import html
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import relative
from PIL import Image
from safetensors.torch import load_file

pytest.importorskip("flwr")
from far import BYOL, Here
from flwr.app import Context, Message, RecordDict

from fedssl import __version__, report
from fedssl import config as configuration
from fedssl.api import Run
from fedssl.cli import main
from fedssl.config import Config
from fedssl.data import image_files
from fedssl.deploy import site as site_module
from fedssl.deploy.recipe import adapt_recipe
from fedssl.deploy.server import serve, server_app
from fedssl.deploy.site import build_site_experiment, client_app, load_experiment, read_config
from fedssl.deploy.transport import SiteTransport
from fedssl.deploy.write import write_app
from fedssl.engines.flower.messages import read_replies, write_request
from fedssl.engines.remote.messages import Request
from fedssl.engines.store import History
from fedssl.runs import checkpoint, loggers, loop
from fedssl.runs.folder import PACKAGE
from fedssl.runs.reevaluate import evaluate
from fedssl.util import files
from fedssl.util.errors import UserError

WORDS = (
    *("engine.sites=3", "cohort.size=null", "encoder.groups=4", "objective.projector=[32,16]"),
    *("rounds=3", "precision=fp64", "engine.threads=1", "engine.timeout=5", "checkpoint.seconds=0"),
    *("server.optimizer=sgd", "server.lr=1", "client.lr=0.05"),
)


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three folders of images, and the same as one data set with a folder a client."""
    monkeypatch.setenv("FEDSSL_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("FEDSSL_CACHE", str(tmp_path / "cache"))
    load_experiment.cache_clear()
    generator = np.random.default_rng(0)
    for name, count in (("ward", 7), ("clinic", 5), ("lab", 6)):
        folder = tmp_path / "data" / "train" / name
        folder.mkdir(parents=True)
        for k in range(count):
            pixels = generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{k}.png")
    return tmp_path / "data" / "train"


def settled(*words: str) -> Config:
    return adapt_recipe("default", [*WORDS, *words])


def grid_of(config: Config, sites: Path, *names: str) -> Here:
    folders = [{"data": str(sites / name)} for name in names or ("ward", "clinic", "lab")]
    recipe = sites / "recipe.yaml"
    recipe.write_text(configuration.dump(config))
    app = client_app(recipe)
    recipe.unlink()
    return Here(app, folders)


def weights(out: Path) -> torch.Tensor:
    return load_file(out / "checkpoint" / "state.safetensors")["weights"]


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def local(config: Config, sites: Path, out: Path) -> torch.Tensor:
    """The same on the local engine: one folder a client."""
    tree = configuration.to_tree(config)
    tree["engine"] |= {"name": "local", "merge": "off", "sites": None}
    tree["data"] |= {"root": str(sites.parent), "levels": ["client"]}
    tree["evaluate"]["protocols"] = ["unlabeled"]
    loop.run(configuration.build(tree), out)
    return weights(out)


@pytest.mark.page
@pytest.mark.parametrize(
    "words", [(), (*BYOL, "algorithm.name=fedema"), ("algorithm.name=fedavg", "seed=3")]
)
def test_sites_give_the_weights_of_the_local_engine(
    words: tuple[str, ...], sites: Path, tmp_path: Path
) -> None:
    config = settled(*words)
    summary = serve(grid_of(config, sites), config, tmp_path / "far", False)
    assert relative(weights(tmp_path / "far"), local(config, sites, tmp_path / "near")) < 1e-10
    assert summary["rounds"] == 3 and "knn_top1" not in summary  # the server has no images
    clients = json.loads((tmp_path / "far" / "clients.json").read_text())
    assert [(c["name"], c["samples"]) for c in clients] == [("clinic", 5), ("lab", 6), ("ward", 7)]
    assert (tmp_path / "far" / "encoder.safetensors").exists()
    page = (tmp_path / "far" / "report.html").read_text()
    assert "what a client sends" in page and "This run was a simulation" not in page


def test_a_server_that_was_killed_goes_on_and_sites_keep_their_states(
    sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settled(*BYOL, "algorithm.name=fedema", "rounds=5")
    grid, real, rounds = grid_of(config, sites), loop.run_one_round, []

    def dies(session: Any, *rest: Any) -> Any:
        if session.server.round == 3 and not rounds:
            rounds.append(3)
            # Half of a round happens, then the process is gone.
            cohort = session.engine.cohort(np.arange(3), 3)
            cohort.mean(session.algorithm.train, session.server.model)  # type: ignore[attr-defined]
            raise SystemExit
        return real(session, *rest)

    monkeypatch.setattr(loop, "run_one_round", dies)
    with pytest.raises(SystemExit):
        serve(grid, config, tmp_path / "far", False)
    # The nodes come back under other numbers, in another order.
    again = Here(grid.app, [grid.contexts[k].node_config for k in (13, 11, 12)])
    again.contexts = {node + 100: context for node, context in again.contexts.items()}
    serve(again, config, tmp_path / "far", True)
    assert [row["round"] for row in metrics(tmp_path / "far")] == [1, 2, 3, 4, 5]
    assert relative(weights(tmp_path / "far"), local(config, sites, tmp_path / "near")) < 1e-10


def test_a_site_that_is_gone_is_missed_and_known_again(sites: Path, tmp_path: Path) -> None:
    config = settled(*BYOL, "algorithm.name=fedema", "rounds=4")
    grid = grid_of(config, sites)
    gone = grid.contexts[12]  # clinic, the first in the order of names

    def nodes() -> list[int]:
        done = len(metrics(tmp_path / "far")) if (tmp_path / "far/metrics.jsonl").exists() else 0
        return [11, 13] if done == 2 else [11, 13, 112] if done > 2 else [11, 12, 13]

    grid.contexts[112] = gone
    grid.get_node_ids = nodes  # type: ignore[method-assign]
    serve(grid, config, tmp_path / "far", False)
    rows = metrics(tmp_path / "far")
    assert [row["missing"] for row in rows] == [0, 0, 1, 0]
    assert rows[2]["faults"] == {"0": "train: not connected"}
    for way in ("up", "down"):  # what each site moved that was there
        assert rows[2][f"bytes_{way}"] == rows[1][f"bytes_{way}"] / 3 * 2
        assert rows[2][f"bytes_{way}_per_client"] == rows[1][f"bytes_{way}_per_client"]
    sent = sum(row["bytes"] for row in recorded(sites / "lab") if row.get("round") == 3)
    assert sent == rows[2]["bytes_up_per_client"]
    assert "0" in rows[3]["mu"] and rows[3]["mu"]["0"] == 0  # it sat out: from the global model


@pytest.mark.parametrize("words", [(), ("privacy.secure=true",), ("algorithm.batch=2",)])
def test_a_site_whose_images_change_is_told_what_to_do(
    words: tuple[str, ...], sites: Path, tmp_path: Path
) -> None:
    """Also where its weight does not show it, or does not change."""
    config = settled("algorithm.name=fedavg", "rounds=2", "cohort.minimum=2", *words)
    grid = grid_of(config, sites)

    def adds(asked: Any, reply: Any) -> Any:
        if not (sites / "lab" / "new.png").exists() and asked.metadata.dst_node_id == 13:
            shutil.copy(sites / "lab" / "0.png", sites / "lab" / "new.png")
            load_experiment.cache_clear()  # a new process, as for every message
        return reply

    grid.tamper = adds
    serve(grid, config, tmp_path / "far", False)
    assert metrics(tmp_path / "far")[1]["faults"]["1"] == (
        f"train{', keys' * ('privacy.secure=true' in words)}: refused: 7 images, where the run "
        "started with 6. Restore the images, or start a new run."
    )


@pytest.mark.parametrize("words", [(), (*BYOL, "algorithm.name=ditto")])  # personal: at the sites
def test_labelled_images_at_the_server_judge_the_encoder(
    words: tuple[str, ...], sites: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = labelled(tmp_path / "labelled")
    judged = ("evaluate.protocols=[knn,unlabeled]", "evaluate.k=2")
    config = settled(*words, f"data.root={root}", *judged)
    out = tmp_path / "app" / "run"
    (tmp_path / "app" / PACKAGE).mkdir(parents=True)
    summary = serve(grid_of(config, sites), config, out, False)
    assert 0 < summary["knn_top1"] <= 100 and "untrained" in summary
    # Afterwards the server's commands know what it was.
    found = Run(out).evaluate().to_dict("index")
    assert found == {"untrained": summary["untrained"], "result": summary["result"]}
    assert found["result"] != found["untrained"]
    page = html.unescape(report.write_page([out]).read_text())
    command = f"flwr run {tmp_path}/app fedssl --stream"
    assert f"{command} --run-config 'out=\"{out}-again\"'" in page
    assert "on the sites' own images" in page and "per-client" not in page
    assert "images of labelled" not in page and "has none" not in page
    assert evaluate(out, ["data.name=digits", "data.size=16"]) != found  # not the server's folder
    assert main(["run", "--resume", "--out", str(out)]) == 2
    assert f"{command} --run-config resume=true" in capsys.readouterr().err


def test_a_run_that_nothing_judged_needs_images(sites: Path, tmp_path: Path) -> None:
    config = settled("rounds=1")
    serve(grid_of(config, sites), config, tmp_path / "far", False)
    with pytest.raises(UserError) as caught:
        evaluate(tmp_path / "far", [])
    assert (caught.value.key, caught.value.value) == ("data.name", "folder")


def test_too_few_sites_end_with_one_line(sites: Path, tmp_path: Path) -> None:
    config = settled("engine.timeout=0.1")
    with pytest.raises(UserError, match="only 2 of 3 sites"):
        serve(grid_of(config, sites, "ward", "lab"), config, tmp_path / "far", False)
    mail = SiteTransport(grid_of(config, sites, "ward", "lab"))
    mail.refused = dict.fromkeys(mail.grid.get_node_ids(), (-1e9, "no answer"))  # at first
    with pytest.raises(UserError, match=r"only 2 of 3 .* Start the others"):
        mail.wait(3, 0.1)
    with pytest.raises(UserError, match="holds no run"):
        serve(grid_of(config, sites), config, tmp_path / "far", True)


@pytest.mark.parametrize(
    ("data", "text"),
    [("", "node-config data"), ("nowhere", "no such folder"), ("empty", "no images")],
)
def test_a_site_with_a_wrong_folder_says_so(
    data: str, text: str, sites: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    config = settled("engine.timeout=0.1")
    grid = grid_of(config, sites)
    grid.contexts[12].node_config["data"] = data and str(tmp_path / data)
    with pytest.raises(UserError, match="only 2 of 3 sites"):
        serve(grid, config, tmp_path / "far", False)
    assert text in capsys.readouterr().err


def test_sites_with_other_images_are_named(sites: Path, tmp_path: Path) -> None:
    for path in (sites / "lab").iterdir():
        Image.open(path).resize((20, 20)).save(path)
    config = settled("data.size=null")
    with pytest.raises(UserError, match=r"site lab: the images' height is 20"):
        serve(grid_of(config, sites), config, tmp_path / "far", False)


def test_two_sites_of_one_name_are_two_clients(sites: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (sites / "lab").rename(tmp_path / "other" / "ward")
    config = settled()
    grid = grid_of(config, sites, "ward", "clinic")
    grid = Here(
        grid.app,
        [
            *(c.node_config for c in grid.contexts.values()),
            {"data": str(tmp_path / "other" / "ward")},
        ],
    )
    serve(grid, config, tmp_path / "far", False)
    clients = json.loads((tmp_path / "far" / "clients.json").read_text())
    assert [c["name"] for c in clients] == ["clinic", "ward", "ward (2)"]
    assert sorted(c["samples"] for c in clients) == [5, 6, 7]


def labelled(folder: Path) -> Path:
    """Images that the server judges with."""
    for part, count in (("train", 4), ("test", 2)):
        for label in ("a", "b"):
            (folder / part / label).mkdir(parents=True)
            for k in range(count):
                shade = 40 if label == "a" else 200
                image = Image.new("RGB", (16, 16), (shade + k,) * 3)
                image.save(folder / part / label / f"{k}.png")
    return folder


def test_a_run_of_an_own_algorithm_is_judged_and_compared_when_the_app_is_gone(
    sites: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    app, out, judge = tmp_path / "app", tmp_path / "far", labelled(tmp_path / "labelled")
    mine = tmp_path / "mine.py"
    own = Path(__file__).parents[2] / "examples/own"
    mine.write_bytes((own / "algorithm.py").read_bytes() + (own / "protocol.py").read_bytes())
    names = (f"algorithm.name={mine}:Momentum", f"evaluate.protocols={mine}:nearest_mean@4")
    write_app(app, "default", [*WORDS, "rounds=1", *names, f"data.root={judge}"])
    with monkeypatch.context() as flowers:
        flowers.syspath_prepend(app)
        config = read_config((app / "fedssl_app" / "recipe.yaml").read_text())
        summary = serve(grid_of(config, sites), config, out, False)
        serve(grid_of(config, sites), config, out, True)
        # The folder was moved: the paths in its config.yaml are those of another place.
        kept = (out / "config.yaml").read_text()
        assert kept.count(f"{out}/own_1.py:") == 2
        (out / "config.yaml").write_text(kept.replace(f"{out}/own_1.py:", "/gone/own_1.py:"))
        (out / "own_1.py").unlink()
        serve(grid_of(config, sites), config, out, True)
        assert (out / "config.yaml").read_text() == kept
    for name in [name for name in sys.modules if name.startswith("fedssl_app")]:
        del sys.modules[name]
    shutil.rmtree(app)
    mine.unlink()
    assert Run(out).settings.algorithm.name == f"{out}/own_1.py:Momentum"
    assert summary["nearest_mean@4_top1"] >= 0
    assert main(["evaluate", str(out), f"data.root={judge}"]) == 0
    assert main(["compare", str(out), str(out)]) == 0
    assert "another version" not in "".join(capsys.readouterr())
    report.write_page([out])
    assert "not known" not in (out / "report.html").read_text()


def test_what_the_server_lacks_is_said_before_the_sites_are_asked(
    sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "installed", lambda name: False)
    lacks = ("log=wandb", "log=wandb: not installed"), ("data.root=/no", "no such")
    for word, said in (*lacks, ("encoder.init=/none", "encoder.init=/none: no such file")):
        config = settled(word, "engine.timeout=0.1")
        with pytest.raises(UserError, match=said):
            serve(grid_of(config, sites, "ward"), config, tmp_path / "far", False)
        assert not (tmp_path / "far" / "config.yaml").exists()


def without(scan: Any, name: str) -> Any:
    """A folder that nobody may list, not even root."""

    def refused(folder: Path, *rest: Any) -> None:
        if folder.name == name:
            raise PermissionError(13, "Permission denied", str(folder))
        scan(folder, *rest)

    return refused


def test_a_part_of_a_sites_folder_is_not_left_out_silently(
    sites: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = sites / "ward"
    (folder / "train").mkdir()
    (folder / "0.png").rename(folder / "train" / "0.png")
    for name, kept in (("test", "1"), ("val", "2")):  # documented not to be used
        (folder / name).mkdir()
        (folder / f"{kept}.png").rename(folder / name / "0.png")
    (folder / "2021").mkdir()
    for k in (3, 4, 5):
        (folder / f"{k}.png").rename(folder / "2021" / f"{k}.png")
    hello = asked(grid_of(settled(), sites), 11, RecordDict(), "query.hello")["hello"]
    assert hello["fault"] == (
        "refused: node-config data: 4 images are not below train/, and only those in there would "
        "be used; move them there, or rename train; the site's log says more"
    )
    (folder / "6.png").unlink()
    shutil.rmtree(folder / "2021")
    (folder / ".trash").mkdir()
    shutil.copy(folder / "train" / "0.png", folder / ".trash")  # as everywhere
    (folder / "lost+found").mkdir()
    monkeypatch.setattr(image_files, "_scan", without(image_files._scan, "lost+found"))
    load_experiment.cache_clear()
    hello = asked(grid_of(settled(), sites), 11, RecordDict(), "query.hello")["hello"]
    assert json.loads(hello["facts"])["samples"] == 1


def test_secure_sums_between_sites(sites: Path, tmp_path: Path) -> None:
    config = settled("privacy.secure=true")
    serve(grid_of(config, sites), config, tmp_path / "far", False)
    near = local(settled(), sites, tmp_path / "near")
    torch.testing.assert_close(weights(tmp_path / "far"), near, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    "fact",
    [{"site": []}, {"name": 5}, {"samples": 10**15}, {"samples": "many"}, {"height": 0}, {"x": 1}],
)
def test_a_stranger_cannot_end_a_run(
    fact: dict[str, Any], sites: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settled("rounds=1")
    grid = grid_of(config, sites, "ward", "clinic", "lab", "lab")

    def lies(asked: Any, reply: Any) -> Any:
        if asked.metadata.dst_node_id == 14 and "hello" in reply.content.config_records:
            record = reply.content.config_records["hello"]
            record["facts"] = json.dumps(json.loads(record["facts"]) | fact)
        return reply

    grid.tamper = lies
    serve(grid, config, tmp_path / "far", False)
    assert "fedssl did not write" in capsys.readouterr().err


def recorded(folder: Path) -> list[dict[str, Any]]:
    """A site's own record of what it sent."""
    path = site_module.state_folder(str(folder)) / "sent.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("words", [(), ("privacy.secure=true",), ("algorithm.name=fedavg",)])
def test_what_sites_record_is_what_the_server_counts(
    words: tuple[str, ...], sites: Path, tmp_path: Path
) -> None:
    config = settled("rounds=2", *words)
    serve(grid_of(config, sites), config, tmp_path / "far", False)
    lines = [line for name in ("ward", "clinic", "lab") for line in recorded(sites / name)]
    for row in metrics(tmp_path / "far"):
        for task, moved in row["exchanges"].items():
            own = [
                each for each in lines if (each.get("round"), each["task"]) == (row["round"], task)
            ]
            assert sum(each["bytes"] for each in own) == moved["up"] > 0
    first, second, *_ = recorded(sites / "ward")
    if words == ("privacy.secure=true",):
        assert second["sent"] == {"shares/2": 1.0, "secure/2/keys": "64 bytes"}  # not what they are
    told = {name.removeprefix("hello/"): value for name, value in first["sent"].items()}
    assert told.pop("version") == __version__
    assert first["bytes"] == len(__version__ + json.dumps(told))
    assert told.pop("site") == site_module._site_number(
        site_module.state_folder(str(sites / "ward"))
    )
    shape = {"channels": [3], "height": 16, "width": 16, "classes": []}
    assert told == {"name": "ward", "samples": 7, **shape}
    if words == ("algorithm.name=fedavg",):
        assert (second["round"], second["task"], second["bytes"]) == (1, "train", 78640 * 8 + 8)
        sent = {"replies/2/change": "float64[78640]", "replies/2/loss": "float64[]", "shares/2": 7}
        assert second["sent"] == sent


def test_a_fault_is_recorded_too(sites: Path, tmp_path: Path) -> None:
    config = settled("engine.timeout=0.1")
    grid = grid_of(config, sites, "ward", "clinic", "nowhere")
    with pytest.raises(UserError, match="only 2 of 3 sites"):
        serve(grid, config, tmp_path / "far", False)
    assert "no such folder" in recorded(sites / "nowhere")[0]["sent"]["hello/fault"]


def test_what_cannot_be_recorded_is_not_sent(sites: Path, tmp_path: Path) -> None:
    config = settled("rounds=2", "algorithm.name=fedavg", "cohort.minimum=2")
    path = site_module.state_folder(str(sites / "clinic")) / "sent.jsonl"

    def spoil(message: Any, reply: Any) -> Any:
        if message.metadata.message_type == "query.hello" and path.is_file():
            path.unlink()
            path.mkdir()
        return reply

    grid = grid_of(config, sites)
    grid.tamper = spoil
    serve(grid, config, tmp_path / "far", False)
    said = "refused: the site's record cannot be written (Is a directory); the site's log says more"
    for row in metrics(tmp_path / "far"):
        assert row["missing"] == 1 and said in row["faults"]["0"]


def asked(grid: Here, node: int, content: Any, kind: str = "train.train") -> Any:
    """What a site replies to a message that no server of ours would send."""
    (number,) = grid.push_messages([Message(content, node, kind)])
    (reply,) = grid.pull_messages([number])
    assert reply.has_content(), "Flower would send an error of its own, with its text"
    return reply.content


@pytest.mark.parametrize(
    "fact",
    [{"clients": "a"}, {"clients": ["a"]}, {"task": b"x"}, {"attempts": []}, {"clients": [0, 1]}],
)
def test_a_request_that_makes_no_sense_is_refused_and_recorded(
    fact: dict[str, Any], sites: Path
) -> None:
    grid = grid_of(settled("algorithm.name=fedavg"), sites)
    history = History(("0123abcd",), (0,), 0)
    content = write_request(Request("train", (0,), 0, 0, history, "samples", 1))
    for name, value in fact.items():
        content["request"][name] = value
    replies = read_replies(asked(grid, 11, content))
    assert all(reply.fault and not reply.tensors for reply in replies.values())
    (line,) = recorded(sites / "ward")
    assert line["bytes"] == sum(len(text) for text in line["sent"].values())
    assert all("faults/" in name for name in line["sent"])
    if fact == {"clients": [0, 1]}:
        assert replies[0].fault == "refused: task train: this site is one client, not 2"


def test_a_folder_that_cannot_be_looked_at_is_not_told(sites: Path) -> None:
    (sites / "secret").symlink_to(sites / "secret")
    grid = grid_of(settled(), sites, "secret")
    told = asked(grid, 11, RecordDict(), "query.hello")["hello"]["fault"]
    assert told.startswith("refused: ") and "Errno" not in told


@pytest.mark.parametrize("theirs", ["0.0.9", None])
def test_a_site_with_another_fedssl_is_not_taken(
    theirs: str | None, sites: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = grid_of(settled("engine.timeout=0.1"), sites)

    def other(asked: Any, reply: Any) -> Any:
        if asked.metadata.dst_node_id == 12:
            hello = reply.content["hello"]
            del hello["version"]
            if theirs is not None:
                hello["version"] = theirs
        return reply

    grid.tamper = other
    with pytest.raises(UserError, match="only 2 of 3 sites"):
        serve(grid, settled("engine.timeout=0.1"), tmp_path / "far", False)
    line = f"has fedssl {theirs or 'of an older version'}, the server {__version__}"
    assert (
        f"node 12 cannot take part: {line}: install the same version\n" in capsys.readouterr().err
    )


def test_a_site_may_have_one_image(sites: Path, tmp_path: Path) -> None:
    for path in sorted((sites / "lab").iterdir())[1:]:
        path.unlink()
    config = settled("rounds=1")
    serve(grid_of(config, sites), config, tmp_path / "far", False)
    clients = json.loads((tmp_path / "far" / "clients.json").read_text())
    assert [c["samples"] for c in clients] == [5, 1, 7] and metrics(tmp_path / "far")[0]["loss"]


SECRET = "Müller_Hans"


def corrupt(folder: Path) -> None:
    (folder / f"{SECRET}.jpg").write_text("no image")


def only_corrupt(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    corrupt(folder)


def other_size(folder: Path) -> None:
    Image.new("RGB", (9, 9)).save(folder / f"{SECRET}.png")


def no_cache(folder: Path) -> None:
    (folder.parents[2] / "cache").write_text("a file")


def no_training(folder: Path) -> None:
    (folder / "test" / SECRET).mkdir(parents=True)


def empty_class(folder: Path) -> None:
    (folder / "train" / SECRET).mkdir(parents=True)
    (folder / "train" / "x").mkdir()
    Image.new("RGB", (16, 16)).save(folder / "train" / "x" / "1.png")


SIZE = "data.size is not set, and the images are not of one square size"


@pytest.mark.parametrize(
    ("spoil", "told", "logged"),
    [
        (
            corrupt,
            "data.corrupt=fail: 1 of 6 images cannot be read; data.corrupt=skip leaves such files "
            "out",
            "data.corrupt=skip. The server's operator sets this key.",
        ),
        (
            only_corrupt,
            "node-config data: no image for train can be read",
            f"node-config data={{folder}}: no image for train can be read: {SECRET}.jpg",
        ),
        (other_size, SIZE, "data.size=16. The server's operator sets this key."),
        (
            no_cache,
            "the cache cannot be written",
            "FEDSSL_CACHE={cache}: cannot be written (File exists). Set FEDSSL_CACHE to",
        ),
        (
            no_training,
            "node-config data: its images cannot be used",
            "node-config data={folder}: there is test/ but no train/",
        ),
        (
            empty_class,
            "node-config data: its images cannot be used",
            f"node-config data={{folder}}: the class folder train/{SECRET} holds no image",
        ),
    ],
)
def test_names_of_files_stay_at_the_site(
    spoil: Callable[[Path], None],
    told: str,
    logged: str,
    sites: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(sites / "clinic")
    grid = grid_of(settled("data.size=null"), sites, "clinic")
    said = asked(grid, 11, RecordDict(), "query.hello")["hello"]["fault"]
    assert said == f"refused: {told}; the site's log says more"
    log = capsys.readouterr().err
    assert logged.format(folder=sites / "clinic", cache=sites.parents[1] / "cache") in log
    assert recorded(sites / "clinic")[0]["sent"]["hello/fault"] == said
    request = Request("descend", (0,), 0, 0, History(("0123abcd",), (0,), 0), "samples", 1)
    (reply,) = read_replies(asked(grid, 11, write_request(request), "train.descend")).values()
    assert reply.fault == said  # also where it went wrong since


@pytest.mark.parametrize("where", ["received-0", "1"])  # what came, and what the client keeps
def test_a_full_disk_at_a_site_is_told_without_its_path(
    where: str,
    sites: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = files.save_file

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        if where in path.parts:
            raise OSError(28, "No space left on device", "/home/secret")
        real(tensors, path, metadata)

    monkeypatch.setattr(files, "save_file", full)
    config = settled(*BYOL, "algorithm.name=fedema", "rounds=1", "cohort.minimum=2")
    serve(grid_of(config, sites), config, tmp_path / "far", False)
    told = "refused: a file cannot be written; make room; the site's log says more"
    assert metrics(tmp_path / "far")[0]["faults"]["1"].endswith(told)
    log = capsys.readouterr().err
    assert "/home/secret" in log and "--resume" not in log


def test_what_the_app_says_of_the_servers_machine_does_not_hold_at_sites(
    sites: Path, tmp_path: Path
) -> None:
    words = ("device=cuda:3", f"data.cache={tmp_path}/other", f"encoder.init={tmp_path}/none")
    torch.set_num_threads(2)
    session = build_site_experiment(settled(*words, "engine.threads=3"), str(sites / "ward"))
    assert torch.get_num_threads() == session.config.engine.threads == 2
    assert session.trainer.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert not (tmp_path / "other").exists() and (tmp_path / "cache").exists()


def test_a_site_that_cannot_read_the_recipe_says_so_and_records_it(sites: Path) -> None:
    text = configuration.dump(settled()) + "invented: 1\n"
    (sites / "recipe.yaml").write_text(text)
    grid = Here(client_app(sites / "recipe.yaml"), [{"data": str(sites / "ward")}])
    hello = asked(grid, 11, RecordDict(), "query.hello")["hello"]
    assert hello["fault"].startswith("refused: invented: unknown key")
    assert hello["version"] == __version__
    assert recorded(sites / "ward")[0]["sent"]["hello/fault"] == hello["fault"]


def test_of_a_program_that_fails_only_the_kind_is_told(
    sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_failing.py").write_text("raise RuntimeError(__file__)")
    monkeypatch.syspath_prepend(tmp_path)
    text = configuration.dump(settled()).replace("name: dcco", "name: own_failing:Own")
    (sites / "recipe.yaml").write_text(text)
    grid = Here(client_app(sites / "recipe.yaml"), [{"data": str(sites / "ward")}])
    told = asked(grid, 11, RecordDict(), "query.hello")["hello"]["fault"]
    where = "refused: algorithm.name=own_failing:Own"
    assert told == f"{where}: RuntimeError; the site's log says more"
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize("given", ["false", "true", 0])
def test_resume_is_true_or_false(
    given: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(configuration.dump(settled()))
    context = Context(1, 1, {}, RecordDict(), {"out": str(tmp_path / "far"), "resume": given})
    with pytest.raises(UserError):
        server_app(recipe)(grid_of(settled(), tmp_path), context)
    assert capsys.readouterr().err.startswith(f"fedssl: resume={json.dumps(given)}: ")


def test_a_full_disk_of_the_servers_is_told_as_what_goes_on_there(
    sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, *arguments: Any) -> None:
        raise UserError(f"{path}: cannot be written", can_resume=True)

    monkeypatch.setattr(checkpoint, "save", full)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(configuration.dump(settled()))
    context = Context(1, 1, {}, RecordDict(), {"out": str(tmp_path / "far"), "resume": False})
    with pytest.raises(UserError):
        server_app(recipe)(grid_of(settled(), sites), context)
    assert "continue with --run-config 'resume=true'." in capsys.readouterr().err


def test_where_a_site_keeps_its_state(
    sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FEDSSL_STATE", "~/st")
    assert site_module.state_folder("/srv/images").parent == tmp_path / "st"
    long = "ü" * 125 + "x"  # 251 bytes
    (sites / "ward").rename(sites / long)
    session = build_site_experiment(settled(), str(sites / long))
    assert site_module.introduce(session, str(sites / long)).name == long
    assert site_module.state_folder(str(sites / long)).name.startswith("ü" * 123 + "-")
    assert site_module.introduce(session, "/").name == "/"
