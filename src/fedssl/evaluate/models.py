"""The models that a run has trained: global ones, and clients' personal ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

from torch import Tensor

from fedssl.data.random import choose, key
from fedssl.engines.base import Engine
from fedssl.federation.server import Server
from fedssl.util.trees import mean


class TrainedModels:
    """Read models from the server and from the clients' states.

    ``of_sites``: clients are real sites, which keep their personal models.
    """

    def __init__(self, engine: Engine, server: Server, of_sites: bool = False) -> None:
        self.engine = engine
        self.server = server
        self.algorithm = engine.algorithm
        self.kept = engine.trainer.kept  # places of the layers that stay with clients
        self.of_sites = of_sites

    @property
    def result(self) -> Literal["global", "personal"]:
        """Which models are the result of the run."""
        return "global" if self.of_sites else self.algorithm.judges

    @property
    def has_personal(self) -> bool:
        """Whether clients have models of their own."""
        return self.algorithm.personal is not None or self.kept is not None

    @property
    def has_mean_norms(self) -> bool:
        """Whether the global model's normalization layers are a mean over clients."""
        return self.kept is not None and self.algorithm.has_global

    def number_of(self, client: int) -> int:
        """Return which of the server's models a client trains."""
        path = self.algorithm.personal
        leaf = None if path is None else self.engine.states.get_leaf(client, path)
        return 0 if leaf is None or leaf.ndim else int(leaf)

    def global_model(self, number: int = 0) -> Tensor:
        """Return a global model's weights; local layers are the mean over its clients."""
        states = self.engine.states
        weights = self.algorithm.numbered(self.server, number)
        if self.kept is None:
            return weights
        members = [k for k in sorted(states) if self.number_of(k) == number]
        leaves = ([states.get_leaf(k, (n,)) for n in ("samples", "norm")] for k in members)
        uniform = self.algorithm.weight == "uniform"
        norms = [
            (1.0 if uniform else float(samples), norm)
            for samples, norm in leaves
            if samples is not None and norm is not None
        ]
        weights = weights.clone()
        if norms:
            weights[self.kept] = cast(Tensor, mean(norms)[0]).to(weights)
        return weights

    def personal_model(self, client: int) -> Tensor | None:
        """Return a client's model: the algorithm's, or the server's with the client's norms."""
        states, path = self.engine.states, self.algorithm.personal
        leaf = None if path is None else states.get_leaf(client, path)
        if path is not None and (leaf is None or leaf.ndim):
            return leaf
        weights = self.server.weights
        if leaf is not None:  # the number of one of the server's models
            weights = self.algorithm.numbered(self.server, int(leaf))
        if self.kept is None:
            return None if leaf is None else weights
        norm = states.get_leaf(client, ("norm",))
        return None if norm is None else weights.index_copy(0, self.kept, norm.to(weights))

    def personal_models(self, most: int | None = None) -> dict[int, Tensor]:
        """Return the models of up to ``most`` clients, drawn at random by the seed."""
        ids = sorted(self.engine.states)
        if most is None:
            return self._read(ids)
        if not self.has_personal:
            return {}
        models = self._read(self._draw(ids, most))
        if len(models) < min(most, len(ids)):  # only some clients have a model
            with_model = [k for k in ids if self.personal_model(k) is not None]
            models = self._read(self._draw(with_model, most))
        if models or self.result == "global":
            return models
        return {0: self.engine.trainer.initial}

    def _draw(self, ids: Sequence[int], most: int) -> list[int]:
        seed = key(self.engine.trainer.config.seed, "judged")
        return [ids[i] for i in choose(seed, len(ids), most)]

    def _read(self, ids: Sequence[int]) -> dict[int, Tensor]:
        models = {k: self.personal_model(k) for k in ids}
        return {k: weights for k, weights in models.items() if weights is not None}
