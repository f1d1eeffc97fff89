"""Listen between the sites and the server of a real deployment, without TLS and with it.

    python benchmarks/attacks/wire.py

Runs examples/deployment/run_plain.sh and run_tls.sh: a SuperLink and three SuperNodes on loopback.
The sites connect through a port that forwards to the SuperLink and keeps every byte. These bytes
are searched for the model, for the sites' introductions and for their images. Without TLS the first
two must be found, or the search would prove nothing. With TLS nothing must be found, and images
must not be found in either.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file

SCRIPTS = Path(__file__).parents[2] / "examples" / "deployment"
WORDS = ("algorithm.name=fedavg", "algorithm.local_epochs=1", "rounds=1", "engine.timeout=900")
IMAGES = "20"  # of a site
PIECE = 64  # bytes that are searched for
PIECES = 50  # of each kind


@dataclass
class Listener:
    """Forwards connections to another port of this machine, and keeps what passes."""

    target: int
    heard: list[bytearray] = field(default_factory=list)  # one for each connection and direction

    def __post_init__(self) -> None:
        """Listen at a free port."""
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                site, _ = self.server.accept()
                try:
                    link = socket.create_connection(("127.0.0.1", self.target))
                except OSError:  # not there yet: the site tries again
                    site.close()
                    continue
                for source, sink in ((site, link), (link, site)):
                    kept = bytearray()
                    self.heard.append(kept)
                    threading.Thread(
                        target=_forward, args=(source, sink, kept), daemon=True
                    ).start()

    def count(self, piece: bytes) -> bool:
        """Return whether these bytes passed."""
        return any(piece in kept for kept in self.heard)

    @property
    def bytes(self) -> int:
        """The number of bytes that passed."""
        return sum(map(len, self.heard))


def _forward(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            kept += data
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def find_free_port() -> int:
    """Return a port that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def deploy(kind: str, work: Path) -> Listener:
    """Run a deployment whose sites are listened to."""
    listener = Listener(find_free_port())
    ports = {"LINK_PORT": str(listener.target), "NODES_PORT": str(listener.port)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [SCRIPTS / f"run_{kind}.sh", *WORDS],
        env={**os.environ, **ports, "WORK": str(work), "IMAGES": IMAGES, "PATH": path},
        capture_output=True,
        text=True,
    )
    listener.server.close()
    if done.returncode:
        raise SystemExit(f"run_{kind}.sh failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return listener


def cut_pieces(data: bytes, chance: random.Random) -> list[bytes]:
    """Return pieces of data that are not all alike."""
    places = (chance.randrange(max(1, len(data) - PIECE)) for _ in range(100 * PIECES))
    pieces = (data[place : place + PIECE] for place in places)
    return [piece for piece in pieces if len(set(piece)) > PIECE // 4][:PIECES]


def list_contents(work: Path) -> dict[str, list[bytes]]:
    """Return what could be read: pieces of the model, of introductions and of images."""
    chance = random.Random(0)
    models = [
        tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        for path in sorted(work.glob("state/*/*/received-0/*/0.safetensors"))
        for tensor in load_file(path).values()
    ]
    images = sorted(path for path in (work / "data").rglob("*") if path.is_file())
    files = b"".join(path.read_bytes() for path in images)
    pixels = b"".join(Image.open(path).convert("L").tobytes() for path in images)
    names = [path.name for path in (work / "data").glob("site-*")]
    return {
        "model": cut_pieces(b"".join(models), chance),
        "introductions": [f'"name": "{name}"'.encode() for name in names],
        "image files": cut_pieces(files, chance),
        "pixels": cut_pieces(pixels, chance),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    failures, lines, started = list[str](), list[str](), time.monotonic()
    for kind, readable in (("plain", ("model", "introductions")), ("tls", ())):
        with tempfile.TemporaryDirectory(prefix="wire-") as folder:
            listener, told = deploy(kind, Path(folder)), list[str]()
            for name, pieces in list_contents(Path(folder)).items():
                found = sum(map(listener.count, pieces))
                told.append(f"{name} {found} of {len(pieces)}")
                if not pieces or found != (len(pieces) if name in readable else 0):
                    failures.append(f"{kind}: {told[-1]}")
        lines.append(f"{kind}: {listener.bytes:,} bytes, readable: {', '.join(told)}")
    print(f"wire: {'; '.join(lines)} ({(time.monotonic() - started) / 60:.1f} min)")
    if failures:
        raise SystemExit(f"wire: not as it should be: {'; '.join(failures)}")


if __name__ == "__main__":
    main()
