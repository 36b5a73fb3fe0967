"""From the rows that ranks drew from their dataloaders to the rows that a plan gives them.

Every rank draws the examples the plain Trainer would give it; the *source row* of an optimizer
step is all of them in one row. A plan then says which rank holds which slice of which sequence in
which micro-batch. `micro_batch_routes` works out which tokens this rank sends to each rank and
which it receives. `Routes.dispatch` sends them: one collective brings every token, with all of its
columns, to its place in the model's input. Sender and receiver take the same order from the
plan, so only tokens have to be sent. The model's results per token return the same way
(`Routes.to_source`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.transport import CpuGroup
from hf_flexseq.plan.layout import PlanLayout
from hf_flexseq.plan.shard import Slice
from hf_flexseq.steps.route import Route
from hf_flexseq.steps.source_row import Columns, SourceRow
from hf_flexseq.steps.token_words import TokenWords

Ints = NDArray[np.int64]

# Columns of steps in which rows share tokens.
ROW_COUNTS = "row_counts"
TARGET_COUNTS = "target_counts"


def added(columns: Columns, shared: torch.Tensor, tokens: int) -> Columns:
    """Return each token's sum over the rows that share it: [received, ...] -> [tokens, ...] each.

    shared: [received] the token of each.
    """
    sums = {}
    for name, values in columns.items():
        sums[name] = values.new_zeros(tokens, *values.shape[1:]).index_add_(0, shared, values)
    return sums


def united(columns: Columns, shared: torch.Tensor, tokens: int) -> Columns:
    """Return the columns of tokens that several rows share: [received] -> [tokens] each.

    A token has the label that any of its rows gives it, and all other columns are equal in all of
    its rows. shared: [received] the token of each. Two columns are new: ROW_COUNTS, the rows of
    each token, and TARGET_COUNTS, those in which it has a label.
    """
    united = {}
    for name, values in columns.items():
        united[name] = values.new_empty(tokens, *values.shape[1:]).index_copy_(0, shared, values)
    labels = columns["labels"]
    none = torch.full((tokens,), IGNORE_INDEX, dtype=labels.dtype)
    united["labels"] = none.scatter_reduce_(0, shared, labels, "amax")
    has_label = (labels != IGNORE_INDEX).to(torch.int64)
    zeros = torch.zeros(tokens, dtype=torch.int64)
    united[ROW_COUNTS] = zeros.index_add(0, shared, torch.ones_like(shared))
    united[TARGET_COUNTS] = zeros.index_add(0, shared, has_label)
    return united


@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """The way of the tokens of one rank to micro-batches or chunks, and back."""

    route: Route

    cpu_group: CpuGroup
    """Carries the tokens."""
    rows: Sequence[int]
    """Tokens of each micro-batch or chunk."""
    shared: Ints | None = None
    """[received] Which of this rank's own rows each received token is, where several rows of a
    step share some; None where every received token is a row of its own."""

    def dispatch(self, columns: Columns, merge: Callable[..., Columns] = added) -> list[Columns]:
        """Return this rank's columns, each [tokens, ...], one dict per entry of `rows`. Collective
        over the world.

        columns: of this rank's drawn row, alike on all ranks. merge: makes one token of the values
        that several rows have for it.
        """
        tokens = TokenWords(columns)
        # [drawn tokens, words of a token] -> [received, words of a token]
        arrived = tokens.columns_of(self.route.bring(tokens.joined, self.cpu_group.exchange_rows))
        if self.shared is not None:
            arrived = merge(arrived, torch.from_numpy(self.shared), sum(self.rows))
        results: list[Columns] = [{} for _ in self.rows]
        for name, values in arrived.items():
            for result, own in zip(results, values.split(list(self.rows)), strict=True):
                result[name] = own
        return results

    def to_source(self, columns: Sequence[Columns]) -> Columns:
        """Gather values of tokens on the source ranks, as columns of the drawn row, each [tokens,
        ...]. Collective over the world. columns: one dict per entry of `rows`."""
        joined = {}
        for name in columns[0]:
            joined[name] = torch.cat([own[name] for own in columns])  # [received, ...]
        tokens = TokenWords(joined)
        words = tokens.joined
        if self.shared is not None:
            words = words.index_select(0, torch.from_numpy(self.shared))
        returned = self.route.give_back(words, self.cpu_group.exchange_rows)
        row = torch.empty_like(returned)
        row[self.route.sent] = returned  # every token of the row was sent once
        return tokens.columns_of(row)


# ---- the ways of a plan


def _ranges(starts: Ints, sizes: Ints) -> Ints:
    """Return start, start + 1, ... of each range, one range after the other: [sum(sizes)]."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if ends.size else 0
    return np.repeat(starts - ends + sizes, sizes) + np.arange(total)


def _order_of(sources: Ints, sizes: Ints) -> Ints:
    """Return where each token of this rank's rows stands among the received ones, [received]:
    sources send in the order of the rows. sources, sizes: rank and tokens of each slice."""
    by_source = np.argsort(sources, kind="stable")
    starts = np.empty_like(sizes)  # [slices] among the received tokens
    ends = np.cumsum(sizes[by_source])
    starts[by_source] = ends - sizes[by_source]
    return _ranges(starts, sizes)


def own_offsets(row: SourceRow, own: Ints, sequences: int) -> Ints:
    """Return where in a rank's row each of its sequences begins, by id. own: ids of drawn
    sequences."""
    lengths = np.array(row.lengths, dtype=np.int64)
    offsets = np.full(sequences, -1)
    offsets[own] = np.cumsum(lengths) - lengths
    return offsets


def micro_batch_routes(
    row: SourceRow, layout: PlanLayout, sources: Sequence[int], communicator: Communicator
) -> Routes:
    """Return the routes of a rank to the micro-batches of a plan. row: the sequences that it drew.
    sources: the rank that drew each sequence."""
    source_of = np.array(sources, dtype=np.int64)
    own = np.flatnonzero(source_of == communicator.rank)
    offsets = own_offsets(row, own, source_of.size)
    by_rank: list[list[Slice]] = [[] for _ in range(communicator.world_size)]
    rows = set(own.tolist())
    for rank, part in layout.placed(layout.sequences_of(rows)):
        of_part = [one.slice for one in layout.of_rows(part)]
        by_rank[rank] += [one for one in of_part if one.sequence in rows]
    counts = [sum(part.tokens for part in slices) for slices in by_rank]
    sent = tokens_of([part for slices in by_rank for part in slices], offsets)
    slices = [shard.slices for shard in layout.shards]
    if not layout.has_units:
        return routes_of(sent, counts, slices, source_of, communicator.cpu_group)
    # every row of a shared token sends what it says of it
    of_rows: list[list[Slice]] = []
    shared = [np.arange(0)]
    place = 0  # of a slice's first token among this rank's own
    for of_batch in slices:
        of_rows.append([])
        for part in of_batch:
            for one, first in layout.of_rows(part):
                of_rows[-1].append(one)
                start = place + first - part.start
                shared.append(np.arange(start, start + one.tokens))
            place += part.tokens
    routes = routes_of(sent, counts, of_rows, source_of, communicator.cpu_group)
    held = [sum(part.tokens for part in of_batch) for of_batch in slices]
    return replace(routes, rows=held, shared=np.concatenate(shared))


def routes_of(
    sent: Ints,
    counts: Sequence[int],
    rows: Sequence[Sequence[Slice]],
    source_of: Ints,
    cpu_group: CpuGroup,
) -> Routes:
    """Return the routes of a rank. sent: [sent] indices into its row, by target. counts: tokens
    for each rank. rows: slices of each micro-batch or chunk. source_of: the rank that drew each
    sequence."""
    slices = [part for row in rows for part in row]
    sources = source_of[np.array([part.sequence for part in slices], dtype=np.int64)]
    sizes = np.array([part.tokens for part in slices], dtype=np.int64)
    received = np.zeros(len(counts), dtype=np.int64)
    np.add.at(received, sources, sizes)
    route = Route(
        torch.from_numpy(sent),
        list(counts),
        received.tolist(),
        torch.from_numpy(_order_of(sources, sizes)),
    )
    held = [sum(part.tokens for part in row) for row in rows]
    return Routes(route=route, cpu_group=cpu_group, rows=held)


def tokens_of(slices: Sequence[Slice], offsets: Ints) -> Ints:
    """Return the indices into a rank's row of those slices that it drew. offsets: see
    `own_offsets`."""
    own = [part for part in slices if offsets[part.sequence] >= 0]
    starts = [offsets[part.sequence] + part.start for part in own]
    sizes = [part.tokens for part in own]
    return _ranges(np.array(starts, dtype=np.int64), np.array(sizes, dtype=np.int64))
