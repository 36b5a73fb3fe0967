"""The slow twin of every planner: try all laminar plans."""

from collections.abc import Iterator, Sequence

from hf_flexseq.cost import CostModel
from hf_flexseq.topology import Topology

Block = tuple[int, int]


def best_lockstep_ns(
    lengths: Sequence[int], topology: Topology, cost: CostModel, *, cap: int, batches: int
) -> int:
    """Nanoseconds of the best plan with at most `batches` micro-batches, each sequence at its
    cheapest strategy.

    Depth first over the sequences, cut where the time so far already exceeds the best found.
    """
    world = topology.world_size
    blocks = [
        (a, b) for a in range(world) for b in range(a + 1, world + 1) if topology.allows(a, b)
    ]
    load = [[0] * world for _ in range(batches)]
    held = [[0] * world for _ in range(batches)]
    used: list[list[Block]] = [[] for _ in range(batches)]
    best = [2**62]

    def so_far() -> int:
        return sum(max(ranks) + cost.micro_batch_ns for ranks in load if max(ranks))

    def visit(index: int) -> None:
        if so_far() >= best[0]:
            return
        if index == len(lengths):
            best[0] = so_far()
            return
        for m, (start, stop), time, need in _options(lengths[index], blocks, topology, cost, used):
            if max(held[m][start:stop]) + need > cap:
                continue
            for sign in (1, -1):
                for rank in range(start, stop):
                    load[m][rank] += sign * time
                    held[m][rank] += sign * need
                if sign == 1:
                    used[m].append((start, stop))
                    visit(index + 1)
                    used[m].pop()

    visit(0)
    return best[0]


def _options(
    length: int, blocks: list[Block], topology: Topology, cost: CostModel, used: list[list[Block]]
) -> Iterator[tuple[int, Block, int, int]]:
    """(micro-batch, block, nanoseconds, tokens per rank) of every way to place a sequence beside
    `used`."""
    for m, there in enumerate(used):
        for start, stop in blocks:
            if any(start < b < stop < d or b < start < d < stop for b, d in there):
                continue
            degree, spans = stop - start, topology.spans_nodes(start, stop)
            names = ("local",) if degree == 1 else cost.strategies("auto")
            opened = 0 if (start, stop) in there else cost.latency_ns(degree)
            yield (
                m,
                (start, stop),
                opened + min(cost.sequence_ns(length, degree, n, spans) for n in names),
                -(-length // degree),
            )
        if not there:
            return  # the micro-batches after an empty one are empty too, and like it
