"""Progress comes between results, and never tears one."""

import io
import re
import threading

import pytest

from hf_flexseq.cli.progress import CLEAR, Progress


class Written(io.StringIO):
    """A stream that tells when enough lines have come."""

    def __init__(self, *, terminal: bool, lines: int) -> None:
        super().__init__()
        self.terminal = terminal
        self.lines = lines
        self.enough = threading.Event()

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        written = super().write(text)
        if len(re.findall(r", \d+ s", self.getvalue())) >= self.lines:
            self.enough.set()
        return written


@pytest.mark.parametrize("terminal", [True, False])
def test_what_goes_on_is_said_while_a_solver_is_busy(terminal: bool) -> None:
    stream = Written(terminal=terminal, lines=3)
    with Progress(stream, every_s=0.005) as progress:
        progress.now("flexsp: planning step 0")
        assert stream.enough.wait(60)
    said = stream.getvalue()
    if terminal:
        assert said.startswith(f"{CLEAR}flexsp: planning step 0, 0 s{CLEAR}flexsp")
        assert said.endswith(CLEAR), "the line is gone when a result comes"
        assert "\n" not in said
    else:
        lines = said.splitlines()
        assert len(lines) >= 3
        assert {line.rpartition(", ")[0] for line in lines} == {"flexsp: planning step 0"}


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_is_said_after_a_result(terminal: bool) -> None:
    stream = Written(terminal=terminal, lines=1)
    with Progress(stream, every_s=0.005) as progress:
        progress.now("auto: planning step 0")
        assert stream.enough.wait(60)
        progress.clear()
        before = stream.getvalue()
        assert not threading.Event().wait(0.05)
        assert stream.getvalue() == before


def test_what_is_done_at_once_says_nothing_in_a_file() -> None:
    stream = Written(terminal=False, lines=1)
    with Progress(stream) as progress:
        progress.now("auto: planning step 0")
    assert stream.getvalue() == ""


def fail(stream: Written) -> None:
    with Progress(stream) as progress:
        progress.now("auto")
        raise ValueError("no planner")


def test_an_error_goes_through() -> None:
    stream = Written(terminal=True, lines=1)
    with pytest.raises(ValueError, match="no planner"):
        fail(stream)
    assert stream.getvalue().endswith(CLEAR)
