"""The training process's end of a planning process: submit lengths, fetch plans.

A thread writes requests from a queue and a thread reads answers, so that neither pipe can fill up
and stop both processes, however many requests are outstanding. stderr goes to an unnamed file,
whose last lines explain a death.
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_flexseq.cost import CostModel
from hf_flexseq.plan import Plan, PlanInfeasible
from hf_flexseq.topology import Topology

ERRORS = {"PlanInfeasible": PlanInfeasible, "ValueError": ValueError}
STDERR_LINES = 20


class PlannerWorker:
    """A planning process for one topology, cost model and set of `make_plan` options."""

    MODULE = "hf_flexseq.planner.process.worker"
    PLAN: Any = Plan  # what an answer is a record of

    def __init__(self, topology: Topology, cost: CostModel, **options: Any) -> None:
        self._start({"topology": asdict(topology), "cost": cost.to_record(), "options": options})

    def _start(self, configuration: dict[str, Any]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self._process = subprocess.Popen(
            # -P: modules in the current directory must not hide the standard library's
            [sys.executable, "-P", "-m", self.MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=_environment(),
            # an interrupt at the keyboard is for the training process to handle
            start_new_session=True,
        )
        self._answers: dict[int, dict[str, Any]] = {}
        self._submitted: set[int] = set()
        self._changed = threading.Condition()
        self._ended = self._closed = False
        self._requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._send(configuration)
        for loop in (self._write, self._read):
            threading.Thread(
                target=loop, daemon=True, name=f"flexseq-planner{loop.__name__}"
            ).start()
        atexit.register(self.close)

    def submit(self, step: int, lengths: Sequence[int]) -> None:
        """Ask for the plan of `step`. Returns at once."""
        if step in self._submitted:
            raise ValueError(f"step {step} was submitted before and its result not fetched")
        self._submitted.add(step)
        self._send({"id": step, "lengths": [int(length) for length in lengths]})

    def result(self, step: int, timeout_s: float = 600.0) -> Any:
        """The plan of a submitted step, once.

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
            raise ERRORS[answer["error"]["kind"]](answer["error"]["message"])
        return self.PLAN.from_record(answer["plan"])

    def close(self) -> None:
        """End the process. Plans not fetched are lost. May be called again."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._requests.put(None)
        # it holds no state, and forked children of ours may keep its stdin open
        self._process.kill()
        self._process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        self._requests.put(json.dumps(message) + "\n")

    def _write(self) -> None:
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
        if self._closed:
            return f"no plan for step {step}: the planning process was closed"
        if not self._ended:
            return (
                f"no plan for step {step}: the planning process has not answered for {timeout_s} s"
            )
        self._process.wait()
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").splitlines()[-STDERR_LINES:]
        return "\n".join(
            [
                f"no plan for step {step}: the planning process ended with code "
                f"{self._process.returncode}",
                *said,
            ]
        )


def _environment() -> dict[str, str]:
    """Ours, with this package's folder importable and one thread for NumPy, which has no use for
    more here."""
    package = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    path = package if inherited is None else os.pathsep.join((package, inherited))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
