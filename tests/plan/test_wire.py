"""A plan that was sent is the plan, and only who asks for all of its groups makes them."""

import copy
import pickle
import random
from dataclasses import replace

import pytest

from hf_flexseq.plan import Group, MicroBatch, Plan
from tests.plans import random_plan


def drawn(seed):
    """A random plan, with figures that JSON and float32 would round in different ways."""
    rng = random.Random(seed)
    lengths = [rng.choice((1, 7, 2**31 - 1)) for _ in range(rng.randint(1, 12))]
    plan = random_plan(lengths, rng.randint(1, 6), rng)
    return replace(plan, objective_s=1 / 3, lower_bound_s=0.1, notes=("why: ≥ 2 ranks",))


def sent(plan):
    return Plan.from_bytes(plan.to_bytes())


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_that_was_sent_is_the_plan(seed):
    plan = drawn(seed)
    assert sent(plan) == plan
    assert plan == sent(plan)
    assert hash(sent(plan)) == hash(plan)
    assert repr(sent(plan)) == repr(plan)
    assert sent(plan).to_record() == plan.to_record()
    assert sent(plan).digest() == plan.digest()
    assert sent(plan).degrees() == plan.degrees()
    assert sent(sent(plan)).to_bytes() == plan.to_bytes()


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_that_was_sent_can_be_copied_changed_and_checked(seed):
    plan = drawn(seed)
    assert copy.deepcopy(sent(plan)) == plan
    assert pickle.loads(pickle.dumps(sent(plan))) == plan
    assert replace(sent(plan), notes=()) == replace(plan, notes=())
    first, *others = sent(plan).micro_batches
    turned = replace(first, remap=not first.remap)
    assert turned.groups == first.groups
    changed = replace(sent(plan), micro_batches=(turned, *others))
    assert changed.arrays.remap[0] == turned.remap
    assert sent(changed) == changed != plan
    sent(plan).check_form()


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_s_own_groups_are_found_without_making_the_others(seed, monkeypatch):
    plan = drawn(seed)
    received = sent(plan)
    made = []
    init = Group.__post_init__
    monkeypatch.setattr(Group, "__post_init__", lambda group: made.append(group) or init(group))
    for micro_batch, wanted in zip(received.micro_batches, plan.micro_batches, strict=True):
        for rank in range(6):
            made.clear()
            assert micro_batch.groups_of(rank) == wanted.groups_of(rank)
            assert len(made) == len(wanted.groups_of(rank))
        lengths = received.lengths
        assert micro_batch.tokens_per_rank(lengths, 6) == wanted.tokens_per_rank(lengths, 6)


def test_a_micro_batch_has_no_other_attributes():
    micro_batch = sent(drawn(0)).micro_batches[0]
    with pytest.raises(AttributeError, match="has no attribute 'rank'"):
        _ = micro_batch.rank
    with pytest.raises(AttributeError, match="has no attribute 'rank'"):
        _ = MicroBatch(groups=()).rank


@pytest.mark.parametrize("cut", [1, 30, 41, 200])
def test_bytes_of_another_size_are_refused(cut):
    data = drawn(3).to_bytes()
    for wrong in (data[:-cut], data + b" " * cut):
        with pytest.raises(ValueError, match="not a packed plan"):
            Plan.from_bytes(wrong)
