"""Send mutated messages to the program of a site and to that of the server.

    python benchmarks/attacks/messages.py --count 50000 --seed 0

The messages of real rounds are recorded: greetings, requests and replies, of several algorithms and
with secure sums. Then each is changed, in what it says or in its bytes, and given to the program
that reads it: a site's app, the server's check of replies and its means, its reader of greetings.

A finding is an exception that gets through, messages that take a minute of the processor, memory
that grows, a number that is not finite in a mean, a client that is blamed for another, a file,
process or connection that nobody asked for, and a site that answers differently afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedssl.util.tuning import shorten_thread_waits

shorten_thread_waits()  # as the command line does, before torch
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import numpy as np
import torch
from far import Here  # type: ignore[import-not-found]
from flwr.app import ConfigRecord, Message, RecordDict
from mutations import SENTINEL, VALUES, Mutator, parse, write
from PIL import Image

from fedssl import config as configuration
from fedssl.deploy import site as site_module
from fedssl.deploy.introduction import Introduction
from fedssl.deploy.recipe import adapt_recipe
from fedssl.deploy.server import build_server_experiment
from fedssl.deploy.transport import _read_introduction
from fedssl.engines.flower.messages import GREETING, read_replies
from fedssl.engines.flower.transport import GridTransport
from fedssl.engines.remote.cohort import RemoteCohort
from fedssl.engines.remote.engine import RemoteEngine
from fedssl.engines.remote.messages import Reply, Request
from fedssl.federation.aggregate import TooFewReplies
from fedssl.runs import loop
from fedssl.runs.build import Experiment
from fedssl.util.trees import leaves

WORDS = (
    *("engine.sites=3", "cohort.size=null", "encoder.groups=4", "encoder.name=tiny"),
    *("data.size=8", "augment.name=digits", "rounds=2", "engine.threads=1", "precision=fp32"),
    "objective.projector=[8,8]",
)
BYOL = ("objective.name=byol", "objective.predictor=[8,8]")
MOCO = ("objective.name=moco", "objective.queue=8")
RECIPES = {
    "dcco": ("algorithm.name=dcco",),
    "noise": (
        "algorithm.name=dcco",
        "objective.bound=1",
        "privacy.noise=0.01",
        "privacy.delta=1e-5",
    ),
    "fedema": (*BYOL, "algorithm.name=fedema", "algorithm.batch=3", "encoder.norm=batch"),
    "ccl": (
        *(*MOCO, "algorithm.name=ccl", "algorithm.batch=3", "algorithm.neighbours=2"),
        *("algorithm.features=4", "algorithm.mix=1", "algorithm.share_plain=true"),
        "encoder.norm=batch",
    ),
    "secure": ("algorithm.name=fedavg", "privacy.secure=true"),
}
SITES = {"ward": 7, "clinic": 5, "lab": 6}
BAD = 1  # the client that sends false replies
LONGEST = 60  # seconds of the processor, for the messages of one attack
HANG = 1800  # seconds of the clock, on a machine that has other work
MOST_GROWTH = 1 << 30  # bytes


class Finding(Exception):
    """A message did what no message may do."""


@dataclass
class Asked:
    """One exchange of a recorded round, as the server asked for it."""

    round: int
    method: Callable[..., Any]  # of the cohort
    arguments: tuple[Any, ...]
    requests: list[dict[int, bytes]]  # one for each message to the clients, by client
    replies: list[dict[int, bytes]]
    ids: list[int]


class Replay:
    """A transport that gives recorded replies, of which one is another."""

    def __init__(self, asked: Asked, step: int, false: RecordDict) -> None:
        self.asked, self.step, self.false, self.sent = asked, step, false, 0

    def place(self, clients: list[int]) -> dict[int, int]:
        """Give each client a node of its own."""
        return {client: client for client in clients}

    def send(
        self, requests: Mapping[int, Request], timeout: float
    ) -> dict[int, dict[int, Reply] | str]:
        """Answer as in the record."""
        if self.sent == len(self.asked.replies):
            return {}
        there = self.asked.replies[self.sent]
        contents = {k: parse(data) for k, data in there.items() if k in requests}
        if self.sent == self.step and BAD in requests:
            contents[BAD] = self.false
        self.sent += 1
        return {k: read_replies(content) for k, content in contents.items() if content is not None}


class Recorded:
    """A recipe's sites and server, and the messages of its rounds."""

    def __init__(self, name: str, place: Path) -> None:
        self.name, self.config = name, adapt_recipe("default", [*WORDS, *RECIPES[name]])
        self.grid = self._connect(place)
        self.hello = {k: self._greet(11 + k) for k in range(len(SITES))}
        sites = [_read_introduction(content, 10**6) for content in self.hello.values()]
        assert all(isinstance(site, Introduction) for site in sites), sites
        self.experiment: Experiment = build_server_experiment(self.config, sites)  # type: ignore
        engine = self.experiment.engine
        assert isinstance(engine, RemoteEngine)
        self.engine = engine
        self.asked: list[Asked] = []
        self._record(place / name)

    def _connect(self, place: Path) -> Any:
        recipe = place / "recipe.yaml"
        recipe.write_text(configuration.dump(self.config))
        return Here(
            site_module.client_app(recipe), [{"data": str(place / "data" / name)} for name in SITES]
        )

    def _greet(self, node: int) -> RecordDict:
        return self.deliver(node, f"query.{GREETING}", RecordDict())

    def deliver(self, node: int, kind: str, content: RecordDict) -> RecordDict:
        """Give a message to a site; return its reply, of which Flower sends the bytes."""
        message = Message(content, node, kind)
        message.metadata.__dict__["_message_id"] = "message"
        reply = self.grid.app(message, self.grid.contexts[node])
        again = parse(write(reply.content))
        if again is None:
            raise Finding("a reply that Flower cannot read")
        return again

    def _record(self, out: Path) -> None:
        """Do all rounds, and keep every message."""
        transport = self.engine.transport = GridTransport(self.grid)
        wrapped = {name: getattr(RemoteCohort, name) for name in ("_mean", "_gather")}

        def keep(asked: Message, reply: Message) -> Message:
            client = asked.metadata.dst_node_id - 11
            self.asked[-1].requests[-1][client] = write(asked.content)
            self.asked[-1].replies[-1][client] = write(reply.content)
            return reply

        def record(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(cohort: RemoteCohort, *arguments: Any) -> Any:
                ids = cohort.ids.tolist()
                self.asked.append(Asked(cohort.round, method, arguments, [], [], ids))
                return method(cohort, *arguments)

            return call

        send = transport.send

        def step(requests: Any, timeout: float) -> Any:
            self.asked[-1].requests.append({})
            self.asked[-1].replies.append({})
            return send(requests, timeout)

        self.grid.tamper = keep
        transport.send = step  # type: ignore[method-assign]
        try:
            for name, method in wrapped.items():
                setattr(RemoteCohort, name, record(method))
            for _ in range(self.config.rounds):
                line = loop.run_one_round(self.experiment, out, lambda text: None)
                assert not line["skipped"] and not line["missing"], line
        finally:
            for name, method in wrapped.items():
                setattr(RemoteCohort, name, method)
            self.grid.tamper = None


# Attacks -----------------------------------------------------------------------------------------


def attack_site(recorded: Recorded, mutator: Mutator, counts: Counter[str]) -> None:
    """Go through a recorded round at one site, with changed messages before each request."""
    chance = mutator.chance
    node, last = 11 + chance.randrange(len(SITES)), recorded.asked[-1].round
    for asked in recorded.asked:
        for requests in asked.requests if asked.round == last else ():
            data = requests[node - 11]
            kind = f"train.{parse_task(data)}"
            for _ in range(4):
                false = mutator.mutate(data)
                other = chance.choice(recorded.asked)  # a request under another task's name
                name = (
                    kind if chance.random() < 0.9 else f"train.{parse_task(other.requests[0][0])}"
                )
                counts[describe_answer(recorded, node, name, false)] += 1
    counts["true requests"] += 1
    if recorded.name == "dcco":  # no state that a request could change
        for asked in (each for each in recorded.asked if each.round == last):
            content, there = parse(asked.requests[0][node - 11]), asked.replies[0][node - 11]
            assert content is not None
            task = f"train.{parse_task(asked.requests[0][node - 11])}"
            if write(recorded.deliver(node, task, content)) != there:
                raise Finding(f"{task}: the true request has another answer than before")


def parse_task(data: bytes) -> str:
    """Return the task of a true request."""
    content = parse(data)
    assert content is not None
    return str(content.config_records["request"]["task"])


def describe_answer(recorded: Recorded, node: int, kind: str, false: RecordDict | None) -> str:
    """Give a site a changed request, and return how it answers."""
    if false is None:
        return "not readable for Flower"
    content = recorded.deliver(node, kind, false)
    faults = [str(text) for text in content.config_records["faults"].values()]
    if any("/" in text and str(Path.cwd()) in text for text in faults):
        raise Finding(f"a fault names a path: {faults}")
    if not faults:
        return "answered by the site"
    if all(text.startswith("refused: ") for text in faults):
        return "refused by the site"
    return f"{faults[0].replace('failed: ', 'failed at the site, ')}"


def attack_server(recorded: Recorded, mutator: Mutator, counts: Counter[str]) -> None:
    """Give the server a changed reply of one client in a recorded exchange."""
    chance = mutator.chance
    asked = chance.choice(recorded.asked)
    step = chance.randrange(len(asked.replies))
    false = mutator.mutate(asked.replies[step][BAD])
    if false is None:
        counts["not readable for Flower"] += 1
        return
    engine = recorded.engine
    engine.transport = Replay(asked, step, false)
    cohort = RemoteCohort(engine, np.array(asked.ids), asked.round)
    try:
        result = asked.method(cohort, *asked.arguments)
    except TooFewReplies as error:
        if recorded.name != "secure":  # a client may spoil a secure sum
            raise Finding(f"one client ended the round: {error}") from None
        counts["secure sums spoiled"] += 1
        return
    others = cohort.faults.keys() - {BAD}
    if others:
        raise Finding(f"others are blamed: {cohort.faults}")
    for leaf in leaves(result):  # single numbers for the log need not be known
        if leaf.ndim and not bool(torch.isfinite(leaf).all()):
            raise Finding("numbers that are not finite in a result")
    counts["refused by the server" if BAD in cohort.faults else "taken by the server"] += 1


def attack_greetings(recorded: Recorded, mutator: Mutator, counts: Counter[str]) -> None:
    """Give the server a changed introduction, and a site a changed question."""
    if mutator.chance.random() < 0.7:
        content = recorded.hello[BAD]
        facts = content.config_records[GREETING]
        if mutator.chance.random() < 0.5:  # what the JSON says
            told = json.loads(str(facts["facts"]))
            name = mutator.chance.choice([*told, "more"])
            told[name] = mutator.chance.choice([v for v in VALUES if not isinstance(v, bytes)][:20])
            new = RecordDict({GREETING: ConfigRecord({**facts, "facts": json.dumps(told)})})
            false = parse(write(new))
        else:
            false = mutator.mutate(write(content))
        if false is None:
            counts["not readable for Flower"] += 1
            return
        site = _read_introduction(false, 10**6)
        counts["greetings refused" if isinstance(site, str) else "greetings taken"] += 1
        if isinstance(site, str) and len(site) > 1000:
            raise Finding("a refusal without an end")
    else:
        question = RecordDict({GREETING: ConfigRecord({"x": 1})})
        recorded.deliver(11, f"query.{GREETING}", mutator.mutate(write(question)) or RecordDict())
        counts["questions answered"] += 1


@contextlib.contextmanager
def watch(place: Path) -> Iterator[None]:
    """Stop at what no message may do: run code, start processes, connect, write elsewhere."""
    forbidden = {
        *("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen"),
        *("socket.connect", "pickle.find_class", "ctypes.dlopen"),
    }
    changes = {
        "os.rename",
        "os.remove",
        "os.rmdir",
        "os.mkdir",
        "os.link",
        "os.symlink",
        "os.chmod",
    }
    active, inside = True, str(place)

    def is_elsewhere(path: object) -> bool:
        return (
            isinstance(path, str)
            and path.startswith("/")
            and not path.startswith((inside, "/dev/null", "/proc"))
        )

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if not active:
            return
        bad = event in forbidden
        if event == "open" and arguments[1] is not None:
            bad = bool(set(arguments[1]) & set("wax+")) and is_elsewhere(arguments[0])
        elif event in changes:
            bad = is_elsewhere(arguments[0])
        elif event == "compile":
            bad = SENTINEL in str(arguments[0])
        if bad:
            seen.append(f"{event} {str(arguments)[:200]}")

    seen: list[str] = []
    sys.addaudithook(hear)  # stays, so it must become deaf
    try:
        yield
        if seen:
            raise Finding(f"a message did: {seen[0]}")
    finally:
        active = False


def attack(count: int, seed: int, place: Path) -> Counter[str]:
    """Send ``count`` messages in all."""
    make_images(place / "data")
    # A site's process has one recipe; here are many, which would be loaded again and again.
    site_module.load_experiment = functools.cache(site_module.load_experiment.__wrapped__)
    recipes = [Recorded(name, place) for name in RECIPES]
    mutator, counts = Mutator(random.Random(seed)), Counter[str]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with watch(place):
        while (done := counts.total() - counts["true requests"]) < count:
            faulthandler.dump_traceback_later(HANG, exit=True)
            recorded = mutator.chance.choice(recipes)
            draw = mutator.chance.random()
            attacked = (
                attack_site if draw < 0.15 else attack_server if draw < 0.9 else attack_greetings
            )
            started = time.process_time()
            try:
                attacked(recorded, mutator, counts)
            except Exception as error:
                where = f"{attacked.__name__}, {recorded.name}, after {done} messages"
                raise Finding(f"{where}: {type(error).__name__}: {error}") from error
            if time.process_time() - started > LONGEST:
                raise Finding(f"{attacked.__name__}, {recorded.name}: takes too long")
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            if grown > MOST_GROWTH:
                raise Finding(f"{attacked.__name__}, {recorded.name}: {grown} bytes more memory")
    faulthandler.cancel_dump_traceback_later()
    if Path(SENTINEL).exists():
        raise Finding("a message's code was executed")
    return counts


def make_images(root: Path) -> None:
    """Write small images of noise for each site."""
    draw = np.random.default_rng(0)
    for name, count in SITES.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = draw.integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=2000, help="changed messages")
    parser.add_argument("--seed", type=int, default=0, help="of the changes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="messages-") as folder:
        place = Path(folder).resolve()
        os.environ |= {"FEDSSL_STATE": str(place / "state"), "FEDSSL_CACHE": str(place / "cache")}
        os.chdir(place)
        try:
            with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
                counts = attack(options.count, options.seed, place)
        except Finding as finding:
            raise SystemExit(f"messages, seed {options.seed}: {finding}") from finding
    done = counts.total() - counts["true requests"]
    listed = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
    minutes = (time.monotonic() - started) / 60
    print(f"{done} changed messages, no finding: {listed} ({minutes:.1f} min)")


if __name__ == "__main__":
    main()
