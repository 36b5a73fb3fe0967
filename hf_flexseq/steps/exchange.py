"""From the rows that ranks drew from their dataloaders to the rows that a plan gives them.

Every rank draws the examples the plain Trainer would give it; the *source row* of an optimizer
step is all of them in one row. A plan then says which rank holds which slice of which sequence:

    RowExchange      in which micro-batch, for a whole model
    ChunkExchange    in which chunk, for a model in pipeline stages

Both find out what this rank sends to whom and what it gets, and leave the sending to
`TokenExchange`: one collective brings every token, with all of its columns, to where it stands in
the model. Sender and receiver take the same order from the plan, so that nothing but tokens has to
be sent. For that all rows of a step have the same columns (`common_dtypes`), also that of a rank
which drew nothing. What a model has computed of tokens goes the same way back (`to_source`).
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.transport import CpuGroup
from hf_flexseq.plan.layout import PlanLayout
from hf_flexseq.plan.replicas import StepPlan
from hf_flexseq.plan.shard import Slice
from hf_flexseq.steps.collator import LENGTHS, OTHER_ROWS, PADDING_TARGETS

Columns = dict[str, torch.Tensor]
Ints = NDArray[np.int64]

NO_COLUMNS = 0  # the signature of a row without any

# Columns of any dtype travel side by side in words of one of these types, by bytes of a word: the
# largest one of which each column's values are made up.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MOST_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRow:
    """The sequences that this rank drew for one step, one after the other."""

    columns: Columns
    """Tensors of [tokens] on the CPU by name; none as long as a rank that drew nothing has not
    been told by the others."""

    lengths: tuple[int, ...]
    """Tokens of each sequence."""

    padding_targets: int = 0
    """Targets beside padding, which were left out."""

    other_rows: int = 0
    """Rows that the user's collator makes otherwise of a whole batch."""

    @property
    def targets(self) -> list[int]:
        """Tokens that have a label, of each sequence."""
        if not self.columns:
            return []
        has_label = self.columns["labels"] != IGNORE_INDEX  # [tokens]
        up_to = torch.cat([torch.zeros(1, dtype=torch.int64), has_label.cumsum(dim=0)])
        lengths = torch.tensor(self.lengths, dtype=torch.int64)  # [sequences]
        ends = lengths.cumsum(dim=0)
        counts: list[int] = (up_to[ends] - up_to[ends - lengths]).tolist()
        return counts

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


def common_dtypes(row: SourceRow, cpu_group: CpuGroup) -> dict[str, str]:
    """Return the name of the dtype of each column that the rows of all ranks have, as a rank has
    them that drew something. Collective over the world.

    Raises ValueError, on every rank, where ranks drew different columns.
    """
    known: dict[str, str] = {}
    known_of = 0  # the rank that has them
    for rank, dtypes in enumerate(cpu_group.gather_values(row.dtypes)):
        if not dtypes:
            continue
        if not known:
            known, known_of = dtypes, rank
        if dtypes != known:
            raise ValueError(
                f"ranks drew different columns in {cpu_group.phase}: "
                f"rank {known_of} {_beside(known, dtypes)}, rank {rank} {_beside(dtypes, known)}"
            )
    return known


def _beside(dtypes: Mapping[str, str], others: Mapping[str, str]) -> str:
    """Return what `dtypes` has that the others have not, for people."""
    own = [f"{name}: {dtype}" for name, dtype in dtypes.items() if others.get(name) != dtype]
    return ", ".join(own) or "without"


# What a batch has beside its columns.
_COUNTS = {LENGTHS, OTHER_ROWS, PADDING_TARGETS}


def source_row(batches: Sequence[Mapping[str, Any]]) -> SourceRow:
    """Join the batches of one step, each of columns [1, tokens], into one row.

    Raises ValueError for a batch that DataCollatorForFlexSeq did not make.
    """
    if not batches:
        return SourceRow(columns={}, lengths=())
    for batch in batches:
        _check_batch(batch)
        if set(batch) - _COUNTS != set(batches[0]) - _COUNTS:
            raise ValueError(
                f"a batch has the keys {sorted(batch)}, another one of its step "
                f"{sorted(batches[0])}"
            )
    # shift_labels repeats labels, which are already shifted: it is not sent a second time.
    names = [name for name in batches[0] if name not in _COUNTS | {"shift_labels"}]
    columns = {}
    for name in names:
        rows = [batch[name][0] for batch in batches]  # each [1, tokens] -> [tokens]
        columns[name] = torch.cat(rows).cpu()  # -> [tokens of the step]
    lengths: list[int] = []
    for batch in batches:
        lengths += batch[LENGTHS]
    padding_targets = sum(batch.get(PADDING_TARGETS, 0) for batch in batches)
    return SourceRow(
        columns=columns,
        lengths=tuple(lengths),
        padding_targets=padding_targets,
        other_rows=sum(batch.get(OTHER_ROWS, 0) for batch in batches),
    )


def _check_batch(batch: Mapping[str, Any]) -> None:
    """Raise ValueError unless every column of a batch is [1, tokens], with the lengths beside."""
    if LENGTHS not in batch:
        raise ValueError(
            f"a batch with the keys {sorted(batch)} has no {LENGTHS!r}: collate with "
            "hf_flexseq.DataCollatorForFlexSeq, around your own collator if there is one"
        )
    tokens = sum(batch[LENGTHS])
    for name, value in batch.items():
        if name not in _COUNTS and getattr(value, "shape", None) != (1, tokens):
            raise ValueError(
                f"column {name!r} of a batch is not one value for each of its {tokens} tokens"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """What a rank sends of its row."""

    tokens: Ints
    """[sent] Indices into the row: those for rank 0, then those for rank 1, and so on."""

    counts: Ints
    """[world] Tokens for each rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a rank gets, in the order of its own rows: stretches of tokens that one rank drew."""

    sources: Ints
    """[stretches] The rank that each comes from."""

    sizes: Ints
    """[stretches] Tokens of each."""

    rows: Sequence[int]
    """Tokens of each micro-batch or chunk."""


class Routes(NamedTuple):
    """The ways of one rank's tokens, there and back."""

    sent: Sent
    wanted: Wanted


class TokenExchange:
    """Sends tokens of the ranks' source rows, with all of their columns, to who wants them."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    def __call__(self, columns: Columns, sent: Sent, wanted: Wanted) -> list[Columns]:
        """Return this rank's columns, each [tokens, ...], one dict per entry of `wanted.rows`.
        Collective over the world.

        columns: of the row that this rank drew, [tokens, ...], with the names, the dtypes and the
            further sizes that the rows of all ranks have.
        """
        # [sent, words of a token], by target -> [received, words of a token], by source
        tokens = _TokenWords(columns)
        received = self.communicator.cpu_group.exchange_rows(
            tokens.joined.index_select(0, torch.from_numpy(sent.tokens)),
            sent.counts.tolist(),
            self._counts_by_source(wanted),
        )
        # in the order of this rank's rows
        arrived = tokens.columns_of(received.index_select(0, torch.from_numpy(_order_of(wanted))))
        results: list[Columns] = [{} for _ in wanted.rows]
        for name, values in arrived.items():
            for result, own in zip(results, values.split(list(wanted.rows)), strict=True):
                result[name] = own
        return results

    def to_source(self, columns: Sequence[Columns], sent: Sent, wanted: Wanted) -> Columns:
        """Gather values of tokens on the source ranks: return columns of this rank's source row,
        each [tokens, ...]. Collective over the world.

        columns: one dict per entry of `wanted.rows`, each column [tokens, ...].
        """
        joined = {}
        for name in columns[0]:
            joined[name] = torch.cat([own[name] for own in columns])  # [received, ...]
        tokens = _TokenWords(joined)
        by_source = torch.empty_like(tokens.joined)
        by_source[torch.from_numpy(_order_of(wanted))] = tokens.joined
        returned = self.communicator.cpu_group.exchange_rows(
            by_source, self._counts_by_source(wanted), sent.counts.tolist()
        )
        row = torch.empty_like(returned)
        row[torch.from_numpy(sent.tokens)] = returned  # every token of the row was sent once
        return tokens.columns_of(row)

    def _counts_by_source(self, wanted: Wanted) -> list[int]:
        """Return how many tokens this rank gets of each rank."""
        counts: list[int] = _sums(
            wanted.sources, wanted.sizes, self.communicator.world_size
        ).tolist()
        return counts


class _TokenWords:
    """Tokens as words in which all of their columns stand side by side."""

    def __init__(self, columns: Columns) -> None:
        """columns: each [tokens, ...], of any dtype."""
        self._names = sorted(columns)  # ranks may have them in other orders
        self._like = columns
        word = WORDS[math.gcd(MOST_BYTES, *(value.element_size() for value in columns.values()))]
        parts = [_as_words(columns[name], word) for name in self._names]
        self._widths = [part.shape[1] for part in parts]
        self.joined = torch.cat(parts, dim=1)  # [tokens, words of a token]

    def columns_of(self, words: torch.Tensor) -> Columns:
        """Return the columns, each [other tokens, ...], that stand in [other tokens, words]."""
        columns = {}
        parts = words.split(self._widths, dim=1)
        for name, part in zip(self._names, parts, strict=True):
            like = self._like[name]
            # a copy: memory between other words need not be aligned for the dtype
            values = part.clone(memory_format=torch.contiguous_format).view(-1).view(like.dtype)
            columns[name] = values.view(words.shape[0], *like.shape[1:])
        return columns


def _as_words(column: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """Return the same memory in words: [tokens, ...] -> [tokens, words of all its values]."""
    values = math.prod(column.shape[1:])
    words = values * column.element_size() // word.itemsize
    return column.contiguous().view(-1).view(word).view(column.shape[0], words)


def _ranges(starts: Ints, sizes: Ints) -> Ints:
    """Return start, start + 1, ... of each range, one range after the other: [sum(sizes)]."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if ends.size else 0
    return np.repeat(starts - ends + sizes, sizes) + np.arange(total)


def _sums(keys: Ints, sizes: Ints, count: int) -> Ints:
    """Return the sum of the sizes of each key in [0, count)."""
    sums = np.zeros(count, dtype=np.int64)
    np.add.at(sums, keys, sizes)
    return sums


def _order_of(wanted: Wanted) -> Ints:
    """Return where each wanted token stands among the received ones, [received].

    Every source has sent its stretches in the order in which they are wanted.
    """
    by_source = np.argsort(wanted.sources, kind="stable")
    starts = np.empty_like(wanted.sizes)  # [stretches] among the received tokens
    ends = np.cumsum(wanted.sizes[by_source])
    starts[by_source] = ends - wanted.sizes[by_source]
    return _ranges(starts, wanted.sizes)


def _own_offsets(row: SourceRow, own: Ints, sequences: int) -> Ints:
    """Return where in a rank's row each of its sequences begins, by the sequence's id.

    own: ids of the sequences that the rank drew. sequences: how many the step has.
    """
    lengths = np.array(row.lengths, dtype=np.int64)
    offsets = np.full(sequences, -1)
    offsets[own] = np.cumsum(lengths) - lengths
    return offsets


class RowExchange:
    """Brings tokens from where they were drawn to the micro-batches of a plan, and what became of
    them back."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._exchange = TokenExchange(communicator)

    def __call__(
        self, row: SourceRow, layout: PlanLayout, sources: Sequence[int]
    ) -> list[Columns]:
        """Return this rank's columns, each [tokens], for every micro-batch. Collective over the
        world.

        row: what this rank drew, with the columns that the rows of all ranks have.
        sources: the rank that drew each sequence.
        """
        return self.dispatch(row.columns, self.routes(row, layout, sources))

    def dispatch(self, columns: Columns, routes: Routes) -> list[Columns]:
        """Return this rank's columns, each [tokens, ...], for every micro-batch. Collective
        over the world.

        columns: of this rank's source row, each [tokens, ...], alike on all ranks.
        """
        return self._exchange(columns, routes.sent, routes.wanted)

    def to_source(self, columns: Sequence[Columns], routes: Routes) -> Columns:
        """Return columns of this rank's source row, each [tokens, ...], from those that ranks have
        made of tokens. Collective over the world.

        columns: of every micro-batch, each [tokens, ...], alike on all ranks.
        """
        return self._exchange.to_source(columns, routes.sent, routes.wanted)

    def routes(self, row: SourceRow, layout: PlanLayout, sources: Sequence[int]) -> Routes:
        """Return where tokens go, and from where they come; see `__call__`."""
        source_of = np.array(sources, dtype=np.int64)
        own = np.flatnonzero(source_of == self.communicator.rank)
        offsets = _own_offsets(row, own, source_of.size)

        # 1. what this rank sends of what it drew
        by_rank: list[list[Slice]] = [[] for _ in range(self.communicator.world_size)]
        for rank, part in layout.placed(set(own.tolist())):
            by_rank[rank].append(part)
        counts = [sum(part.tokens for part in slices) for slices in by_rank]
        sent = Sent(
            tokens=_tokens_of([part for slices in by_rank for part in slices], offsets),
            counts=np.array(counts, dtype=np.int64),
        )

        # 2. what it gets
        return Routes(sent, _wanted([shard.slices for shard in layout.shards], source_of))


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
        chunks = [chunk.slices for chunk in plan.chunks(replica)]
        wanted = _wanted(chunks, np.array(sources, dtype=np.int64))
        return self._exchange(row.columns, self._sent(row, plan, sources), wanted)

    def _sent(self, row: SourceRow, plan: StepPlan, sources: Sequence[int]) -> Sent:
        """Return the tokens of this rank's row that go to each rank, by chunk and slice."""
        source_of = np.array(sources, dtype=np.int64)
        offsets = _own_offsets(
            row, np.flatnonzero(source_of == self.communicator.rank), source_of.size
        )
        by_replica = []
        for replica in range(self._ranks_per_stage // self._degree):
            slices = [part for chunk in plan.chunks(replica) for part in chunk.slices]
            by_replica.append(_tokens_of(slices, offsets))
        by_rank = []
        for rank in range(self.communicator.world_size):
            by_rank.append(by_replica[rank % self._ranks_per_stage // self._degree])
        return Sent(
            tokens=np.concatenate(by_rank),
            counts=np.array([tokens.size for tokens in by_rank]),
        )


def _wanted(rows: Sequence[Sequence[Slice]], source_of: Ints) -> Wanted:
    """Return what a rank gets.

    rows: the slices of each micro-batch or chunk. source_of: the rank that drew each sequence.
    """
    slices = [part for row in rows for part in row]
    sequences = np.array([part.sequence for part in slices], dtype=np.int64)
    return Wanted(
        sources=source_of[sequences],
        sizes=np.array([part.tokens for part in slices], dtype=np.int64),
        rows=[sum(part.tokens for part in row) for row in rows],
    )


def _tokens_of(slices: Sequence[Slice], offsets: Ints) -> Ints:
    """Return the indices into a rank's row of those slices that it drew.

    offsets: see `_own_offsets`; -1 for a sequence that another rank drew.
    """
    own = [part for part in slices if offsets[part.sequence] >= 0]
    starts = [offsets[part.sequence] + part.start for part in own]
    sizes = [part.tokens for part in own]
    return _ranges(np.array(starts, dtype=np.int64), np.array(sizes, dtype=np.int64))
