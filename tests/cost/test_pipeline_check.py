"""What the checker of pipeline plans refuses: each wrong plan is a right one with one thing
changed."""

from dataclasses import replace

import pytest

from hf_flexseq.cost.walk import check, check_memory, check_step
from hf_flexseq.plan.pipeline import parse
from hf_flexseq.plan.replicas import StepPlan
from hf_flexseq.plan.shard import Slice
from tests.pipelines import even_cost, plan_of

FIRST = "0F0.0 0F0.1 0F1.0 0I0.1 0I0.0 0W0.1 0W0.0 0B1.0"
LAST = "1F0.0 1F0.1 1B0.1 1B0.0 1F1.0 1I1.0 1W1.0"


def plan(first=FIRST, last=LAST, **changed):
    """Two stages; sequence 0 in two chunks, sequence 1 in one."""
    return plan_of((parse(first), parse(last)), sizes=[2, 1], **changed)


def changed(**texts):
    """The plan with a part of a rank's text, (old, new), replaced."""
    lists = {"first": FIRST, "last": LAST}
    for rank, (old, new) in texts.items():
        assert old in lists[rank]
        lists[rank] = lists[rank].replace(old, new)
    return plan(**lists)


def with_slices(place, *slices):
    """The plan whose chunk at `place` holds (sequence, start, stop)."""
    chunks = list(plan().chunks)
    parts = tuple(Slice(sequence=q, start=a, stop=b) for q, a, b in slices)
    chunks[place] = replace(chunks[place], slices=parts)
    return plan(chunks=tuple(chunks))


def torn():
    """The plan whose sequence 0 continues in another unit."""
    first, second, third = plan().chunks
    chunks = (first, replace(second, unit=1, index=0), replace(third, unit=2))
    return plan(chunks=chunks)


@pytest.mark.parametrize(
    "wrong, problem",
    [
        # actions
        (changed(last=("1B0.1 1B0.0", "1B0.0 1B0.1")), "1B0.0: .* descend, 1 comes next"),
        (
            changed(last=("1F0.1 1B0.1 1B0.0", "1B0.0 1F0.1 1B0.1")),
            "1B0.0: backwards of a unit begin after",
        ),
        (changed(first=("0F0.0 0F0.1", "0F0.1 0F0.0")), "0F0.1: .* ascend, 0 comes next"),
        (
            changed(first=("0I0.1 0I0.0 0W0.1", "0W0.1 0I0.0")),
            "0W0.1: weight gradients",
        ),
        (changed(first=("0W0.1 0W0.0", "0W0.0 0W0.1")), "0W0.0: weight .* in their order"),
        (
            changed(first=("0I0.0 0W0.1 0W0.0", "0B0.0 0W0.1")),
            "0B0.0: the weight gradients of .1. come",
        ),
        (changed(first=(" 0W0.0", "")), "no 0W0.0"),
        (changed(first=(" 0B1.0", "")), "no 0B1.0 and no 0I1.0"),
        (changed(last=("1F1.0 1I1.0 1W1.0", "")), "no 1F1.0"),
        (plan(first=FIRST + " 0B1.0"), "0B1.0: backwards of a unit"),
        (plan(first=FIRST + " 0F1.0"), "0F1.0: forwards of a unit"),
        (plan(first=FIRST + " 0F2.0"), "0F2.0: unknown kind"),
        (plan(first=FIRST + " 1F0.0"), "1F0.0: stage 1 is not on rank 0"),
        (
            plan(first="0F1.0 0F0.0 0F0.1 0I0.1 0I0.0 0W0.1 0W0.0 0B1.0"),
            "deadlock: 0I0.1, 1F0.0 wait",
        ),
        (plan(last="1F0.0 1F0.1 1B0.1 1F1.0 1B1.0 1B0.0"), "deadlock: 0I0.0 wait"),
        # fields
        (plan(stages=3), "3 stages cannot be spread evenly over 2 ranks"),
        (plan(checkpointed=((0, 0, 0),)), "must be given for 2 stages x 3 chunks"),
        (plan(checkpointed=((0, 0, 0), (0, -1, 0))), "must not be negative"),
        # chunks
        (with_slices(1, (0, 8, 15)), "sequence 0 has 16 tokens, the chunks hold 15"),
        (with_slices(1, (0, 9, 16)), "chunk 0.1: .* must begin at token 8"),
        (with_slices(1, (0, 8, 16), (1, 0, 8)), "chunk 1.0: .* must begin at token 8"),
        (with_slices(1, (1, 0, 8), (0, 8, 16)), "chunk 0.1: only the first slice may be a part"),
        (with_slices(1), "chunk 0.1 holds no token"),
        (with_slices(1, (7, 0, 8)), "chunk 0.1: .* is not a slice of a sequence"),
        (with_slices(0, (0, 0, 16)), "chunk 0.1: .* is not a slice|must begin at token 16"),
        (torn(), "chunk 1.0: a cut sequence must begin in chunk 0 of its unit"),
        (plan(chunks=plan().chunks[::-1]), "numbered unit by unit"),
    ],
)
def test_what_is_wrong_is_named(wrong, problem):
    check(plan())
    with pytest.raises(ValueError, match=problem):
        check(wrong)


def test_memory_is_checked_at_its_peak():
    made, cost = plan(), even_cost(2)
    # three chunks of 8 tokens on the first stage, two on the last
    check_memory(made, cost, (24, 16))
    with pytest.raises(ValueError, match="0F1.0: rank 0 holds 24 bytes, the limit is 23"):
        check_memory(made, cost, (23, 16))
    with pytest.raises(ValueError, match="1F0.1: rank 1 holds 16 bytes, the limit is 15"):
        check_memory(made, cost, (24, 15))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"members": ((0, 2), (1, 2))}, "replicas must hold each of 4 sequences once"),
        ({"members": ((0, 2), (1,))}, "replicas must hold each of 4 sequences once"),
        ({"members": ((0, 1), (2, 3))}, "the plan of replica 0 is for sequences of other lengths"),
        ({"plans": (plan(), changed(first=(" 0B1.0", "")))}, "no 0B1.0"),
    ],
)
def test_a_step_is_legal_where_its_replicas_are(change, problem):
    """Two replicas with the same plan, for the even and for the odd sequences."""
    lengths = tuple(length for length in plan().lengths for _ in range(2))
    step = StepPlan(lengths=lengths, members=((0, 2), (1, 3)), plans=(plan(), plan()))
    check_step(step)
    with pytest.raises(ValueError, match=problem):
        check_step(replace(step, **change))
