"""Planners as the training process sees them: submit lengths, fetch plans later.

    InlinePlanner    plans in the training process, when the plan is fetched
    PlannerWorker    plans in a process of its own, from the moment of submission on

A PlannerWorker has two threads: one writes requests from a queue, the other reads answers. Neither
pipe can therefore fill up and stop both processes, however many requests are outstanding. The
planning process writes stderr into an unnamed file, whose last lines explain a death.
"""

import atexit
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.planner.process.jobs import Job

MODULE = "hf_flexseq.planner.process.worker"  # what the planning process runs
ERRORS = {"PlanInfeasible": PlanInfeasible, "ValueError": ValueError}
STDERR_LINES = 20  # of a dead planning process, shown in the error; a traceback fits


class Planner(Protocol):
    """Plans optimizer steps, perhaps in another process."""

    def submit(self, step: int, lengths: list[int]) -> None:
        """Ask for the plan of `step`, counted from 0. Returns at once.

        The plan of step 0 has all notes; later ones lack those that take long to find.
        """

    def result(self, step: int) -> Any:
        """Return the plan of a submitted step, once; raise what planning raised."""

    def close(self) -> None:
        """End the planner. Plans not fetched are lost."""


class InlinePlanner:
    """Plans in this process, when the result is wanted."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._submitted: dict[int, list[int]] = {}

    def submit(self, step: int, lengths: list[int]) -> None:
        """Note the lengths of `step`."""
        self._submitted[step] = lengths

    def result(self, step: int) -> Any:
        """Plan a submitted step. Raises ValueError as the job does."""
        return self._job.plan(self._submitted.pop(step), explain=step == 0)

    def close(self) -> None:
        """Forget what was submitted."""
        self._submitted.clear()


class PlannerWorker:
    """A planning process for one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self._process = subprocess.Popen(
            # -P: modules in the current directory must not hide the standard library's
            [sys.executable, "-P", "-m", MODULE],
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
        self._submitted: set[int] = set()
        self._closed = False

        self._send(job.to_record())
        for loop in (self._write, self._read):
            name = f"flexseq-planner{loop.__name__}"
            threading.Thread(target=loop, daemon=True, name=name).start()
        atexit.register(self.close)

    def submit(self, step: int, lengths: Sequence[int]) -> None:
        """Ask for the plan of `step`. Returns at once."""
        if step in self._submitted:
            raise ValueError(f"step {step} was submitted before and its result not fetched")
        self._submitted.add(step)
        tokens = [int(length) for length in lengths]
        self._send({"id": step, "lengths": tokens, "explain": step == 0})

    def result(self, step: int, timeout_s: float = 600.0) -> Any:
        """Return the plan of a submitted step, once.

        Raises what planning raised, or RuntimeError when the process died or gave no answer for
        `timeout_s` seconds.
        """
        if step not in self._submitted:
            raise ValueError(f"step {step} was not submitted, or its result was fetched before")
        with self._changed:
            self._changed.wait_for(lambda: step in self._answers or self._ended, timeout=timeout_s)
            answer = self._answers.pop(step, None)
        if answer is None:
            raise RuntimeError(self._why_none(step, timeout_s))
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
        for line in stream:
            answer = json.loads(line)
            with self._changed:
                self._answers[answer["id"]] = answer
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _why_none(self, step: int, timeout_s: float) -> str:
        """Return the reason why `step` has no plan, with the last words of a dead process."""
        if self._closed:
            return f"no plan for step {step}: the planning process was closed"
        if not self._ended:
            return (
                f"no plan for step {step}: the planning process has not answered for {timeout_s} s"
            )
        self._process.wait()
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").splitlines()
        code = self._process.returncode
        first = f"no plan for step {step}: the planning process ended with code {code}"
        return "\n".join([first, *said[-STDERR_LINES:]])


def _environment() -> dict[str, str]:
    """Return this process's environment with this package's folder importable, and with one thread
    for NumPy, which has no use for more here."""
    package = str(Path(__file__).resolve().parents[3])
    inherited = os.environ.get("PYTHONPATH")
    path = package if inherited is None else os.pathsep.join((package, inherited))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
