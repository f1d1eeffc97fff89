"""Load weights of other programs into an encoder, by the names and shapes of their tensors."""

from __future__ import annotations

import json
import pickle
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedssl.models.encoders import ResNet, Timm
from fedssl.models.layouts import LAYOUTS, rename, torchvision_names
from fedssl.util.errors import UserError
from fedssl.util.text import shorten_list

KEY = "encoder.init"
FEWEST = 0.9  # share of the encoder's tensors that a file must have
MOST_UNUSED = 0.25  # share of a file's tensors that an encoder may leave, such as a classifier's
COUNTER = "num_batches_tracked"  # of batch norm; nothing reads it


def load_checkpoint(encoder: nn.Module, file: Path, given: str) -> str:
    """Load a file's weights into an encoder; return a sentence on what was loaded.

    ``given`` is the user's value of ``encoder.init``.
    """
    names = torchvision_names(encoder) if isinstance(encoder, ResNet) else {}
    own = encoder.state_dict()
    tensors = read_tensors(file, given)
    if own.keys() & tensors.keys():
        names = {}  # fedssl's own file
    expected = {names.get(n, n): tensor for n, tensor in own.items() if not n.endswith(COUNTER)}
    fit = find_fit(expected.keys(), tensors)
    fit.check(encoder, expected, given)
    back = {theirs: ours for ours, theirs in names.items()}
    encoder.load_state_dict({back.get(n, n): fit.tensors[n] for n in fit.matched}, strict=False)
    return f"{KEY}={given}: {fit.describe(expected.keys())}"


@dataclass
class Fit:
    """A file's tensors under the names of an encoder, and how they came by these names."""

    tensors: dict[str, Tensor]
    layout: str
    prefix: str
    matched: Collection[str] = ()

    def check(self, encoder: nn.Module, expected: Mapping[str, Tensor], given: str) -> None:
        """Refuse a file of another network; ``matched`` are then the names that fit."""
        self.tensors = _adapt(encoder, self.tensors, expected)
        self.matched = _find_matches(self.tensors, expected)
        wrong = [n for n in expected if n in self.tensors and n not in self.matched]
        missing = [n for n in expected if n not in self.tensors]
        problems: list[str] = []
        if wrong:
            theirs, ours = (tuple(t[wrong[0]].shape) for t in (self.tensors, expected))
            problems.append(f"{wrong[0]} has the shape {theirs} in place of {ours}")
        if missing:
            problems.append(f"missing: {shorten_list(missing, 3)}")
        unused = self.list_unused()
        if unused:
            problems.append(f"not in the encoder: {shorten_list(unused, 3)}")
        norms = any(n.endswith("running_mean") for n in unused)
        few = len(self.matched) < FEWEST * len(expected)
        if few or wrong or norms or len(unused) > MOST_UNUSED * len(self.tensors):
            raise UserError(
                f"{len(self.matched)} of the encoder's {len(expected)} tensors fit "
                f"({'; '.join(problems)})",
                key=KEY,
                value=given,
                fix="Use encoder.norm=frozen or batch."
                if norms and not (few or wrong)
                else "Use the encoder.name, encoder.norm and data.size of the network in the file.",
            )

    def list_unused(self) -> list[str]:
        """List the file's tensors that the encoder does not have."""
        return [n for n in self.tensors if n not in self.matched and not n.endswith(COUNTER)]

    def describe(self, expected: Collection[str]) -> str:
        """Return what was loaded, in words."""
        text = f"{len(self.matched)} of {len(expected)} tensors loaded"
        if self.layout:
            text += f", from the names of {self.layout}"
        if self.prefix:
            text += f", those below {self.prefix.removesuffix('.')}"
        missing = [name for name in expected if name not in self.matched]
        if missing:
            text += f"; random: {shorten_list(missing, 3)}"
        if unused := self.list_unused():
            text += f"; left out: {shorten_list(unused, 3)}"
        return f"{text}."


def find_fit(names: Collection[str], tensors: Mapping[str, Tensor]) -> Fit:
    """Find the layout and the prefix under which a file has most of an encoder's ``names``."""
    best, most = Fit(dict(tensors), "", ""), 0
    for layout, rules in LAYOUTS.items():
        renamed = rename(dict(tensors), rules)
        prefixes = Counter(
            name[: -len(rest)]
            for name in renamed
            if not name.endswith(COUNTER)
            for rest in _list_endings(name)
            if rest in names
        )
        for prefix, count in prefixes.most_common(1):
            if count > most:
                under = {n[len(prefix) :]: t for n, t in renamed.items() if n.startswith(prefix)}
                best, most = Fit(under, layout, prefix), count
    return best


def _list_endings(name: str) -> Iterator[str]:
    """Yield a name, and what is left of it without its first parts."""
    while name:
        yield name
        name = name.partition(".")[2]


def _find_matches(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    return [n for n, t in expected.items() if n in tensors and tensors[n].shape == t.shape]


def _adapt(
    encoder: nn.Module, tensors: dict[str, Tensor], expected: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Let timm resize position embeddings and translate the names that it knows."""
    if not isinstance(encoder, Timm):
        return tensors
    module = sys.modules[type(encoder.body).__module__]
    adapt: Any = getattr(module, "checkpoint_filter_fn", None)
    try:
        adapted = adapt(dict(tensors), encoder.body) if adapt else tensors
    except Exception:  # of a file that is not for this network, which is refused with its names
        return tensors
    before, after = (len(_find_matches(each, expected)) for each in (tensors, adapted))
    return adapted if after > before else tensors


def read_tensors(path: Path, given: str) -> dict[str, Tensor]:
    """Read all tensors of a file or of a folder as the Hugging Face hub has them.

    Names of nested dictionaries are joined by dots. Nothing but tensors is unpickled.
    """
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        files = ("model.safetensors", "pytorch_model.bin")
        if index.is_file():
            parts = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
            return {n: t for part in parts for n, t in read_tensors(path / part, given).items()}
        path = next((path / name for name in files if (path / name).is_file()), path / files[0])
    if not path.is_file():
        fix = "Give a file of weights, or the folder of a run or an export."
        raise UserError("no such file", key=KEY, value=given, fix=fix)
    if path.suffix == ".safetensors":
        return _read_safetensors(path, given)
    return dict(_flatten(_unpickle(path, given)))


def _read_safetensors(path: Path, given: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        fix = "Give the encoder.safetensors of a run or an export."
        raise UserError(
            f"not a safetensors file ({error})", key=KEY, value=given, fix=fix
        ) from None


def _unpickle(path: Path, given: str) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        problem = "not a file of tensors alone, and to open others could run code of strangers"
        fix = "Save the weights with torch.save(model.state_dict(), FILE)."
        raise UserError(problem, key=KEY, value=given, fix=fix) from None
    except Exception as error:  # torch raises many kinds for files that are not its own
        problem = f"not a file of weights ({type(error).__name__})"
        fix = "Give a safetensors file or a checkpoint of torch.save."
        raise UserError(problem, key=KEY, value=given, fix=fix) from None


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value.detach()
        else:
            yield from _flatten(value, f"{prefix}{name}.")
