"""Flower: the only module that knows it. Our requests and replies as its messages, and its apps.

Tried with Flower 1.41. Flower is imported when something here is called, never before.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedssl import __version__
from fedssl import config as configuration
from fedssl.config import Config
from fedssl.data.load import load_dataset
from fedssl.deploy import app as deploy
from fedssl.deploy.sites import (
    SENT,
    Introduction,
    introduce,
    read_sites,
    record,
    server_session,
    site_session,
    state_folder,
    write_sites,
)
from fedssl.engines.remote.codec import Malformed, Packed
from fedssl.engines.remote.engine import RemoteEngine
from fedssl.engines.remote.site import Reply, Request, SecureStep, Site, describe
from fedssl.engines.store import History
from fedssl.runs import loggers
from fedssl.runs.checkpoint import LOCK, locked
from fedssl.util.errors import TrainingError, UserError, going_on
from fedssl.util.files import writing

if TYPE_CHECKING:
    from flwr.app import Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

HELLO, FACTS = "hello", "facts"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
LONGEST_PAUSE = 0.5  # seconds between two looks for replies
SPARE = 60.0  # seconds that a message outlives its time-out, so that Flower does not drop it early
LONGEST_GREETING = 120.0  # seconds that a node has to say who it is
ASKED_AGAIN = 30.0  # seconds until a node that could not take part is asked again
_RAW = "fedssl"  # how arrays are written: plain bytes


def quiet() -> None:
    """Nothing is sent or fetched, unless the user turned it on; Flower says only what is wrong."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="flwr")


def require() -> None:
    """Refuse in one line where Flower is not installed."""
    quiet()
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise UserError(
            "engine.name=flower: Flower is not installed; pip install 'fedssl[flower]'"
        ) from None


# Messages ----------------------------------------------------------------------------------------


def write_request(request: Request) -> RecordDict:
    """A request as Flower's records."""
    from flwr.app import ConfigRecord, RecordDict

    facts: dict[str, Any] = {
        "task": request.task,
        "clients": list(request.clients),
        "samples": [request.samples[k] for k in request.clients if k in request.samples],
        "round": request.round,
        "exchange": request.exchange,
        "weight": request.weight or "",
        "arguments": request.arguments,
        "attempts": list(request.history.names),
        "starts": list(request.history.starts),
        "committed": request.history.committed,
    }
    if request.secure is not None:
        step = request.secure
        facts |= {"step": step.step, "context": step.context, "threshold": step.threshold}
    known: dict[str, Any] = {
        name: f"{number} {there}" for name, (number, there) in request.known.items()
    }
    return RecordDict(
        {
            "request": ConfigRecord(facts),
            "known": ConfigRecord(known),
            "secure": _messages(request.secure.messages if request.secure else {}),
            "payload": _arrays(request.payload),
        }
    )


def read_request(content: RecordDict) -> Request:
    """The inverse of :func:`write_request`.

    Names and numbers of a request become names of files: nothing else is let through.
    """
    facts: dict[str, Any] = dict(content.config_records["request"])
    numbers = [*facts["clients"], *facts["starts"], facts["round"], facts["exchange"]]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise Malformed("a request with numbers that are none")
    if not isinstance(facts["task"], str) or not facts["attempts"]:
        raise Malformed("a request without a task or a run")
    if not all(re.fullmatch("[0-9a-f]{8}", str(name)) for name in facts["attempts"]):
        raise Malformed("a request with names that are none of ours")
    known = {}
    for name, text in content.config_records["known"].items():
        number, _, there = str(text).partition(" ")
        known[name] = (int(number), there)
    secure = None
    if "step" in facts:
        messages = _read_messages(content.config_records["secure"])
        secure = SecureStep(facts["step"], facts["context"], facts["threshold"], messages)
    return Request(
        facts["task"],
        tuple(facts["clients"]),
        facts["round"],
        facts["exchange"],
        History(tuple(facts["attempts"]), tuple(facts["starts"]), facts["committed"]),
        facts["weight"] or None,
        facts["arguments"],
        _packed(content.array_records["payload"]),
        known,
        secure,
        dict(zip(facts["clients"], facts["samples"], strict=False)),
    )


def write_replies(replies: Mapping[int, Reply]) -> RecordDict:
    """Replies as Flower's records, the tensors of client 3 as ``3/path``."""
    from flwr.app import ConfigRecord, RecordDict

    tensors = {
        f"{k}/{name}": t for k, reply in replies.items() for name, t in reply.tensors.items()
    }
    shares = {str(k): reply.share for k, reply in replies.items() if reply.fault is None}
    faults = {str(k): reply.fault for k, reply in replies.items() if reply.fault is not None}
    return RecordDict(
        {
            "shares": ConfigRecord(dict(shares)),
            "faults": ConfigRecord(dict(faults)),
            "secure": _messages({k: reply.message for k, reply in replies.items()}),
            "replies": _arrays(tensors),
        }
    )


def read_replies(content: RecordDict) -> dict[int, Reply]:
    """The inverse of :func:`write_replies`; what makes no sense is for the checks to refuse."""
    tensors: dict[int, dict[str, Packed]] = {}
    for name, packed in _packed(content.array_records["replies"]).items():
        client, _, path = name.partition("/")
        tensors.setdefault(int(client), {})[path] = packed
    messages = _read_messages(content.config_records["secure"])
    replies = {
        int(k): Reply(float(share), tensors.get(int(k), {}), None, messages.get(int(k), {}))  # type: ignore[arg-type]
        for k, share in content.config_records["shares"].items()
    }
    faults = content.config_records["faults"].items()
    return {**replies, **{int(k): Reply(fault=str(fault)[:300]) for k, fault in faults}}


def _messages(messages: Mapping[int, Mapping[str, Any]]) -> Any:
    """Messages of a secure sum by client: ``3/keys``."""
    from flwr.app import ConfigRecord

    return ConfigRecord({f"{k}/{n}": v for k, each in messages.items() for n, v in each.items()})


def _read_messages(record: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    messages: dict[int, dict[str, Any]] = {}
    for name, value in record.items():
        client, _, path = name.partition("/")
        messages.setdefault(int(client), {})[path] = value
    return messages


def _arrays(packed: Mapping[str, Packed]) -> Any:
    from flwr.app import Array, ArrayRecord

    return ArrayRecord({n: Array(p.dtype, p.shape, _RAW, p.data) for n, p in packed.items()})


def _packed(record: Any) -> dict[str, Packed]:
    return {n: Packed(a.dtype, tuple(a.shape), a.data) for n, a in record.items()}


class Mail:
    """Sends requests through Flower's grid to nodes that each can be any client (a simulation)."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def place(self, clients: list[int]) -> dict[int, int]:
        """Clients are dealt to the nodes in turn."""
        nodes = sorted(self.grid.get_node_ids())
        return {client: nodes[client % len(nodes)] for client in clients} if nodes else {}

    def send(
        self, requests: Mapping[int, Request], timeout: float
    ) -> dict[int, dict[int, Reply] | str]:
        """One message a node, named after its task."""
        contents = {node: write_request(request) for node, request in requests.items()}
        named = {node: request.task for node, request in requests.items()}
        return {
            node: text if isinstance(text, str) else _read(text)
            for node, text in self.exchange(contents, named, "train", timeout).items()
        }

    def exchange(
        self,
        contents: Mapping[int, RecordDict],
        named: Mapping[int, str],
        kind: str,
        timeout: float,
    ) -> dict[int, RecordDict | str]:
        """Content for some nodes, and theirs back, or why there is none.

        Flower's own ``send_and_receive`` looks for replies every three seconds, and the error of a
        node that has gone does not say which: replies are matched by the message that they answer.
        """
        from flwr.app import Message

        got: dict[int, RecordDict | str] = {}
        waiting: dict[str, int] = {}
        for node, content in contents.items():
            message = Message(content, node, f"{kind}.{named[node]}", ttl=timeout + SPARE)
            sent = [number for number in _tried(self.grid.push_messages, [message]) if number]
            if sent:
                waiting[sent[0]] = node
            else:
                got[node] = "could not be sent"
        end, pause = time.monotonic() + timeout, 0.01
        while waiting and time.monotonic() < end:
            replies = self._pull(list(waiting))
            for reply in replies:
                number = reply.metadata.reply_to_message_id
                if number in waiting:
                    said = reply.content if reply.has_content() else _reason(reply)
                    got[waiting.pop(number)] = said
            if waiting:
                pause = 0.01 if replies else min(1.3 * pause, LONGEST_PAUSE)
                time.sleep(pause)
        return got

    def _pull(self, numbers: list[str]) -> list[Message]:
        """What has come; one by one if that fails, since one bad reply must not hide the others."""
        try:
            return list(self.grid.pull_messages(numbers))
        except Exception:
            return [reply for n in numbers for reply in _tried(self.grid.pull_messages, [n])]


def _tried(ask: Callable[[list[Any]], Iterable[Any]], what: list[Any]) -> list[Any]:
    """What the SuperLink says; nothing, where it fails.

    Its SQLite database is locked while a large message is written, and after five seconds it
    answers others with an error: that must not end the run.
    """
    try:
        return list(ask(what))
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        print(f"fedssl: the SuperLink failed: {line[:200]}", file=sys.stderr, flush=True)
        return []


def _reason(reply: Message) -> str:
    lines = (reply.error.reason or "").strip().splitlines() or [""]
    return f"Flower's error {reply.error.code}: {lines[-1][:200]}"


def _read(content: RecordDict) -> dict[int, Reply] | str:
    try:
        return read_replies(content)
    except (KeyError, ValueError, TypeError) as error:
        return f"a message that is none of ours ({type(error).__name__})"


# The client's app --------------------------------------------------------------------------------


def client_app(recipe: Path | str, states: Path | None = None) -> ClientApp:
    """Flower's client app of a recipe (a file, or its text).

    On a real site all that is configured is where its images are (``--node-config data=…``); in a
    simulation, with ``states``, a node is any client of the partition.
    """
    require()
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    text = recipe.read_text(encoding="utf-8") if isinstance(recipe, Path) else recipe
    here = Path.cwd()
    app = ClientApp()

    def work(message: Message, context: Context) -> Message:
        if states is not None:
            os.chdir(here)  # a worker may start elsewhere, and paths are relative to the user's
        asked: dict[str, Any] = {}

        def fault(error: Exception) -> RecordDict:
            said = Reply(fault=describe(error, states is None))
            return write_replies(dict.fromkeys(_clients(message.content), said))

        try:
            request = read_request(message.content)
            asked = _about(request)
            content = write_replies(_site(text, states, context, request).answer(request))
        except Exception as error:
            content = fault(error)
        if states is None:
            content = _recorded(content, context, asked, fault)
        return Message(content, reply_to=message)

    def hello(message: Message, context: Context) -> Message:
        content = _recorded(_introduce(text, context), context, {"task": HELLO}, _cannot)
        return Message(content, reply_to=message)

    for task in _tasks(text):
        app.train(task)(work)
    app.query(HELLO)(hello)
    return app


def _tasks(text: str) -> tuple[str, ...]:
    """What a site is asked for; nothing, where it cannot read the recipe, as its hello says."""
    try:
        algorithm = configuration.variant("algorithm", _config(text).algorithm.name)
    except Exception:  # Flower would send its text, and there would be no record of it
        return ()
    return (*algorithm.means, *algorithm.gathers, *algorithm.logs)


def _site(text: str, states: Path | None, context: Context, request: Request) -> Site:
    if states is not None:
        place = str(context.node_config.get("partition-id", context.node_id))
        return Site(_session(text, None), states, place)
    data = _data(context)
    # A run keeps the name of its first attempt, however often its server is started again.
    folder = state_folder(data) / request.history.names[0]
    return Site(_session(text, data), folder, alone=True)


def _data(context: Context) -> str:
    return str(context.node_config.get("data", ""))


def _introduce(text: str, context: Context) -> RecordDict:
    """A site's answer to the server's first question."""
    try:
        data = _data(context)
        facts = json.dumps(asdict(introduce(_session(text, data), data)))
    except Exception as error:
        return _cannot(error)
    return _greeting(FACTS, facts)


def _cannot(error: Exception) -> RecordDict:
    return _greeting("fault", describe(error))


def _greeting(what: str, text: str) -> RecordDict:
    """With the version, which may be why something is wrong."""
    from flwr.app import ConfigRecord, RecordDict

    return RecordDict({HELLO: ConfigRecord({"version": __version__, what: text})})


def _clients(content: RecordDict) -> list[int]:
    """For whom something is asked, whatever else is wrong with the request."""
    facts: Mapping[str, Any] = content.config_records.get("request") or {}
    given = facts.get("clients")
    return [k for k in given if type(k) is int] if isinstance(given, list) else []


def _about(request: Request) -> dict[str, Any]:
    """What was asked for, as the site's record has it; rounds as in the server's metrics."""
    step = {} if request.secure is None else {"step": request.secure.step}
    run = request.history.names[0]
    return {"run": run, "round": request.round + 1, "task": request.task, **step}


def _recorded(
    content: RecordDict,
    context: Context,
    asked: Mapping[str, Any],
    fault: Callable[[Exception], RecordDict],
) -> RecordDict:
    """A message's content, now that the site's own record has it.

    What has no line is not sent, but for a fault: that it has none, or that no folder was given.
    """
    if not _data(context):
        return content
    try:
        record(_data(context), {**asked, **_listed(content)})
    except Exception as error:  # Flower would send its text, which may tell of the site
        why = error.strerror if isinstance(error, OSError) else type(error).__name__
        text = f"cannot be written ({why})"
        return fault(UserError(f"{SENT}: {text}", f"the site's record {text}"))
    return content


def _listed(content: RecordDict) -> dict[str, Any]:
    """All that a message holds: numbers and words as they are, of arrays and keys their size.

    The bytes are those of arrays, keys and words, as the message has them.
    """
    held: dict[str, Any] = {}
    total = 0
    for group, arrays in content.array_records.items():
        for name, array in arrays.items():
            total += len(array.data)
            held[f"{group}/{name}"] = f"{array.dtype}{list(array.shape)}"
    for group, values in content.config_records.items():
        for name, value in values.items():
            parts = value if isinstance(value, list) else [value]
            secret = [len(part) for part in parts if isinstance(part, bytes)]
            total += sum(secret) + (len(value.encode()) if isinstance(value, str) else 0)
            held[f"{group}/{name}"] = f"{sum(secret)} bytes" if secret else value
    if facts := held.pop(f"{HELLO}/{FACTS}", None):  # by name, as everything else
        held |= {f"{HELLO}/{name}": value for name, value in json.loads(facts).items()}
    return {"bytes": total, "sent": held}


@functools.lru_cache(maxsize=1)
def _session(text: str, data: str | None) -> Any:
    """Network and data, once a process."""
    from fedssl.runs.build import build_experiment

    return build_experiment(_config(text)) if data is None else site_session(_config(text), data)


@functools.lru_cache(maxsize=1)
def _config(text: str) -> Config:
    import yaml

    return configuration.build(yaml.safe_load(text))


# Simulation --------------------------------------------------------------------------------------


def simulate(engine: RemoteEngine, work: Callable[[], None]) -> None:
    """Do ``work`` as the server of Flower's simulation, with ``engine.workers`` processes."""
    require()
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    settings, folder = engine.trainer.config, engine.states.folder
    assert folder is not None
    app = client_app(configuration.dump(settings), folder.absolute())
    server, failed = ServerApp(), []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            engine.transport = Mail(grid)
            while len(list(grid.get_node_ids())) < settings.engine.workers:
                time.sleep(0.01)
            work()
        except BaseException as error:  # Flower would print it and go on
            failed.append(error)

    _start_ray(engine)
    with contextlib.redirect_stdout(None):
        run_simulation(server, app, settings.engine.workers, backend_config=_backend(engine))
    engine.transport = None
    if failed:
        raise failed[0]


def _start_ray(engine: RemoteEngine) -> None:
    """Ray, before Flower needs it: without it Flower would wait for replies for ever."""
    import ray

    workers = engine.trainer.config.engine.workers
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    # RAY_ADDRESS: a cluster that is there already, with processors of its own.
    own: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False}
    if os.environ.get("RAY_ADDRESS"):
        own = {}
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **own)
    except Exception as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"engine.name=flower: Ray does not start ({line[:200]})") from None
    have = int(ray.cluster_resources().get("CPU", 0))
    if have < workers:
        ray.shutdown()
        raise UserError(
            f"engine.workers={workers}: Ray has {have} processors; lower it, or add machines"
        )


def _backend(engine: RemoteEngine) -> Any:
    """One processor for each worker, and its part of the GPUs where clients train on them."""
    import torch

    gpus = torch.cuda.device_count() if engine.trainer.device.type == "cuda" else 0
    share = gpus / engine.trainer.config.engine.workers
    return {"client_resources": {"num_cpus": 1, "num_gpus": share}}


# Deployment --------------------------------------------------------------------------------------


class SiteMail(Mail):
    """Sends requests to real sites: each is one client, wherever its node is now."""

    def __init__(self, grid: Grid, sites: list[Introduction] | None = None) -> None:
        super().__init__(grid)
        self.sites = sites or []
        self.met: dict[int, Introduction] = {}  # node → who is there
        self.failed: dict[int, tuple[float, str]] = {}  # node → when it was asked in vain, and why
        self.idle: set[str] = set()  # who came and was not needed

    def place(self, clients: list[int]) -> dict[int, int]:
        """The nodes of the sites that are connected; a site that restarted has a new one."""
        self.meet()
        nodes = {site.site: node for node, site in self.met.items()}
        for site in self.met.values():
            if site.site not in {*self.idle, *(own.site for own in self.sites)}:
                self.idle.add(site.site)
                _say(self._idle(site))
        ids = {k: self.sites[k].site for k in clients}
        return {k: nodes[site] for k, site in ids.items() if site in nodes}

    def _idle(self, site: Introduction) -> str:
        """Why a site is here and not asked: a run's sites are those that it started with."""
        line = f"site {site.name} has nothing to do: the run has its {len(self.sites)} sites"
        if site.name not in {own.name for own in self.sites}:
            return line
        return (
            f"{line}, and their {site.name} is another; if it is the same, its FEDSSL_STATE is new "
            "or its folder was moved: bring that back, or start a new run"
        )

    def meet(self, timeout: float = LONGEST_GREETING) -> None:
        """Ask nodes that are new who they are, and forget those that are gone.

        One that did not answer, or cannot take part, is asked again after a while: others are not
        to wait for it in every exchange.
        """
        nodes, now = set(self.grid.get_node_ids()), time.monotonic()
        self.met = {node: site for node, site in self.met.items() if node in nodes}
        recent = {n for n, (when, _) in self.failed.items() if now - when < ASKED_AGAIN}
        new = nodes - self.met.keys() - recent
        got = self._greet(new, timeout)
        for node in sorted(new):
            found = _introduction(got.get(node, "no answer"))
            if isinstance(found, Introduction):
                self.met[node] = found
                self.failed.pop(node, None)
                continue
            if self.failed.get(node, (0.0, ""))[1] != found:  # said once
                print(f"fedssl: node {node} cannot take part: {found}", file=sys.stderr, flush=True)
            self.failed[node] = (time.monotonic(), found)

    def _greet(self, nodes: set[int], timeout: float) -> dict[int, RecordDict | str]:
        from flwr.app import ConfigRecord, RecordDict

        if not nodes:
            return {}
        contents = {node: RecordDict({HELLO: ConfigRecord({})}) for node in nodes}
        return self.exchange(contents, dict.fromkeys(nodes, HELLO), "query", timeout)

    def wait(self, count: int, timeout: float, known: set[str] | None = None) -> list[Introduction]:
        """The first ``count`` sites (of those that are ``known``), in the order of their names."""
        end = time.monotonic() + timeout
        while True:
            self.meet(max(1.0, min(LONGEST_GREETING, end - time.monotonic())))
            met = [site for site in self.met.values() if known is None or site.site in known]
            found = {site.site: site for site in met}
            if len(found) >= count:
                return sorted(found.values(), key=lambda site: (site.name, site.site))[:count]
            if time.monotonic() > end:
                names = ", ".join(sorted(site.name for site in found.values())) or "none"
                twice = len(met) - len(found)
                raise UserError(
                    f"{len(found)} of {count} sites came within engine.timeout={timeout:g} seconds "
                    f"({names}"
                    + (f"; {twice} more with the same folder on the same machine" if twice else "")
                    + f"); {self._remedy(count - len(found))}, then run again"
                )
            time.sleep(1.0)

    def _remedy(self, lacking: int) -> str:
        """What brings the sites that are lacking: to start more is no help if all are there."""
        nodes = set(self.grid.get_node_ids())
        refused = [node for node in self.failed if node in nodes]
        if len(refused) < lacking:
            return "start the others"
        return f"{len(refused)} cannot take part, as said above; mend that"


def _introduction(content: RecordDict | str) -> Introduction | str:
    """What a node said of itself, or why it cannot take part."""
    if isinstance(content, str):
        return content
    try:
        facts = content.config_records[HELLO]
        version = str(facts.get("version", "of an older version"))[:40]
        if version != __version__:
            return f"has fedssl {version}, the server {__version__}: install the same"
        if "fault" in facts:
            return str(facts["fault"])[:300]
        known = json.loads(str(facts[FACTS]))
        return Introduction(
            **{**known, "channels": tuple(known["channels"]), "classes": tuple(known["classes"])}
        )
    except Exception as error:  # whatever a stranger may say
        return f"a message that is none of ours ({type(error).__name__})"


def server_app(recipe: Path) -> ServerApp:
    """Flower's server app of a recipe; its run-config says where the run's folder is (``out``)."""
    require()
    from flwr.serverapp import ServerApp

    from fedssl.runs.run import Interrupted

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        out, resume = Path(str(context.run_config["out"])), context.run_config["resume"]
        try:
            if not isinstance(resume, bool):
                raise UserError(f"resume={json.dumps(resume)}: must be true or false, unquoted")
            with going_on("continue with --run-config 'resume=true'"):
                serve(grid, _config(recipe.read_text(encoding="utf-8")), out, resume)
        except Interrupted:
            _say(f"stopped, with a checkpoint in {out}; go on with --run-config 'resume=true'")
            raise
        except (UserError, TrainingError) as error:
            _say(error)
            raise

    return app


def _say(line: object) -> None:
    """Before Flower shows where it was raised."""
    print(f"fedssl: {line}", file=sys.stderr, flush=True)


def serve(grid: Grid, settings: Config, out: Path, resume: bool) -> dict[str, Any]:
    """A whole run with real sites."""
    from fedssl import report

    with alone(out, resume):
        summary = _serve(grid, settings, out, resume)
    report.write_page_or_warn(out)
    return summary


@contextlib.contextmanager
def alone(out: Path, resume: bool) -> Iterator[None]:
    """The run's folder for one server at a time, however the one before ended."""
    started = (out / "config.yaml").exists()
    if started and not resume:
        raise UserError(
            f"out={out}: holds a run; continue it with --run-config 'resume=true', or name another "
            "folder with --run-config 'out=\"/another/folder\"'"
        )
    if resume and not started:
        raise UserError(f"resume=true: {out} holds no run; leave it out")
    hint = "wait for its end, or end it with flwr stop, or kill the process"
    with locked(out / LOCK, f"out={out}", hint):
        yield


def _serve(grid: Grid, settings: Config, out: Path, resume: bool) -> dict[str, Any]:
    from fedssl.runs.run import carry_out, check_folder

    kept, own = deploy.keep(settings, out)
    if resume:
        with writing(f"out={out}"):
            deploy.bring_back(out, own)
    check_folder(kept, out, resume)
    # What would only be refused when the sites have come, or the run's folder is made.
    deploy.check_init(settings)
    loggers.require(settings)
    data = settings.data
    deploy.check_public(settings, None if data.root is None else load_dataset(data, settings.seed))
    mail, wait = SiteMail(grid), settings.engine.timeout
    if resume:
        mail.sites = read_sites(out)
        mail.wait(settings.cohort.minimum, wait, {site.site for site in mail.sites})
    else:
        assert settings.engine.sites is not None
        mail.sites = mail.wait(settings.engine.sites, wait)
        write_sites(out, mail.sites)
    session = server_session(settings, mail.sites)
    assert isinstance(session.engine, RemoteEngine)
    session.engine.transport = mail
    with writing(f"out={out}"):
        deploy.bring_back(out, own)
    return carry_out(session, kept, out, resume)
