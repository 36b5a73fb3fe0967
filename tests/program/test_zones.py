"""The order in which zones go on, without tensors."""

import pytest

from hf_flexseq.program.calls import whole_zone
from hf_flexseq.program.tables import Tables
from hf_flexseq.program.weave import END, run_zones


def zone(name, times, log):
    log.append(f"{name} posts")
    for time in times:
        yield time
        log.append(f"{name} at {time:g}")
    return name


def test_zones_post_widest_first_and_then_go_on_by_time():
    log = []
    courses = {"ring": (0.5, 1.0, END), "node": (0.5, END), "local": (0.0, 0.5)}
    found = run_zones([zone(name, times, log) for name, times in courses.items()])
    assert found == ["ring", "node", "local"]
    assert log == [
        *("ring posts", "node posts", "local posts"),
        "local at 0",
        *("local at 0.5", "node at 0.5", "ring at 0.5"),
        "ring at 1",
        *("node at 2", "ring at 2"),
    ]
    assert run_zones([]) == []


@pytest.mark.parametrize(
    "lengths, most, wanted",
    [
        ((4, 4, 4, 4), 2, [(4, 4), (4, 4)]),
        ((9, 1, 1, 1), 3, [(9,), (1, 1, 1)]),
        ((5,), 4, [(5,)]),
        ((2, 3), 1, [(2, 3)]),
    ],
)
def test_local_sequences_are_distributed_over_calls_of_about_equal_work(lengths, most, wanted):
    tables = Tables()
    zone = whole_zone(slice(0, sum(lengths)), lengths, tables, most_calls=most)
    assert [tables.calls[one.call].q_lens for one in zone.calls] == wanted
    assert [one.queries.tokens for one in zone.calls] == [sum(part) for part in wanted]
