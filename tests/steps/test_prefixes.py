"""Which rows of a step share prefixes."""

import random

import numpy as np
import pytest
import torch

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.plan.units import Node
from hf_flexseq.steps.known_columns import shifted
from hf_flexseq.steps.prefixes import (
    RowTokens,
    candidates,
    gather_rows,
    mark_counts,
    marks_of,
    units_of,
)
from hf_flexseq.steps.source_row import SourceRow
from tests.plans import path_tokens
from tests.ranks import join, run_threads

NONE = IGNORE_INDEX


def row_tokens(ids, labels=None, **columns):
    """A row of one rank's collator: labels are those of the tokens themselves."""
    ids = torch.tensor(ids)
    labels = shifted(ids.clone() if labels is None else torch.tensor(labels))
    keys = torch.stack([ids, *map(torch.tensor, columns.values())], dim=1)
    return RowTokens(keys.numpy(), labels.numpy())


def unit_of(*rows, shortest=1):
    """Nodes, and the last node of each row, of the only unit."""
    (unit,) = units_of(dict(enumerate(rows)), shortest=shortest)
    unit.check()
    return unit.nodes, [node for _, node in unit.rows]


def test_a_shared_token_has_one_target():
    # the target of 3 is 4 in one row and 6 in the other: both have a 3 of their own
    nodes, ends = unit_of(row_tokens([1, 2, 3, 4, 5]), row_tokens([1, 2, 3, 6]))
    assert nodes == (Node(-1, 2), Node(0, 3), Node(0, 2))
    assert ends == [1, 2]


def test_a_label_may_be_missing_in_one_row():
    # an agent's next call: what was an answer is part of the prompt
    first = row_tokens([1, 2, 3, 4], [NONE, NONE, 3, 4])
    second = row_tokens([1, 2, 3, 4, 5, 6], [NONE, NONE, NONE, NONE, NONE, 6])
    nodes, ends = unit_of(first, second)
    assert nodes == (Node(-1, 4), Node(0, 2))
    assert ends == [0, 1]


def test_a_short_node_that_branches_again_is_dissolved():
    prompt = list(range(100, 120))
    rows = [row_tokens([*prompt, 1, 2, i, i, i]) for i in range(3)]
    nodes, _ = unit_of(*rows, shortest=16)
    # the last token of the prompt has the target 1 in all rows; 2 has three targets
    assert nodes == (Node(-1, 21), *[Node(0, 4)] * 3)
    rows.append(row_tokens([*prompt, 7, 7]))
    nodes, _ = unit_of(*rows, shortest=16)
    assert nodes == (Node(-1, 19), *[Node(0, 6)] * 3, Node(0, 3))


def test_an_agent_of_many_calls_is_one_long_sequence_to_attention():
    calls, tokens = 2000, 16  # deeper than Python's stack
    ids = np.arange(calls * tokens).reshape(-1, 1)
    labels = np.full(calls * tokens, NONE)
    ends = range(tokens, len(ids) + 1, tokens)
    (unit,) = units_of({i: RowTokens(ids[:end], labels[:end]) for i, end in enumerate(ends)})
    assert unit.nodes == tuple(Node(i - 1, tokens) for i in range(calls))
    assert unit.attended.nodes == (Node(-1, len(ids)),)


def test_rows_of_random_trees_are_their_paths():
    rng = random.Random(0)
    for _ in range(50):
        rows = {}
        for row in range(rng.randint(2, 8)):
            ids = [rng.choice((0, 0, 0, 1)) for _ in range(rng.randint(1, 9))]
            labels = [rng.choice((i, NONE)) for i in ids]
            rows[row] = row_tokens(ids, labels)
        seen = set()
        for unit in units_of(rows, shortest=rng.choice((1, 2))):
            unit.check()
            held = {}
            for row, last in unit.rows:
                seen.add(row)
                path = path_tokens(unit, last)
                assert len(path) == len(rows[row].labels)
                for token, place in enumerate(path):
                    found = held.setdefault(place, (rows[row].keys[token], []))
                    assert (found[0] == rows[row].keys[token]).all()
                    found[1].append(int(rows[row].labels[token]))
            assert len(held) == unit.tokens
            for _, labels in held.values():
                assert len(set(labels) - {NONE}) <= 1


def source(rows):
    """A rank's row of such lists of ids."""
    ids = torch.tensor([i for row in rows for i in row], dtype=torch.int64)
    labels = torch.cat(
        [torch.tensor([], dtype=torch.int64), *(shifted(torch.tensor(r)) for r in rows)]
    )
    positions = torch.tensor([i for row in rows for i in range(len(row))], dtype=torch.int64)
    columns = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return SourceRow(columns=columns, lengths=tuple(map(len, rows)))


PROMPT = list(range(500, 540))
ROWS = [
    [PROMPT + [1] * 20, list(range(30))],
    [PROMPT[:20] + [3] * 1000, list(range(60)), PROMPT + [2] * 5],
    [],
]


def test_candidates_share_enough_to_be_worth_a_look():
    lengths = [len(row) for rows in ROWS for row in rows]
    marks = [mark for rows in ROWS for mark in marks_of(source(rows))]
    assert len(marks) == mark_counts(np.array(lengths)).sum()
    # of 1,020 tokens at most 63 are shared: more than 5 %, so it is looked at
    assert candidates(lengths, marks) == [[0, 2, 4], [1, 3]]
    assert candidates([5, 40], marks_of(source([[1] * 5, [1] * 40]))) == []


def gathered(rank, world_size):
    communicator = join()
    lengths = [len(row) for rows in ROWS for row in rows]
    assert lengths
    sources = [0, 0, 1, 1, 1]
    return gather_rows(source(ROWS[rank]), sources, [0, 1, 2, 4], communicator)


@pytest.mark.parametrize("world_size", [3])
def test_tokens_of_candidates_come_to_the_first_rank(world_size):
    found, *others = run_threads(gathered, world_size)
    assert others == [{}, {}]
    rows = [row for of_rank in ROWS for row in of_rank]
    assert sorted(found) == [0, 1, 2, 4]
    for i, tokens in found.items():
        assert tokens.keys[:, 0].tolist() == rows[i]
        assert tokens.keys[:, 1].tolist() == list(range(len(rows[i])))
        assert tokens.labels.tolist() == [*rows[i][1:], NONE]
    (unit,) = units_of(found)
    assert unit.rows == ((0, 3), (2, 1), (4, 4))
    assert unit.nodes[0].tokens == 19
