"""Heads lie in a flat buffer as the parts of it say."""

import pytest

from hf_flexseq.plan.head_layout import HeadLayout
from tests.kernels.fused_cases import HEAD_RANGES


def slots_by_hand(head_ranges, tokens):
    """(tensor, head, token) of every slot."""
    slots = []
    for ranges in zip(*head_ranges, strict=True):
        for token in range(tokens):
            for tensor, one in enumerate(ranges):
                slots += [(tensor, head, token) for head in range(one.start, one.stop)]
    return slots


@pytest.mark.parametrize("case", HEAD_RANGES)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_every_slot_has_its_head(case, tokens):
    layout = HeadLayout(HEAD_RANGES[case], tokens)
    wanted = slots_by_hand(HEAD_RANGES[case], tokens)
    assert sum(layout.slots) == len(wanted)
    for run in layout.runs:
        for column in run.columns():
            for token in range(tokens):
                slot = column.slot + token * column.stride
                assert wanted[slot] == (column.tensor, column.head, token)
                wanted[slot] = None
    assert not any(wanted)


@pytest.mark.parametrize("case", HEAD_RANGES)
def test_the_numbers_are_the_columns_of_each_head(case):
    layout = HeadLayout(HEAD_RANGES[case], 5)
    columns = layout.numbers[: 4 * layout.columns].reshape(-1, 4).tolist()
    firsts = layout.numbers[4 * layout.columns :].tolist()
    assert firsts[-1] == layout.columns
    every_head = []
    for tensor, heads in enumerate(layout.heads):
        every_head += [[tensor, head] for head in range(heads)]
    for name, first, last in zip(every_head, firsts[:-1], firsts[1:], strict=True):
        assert first < last
        assert all(column[:2] == name for column in columns[first:last])
        slots = [column[2] for column in columns[first:last]]
        assert slots == sorted(slots)


def test_a_tensor_is_shared_where_parts_have_a_head_in_common():
    assert HeadLayout(HEAD_RANGES["shared heads"], 5).shared == (False, True)
    assert HeadLayout(HEAD_RANGES["heads that divide"], 5).shared == (False, False, False)


def test_ranks_that_have_heads_alike_are_one_run():
    ranges = [slice(2 * rank, 2 * rank + 2) for rank in range(1024)]
    assert len(HeadLayout([ranges], 16).runs) == 1


def test_a_head_that_no_part_has_is_refused():
    with pytest.raises(AssertionError, match="every head is in some part"):
        HeadLayout([[slice(0, 1), slice(2, 3)]], 5)
