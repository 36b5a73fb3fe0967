"""Planning in a process of its own: JSON lines in, JSON lines out. `client.py` is the other end.

    stdin   {"topology": {...}, "cost": {...}, "options": {...}}   once: where, by what model,
            options of make_plan
            {"id": 7, "lengths": [...]}                            then any number of requests
    stdout  {"id": 7, "plan": {...}}                               one answer each, in order
            {"id": 7, "error": {"kind": "PlanInfeasible", "message": "..."}}

It ends when stdin closes. An error of our own making ends it with a traceback on stderr. Rejected:
multiprocessing, whose spawn re-runs scripts that lack a main guard and whose fork is unsafe once
CUDA or gloo has threads.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

from hf_flexseq.cost import CostModel
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.planner import make_plan
from hf_flexseq.topology import Topology


def make_planner(configuration: dict[str, Any]) -> Callable[[list[int]], Any]:
    """The planner that the first line asks for."""
    return partial(
        make_plan,
        topology=Topology(**configuration["topology"]),
        cost=CostModel.from_record(configuration["cost"]),
        **configuration["options"],
    )


def serve(
    requests: TextIO,
    answers: TextIO,
    make: Callable[[dict[str, Any]], Callable[[list[int]], Any]] = make_planner,
) -> None:
    """Answer the requests of one stream on another until the first one ends."""
    configuration = json.loads(requests.readline() or "null")
    if configuration is None:
        return
    planner = make(configuration)
    for line in requests:
        request = json.loads(line)
        answers.write(
            json.dumps({"id": request["id"], **_answer(planner, request["lengths"])}) + "\n"
        )
        answers.flush()


def _answer(planner: Callable[[list[int]], Any], lengths: list[int]) -> dict[str, Any]:
    try:
        return {"plan": planner(lengths).to_record()}
    except ValueError as error:
        kind = (
            PlanInfeasible.__name__ if isinstance(error, PlanInfeasible) else ValueError.__name__
        )
        return {"error": {"kind": kind, "message": str(error)}}


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
