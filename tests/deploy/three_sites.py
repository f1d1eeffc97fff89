"""Three sites and their images in this process: shared by the tests of server and sites."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from image_folders import save_noise
from safetensors.torch import load_file

pytest.importorskip("flwr")
from far import Here, Tamper
from flwr.app import Message, RecordDict
from helpers import PLAIN

from fedssl import config as configuration
from fedssl.config import Config
from fedssl.deploy import site as site_module
from fedssl.deploy.recipe import adapt_recipe
from fedssl.deploy.server import serve
from fedssl.deploy.site import client_app, load_experiment

WORDS = (
    *("engine.sites=3", "cohort.size=null", "encoder.groups=4", "objective.projector=[32,16]"),
    *("encoder.name=tiny", "data.size=16", "augment.name=digits"),
    *("rounds=3", "precision=fp64", "engine.threads=1", "engine.timeout=5", "checkpoint.seconds=0"),
    *("server.optimizer=sgd", "server.lr=1", "client.lr=0.05"),
)


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three folders of images, and the same as one data set with a folder a client."""
    monkeypatch.setenv("FEDSSL_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("FEDSSL_CACHE", str(tmp_path / "cache"))
    load_experiment.cache_clear()
    for name, count in (("ward", 7), ("clinic", 5), ("lab", 6)):
        save_noise(tmp_path / "data" / "train", name, count=count)
    return tmp_path / "data" / "train"


def settled(*words: str) -> Config:
    return adapt_recipe(PLAIN, [*WORDS, *words])


def grid_of(config: Config, sites: Path, *names: str) -> Here:
    folders = [{"data": str(sites / name)} for name in names or ("ward", "clinic", "lab")]
    recipe = sites / "recipe.yaml"
    recipe.write_text(configuration.dump(config))
    app = client_app(recipe)
    recipe.unlink()
    return Here(app, folders)


def serve_here(
    config: Config, sites: Path, out: Path, *names: str, tamper: Tamper | None = None
) -> dict[str, Any]:
    """A whole run with these sites, all three unless named."""
    grid = grid_of(config, sites, *names)
    grid.tamper = tamper
    return serve(grid, config, out, False)


def weights(out: Path) -> torch.Tensor:
    return load_file(out / "checkpoint" / "state.safetensors")["weights"]


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def recorded(folder: Path) -> list[dict[str, Any]]:
    """A site's own record of what it sent."""
    path = site_module.state_folder(str(folder)) / "sent.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def asked(grid: Here, node: int, content: Any, kind: str = "train.train") -> Any:
    """Return the reply to a message that no server of ours would send."""
    (number,) = grid.push_messages([Message(content, node, kind)])
    (reply,) = grid.pull_messages([number])
    assert reply.has_content(), "Flower would send an error of its own, with its text"
    return reply.content


def hello(grid: Here) -> Any:
    """The first site's introduction."""
    return asked(grid, 11, RecordDict(), "query.hello")["hello"]
