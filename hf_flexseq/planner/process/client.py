"""Planners as the training process sees them: submit lengths, fetch plans later.

    InlinePlanner    plans in the training process, when the plan is fetched
    PlannerWorker    plans in a process of its own, from the moment of submission on; the first
                     step, which is waited for, here, where that takes less than starting a process

A PlannerWorker has two threads: one writes requests from a queue, the other reads answers. Neither
pipe can therefore fill up and stop both processes, however many requests are outstanding. The
planning process writes stderr into an unnamed file, whose last lines explain a death.

The planning process imports nothing from the current folder, where a user's `random.py` would hide
the standard library's: `_environment` and `start.py`.
"""

import atexit
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.plan.facts import NO_FACTS, StepFacts
from hf_flexseq.planner.process.jobs import Job

START = Path(__file__).with_name("start.py")  # runs a module of this package as a program
MODULE = "hf_flexseq.planner.process.worker"  # what the planning process runs
ERRORS = {"PlanInfeasible": PlanInfeasible, "ValueError": ValueError}
STDERR_LINES = 20  # of a dead planning process, shown in the error; a traceback fits


class Planner(Protocol):
    """Plans optimizer steps, perhaps in another process."""

    def use(self, job: Job) -> None:
        """Plan steps that are submitted from now on by another job, of the same kind as the
        first."""

    def submit(self, step: int, lengths: list[int], facts: StepFacts = NO_FACTS) -> None:
        """Ask for the plan of `step`, a number of its own. Returns at once."""

    def wait(self, step: int, seconds: float) -> str | None:
        """Wait until a submitted step has been planned, at most for so many seconds.

        Returns None as soon as `result` need not wait, else the name of who has not answered.
        """

    def result(self, step: int) -> Any:
        """Return the plan of a submitted step, once; raise the error that planning raised."""

    def close(self) -> None:
        """End the planner. Plans not fetched are lost."""


class InlinePlanner:
    """Plans in this process, when the result is wanted."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._submitted: dict[int, tuple[Job, list[int], StepFacts]] = {}

    def use(self, job: Job) -> None:
        """See `Planner.use`."""
        self._job = job

    def submit(self, step: int, lengths: list[int], facts: StepFacts = NO_FACTS) -> None:
        """Note the lengths of `step`."""
        self._submitted[step] = (self._job, lengths, facts)

    def wait(self, step: int, seconds: float) -> str | None:
        """Return at once: `result` plans."""
        return None

    def result(self, step: int) -> Any:
        """Plan a submitted step. Raises ValueError as the job does."""
        job, lengths, facts = self._submitted.pop(step)
        return job.plan(lengths, facts)

    def close(self) -> None:
        """Forget all submitted steps."""
        self._submitted.clear()


def start_planner(job: Job, *, ahead: bool) -> Planner:
    """Return a planner for `job`, in a process of its own if steps are planned ahead."""
    return PlannerWorker(job) if ahead else InlinePlanner(job)


class PlannerWorker:
    """A planning process for one job."""

    def __init__(self, job: Job) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self._process = subprocess.Popen(
            # -P: the folder of start.py is not for imports, either
            [sys.executable, "-P", str(START), MODULE, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=_environment(),
            # an interrupt at the keyboard is for the training process to handle
            start_new_session=True,
        )

        # what the training thread and the two threads below share
        self._requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._answers: dict[int, dict[str, Any]] = {}  # by step, not yet fetched
        self._changed = threading.Condition()  # notified with every answer and at the end
        self._ended = False  # the planning process has closed its stdout

        # what the training thread alone reads
        self._first: int | None = None  # the first step submitted
        self._first_lengths: list[int] | None = None  # while it is to be planned here
        self._submitted: set[int] = set()
        self._closed = False

        self.use(job)
        for loop in (self._write, self._read):
            name = f"flexseq-planner{loop.__name__}"
            threading.Thread(target=loop, daemon=True, name=name).start()
        atexit.register(self.close)

    def use(self, job: Job) -> None:
        """See `Planner.use`."""
        self._job = job
        self._send({"job": job.to_record()})

    def submit(self, step: int, lengths: Sequence[int], facts: StepFacts = NO_FACTS) -> None:
        """Ask for the plan of `step`. Returns at once."""
        if step in self._submitted:
            raise ValueError(f"step {step} was submitted before and its result not fetched")
        self._submitted.add(step)
        tokens = [int(length) for length in lengths]
        if self._first is None:
            self._first = step
            if self._job.is_quick and not facts:
                self._first_lengths = tokens
                return
        self._send({"id": step, "lengths": tokens, "facts": facts.to_record()})

    def wait(self, step: int, seconds: float) -> str | None:
        """Wait for an answer, or for the end of the process. See `Planner.wait`."""
        with self._changed:
            if self._changed.wait_for(lambda: self._is_known(step), timeout=seconds):
                return None
        return f"the planning process ({self._process.pid} on {socket.gethostname()})"

    def result(self, step: int) -> Any:
        """Return the plan of a submitted step, once. Waits as long as the process takes; `wait`
        sets a limit. The first step of a quick job is planned here.

        Raises the error that planning raised, or RuntimeError when the process died.
        """
        if step not in self._submitted:
            raise ValueError(f"step {step} was not submitted, or its result was fetched before")
        if step == self._first and self._first_lengths is not None:
            lengths = self._first_lengths
            self._first_lengths = None
            self._submitted.discard(step)
            return self._job.plan(lengths)
        with self._changed:
            self._changed.wait_for(lambda: self._is_known(step))
            answer = self._answers.pop(step, None)
        if answer is None:
            raise RuntimeError(self._why_none())
        self._submitted.discard(step)
        if "error" in answer:
            error = answer["error"]
            raise ERRORS[error["kind"]](error["message"])
        return self._job.read(answer["plan"])

    def close(self) -> None:
        """End the process. Plans not fetched are lost. May be called again."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._requests.put(None)
        # The process holds no state, and forked children of ours may keep its stdin open.
        self._process.kill()
        self._process.wait()

    def _is_known(self, step: int) -> bool:
        """Return whether there is an answer to `step`, or never will be from the process."""
        is_planned_here = step == self._first and self._first_lengths is not None
        return is_planned_here or step in self._answers or self._ended

    def _send(self, message: dict[str, Any]) -> None:
        self._requests.put(json.dumps(message) + "\n")

    def _write(self) -> None:
        """Write queued requests to the process. The writing thread runs this."""
        stream = self._process.stdin
        assert stream is not None, "stdin is a pipe"
        try:
            while (line := self._requests.get()) is not None:
                stream.write(line)
                stream.flush()
            stream.close()
        except (BrokenPipeError, ValueError):
            return  # the process died; the reader sees that and says so

    def _read(self) -> None:
        """File the answers of the process. The reading thread runs this."""
        stream = self._process.stdout
        assert stream is not None, "stdout is a pipe"
        try:
            for line in stream:
                answer = json.loads(line)
                with self._changed:
                    self._answers[answer["id"]] = answer
                    self._changed.notify_all()
        except ValueError:
            self._process.kill()  # it was killed in the middle of a line, or writes no answers
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _why_none(self) -> str:
        """Return why the process has ended, with the last words of a dead one."""
        if self._closed:
            return "the planning process was closed"
        self._process.wait()
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").splitlines()
        code = self._process.returncode
        first = f"the planning process ended with code {code}"
        return "\n".join([first, *said[-STDERR_LINES:]])


def _environment() -> dict[str, str]:
    """Return an environment without the current folder in paths, and one thread for NumPy."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if "PYTHONPATH" in environment:
        environment["PYTHONPATH"] = _without_current(environment["PYTHONPATH"])
    return environment


def _without_current(path: str) -> str:
    """Return a PYTHONPATH of absolute parts, without the current folder."""
    current = os.path.realpath(os.curdir)
    folders = []
    for part in path.split(os.pathsep):
        if os.path.realpath(part or os.curdir) != current:
            folders.append(os.path.abspath(part))
    return os.pathsep.join(folders)
