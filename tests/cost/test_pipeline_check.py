"""What the checker of pipeline plans refuses: each wrong plan is a right one with one thing
changed."""

from dataclasses import replace

import pytest

from hf_flexseq.cost.pipeline_check import check, check_memory, check_step
from hf_flexseq.plan.pipeline import parse
from hf_flexseq.plan.replicas import StepPlan
from hf_flexseq.plan.shard import Slice
from pipelines import even_cost, plan_of

FIRST = "0F0.0 0F0.1 0F1.0 0I0.1 0I0.0 0W0.1 0W0.0 0B1.0"
LAST = "1F0.0 1F0.1 1B0.1 1B0.0 1F1.0 1I1.0 1W1.0"


def plan(first=FIRST, last=LAST, **changed):
    """Two stages; sequence 0 in two chunks, sequence 1 in one."""
    return plan_of((parse(first), parse(last)), sizes=[2, 1], **changed)


def test_the_unchanged_plan_is_legal():
    check(plan())


@pytest.mark.parametrize(
    "changed, problem",
    [
        (
            {"last": LAST.replace("1B0.1 1B0.0", "1B0.0 1B0.1")},
            "1B0.0: backwards of a unit .* descend, 1 comes next",
        ),
        (
            {"last": LAST.replace("1F0.1 1B0.1 1B0.0", "1B0.0 1F0.1 1B0.1")},
            "1B0.0: backwards of a unit begin after",
        ),
        (
            {"first": FIRST.replace("0F0.0 0F0.1", "0F0.1 0F0.0")},
            "0F0.1: forwards of a unit ascend, 0 comes next",
        ),
        (
            {"first": FIRST.replace("0I0.0 0W0.1", "0W0.1 0I0.0").replace("0I0.1 ", "")},
            "0W0.1: weight gradients",
        ),
        (
            {"first": FIRST.replace("0W0.1 0W0.0", "0W0.0 0W0.1")},
            "0W0.0: weight gradients .* in their order",
        ),
        (
            {"first": FIRST.replace("0I0.0 0W0.1 0W0.0", "0B0.0 0W0.1")},
            "0B0.0: the weight gradients of .1. come",
        ),
        ({"first": FIRST.replace(" 0W0.0", "")}, "no 0W0.0"),
        ({"first": FIRST.replace(" 0B1.0", "")}, "no 0B1.0 and no 0I1.0"),
        ({"last": LAST.replace("1F1.0 1I1.0 1W1.0", "")}, "no 1F1.0"),
        ({"first": FIRST + " 0B1.0"}, "0B1.0: backwards of a unit"),
        ({"first": FIRST + " 0F1.0"}, "0F1.0: forwards of a unit"),
        ({"first": FIRST + " 0F2.0"}, "0F2.0: unknown kind"),
        ({"first": FIRST + " 1F0.0"}, "1F0.0: stage 1 is not on rank 0"),
        (
            {"first": "0F1.0 0F0.0 0F0.1 0I0.1 0I0.0 0W0.1 0W0.0 0B1.0"},
            "deadlock: 0I0.1, 1F0.0 wait",
        ),
        ({"last": "1F0.0 1F0.1 1B0.1 1F1.0 1B1.0 1B0.0"}, "deadlock: 0I0.0 wait"),
        ({"stages": 3}, "3 stages cannot be spread evenly over 2 ranks"),
        ({"checkpointed": ((0, 0, 0),)}, "must be given for 2 stages x 3 chunks"),
        ({"checkpointed": ((0, 0, 0), (0, -1, 0))}, "must not be negative"),
    ],
)
def test_wrong_actions_are_named(changed, problem):
    with pytest.raises(ValueError, match=problem):
        check(plan(**changed))


def chunks_with(place, slices):
    chunks = list(plan().chunks)
    chunks[place] = replace(
        chunks[place], slices=tuple(Slice(sequence=q, start=a, stop=b) for q, a, b in slices)
    )
    return tuple(chunks)


@pytest.mark.parametrize(
    "place, slices, problem",
    [
        (1, [(0, 8, 15)], "sequence 0 has 16 tokens, the chunks hold 15"),
        (1, [(0, 9, 16)], "chunk 0.1: .* must begin at token 8"),
        (1, [(0, 8, 16), (1, 0, 8)], "chunk 1.0: .* must begin at token 8"),
        (1, [(1, 0, 8), (0, 8, 16)], "chunk 0.1: only the first slice may be a part"),
        (1, [], "chunk 0.1 holds no token"),
        (1, [(7, 0, 8)], "chunk 0.1: .* is not a slice of a sequence"),
        (0, [(0, 0, 16)], "chunk 0.1: .* is not a slice|must begin at token 16"),
    ],
)
def test_wrong_slices_are_named(place, slices, problem):
    with pytest.raises(ValueError, match=problem):
        check(plan(chunks=chunks_with(place, slices)))


def test_a_cut_sequence_stays_in_its_unit():
    chunks = plan().chunks
    torn = (chunks[0], replace(chunks[1], unit=1, index=0), replace(chunks[2], unit=2))
    with pytest.raises(
        ValueError, match="chunk 1.0: a cut sequence must begin in chunk 0 of its unit"
    ):
        check(plan(chunks=torn))


def test_chunks_are_numbered_unit_by_unit():
    with pytest.raises(ValueError, match="numbered unit by unit"):
        check(plan(chunks=plan().chunks[::-1]))


def test_memory_is_checked_at_its_peak():
    made, cost = plan(), even_cost(2)
    # three chunks of 8 tokens on the first stage, two on the last
    check_memory(made, cost, (24, 16))
    with pytest.raises(ValueError, match="0F1.0: rank 0 holds 24 bytes, the limit is 23"):
        check_memory(made, cost, (23, 16))
    with pytest.raises(ValueError, match="1F0.1: rank 1 holds 16 bytes, the limit is 15"):
        check_memory(made, cost, (24, 15))


def step(**changed):
    """Two replicas with the same plan, for the even and for the odd sequences."""
    one = plan()
    lengths = tuple(length for length in one.lengths for _ in range(2))
    return replace(
        StepPlan(lengths=lengths, members=((0, 2), (1, 3)), plans=(one, one)), **changed
    )


def test_a_step_is_legal_where_its_replicas_are():
    check_step(step())


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"members": ((0, 2), (1, 2))}, "replicas must hold each of 4 sequences once"),
        ({"members": ((0, 2), (1,))}, "replicas must hold each of 4 sequences once"),
        ({"members": ((0, 1), (2, 3))}, "the plan of replica 0 is for sequences of other lengths"),
        ({"plans": (plan(), plan(first=FIRST.replace(" 0B1.0", "")))}, "no 0B1.0"),
    ],
)
def test_a_step_that_is_wrong_is_refused(changed, problem):
    with pytest.raises(ValueError, match=problem):
        check_step(step(**changed))
