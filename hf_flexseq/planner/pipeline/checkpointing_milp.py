"""InfiniPipe's checkpointing program (arXiv 2509.21275, equations 15 to 20), solved by HiGHS
through PuLP.

C_j is how many layers are recomputed by every backward on diagonal j of the pipeline: the k-th
backward of stage p is on diagonal k + P - p. A layer recomputed on one stage delays all others as
much, so a diagonal's stages may as well share it, and n + P - 1 integers are enough:

    minimise sum_j C_j
    sum_i saving_i C_(j_i) >= excess      every moment of a stage that would hold too much, i in
                                          flight then
    0 <= C_j <= layers of a stage
    sum_j C_j <= a limit                  beyond which somebody has a better plan

It ends at the paper's gap of 2 % or after a count of nodes, never by the clock, with one thread
and a fixed seed. The paper solves it with SCIP.
"""

from dataclasses import dataclass

import pulp

GAP = 0.02
NODES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointingTask:
    """variables: diagonals. most: layers each may have. limit: layers of all together. moments:
    (excess bytes, ((diagonal, bytes saved per layer), ...)) of every moment that would hold too
    much."""

    variables: int
    most: int
    limit: int
    moments: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]


def solve(task: CheckpointingTask) -> tuple[int, ...] | None:
    """The layers of each diagonal; None where no allowed number of layers saves enough, or none
    was found."""
    if any(
        task.most * sum(saved for _, saved in terms) < excess for excess, terms in task.moments
    ):
        return None
    program = pulp.LpProblem("checkpointing", pulp.LpMinimize)
    layers = [
        program.add_variable(f"C{j}", 0, task.most, pulp.LpInteger) for j in range(task.variables)
    ]
    program += pulp.lpSum(layers)
    program += pulp.lpSum(layers) <= task.limit
    for excess, terms in task.moments:
        program += (
            pulp.LpAffineExpression([(layers[j], saved / excess) for j, saved in terms]) >= 1
        )
    solver = pulp.HiGHS(
        msg=False, gapRel=GAP, threads=1, random_seed=1, mip_max_nodes=NODES, parallel="off"
    )
    solver.createAndConfigureSolver(program)
    solver.buildSolverModel(program)
    solver.callSolver(program)
    # PuLP itself cannot read what a count of nodes ended
    values = list(program.solverModel.getSolution().col_value)
    chosen = (
        tuple(round(values[variable.index]) for variable in layers)
        if values
        else (0,) * task.variables
    )
    saves = all(
        sum(chosen[j] * saved for j, saved in terms) >= excess for excess, terms in task.moments
    )
    return chosen if saves and sum(chosen) <= task.limit else None
