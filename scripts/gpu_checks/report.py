"""Settings, a section of the page, and commands in processes of their own."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hf_flexseq.distributed.hosts import last_error

SCRIPT = Path(__file__).resolve().parents[1] / "gpu_check.py"
NOT_RUN = "Not run: "
# Processes of parts: a rank of plans, a rank of which one is killed, new lengths for cuDNN.
RANKS_PART, LOST_PART, CUDNN_PART = "ranks", "lost rank", "cudnn lengths"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How the checks are run."""

    rehearse: bool
    """Whether on a CPU, with small sizes: it shows that the checks run, and nothing of a GPU."""
    plans: int
    """Random plans for every way of running them."""
    quick: bool = False
    """Whether less is run: fewer pipelines, and steps of trainers."""

    @property
    def device(self) -> torch.device:
        """The device of a process that has one rank or several threads."""
        return torch.device("cpu" if self.rehearse else "cuda")

    @property
    def processes(self) -> int:
        """Ranks that are processes: one for each GPU, two in a rehearsal."""
        return 2 if self.rehearse else torch.cuda.device_count()

    def options(self) -> list[str]:
        """Return the command line of another process with this setting."""
        options = ["--plans", str(self.plans)]
        if self.rehearse:
            options.append("--rehearse")
        if self.quick:
            options.append("--quick")
        return options


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """What one part has to say on the page."""

    title: str

    lines: tuple[str, ...]
    """Lines of Markdown below the title."""
    holds: bool = True
    """True if all of its checks hold, or if none can run here."""
    said: str = ""
    """All that a part said which has failed; not on the page."""

    @property
    def end(self) -> str:
        """How the part ended, in a word or two."""
        if not self.holds:
            return "FAILED"
        return "not run" if self.lines[0].startswith(NOT_RUN) else "ok"

    def to_record(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Section":
        """Return the section whose `to_record` gave `record`."""
        return cls(**record | {"lines": tuple(record["lines"])})

    @classmethod
    def not_run(cls, title: str, reason: str) -> "Section":
        """Return the section of a part that cannot run here, which is no failure."""
        return cls(title=title, lines=(f"{NOT_RUN}{reason}.",))

    def text(self) -> str:
        """Return the section as the page has it."""
        return "\n".join([f"\n## {self.title}\n", *self.lines])


def tests_section(setting: Setting) -> Section:
    """Run the tests of kernels on the device, and all others that a GPU can run if not quick."""
    title = "Tests on the device"
    if importlib.util.find_spec("pytest") is None:
        return Section.not_run(title, "pytest is not installed")
    folders = ["tests/kernels"] if setting.quick or setting.rehearse else ["tests"]
    words = ["-q", "-m", "on_device", "-p", "no:cacheprovider", f"--device={setting.device}"]
    command = [sys.executable, "-m", "pytest", *words, *folders]
    done = subprocess.run(command, cwd=SCRIPT.parents[1], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    lines.append(f"`pytest {' '.join([*words, *folders])}`: {done.stdout.splitlines()[-1]}")
    said = done.stdout + done.stderr if done.returncode else ""
    return Section(title=title, lines=tuple(lines), holds=done.returncode == 0, said=said)


def verdict(holds: bool) -> str:
    """Return the last cell of a row."""
    return "ok" if holds else "FAILED"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> tuple[str, ...]:
    """Return the lines of a Markdown table."""
    lines = [_row(columns), "|" + "---|" * len(columns)]
    for row in rows:
        lines.append(_row(row))
    return tuple(lines)


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


# ---- commands


def this_script(part: str, setting: Setting, *options: str) -> list[str]:
    """Return the arguments, behind the interpreter, of a process that runs one part."""
    return [str(SCRIPT), "--part", part, *setting.options(), *options]


def torchrun(processes: int, arguments: Sequence[str]) -> list[str]:
    """Return the command that starts a script on so many ranks of this machine."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return [sys.executable, *launcher, *arguments]


def launch(
    command: Sequence[str],
    *,
    seconds: float | None = None,
    is_part: bool = False,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a command; return the JSON of its last line, or `error`, its last words, with `said`,
    all of its words.

    seconds: after which it is ended; None for no limit.
    is_part: True for a process group of its own, which is ended as a whole. environment:
    variables besides those of this process.
    """
    process = subprocess.Popen(
        list(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | dict(environment or {}),
        start_new_session=is_part,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        if is_part:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.terminate()  # torchrun then ends its ranks
        _, err = process.communicate()
        return {"error": f"it had not ended after {seconds:.0f} s", "said": err}
    if process.returncode:
        return {"error": last_error(err) or f"it ended with {process.returncode}", "said": err}
    try:
        found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": "it ended without a result", "said": err}
    return found
