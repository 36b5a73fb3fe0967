"""InfiniPipe's checkpointing program (arXiv 2509.21275, equations 15 to 20), solved by HiGHS.

C_j is how many layers are recomputed by every backward on diagonal j of the pipeline: the k-th
backward of stage p is on diagonal k + P - p. A layer recomputed on one stage delays all others as
much, so a diagonal's stages may as well share it, and n + P - 1 integers are enough:

    minimise    sum_j C_j
    such that   sum_i saving_i C_(j_i) >= excess    for every moment at which a stage would hold
                                                    too much, over the chunks i in flight then
                0 <= C_j <= layers of a stage
                sum_j C_j <= a limit                beyond which a better plan is known

The solver ends at the paper's gap of 2 % or after a count of nodes, never by the clock, with one
thread and a fixed seed. The paper solves the program with SCIP.
"""

from collections.abc import Sequence

from hf_flexseq.planner.solver import new_solver
from hf_flexseq.published.infinipipe.chunking import Moment

GAP = 0.02  # the paper's: how far the solution may be above the proven bound
NODES = 200  # branch-and-bound nodes of one program; bounds the planning time of a step


def solve(
    moments: Sequence[Moment], *, variables: int, most: int, limit: int
) -> tuple[int, ...] | None:
    """Return the layers of each diagonal; None if no allowed number was found to save enough.

    moments: every one at which a stage would hold too much. variables: diagonals of the pipeline.
    most: layers that each diagonal may recompute. limit: layers that all may recompute together.
    """
    # 1. what no solution can save
    for excess, terms in moments:
        if most * sum(saved for _, saved in terms) < excess:
            return None

    # 2. the program
    limits = {"mip_rel_gap": GAP, "mip_max_nodes": NODES}
    solver = new_solver(**limits, random_seed=1, parallel="off")
    layers = [solver.addIntegral(0, most, obj=1) for _ in range(variables)]
    solver.addConstr(solver.qsum(layers) <= limit)
    for excess, terms in moments:
        weighted = [saved / excess * layers[diagonal] for diagonal, saved in terms]
        solver.addConstr(solver.qsum(weighted) >= 1)

    # 3. its solution
    solver.solve()
    values = list(solver.getSolution().col_value)
    chosen = tuple(round(value) for value in values) or (0,) * variables

    # 4. checked in integers, since the solver's tolerances are not
    if sum(chosen) > limit:
        return None
    for excess, terms in moments:
        if sum(chosen[diagonal] * saved for diagonal, saved in terms) < excess:
            return None
    return chosen
