"""Backbones of timm's: trained as ours are, and given back with weights that timm loads."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
import timm
import torch
from helpers import refused
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedssl import config, load_encoder
from fedssl.config import Encoder
from fedssl.encoder import export, formats
from fedssl.encoder.load import ImageEncoder
from fedssl.models.encoders import Timm, encoder
from fedssl.models.flat_weights import FlatWeights
from fedssl.models.network import Heads, build, initialize, mlp
from fedssl.models.norms import BatchNorm, BatchNormAct, replace_batch_norms
from fedssl.runs import checkpoint, loop
from fedssl.runs.build import build_experiment

# Batch norm with the activation inside, batch norm alone, and layer norm.
NAMES = ("mobilenetv3_small_050", "resnet10t", "vit_tiny_patch16_224")
SMALL = (
    *("rounds=1", "partition.name=iid", "partition.clients=2", "cohort.size=null"),
    *("data.labels=20", "data.size=32", "objective.projector=32,32,16", "engine.threads=1"),
    *("evaluate.protocols=knn", "evaluate.k=5", "evaluate.baselines=[]"),
)


def small(*words: str) -> config.Config:
    return config.resolve(config.read_recipe(None), [*SMALL, *words])


@pytest.mark.parametrize("name", NAMES)
def test_a_backbone_is_timms_with_timms_names(name: str) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    ours = encoder(Encoder(f"timm/{name}", norm="batch"), 1, 32)
    initialize(ours, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(ours, Timm)
    for key, value in ours.state_dict().items():
        if "running" in key:
            value.uniform_(0.5, 1.5)
    theirs = timm.create_model(name, **ours.arguments)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    images = torch.rand(3, 1, 32, 32)
    with torch.no_grad():
        assert torch.equal(ours.eval()(images), theirs.eval()(images))
        assert ours(images).shape == (3, ours.features)
    again = encoder(Encoder(f"timm/{name}", norm="batch"), 1, 32)
    again.load_state_dict(theirs.state_dict(), strict=True)
    with pytest.raises(RuntimeError, match=r"missing or unexpected weights extra\.weight$"):
        again.load_state_dict({**theirs.state_dict(), "extra.weight": images}, strict=True)
    assert torch.equal(FlatWeights(again).vector, FlatWeights(ours).vector)
    learned = sum(p.numel() for p in theirs.parameters())
    floats = [b for b in theirs.buffers() if b.is_floating_point()]
    assert FlatWeights(ours).parameter_count == learned
    assert len(FlatWeights(ours).vector) == learned + sum(b.numel() for b in floats)


@pytest.mark.parametrize("name", NAMES[:2])
def test_batch_norm_sees_each_view_by_itself_also_in_one_pass(name: str) -> None:
    settings = Encoder(f"timm/{name}", norm="batch")
    net = build(settings, (1,), 32, lambda e, norm: Heads(mlp(e.features, (16, 16), norm)), 0)
    net = net.double().train()
    kinds = {type(m) for m in net.towers[0].encoder.modules() if isinstance(m, _BatchNorm)}
    assert kinds <= {BatchNorm, BatchNormAct} and net.has_batch_norm
    assert (BatchNormAct in kinds) == (name == NAMES[0])
    other = copy.deepcopy(net)
    views = tuple(torch.rand(2, 6, 1, 32, 32, dtype=torch.float64))
    apart = tuple(other.towers[0](view) for view in views)
    with net.stacked(2):
        together = net(views)
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)
    for a, b in zip(net.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_an_adopted_norm_keeps_its_own_numbers() -> None:
    theirs = nn.Sequential(nn.BatchNorm2d(2, eps=0.3, momentum=0.7), nn.BatchNorm2d(2))
    theirs.append(theirs[0])  # one layer in two places
    ours = copy.deepcopy(theirs)
    replace_batch_norms(ours)
    assert ours[0] is ours[2] and isinstance(ours[0], BatchNorm)
    images = torch.rand(4, 2, 3, 3)
    assert torch.equal(ours(images), theirs(images))
    assert torch.equal(ours[0].running_var, theirs[0].running_var)
    with refused("encoder.name", says="SyncBatchNorm"):
        replace_batch_norms(nn.Sequential(nn.SyncBatchNorm(2)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg of a network with batch norm."""
    out = tmp_path_factory.mktemp("timm") / "run"
    local = ("algorithm.name=fedavg", "algorithm.local_epochs=1", "algorithm.batch=5")
    loop.run(small(f"encoder.name=timm/{NAMES[0]}", "encoder.norm=batch", *local), out)
    return out


def test_fedavg_trains_it_and_the_run_is_what_load_encoder_gives(folder: Path) -> None:
    session = build_experiment(config.build(config.read_yaml(folder / "config.yaml")))
    session.engine.open(folder)
    assert checkpoint.read(folder, session) and not session.engine.merges
    weights = session.models.global_model()
    moved = (weights != session.trainer.initial).double().mean()
    assert moved > 0.9
    assert session.dataset.test is not None
    images = session.dataset.test.images[0][:20]
    expected = session.evaluator.tower(weights).encoder(images.float() / 255).detach()
    assert torch.equal(load_encoder(folder).embed(images), expected)


@torch.no_grad()
def embed_by_timm(exported: Path, images: torch.Tensor) -> torch.Tensor:
    model = timm.create_model(f"local-dir:{exported}", pretrained=True, num_classes=0)
    return model.eval()(images.float() / 255)


@pytest.mark.parametrize("format", ["safetensors", "hf"])
def test_timm_loads_what_is_exported(format: str, folder: Path, tmp_path: Path) -> None:
    list(export.export(folder, format, tmp_path / "out"))
    file = next((tmp_path / "out").glob("*.safetensors"))
    theirs = timm.create_model(NAMES[0], num_classes=0, in_chans=1).eval()
    assert load_file(file).keys() == theirs.state_dict().keys()
    theirs.load_state_dict(load_file(file), strict=True)
    images = torch.randint(0, 256, (4, 1, 32, 32), dtype=torch.uint8)
    expected = load_encoder(folder).embed(images)
    with torch.no_grad():
        assert torch.equal(theirs(images.float() / 255), expected)
    assert torch.equal(load_encoder(tmp_path / "out").embed(images), expected)
    if format == "hf":
        assert torch.equal(embed_by_timm(tmp_path / "out", images), expected)
        known = json.loads((tmp_path / "out" / "config.json").read_text())
        assert known["architecture"] == NAMES[0] and known["num_features"] == 1024


@pytest.mark.parametrize(
    ("format", "name"), [*(("torchscript", name) for name in NAMES), ("onnx", NAMES[1])]
)
def test_graphs_of_it_agree(format: str, name: str, tmp_path: Path) -> None:
    settings = Encoder(f"timm/{name}", norm="batch")
    body = encoder(settings, 3, 32)
    initialize(body, 0)
    note = {"encoder": config.to_tree(settings), "features": body.features}
    note |= {"channels": [3], "size": [32, 32]}
    whole = ImageEncoder(body.eval(), note, 0)
    infer = formats.WRITERS[format](whole, tmp_path / "graph")
    images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    assert formats.measure_difference(whole, infer, images)[0] < 1e-4


def test_dcco_merges_it_where_there_is_no_batch_norm(tmp_path: Path) -> None:
    settings = small(f"encoder.name=timm/{NAMES[2]}", "algorithm.name=dcco")
    session = build_experiment(settings)
    assert session.engine.merges
    loop.run(settings, tmp_path / "run")
    state = load_file(tmp_path / "run" / "encoder.safetensors")
    theirs = timm.create_model(NAMES[2], num_classes=0, in_chans=1, img_size=32)
    theirs.load_state_dict(state, strict=True)
    started = session.tower().encoder.state_dict()
    assert not torch.equal(state["pos_embed"], started["pos_embed"].cpu())
    list(export.export(tmp_path / "run", "hf", tmp_path / "hub"))
    images = torch.randint(0, 256, (2, 1, 32, 32), dtype=torch.uint8)
    found = embed_by_timm(tmp_path / "hub", images)
    assert torch.equal(found, load_encoder(tmp_path / "run").embed(images))


def test_weights_of_timms_own_are_a_start(tmp_path: Path) -> None:
    whole = timm.create_model(NAMES[0], in_chans=1, num_classes=7)
    file = tmp_path / "theirs.safetensors"
    save_file(whole.state_dict(), file)
    settings = Encoder(f"timm/{NAMES[0]}", norm="batch", init=str(file))
    net = build(settings, (1,), 32, lambda *_: Heads(nn.Identity()), 0)
    own = net.towers[0].encoder.state_dict()
    assert all(torch.equal(own[k], v) for k, v in whole.state_dict().items() if k in own)


VIT = "encoder.name=timm/vit_tiny_patch16_224"


@pytest.mark.parametrize(
    ("words", "key", "says"),
    [
        (("encoder.name=timm/resnet1888",), "encoder.name", "timm/resnet18"),
        (("encoder.name=timm/resnet10t",), "encoder.norm", "encoder.norm=batch"),
        ((VIT, "data.size=8"), "encoder.name", "8 by 8"),
        ((VIT, "data.halves=true", "data.size=64"), "encoder.name", "32 by 32"),
        (
            (
                VIT,
                "data.size=32",
                "augment.small=1",
                "objective.name=swav",
                "algorithm.name=fedavg",
            ),
            "augment.small",
            "images of one size",
        ),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(
    words: tuple[str, ...], key: str, says: str, tmp_path: Path
) -> None:
    with refused(key, says=says):
        loop.run(small(*words), tmp_path / "run")


def test_a_missing_timm_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with refused("encoder.name", says="pip install 'fedssl[timm]'"):
        encoder(Encoder("timm/resnet18", norm="batch"), 3, 32)


NORMALIZED = ("encoder.mean=0.5,0.4,0.3", "encoder.std=0.2,0.3,0.4")


@pytest.fixture(scope="module", params=["timm/resnet10t", VIT.partition("=")[2], "resnet18"])
def normalized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose encoder normalizes grey images in three channels."""
    out = tmp_path_factory.mktemp("normalized") / "run"
    size = "data.size=96" if request.param == "resnet18" else "data.size=32"
    words = (f"encoder.name={request.param}", "encoder.norm=frozen", "encoder.groups=8", size)
    words += ("data.interpolation=bicubic",)
    part = "encoder.train=lora:2" if "vit" in request.param else "encoder.train=last:1"
    loop.run(small(*words, part, *NORMALIZED), out)
    return out


def normalize(images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(c).view(3, 1, 1) for c in ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)))
    return (images.float() / 255 - mean) / std


@torch.no_grad()
def test_other_programs_load_an_encoder_that_normalizes(normalized: Path, tmp_path: Path) -> None:
    encoder = load_encoder(normalized)
    shape = (4, 1, encoder.height, encoder.width)
    images = torch.randint(0, 256, shape, dtype=torch.uint8)
    expected = encoder.embed(images)
    command, *_ = export.export(normalized, "timm", tmp_path / "timm")
    model = eval(command.partition(".load_state_dict")[0], {"timm": timm}).eval()
    model.load_state_dict(load_file(tmp_path / "timm" / "model.safetensors"), strict=True)
    torch.testing.assert_close(model(normalize(images)), expected)
    if not isinstance(encoder.body, Timm):
        return  # the hub's layout has names of timm's backbones alone
    list(export.export(normalized, "hf", tmp_path / "hf"))
    local = timm.create_model(f"local-dir:{tmp_path / 'hf'}", pretrained=True, num_classes=0)
    torch.testing.assert_close(local.eval()(normalize(images)), expected)
    known = timm.data.resolve_model_data_config(local)
    assert list(known["mean"]) == [0.5, 0.4, 0.3] and known["interpolation"] == "bicubic"
    words = [f"encoder.name=timm/{encoder.body.name}", f"encoder.init={tmp_path / 'hf'}"]
    assert config.resolve({}, words).data.interpolation == "bicubic"
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "hf").eval()
    torch.testing.assert_close(theirs(normalize(images)).pooler_output, expected)


def test_an_encoder_that_timm_does_not_have_is_refused(tmp_path: Path) -> None:
    loop.run(small("encoder.name=tiny", "encoder.groups=8"), tmp_path / "run")
    with refused("--format", says="timm has no model of this architecture"):
        list(export.export(tmp_path / "run", "timm", None))
