"""Planning in a process of its own: JSON lines in, JSON lines out. `client.py` is the other end.

    stdin   {"kind": "groups", "cost": {...}, ...}     once: the job, as in `jobs.py`
            {"id": 7, "lengths": [...], "explain": false}    then any number of requests
    stdout  {"id": 7, "plan": {...}}                   one answer each, in order
            {"id": 7, "error": {"kind": "PlanInfeasible", "message": "..."}}

The process ends when stdin closes. An error of our own making ends it with a traceback on stderr.
Rejected: multiprocessing, whose spawn re-runs scripts that lack a main guard and whose fork is
unsafe once CUDA or gloo has threads.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.planner.process.jobs import Job, job_from_record


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer the requests of one stream on another until the first one ends."""
    first_line = requests.readline()
    if not first_line:
        return  # the training process ended before it had a job
    job = job_from_record(json.loads(first_line))
    for line in requests:
        request = json.loads(line)
        answer = {
            "id": request["id"],
            **_answer(job, request["lengths"], request.get("explain", False)),
        }
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(job: Job, lengths: Sequence[int], explain: bool) -> dict[str, Any]:
    """Return the plan as a record, or the error that says why there is none."""
    try:
        return {"plan": job.plan(lengths, explain=explain).to_record()}
    except PlanInfeasible as error:
        return {"error": {"kind": PlanInfeasible.__name__, "message": str(error)}}
    except ValueError as error:
        return {"error": {"kind": ValueError.__name__, "message": str(error)}}


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
