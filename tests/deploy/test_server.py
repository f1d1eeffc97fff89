"""A run on real sites, with Flower's apps and messages in this process.

Real processes on loopback are in examples/deployment: they take minutes.
"""

from __future__ import annotations

import contextlib
import html
import json
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import edit_config, refused, relative
from image_folders import save
from PIL import Image
from safetensors.torch import load_file, save_file

pytest.importorskip("flwr")
from far import BYOL, Here
from flwr.app import Context, RecordDict
from three_sites import WORDS, grid_of, hello, metrics, recorded, serve_here, settled, weights

from fedssl import __version__, report
from fedssl import config as configuration
from fedssl.api import Run
from fedssl.cli import main
from fedssl.config import Config
from fedssl.deploy.server import serve, server_app
from fedssl.deploy.site import load_experiment, read_config
from fedssl.deploy.write import write_app
from fedssl.privacy.secure.identity import make_identity
from fedssl.runs import checkpoint, loggers, loop
from fedssl.runs.folder import PACKAGE
from fedssl.runs.reevaluate import evaluate
from fedssl.util.errors import TrainingError, UserError


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
    summary = serve_here(config, sites, tmp_path / "far")
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


@pytest.mark.parametrize("words", [("privacy.secure=true",), ("algorithm.batch=2",)])
def test_a_site_whose_images_change_is_told_what_to_do(
    words: tuple[str, ...], sites: Path, tmp_path: Path
) -> None:
    """Also where its weight does not show it, or does not change."""
    config = settled("algorithm.name=fedavg", "rounds=2", "cohort.minimum=2", *words)

    def adds(asked: Any, reply: Any) -> Any:
        if not (sites / "lab" / "new.png").exists() and asked.metadata.dst_node_id == 13:
            shutil.copy(sites / "lab" / "0.png", sites / "lab" / "new.png")
            load_experiment.cache_clear()  # a new process, as for every message
        return reply

    with contextlib.suppress(TrainingError):  # a secure sum needs all three, so no round counts
        serve_here(config, sites, tmp_path / "far", tamper=adds)
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
    summary = serve_here(config, sites, out)
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
    serve_here(config, sites, tmp_path / "far")
    with refused("data.name", "folder"):
        evaluate(tmp_path / "far", [])


def test_sites_with_other_images_are_named(sites: Path, tmp_path: Path) -> None:
    for path in (sites / "lab").iterdir():
        Image.open(path).resize((20, 20)).save(path)
    config = settled("data.size=null")
    with refused(None, says="site lab: the images' height is 20"):
        serve_here(config, sites, tmp_path / "far")


def test_two_sites_of_one_name_are_two_clients(sites: Path, tmp_path: Path) -> None:
    (sites / "other").mkdir()
    (sites / "lab").rename(sites / "other" / "ward")
    serve_here(settled(), sites, tmp_path / "far", "ward", "clinic", "other/ward")
    clients = json.loads((tmp_path / "far" / "clients.json").read_text())
    assert [c["name"] for c in clients] == ["clinic", "ward", "ward (2)"]
    assert sorted(c["samples"] for c in clients) == [5, 6, 7]


def labelled(folder: Path) -> Path:
    """Images that the server judges with."""
    for part, count in (("train", 4), ("test", 2)):
        for label, shade in (("a", 40), ("b", 200)):
            for k in range(count):
                image = Image.new("RGB", (16, 16), (shade + k,) * 3)
                save(folder / part / label / f"{k}.png", image)
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
        edit_config(out, f"{out}/own_1.py:", "/gone/own_1.py:")
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
    for word, key in (
        ("log=wandb", "log"),
        ("data.root=/no", "data.root"),
        ("encoder.init=/none", "encoder.init"),
    ):
        with refused(key):
            config = settled(word, "engine.timeout=0.1")
            serve_here(config, sites, tmp_path / "far", "ward")
        assert not (tmp_path / "far" / "config.yaml").exists()


def start_weights(folder: Path, sites: Path) -> Path:
    """The encoder of a short run, as a file to start from."""
    local(settled("rounds=1"), sites, folder)
    return folder / "encoder.safetensors"


def test_sites_have_a_copy_of_the_weights_that_are_never_sent(sites: Path, tmp_path: Path) -> None:
    file = start_weights(tmp_path / "start", sites)
    config = settled("encoder.train=last:1", f"encoder.init={file}")
    grid = grid_of(config, sites)
    assert "this site has no copy of its weights" in hello(grid)["fault"]
    load_experiment.cache_clear()
    for context in grid.contexts.values():
        context.node_config["weights"] = str(file)
    serve(grid, config, tmp_path / "far", False)
    assert relative(weights(tmp_path / "far"), local(config, sites, tmp_path / "near")) < 1e-10


def test_sites_with_other_weights_than_the_server_are_refused(sites: Path, tmp_path: Path) -> None:
    file, other = start_weights(tmp_path / "start", sites), tmp_path / "other.safetensors"
    tensors = load_file(file)
    tensors["layers.0.weight"][0, 0, 0, 0] += 1e-3
    save_file(tensors, other)
    config = settled("encoder.train=last:1", f"encoder.init={file}")
    grid = grid_of(config, sites)
    for context in grid.contexts.values():
        is_clinic = context.node_config["data"] == str(sites / "clinic")
        context.node_config["weights"] = str(other if is_clinic else file)
    with refused("encoder.init", says="others at clinic."):
        serve(grid, config, tmp_path / "far", False)
    assert not (tmp_path / "far" / "config.yaml").exists()


def test_secure_sums_between_sites(sites: Path, tmp_path: Path) -> None:
    config = settled("privacy.secure=true")
    serve_here(config, sites, tmp_path / "far")
    near = local(settled(), sites, tmp_path / "near")
    torch.testing.assert_close(weights(tmp_path / "far"), near, rtol=0, atol=1e-7)


def test_sites_sign_with_their_keys_and_take_part_with_those_of_their_lists(
    sites: Path, tmp_path: Path
) -> None:
    """One site's list lacks another one: without it there is no sum of three."""
    config, keys = settled("privacy.secure=true", "rounds=1"), tmp_path / "keys"
    public = {name: make_identity(keys / name).public for name in ("ward", "clinic", "lab")}
    grid = grid_of(config, sites)
    for node, name in zip(grid.contexts.values(), public, strict=True):
        (keys / f"{name}.peers").write_bytes(b"\n".join(public.values()))
        node.node_config |= {"key": str(keys / name), "peers": str(keys / f"{name}.peers")}
    serve(grid, config, tmp_path / "far", False)
    assert not list(tmp_path.glob("state/*/identity"))  # which a site makes without a key
    (keys / "ward.peers").write_bytes(public["ward"] + b"\n" + public["clinic"])
    with pytest.raises(TrainingError):
        serve(grid, config, tmp_path / "less", False)
    (line,) = metrics(tmp_path / "less")
    assert "the key of client 1 is not among this site's peers" in line["faults"]["2"]
    (keys / "ward.peers").write_bytes(public["lab"])
    assert hello(grid)["fault"].startswith("refused: node-config peers lacks this site's own")


@pytest.mark.parametrize(
    "fact",
    [{"site": []}, {"samples": 10**15}, {"x": 1}],
)
def test_a_stranger_cannot_end_a_run(
    fact: dict[str, Any], sites: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lies(asked: Any, reply: Any) -> Any:
        if asked.metadata.dst_node_id == 14 and "hello" in reply.content.config_records:
            record = reply.content.config_records["hello"]
            record["facts"] = json.dumps(json.loads(record["facts"]) | fact)
        return reply

    names = ("ward", "clinic", "lab", "lab")
    serve_here(settled("rounds=1"), sites, tmp_path / "far", *names, tamper=lies)
    assert "fedssl did not write" in capsys.readouterr().err


def test_a_site_that_claims_most_images_is_named(
    sites: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def claims(asked: Any, reply: Any) -> Any:
        if asked.metadata.dst_node_id == 13 and "hello" in reply.content.config_records:
            record = reply.content.config_records["hello"]
            record["facts"] = json.dumps(json.loads(record["facts"]) | {"samples": 10**7})
        return reply

    serve_here(settled("rounds=1"), sites, tmp_path / "far", tamper=claims)
    said = capsys.readouterr().err
    assert "Site lab has 100.00% of the weight in the mean, by its claim of 10,000,000" in said
    assert "6 images, where the run started with 10000000" in said


@pytest.mark.parametrize("theirs", ["0.0.9", None])
def test_a_site_with_another_fedssl_is_not_taken(
    theirs: str | None, sites: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def other(asked: Any, reply: Any) -> Any:
        if asked.metadata.dst_node_id == 12:
            hello = reply.content["hello"]
            del hello["version"]
            if theirs is not None:
                hello["version"] = theirs
        return reply

    with refused("engine.timeout", says="only 2 of 3 sites"):
        serve_here(settled("engine.timeout=0.1"), sites, tmp_path / "far", tamper=other)
    line = f"has fedssl {theirs or 'of an older version'}, the server {__version__}"
    assert (
        f"node 12 cannot take part: {line}: install the same version\n" in capsys.readouterr().err
    )


def test_a_site_may_have_one_image(sites: Path, tmp_path: Path) -> None:
    for path in sorted((sites / "lab").iterdir())[1:]:
        path.unlink()
    config = settled("rounds=1")
    serve_here(config, sites, tmp_path / "far")
    clients = json.loads((tmp_path / "far" / "clients.json").read_text())
    assert [c["samples"] for c in clients] == [5, 1, 7] and metrics(tmp_path / "far")[0]["loss"]


def run_app(sites: Path, out: Path, resume: Any) -> None:
    """The server's program, as Flower starts it."""
    recipe = sites.parents[1] / "server.yaml"
    recipe.write_text(configuration.dump(settled()))
    context = Context(1, 1, {}, RecordDict(), {"out": str(out), "resume": resume})
    with pytest.raises(UserError):
        server_app(recipe)(grid_of(settled(), sites), context)


@pytest.mark.parametrize("given", ["false", 0])
def test_resume_is_true_or_false(
    given: Any, sites: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_app(sites, tmp_path / "far", given)
    assert capsys.readouterr().err.startswith(f"fedssl: resume={json.dumps(given)}: ")


def test_a_full_disk_of_the_servers_is_told_as_what_goes_on_there(
    sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = Mock(side_effect=UserError("the checkpoint cannot be written", can_resume=True))
    monkeypatch.setattr(checkpoint, "save_tensors", full)
    run_app(sites, tmp_path / "far", False)
    assert "continue with --run-config 'resume=true'." in capsys.readouterr().err
