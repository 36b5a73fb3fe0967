"""Planning ahead changes when the planning happens and no result: losses, evaluation,
checkpoints."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from hf_flexseq import FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.planner.process.client import InlinePlanner
from tests.hf.test_trainer import training_arguments
from tests.hf.tiny import documents, tiny_llama
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes


def run(rank, world_size, folder, lookahead):
    """The log without its timings, and the checkpoint after two steps."""
    args = FlexSeqConfig(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        max_tokens_per_rank=40,
        lookahead=lookahead,
    )
    examples = documents([1 + (i * i * 7) % 60 for i in range(21)])
    trainer = FlexSeqTrainer(
        model=tiny_llama(), args=args, train_dataset=examples[:14], eval_dataset=examples[14:]
    )
    trainer.train()
    kept = (
        "loss",
        "grad_norm",
        "learning_rate",
        "eval_loss",
        "step",
        "flexseq/micro_batches",
        "flexseq/predicted_s",
    )
    log = [
        {key: entry[key] for key in kept if key in entry} for entry in trainer.state.log_history
    ]
    return log, {
        k: v.numpy() for k, v in load_file(folder / "checkpoint-2" / "model.safetensors").items()
    }


@pytest.fixture(scope="module")
def planned_in_place(tmp_path_factory):
    """The log and the checkpoint of a run that plans no step ahead."""
    return run_ranks(run, 2, tmp_path_factory.mktemp("in place"), 0)[0]


@pytest.mark.parametrize("lookahead", [1, 4, 50])
def test_lookahead_changes_no_result(planned_in_place, tmp_path, lookahead):
    wanted_log, wanted = planned_in_place
    log, weights = run_ranks(run, 2, tmp_path, lookahead)[0]
    assert any("eval_loss" in entry for entry in log)
    assert log == wanted_log
    assert all(
        torch.equal(torch.as_tensor(weights[name]), torch.as_tensor(w))
        for name, w in wanted.items()
    )


class LosesASequence(InlinePlanner):
    """Its plans leave out the last group."""

    def result(self, step):
        plan = super().result(step)
        *others, last = plan.micro_batches
        return replace(plan, micro_batches=(*others, replace(last, groups=last.groups[:-1])))


class NeverGoesBackward(InlinePlanner):
    """Its plans leave out the last action of the first rank."""

    def result(self, step):
        step_plan = super().result(step)
        (plan,) = step_plan.plans
        first, *others = plan.actions
        return replace(step_plan, plans=(replace(plan, actions=(first[:-1], *others)),))


def wrongly_planned(rank, world_size, folder, stages):
    """What is raised, without ever running a step."""
    options = {"cost_model": "estimate", "pipeline_parallel_size": stages}
    args = training_arguments(
        FlexSeqConfig, folder, batch=2, accumulation=1, lookahead=0, **options
    )
    trainer = FlexSeqTrainer(model=tiny_llama(), args=args, train_dataset=documents([5, 3, 8, 2]))
    executor = trainer.flexseq.executor
    make = executor.planner

    def make_planner(*, ahead):
        planner = make(ahead=ahead)
        planner.__class__ = LosesASequence if stages == 1 else NeverGoesBackward
        return planner

    executor.planner = make_planner
    with pytest.raises(RuntimeError) as raised:
        trainer.train()
    return str(raised.value)


@pytest.mark.parametrize(("stages", "reason"), [(1, "sequences missing"), (2, "stage 0 has no 0")])
def test_an_illegal_plan_is_refused_on_every_rank(tmp_path, stages, reason):
    for message in run_ranks(wrongly_planned, 2, tmp_path, stages):
        assert message.startswith("planning of step 0 failed: ")
        assert reason in message
