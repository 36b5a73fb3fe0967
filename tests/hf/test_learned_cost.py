"""A run corrects its cost model by what its steps take: from fixed steps on, until it is frozen,
for itself, for its checkpoints and for later runs."""

import json
import logging

import pytest
import torch

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import lockstep_ns
from hf_flexseq.cost.correction import FACTORS, MeasuredStep, corrected, fit
from hf_flexseq.cost.terms import TERMS
from hf_flexseq.hf.engine import cost_source
from hf_flexseq.hf.trainer import synthetic_models as command
from hf_flexseq.steps.learned_cost import LearnedCost, record_of, versions_of
from hf_flexseq.steps.micro_batches import RankMicroBatches
from tests.costs import rings
from tests.hf.plain import flexseq_trainer
from tests.hf.tiny import documents, tiny_llama
from tests.plans import group, plan_of_groups
from tests.ranks import join, run_threads

ONE, TWO = (Topology(nodes=1, ranks_per_node=count) for count in (1, 2))
CORRECTED = [4.0] * (len(FACTORS) - 1) + [1.0]
CORRECTED[TERMS.index("attention")] = 40.0
STEPS = 24
LENGTHS = [1 + (i * i * 7) % 39 for i in range(2 * STEPS)]


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """The folder of the cache."""
    monkeypatch.setattr(cost_source, "HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hf_flexseq"


def train(folder, monkeypatch, steps=STEPS, slow_from=STEPS, **options):
    """Train on one rank, whose clock says what the estimate with CORRECTED says, and from a step
    on three times as much. Returns the cost model, the digest by which each step was planned, the
    error of its plan's objective, and the error of what had been learned before it."""
    trainer = flexseq_trainer(
        folder,
        model=tiny_llama(torch.float32),
        train_dataset=documents(LENGTHS),
        max_steps=steps,
        plan_trace=str(folder / "trace.jsonl"),
        **{"cost_model": "auto", **options},
    )

    def clock(step):
        cost = corrected(trainer.flexseq.planning.cost, CORRECTED)
        nanoseconds = lockstep_ns(cost, step.plan.micro_batches, step.plan.lengths, ONE)
        factor = 3.0 if step.number >= slow_from else 1.0
        return [factor * one / 1e9 for one in nanoseconds]

    monkeypatch.setattr(RankMicroBatches, "measured_s", clock)
    trainer.train()
    lines = [json.loads(line) for line in (folder / "trace.jsonl").open()]
    digests = [line["cost_model"] for line in lines]
    took = [sum(line["measured_s"]) for line in lines]
    planned = [line["objective_s"] / s - 1 for line, s in zip(lines, took, strict=True)]
    errors = [line["learned"]["predicted_s"] / s - 1 for line, s in zip(lines, took, strict=True)]
    return trainer.flexseq.cost, digests, planned, errors


@pytest.mark.processes
def test_a_run_learns_at_fixed_steps_and_the_next_run_begins_with_it(
    tmp_path, cached, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, logger="hf_flexseq")
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    cost, digests, planned, errors = train(first, monkeypatch)
    # after steps 1, 3, 7, 13 and 19, which the next one and two of a lookahead do not know
    changes = [n for n in range(1, STEPS) if digests[n] != digests[n - 1]]
    assert changes == [5, 7, 11, 17, 23]
    assert digests[-1] == cost.digest()
    assert max(abs(error + 3 / 4) for error in (*planned[:5], *errors[:2])) < 0.1, "the estimate"
    assert max(map(abs, (*planned[5:], *errors[2:]))) < 0.08
    (frozen,) = [one for one in caplog.messages if "frozen" in one]
    assert frozen.startswith("the cost model is frozen, since 20 steps have run: the estimate ")
    (kept,) = cached.iterdir()

    again, digests, planned, errors = train(second, monkeypatch, steps=2)
    assert digests == [again.digest()] * 2
    for name in ("linear_s", "attention_s", "bandwidths", "micro_batch_s"):
        assert getattr(again, name) == getattr(cost, name)
    assert max(map(abs, (*planned, *errors))) < 0.08
    earlier = f"estimated, and corrected by an earlier run, {kept}"
    assert [one for one in caplog.messages if "digest" in one][-1].endswith(earlier)

    assert not [one for one in caplog.messages if "the predicted" in one]
    train(second, monkeypatch, steps=9, slow_from=3)
    (said,) = [one for one in caplog.messages if "the predicted" in one]
    assert said.endswith("has learned from ran at another load of this machine")

    kept.write_text("{")
    train(second, monkeypatch, steps=1)
    anew = "estimated; the first steps correct it"
    assert [one for one in caplog.messages if "digest" in one][-1].endswith(anew)


@pytest.mark.processes
def test_an_estimate_stays_what_it_is(tmp_path, cached, monkeypatch):
    cost, digests, _, errors = train(tmp_path, monkeypatch, steps=9, cost_model="estimate")
    assert {*digests} == {cost.digest()}
    assert abs(errors[-1] + 3 / 4) < 0.1
    assert not cached.exists()


# ---- on several ranks


def learned_on_a_rank(rank, world_size, saved_after):
    """Versions of a rank; a checkpoint of rank 0 alone is saved after a step."""
    learned = LearnedCost(learns=True)
    communicator = join(TWO)
    estimate = rings(TWO)
    for number in range(STEPS):
        plan = plan_of_groups([999 + 50 * number, 400], [group(0, 2, 0), group(0, 1, 1)])
        step = MeasuredStep(plan.micro_batches, plan.lengths, "free", [[0.5 + number / 9]])
        held = 1.25 if number == 2 else 0.0  # only the first rank counts
        learned.take(step, estimate, communicator, first_step=number + 3, held=held)
        if number == saved_after and rank == 0:
            learned.freeze("a checkpoint is saved")
    return record_of(learned.versions)


@pytest.mark.parametrize(("saved_after", "steps"), [(None, [4, 6, 10, 16, 22]), (5, [4, 6])])
def test_ranks_have_the_same_factors_and_a_checkpoint_freezes_them(saved_after, steps):
    first, second = run_threads(learned_on_a_rank, 2, saved_after)
    assert first == second
    assert [one.first_step for one in versions_of(first)] == steps
    last = versions_of(first)[-1].factors
    learned = LearnedCost(versions_of(first))
    assert learned.factors_of(steps[0] - 1) is None
    assert learned.factors_of(STEPS) == learned.newest == last
    assert [one.factors[-1] for one in versions_of(first)] == [1.0, *[1.25] * (len(steps) - 1)]


# ---- flexseq calibrate MODEL

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}


def config_of(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **TINY, **changes}))
    return str(path)


@pytest.mark.processes
def test_a_new_model_trains_and_corrects_its_estimate(tmp_path, monkeypatch):
    asked = []
    real = command.learned_from

    def fitted(steps, cost, topology):
        asked.append((steps, cost))
        return real(steps, cost, topology)

    monkeypatch.setattr(command, "STEPS", 4)
    monkeypatch.setattr(command, "learned_from", fitted)
    output = tmp_path / "cost.json"
    correction = command.train(config_of(tmp_path), str(output))
    ((steps, estimate),) = asked
    assert [step.number for step in steps] == [1, 2, 3]
    observations = []
    for step in steps:
        observations += MeasuredStep.of_trace(step, ONE).observations(estimate, ONE)
    assert correction == fit(observations)
    assert type(estimate).load(output) == corrected(estimate, (*correction.factors, 1.0))
    assert correction.text().startswith("the estimate with ")
