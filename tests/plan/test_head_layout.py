"""Heads lie in a flat buffer as the parts of it say."""

import pytest

from hf_flexseq.plan.head_layout import HeadLayout
from tests.kernels.fused_cases import HEAD_RANGES

every_case = pytest.mark.parametrize("ranges", HEAD_RANGES.values(), ids=HEAD_RANGES)


@every_case
def test_every_slot_has_its_head(ranges):
    for tokens in (0, 1, 5):
        wanted = []  # (tensor, head, token) of every slot
        for part in zip(*ranges, strict=True):
            for token in range(tokens):
                for tensor, one in enumerate(part):
                    wanted += [(tensor, head, token) for head in one]
        layout = HeadLayout(ranges, tokens)
        assert sum(layout.slots) == len(wanted)
        for column in (column for run in layout.runs for column in run.columns()):
            for token in range(tokens):
                slot = column.slot + token * column.stride
                assert wanted[slot] == (column.tensor, column.head, token)
                wanted[slot] = None
        assert not any(wanted)


@every_case
def test_the_numbers_are_the_columns_of_each_head(ranges):
    layout = HeadLayout(ranges, 5)
    columns = layout.numbers[: 4 * layout.columns].reshape(-1, 4).tolist()
    firsts = layout.numbers[4 * layout.columns :].tolist()
    assert firsts[-1] == layout.columns
    heads = [[tensor, head] for tensor, count in enumerate(layout.heads) for head in range(count)]
    for name, first, last in zip(heads, firsts[:-1], firsts[1:], strict=True):
        assert first < last
        assert all(column[:2] == name for column in columns[first:last])
        slots = [column[2] for column in columns[first:last]]
        assert slots == sorted(slots)


def test_a_tensor_is_shared_where_parts_have_a_head_in_common():
    assert HeadLayout(HEAD_RANGES["shared heads"], 5).shared == (False, True)
    assert HeadLayout(HEAD_RANGES["heads that divide"], 5).shared == (False, False, False)
