"""Which heads of a flat buffer are moved together. Where they lie is shown by
`tests/kernels/test_fused_operations.py`."""

from hf_flexseq.plan.head_layout import HeadLayout
from tests.kernels.fused_cases import HEAD_RANGES


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
