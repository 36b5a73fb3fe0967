"""The file of a plan trace: whole lines, appended step by step, whatever happens to the disk.

A trace is a diagnostic, so it never ends a training that has begun:

* Lines that cannot be written are left out, and the first time a warning says so. Every step tries
  anew, so that the trace continues once there is room again.
* The lines of a step are written at once, after all others. Of a write that was cut short nothing
  stays.
* A run that was killed may leave a torn last line, without its newline. The next one cuts it off.

A run that continues the file of an earlier one may repeat some of its steps. The last line of a
step is the one whose result training kept.
"""

import json
import logging
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

START = b'{"step": '  # how each line begins


def is_trace(path: str) -> bool:
    """Tell if a file begins as a plan trace does."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(START)) == START


class TraceFile:
    """Appends the steps of a run to a file."""

    def __init__(self, path: str) -> None:
        """Check the path without writing. Raises ValueError for one that cannot become a trace."""
        _check_place(path)
        _check_content(path)
        self.path = Path(path)
        self._is_whole = False  # the file, whose last line an earlier run may have torn
        self._has_warned = False

    def append(self, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write the lines of a step, each plain JSON values, with the step's number in front."""
        try:
            if not self._is_whole:
                self._cut_torn_line()
                self._is_whole = True
            self._write("".join(json.dumps({"step": step, **line}) + "\n" for line in lines))
        except OSError as error:
            self._warn(error)

    def _write(self, text: str) -> None:
        """Append text, all of it or nothing. Raises OSError for nothing. The file is opened anew
        each time: a removed one would take the text and lose it."""
        data = text.encode()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        handle = os.open(self.path, flags, 0o666)
        try:
            before = os.fstat(handle)
            written = os.write(handle, data)
            if written < len(data):
                if stat.S_ISREG(before.st_mode):
                    os.ftruncate(handle, before.st_size)
                raise OSError(f"only {written:,} of {len(data):,} bytes could be written")
        finally:
            os.close(handle)

    def _cut_torn_line(self) -> None:
        """Cut off the torn line at the end of the file."""
        if not self.path.is_file():
            return
        with self.path.open("r+b") as file:
            last = b"\n"
            for line in file:
                last = line
            if last.endswith(b"\n"):
                return
            file.truncate(os.fstat(file.fileno()).st_size - len(last))
        logger.warning(
            "plan_trace=%r: cut a torn last line of %d bytes off", str(self.path), len(last)
        )

    def _warn(self, error: OSError) -> None:
        """Say once that steps are left out."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "plan_trace=%r cannot be written (%s): training goes on, and the trace lacks "
                "steps until it can be",
                str(self.path),
                error.strerror or error,
            )


# ---- what can be known before training


def _check_place(path: str) -> None:
    """Raise ValueError where no file can be written at `path`."""
    if Path(path).is_dir():
        raise ValueError(f"plan_trace={path!r} is a folder; give the path of a file")
    folder = Path(path).parent
    if not folder.is_dir():
        raise ValueError(
            f"plan_trace={path!r}: directory {str(folder)!r} does not exist; make it, or give "
            "another path"
        )
    target = path if os.path.exists(path) else folder
    if not os.access(target, os.W_OK):
        raise ValueError(f"plan_trace={path!r} may not be written; give another path")


def _check_content(path: str) -> None:
    """Raise ValueError for a file other than a trace, whose last line could be cut off."""
    if not os.path.isfile(path):
        return
    try:
        with open(path, "rb") as file:
            start = file.read(len(START))
    except OSError as error:
        raise ValueError(f"plan_trace={path!r} cannot be read ({error.strerror})") from error
    if not START.startswith(start):
        raise ValueError(f"plan_trace={path!r} is not a plan trace; give the path of a new file")
