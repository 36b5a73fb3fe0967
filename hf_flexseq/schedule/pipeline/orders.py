"""One forward, one backward: the fixed orders of 1F1B, Seq1F1B and interleaved Seq1F1B (arXiv
2406.03488).

Chunks are forwarded unit by unit, and go backward unit by unit with the last chunk of each first:
the paper's partially ordered queue. With P ranks, k chunks in the largest unit and n chunks in
all, rank r runs

    w_r = min(P - r - 2 + k, n) forwards, then pairs of one forward and one backward, then w_r
    backwards;

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

from collections.abc import Iterable, Iterator, Sequence

from hf_flexseq.plan.pipeline import Action

Name = tuple[int, int]  # (unit, index)


def one_forward_one_backward(
    sizes: Sequence[int], ranks: int, first: int = 0
) -> tuple[tuple[Action, ...], ...]:
    """Every rank's actions for units of these many chunks, one stage per rank. first: the first
    unit's number."""
    forwards = [(first + unit, index) for unit, index in forward_names(sizes)]
    backwards = [(first + unit, index) for unit, index in backward_names(sizes)]
    warm_ups = [
        min(ranks - rank - 2 + max(sizes, default=0), len(forwards)) for rank in range(ranks)
    ]
    return tuple(
        _paired(
            _actions([(rank, *n) for n in forwards], "F"),
            _actions([(rank, *n) for n in backwards], "B"),
            warm_up,
        )
        for rank, warm_up in enumerate(warm_ups)
    )


def interleaved(
    sizes: Sequence[int], ranks: int, stages_per_rank: int
) -> tuple[tuple[Action, ...], ...]:
    """The same over several stages per rank, which take turns."""
    turns = _turns(sizes, ranks)
    needed = max(
        (
            (stages_per_rank - 1) * sum(sizes[u] for u in turn) + sizes[u] - 1
            for turn in turns
            for u in turn
        ),
        default=0,
    )
    lists = []
    for rank in range(ranks):
        stages = [rank + ranks * place for place in range(stages_per_rank)]
        forwards = [
            (stage, u, i)
            for turn in turns
            for stage in stages
            for u in turn
            for i in range(sizes[u])
        ]
        backwards = [
            (stage, u, i)
            for turn in turns
            for stage in stages[::-1]
            for u in turn
            for i in reversed(range(sizes[u]))
        ]
        warm_up = min(needed + 2 * (ranks - rank - 1), len(forwards))
        lists.append(_paired(_actions(forwards, "F"), _actions(backwards, "B"), warm_up))
    return tuple(lists)


def forward_names(sizes: Sequence[int]) -> list[Name]:
    return [(unit, index) for unit, size in enumerate(sizes) for index in range(size)]


def backward_names(sizes: Sequence[int]) -> list[Name]:
    return [(unit, index) for unit, size in enumerate(sizes) for index in reversed(range(size))]


def _turns(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Units of every turn: as few as have a chunk for each rank; what is left joins the last
    turn."""
    turns: list[list[int]] = [[]]
    left = sum(sizes)
    for unit, size in enumerate(sizes):
        if sum(sizes[u] for u in turns[-1]) >= ranks <= left:
            turns.append([])
        turns[-1].append(unit)
        left -= size
    return turns


def _actions(where: Iterable[tuple[int, int, int]], kind: str) -> list[Action]:
    return [Action(stage, kind, unit, index) for stage, unit, index in where]


def _paired(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    def pairs() -> Iterator[Action]:
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            yield from (forward, backward)

    return (*forwards[:warm_up], *pairs(), *backwards[len(forwards) - warm_up :])
