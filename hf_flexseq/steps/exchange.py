"""From the rows that ranks drew from their dataloaders to the rows that a plan gives them.

Every rank draws the examples the plain Trainer would give it; the *source row* of an optimizer
step is all of them in one row. A plan then says which rank holds which slice of which sequence:

    RowExchange      in which micro-batch, for a whole model
    ChunkExchange    in which chunk, for a model in pipeline stages

Both find out what this rank sends to whom, and leave the sending to `TokenExchange`: one
all-to-all per dtype brings every token to where it is wanted. Sender and receiver walk through the
plan in the same order, so that nothing but tokens has to be sent. For that all rows of a step have
the same columns (`common_dtypes`), also that of a rank which drew nothing.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.transport import HostGroup
from hf_flexseq.plan import Plan
from hf_flexseq.plan.replicas import StepPlan
from hf_flexseq.plan.shard import Shard, Slice, group_slices
from hf_flexseq.steps.collator import LENGTHS

Columns = dict[str, torch.Tensor]

NO_COLUMNS = 0  # the signature of a row without any


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRow:
    """The sequences that this rank drew for one step, one after the other."""

    columns: Columns
    """Tensors of [tokens] on the CPU by name; none as long as a rank that drew nothing has not
    been told by the others."""

    lengths: tuple[int, ...]
    """Tokens of each sequence."""

    @property
    def targets(self) -> int:
        """Tokens that have a label."""
        if not self.columns:
            return 0
        return int((self.columns["labels"] != IGNORE_INDEX).sum())

    @property
    def dtypes(self) -> dict[str, str]:
        """Names of dtypes, such as `int64`, by column."""
        return {name: _dtype_name(value.dtype) for name, value in self.columns.items()}

    @property
    def signature(self) -> int:
        """A number that tells names and dtypes of the columns, below 2^56 on every rank alike;
        NO_COLUMNS for none."""
        if not self.columns:
            return NO_COLUMNS
        text = json.dumps(self.dtypes, sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])

    def with_columns(self, dtypes: Mapping[str, str]) -> "SourceRow":
        """Return this row; in place of one that has no columns, one with columns of [0]."""
        if self.columns:
            return self
        columns = {name: torch.empty(0, dtype=getattr(torch, d)) for name, d in dtypes.items()}
        return SourceRow(columns=columns, lengths=())


def _dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as `int64`."""
    return str(dtype).removeprefix("torch.")


def common_dtypes(row: SourceRow, host: HostGroup) -> dict[str, str]:
    """Return the name of the dtype of each column that the rows of all ranks have, as a rank has
    them that drew something. Collective over the world.

    Raises ValueError, on every rank, where ranks drew different columns.
    """
    known: dict[str, str] = {}
    known_of = 0  # the rank that has them
    for rank, dtypes in enumerate(host.gather_values(row.dtypes)):
        if not dtypes:
            continue
        if not known:
            known, known_of = dtypes, rank
        if dtypes != known:
            raise ValueError(
                f"ranks drew different columns in {host.phase}: "
                f"rank {known_of} {_beside(known, dtypes)}, rank {rank} {_beside(dtypes, known)}"
            )
    return known


def _beside(dtypes: Mapping[str, str], others: Mapping[str, str]) -> str:
    """Return what `dtypes` has that the others have not, for people."""
    own = [f"{name}: {dtype}" for name, dtype in dtypes.items() if others.get(name) != dtype]
    return ", ".join(own) or "without"


def source_row(batches: Sequence[Mapping[str, Any]]) -> SourceRow:
    """Join the batches of one step, each of columns [1, tokens], into one row.

    Raises ValueError for a batch that DataCollatorForFlexSeq did not make.
    """
    if not batches:
        return SourceRow(columns={}, lengths=())
    for batch in batches:
        _check_batch(batch)
        if set(batch) != set(batches[0]):
            raise ValueError(
                f"a batch has the keys {sorted(batch)}, another one of its step "
                f"{sorted(batches[0])}"
            )
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

    def __call__(
        self,
        row: SourceRow,
        sources: Sequence[int],
        outgoing: Sequence[Sequence[slice]],
        wanted: Sequence[Sequence[Slice]],
    ) -> list[Columns]:
        """Return this rank's columns, each [tokens], one dict per entry of `wanted`. Collective
        over the world.

        row: what this rank drew, with the columns that the rows of all ranks have.
        sources: the rank that drew each sequence.
        outgoing: for each rank, the slices of `row` to send to it.
        wanted: the slices of sequences that this rank gets, for each micro-batch or chunk.
        """
        # Ranks may have their columns in different orders.
        dtypes = {name: row.columns[name].dtype for name in sorted(row.columns)}
        slices: list[slice] = []  # in the order of sending
        counts: list[int] = []  # tokens for each rank
        for slices_of_rank in outgoing:
            slices += slices_of_rank
            counts.append(sum(part.stop - part.start for part in slices_of_rank))

        results: list[Columns] = [{} for _ in wanted]
        for dtype in sorted(set(dtypes.values()), key=_dtype_name):
            names = [name for name, other in dtypes.items() if other == dtype]
            drawn = torch.stack([row.columns[name] for name in names])  # [names, drawn]
            parts = [drawn[:, part] for part in slices]
            sent = torch.cat([drawn[:, :0], *parts], dim=1)  # [names, drawn] -> [names, sent]
            # [names, sent] -> by source, [names, received from it]
            received = self.communicator.host.exchange_rows(sent, counts)
            for result, arranged in zip(results, _arrange(received, wanted, sources), strict=True):
                result.update(zip(names, arranged.unbind(0), strict=True))  # each [tokens]
        return results


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

        row: what this rank drew, with the columns that the rows of all ranks have.
        sources: the rank that drew each sequence.
        shards: this rank's, one for each micro-batch.
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

        row: what this rank drew, with the columns that the rows of all ranks have.
        sources: the rank that drew each sequence.
        replica: the one that this rank works for.
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
