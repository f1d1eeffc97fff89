"""Answer requests where the clients' data is. Only replies leave."""

from __future__ import annotations

import shutil
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch import Tensor

from fedssl.engines.base import Engine
from fedssl.engines.remote.codec import MalformedError, pack, unpack_flat
from fedssl.engines.remote.disk_states import DiskStates
from fedssl.engines.remote.messages import Reply, Request, half_precision_leaves
from fedssl.engines.remote.payload import read_arguments
from fedssl.engines.remote.secure_site import IDENTITY, NodeKeys, SecureSums
from fedssl.engines.remote.site_budget import find_budget
from fedssl.federation.aggregate import count_samples
from fedssl.federation.client import Client
from fedssl.federation.server import learning_rates
from fedssl.federation.task import ClientTask
from fedssl.util.errors import UserError
from fedssl.util.files import load_tensors, save_tensors
from fedssl.util.text import escape
from fedssl.util.trees import Tree, unflatten


class Site:
    """The clients whose data is here: one at a real site, any of the partition in a simulation."""

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        place: str = "0",
        is_real: bool = False,
        keys: NodeKeys | None = None,
    ) -> None:
        self.engine = engine  # that of this process: its data, network and algorithm
        self.config = engine.trainer.config
        self.store = DiskStates(folder)
        self.received = folder / f"received-{place}"
        self.keys = keys or NodeKeys()
        self.is_real = is_real  # all data here is one client's, whatever number the server gave it
        self.half = half_precision_leaves(self.config)
        # A simulation's clients are counted where their server is.
        self.budget = find_budget(engine, folder.parent) if is_real else None

    def answer(self, request: Request) -> dict[int, Reply]:
        """Return each client's reply. A client that fails costs only its own reply."""
        try:
            self._check_request(request)
            if self.budget is not None and request.weight is not None:
                self.budget.count(request)
            payload = self._collect_payload(request)
        except Exception as error:
            fault = describe_fault(error, self.is_real)
            return {client: Reply(fault=fault) for client in request.clients}
        return {client: self._answer_one(client, request, payload) for client in request.clients}

    def _check_request(self, request: Request) -> None:
        """Refuse everything but the tasks that the algorithm declares, in the declared way."""
        privacy, task = self.config.privacy, request.task
        if (request.secure is not None) != privacy.secure:
            how = "in secure sums" if privacy.secure else "without secure sums"
            raise MalformedError(f"task {task}: this site answers only {how}")
        if self.is_real and len(request.clients) != 1:
            asked = len(request.clients)
            raise MalformedError(f"task {task}: this site is one client, not {asked}")
        averaged, weight = request.weight is not None, self.engine.algorithm.weight
        allowed = [each.name for each in self._tasks() if (each.seen == "mean") == averaged]
        if task not in allowed:
            listed = ", ".join(allowed) or "nothing"
            raise MalformedError(f"task {task}: this site answers only {listed}")
        if averaged and request.weight != weight:
            raise MalformedError(f"task {task}: clients weigh by {weight}, not {request.weight}")

    def _tasks(self) -> Iterator[ClientTask]:
        """Yield the declared tasks, without those whose numbers must not leave."""
        for task in self.engine.algorithm.asked(self.config.privacy.secure):
            hidden = task.is_logged and not self.engine.aggregator.allows_client_logs
            if not hidden and not (task.seen == "simulation" and self.is_real):
                yield task

    def _answer_one(self, client: int, request: Request, payload: dict[str, Tensor]) -> Reply:
        try:
            self._check_samples(client, request)
            if request.secure is not None:
                return self._answer_in_sum(client, request, payload)
            share, reply = self._contribute(client, request, payload)
            return Reply(share, pack(reply, self.half))
        except Exception as error:
            return Reply(fault=describe_fault(error, self.is_real))

    def _check_samples(self, client: int, request: Request) -> None:
        """Refuse if images were added or removed: a secure sum would hide the changed weight."""
        now = int(self.engine.groups.sizes[0 if self.is_real else client])
        before = request.samples.get(client, now)
        if now != before:
            raise UserError(
                f"{now} images, where the run started with {before}",
                fix="Restore the images, or start a new run.",
            )

    def _answer_in_sum(self, client: int, request: Request, payload: dict[str, Tensor]) -> Reply:
        """Answer a step of a secure sum, by this site's own threshold, keys and record."""
        clients = self.config.engine.sites if self.is_real else len(self.engine.groups)
        folder = self.store.folder / "sums" / ("site" if self.is_real else str(client))
        identity = (self.store.folder.parent if self.is_real else folder) / IDENTITY
        sums = SecureSums(folder, self.config, clients or 0, self.keys, identity)
        return sums.answer(
            client, request, payload, lambda: self._contribute(client, request, payload)
        )

    def _contribute(
        self, client: int, request: Request, payload: dict[str, Tensor]
    ) -> tuple[float, Tree]:
        """Run the task; the client's state is stored before anything is returned."""
        engine, ids = self.engine, np.array([client])
        members, sizes = engine.groups.select(ids * 0 if self.is_real else ids)
        device = engine.trainer.device
        flat = self.store.load(client, request.round, request.history)
        # Single numbers stay on the host, as in the local engine.
        state = unflatten({name: t.to(device) if t.ndim else t for name, t in flat.items()})
        _, lr = learning_rates(self.config, request.round)
        one = Client(engine.trainer, members, ids, sizes, request.round, lr, state)
        arguments = read_arguments(payload, request.arguments, client)
        reply = getattr(engine.algorithm, request.task)(one, *arguments)
        if not engine.algorithm.tasks()[request.task].is_logged:
            engine.algorithm.check_state("client", one.state)
            self.store.save(client, one.state, request.round, request.history)
        if request.weight is None:
            return 1.0, reply
        samples = count_samples(request.weight, engine.trainer.batches, one.samples)
        return engine.aggregator.contribute(request.task, samples, reply, request.weight)

    def _collect_payload(self, request: Request) -> dict[str, Tensor]:
        """Return all tensors of the request; those of earlier exchanges were kept on disk."""
        here = unpack_flat(request.payload)
        attempt = request.history.names[-1]
        place = self.received / f"{request.round}-{attempt}"
        for old in self.received.glob("*") if request.exchange == 0 else ():
            if int(old.name.split("-")[0]) <= request.round:  # a later round may be at work
                shutil.rmtree(old, ignore_errors=True)
        if here:
            save_tensors(place / f"{request.exchange}.safetensors", here, {}, can_resume=False)
        for exchange in {number for number, _ in request.known.values()}:
            path = place / f"{exchange}.safetensors"
            before = load_tensors(path) if path.exists() else {}
            for name, (number, there) in request.known.items():
                if number == exchange:
                    if there not in before:
                        raise MalformedError(f"exchange {exchange} brought no {there} here")
                    here[name] = before[there]
        device = self.engine.trainer.device
        return {name: tensor.to(device) for name, tensor in here.items()}


def describe_fault(error: Exception, is_real: bool = True) -> str:
    """Describe an error for the server, and print all of it for the site.

    Only our own errors are described by their text. Of others the server learns the kind, since
    their text may hold data. File names stay at a real site: ``public`` replaces the text.
    """
    if isinstance(error, (UserError, MalformedError)):
        print(f"fedssl: refused: {escape(error)}", file=sys.stderr, flush=True)
        if is_real and isinstance(error, UserError) and error.public is not None:
            return f"refused: {error.public}; the site's log says more"
        return f"refused: {error}"
    for line in "".join(traceback.format_exception(error)).splitlines():
        print(escape(line), file=sys.stderr, flush=True)
    return f"failed: {type(error).__name__}"
