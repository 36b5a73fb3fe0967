"""A baseline: the rule of transformers' `BatchRebalanceSampler`
(train_sampling_strategy="batch_rebalance").

The sampler never splits a sequence. It sorts the sequences by falling length, cuts them into one
contiguous group for each (rank, micro-batch) pair, and chooses how many sequences each group gets.
A group of n sequences of at most s tokens, padded to s, costs n (s + 0.001 s^2).

1. Start from equal counts.
2. Move one sequence from the most expensive group to the cheapest, until the counts repeat; keep
   the counts with the smallest difference between the two.
3. A most expensive group of one sequence cannot give. Its micro-batch is filled up to its cost and
   left alone from then on (frozen).
4. Sort the groups by falling cost: each `world` of them make a micro-batch.

Left out: padding in memory, which our execution does not need. Added: the sampler leaves the
number of micro-batches and memory to the user; here they are as few as memory allows. With fewer
sequences than pairs, ranks stay idle.

tests/published/test_baselines.py compares the counts with transformers' own class.
"""

from itertools import accumulate

from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.planner.task import PlanTask, longest_first

MOVES = 30  # moves for each group, at most, as in the sampler


def batch_rebalance_micro_batches(task: PlanTask) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of the sampler's rule, which uses neither costs nor strategies."""
    world = task.topology.world_size
    order = longest_first(task.lengths)
    tokens = [task.lengths[i] for i in order]
    # 1. As few micro-batches as memory allows. With a group for each sequence everything fits.
    batches = -(-sum(tokens) // (task.cap * world))
    slices = rebalanced(tokens, world, batches)
    while any(sum(tokens[start:stop]) > task.cap for start, stop in slices):
        batches += 1
        slices = rebalanced(tokens, world, batches)
    # 2. Each `world` groups make a micro-batch.
    micro_batches = []
    for first in range(0, len(slices), world):
        groups = []
        for rank, (start, stop) in enumerate(slices[first : first + world]):
            ids = tuple(sorted(order[start:stop]))
            groups.append(Group(ranks=(rank,), sequences=ids, strategy="local"))
        micro_batches.append(MicroBatch(groups=tuple(groups)))
    return tuple(micro_batches)


def rebalanced(tokens: list[int], ranks: int, batches: int) -> list[tuple[int, int]]:
    """Return (start, stop) in falling `tokens` of every group, by micro-batch and rank."""
    groups = min(len(tokens), ranks * batches)
    each, rest = divmod(len(tokens), groups)
    counts = [each + 1] * rest + [each] * (groups - rest)
    search = _RebalanceSearch(tokens, ranks, counts)
    search.run()
    slices = search.slices()
    costs = search.costs()
    by_falling_cost = sorted(range(groups), key=lambda group: -costs[group])
    return [slices[group] for group in by_falling_cost]


class _RebalanceSearch:
    """Hill climbing over the counts of sequences of each group."""

    def __init__(self, tokens: list[int], ranks: int, counts: list[int]) -> None:
        self.tokens = tokens  # lengths, falling
        self.ranks = ranks
        self.counts = counts  # [groups]
        self.frozen: set[int] = set()  # groups that are left alone

    def slices(self) -> list[tuple[int, int]]:
        """Return (start, stop) in `tokens` of each group."""
        stops = list(accumulate(self.counts))
        starts = [0, *stops[:-1]]
        return list(zip(starts, stops, strict=True))

    def costs(self) -> list[int]:
        """Return a thousand times each group's cost."""
        return [padded_cost(stop - start, self.tokens[start]) for start, stop in self.slices()]

    def run(self) -> None:
        """Leave the best counts met in `counts`."""
        seen: set[tuple[int, ...]] = set()
        best = list(self.counts)
        least_difference = None
        for _ in range(max(MOVES * len(self.counts), len(self.tokens))):
            costs = self.costs()
            active = [group for group in range(len(self.counts)) if group not in self.frozen]
            if tuple(self.counts) in seen or len(active) <= 1:
                break
            seen.add(tuple(self.counts))
            # 1. The two groups that differ most.
            most_expensive = max(active, key=costs.__getitem__)
            cheapest = min(active, key=costs.__getitem__)
            difference = costs[most_expensive] - costs[cheapest]
            if least_difference is None or difference < least_difference:
                best = list(self.counts)
                least_difference = difference
            if not difference:
                break
            # 2. One sequence from the one to the other, or no more of this micro-batch.
            if self.counts[most_expensive] > 1:
                self.counts[most_expensive] -= 1
                self.counts[cheapest] += 1
            else:
                self._freeze(costs, most_expensive)
        self.counts = best

    def _freeze(self, costs: list[int], most_expensive: int) -> None:
        """Fill the micro-batch of the most expensive group up to its cost, and freeze it."""
        ranking = sorted(range(len(costs)), key=lambda group: -costs[group])
        first = ranking.index(most_expensive) // self.ranks * self.ranks
        batch = set(ranking[first : first + self.ranks])
        for group in batch - self.frozen - {most_expensive}:
            while self._may_take(group, costs[most_expensive]):
                if not self._give_to(group, batch):
                    break
        self.frozen |= batch

    def _give_to(self, group: int, batch: set[int]) -> bool:
        """Move a sequence to `group` from the cheapest group outside of its micro-batch `batch`.

        False when no group can give.
        """
        givers = []
        for other, count in enumerate(self.counts):
            if other not in self.frozen and other not in batch and count > 1:
                givers.append(other)
        if not givers:
            return False
        costs = self.costs()
        self.counts[group] += 1
        self.counts[min(givers, key=costs.__getitem__)] -= 1
        return True

    def _may_take(self, group: int, most: int) -> bool:
        """Return whether a group with one sequence more costs at most `most`."""
        start = sum(self.counts[:group])
        return padded_cost(self.counts[group] + 1, self.tokens[start]) <= most


def padded_cost(count: int, longest: int) -> int:
    """Return a thousand times the cost of `count` sequences padded to `longest` tokens."""
    return count * longest * (1000 + longest)
