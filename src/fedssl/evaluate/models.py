"""The models that a run has trained: global ones, and clients' personal ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, cast

from torch import Tensor

from fedssl.data.random import choose, key
from fedssl.engines.base import Engine
from fedssl.federation.server import Server
from fedssl.util.trees import Tree, mean, unflatten


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
        self.best: Tensor | None = None  # weights to take in place of the global model's last ones

    @property
    def result(self) -> Literal["global", "personal"]:
        """The models that are the run's result."""
        return "global" if self.of_sites else self.algorithm.result.evaluated

    @property
    def has_personal(self) -> bool:
        """True if clients have personal models."""
        return self.algorithm.result.evaluated == "personal" or self.kept is not None

    @property
    def has_mean_norms(self) -> bool:
        """True if the global model's normalization layers are a mean over clients."""
        return self.kept is not None and self.algorithm.result.has_global

    def server_model(self, client: int) -> Tensor:
        """Return the server's model that a client trains."""
        return self.algorithm.server_model(self.server, self._state(client))

    def global_model(self, model: Tensor | None = None) -> Tensor:
        """Return a model of the server; local layers are the mean over the clients that train it.

        Without a ``model`` it is the global one.
        """
        if model is None:
            model = self.server.weights if self.best is None else self.best
        if self.kept is None:
            return model
        states, norms = self.engine.states, []
        for client in sorted(states):
            state = states.on_host(client)
            if "norm" in state and self.server_model(client) is model:
                uniform = self.algorithm.weight == "uniform"
                norms.append((1.0 if uniform else float(state["samples"]), state["norm"]))
        model = model.clone()
        if norms:
            model[self.kept] = cast(Tensor, mean(norms)[0]).to(model)
        return model

    def personal_model(self, client: int) -> Tensor | None:
        """Return a client's model: the algorithm's, or the server's with the client's norms."""
        return self.algorithm.personal_weights(self.server, self._state(client))

    def peer_models(self) -> Iterator[Tensor]:
        """Return each peer's model, with the normalization layers that stay with it."""
        shared = self.server.shared
        for client, sent in enumerate(self.algorithm.result.peers(self.server)):
            model = sent
            if shared is not None and self.kept is not None:
                model = self.server.weights.index_copy(0, shared, sent)
                if (norm := self._state(client).get("norm")) is not None:
                    model[self.kept] = cast(Tensor, norm).to(model)
            yield model

    def _state(self, client: int) -> dict[str, Tree]:
        return unflatten(self.engine.states.on_host(client))

    def personal_models(self, most: int) -> dict[int, Tensor]:
        """Return the models of up to ``most`` clients, drawn at random by the seed."""
        ids = sorted(self.engine.states)
        if not self.has_personal:
            return {}
        models = self._read(self._draw(ids, most))
        if len(models) < min(most, len(ids)):  # only some clients have a model
            with_model = [k for k in ids if self.personal_model(k) is not None]
            models = self._read(self._draw(with_model, most))
        if models or self.result == "global":
            return models
        return {0: self.engine.trainer.initial}

    def list_client_models(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield the personal model of each client, then the algorithm's further ones.

        There may be more than fit into memory.
        """
        for client in sorted(self.engine.states):
            model = self.personal_model(client)
            if model is not None:
                yield "personal", client, model
        yield from self._further_models()

    @property
    def has_further(self) -> bool:
        """True if clients have models besides their personal ones."""
        return any(self._further_models())

    def _further_models(self) -> Iterator[tuple[str, int, Tensor]]:
        for client in sorted(self.engine.states):
            models = self.algorithm.result.further(self.algorithm, self._state(client))
            yield from ((name, client, weights) for name, weights in models.items())

    def _draw(self, ids: Sequence[int], most: int) -> list[int]:
        seed = key(self.engine.trainer.config.seed, "judged")
        return [ids[i] for i in choose(seed, len(ids), most)]

    def _read(self, ids: Sequence[int]) -> dict[int, Tensor]:
        models = {k: self.personal_model(k) for k in ids}
        return {k: weights for k, weights in models.items() if weights is not None}
