"""Streams that a command writes to but does not depend on: a message that cannot be written is counted, and never ends the command.

stderr may be closed, on a full disk, a pipe without a reader, or a terminal that is stopped. A message that the stream does not accept goes
to a file if one is known. Once at the end a sentence says how many lines were lost, and why.
"""

import errno
import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO, cast

from megaplan.terminal.output import encodable

PATIENCE_SECONDS = 5.0
"""Time that a reader that does not read is waited for, once; without it a paused terminal would stop a run."""
CHUNK_BYTES = 512  # POSIX's smallest PIPE_BUF: a ready pipe accepts this many bytes without blocking
NOT_READ = OSError(errno.EAGAIN, "its reader does not read")
CLOSED = OSError(errno.EBADF, "it is closed")


class UnfailingStream:
    """A text stream whose writes never raise, with the methods that writers of text use.

    Args:
        stream: Stream to write to; None if the process has none.
        name: Name of the stream in the account.

    Attributes:
        encoding: Encoding of the stream; characters that it lacks are replaced.
        num_lost: Lines that the stream did not take.
    """

    def __init__(self, stream: TextIO | None, name: str) -> None:
        self._stream, self._name = stream, name
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self.errors = "replace"
        self.num_lost, self._reason = 0, ""
        self._file: Path | None = None
        self._num_kept, self._patient, self._said = 0, True, 0
        self._lock = threading.Lock()
        self._descriptor = _descriptor(stream)

    def keep_in(self, file: Path) -> None:
        """Name the file for messages that the stream does not accept."""
        self._file = file

    def write(self, text: str) -> int:
        """Write the text, or count its lines as lost; returns its length."""
        with self._lock:
            try:
                self._deliver(encodable(text, cast("TextIO", self)))
                self._patient = True
            except (OSError, ValueError) as error:  # ValueError: the stream is closed
                self._patient = False
                self._lose(text, getattr(error, "strerror", None) or str(error))
        return len(text)

    def flush(self) -> None:
        """Return; every write is delivered at once."""

    def isatty(self) -> bool:
        """True if the stream is a terminal."""
        with suppress(OSError, ValueError):
            return self._stream is not None and self._stream.isatty()
        return False

    def fileno(self) -> int:
        """Descriptor of the stream.

        Raises:
            OSError: The stream has none.
        """
        if self._stream is None:
            raise CLOSED
        return self._stream.fileno()

    def writable(self) -> bool:
        """True."""
        return True

    @property
    def account(self) -> str:
        """Number of lines that were lost since the last account, and the reason; empty if none was."""
        lost, self._said = self.num_lost - self._said, self.num_lost
        if not lost:
            return ""
        reason, self._reason = self._reason, ""
        where = f"; {self._num_kept:,} of them are in {self._file}" if self._num_kept else ""
        return f"{self._name}: {lost:,} {'line' if lost == 1 else 'lines'} could not be written: {reason}{where}"

    def _deliver(self, text: str) -> None:
        if self._stream is None:
            raise CLOSED
        if self._descriptor is None:
            self._stream.write(text)
            self._stream.flush()
            return
        data = text.encode(self.encoding, errors="replace")
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        while data:
            if not poll.poll(1000 * PATIENCE_SECONDS if self._patient else 0):
                raise NOT_READ
            data = data[os.write(self._descriptor, data[:CHUNK_BYTES]) :]

    def _lose(self, text: str, reason: str) -> None:
        lines = max(1, text.count("\n"))
        self.num_lost += lines
        self._reason = self._reason or reason
        if self._file is None:
            return
        with suppress(OSError):
            handle = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                os.write(handle, text.encode(errors="replace"))
            finally:
                os.close(handle)
            self._num_kept += lines


def _descriptor(stream: TextIO | None) -> int | None:
    """Descriptor of a stream; None if it has none, such as a replacement by a test or a notebook."""
    with suppress(OSError, ValueError, AttributeError):
        found = stream.fileno() if stream is not None else None
        return found if isinstance(found, int) else None
    return None


def occupy_standard_descriptors() -> None:
    """Open /dev/null in the place of closed descriptors 0 to 2.

    The next file that the process opens would otherwise have such a number, and a library that writes to stderr would write into it.
    """
    with suppress(OSError):
        while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(handle, True)
        os.close(handle)


@contextmanager
def unfailing_stderr() -> Iterator[UnfailingStream]:
    """Replace stderr by a stream whose writes never raise, unless done already; at the end it reports lost messages."""
    before: TextIO | None = sys.stderr
    if isinstance(before, UnfailingStream):
        yield before
        return
    stream = UnfailingStream(before, "stderr")
    sys.stderr = cast("TextIO", stream)
    try:
        yield stream
    finally:
        if stream.num_lost and (account := stream.account):
            stream.write(f"{account}\n")
        sys.stderr = cast("TextIO", before)
