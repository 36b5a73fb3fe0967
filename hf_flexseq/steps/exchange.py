"""From the rows that ranks drew from their dataloaders to the rows that a plan gives them.

Every rank draws the examples the plain Trainer would give it; the *source row* of an optimizer
step is all of them in one row. A plan then says which rank holds which slice of which sequence:

    RowExchange      in which micro-batch, for a whole model
    ChunkExchange    in which chunk, for a model in pipeline stages

Both find out what this rank sends to whom, and leave the sending to `TokenExchange`: one
all-to-all per dtype brings every token to where it is wanted. Sender and receiver walk through the
plan in the same order, so that nothing but tokens has to be sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.plan import Plan
from hf_flexseq.plan.replicas import StepPlan
from hf_flexseq.plan.shard import Shard, Slice, group_slices
from hf_flexseq.steps.collator import LENGTHS

Columns = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRow:
    """The sequences that this rank drew for one step, one after the other."""

    columns: Columns
    """Tensors of [tokens] on the CPU by name; empty when the rank drew nothing."""

    lengths: tuple[int, ...]
    """Tokens of each sequence."""

    @property
    def targets(self) -> int:
        """Tokens that have a label."""
        if not self.columns:
            return 0
        return int((self.columns["labels"] != IGNORE_INDEX).sum())


def source_row(batches: Sequence[Mapping[str, Any]]) -> SourceRow:
    """Join the batches of one step, each of columns [1, tokens], into one row.

    Raises ValueError for a batch that DataCollatorForFlexSeq did not make.
    """
    for batch in batches:
        _check_batch(batch)
    if not batches:
        return SourceRow(columns={}, lengths=())
    # shift_labels repeats labels, which are already shifted: it is not sent a second time.
    names = [name for name in batches[0] if name not in (LENGTHS, "shift_labels")]
    columns = {}
    for name in names:
        rows = [batch[name][0] for batch in batches]  # each [1, tokens] -> [tokens]
        columns[name] = torch.cat(rows).cpu()  # -> [tokens of the step]
    lengths: list[int] = []
    for batch in batches:
        lengths += batch[LENGTHS]
    return SourceRow(columns=columns, lengths=tuple(lengths))


def _check_batch(batch: Mapping[str, Any]) -> None:
    """Raise ValueError unless every column of a batch is [1, tokens], with the lengths beside."""
    if LENGTHS not in batch:
        raise ValueError(
            f"a batch with the keys {sorted(batch)} has no {LENGTHS!r}: collate with "
            "hf_flexseq.DataCollatorForFlexSeq, around your own collator if there is one"
        )
    tokens = sum(batch[LENGTHS])
    for name, value in batch.items():
        if name != LENGTHS and getattr(value, "shape", None) != (1, tokens):
            raise ValueError(
                f"column {name!r} of a batch is not one value for each of its {tokens} tokens"
            )


class TokenExchange:
    """Sends slices of the ranks' source rows to the ranks that want them, column by column."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._dtypes: dict[str, torch.dtype] | None = None  # by column, agreed with the first step

    def __call__(
        self,
        row: SourceRow,
        sources: Sequence[int],
        outgoing: Sequence[Sequence[slice]],
        wanted: Sequence[Sequence[Slice]],
    ) -> list[Columns]:
        """Return this rank's columns, each [tokens], one dict per entry of `wanted`. Collective
        over the world.

        row: what this rank drew.
        sources: the rank that drew each sequence.
        outgoing: for each rank, the slices of `row` to send to it.
        wanted: the slices of sequences that this rank gets, for each micro-batch or chunk.
        Raises ValueError on every rank when the ranks' columns differ.
        """
        dtypes = self._agreed_dtypes(row)
        slices: list[slice] = []  # in the order of sending
        counts: list[int] = []  # tokens for each rank
        for slices_of_rank in outgoing:
            slices += slices_of_rank
            counts.append(sum(part.stop - part.start for part in slices_of_rank))

        results: list[Columns] = [{} for _ in wanted]
        for dtype in dict.fromkeys(dtypes.values()):
            names = [name for name, other in dtypes.items() if other == dtype]
            empty = torch.empty(0, dtype=dtype)  # where this rank drew nothing
            drawn = torch.stack([row.columns.get(name, empty) for name in names])  # [names, drawn]
            parts = [drawn[:, part] for part in slices]
            sent = torch.cat([drawn[:, :0], *parts], dim=1)  # [names, drawn] -> [names, sent]
            # [names, sent] -> by source, [names, received from it]
            received = self.communicator.host.exchange_rows(sent, counts)
            for result, arranged in zip(results, _arrange(received, wanted, sources), strict=True):
                result.update(zip(names, arranged.unbind(0), strict=True))  # each [tokens]
        return results

    def _agreed_dtypes(self, row: SourceRow) -> dict[str, torch.dtype]:
        """Return the dtype of each column, agreed on once: a rank may draw nothing and know none
        of them."""
        own = {name: value.dtype for name, value in row.columns.items()}
        if self._dtypes is None:
            named = {name: str(dtype).removeprefix("torch.") for name, dtype in own.items()}
            gathered = self.communicator.host.gather_values(named)
            known = [dtypes for dtypes in gathered if dtypes]
            if any(dtypes != known[0] for dtypes in known):
                raise ValueError(f"ranks collate different columns: {known}")
            self._dtypes = {name: getattr(torch, dtype) for name, dtype in known[0].items()}
        if own and own != self._dtypes:
            raise ValueError(f"this step's columns {own} are not the first step's {self._dtypes}")
        return self._dtypes


def _arrange(
    received: Sequence[torch.Tensor],
    wanted: Sequence[Sequence[Slice]],
    sources: Sequence[int],
) -> list[torch.Tensor]:
    """Put received tokens in the order of this rank's rows: one [names, tokens] per entry of
    `wanted`.

    received: by source, [names, tokens]. Every source sent its slices in the order of `wanted`, so
    each is read from front to back, and neighbouring slices of one source are read together.
    """
    offsets = [0] * len(received)  # how far each source has been read
    rows = []
    for slices in wanted:
        parts = [received[0][:, :0]]  # gives an empty row its names and dtype
        for source, neighbours in groupby(slices, key=lambda part: sources[part.sequence]):
            start = offsets[source]
            stop = start + sum(part.tokens for part in neighbours)
            parts.append(received[source][:, start:stop])
            offsets[source] = stop
        rows.append(torch.cat(parts, dim=1))  # [names, tokens]
    return rows


def _sequence_offsets(row: SourceRow, sources: Sequence[int], rank: int) -> dict[int, int]:
    """Return where in this rank's row each of its sequences begins, by the sequence's id."""
    drawn_here = [sequence for sequence, source in enumerate(sources) if source == rank]
    offsets = {}
    offset = 0
    for sequence, length in zip(drawn_here, row.lengths, strict=True):
        offsets[sequence] = offset
        offset += length
    return offsets


class RowExchange:
    """Brings tokens from where they were drawn to the micro-batches of a plan."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._exchange = TokenExchange(communicator)

    def __call__(
        self, row: SourceRow, plan: Plan, sources: Sequence[int], shards: Sequence[Shard]
    ) -> list[Columns]:
        """Return this rank's columns, each [tokens], for every micro-batch. Collective over the
        world.

        row: what this rank drew.
        sources: the rank that drew each sequence.
        shards: this rank's, one for each micro-batch.
        Raises ValueError on every rank when the ranks' columns differ.
        """
        outgoing = self._outgoing(row, plan, sources)
        wanted = [tuple(shard.slices) for shard in shards]
        return self._exchange(row, sources, outgoing, wanted)

    def _outgoing(self, row: SourceRow, plan: Plan, sources: Sequence[int]) -> list[list[slice]]:
        """Return the slices of this rank's row to send to each rank, by micro-batch, group and
        slice of the shard."""
        offsets = _sequence_offsets(row, sources, self.communicator.rank)
        outgoing: list[list[slice]] = [[] for _ in range(self.communicator.world_size)]
        for micro_batch in plan.micro_batches:
            for group in micro_batch.groups:
                if not any(sequence in offsets for sequence in group.sequences):
                    continue
                for index, rank in enumerate(group.ranks):
                    for part in group_slices(group, plan.lengths, index):
                        if part.sequence in offsets:
                            offset = offsets[part.sequence]
                            outgoing[rank].append(slice(offset + part.start, offset + part.stop))
        return outgoing

    def evened(self, columns: Columns, shard: Shard) -> Columns:
        """Return the columns of a remapped micro-batch, each [tokens in the groups] -> [tokens
        outside of attention]. Collective over the world."""
        return {name: self._evened(value, shard) for name, value in columns.items()}

    def _evened(self, column: torch.Tensor, shard: Shard) -> torch.Tensor:
        """Exchange one column, [attention_tokens] -> [linear_tokens]. Collective."""
        counts = [0] * self.communicator.world_size
        for peer, tokens in shard.given:
            counts[peer] = tokens
        kept = column.shape[0] - sum(counts)
        given = column[kept:].unsqueeze(0)  # [attention_tokens] -> [1, given]
        received = self.communicator.host.exchange_rows(
            given, counts
        )  # -> by peer, [1, got from it]
        arrived = [received[peer][0] for peer, _ in shard.got]  # each [got]
        return torch.cat([column[:kept], *arrived])  # [linear_tokens]


class ChunkExchange:
    """Brings tokens from where they were drawn to every stage of the replica that works on
    them."""

    def __init__(self, communicator: Communicator, ranks_per_stage: int, degree: int) -> None:
        """Rank r is rank r % ranks_per_stage of its stage.

        ranks_per_stage: how many ranks have the same stage.
        degree: so many neighbours of them share a replica's chunks.
        """
        self.communicator = communicator
        self._ranks_per_stage = ranks_per_stage
        self._degree = degree
        self._exchange = TokenExchange(communicator)

    def __call__(
        self, row: SourceRow, plan: StepPlan, sources: Sequence[int], replica: int
    ) -> list[Columns]:
        """Return the columns of all chunks of `replica`, each [tokens]. Collective over the world.

        row: what this rank drew.
        sources: the rank that drew each sequence.
        replica: the one that this rank works for.
        Raises ValueError on every rank when the ranks' columns differ.
        """
        outgoing = self._outgoing(row, plan, sources)
        wanted = [chunk.slices for chunk in plan.chunks(replica)]
        return self._exchange(row, sources, outgoing, wanted)

    def _outgoing(
        self, row: SourceRow, plan: StepPlan, sources: Sequence[int]
    ) -> list[list[slice]]:
        """Return the slices of this rank's row to send to each rank, by chunk and slice."""
        offsets = _sequence_offsets(row, sources, self.communicator.rank)
        slices_by_replica: list[list[slice]] = []
        for replica in range(self._ranks_per_stage // self._degree):
            slices = []
            for chunk in plan.chunks(replica):
                for part in chunk.slices:
                    if part.sequence in offsets:
                        offset = offsets[part.sequence]
                        slices.append(slice(offset + part.start, offset + part.stop))
            slices_by_replica.append(slices)
        outgoing = []
        for rank in range(self.communicator.world_size):
            replica = rank % self._ranks_per_stage // self._degree
            outgoing.append(slices_by_replica[replica])
        return outgoing
