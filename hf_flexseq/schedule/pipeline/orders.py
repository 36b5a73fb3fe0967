"""One forward, one backward: the fixed orders of 1F1B, Seq1F1B and interleaved Seq1F1B (arXiv 2406.03488).

Chunks are forwarded unit by unit, and go backward unit by unit with the last chunk of each first: the paper's
partially ordered queue. With P ranks, k chunks in the largest unit and n chunks in all, rank r runs

    w_r = min(P - r - 2 + k, n) forwards, then pairs of one forward and one backward, then w_r backwards;

k = 1 is 1F1B. The warm-up is the shortest that has the first unit's last chunk at the last stage in time. Over V
stages per rank, stages take turns every P chunks and

    w_r = min((V - 1) P + 2 (P - r - 1) + k - 1, V n)

which is the authors' correction of their figure: it shows turns of P k chunks and warms up too long. A turn must hold
whole units, so k divides P: with P = 4 and k = 3 the first backward would come before its unit's last forward.
"""

from collections.abc import Iterable, Iterator, Sequence

from hf_flexseq.schedule.pipeline.actions import Action

Name = tuple[int, int]  # (unit, index)


def one_forward_one_backward(sizes: Sequence[int], ranks: int, first: int = 0) -> tuple[tuple[Action, ...], ...]:
    """Every rank's actions for units of these many chunks, one stage per rank. first: the first unit's number."""
    forwards = [(first + unit, index) for unit, index in forward_names(sizes)]
    backwards = [(first + unit, index) for unit, index in backward_names(sizes)]
    warm_ups = [min(ranks - rank - 2 + max(sizes, default=0), len(forwards)) for rank in range(ranks)]
    return tuple(
        _paired(_actions([(rank, *n) for n in forwards], "F"), _actions([(rank, *n) for n in backwards], "B"), warm_up)
        for rank, warm_up in enumerate(warm_ups)
    )


def interleaved(sizes: Sequence[int], ranks: int, stages_per_rank: int) -> tuple[tuple[Action, ...], ...]:
    """The same over several stages per rank. Raises ValueError for sizes that do not take turns evenly."""
    chunks, most = sum(sizes), max(sizes, default=1)
    if len(set(sizes)) > 1 or chunks % ranks or ranks % most:
        raise ValueError(
            f"interleaved stages take turns every {ranks} chunks: units of {sorted(set(sizes))} chunks, {chunks} in "
            f"all, do not fit. Cut equal sequences into k chunks that divide {ranks}, a multiple of {ranks} in all"
        )
    rounds = range(stages_per_rank)
    lists = []
    for rank in range(ranks):
        warm_up = (stages_per_rank - 1) * ranks + 2 * (ranks - rank - 1) + most - 1
        forwards = _turns(forward_names(sizes), ranks, [rank + ranks * turn for turn in rounds])
        backwards = _turns(backward_names(sizes), ranks, [rank + ranks * turn for turn in reversed(rounds)])
        count = min(warm_up, chunks * stages_per_rank)
        lists.append(_paired(_actions(forwards, "F"), _actions(backwards, "B"), count))
    return tuple(lists)


def forward_names(sizes: Sequence[int]) -> list[Name]:
    return [(unit, index) for unit, size in enumerate(sizes) for index in range(size)]


def backward_names(sizes: Sequence[int]) -> list[Name]:
    return [(unit, index) for unit, size in enumerate(sizes) for index in reversed(range(size))]


def _turns(names: Sequence[Name], ranks: int, stages: Sequence[int]) -> list[tuple[int, int, int]]:
    """(stage, unit, index): `ranks` chunks through one of a rank's stages, then the same through its next one."""
    groups = [names[at : at + ranks] for at in range(0, len(names), ranks)]
    return [(stage, *name) for group in groups for stage in stages for name in group]


def _actions(where: Iterable[tuple[int, int, int]], kind: str) -> list[Action]:
    return [Action(stage, kind, unit, index) for stage, unit, index in where]


def _paired(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    def pairs() -> Iterator[Action]:
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            yield from (forward, backward)

    return (*forwards[:warm_up], *pairs(), *backwards[len(forwards) - warm_up :])
