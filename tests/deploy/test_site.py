"""A real site: what it refuses, what it records, and what stays with it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

pytest.importorskip("flwr")
from far import BYOL, Here
from three_sites import asked, grid_of, hello, metrics, recorded, serve_here, settled

from fedssl import __version__
from fedssl import config as configuration
from fedssl.deploy import site as site_module
from fedssl.deploy.site import build_site_experiment, client_app, load_experiment
from fedssl.engines.flower.messages import read_replies, write_request
from fedssl.engines.remote.disk_states import History
from fedssl.engines.remote.messages import Request
from fedssl.util import files
from fedssl.util.errors import TrainingError


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
    told = hello(grid_of(settled(), sites))
    assert told["fault"] == (
        "refused: node-config data: 4 images are not below train/, and only those in there would "
        "be used; move them there, or rename train; the site's log says more"
    )
    (folder / "6.png").unlink()
    shutil.rmtree(folder / "2021")
    (folder / ".trash").mkdir()
    shutil.copy(folder / "train" / "0.png", folder / ".trash")  # as everywhere
    (folder / "lost+found").mkdir()
    scan = os.scandir

    def refused(folder: Any) -> Any:
        if str(folder).endswith("lost+found"):  # which nobody may list, not even root
            raise PermissionError(13, "Permission denied", str(folder))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refused)
    load_experiment.cache_clear()
    told = hello(grid_of(settled(), sites))
    assert json.loads(told["facts"])["samples"] == 1


@pytest.mark.parametrize("words", [(), ("privacy.secure=true",), ("algorithm.name=fedavg",)])
def test_what_sites_record_is_what_the_server_counts(
    words: tuple[str, ...], sites: Path, tmp_path: Path
) -> None:
    config = settled("rounds=2", *words)
    serve_here(config, sites, tmp_path / "far")
    lines = [line for name in ("ward", "clinic", "lab") for line in recorded(sites / name)]
    for row in metrics(tmp_path / "far"):
        for task, moved in row["exchanges"].items():
            own = [
                each for each in lines if (each.get("round"), each["task"]) == (row["round"], task)
            ]
            assert sum(each["bytes"] for each in own) == moved["up"] > 0
    first, second, *_ = recorded(sites / "ward")
    if words == ("privacy.secure=true",):
        keys = {"secure/2/keys": "96 bytes", "secure/2/signed": "144 bytes"}  # not what they are
        assert second["sent"] == {"shares/2": 1.0, **keys}
    told = {name.removeprefix("hello/"): value for name, value in first["sent"].items()}
    assert told.pop("version") == __version__
    assert first["bytes"] == len(__version__ + json.dumps(told))
    assert told.pop("site") == site_module._site_number(
        site_module.state_folder(str(sites / "ward"))
    )
    shape = {"channels": [3], "height": 16, "width": 16, "classes": [], "constants": ""}
    assert told == {"name": "ward", "samples": 7, **shape}
    if words == ("algorithm.name=fedavg",):
        assert (second["round"], second["task"], second["bytes"]) == (1, "train", 78640 * 8 + 8)
        sent = {"replies/2/change": "float64[78640]", "replies/2/loss": "float64[]", "shares/2": 7}
        assert second["sent"] == sent


def test_a_killed_sites_unfinished_files_are_removed_at_its_next_start(sites: Path) -> None:
    folder = site_module.state_folder(str(sites / "ward"))
    deep = folder / "run" / "0"
    deep.mkdir(parents=True)
    for name in ("run/0/.3-a.safetensors.new", "run/0/3-a.safetensors", ".ledger.new"):
        (folder / name).write_text("half")
        os.utime(folder / name, (0, 0))
    (deep / ".4-a.safetensors.new").touch()  # another process is writing it
    load_experiment.cache_clear()
    hello(grid_of(settled(), sites, "ward"))
    left = {path.name for path in folder.rglob("*") if path.is_file()}
    assert left == {"3-a.safetensors", ".4-a.safetensors.new", "site", "sent.jsonl"}


def test_what_cannot_be_recorded_is_not_sent(sites: Path, tmp_path: Path) -> None:
    config = settled("rounds=2", "algorithm.name=fedavg", "cohort.minimum=2")
    path = site_module.state_folder(str(sites / "clinic")) / "sent.jsonl"

    def spoil(message: Any, reply: Any) -> Any:
        if message.metadata.message_type == "query.hello" and path.is_file():
            path.unlink()
            path.mkdir()
        return reply

    serve_here(config, sites, tmp_path / "far", tamper=spoil)
    said = "refused: the site's record cannot be written (Is a directory); the site's log says more"
    for row in metrics(tmp_path / "far"):
        assert row["missing"] == 1 and said in row["faults"]["0"]


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
    told = hello(grid)["fault"]
    assert told.startswith("refused: ") and "Errno" not in told


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


OPERATOR = "The server's operator sets this key."
DATA = "node-config data"


@pytest.mark.parametrize(
    ("spoil", "told", "logged"),
    [
        (
            corrupt,
            "data.corrupt=fail: 1 of 6 images cannot be read; data.corrupt=skip leaves such files "
            "out",
            f"data.corrupt=skip. {OPERATOR}",
        ),
        (
            only_corrupt,
            f"{DATA}: no image for train can be read",
            f"{DATA}={{folder}}: no image for train can be read: {SECRET}.jpg",
        ),
        (
            other_size,
            "data.size is not set, and the images are not of one square size",
            f"data.size=16. {OPERATOR}",
        ),
        (
            no_cache,
            "the cache cannot be written",
            "FEDSSL_CACHE={cache}: cannot be written (File exists). Set FEDSSL_CACHE to",
        ),
        (
            no_training,
            f"{DATA}: its images cannot be used",
            f"{DATA}={{folder}}: there is test/ but no train/",
        ),
        (
            empty_class,
            f"{DATA}: its images cannot be used",
            f"{DATA}={{folder}}: the class folder train/{SECRET} holds no image",
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
    said = hello(grid)["fault"]
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
    real = files.replace_file

    def full(path: Path, *rest: Any, **named: Any) -> Any:
        if where in path.parts:
            raise OSError(28, "No space left on device", "/home/secret")
        return real(path, *rest, **named)

    monkeypatch.setattr(files, "replace_file", full)
    config = settled(*BYOL, "algorithm.name=fedema", "rounds=1", "cohort.minimum=2")
    with contextlib.suppress(TrainingError):  # no round counts if all disks are full
        serve_here(config, sites, tmp_path / "far")
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


def told_of(sites: Path, recipe: str) -> dict[str, str]:
    (sites / "recipe.yaml").write_text(recipe)
    return hello(Here(client_app(sites / "recipe.yaml"), [{"data": str(sites / "ward")}]))


def test_a_site_that_cannot_read_the_recipe_says_so_and_records_it(sites: Path) -> None:
    told = told_of(sites, configuration.dump(settled()) + "invented: 1\n")
    assert told["fault"].startswith("refused: invented: unknown key")
    assert told["version"] == __version__
    assert recorded(sites / "ward")[0]["sent"]["hello/fault"] == told["fault"]


def test_of_a_program_that_fails_only_the_kind_is_told(
    sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_failing.py").write_text("raise RuntimeError(__file__)")
    monkeypatch.syspath_prepend(tmp_path)
    recipe = configuration.dump(settled()).replace("name: dcco", "name: own_failing:Own")
    where = "refused: algorithm.name=own_failing:Own"
    fault = told_of(sites, recipe)["fault"]
    assert fault == f"{where}: RuntimeError; the site's log says more"
    assert str(tmp_path) in capsys.readouterr().err


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
