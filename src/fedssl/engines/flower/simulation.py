"""Simulate clients in the worker processes of Flower and Ray."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedssl import config as configuration
from fedssl.engines.base import Engine
from fedssl.engines.flower.apps import build_client_app, build_server_app
from fedssl.engines.flower.messages import read_clients, read_request, write_replies
from fedssl.engines.flower.transport import GridTransport
from fedssl.engines.remote.engine import RemoteEngine
from fedssl.engines.remote.messages import Reply
from fedssl.engines.remote.site import Site, describe_fault
from fedssl.util.errors import UserError

if TYPE_CHECKING:
    from flwr.app import RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid

# Builds the engine of a worker process from the text of the configuration.
BuildEngine = Callable[[str], Engine]


@dataclass(eq=False, repr=False, kw_only=True)
class SimulatedEngine(RemoteEngine):
    """Asks clients that live in ``engine.workers`` processes of this machine, or of a cluster."""

    build: BuildEngine

    def drive(self, work: Callable[[], None]) -> None:
        """Run ``work`` as the server of a simulation."""
        from flwr.simulation import run_simulation

        config, failures = self.trainer.config, list[BaseException]()

        def serve(grid: Grid, run_config: Mapping[str, Any]) -> None:
            try:
                self.transport = GridTransport(grid)
                while len(list(grid.get_node_ids())) < config.engine.workers:
                    time.sleep(0.01)
                work()
            except BaseException as error:  # Flower would print it and go on
                failures.append(error)

        with _start_ray(config.engine.workers), contextlib.redirect_stdout(None):
            run_simulation(
                build_server_app(serve),
                self.client_app(),
                config.engine.workers,
                backend_config=self._resources(),
            )
        self.transport = None
        if failures:
            raise failures[0]

    def client_app(self) -> ClientApp:
        """Build the app in which a node stands for any client of the partition."""
        folder = self.states.folder
        assert folder is not None
        # Only these go to the worker processes.
        text, states, build = configuration.dump(self.trainer.config), folder.absolute(), self.build
        start = Path.cwd()

        def answer(content: RecordDict, node: Mapping[str, Any]) -> RecordDict:
            os.chdir(start)  # a worker may start elsewhere, and paths are relative to the user's
            try:
                request = read_request(content)
                site = Site(build(text), states, str(node["partition-id"]))
                replies = site.answer(request)
            except Exception as error:
                fault = Reply(fault=describe_fault(error, is_real=False))
                replies = dict.fromkeys(read_clients(content), fault)
            return write_replies(replies)

        return build_client_app(self.algorithm.tasks(), answer)

    def _resources(self) -> Any:
        """Give each worker one processor, and its part of the GPUs if clients train on them."""
        import torch

        gpus = torch.cuda.device_count() if self.trainer.device.type == "cuda" else 0
        share = gpus / self.trainer.config.engine.workers
        return {"client_resources": {"num_cpus": 1, "num_gpus": share}}


def _protect_ray() -> None:
    """Keep others away from Ray, which executes what it is sent: a fresh token, and loopback only.

    Ray reads these variables when it is imported, and caches the token.
    """
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on every system, despite its name
    }
    raylet: Any = importlib.import_module("ray._raylet")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
    raylet.Config.initialize("")


@contextlib.contextmanager
def _start_ray(workers: int) -> Iterator[None]:
    """Start Ray before Flower needs it: without it Flower would wait for replies for ever.

    Ray lets everybody write to its folders, so they are in one that is private.
    """
    with contextlib.ExitStack() as stack:
        settings: dict[str, Any] = {}
        if not os.environ.get("RAY_ADDRESS"):  # else a running cluster, with its processors
            _protect_ray()
            # Not below TMPDIR: the paths of sockets are short.
            folder = tempfile.TemporaryDirectory(
                prefix="fedssl-ray-", dir="/tmp", ignore_cleanup_errors=True
            )
            settings = {"num_cpus": workers, "include_dashboard": False}
            settings["_temp_dir"] = str(Path(stack.enter_context(folder)) / "ray")
        import ray

        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        stack.callback(ray.shutdown)
        _connect_ray(workers, settings)
        yield


def _connect_ray(workers: int, settings: dict[str, Any]) -> None:
    import ray

    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **settings)
    except Exception as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"Ray does not start ({line[:200]})",
            key="engine.name",
            value="flower",
            fix="Use engine.name=local, or repair Ray.",
        ) from None
    processors = int(ray.cluster_resources().get("CPU", 0))
    if processors < workers:
        raise UserError(
            f"Ray has {processors} processors",
            key="engine.workers",
            value=workers,
            fix="Lower it, or add machines.",
        )
