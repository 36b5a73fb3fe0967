"""Heads lie in a flat buffer as the parts of it say."""

from itertools import product

import pytest

from hf_flexseq.plan.head_layout import HeadLayout
from tests.kernels.fused_cases import HEAD_RANGES

every_case = pytest.mark.parametrize("ranges", HEAD_RANGES.values(), ids=HEAD_RANGES)


def places(runs):
    """Every head of every part of runs, numbered."""
    for run in runs:
        for part, i in product(range(run.parts), range(run.heads)):
            yield run, part, i


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
        for run, part, i in places(layout.runs):
            head = run.head + part * run.head_step + i
            for token in range(tokens):
                slot = run.slot + part * run.slot_step + i + token * run.stride
                assert wanted[slot] == (run.tensor, head, token)
                wanted[slot] = None
        assert not any(wanted)


def test_parts_with_the_same_pattern_are_a_run_though_others_lie_between():
    ranges = [
        [range(2 * part, 2 * part + 2) for part in range(8)],
        [range(i // 2, i // 2 + 1) for i in range(8)],
    ]
    runs = HeadLayout(ranges, 5).runs
    assert [(run.tensor, run.heads, run.parts) for run in runs] == [
        (0, 2, 8),
        (1, 1, 4),
        (1, 1, 4),
    ]


def test_a_tensor_is_shared_where_parts_have_a_head_in_common():
    assert HeadLayout(HEAD_RANGES["shared heads"], 5).shared == (False, True)
    assert HeadLayout(HEAD_RANGES["heads that divide"], 5).shared == (False, False, False)
