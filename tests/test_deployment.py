"""A run on real sites, with Flower's apps and messages in this process.

Real processes on loopback are in examples/deployment: they take minutes.
"""

from __future__ import annotations

import fcntl
import json
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
from flwr.app import Message, RecordDict

from fedssl import config as configuration
from fedssl import deploy, deployment, run
from fedssl.config import Config
from fedssl.engines import flower
from fedssl.engines.flower import client_app, read_replies, serve, write_request
from fedssl.engines.site import Request
from fedssl.engines.store import History
from fedssl.errors import UserError

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
    flower._session.cache_clear()
    generator = np.random.default_rng(0)
    for name, count in (("ward", 7), ("clinic", 5), ("lab", 6)):
        folder = tmp_path / "data" / "train" / name
        folder.mkdir(parents=True)
        for k in range(count):
            pixels = generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{k}.png")
    return tmp_path / "data" / "train"


def settled(*words: str) -> Config:
    return deploy.settle("default", [*WORDS, *words])


def grid_of(config: Config, sites: Path, *names: str) -> Here:
    folders = [{"data": str(sites / name)} for name in names or ("ward", "clinic", "lab")]
    return Here(client_app(configuration.dump(config)), folders)


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
    run.run(configuration.build(tree), out)
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
    grid, real, rounds = grid_of(config, sites), run.one_round, []

    def dies(session: Any, *rest: Any) -> Any:
        if session.server.round == 3 and not rounds:
            rounds.append(3)
            # Half of a round happens, then the process is gone.
            cohort = session.engine.cohort(np.arange(3), 3)
            cohort.mean("train", session.server.sent)
            raise SystemExit
        return real(session, *rest)

    monkeypatch.setattr(run, "one_round", dies)
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
    assert "0" in rows[3]["mu"] and rows[3]["mu"]["0"] == 0  # it sat out: from the global model


def test_labelled_images_at_the_server_judge_the_encoder(sites: Path, tmp_path: Path) -> None:
    for part, count in (("train", 4), ("test", 2)):
        for label in ("a", "b"):
            folder = tmp_path / "labelled" / part / label
            folder.mkdir(parents=True)
            for k in range(count):
                shade = 40 if label == "a" else 200
                Image.new("RGB", (16, 16), (shade + k,) * 3).save(folder / f"{k}.png")
    words = (f"data.root={tmp_path / 'labelled'}", "evaluate.protocols=knn", "evaluate.k=2")
    config = settled(*words)
    summary = serve(grid_of(config, sites), config, tmp_path / "far", False)
    assert 0 < summary["knn_top1"] <= 100 and "untrained" in summary


def test_too_few_sites_end_with_one_line(sites: Path, tmp_path: Path) -> None:
    config = settled("engine.timeout=0.1")
    with pytest.raises(UserError, match="2 of 3 sites came"):
        serve(grid_of(config, sites, "ward", "lab"), config, tmp_path / "far", False)
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
    with pytest.raises(UserError, match="2 of 3 sites came"):
        serve(grid, config, tmp_path / "far", False)
    assert text in capsys.readouterr().err


def test_sites_with_other_images_are_named(sites: Path, tmp_path: Path) -> None:
    for path in (sites / "lab").iterdir():
        Image.open(path).resize((20, 20)).save(path)
    config = settled("data.size=null")
    with pytest.raises(UserError, match=r"site lab: its images have height 20 where"):
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
    assert [c["name"] for c in clients] == ["clinic", "ward", "ward"]
    assert sorted(c["samples"] for c in clients) == [5, 6, 7]


def test_secure_sums_between_sites(sites: Path, tmp_path: Path) -> None:
    config = settled("privacy.secure=true")
    serve(grid_of(config, sites), config, tmp_path / "far", False)
    near = local(settled(), sites, tmp_path / "near")
    torch.testing.assert_close(weights(tmp_path / "far"), near, rtol=0, atol=1e-7)


def test_one_server_at_a_time(sites: Path, tmp_path: Path) -> None:
    config, out = settled(), tmp_path / "far"
    out.mkdir()
    with (out / flower.LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="a run is at work there"):
            serve(grid_of(config, sites), config, out, False)
    serve(grid_of(config, sites), config, out, False)


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
    assert "none of ours" in capsys.readouterr().err


def recorded(folder: Path) -> list[dict[str, Any]]:
    """A site's own record of what it sent."""
    path = deployment.state_folder(str(folder)) / "sent.jsonl"
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
    assert '"name": "ward", "samples": 7' in first["sent"]["hello/facts"]
    if words == ("algorithm.name=fedavg",):
        assert (second["round"], second["task"], second["bytes"]) == (1, "train", 78640 * 8 + 8)
        sent = {"replies/2/change": "float64[78640]", "replies/2/loss": "float64[]", "shares/2": 7}
        assert second["sent"] == sent


def test_a_fault_is_recorded_too(sites: Path, tmp_path: Path) -> None:
    config = settled("engine.timeout=0.1")
    grid = grid_of(config, sites, "ward", "clinic", "nowhere")
    with pytest.raises(UserError, match="2 of 3 sites came"):
        serve(grid, config, tmp_path / "far", False)
    assert "no such folder" in recorded(sites / "nowhere")[0]["sent"]["hello/fault"]


def test_what_cannot_be_recorded_is_not_sent(sites: Path, tmp_path: Path) -> None:
    config = settled("rounds=2", "algorithm.name=fedavg", "cohort.minimum=2")
    path = deployment.state_folder(str(sites / "clinic")) / "sent.jsonl"

    def spoil(message: Any, reply: Any) -> Any:
        if message.metadata.message_type == "query.hello" and path.is_file():
            path.unlink()
            path.mkdir()
        return reply

    grid = grid_of(config, sites)
    grid.tamper = spoil
    serve(grid, config, tmp_path / "far", False)
    said = "refused: sent.jsonl: cannot be written (Is a directory)"
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
    assert line["bytes"] == 0 and all("faults/" in name for name in line["sent"])
    if fact == {"clients": [0, 1]}:
        assert replies[0].fault == "refused: task train: this site is one client, not 2"


def test_a_folder_that_cannot_be_looked_at_is_not_told(sites: Path) -> None:
    (sites / "secret").symlink_to(sites / "secret")
    grid = grid_of(settled(), sites, "secret")
    told = asked(grid, 11, RecordDict(), "query.hello")["hello"]["fault"]
    assert told.startswith("refused: ") and "Errno" not in told
