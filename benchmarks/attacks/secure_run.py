"""The sites of a made run with secure sums, which the attacks on them ask (``sums.py``)."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl import config as configuration
from fedssl.config import Config
from fedssl.engines.remote.codec import unpack
from fedssl.engines.remote.disk_states import History
from fedssl.engines.remote.messages import Request, SecureStep
from fedssl.engines.remote.payload import hash_arguments
from fedssl.engines.remote.secure_site import NodeKeys, SecureSums, SumRecord
from fedssl.privacy import secure
from fedssl.privacy.checks import smallest_sum
from fedssl.privacy.secure import Masker

RUN, TASK = "0123abcd", "train"
ROUNDS = 8  # of a run, before its sites are made anew
SIZE = 6  # numbers of a reply
MODEL = torch.arange(4.0)
SHARES = (0.51, 0.67, 0.8, 1.0)  # values of privacy.threshold
Vector = NDArray[np.int64]


class Finding(Exception):
    """Something that must not be possible was."""


@functools.cache
def settings(sites: int, threshold: float) -> Config:
    """Return the configuration of a run with secure sums."""
    words = (
        *("engine.name=flower", "privacy.secure=true", f"privacy.threshold={threshold}"),
        *("algorithm.name=fedavg", f"engine.sites={sites}", f"rounds={ROUNDS}"),
        "cohort.size=null",
    )
    return configuration.resolve(configuration.read_recipe(None), words)


class Run:
    """The sites of a run."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.chance, self.folder = chance, folder
        self.sites, self.round = chance.randint(3, 7), 0
        self.config = settings(self.sites, chance.choice(SHARES))
        self.threshold = smallest_sum(self.config, self.sites)
        self.identities: dict[int, bytes] = {}
        self.sent: dict[tuple[int, int, str], bytes] = {}  # by round, site and step
        self.replies: dict[tuple[int, int, str], Any] = {}
        self.attempts: tuple[str, ...] = (RUN,)

    @property
    def context(self) -> str:
        """The name of the round's sum."""
        return f"{RUN}/{self.round}/{TASK}"

    @property
    def asked(self) -> str:
        """The hash of what an honest server sends."""
        return hash_model(MODEL)

    def restart(self) -> None:
        """Be a server that was started again."""
        self.attempts = (*self.attempts[:1], f"{self.chance.getrandbits(32):08x}")

    def weigh(self, site: int) -> tuple[float, Tensor]:
        """Return a site's weight in a round, and its reply."""
        draw = np.random.default_rng([site, self.round])
        return float(draw.integers(1, 100)), torch.from_numpy(draw.uniform(-1e3, 1e3, SIZE))

    def vector(self, site: int) -> Vector:
        """Return what a site adds to the round's sum."""
        weight, reply = self.weigh(site)
        return secure.encode({"x": reply}, weight, self.sites)

    def ask(self, site: int, step: str, message: Any, model: Tensor = MODEL) -> Any:
        """Return a site's answer, which must be the one that it gave before, if it did."""
        request = Request(
            task=TASK,
            clients=(site,),
            round=self.round,
            exchange=0,
            history=History(self.attempts, tuple(range(len(self.attempts))), 0),
            weight="samples",
            arguments=int(step == "masked"),
            secure=SecureStep(step, {site: message}),
        )
        payload = {"0/.": model} if step == "masked" else {}
        weight, reply = self.weigh(site)
        record = self.folder / str(site)
        sums = SecureSums(record, self.config, self.sites, NodeKeys(), record / "identity")
        answer = sums.answer(site, request, payload, lambda: (weight, {"x": reply}))
        if step == "masked":
            tree = unpack(answer.tensors)
            assert isinstance(tree, dict) and isinstance(tree["masked"], Tensor)
            told: Any = tree["masked"].numpy()
        else:
            told = dict(answer.message)
        place, data = (self.round, site, step), flatten(told)
        if self.sent.setdefault(place, data) != data:
            raise Finding(f"site {site} answered {step} twice, in two ways")
        self.replies[place] = told
        return told

    def masker(self, site: int) -> Masker | None:
        """Return what a site has on its disk about the round's sum."""
        return SumRecord(self.folder / str(site) / f"{self.round}-{TASK}").masker()


def hash_model(model: Tensor) -> str:
    """Return the hash of a request for vectors."""
    return hash_arguments({"0/.": model}, 1, "samples")


def flatten(reply: Any) -> bytes:
    """Return all bytes of a reply."""
    if isinstance(reply, np.ndarray):
        return reply.tobytes()
    return b"|".join(item for name in sorted(reply) for item in reply[name])
