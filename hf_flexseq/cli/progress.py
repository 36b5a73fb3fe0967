"""Progress of a long command, on stderr: its results alone go to stdout.

On a terminal it is one line, which is rewritten every second and gone before a result is printed.
Elsewhere it is a line every half a minute.
"""

import sys
import threading
import time
from types import TracebackType
from typing import TextIO

TERMINAL_S, FILE_S = 1.0, 30.0  # seconds from one line to the next
CLEAR = "\r\x1b[K"  # to the beginning of the line, and all of it away


class Progress:
    """Reports the current work and its seconds from a thread, since a solver may block."""

    def __init__(self, stream: TextIO | None = None, *, every_s: float | None = None) -> None:
        """stream: None for stderr. every_s: seconds between lines; None for the default."""
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._every_s = every_s or (TERMINAL_S if self._is_terminal else FILE_S)
        self._doing: str | None = None  # nothing is said without
        self._since = 0.0  # when that began
        self._lock = threading.Lock()  # held by who writes, or changes what is written
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.clear()

    def now(self, doing: str) -> None:
        """Begin to show `doing`."""
        with self._lock:
            self._doing = doing
            self._since = time.monotonic()
            if self._is_terminal:
                self._write()

    def clear(self) -> None:
        """Say nothing more, and leave the terminal's line empty, until the next `now`."""
        with self._lock:
            if self._doing is not None and self._is_terminal:
                self._stream.write(CLEAR)
                self._stream.flush()
            self._doing = None

    def _run(self) -> None:
        """Write a line every so often, until the end."""
        while not self._ended.wait(self._every_s):
            with self._lock:
                self._write()

    def _write(self) -> None:
        """Write the present activity and its seconds. The lock is held."""
        if self._doing is None:
            return
        seconds = time.monotonic() - self._since
        line = f"{self._doing}, {seconds:.0f} s"
        if self._is_terminal:
            self._stream.write(f"{CLEAR}{line}")
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()
