"""Which stage gets which layers: the split whose slowest stage is fastest.

The first stage also has the embedding, which costs next to nothing, the last one the final norm
and the LM head, which at a large vocabulary costs as much as several layers: dividing layers
evenly is then 1.2 to 1.6 times slower than this. Every stage but the last has at least one layer.

    best(s, n) = min over m of max(best(s - 1, m), cost of stage s with layers m..n-1)

Layers that share keys (Gemma 4: later layers read the keys of earlier ones) are *inseparable*: one
stage has all of them, from the first layer that stores keys to the last one that reads them. They
are divided as if they were one layer.

Costs are integers, so every rank finds the same split. Of equal splits the one with the fewest
layers in front is taken, where most chunks are in flight.

The slow reference, which tries every split, is in `tests/pipeline/test_divide.py`.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

NONE = range(0)  # no layers


def divide_layers(
    costs: Sequence[int],
    stages: int,
    *,
    last: int = 0,
    inseparable: range = NONE,
) -> tuple[tuple[int, int], ...]:
    """Return [start, stop) of the layers of every stage.

    costs: of each layer, in any unit
    last: cost of the last stage besides its layers
    inseparable: layers that share keys, which one stage has all

    Raises ValueError for more stages than layers + 1, inseparable ones being one.
    """
    bounds = [place for place in range(len(costs) + 1) if place not in inseparable[1:]]
    blocks = [sum(costs[start:stop]) for start, stop in pairwise(bounds)]
    if not 1 <= stages <= len(blocks) + 1:
        together = ""
        if inseparable:
            together = (
                f", of which {inseparable[0]} to {inseparable[-1]} share keys and stay in one "
                "stage,"
            )
        raise ValueError(
            f"{len(costs)} layers{together} make at most {len(blocks) + 1} stages, not {stages}"
        )
    division = _divide(blocks, stages, last)
    return tuple((bounds[start], bounds[stop]) for start, stop in division)


def _divide(costs: Sequence[int], stages: int, last: int) -> tuple[tuple[int, int], ...]:
    """Divide as `divide_layers` does, with all layers separable."""
    layers = len(costs)
    sums = (0, *accumulate(costs))

    def stage_cost(stage: int, start: int, stop: int) -> int:
        cost = sums[stop] - sums[start]
        return cost + last if stage == stages - 1 else cost

    # best[n] for the stages so far: (the slowest one's cost, where each of them starts). Tuples
    # compare the starts where costs are equal.
    best: dict[int, tuple[int, tuple[int, ...]]] = {}
    for stop in range(min(1, layers), layers + 1):
        best[stop] = (stage_cost(0, 0, stop), (0,))
    for stage in range(1, stages):
        least = 1 if stage < stages - 1 else 0  # layers that the stage must have
        with_stage: dict[int, tuple[int, tuple[int, ...]]] = {}
        for stop in range(stage + least, layers + 1):
            options = []
            for start, (slowest, starts) in best.items():
                if start + least <= stop:
                    cost = max(slowest, stage_cost(stage, start, stop))
                    options.append((cost, (*starts, start)))
            with_stage[stop] = min(options)
        best = with_stage

    _, starts = best[layers]
    stops = (*starts[1:], layers)
    return tuple(zip(starts, stops, strict=True))
