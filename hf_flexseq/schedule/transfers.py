"""What travels in the exchanges that may be routed, in bytes: rings' loans, and moves of tokens in
a remapping."""

from collections.abc import Sequence

from hf_flexseq.plan.remap import Move
from hf_flexseq.schedule.loans import Loan
from hf_flexseq.schedule.routing import Transfer

RowBytes = tuple[int, ...]  # bytes of one row of each tensor of a message


def loan_transfers(
    loans: Sequence[Loan],
    first_rank: int,
    of_queries: RowBytes,
    of_keys: RowBytes,
    *,
    returns: bool,
) -> tuple[Transfer, ...]:
    """What travels for these loans: the lent rows to the worker, or what it made of them back.

    first_rank: of the group. of_queries, of_keys: tensors that travel for queries, and for keys
    and values.
    """
    made = []
    for loan in loans:
        ends = (loan.worker, loan.holder) if returns else (loan.holder, loan.worker)
        source, target = (first_rank + index for index in ends)
        nbytes = sum(aligned(loan.queries * n) for n in of_queries) + sum(
            aligned(loan.keys * n) for n in of_keys
        )
        made.append(Transfer(source, target, nbytes))
    return tuple(made)


def aligned(nbytes: int) -> int:
    """The bytes that a tensor takes in a message that is one buffer: any type may follow it."""
    return -(-nbytes // 16) * 16


def move_transfers(moves: Sequence[Move], row_bytes: int, *, back: bool) -> tuple[Transfer, ...]:
    """What travels for these moves of tokens with rows of so many bytes. back: from the targets to
    the sources."""
    ends = [(move.target, move.source) if back else (move.source, move.target) for move in moves]
    return tuple(
        Transfer(*pair, aligned(move.tokens * row_bytes))
        for pair, move in zip(ends, moves, strict=True)
    )
