"""Ring attention as a list of blocks.

In attention over a group every rank owns some chunks of the queries and of the keys and values. A *step* says which
keys and values a rank reads at that time, from whom they come, and which of its own queries attend to them. The
executor in `attention/ring.py` knows nothing else, so a new member of the ring family is a new function here.

Rejected: passing keys and values on around the ring. A chunk is fetched straight from its owner, and only when some
local query reads it: the zigzag schedule moves a quarter less than the ring of the same name.
"""

from dataclasses import dataclass

from hf_flexseq.shard import zigzag_chunks


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One attention call of one rank.

    source: index, in the group, of the rank that owns the keys and values. queries, keys: chunks, each a subset of
    what the rank (the source) owns, in the order of its row. causal: the call is over the rank's own diagonal, and
    queries and keys are the same chunks; otherwise every query reads every key.
    """

    source: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool

    def __str__(self) -> str:
        def join(chunks: tuple[int, ...]) -> str:
            return "+".join(map(str, chunks))

        return f"q{join(self.queries)} x {'causal ' * self.causal}kv{join(self.keys)} of {self.source}"


def zigzag(index: int, degree: int) -> tuple[Step, ...]:
    """The steps of the rank of `index`: at step t it reads from the rank t places before it.

    A rank owns chunks i and 2d-1-i, so a source before it holds one chunk that all its queries follow, and a source
    after it two chunks that only its back queries follow: half a square of work in every step, for every rank.
    """
    own = zigzag_chunks(index, degree)
    steps = [Step(source=index, queries=own, keys=own, causal=True)]
    for t in range(1, degree):
        source = (index - t) % degree
        front, back = zigzag_chunks(source, degree)
        if source < index:
            steps.append(Step(source=source, queries=own, keys=(front,), causal=False))
        else:
            steps.append(Step(source=source, queries=own[1:], keys=(front, back), causal=False))
    return tuple(steps)
