"""The attention of one sequence over a group, as the calls of all ranks together."""

from hf_flexseq.plan.attention_schedule import calls_of_rank


def schedule_of(strategy, degree, *, mirrored=False, chunk_by_chunk=False):
    """All calls of a ring strategy over `degree` ranks, sorted by time, then by worker. A worker
    may idle at a time."""
    options = {"mirrored": mirrored, "chunk_by_chunk": chunk_by_chunk}
    return sorted(
        call
        for index in range(degree)
        for at_time in calls_of_rank(strategy, degree, index, **options)
        for call in at_time
        if call.worker == index
    )


def work_of(call):
    """The work of a call, in half squares of a chunk by a chunk."""
    return len(call.queries) * len(call.keys) * (1 if call.causal else 2)
