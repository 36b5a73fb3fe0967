"""A hand-written loop evaluates without a trace, to the mean over the target tokens of the whole
set, and what it does by mistake is named. What a user's class and callback read of an evaluation.
The loss of a Trainer's evaluations is in `test_loaders.py` and `test_metrics.py`."""

import copy
import json
import math

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from hf_flexseq import DataCollatorForFlexSeq, FlexSeqEngine, FlexSeqTrainer
from tests.hf.tiny import documents, reference_loss, tiny_arguments, tiny_llama, weights
from tests.hf.trainers import trainer_of
from tests.ranks import run_cases

LENGTHS = [3, 50, 1, 17, 8, 30, 2, 61, 5, 12, 44]  # ranks repeat some to fill the last batches


# ---- what a user's class and callback read


DOCUMENTS = documents([8] * 9)


class Perplexity(Trainer):
    """A user's class that reads the loss of an evaluation in its loop."""

    def evaluation_loop(self, *args, **kwargs):
        output = super().evaluation_loop(*args, **kwargs)
        output.metrics["eval_perplexity"] = math.exp(output.metrics["eval_loss"])
        return output


def perplexity(rank, world_size, folder, flex, metrics, hooked=False):
    """The perplexity of documents of one length, of whose last batches one has repeats alone."""
    rows = [dict.fromkeys(("input_ids", "labels"), row["input_ids"]) for row in DOCUMENTS]
    options = {"max_tokens_per_rank": 61} if flex else None
    given = {"eval_dataset": rows, "per_device_eval_batch_size": 3}
    if metrics:
        given["compute_metrics"] = lambda found: {"values": found.predictions.size}
        given["preprocess_logits_for_metrics"] = lambda logits, labels: logits.argmax(-1)
    trainer = trainer_of(Perplexity, folder, flexseq=options, **given)
    if hooked:  # then the loss is taken through the user's own code
        trainer.model.register_forward_hook(lambda module, args, output: None)
    return trainer.evaluate()["eval_perplexity"]


@pytest.mark.processes
def test_a_loop_behind_the_mixin_reads_the_loss_of_all_ranks(tmp_path):
    cases = [(tmp_path, flex, metrics) for metrics in (False, True) for flex in (False, True)]
    cases.append((tmp_path, True, False, True))
    of_loss, of_loss_ours, of_metrics, of_metrics_ours, of_hooked = run_cases(perplexity, 2, cases)
    assert of_loss_ours == pytest.approx(of_loss, rel=1e-2)  # which weighs batches by samples
    assert len(set(of_loss_ours)) == 1
    assert of_hooked == of_loss_ours
    assert of_metrics_ours == pytest.approx(of_metrics, rel=1e-6)


class ReadsLoader(TrainerCallback):
    """A user's callback that reads the loader of an evaluation."""

    def __init__(self):
        self.batches = []

    def on_evaluate(self, args, state, control, eval_dataloader=None, **others):
        self.batches += list(eval_dataloader)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_who_reads_the_loaders_of_evaluations_gets_the_plain_trainers_batches(tmp_path, workers):
    """Before, after and amid training, and if workers outlive an evaluation."""
    found = []
    for flexseq in (None, {"max_tokens_per_rank": 61}):
        callback = ReadsLoader()
        trainer = trainer_of(
            Trainer,
            tmp_path,
            flexseq=flexseq,
            train_dataset=documents(LENGTHS),
            eval_dataset=documents(LENGTHS),
            callbacks=[callback],
            dataloader_num_workers=workers,
            dataloader_persistent_workers=workers > 0,
        )
        batches = list(trainer.get_eval_dataloader())
        loss = trainer.evaluate()["eval_loss"]
        trainer.train()
        batches += trainer.get_eval_dataloader()
        batches += trainer.get_test_dataloader(documents(LENGTHS[:3]))
        assert trainer.evaluate()["eval_loss"] < loss
        found.append(batches + callback.batches)
    for stock, ours in zip(*found, strict=True):
        assert stock.keys() == ours.keys()
        for name, wanted in stock.items():
            assert torch.equal(ours[name], wanted), name


def test_a_class_in_front_may_evaluate_by_the_loop_alone(tmp_path):
    class Evaluates(FlexSeqTrainer):
        def evaluate(self):
            loader = self.get_eval_dataloader()
            return self.evaluation_loop(loader, "mine", prediction_loss_only=True).metrics

    trainer = trainer_of(
        Evaluates,
        tmp_path,
        flexseq={"max_tokens_per_rank": 61},
        eval_dataset=documents(LENGTHS),
        per_device_eval_batch_size=2,
    )
    with torch.no_grad():
        wanted = float(reference_loss(tiny_llama(), documents(LENGTHS)))
    trainer.model.set_attn_implementation("sdpa")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-10)


# ---- a loop of its own


def loader(seed=0):
    return DataLoader(documents(LENGTHS, seed=seed), 2, collate_fn=DataCollatorForFlexSeq())


def traced(trace):
    return [json.loads(line) for line in trace.read_text().splitlines()]


def loop(rank, world_size, folder, evaluates):
    """Three steps, with evaluations before, amid and after them if asked for."""
    accelerator = Accelerator(cpu=True)
    model = tiny_llama()
    trace = folder / f"{evaluates}.jsonl"
    options = tiny_arguments(max_tokens_per_rank=40, lookahead=2, plan_trace=str(trace))
    engine = FlexSeqEngine(accelerator, options)
    engine.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapped, optimizer, batches, held_out = accelerator.prepare(
        model, optimizer, loader(), loader(seed=1)
    )
    found = []

    def evaluate():
        if not evaluates:
            return
        evaluation = engine.evaluation(held_out)
        sums, targets = 0.0, 0
        for step in evaluation:
            assert not step.forward(wrapped).requires_grad
            sums += step.mean_loss() * step.step.targets
            targets += step.step.targets
        assert sums / targets == pytest.approx(evaluation.mean_loss(), rel=1e-10)
        found.append((evaluation.mean_loss(), float(of_one_process(model))))

    evaluate()
    for step in engine.steps(batches):
        step.backward(wrapped)
        optimizer.step()
        optimizer.zero_grad()
        evaluate()
    engine.detach()
    return found, [line["step"] for line in traced(trace)], weights(model)


@torch.no_grad()
def of_one_process(model):
    """The loss on the held-out documents, of the same weights in a plain model."""
    plain = tiny_llama()
    plain.load_state_dict(model.state_dict())
    return reference_loss(plain, documents(LENGTHS, seed=1))


@pytest.mark.processes
def test_an_evaluation_is_the_token_mean_and_leaves_no_trace(tmp_path):
    evaluating, plain = run_cases(loop, 2, [(tmp_path, True), (tmp_path, False)])
    for (found, lines, after), (_, _, wanted_weights) in zip(evaluating, plain, strict=True):
        assert len(found) == 4
        assert lines == [0, 1, 2]
        for loss, wanted in found:
            assert loss == pytest.approx(wanted, rel=1e-10)
        for name, wanted in wanted_weights.items():
            assert (after[name] == wanted).all(), name


def test_a_step_that_is_left_without_its_backward_is_named(tmp_path):
    model = tiny_llama()
    trace = tmp_path / "plans.jsonl"
    engine = FlexSeqEngine(Accelerator(cpu=True), tiny_arguments(plan_trace=str(trace)))
    left = r"step 1 has not run: call step\.backward\(model\) in training, and draw from engine\."
    with engine.attached(model):
        steps = engine.steps(loader())
        next(steps).backward(model)
        next(steps)
        with pytest.raises(RuntimeError, match=left):
            next(steps)
        for step in engine.steps(loader()):
            if step.step.number > 2:
                break
            step.backward(model)
        evaluation = engine.evaluation([])
        assert list(evaluation) == []
        assert evaluation.mean_loss() != evaluation.mean_loss()  # nan
    lines = traced(trace)
    assert [line["step"] for line in lines] == [0, 2]
    assert all(sum(line["measured_s"]) > 0 for line in lines)


def test_what_a_loop_does_by_mistake_is_named():
    model = tiny_llama()
    accelerator = Accelerator(cpu=True)
    engine = FlexSeqEngine(accelerator, tiny_arguments())
    with pytest.raises(TypeError, match="takes FlexSeqArguments, got dict"):
        FlexSeqEngine(accelerator, {})
    with engine.attached(model):
        step = next(engine.steps(loader()))
        with pytest.raises(RuntimeError, match="step 0 has not run"):
            step.mean_loss()
        with pytest.raises(ValueError, match="a LlamaForCausalLM that is not the model of"):
            step.backward(tiny_llama())
        with torch.compiler.set_stance("force_eager"):
            step.backward(torch.compile(model))
        with pytest.raises(RuntimeError, match="step 0 has run: draw another one"):
            step.backward(model)
        evaluation = engine.evaluation(loader())
        with pytest.raises(ValueError, match="attach it to an engine of its own"):
            next(iter(evaluation)).forward(copy.deepcopy(model))
        with pytest.raises(RuntimeError, match=r"has not run.* with step\.forward\(model\)"):
            list(evaluation)
        with pytest.raises(ValueError, match="accumulation=0: a step has at least 1 batch"):
            next(engine.steps(loader(), 0))
        accelerator.gradient_accumulation_steps = 4  # which would divide gradients
        with pytest.raises(ValueError, match="gradient_accumulation_steps=4 of the Accelerator"):
            next(engine.steps(loader()))


@pytest.mark.processes
@pytest.mark.parametrize("lookahead", [0, 2])
def test_two_loops_in_turns_lose_no_step(lookahead):
    model = tiny_llama()
    engine = FlexSeqEngine(Accelerator(cpu=True), tiny_arguments(lookahead=lookahead))
    numbers = []
    with engine.attached(model):
        together = zip(engine.steps(loader()), engine.steps(loader()), strict=True)
        if lookahead:
            first, second = next(together)
            first.backward(model)
            second.backward(model)
            with pytest.raises(RuntimeError, match="give each of them an engine of its own"):
                next(together)
        else:
            for steps in together:
                for step in steps:
                    step.backward(model)
                    numbers.append(step.step.number)
            assert numbers == list(range(len(numbers)))
            assert len(numbers) == 2 * len(loader())
