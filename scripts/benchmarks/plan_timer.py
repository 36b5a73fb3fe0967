"""Time the planning calls of one checkout, which `planning_time.py` asks for line by line.

    PYTHONPATH=CHECKOUT python scripts/benchmarks/plan_timer.py

Every line of the input is a step: {"lengths": [...], "nodes": n, "ranks_per_node": n, "cap": n,
"preset": name}. The answer is one line: {"milliseconds": f, "objective_s": f,
"lower_bound_s": f}. Only names that old checkouts have, too, are used.
"""

import json
import sys
import time

from hf_flexseq.base.topology import Topology
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan

try:
    from hf_flexseq.cost.presets import load_cost_model
except ImportError:  # checkouts in which the cost model was one module
    from hf_flexseq.presets import load_cost_model


def main() -> None:
    for line in sys.stdin:
        step = json.loads(line)
        topology = Topology(nodes=step["nodes"], ranks_per_node=step["ranks_per_node"])
        cost = load_cost_model(step["preset"])
        began = time.thread_time()
        plan = make_plan(
            step["lengths"], topology, cost, PlanOptions(max_tokens_per_rank=step["cap"])
        )
        answer = {
            "milliseconds": 1e3 * (time.thread_time() - began),
            "objective_s": plan.objective_s,
            "lower_bound_s": plan.lower_bound_s,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
