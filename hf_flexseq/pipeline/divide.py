"""Which stage gets which layers: the split whose slowest stage is fastest.

The first stage also has the embedding, the last one the final norm and the LM head, which at a
large vocabulary costs as much as several layers: dividing layers evenly is then 1.2 to 1.6 times
slower than this. Every stage but the last has at least one layer.

    best(s, n) = min over m of max(best(s - 1, m), cost of stage s with layers m..n-1)

Costs are integers, so that every rank finds the same split. Of equal splits the one with the
fewest layers in front is taken, where most chunks are in flight.
"""

from collections.abc import Sequence
from itertools import accumulate


def divide_layers(
    costs: Sequence[int], stages: int, *, first: int = 0, last: int = 0
) -> tuple[tuple[int, int], ...]:
    """[start, stop) of the layers of every stage.

    costs: of each layer, in any unit. first, last: what the first and the last stage cost beside
    their layers. Raises ValueError for more stages than layers + 1.
    """
    if not 1 <= stages <= len(costs) + 1:
        raise ValueError(f"{len(costs)} layers make at most {len(costs) + 1} stages, not {stages}")
    sums = (0, *accumulate(costs))

    def cost(stage: int, start: int, stop: int) -> int:
        return sums[stop] - sums[start] + first * (stage == 0) + last * (stage == stages - 1)

    layers = len(costs)
    best = {stop: (cost(0, 0, stop), (0,)) for stop in range(min(1, layers), layers + 1)}
    for stage in range(1, stages):
        best = {
            stop: min(
                (max(slowest, cost(stage, start, stop)), (*starts, start))
                for start, (slowest, starts) in best.items()
                if start + (stage < stages - 1) <= stop
            )
            for stop in range(stage + (stage < stages - 1), layers + 1)
        }
    starts = best[layers][1]
    return tuple(zip(starts, (*starts[1:], layers), strict=True))
