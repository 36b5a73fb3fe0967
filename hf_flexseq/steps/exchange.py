"""From the rows that ranks drew from their dataloaders to the rows that a plan gives them.

Every rank draws the examples the plain Trainer would give it; the *source row* of an optimizer
step is all of them in one row. A plan then says which rank holds which slice of which sequence in
which micro-batch, and one exchange per dtype brings every token to where it is wanted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.distributed.all_to_all import exchange_rows
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.control import gather_objects
from hf_flexseq.plan import Plan
from hf_flexseq.plan.shard import Shard, group_slices
from hf_flexseq.steps.collator import LENGTHS

Columns = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRow:
    """What this rank drew for one step: columns of [tokens] on the CPU, and the length of each
    sequence."""

    columns: Columns
    lengths: tuple[int, ...]

    @property
    def targets(self) -> int:
        """Tokens that have a label."""
        return int((self.columns["labels"] != IGNORE_INDEX).sum()) if self.columns else 0


def source_row(batches: Sequence[Mapping[str, Any]]) -> SourceRow:
    """The batches of one step as one row. Raises ValueError for a batch that
    DataCollatorForFlexSeq did not make."""
    for batch in batches:
        if LENGTHS not in batch:
            raise ValueError(
                f"a batch with the keys {sorted(batch)} has no {LENGTHS!r}: "
                "collate with hf_flexseq.DataCollatorForFlexSeq, around your own collator if "
                "there is one"
            )
        tokens = sum(batch[LENGTHS])
        for name, value in batch.items():
            if name != LENGTHS and getattr(value, "shape", None) != (1, tokens):
                raise ValueError(
                    f"column {name!r} of a batch is not one value for each of its {tokens} tokens"
                )
    # shift_labels repeats labels, which are already shifted: it is not sent a second time.
    names = [
        name for name in (batches[0] if batches else ()) if name not in (LENGTHS, "shift_labels")
    ]
    columns = {name: torch.cat([batch[name][0] for batch in batches]).cpu() for name in names}
    return SourceRow(
        columns=columns, lengths=tuple(n for batch in batches for n in batch[LENGTHS])
    )


class RowExchange:
    """Brings tokens from where they were drawn to where a plan wants them. Collective over the
    world."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._dtypes: dict[str, torch.dtype] | None = None

    def __call__(
        self, row: SourceRow, plan: Plan, sources: Sequence[int], shards: Sequence[Shard]
    ) -> list[Columns]:
        """This rank's columns, each [tokens], for every micro-batch.

        sources: the rank that drew each sequence. shards: this rank's, by micro-batch.
        Raises ValueError on every rank when the ranks' columns differ.
        """
        dtypes = self._agreed_dtypes(row)
        outgoing = self._outgoing(row, plan, sources)
        pieces = [piece for parts in outgoing for piece in parts]
        counts = [sum(piece.stop - piece.start for piece in parts) for parts in outgoing]
        results: list[Columns] = [{} for _ in shards]
        for dtype in dict.fromkeys(dtypes.values()):
            names = [name for name, other in dtypes.items() if other == dtype]
            empty = torch.empty(0, dtype=dtype)
            # [fields, tokens]
            drawn = torch.stack([row.columns.get(name, empty) for name in names])
            # in the order of sending
            rows = torch.cat([drawn[:, :0], *(drawn[:, piece] for piece in pieces)], dim=1)
            received = exchange_rows(self.communicator, rows, counts)
            for result, arranged in zip(results, _arrange(received, shards, sources), strict=True):
                result.update(zip(names, arranged.unbind(0), strict=True))
        return results

    def evened(self, columns: Columns, shard: Shard) -> Columns:
        """The columns of a remapped micro-batch, [tokens in the groups] -> [tokens outside of
        attention]."""
        return {
            name: self._evened(value.unsqueeze(0), shard)[0] for name, value in columns.items()
        }

    def _evened(self, column: torch.Tensor, shard: Shard) -> torch.Tensor:
        counts = [0] * self.communicator.world_size
        for peer, tokens in shard.given:
            counts[peer] = tokens
        kept = column.shape[1] - sum(counts)
        received = exchange_rows(self.communicator, column[:, kept:], counts)
        return torch.cat([column[:, :kept], *(received[peer] for peer, _ in shard.got)], dim=1)

    def _agreed_dtypes(self, row: SourceRow) -> dict[str, torch.dtype]:
        """Names and dtypes of the columns, agreed on once: a rank may draw nothing and know none
        of them."""
        own = {name: value.dtype for name, value in row.columns.items()}
        if self._dtypes is None:
            known = [found for found in gather_objects(self.communicator, own) if found]
            if any(found != known[0] for found in known):
                raise ValueError(f"ranks collate different columns: {known}")
            self._dtypes = known[0]
        if own and own != self._dtypes:
            raise ValueError(f"this step's columns {own} are not the first step's {self._dtypes}")
        return self._dtypes

    def _outgoing(self, row: SourceRow, plan: Plan, sources: Sequence[int]) -> list[list[slice]]:
        """Tokens of this rank's row to send to each rank, by micro-batch, group and slice of the
        shard."""
        first = sources.index(self.communicator.rank) if self.communicator.rank in sources else 0
        offsets = [0, *accumulate(row.lengths)]
        outgoing: list[list[slice]] = [[] for _ in range(self.communicator.world_size)]
        for micro_batch in plan.micro_batches:
            for group in micro_batch.groups:
                if not any(sources[i] == self.communicator.rank for i in group.sequences):
                    continue
                for index, rank in enumerate(group.ranks):
                    for piece in group_slices(group, plan.lengths, index):
                        if sources[piece.sequence] == self.communicator.rank:
                            offset = offsets[piece.sequence - first]
                            outgoing[rank].append(slice(offset + piece.start, offset + piece.stop))
        return outgoing


def _arrange(
    received: Sequence[torch.Tensor], shards: Sequence[Shard], sources: Sequence[int]
) -> list[torch.Tensor]:
    """The exchanged tokens in the order of this rank's rows: one [fields, tokens] per micro-batch.
    Every source sent its slices in that same order, so each is read from front to back, and
    neighbours from one source in one piece."""
    cursors = [0] * len(received)
    rows = []
    for shard in shards:
        parts = [received[0][:, :0]]
        for source, pieces in groupby(shard.slices, key=lambda piece: sources[piece.sequence]):
            start = cursors[source]
            cursors[source] += sum(piece.tokens for piece in pieces)
            parts.append(received[source][:, start : cursors[source]])
        rows.append(torch.cat(parts, dim=1))
    return rows
