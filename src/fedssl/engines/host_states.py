"""Keep the clients' states in host memory, and in files if there are many of them.

A GPU holds only the client that trains.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from fedssl.engines.base import StateFiles, Version
from fedssl.training.trainer import State
from fedssl.util.trees import count_bytes, flatten, unflatten

# Of states in memory. A CPU trains for longer than it takes to read a file.
MOST_BYTES = 1 << 30
SHARE = 4  # of the machine's memory, one part is for states if a GPU trains


class HostStates:
    """Client → its state. Reading gives a dictionary on the device, writing stores it on the host.

    On a GPU, copies go through pinned memory on a stream of their own: ``prefetch`` brings the next
    client's state while the current one trains, and writing returns at once. Single numbers
    (ndim 0) always live on the host, where decisions are made. If there are ``files``, the states
    that were used least recently are there, as far as all of them are more than ``most`` bytes.
    """

    def __init__(self, device: torch.device, most: int = MOST_BYTES) -> None:
        self.device = device
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.most = most if device.type == "cpu" else max(most, total // SHARE)
        self.files: StateFiles | None = None
        self.changed: set[int] = set()  # whose state is in no file
        self.versions: dict[int, Version] = {}  # the file that holds a client's state
        # In memory, least recently used first; and of the others the single numbers.
        self._host: dict[int, dict[str, Tensor]] = {}
        self._numbers: dict[int, dict[str, Tensor]] = {}
        self._bytes: dict[int, int] = {}  # in memory, by client
        self._held = 0  # their sum
        # Copies to the device that have been started, and when they are finished.
        self._coming: dict[int, tuple[dict[str, Tensor], torch.cuda.Event]] = {}
        # When what was written is on the host. Not the tensors: they would stay on the device.
        self._going: dict[int, torch.cuda.Event] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = threading.RLock()  # clients may train side by side

    def __getitem__(self, client: int) -> State:
        """The client's state (empty if it has none yet); changing the dictionary stores nothing."""
        with self._lock:
            if not self._knows(client):
                return {}
            if self._stream is None:
                return unflatten(dict(self._fetch(client)))
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
        with self._lock:
            self.changed.add(client)
            self._coming.pop(client, None)
            self._numbers.pop(client, None)
            flat = {name: tensor.detach() for name, tensor in flatten(state).items()}
            if self._stream is not None:
                flat = self._copy_to_host(client, flat, self._stream)
            self._keep(client, flat)

    def __iter__(self) -> Iterator[int]:
        return iter((*self._host, *self._numbers))

    def prefetch(self, client: int) -> None:
        """Start to bring a client's state to the device."""
        with self._lock:
            if self._stream is None or client in self._coming or not self._knows(client):
                return
            host = self._fetch(client)
            with torch.cuda.stream(self._stream):
                tensors = {
                    # A copy of a number: its place on the host is written again after training.
                    name: tensor.clone()
                    if tensor.ndim == 0
                    else tensor.to(self.device, non_blocking=True)
                    for name, tensor in host.items()
                }
            self._coming[client] = (tensors, self._stream.record_event())

    def numbers(self, client: int) -> State:
        """The single numbers of a client's state: nothing travels to the device."""
        with self._lock:
            self._wait(client)
            flat = self._numbers.get(client) or self._host.get(client, {})
            return unflatten({name: tensor for name, tensor in flat.items() if tensor.ndim == 0})

    def on_host(self, client: int) -> dict[str, Tensor]:
        """The flat state of a client, as files hold it."""
        with self._lock:
            return self._fetch(client) if self._knows(client) else {}

    def restore(self, client: int, flat: dict[str, Tensor], version: Version) -> None:
        """Take a state from a checkpoint's file."""
        self.versions[client] = version
        self._keep(client, self._pin(flat))

    def forget(self) -> None:
        """Leave all states out of checkpoints from now on; those in files are lost."""
        self.versions.clear()
        self.changed.clear()
        self._numbers.clear()

    def _knows(self, client: int) -> bool:
        return client in self._host or client in self._numbers

    def _fetch(self, client: int) -> dict[str, Tensor]:
        """Return a state on the host, from its file if it is there."""
        self._wait(client)
        flat = self._host.get(client)
        if flat is None:
            assert self.files is not None
            flat = self._pin(self.files.read(client, self.versions[client]))
            del self._numbers[client]
        self._keep(client, flat)
        return flat

    def _keep(self, client: int, flat: dict[str, Tensor]) -> None:
        """Hold a state in memory, and no more than fits."""
        self._host.pop(client, None)
        self._host[client] = flat
        size = count_bytes(flat)
        self._held += size - self._bytes.pop(client, 0)
        self._bytes[client] = size
        is_full = self.files is not None and self._held > self.most
        for other in list(self._host) if is_full else ():
            if other != client and other not in self._coming:
                self._put_away(other)
            if self._held <= self.most:
                return

    def _put_away(self, client: int) -> None:
        """Leave a state in its file, which is written if it changed."""
        assert self.files is not None
        self._wait(client)
        flat = self._host[client]
        if client in self.changed:
            self.versions[client] = self.files.write(client, flat)
            self.changed.discard(client)
        del self._host[client]
        self._held -= self._bytes.pop(client)
        self._numbers[client] = {n: tensor for n, tensor in flat.items() if tensor.ndim == 0}

    def _copy_to_host(
        self, client: int, flat: dict[str, Tensor], stream: torch.cuda.Stream
    ) -> dict[str, Tensor]:
        """Start to copy a state from the device."""
        self._wait(client)
        old = self._host.get(client, {})
        host = {name: _pinned_like(tensor, old.get(name)) for name, tensor in flat.items()}
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for name, tensor in flat.items():
                host[name].copy_(tensor, non_blocking=True)
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        self._going[client] = stream.record_event()
        return host

    def _pin(self, flat: dict[str, Tensor]) -> dict[str, Tensor]:
        pins = self._stream is not None
        return {name: t.pin_memory() if pins else t for name, t in flat.items()}

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
