"""Progress comes between results, and never tears one."""

import io
import re
import threading

import pytest

from hf_flexseq.cli.progress import CLEAR, Progress


class Written(io.StringIO):
    """A stream that tells when enough lines have come."""

    def __init__(self, terminal, lines=1):
        super().__init__()
        self.isatty = lambda: terminal
        self.lines = lines
        self.enough = threading.Event()

    def write(self, text):
        written = super().write(text)
        if len(re.findall(r", \d+ s", self.getvalue())) >= self.lines:
            self.enough.set()
        return written


@pytest.mark.parametrize("terminal", [True, False])
def test_what_goes_on_is_said_while_a_solver_is_busy_and_not_after_a_result(terminal):
    stream = Written(terminal, lines=3)
    with Progress(stream, every_s=0.005) as progress:
        progress.now("flexsp: planning step 0")
        assert stream.enough.wait(60)
        progress.clear()
        said = stream.getvalue()
        assert not threading.Event().wait(0.05)
        assert stream.getvalue() == said
    if terminal:
        assert said.startswith(f"{CLEAR}flexsp: planning step 0, 0 s{CLEAR}flexsp")
        assert said.endswith(CLEAR), "the line is gone when a result comes"
        assert "\n" not in said
    else:
        lines = said.splitlines()
        assert len(lines) >= 3
        assert {line.rpartition(", ")[0] for line in lines} == {"flexsp: planning step 0"}


def fail(stream):
    with Progress(stream) as progress:
        progress.now("auto")
        raise ValueError("no planner")


def test_an_error_goes_through_and_leaves_the_line_empty():
    stream = Written(terminal=True)
    with pytest.raises(ValueError, match="no planner"):
        fail(stream)
    assert stream.getvalue().endswith(CLEAR)
