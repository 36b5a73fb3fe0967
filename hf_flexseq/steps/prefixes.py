"""Find rows that begin with the same tokens, among all ranks' rows of a step.

1. Every rank *marks* its rows: a number for the first 16 tokens, one for the first 64, and so on.
   It sums up only the first 16 and the last 16 tokens of each, which costs next to nothing. Marks
   are gathered with the lengths.
2. Rows whose marks agree far enough may share enough; their tokens go to rank 0. A step without
   such rows ends here.
3. Rank 0 compares them token by token, and joins them into trees (`units_of`).

Two rows share a token if all columns of this token, and of every token before it, are equal in
both; only labels may be missing in one of them. So whatever a model computes of a shared token,
and whatever a loss asks of it, is the same for both rows. A token whose targets differ, such as
the last one of a prompt, is no longer shared: every answer has it as its own.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.plan.units import ROOT, Node, Unit
from hf_flexseq.steps.source_row import SourceRow
from hf_flexseq.steps.token_words import TokenWords

Ints = NDArray[np.int64]

SHORTEST = 16  # tokens that rows share at least
GROWTH = 4  # of the prefixes that are marked
LEAST_SHARE = 0.05  # of a row's tokens, as a planner wants it
MARK_BITS = (1 << 53) - 1
_FACTORS = np.random.default_rng(0).integers(1, 1 << 62, (2, SHORTEST)) | 1  # any odd numbers


# ---- 1. marks


def mark_counts(lengths: Ints) -> Ints:
    """Return how many prefixes of each row are marked. Marked prefixes have 16, 64, 256, ...
    tokens."""
    counts = np.zeros(len(lengths), dtype=np.int64)
    length = SHORTEST
    while (lengths >= length).any():
        counts += lengths >= length
        length *= GROWTH
    return counts


def marks_of(row: SourceRow) -> list[int]:
    """Return the marks of all rows that a rank drew, one row after the other."""
    if not row.columns:
        return []
    ids = row.columns["input_ids"].numpy()
    lengths = np.array(row.lengths, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    marked, ends = _marked(lengths)
    window = np.arange(SHORTEST)
    first = ids[starts[marked, None] + window]  # [marks, 16]
    last = ids[(starts[marked] + ends - SHORTEST)[:, None] + window]
    sums = first @ _FACTORS[0] + last @ _FACTORS[1]  # [marks], modulo 2^64
    marks: list[int] = (sums & MARK_BITS).tolist()
    return marks


def _marked(lengths: Ints) -> tuple[Ints, Ints]:
    """Return the row of each mark, and the length of its prefix, [marks] each."""
    counts = mark_counts(lengths)
    marked = np.repeat(np.arange(len(lengths)), counts)
    level = np.arange(len(marked)) - np.repeat(np.cumsum(counts) - counts, counts)
    return marked, SHORTEST * GROWTH**level


# ---- 2. candidates


def candidates(lengths: Sequence[int], marks: Sequence[int]) -> list[list[int]]:
    """Return rows that may share enough, grouped by the mark of their shortest prefix.

    lengths: tokens of each row. marks: of all rows, one row after the other.
    """
    tokens = np.array(lengths, dtype=np.int64)
    marked, prefixes = _marked(tokens)
    keys = np.array(marks, dtype=np.int64) ^ prefixes
    _, group, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    is_met = sizes[group] > 1  # [marks]
    if not is_met.any():
        return []
    longest = np.zeros(len(tokens), dtype=np.int64)  # prefix of each row that another row has
    np.maximum.at(longest, marked[is_met], prefixes[is_met])
    # Rows whose next marks differ share less than the next prefix has.
    enough = GROWTH * longest >= LEAST_SHARE * tokens
    found: dict[int, list[int]] = defaultdict(list)
    for mark in np.flatnonzero(is_met & (prefixes == SHORTEST)).tolist():
        row = int(marked[mark])
        if enough[row]:
            found[int(group[mark])].append(row)
    return [rows for rows in found.values() if len(rows) > 1]


# ---- 3. trees


class RowTokens(NamedTuple):
    """The tokens of one row."""

    keys: Ints
    """[tokens, columns] All columns but the labels, as integers."""
    labels: Ints
    """[tokens]"""


def gather_rows(
    row: SourceRow, sources: Sequence[int], wanted: Sequence[int], communicator: Communicator
) -> dict[int, RowTokens]:
    """Return the tokens of wanted rows on rank 0, {} elsewhere. Collective over the world.

    row: drawn by this rank. sources: the rank that drew each row. wanted: ids of rows, ascending.
    """
    # 1. this rank's own
    rank = communicator.rank
    own = [i for i, source in enumerate(sources) if source == rank]
    places = dict(zip(own, torch.arange(sum(row.lengths)).split(row.lengths), strict=True))
    own_wanted = [places[i] for i in wanted if i in places]  # indices of its tokens, each
    words = TokenWords(row.columns)
    rows = torch.cat([torch.arange(0), *own_wanted])
    # 2. all to rank 0
    cpu_group = communicator.cpu_group
    lengths = cpu_group.gather_values([len(one) for one in own_wanted])
    sent = [0] * communicator.world_size
    sent[0] = len(rows)
    tokens = [sum(of_rank) if rank == 0 else 0 for of_rank in lengths]
    received = cpu_group.exchange_rows(words.joined.index_select(0, rows), sent, tokens)
    if rank != 0:
        return {}
    columns = words.columns_of(received)
    labels = columns.pop("labels").numpy()
    keys = np.stack([_as_ints(columns[name]) for name in sorted(columns)], axis=1)
    # 3. by row: ranks come in order, and so do the rows of each
    of_ranks = sorted(wanted, key=lambda i: (sources[i], i))
    sizes = [size for of_rank in lengths for size in of_rank]
    ends = np.cumsum(sizes)[:-1]
    parts = zip(of_ranks, np.split(keys, ends), np.split(labels, ends), strict=True)
    return {i: RowTokens(of_keys, of_labels) for i, of_keys, of_labels in parts}


def _as_ints(column: torch.Tensor) -> Ints:
    """Return a column [tokens] as integers that are equal where its values are the same bits."""
    if column.is_floating_point():
        column = column.double().view(torch.int64)
    return column.to(torch.int64).numpy()


@dataclass(slots=True)
class _Branch:
    """A node while the tree grows."""

    keys: Ints
    labels: Ints
    """The label of each token in any row that has one."""
    children: "_Siblings" = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)
    """Rows that end here."""

    @property
    def first(self) -> bytes:
        """The columns of its first token."""
        return self.keys[0].tobytes()


# Branches by their first tokens: those with equal ones have other labels.
_Siblings = dict[bytes, list[_Branch]]


def _all_of(siblings: _Siblings) -> list[_Branch]:
    return [branch for alike in siblings.values() for branch in alike]


def units_of(rows: Mapping[int, RowTokens], *, shortest: int = SHORTEST) -> list[Unit]:
    """Return the units of rows that share `shortest` tokens or more, by their first rows; nodes
    that branch again have as many tokens, too. rows: by id."""
    roots: _Siblings = {}
    # The longest rows first: a row that is the beginning of others is compared with few nodes.
    for row in sorted(rows, key=lambda row: (-len(rows[row].labels), row)):
        _insert(roots, row, rows[row])
    units = [_unit(root) for root in _all_of(_long_enough(roots, shortest))]
    return sorted((unit for unit in units if len(unit.rows) > 1), key=lambda one: one.sequence)


def _insert(siblings: _Siblings, row: int, tokens: RowTokens) -> None:
    """Add a row to the trees that begin with `siblings`."""
    start = 0
    total = len(tokens.labels)
    while True:
        best: _Branch | None = None
        common = 0
        alike = siblings.setdefault(tokens.keys[start].tobytes(), [])
        for sibling in alike:
            shared = _common(sibling, tokens, start)
            if shared > common:
                best, common = sibling, shared
        if best is None:
            alike.append(_Branch(tokens.keys[start:], tokens.labels[start:], rows=[row]))
            return
        if common < len(best.labels):
            rest = _Branch(best.keys[common:], best.labels[common:], best.children, best.rows)
            best.keys, best.labels = best.keys[:common], best.labels[:common]
            best.children, best.rows = {rest.first: [rest]}, []
        best.labels = np.maximum(best.labels, tokens.labels[start : start + common])
        start += common
        if start == total:
            best.rows.append(row)
            return
        siblings = best.children


def _common(branch: _Branch, tokens: RowTokens, start: int) -> int:
    """Return how many tokens of a row, from `start` on, equal a branch's."""
    size = min(len(branch.labels), len(tokens.labels) - start)
    own, new = branch.labels[:size], tokens.labels[start : start + size]
    same = np.ones(size, dtype=bool)
    for column in range(branch.keys.shape[1]):
        same &= branch.keys[:size, column] == tokens.keys[start : start + size, column]
    same &= (own == new) | (own == IGNORE_INDEX) | (new == IGNORE_INDEX)
    return size if same.all() else int(same.argmin())


def _without(branch: _Branch) -> list[_Branch]:
    """Return the branches that replace a branch when every child, and every row that ends in it,
    gets its own copy of the tokens."""
    made = []
    for child in _all_of(branch.children):
        keys = np.concatenate([branch.keys, child.keys])
        labels = np.concatenate([branch.labels, child.labels])
        made.append(_Branch(keys, labels, child.children, child.rows))
    made += [_Branch(branch.keys, branch.labels, rows=[row]) for row in branch.rows]
    return made


def _long_enough(branches: _Siblings, shortest: int) -> _Siblings:
    """Return the trees of the same rows without branches that several rows go through for fewer
    than `shortest` tokens."""
    roots: _Siblings = {}
    pending = [(branch, roots) for branch in _all_of(branches)]  # and the list that it belongs in
    while pending:
        branch, siblings = pending.pop()
        if len(branch.labels) < shortest and (branch.children or len(branch.rows) > 1):
            pending += [(one, siblings) for one in _without(branch)]
            continue
        siblings.setdefault(branch.first, []).append(branch)
        children, branch.children = _all_of(branch.children), {}
        pending += [(child, branch.children) for child in children]
    return roots


def _unit(root: _Branch) -> Unit:
    """Return a tree as a unit. Of the children of a node the one with the most tokens below it is
    the first, since attention takes it together with the node."""
    order = [root]  # parents before their children
    for branch in order:
        order += _all_of(branch.children)
    tokens: dict[int, int] = {}  # below each branch, by its identity
    first_rows: dict[int, int] = {}
    for branch in reversed(order):
        below = [id(child) for child in _all_of(branch.children)]
        tokens[id(branch)] = len(branch.labels) + sum(tokens[child] for child in below)
        first_rows[id(branch)] = min([*branch.rows, *(first_rows[child] for child in below)])
    nodes: list[Node] = []
    rows: list[tuple[int, int]] = []
    pending = [(root, ROOT)]
    while pending:
        branch, parent = pending.pop()
        place = len(nodes)
        nodes.append(Node(parent, len(branch.labels)))
        rows += [(row, place) for row in branch.rows]
        later = _all_of(branch.children)
        later.sort(key=lambda one: (tokens[id(one)], -first_rows[id(one)]))
        pending += [(child, place) for child in later]
    return Unit(tuple(nodes), tuple(sorted(rows)))
