"""Load the weights that timm publishes for its backbones."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fedssl.config import TIMM
from fedssl.models.checkpoints import read_tensors
from fedssl.models.encoders import Timm
from fedssl.util.errors import UserError
from fedssl.util.status import stage

SECONDS = 5.0  # to wait for the first answer of a server
FILES = ("model.safetensors", "pytorch_model.bin")


def load_published(encoder: Timm) -> str:
    """Load timm's weights into a backbone; return a sentence on where they came from."""
    import timm

    path = find_weights(encoder.name)
    # Timm adapts positions to the size of images and leaves the classifier out. It would unpickle
    # whatever a file holds, so it gets tensors.
    tensors = read_tensors(path, str(path))
    create: Any = timm.create_model
    with torch.random.fork_rng(devices=[]):
        source = create(
            encoder.name,
            pretrained=True,
            pretrained_cfg_overlay={"state_dict": tensors},
            **encoder.arguments,
        )
    encoder.load_state_dict(source.state_dict(), strict=True)
    count = sum(1 for _ in encoder.parameters())
    return f"encoder.pretrained=true: {count} tensors of {path} loaded."


def find_weights(name: str) -> Path:
    """Return the file of a backbone's weights, downloaded if it is not on this machine."""
    known = _look_up(name)
    if known is None or not (known.hf_hub_id or known.url):
        raise _error(name, "timm has no weights of it", "Use another encoder, or encoder.init.")
    return _find_cached(known) or _download(name, known)


def find_backbone(names: Sequence[str]) -> tuple[str | None, str]:
    """Return the first backbone with weights on this machine, else the first if it can be had.

    The text says why there is none.
    """
    if importlib.util.find_spec("timm") is None:
        return None, "timm is not installed"
    found = next((n for n in names if _find_cached(_look_up(n.removeprefix(TIMM)))), None)
    if found is not None:
        return found, ""
    try:
        find_weights(names[0].removeprefix(TIMM))
    except UserError as error:
        return None, error.problem
    return names[0], ""


def _look_up(name: str) -> Any:
    import timm

    return timm.get_pretrained_cfg(name, allow_unregistered=True)


def _names(known: Any) -> tuple[str, ...]:
    return (known.hf_hub_filename,) if known.hf_hub_filename else FILES


def _url_file(known: Any) -> Path:
    """Return the place of torch's own cache for a file with an address."""
    return Path(torch.hub.get_dir()) / "checkpoints" / known.url.rpartition("/")[2]


def _find_cached(known: Any) -> Path | None:
    """Return the file of weights in this machine's caches."""
    if known.hf_hub_id:
        from huggingface_hub import try_to_load_from_cache

        for name in _names(known):
            if isinstance(path := try_to_load_from_cache(known.hf_hub_id, name), str):
                return Path(path)
    return _url_file(known) if known.url and _url_file(known).is_file() else None


def _download(name: str, known: Any) -> Path:
    """Download the weights; without a network this fails at once, where the hub would retry."""
    from huggingface_hub import constants, get_session, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    address = constants.ENDPOINT if known.hf_hub_id else known.url
    try:
        if constants.HF_HUB_OFFLINE:
            raise OSError("HF_HUB_OFFLINE is set")
        with stage(f"downloading {name}"):
            get_session().head(address, timeout=SECONDS)
            if not known.hf_hub_id:
                file = _url_file(known)
                file.parent.mkdir(parents=True, exist_ok=True)
                torch.hub.download_url_to_file(known.url, str(file), progress=False)
                return file
            for file_name in _names(known):
                try:
                    return Path(hf_hub_download(known.hf_hub_id, file_name))
                except EntryNotFoundError:
                    continue
            raise OSError("the repository has no weights")
    except Exception as error:  # of sockets, TLS, the hub or the disk
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        source = known.hf_hub_id or known.url
        raise _error(
            name,
            f"the weights {source} are not on this machine and cannot be downloaded ({reason})",
            "Download them once with a network, or give a file with encoder.init.",
        ) from None


def _error(name: str, problem: str, fix: str) -> UserError:
    problem = f"{TIMM}{name}: {problem}"
    return UserError(problem, key="encoder.pretrained", value=True, fix=fix)
