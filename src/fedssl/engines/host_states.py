"""Keep the clients' states in host memory; a GPU holds only the client that trains."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedssl.engines.base import Version
from fedssl.training.trainer import State
from fedssl.util.trees import flatten, unflatten


class HostStates:
    """Client → its state. Reading gives a dictionary on the device, writing stores it on the host.

    On a GPU, copies go through pinned memory on a stream of their own: ``prefetch`` brings the next
    client's state while the current one trains, and writing returns at once. Single numbers
    (ndim 0) always live on the host, where decisions are made.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.changed: set[int] = set()  # written since the last checkpoint
        self.versions: dict[int, Version] = {}  # the checkpoint's file of a client
        self._host: dict[int, dict[str, Tensor]] = {}
        # Copies to the device that have been started, and when they are finished.
        self._coming: dict[int, tuple[dict[str, Tensor], torch.cuda.Event]] = {}
        # When what was written is on the host. Not the tensors: they would stay on the device.
        self._going: dict[int, torch.cuda.Event] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __getitem__(self, client: int) -> State:
        """The client's state (empty if it has none yet); changing the dictionary stores nothing."""
        if client not in self._host:
            return {}
        if self._stream is None:
            return unflatten(dict(self._host[client]))
        self.prefetch(client)
        tensors, done = self._coming.pop(client)
        here = torch.cuda.current_stream(self.device)
        here.wait_event(done)
        for tensor in tensors.values():
            if tensor.is_cuda:
                tensor.record_stream(here)
        return unflatten(tensors)

    def __setitem__(self, client: int, state: State) -> None:
        if not state:
            return
        self.changed.add(client)
        self._coming.pop(client, None)
        flat = {name: tensor.detach() for name, tensor in flatten(state).items()}
        if self._stream is None:
            self._host[client] = flat
            return
        self._wait(client)
        old = self._host.get(client, {})
        host = self._host[client] = {n: _pinned_like(t, old.get(n)) for n, t in flat.items()}
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for name, tensor in flat.items():
                host[name].copy_(tensor, non_blocking=True)
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)
        self._going[client] = self._stream.record_event()

    def __iter__(self) -> Iterator[int]:
        return iter(self._host)

    def prefetch(self, client: int) -> None:
        """Start to bring a client's state to the device."""
        if self._stream is None or client in self._coming or client not in self._host:
            return
        self._wait(client)
        with torch.cuda.stream(self._stream):
            tensors = {
                # A copy of a number: its place on the host is written again after training.
                name: tensor.clone()
                if tensor.ndim == 0
                else tensor.to(self.device, non_blocking=True)
                for name, tensor in self._host[client].items()
            }
        self._coming[client] = (tensors, self._stream.record_event())

    def numbers(self, client: int) -> State:
        """The single numbers of a client's state: nothing travels to the device."""
        flat = self.on_host(client)
        return unflatten({name: tensor for name, tensor in flat.items() if tensor.ndim == 0})

    def on_host(self, client: int) -> dict[str, Tensor]:
        """The flat state of a client, as files hold it."""
        self._wait(client)
        return self._host.get(client, {})

    def restore(self, client: int, flat: dict[str, Tensor], version: Version) -> None:
        """Take a state from a checkpoint's file."""
        pin = self._stream is not None
        self._host[client] = {name: t.pin_memory() if pin else t for name, t in flat.items()}
        self.versions[client] = version

    def forget(self) -> None:
        """Leave all states out of checkpoints from now on."""
        self.versions.clear()
        self.changed.clear()

    def _wait(self, client: int) -> None:
        """Until a state that was written is on the host."""
        going = self._going.pop(client, None)
        if going is not None:
            going.synchronize()


def _pinned_like(tensor: Tensor, old: Tensor | None) -> Tensor:
    """Host memory for a tensor: what the client had before, if it fits."""
    if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
        return old
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
