"""A baseline: the rule of transformers' `BatchRebalanceSampler`
(train_sampling_strategy="batch_rebalance").

It never splits a sequence; it chooses how many of them, sorted by falling length, each (rank,
micro-batch) pair gets, where n sequences of at most s tokens, padded to s, cost n (s + 0.001 s^2).

1. Start from equal counts.
2. Move one sequence from the dearest group to the cheapest, until the counts repeat; keep the
   smallest spread seen.
3. A dearest group of one sequence cannot give: its micro-batch is filled up to its cost and left
   alone from then on.
4. Groups sorted by falling cost make the micro-batches.

The sampler leaves the number of micro-batches and memory to the user: here they are as few as
memory allows, counted without padding, which our execution does not need. With fewer sequences
than pairs, ranks stay idle.
"""

from collections.abc import Sequence
from itertools import accumulate

from hf_flexseq.cost import CostModel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.planner.published.blaster import falling
from hf_flexseq.topology import Topology

PATIENCE = 30  # moves per group


def batch_rebalance_micro_batches(
    lengths: Sequence[int], topology: Topology, cost: CostModel, *, strategy: str, cap: int
) -> tuple[MicroBatch, ...]:
    """The micro-batches of that rule. Every sequence must fit one rank."""
    del cost, strategy  # it has a cost of its own
    order, world = falling(lengths), topology.world_size
    tokens = [lengths[i] for i in order]
    batches = -(-sum(lengths) // (cap * world))
    while True:
        spans = rebalanced(tokens, world, batches)
        if all(sum(tokens[a:b]) <= cap for a, b in spans):
            break
        batches += 1  # with a sequence per group, everything fits
    return tuple(
        MicroBatch(
            groups=tuple(
                Group(ranks=(rank,), sequences=tuple(sorted(order[a:b])), strategy="local")
                for rank, (a, b) in enumerate(spans[first : first + world])
            )
        )
        for first in range(0, len(spans), world)
    )


def rebalanced(tokens: list[int], ranks: int, batches: int) -> list[tuple[int, int]]:
    """(start, stop) of every group in `tokens`, which fall, in the order of rank and
    micro-batch."""
    groups = min(len(tokens), ranks * batches)
    search = _RebalanceSearch(
        tokens, ranks, [len(tokens) // groups + (i < len(tokens) % groups) for i in range(groups)]
    )
    search.run()
    spans = search.spans()
    costs = search.costs()
    return [spans[g] for g in sorted(range(groups), key=lambda g: -costs[g])]


class _RebalanceSearch:
    """Hill climbing over the counts of sequences per group."""

    def __init__(self, tokens: list[int], ranks: int, counts: list[int]) -> None:
        self.tokens, self.ranks, self.counts = tokens, ranks, counts
        self.frozen: set[int] = set()

    def spans(self) -> list[tuple[int, int]]:
        stops = list(accumulate(self.counts))
        return list(zip([0, *stops[:-1]], stops, strict=True))

    def costs(self) -> list[int]:
        """A thousand times each group's cost."""
        return [padded_cost(stop - start, self.tokens[start]) for start, stop in self.spans()]

    def run(self) -> None:
        """Leave the best counts met in `counts`."""
        seen: set[tuple[int, ...]] = set()
        best, least = list(self.counts), None
        for _ in range(max(PATIENCE * len(self.counts), len(self.tokens))):
            costs, active = (
                self.costs(),
                [g for g in range(len(self.counts)) if g not in self.frozen],
            )
            if tuple(self.counts) in seen or len(active) <= 1:
                break
            seen.add(tuple(self.counts))
            dearest, cheapest = (
                max(active, key=costs.__getitem__),
                min(active, key=costs.__getitem__),
            )
            spread = costs[dearest] - costs[cheapest]
            if least is None or spread < least:
                best, least = list(self.counts), spread
            if not spread:
                break
            if self.counts[dearest] > 1:
                self.counts[dearest] -= 1
                self.counts[cheapest] += 1
            else:
                self._freeze(costs, dearest)
        self.counts = best

    def _freeze(self, costs: list[int], dearest: int) -> None:
        """Fill the groups that share a micro-batch with `dearest` up to its cost, and leave them
        alone from now on."""
        ranking = sorted(range(len(costs)), key=lambda g: -costs[g])
        first = ranking.index(dearest) // self.ranks * self.ranks
        batch = set(ranking[first : first + self.ranks])
        for group in batch - self.frozen - {dearest}:
            while self._may_take(group, costs[dearest]):
                donors = [
                    g
                    for g in range(len(costs))
                    if g not in self.frozen | batch and self.counts[g] > 1
                ]
                if not donors:
                    break
                now = self.costs()
                self.counts[group] += 1
                self.counts[min(donors, key=now.__getitem__)] -= 1
        self.frozen |= batch

    def _may_take(self, group: int, most: int) -> bool:
        return padded_cost(self.counts[group] + 1, self.tokens[sum(self.counts[:group])]) <= most


def padded_cost(count: int, longest: int) -> int:
    """A thousand times the cost of `count` sequences padded to `longest` tokens."""
    return count * longest * (1000 + longest)
