"""From the rows that ranks drew to the chunks that a pipeline's plan gives them."""

from collections.abc import Sequence

import numpy as np

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.pipeline.planning.step_plan import StepPlan
from hf_flexseq.steps.exchange import own_offsets, routes_of, tokens_of
from hf_flexseq.steps.source_row import Columns, SourceRow


class ChunkExchange:
    """Dispatches tokens to every stage of the replica that works on them."""

    def __init__(self, communicator: Communicator, ranks_per_stage: int, degree: int) -> None:
        """Rank r is rank r % ranks_per_stage of its stage; `degree` neighbours share chunks."""
        self._communicator = communicator
        self._ranks_per_stage = ranks_per_stage
        self._degree = degree

    def __call__(
        self, row: SourceRow, plan: StepPlan, sources: Sequence[int], replica: int
    ) -> list[Columns]:
        """Return the columns of all chunks of `replica`, each [tokens]. Collective over the world.
        row: the sequences that this rank drew. sources: the rank that drew each sequence."""
        source_of = np.array(sources, dtype=np.int64)
        own = np.flatnonzero(source_of == self._communicator.rank)
        offsets = own_offsets(row, own, source_of.size)
        by_replica = []
        for index in range(self._ranks_per_stage // self._degree):
            slices = [part for chunk in plan.chunks(index) for part in chunk.slices]
            by_replica.append(tokens_of(slices, offsets))
        by_rank = []
        for rank in range(self._communicator.world_size):
            by_rank.append(by_replica[rank % self._ranks_per_stage // self._degree])
        chunks = [chunk.slices for chunk in plan.chunks(replica)]
        counts = [tokens.size for tokens in by_rank]
        routes = routes_of(
            np.concatenate(by_rank), counts, chunks, source_of, self._communicator.cpu_group
        )
        return routes.dispatch(row.columns)
