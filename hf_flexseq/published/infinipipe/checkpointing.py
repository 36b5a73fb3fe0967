"""InfiniPipe's checkpointing program (arXiv 2509.21275, equations 15 to 20), solved by HiGHS
through PuLP.

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

import pulp

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
    program = pulp.LpProblem("checkpointing", pulp.LpMinimize)
    layers = []
    for diagonal in range(variables):
        layers.append(program.add_variable(f"C{diagonal}", 0, most, pulp.LpInteger))
    program += pulp.lpSum(layers)
    program += pulp.lpSum(layers) <= limit
    for excess, terms in moments:
        weighted = [(layers[diagonal], saved / excess) for diagonal, saved in terms]
        program += pulp.LpAffineExpression(weighted) >= 1

    # 3. its solution
    solver = pulp.HiGHS(
        msg=False, gapRel=GAP, threads=1, random_seed=1, mip_max_nodes=NODES, parallel="off"
    )
    solver.createAndConfigureSolver(program)
    solver.buildSolverModel(program)
    solver.callSolver(program)
    # Taken from HiGHS itself: PuLP cannot read what a count of nodes ended.
    values = list(program.solverModel.getSolution().col_value)
    if values:
        chosen = tuple(round(values[variable.index]) for variable in layers)
    else:
        chosen = (0,) * variables

    # 4. checked in integers, since the solver's tolerances are not
    if sum(chosen) > limit:
        return None
    for excess, terms in moments:
        if sum(chosen[diagonal] * saved for diagonal, saved in terms) < excess:
            return None
    return chosen
