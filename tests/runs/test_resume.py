"""A run that is killed among a round's clients, or among a checkpoint's files, and goes on."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import refused, step, timeless
from PIL import Image
from rounds import before_round, interrupt
from safetensors import safe_open
from safetensors.torch import load_file

from fedssl import config
from fedssl.federation.client import Client
from fedssl.runs import checkpoint, folder, loop
from fedssl.runs.build import Experiment, build_experiment
from fedssl.runs.reader import RunReader
from fedssl.runs.reevaluate import evaluate
from fedssl.runs.validate import list_warnings
from fedssl.util.errors import UserError

SMALL = (
    "rounds=4", "data.size=8", "data.labels=80", "partition.name=iid", "partition.clients=5",
    "cohort.size=3", "encoder.norm=batch", "algorithm.local_epochs=1", "algorithm.batch=6",
    "server.optimizer=sgd", "server.lr=1", "client.lr=0.05", "client.momentum=0.9",
    "evaluate.protocols=knn", "evaluate.baselines=[]", "engine.threads=1", "checkpoint.seconds=0",
)  # fmt: skip
OBJECTIVES = {
    "byol": ("objective.name=byol", "objective.projector=32,16", "objective.predictor=24,16"),
    "moco": ("objective.name=moco", "objective.projector=32,16", "objective.queue=20"),
}
CASES = {
    "byol algorithm.name=fedema": {"network", "target", "first", "drift", "trained", "mu"},
    "byol algorithm.name=fedema algorithm.divergence=distance": {"network", "target", "first"},
    "moco algorithm.name=fedavg": {"target", "memory/queue", "memory/seen"},
    "byol algorithm.name=ditto": {"target", "personal/weights", "personal/target"},
    "byol algorithm.name=ditto algorithm.also=0.5": {"lambda-0.5/weights", "lambda-0.5/target"},
    "moco algorithm.name=ditto algorithm.norm_policy=local": {"norm", "personal/memory/queue"},
    "byol algorithm.name=fedavg algorithm.norm_policy=local": {"norm", "target"},
}


@pytest.fixture(autouse=True)
def states_stay(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """To be compared after the last round, when a run deletes those that nothing reads."""
    if "delete" not in request.node.name:
        monkeypatch.setattr(checkpoint, "forget_clients", lambda out, session: None)


def test_states_that_nothing_reads_are_deleted_at_the_end(tmp_path: Path) -> None:
    for words, kept in (("byol algorithm.name=fedema", False), ("byol algorithm.name=ditto", True)):
        out = tmp_path / words.rpartition("=")[2]
        loop.run(small(words), out)
        assert any((out / checkpoint.CLIENTS).iterdir()) == kept
        before = (out / "encoder.safetensors").read_bytes()
        loop.run(small(words), out, resume=True)  # nothing is left to do, and nothing is missed
        assert (out / "encoder.safetensors").read_bytes() == before


def small(words: str) -> config.Config:
    objective, *rest = words.split()
    return config.resolve(config.read_recipe(None), [*SMALL, *OBJECTIVES[objective], *rest])


def whole_state(out: Path) -> dict[str, torch.Tensor]:
    """The server's tensors, and those of the client files that count."""
    with safe_open(out / checkpoint.FILE, framework="pt") as file:
        versions = json.loads(file.metadata()["clients"])
    names = {f"{client}-{round}.safetensors" for client, (round, _) in versions.items()}
    assert {p.name for p in (out / checkpoint.CLIENTS).iterdir()} == names
    tensors = load_file(out / checkpoint.FILE)
    for name in sorted(names):
        own = load_file(out / checkpoint.CLIENTS / name)
        tensors |= {f"{name}/{leaf}": tensor for leaf, tensor in own.items()}
    return tensors


def assert_same_run(a: Path, b: Path) -> None:
    states = whole_state(a), whole_state(b)
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
    assert timeless(a) == timeless(b)
    assert (a / "encoder.safetensors").read_bytes() == (b / "encoder.safetensors").read_bytes()


def test_nothing_is_deleted_where_the_rate_is_constant_and_rounds_can_be_added(
    tmp_path: Path,
) -> None:
    """A longer run is as if it had been meant to be that long."""
    words = "byol algorithm.name=fedema schedule=constant"
    loop.run(small(words), tmp_path / "whole")
    loop.run(small(f"{words} rounds=2"), tmp_path / "cut")
    assert loop.run(small(words), tmp_path / "cut", resume=True)["rounds"] == 4
    assert RunReader(tmp_path / "cut").summary["rounds"] == 4
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    with refused("rounds", 3, "has 4 rounds already"):
        loop.run(small(f"{words} rounds=3"), tmp_path / "cut", resume=True)


def test_a_run_whose_rates_depend_on_its_length_keeps_it(tmp_path: Path) -> None:
    loop.run(small("byol algorithm.name=fedavg rounds=1"), tmp_path)
    with refused("rounds", 4, "learning rate"):
        loop.run(small("byol algorithm.name=fedavg"), tmp_path, resume=True)
    assert json.loads((tmp_path / "summary.json").read_text())["rounds"] == 1


def test_a_stopped_extension_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "byol algorithm.name=fedavg schedule=constant"
    loop.run(small(f"{words} rounds=1"), tmp_path)
    with monkeypatch.context() as patch:
        before_round(patch, 2, interrupt)
        with pytest.raises(KeyboardInterrupt):
            loop.run(small(words), tmp_path, resume=True)
    assert not RunReader(tmp_path).finished
    loop.run(small(words), tmp_path, resume=True)
    assert RunReader(tmp_path).finished


def die_in_the_second_client(patch: pytest.MonkeyPatch, round: int) -> None:
    """After the first client of that round has trained and the second has begun."""
    real, seen = Client.train_from, set()

    def train(self: Client, *rest: Any, **named: Any) -> Any:
        if self.round == round:
            seen.add(self.id)
        trained = real(self, *rest, **named)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return trained

    patch.setattr(Client, "train_from", train)


@pytest.mark.parametrize("words", CASES)
def test_killed_in_the_middle_of_a_cohort(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = small(words)
    loop.run(settings, tmp_path / "whole")
    with monkeypatch.context() as patch:
        die_in_the_second_client(patch, round=2)
        with pytest.raises(KeyboardInterrupt):
            loop.run(settings, tmp_path / "cut")
    assert len(timeless(tmp_path / "cut")) == 2
    loop.run(settings, tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    kept = {name.partition("/")[2] for name in whole_state(tmp_path / "cut")}
    assert CASES[words] <= kept


@pytest.mark.parametrize("seconds", [0, 1000])
def test_killed_between_the_files_of_a_checkpoint(
    seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients' new files are there, the server's is the old one: it says which count."""
    settings = small(f"byol algorithm.name=ditto checkpoint.seconds={seconds}")
    loop.run(settings, tmp_path / "whole")
    real = checkpoint.save_tensors
    last = 2 if seconds == 0 else settings.rounds

    def save(path: Path, tensors: Any, metadata: dict[str, str]) -> str:
        if metadata.get("round") == str(last):
            raise KeyboardInterrupt
        return real(path, tensors, metadata)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_tensors", save)
        with pytest.raises(KeyboardInterrupt):
            loop.run(settings, tmp_path / "cut")
    left = {p.name for p in (tmp_path / "cut" / checkpoint.CLIENTS).iterdir()}
    assert any(name.endswith(f"-{last}.safetensors") for name in left)
    with safe_open(tmp_path / "cut" / checkpoint.FILE, framework="pt") as file:
        assert int(file.metadata()["round"]) == (1 if seconds == 0 else 0)
    loop.run(settings, tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def files(out: Path) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in (out / checkpoint.CLIENTS).iterdir()}


def rounds(session: Experiment, out: Path, *cohorts: tuple[int, ...]) -> list[dict[str, int]]:
    """The client files after each round's checkpoint."""
    listed = []
    for ids in cohorts:
        step(session.engine, session.server, session.server.round, *ids)
        session.server.round += 1
        checkpoint.write(out, session)
        listed.append(files(out))
    return listed


def test_only_clients_that_changed_are_written_and_old_files_go(tmp_path: Path) -> None:
    session = build_experiment(small("moco algorithm.name=fedavg"))
    checkpoint.write(tmp_path, session)
    first, second, third = rounds(session, tmp_path, (0, 1), (1, 2), (2, 4))
    assert set(first) == {"0-1.safetensors", "1-1.safetensors"}
    assert set(second) == {"0-1.safetensors", "1-2.safetensors", "2-2.safetensors"}
    assert set(third) == {f"{name}.safetensors" for name in ("0-1", "1-2", "2-3", "4-3")}
    assert len({listed["0-1.safetensors"] for listed in (first, second, third)}) == 1
    assert second["1-2.safetensors"] == third["1-2.safetensors"]
    checkpoint.write(tmp_path, session)
    assert files(tmp_path) == third  # nothing changed since

    again = build_experiment(small("moco algorithm.name=fedavg"))
    assert checkpoint.read(tmp_path, again)
    assert sorted(again.engine.states) == [0, 1, 2, 4] and not again.engine.states.changed
    for k in range(5):
        own, read = (s.engine.states for s in (session, again))
        assert (k in own) == (k in read)
        if k in own:
            assert own.on_host(k).keys() == read.on_host(k).keys()
            assert all(torch.equal(t, read.on_host(k)[n]) for n, t in own.on_host(k).items())
    (listed,) = rounds(again, tmp_path, (0, 3))
    assert set(listed) == {f"{name}.safetensors" for name in ("0-4", "1-2", "2-3", "3-4", "4-3")}


def test_half_written_client_files_do_not_disturb(tmp_path: Path) -> None:
    session = build_experiment(small("moco algorithm.name=fedavg"))
    rounds(session, tmp_path, (0, 1))
    folder = tmp_path / checkpoint.CLIENTS
    for name in (".0-2.safetensors.new", "0-2.safetensors", "3-2.safetensors"):
        (folder / name).write_bytes(b"half of a fi")
    again = build_experiment(small("moco algorithm.name=fedavg"))
    assert checkpoint.read(tmp_path, again) and sorted(again.engine.states) == [0, 1]
    (listed,) = rounds(again, tmp_path, (0, 2))
    assert set(listed) == {f"{name}.safetensors" for name in ("0-2", "1-1", "2-2")}


def test_a_client_file_that_is_gone_or_damaged_is_named(tmp_path: Path) -> None:
    session = build_experiment(small("moco algorithm.name=fedavg"))
    rounds(session, tmp_path, (0, 1))
    file = tmp_path / checkpoint.CLIENTS / "1-1.safetensors"
    file.write_bytes(b"half of a fi")
    again = build_experiment(small("moco algorithm.name=fedavg"))
    with pytest.raises(UserError, match=r"1-1\.safetensors is damaged"):
        checkpoint.read(tmp_path, again)
    file.unlink()
    with pytest.raises(UserError, match=r"1-1\.safetensors"):
        checkpoint.read(tmp_path, again)


def test_an_encoder_with_batch_norm_is_a_start_for_another_run(tmp_path: Path) -> None:
    loop.run(small("byol algorithm.name=fedavg rounds=1"), tmp_path / "a")
    session = build_experiment(small(f"byol algorithm.name=fedavg encoder.init={tmp_path / 'a'}"))
    stored = load_file(tmp_path / "a" / "encoder.safetensors")
    named = session.trainer.flat.named(session.trainer.initial)
    assert any("running_var" in name for name in stored)
    for name, tensor in stored.items():
        assert torch.equal(named[f"towers.0.encoder.{name}"], tensor)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the images of three sites, and a run of one round in it."""
    root = tmp_path_factory.mktemp("sites")
    pixels = torch.randint(0, 255, (4, 8, 8, 3), dtype=torch.uint8)
    for site in ("east", "north", "south"):
        (root / "photos" / site).mkdir(parents=True)
        for number, image in enumerate(pixels):
            Image.fromarray(image.numpy()).save(root / "photos" / site / f"{number}.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        loop.run(of_sites("data.root=photos", f"data.cache={root / 'cache'}"), Path("run"))
    return root


def of_sites(*words: str) -> config.Config:
    own = (
        "data.name=folder", "data.levels=client", "partition.name=folder", "rounds=1",
        "data.size=8", "cohort.size=null", "objective.projector=32,16", "engine.threads=1",
        "evaluate.protocols=unlabeled", "evaluate.baselines=[]", "checkpoint.seconds=0",
    )  # fmt: skip
    return config.resolve(config.read_recipe(None), [*own, *words])


def again(sites: Path, name: str = "run") -> None:
    out = sites / name
    loop.run(config.build(config.read_yaml(out / "config.yaml")), out, resume=True)


def test_paths_are_compared_as_absolute_ones(sites: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sites)
    for given in ("photos", sites / "photos"):
        folder.check_folder(of_sites(f"data.root={given}"), Path("run"), resume=True)
    # The images of a deployment's server are in no checkpoint, so nothing tells them from others.
    server = ("engine.name=flower", "engine.sites=3")
    (sites / "deployed").mkdir()
    folder.write_config(of_sites("data.root=/photos", *server), sites / "deployed")
    with refused("data.root", "/other", "was /photos in"):
        other = of_sites("data.root=/other", *server)
        folder.check_folder(other, sites / "deployed", resume=True)
    own = ("partition.name=skew", "partition.encoder=a", "encoder.init=b")
    tree = config.to_tree(config.with_absolute_paths(config.resolve(config.read_recipe(None), own)))
    assert tree["partition"]["encoder"] == str(sites.resolve() / "a")
    assert tree["encoder"]["init"] == str(sites.resolve() / "b")


def test_a_run_goes_on_with_another_cache(
    sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Follow the advice about a cache that cannot be written, then run from another folder."""
    shutil.copytree(sites / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    where = (f"data.root={sites / 'photos'}", "data.cache=new")
    loop.run(of_sites(*where), tmp_path / "run", resume=True)
    assert any((tmp_path / "new").iterdir())
    shutil.rmtree(tmp_path / "new")
    (tmp_path / "other/photos").mkdir(parents=True)  # which it must not take for its own
    monkeypatch.chdir(tmp_path / "other")
    again(tmp_path)  # without a word of it
    assert any((tmp_path / "new").iterdir())
    before, after = (config.read_yaml(each / "run/config.yaml") for each in (sites, tmp_path))
    assert before["data"].pop("cache") != after["data"].pop("cache") == str(tmp_path / "new")
    assert before == after


def test_resume_is_refused_where_clients_have_other_images(sites: Path) -> None:
    photos = sites / "photos"
    moves = (
        (photos / "north", sites / "away", "north had 4 images in .* and is not there now"),
        (photos / "north", photos / "west", "north had 4 images in .* and is not there now"),
        (photos / "south/3.png", sites / "3.png", "south had 4 images in .* and has 3 now"),
        (photos / "south/3.png", photos / "east/4.png", "east had 4 images in .* and has 5 now"),
        (photos / "south/3.png", photos / "south/x.png", "the training images are not those of"),
    )
    for place, other, sentence in moves:
        place.rename(other)
        try:
            with pytest.raises(UserError, match=f"^data.root={photos}: {sentence}"):
                again(sites)
        finally:
            other.rename(place)
    again(sites)


def test_a_run_goes_on_with_images_that_were_moved(
    sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also its baseline, which had not begun."""
    first, second = (shutil.copytree(sites / "photos", tmp_path / name) for name in ("a", "b"))
    cache = f"data.cache={tmp_path / 'cache'}"
    words = ("rounds=3", "evaluate.baselines=[fedavg]", "objective.name=vicreg", cache)
    loop.run(of_sites(f"data.root={first}", *words), tmp_path / "whole")
    with monkeypatch.context() as patch:
        before_round(patch, 2, interrupt)
        with pytest.raises(KeyboardInterrupt):
            loop.run(of_sites(f"data.root={first}", *words), tmp_path / "cut")
    shutil.rmtree(first)
    for file in second.rglob("*.png"):
        os.utime(file, (1, 1))  # as a copy may have it
    loop.run(of_sites(f"data.root={second}", *words), tmp_path / "cut", resume=True)
    for place in (".", "baselines/fedavg"):
        whole, cut = (tmp_path / name / place for name in ("whole", "cut"))
        assert timeless(whole) == timeless(cut)
        encoders = [(out / "encoder.safetensors").read_bytes() for out in (whole, cut)]
        assert encoders[0] == encoders[1]
        before, after = (config.read_yaml(out / "config.yaml") for out in (whole, cut))
        assert after["data"].pop("root") == str(second) != before["data"].pop("root")
        assert after == before
    again(tmp_path, "cut")  # which knows now where they are


def test_moved_arrays_are_known_to_be_the_same(tmp_path: Path) -> None:
    root, moved = tmp_path / "first/stl10_binary", tmp_path / "second/stl10_binary"
    root.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name, count in (("train", 8), ("unlabeled", 4), ("test", 4)):
        generator.integers(0, 256, count * 3 * 96**2, np.uint8).tofile(root / f"{name}_X.bin")
        generator.integers(1, 3, count, np.uint8).tofile(root / f"{name}_y.bin")

    def settings(place: Path) -> config.Config:
        words = ("data.name=stl10", "data.levels=null", "partition.name=iid", "partition.clients=2")
        return of_sites(*words, f"data.root={place.parent}", f"data.cache={tmp_path / 'cache'}")

    loop.run(settings(root), tmp_path / "run")
    judged = evaluate(tmp_path / "run", [])
    shutil.move(root, moved)
    assert evaluate(tmp_path / "run", [f"data.root={moved.parent}"]) == judged
    loop.run(settings(moved), tmp_path / "run", resume=True)
    again(tmp_path)
    pixels = bytearray((moved / "unlabeled_X.bin").read_bytes())
    pixels[-1] ^= 1
    (moved / "unlabeled_X.bin").write_bytes(pixels)
    with refused("data.root", moved.parent, "the training images are not"):
        again(tmp_path)


@pytest.mark.parametrize("place", ["photos", "photos/run", "photos/east/../x/y"])
def test_a_run_is_not_among_the_images(sites: Path, place: str) -> None:
    before = sorted(sites.rglob("*"))
    settings = of_sites(f"data.root={sites / 'photos'}", f"data.cache={sites / 'cache'}")
    with refused("--out", sites / place, "among the images"):
        loop.run(settings, sites / place)
    assert sorted(sites.rglob("*")) == before


def test_a_deployments_server_notes_no_images_of_clients(sites: Path, tmp_path: Path) -> None:
    words = (f"data.root={sites / 'photos'}", f"data.cache={sites / 'cache'}")
    session = build_experiment(of_sites(*words))
    for names, noted in ((None, True), (["a", "b", "c"], False)):
        session.of_sites = names is not None
        checkpoint.write(tmp_path, session)
        with safe_open(tmp_path / checkpoint.FILE, framework="pt") as file:
            assert ("files" in file.metadata()) == noted


def test_a_run_of_folders_says_what_it_takes_them_for(
    sites: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again(sites)
    said = "Folders: no labels, 3 clients (east, north, south)."
    assert said in capsys.readouterr().err
    words = (f"data.root={sites / 'photos'}", f"data.cache={sites / 'cache'}", "partition.name=iid")
    made = build_experiment(of_sites(*words, "partition.clients=2", "data.levels=class"))
    said = "Folders: 3 classes (east, north, south). partition.name=iid makes 2 simulated clients."
    assert next(note for note in list_warnings(made) if note.startswith(said))


def test_a_folder_beside_train_that_nothing_looks_into_is_named(
    sites: Path, tmp_path: Path
) -> None:
    for split in ("train", "val"):
        shutil.copytree(sites / "photos", tmp_path / "set" / split)
    words = (f"data.root={tmp_path / 'set'}", f"data.cache={tmp_path / 'cache'}")
    notes = list(list_warnings(build_experiment(of_sites(*words))))
    where = f"data.root={tmp_path / 'set'}:"
    assert f"{where} val/ is not used. Rename it to test to evaluate with it." in notes
    shutil.copytree(sites / "photos", tmp_path / "set/test")
    notes = list(list_warnings(build_experiment(of_sites(*words))))
    assert f"{where} val/ is not used. Evaluation uses test/." in notes
