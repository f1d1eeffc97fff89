"""A network that fedssl did not write, as an encoder: a user's own module, or one of timm's."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedssl.config import plugins
from fedssl.data.random import key
from fedssl.models.inputs import Input
from fedssl.models.norms import BatchNorm, replace_batch_norms
from fedssl.util.errors import UserError


class Wrapped(nn.Module):
    """A network whose state has the network's own names, counters of batch norm included."""

    body: nn.Module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the network's state, with batch norm's counters, which nothing reads."""
        state = self.body.state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        for name, module in self.body.named_modules():
            if isinstance(module, BatchNorm):
                state[f"{prefix}{name}.num_batches_tracked"] = torch.tensor(0)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the network's state; batch norm's counters may be missing."""
        result = self.body.load_state_dict(state_dict, False, assign)
        wrong = [key for keys in result for key in keys if not key.endswith("num_batches_tracked")]
        if strict and wrong:
            raise RuntimeError(f"missing or unexpected weights {', '.join(wrong)}")
        return result

    def encode_zeros(self, channels: int, size: int) -> Tensor:
        """Return the features of an image: other people's networks have no common name for it."""
        try:
            with torch.no_grad():
                return self.body.eval()(torch.zeros(1, channels, size, size))
        finally:
            self.body.train()


class OwnEncoder(Wrapped):
    """A user's module (``encoder.name=FILE.py:NAME``, or ``fedssl.train(encoder=module)``).

    ``NAME`` is a module, or a class or function that makes one. Arguments called ``channels`` and
    ``size`` receive those of the images. Training starts from the weights that the module has.
    """

    def __init__(self, name: str, size: int, seed: int, input: Input) -> None:
        super().__init__()
        self.name = name
        self.input = input
        given = plugins.find_object("encoder.name", name)
        self.body = self._make(given, seed, channels=input.channels, size=size).cpu().float()
        replace_batch_norms(self.body)
        self.features = self._count_features(input.channels, size)

    def _make(self, given: Any, seed: int, **shape: int) -> nn.Module:
        """Copy a module, or call what makes one, with torch's generator seeded by ``seed``."""
        if isinstance(given, nn.Module):
            return copy.deepcopy(given)
        place = ("encoder.name", self.name)
        with torch.random.fork_rng(devices=[]), plugins.translate_errors(place):
            torch.default_generator.manual_seed(key(seed, "init") % 2**63)
            takes = inspect.signature(given).parameters
            made = given(**{name: value for name, value in shape.items() if name in takes})
        if not isinstance(made, nn.Module):
            raise self._error(f"made {type(made).__name__}", "Return a torch.nn.Module.")
        return made

    def _count_features(self, channels: int, size: int) -> int:
        shape = f"images of {channels} × {size} × {size} (channels, height, width)"
        try:
            features = self.encode_zeros(channels, size)
        except Exception as error:
            problem = f"cannot encode {shape}: {type(error).__name__}: {error}"
            fix = "Change the module, or data.size."
            raise self._error(" ".join(problem.split()), fix) from error
        if not isinstance(features, Tensor) or features.ndim != 2:
            kind = tuple(features.shape) if isinstance(features, Tensor) else type(features)
            fix = "Return a tensor [N, features]."
            raise self._error(f"one of the {shape} becomes {kind}, not [1, features]", fix)
        return features.shape[1]

    def _error(self, problem: str, fix: str) -> UserError:
        return UserError(problem, key="encoder.name", value=self.name, fix=fix)

    def forward(self, x: Tensor) -> Tensor:
        """Return features ``[B, features]``."""
        return self.body(self.input(x))

    def draw_weights(self, seed: int) -> None:
        """Draw random weights, as an untrained network has, in layers that can draw their own."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key(seed, "untrained") % 2**63)
            for module in self.body.modules():
                if isinstance(module, BatchNorm):  # ours has no counter, which torch would reset
                    fresh = BatchNorm(module.num_features).state_dict()
                    module.load_state_dict(fresh, strict=False)
                elif callable(reset := getattr(module, "reset_parameters", None)):
                    reset()
