"""From the rows that ranks drew to the chunks that a pipeline's plan gives them."""

from collections.abc import Callable, Sequence

import numpy as np

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.pipeline.planning.step_plan import StepPlan
from hf_flexseq.steps.exchange import Routes, own_offsets, routes_of, tokens_of
from hf_flexseq.steps.source_row import SourceRow


def chunk_routes(
    row: SourceRow,
    plan: StepPlan,
    sources: Sequence[int],
    communicator: Communicator,
    replica_of: Callable[[int], int],
) -> Routes:
    """Return the routes of a rank to the chunks of its replica, on every stage of it. row: the
    sequences that this rank drew. sources: the rank that drew each sequence. replica_of: the
    replica of a rank."""
    source_of = np.array(sources, dtype=np.int64)
    own = np.flatnonzero(source_of == communicator.rank)
    offsets = own_offsets(row, own, source_of.size)
    by_replica = []
    for replica in range(len(plan.plans)):
        slices = [part for chunk in plan.chunks(replica) for part in chunk.slices]
        by_replica.append(tokens_of(slices, offsets))
    by_rank = [by_replica[replica_of(rank)] for rank in range(communicator.world_size)]
    counts = [tokens.size for tokens in by_rank]
    chunks = [chunk.slices for chunk in plan.chunks(replica_of(communicator.rank))]
    return routes_of(np.concatenate(by_rank), counts, chunks, source_of, communicator.cpu_group)
