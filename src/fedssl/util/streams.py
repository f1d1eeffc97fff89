"""Standard output and error, such that no work ends because nobody reads what it says."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, TextIO

from fedssl.util.outputs import FULL

GONE = (errno.EPIPE, errno.EIO, errno.EBADF)  # a pipe, a terminal; what is not to be written to


class _Stream(io.FileIO):
    """A stream whose reader (head, less, a terminal) may go: the rest is then written nowhere."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream.fileno(), "w", closefd=False)
        self.name = stream.name.strip("<>")
        self.told = stream is not sys.__stderr__  # what stderr cannot take cannot be said anywhere

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # else Python would try the rest again when it ends
            os.close(nowhere)
            if error.errno not in (GONE if self.told else (*GONE, *FULL)):
                raise OSError(error.errno, error.strerror, self.name) from None
            return memoryview(data).nbytes


def keep() -> None:
    """Have both streams, whatever the caller did with them, and let them take every letter."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Closed (2>&-). A file of ours would get the number, and what libraries print there.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(nowhere, "w", encoding="utf-8"))
        elif stream is getattr(sys, f"__{name}__"):  # not somebody's who calls us from Python
            setattr(sys, name, _kept(stream))


def _kept(stream: TextIO) -> TextIO:
    assert isinstance(stream, io.TextIOWrapper)
    stream.flush()
    lossy = stream.errors not in ("strict", "surrogateescape")
    raw: Any = _Stream(stream)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # python -u has no buffer
        stream.encoding,
        stream.errors if lossy else "replace",  # where ± and … are no letters
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
