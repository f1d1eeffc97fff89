"""Make standard output and error robust: a run goes on when nobody reads what it prints."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, TextIO

from fedssl.util.files import FULL

GONE = (errno.EPIPE, errno.EIO, errno.EBADF)  # a closed pipe, terminal or descriptor


class _Stream(io.FileIO):
    """A stream that goes nowhere once its reader (head, less, a terminal) has gone."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream.fileno(), "w", closefd=False)
        self.name = stream.name.strip("<>")
        self.ignored = GONE if stream is not sys.__stderr__ else (*GONE, *FULL)

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())  # otherwise Python would write the rest again at its end
            os.close(null)
            if error.errno not in self.ignored:
                raise OSError(error.errno, error.strerror, self.name) from None
            return memoryview(data).nbytes


def protect_streams() -> None:
    """Open closed streams, and let both take every character and survive their reader."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Closed (2>&-). Otherwise a file would get the number, and what libraries print.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            null = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(null, "w", encoding="utf-8"))
        elif stream is getattr(sys, f"__{name}__"):  # not replaced by a caller in Python
            setattr(sys, name, _protect(stream))


def _protect(stream: TextIO) -> TextIO:
    assert isinstance(stream, io.TextIOWrapper)
    stream.flush()
    is_lossy = stream.errors not in ("strict", "surrogateescape")
    raw: Any = _Stream(stream)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # python -u has no buffer
        stream.encoding,
        stream.errors if is_lossy else "replace",  # for encodings without ± and …
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
