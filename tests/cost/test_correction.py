"""The fit finds the factors that made its seconds, where the steps say something of them, and
leaves the estimate's ratios where they do not; waits count for nobody."""

import json
import random

import numpy as np
import pytest

from hf_flexseq.base.reading import DEFAULT_LIMITS
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import free_ns, lockstep_ns
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.correction import (
    ALL_TERMS,
    MeasuredStep,
    Observation,
    corrected,
    fit,
    learned_from,
    meeting_seconds,
    meetings,
    usable,
)
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.terms import TERMS
from hf_flexseq.plan.files import parse_steps
from tests.costs import SMALL
from tests.plans import NESTED, group, plan_of_groups

TWO = Topology(nodes=1, ranks_per_node=2)
ESTIMATE = analytic_cost_model(SMALL, DEVICES["CPU"], TWO)
FACTORS = [1.0] * len(ALL_TERMS)
FACTORS[TERMS.index("token")], FACTORS[TERMS.index("attention")] = 2.0, 5.0
TRUE = corrected(ESTIMATE, [*FACTORS, 1.0])


def steps_of(count, seed=0, shared=True):
    """Plans of a micro-batch with a group of both ranks, and one whose ranks work alone."""
    drawn = random.Random(seed)
    plans = []
    for _ in range(count):
        lengths = [int(100 * 2 ** (7 * drawn.random())) for _ in range(5)]
        batches = [[group(0, 1, 1, 2), group(1, 2, 3, 4)]]
        if shared:
            batches.insert(0, [group(0, 2, 0)])
        else:
            batches[0][0] = group(0, 1, 0, 1, 2)
        plans.append(plan_of_groups(lengths, *batches))
    return plans


def measured(plan, sync, cost=TRUE):
    """The seconds of a plan's meetings on ranks that take what `cost` says."""
    seconds = []
    for micro_batch in plan.micro_batches:
        of_batch = []
        for start, stop in meetings(micro_batch, 2, sync):
            groups = [one for one in micro_batch.groups if start <= one.start < stop]
            alone = plan_of_groups(plan.lengths, groups).micro_batches
            (nanoseconds,) = lockstep_ns(cost, alone, plan.lengths, TWO)
            of_batch.append(nanoseconds / 1e9)
        seconds.append(of_batch)
    return MeasuredStep(plan.micro_batches, plan.lengths, sync, seconds)


def observations_of(plans, sync="free", cost=TRUE):
    found = []
    for plan in plans:
        found += measured(plan, sync, cost).observations(ESTIMATE, TWO)
    return found


def factors_of(correction):
    return dict(zip(ALL_TERMS, correction.factors, strict=True))


# ---- the fit


@pytest.mark.parametrize("sync", ["free", "lockstep"])
def test_the_fit_finds_the_factors_of_terms_that_the_steps_vary(sync):
    found = fit(observations_of(steps_of(20), sync))
    factors = factors_of(found)
    assert factors["token"] == pytest.approx(2, rel=0.1)
    assert factors["attention"] == pytest.approx(5, rel=0.1)
    assert found.error < 0.03


def test_a_stall_changes_little():
    good = observations_of(steps_of(12))
    stalled = [*good]
    stalled[3] = stalled[3]._replace(seconds=40 * stalled[3].seconds)
    stalled[8] = stalled[8]._replace(seconds=10 * stalled[8].seconds)
    with_stalls, without = factors_of(fit(stalled)), factors_of(fit(good))
    for name in ("token", "attention"):
        assert with_stalls[name] == pytest.approx(without[name], rel=0.1)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_senseless_seconds_are_left_out_with_a_line(seconds, caplog):
    good = observations_of(steps_of(2))
    assert usable([*good, good[0]._replace(seconds=seconds)]) == good
    assert f"1 of {len(good) + 1} micro-batches are left out of the fit" in caplog.text
    with pytest.raises(ValueError, match="no micro-batch has seconds"):
        fit([])


def test_no_factor_is_negative():
    terms = [np.array([1.0, n, *[0.0] * (len(ALL_TERMS) - 2)]) for n in range(1, 20)]
    falling = [Observation(one, 1 - 0.01 * one[1]) for one in terms]
    assert min(fit(falling).factors) >= 0


# ---- who waits for whom


def test_ranks_meet_in_groups_and_through_each_other():
    assert meetings(NESTED, 4, "free") == [(0, 4)]
    apart = plan_of_groups([9] * 3, [group(0, 2, 0), group(1, 3, 1), group(4, 5, 2)])
    assert meetings(apart.micro_batches[0], 6, "free") == [(0, 3), (4, 5)]
    assert meetings(apart.micro_batches[0], 6, "lockstep") == [(0, 6)]


def test_waiting_for_another_rank_is_nobody_s_work():
    """A clock for each rank, as `free_ns` runs them; a rank measures its waits, too."""
    alone = [group(0, 1, 0), group(1, 2, 1)]
    plan = plan_of_groups([900, 100, 500, 300], alone, [group(0, 2, 2)], [group(1, 2, 3)])
    clocks = np.array([free_ns(TRUE, plan.micro_batches[:n], plan.lengths, TWO) for n in range(4)])
    by_rank = np.diff(clocks, axis=0).T / 1e9  # [ranks, micro-batches]
    found = meeting_seconds(plan.micro_batches, by_rank, "free")
    true = measured(plan, "free").seconds
    assert [len(one) for one in found] == [2, 1, 1]
    for one, other in zip(found, true, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    assert by_rank[1, 1] > 1.2 * found[1][0]


# ---- traces


def trace_of(plans, **changes):
    lines = []
    for number, plan in enumerate(plans):
        step = measured(plan, "free")
        learned = {"sync": "free", "meetings_s": step.seconds, "tower_s": 0.0} | changes
        line = {"step": number, "learned": learned}
        lines.append(json.dumps(line | plan.to_record()))
    return parse_steps("\n".join(lines), DEFAULT_LIMITS).steps


def test_a_trace_corrects_a_cost_model():
    steps = trace_of(steps_of(12))
    cost, correction = learned_from(steps, ESTIMATE, TWO)
    assert cost == corrected(ESTIMATE, (*correction.factors, 1.0))
    assert cost.linear_s == pytest.approx(TRUE.linear_s, rel=0.1)
    assert cost.attention_s == pytest.approx(TRUE.attention_s, rel=0.1)
    assert "token x 2" in correction.text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sync": "never"}, "sync='never': must be one of"),
        ({"meetings_s": [[1.0, 2.0], [1.0, 1.0]]}, "step 0: meetings_s are not of its plan"),
        ({"meetings_s": [[1.0]]}, "step 0: meetings_s are not of its plan"),
        ({"meetings_s": 3}, "meetings_s"),
    ],
)
def test_a_trace_that_is_none_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        learned_from(trace_of(steps_of(1), **changes), ESTIMATE, TWO)


def test_a_trace_without_meetings_or_of_other_ranks_is_refused():
    plan = plan_of_groups([8] * 4, [group(0, 4, 0, 1, 2, 3)])
    record = {"step": 5} | plan.to_record()
    steps = parse_steps(json.dumps(record), DEFAULT_LIMITS).steps
    with pytest.raises(ValueError, match="step 5 has no seconds of meetings: give the trace"):
        learned_from(steps, ESTIMATE, TWO)
    steps = parse_steps(json.dumps(record | {"learned": {}}), DEFAULT_LIMITS).steps
    with pytest.raises(ValueError, match="rank"):
        learned_from(steps, ESTIMATE, TWO)
