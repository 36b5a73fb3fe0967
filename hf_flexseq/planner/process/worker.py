"""Planning in a process of its own: JSON lines in, JSON lines out. `client.py` is the other end.

    stdin   {"job": {"kind": "groups", ...}}           the job of all that follows, as in `jobs.py`
            {"id": 7, "lengths": [...], "facts": ...}  any number of requests, and of other jobs
    stdout  {"id": 7, "plan": {...}}                   one answer each, in order
            {"id": 7, "error": {"kind": "PlanInfeasible", "message": "..."}}

The process ends when stdin closes, and when its parent is gone: a killed parent closes nothing
where forked children, such as a dataloader's workers, hold the same pipe. An error of our own
making ends it with a traceback on stderr.

Rejected: multiprocessing, whose spawn re-runs scripts that lack a main guard and whose fork is
unsafe once CUDA or gloo has threads. For the parent's end, Linux's PR_SET_PDEATHSIG: it comes when
the *thread* that started this process ends, and a notebook's or a server's may end early.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, TextIO

from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.plan.facts import StepFacts
from hf_flexseq.planner.process.jobs import Job, job_from_record

PARENT_CHECK_S = 0.5  # seconds between two looks at who the parent is


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer the requests of one stream on another until the first one ends."""
    job: Job | None = None
    for line in requests:
        request = json.loads(line)
        if "job" in request:
            job = job_from_record(request["job"])
            continue
        assert job is not None, "a job comes before the first request"
        facts = StepFacts.from_record(request["facts"])
        answer = {"id": request["id"], **_answer(job, request["lengths"], facts)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(job: Job, lengths: Sequence[int], facts: StepFacts) -> dict[str, Any]:
    """Return the plan as a record, or the planning error."""
    try:
        return {"plan": job.plan(lengths, facts).to_record()}
    except PlanInfeasible as error:
        return {"error": {"kind": PlanInfeasible.__name__, "message": str(error)}}
    except ValueError as error:
        return {"error": {"kind": ValueError.__name__, "message": str(error)}}


def end_with(parent: int) -> None:
    """End this process when the process `parent` is not its parent any more."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)  # at once, whatever the other thread is doing


if __name__ == "__main__":
    threading.Thread(target=end_with, args=[int(sys.argv[1])], daemon=True).start()
    serve(sys.stdin, sys.stdout)
