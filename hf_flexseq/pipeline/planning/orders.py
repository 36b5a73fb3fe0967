"""One forward, one backward: the fixed orders of 1F1B, Seq1F1B and interleaved Seq1F1B (arXiv
2406.03488).

Chunks are forwarded unit by unit, and go backward unit by unit with the last chunk of each first:
the paper's partially ordered queue. With P ranks, k chunks in the largest unit and n chunks in
all, rank r runs

1. w_r = min(P - r - 2 + k, n) forwards,
2. pairs of one forward and one backward,
3. w_r backwards.

k = 1 is 1F1B. The warm-up is the shortest that has the first unit's last chunk at the last stage
in time. Over V stages per rank, stages take turns every P chunks and

    w_r = min((V - 1) P + 2 (P - r - 1) + k - 1, V n)

which is the authors' correction of their figure: it shows turns of P k chunks and warms up too
long. With P = 4 and k = 3 turns of P chunks deadlock, since the first backward would come before
its unit's last forward, and units of different k do not fit at all. Here a turn holds whole units,
the fewest that have P chunks; with g chunks in a turn

    w_r = min(max over turns and units of ((V - 1) g + k - 1) + 2 (P - r - 1), V n)

which is the above where k divides P.
"""

from collections.abc import Sequence

from hf_flexseq.pipeline.planning.plan import Action, Actions

Name = tuple[int, int]  # (unit, index of the chunk inside the unit)


def one_forward_one_backward(
    sizes: Sequence[int], ranks: int, stages_per_rank: int = 1, first: int = 0
) -> Actions:
    """Return every rank's actions, on several stages in turns.

    sizes: how many chunks each unit has
    first: the number of the first unit
    """
    turns = _turns(sizes, ranks)
    # chunks from a unit's first forward on a rank to its last one on the rank's last stage
    longest_way = 0
    for turn in turns:
        turn_chunks = sum(sizes[unit] for unit in turn)
        for unit in turn:
            way = (stages_per_rank - 1) * turn_chunks + sizes[unit] - 1
            longest_way = max(longest_way, way)

    ahead = 1 if stages_per_rank == 1 else 2  # forwards of a warm-up for each rank behind
    lists = []
    for rank in range(ranks):
        stages = [rank + ranks * number for number in range(stages_per_rank)]
        forwards = []
        backwards = []
        for turn in turns:
            for stage in stages:
                for unit in turn:
                    for index in range(sizes[unit]):
                        forwards.append(Action(stage, "F", first + unit, index))
            for stage in reversed(stages):
                for unit in turn:
                    for index in reversed(range(sizes[unit])):
                        backwards.append(Action(stage, "B", first + unit, index))
        warm_up = min(longest_way + ahead * (ranks - rank - 1), len(forwards))
        lists.append(_paired(forwards, backwards, warm_up))
    return tuple(lists)


def forward_names(sizes: Sequence[int]) -> list[Name]:
    """Return all chunks in the order of their forwards, which is their order in a plan."""
    return [(unit, index) for unit, size in enumerate(sizes) for index in range(size)]


def backward_names(sizes: Sequence[int]) -> list[Name]:
    """Return all chunks in the order of their backwards."""
    return [(unit, index) for unit, size in enumerate(sizes) for index in reversed(range(size))]


def _turns(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the units of every turn: the fewest that have a chunk for each rank.

    Units that are too few for a turn of their own join the last turn.
    """
    turns: list[list[int]] = [[]]
    chunks_left = sum(sizes)
    for unit, size in enumerate(sizes):
        turn_chunks = sum(sizes[other] for other in turns[-1])
        if turn_chunks >= ranks and chunks_left >= ranks:
            turns.append([])
        turns[-1].append(unit)
        chunks_left -= size
    return turns


def _paired(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    """Return `warm_up` forwards, pairs of a forward and a backward, and the other backwards."""
    pairs = len(forwards) - warm_up
    actions = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards[:pairs], strict=True):
        actions.append(forward)
        actions.append(backward)
    actions += backwards[pairs:]
    return tuple(actions)
