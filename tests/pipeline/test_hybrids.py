"""Pipelines of models with recurrent layers. Under a random plan with cut sequences and
checkpointed layers, loss and gradients are those of one process; evaluation gives its loss. Ranks
are threads."""

import random
from dataclasses import replace

import pytest
import torch

from hf_flexseq.attention.recurrent.carry import Carrying, Part, StateCarry, WrongOrder
from hf_flexseq.hf.model.recurrent import attach_recurrent
from hf_flexseq.pipeline.reduction import reduce_gradients
from hf_flexseq.pipeline.stages import cut
from tests.hf.hybrids import make_hybrid
from tests.hf.test_reach import keep_float64
from tests.hf.tiny import documents, reference_gradients, relative_errors, tiny_llama
from tests.pipeline.plans import random_pipeline_plan
from tests.pipeline.test_exactness import columns_of, loss_error, make_executor
from tests.ranks import join, run_threads

LENGTHS = [1, 2, 17, 5, 131, 3, 70, 11]
TARGETS = sum(label != -100 for e in documents(LENGTHS) for label in e["labels"][1:])
FAMILIES = ["Qwen3_5", "KimiLinear", "GraniteMoeHybrid", "NemotronH", "Lfm2"]


def errors_of(rank, world_size, family, seed, wanted_loss, wanted, checkpoints_itself=False):
    """The largest error of this stage's gradients, and those of the losses of training and of
    evaluation.

    checkpoints_itself: whether the model checkpoints all layers, as a Trainer makes it do.
    """
    communicator = join()
    model = make_hybrid(family)
    if checkpoints_itself:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    recurrent = attach_recurrent(model)
    executor = make_executor(model, world_size, 1, communicator)
    layers = model.config.num_hidden_layers
    options = {"checkpointing": True, "split_weights": True}
    plan = random_pipeline_plan(LENGTHS, world_size, random.Random(seed), layers=layers, **options)
    columns = columns_of(plan, documents(LENGTHS))
    loss = executor.train(plan, columns, TARGETS)
    reduce_gradients(executor.stage, executor.neighbours)
    evaluated = executor.evaluate(plan, columns, TARGETS)
    recurrent.detach()
    found = {name: p.grad.clone() for name, p in executor.stage.global_parameters()}
    errors = relative_errors(found, {name: wanted[name] for name in found}, floor_of=wanted)
    losses = [loss_error(one, wanted_loss, communicator) for one in (loss, evaluated)]
    return max(errors.values()), *losses


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_with_recurrent_layers_are_exact(family, monkeypatch):
    keep_float64(monkeypatch)
    wanted = reference_gradients(make_hybrid(family), documents(LENGTHS), attention="eager")
    for of_gradients, *of_losses in run_threads(errors_of, 2, family, family, *wanted):
        assert of_gradients < 1e-10
        assert max(of_losses) < 1e-12


@pytest.mark.parametrize("family", ["Qwen3_5", "Lfm2"])
def test_layers_that_checkpoint_themselves_are_exact(family, monkeypatch):
    keep_float64(monkeypatch)
    wanted = reference_gradients(make_hybrid(family), documents(LENGTHS), attention="eager")
    for of_gradients, *of_losses in run_threads(errors_of, 2, family, family, *wanted, True):
        assert of_gradients < 1e-10
        assert max(of_losses) < 1e-12


def make_frozen(family):
    """A model of two layers, in the first of which no mixer and no norm is trained, and with it no
    embedding."""
    model = tiny_llama(num_hidden_layers=2) if family == "Llama" else make_hybrid(family)
    model.get_input_embeddings().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if ".layers.0." in name and "mlp" not in name:
            parameter.requires_grad_(False)
    return model


def errors_of_frozen(rank, world_size, family, wanted):
    """The largest error of this stage's gradients, where all chunks of the first layer drop their
    activations."""
    model = make_frozen(family)
    recurrent = attach_recurrent(model)
    executor = make_executor(model, world_size, 1, join())
    plan = random_pipeline_plan([131], world_size, random.Random(0), layers=2)
    assert len(plan.chunks) > 1
    plan = replace(plan, checkpointed=((1,) * len(plan.chunks),) * world_size)
    examples = documents([131])
    targets = sum(label != -100 for label in examples[0]["labels"][1:])
    executor.train(plan, columns_of(plan, examples), targets)
    recurrent.detach()
    found = {n: p.grad for n, p in executor.stage.global_parameters() if p.requires_grad}
    assert found
    errors = relative_errors(found, {name: wanted[name] for name in found}, floor_of=wanted)
    return max(errors.values())


@pytest.mark.parametrize("family", ["Llama", "Qwen3_5"])
def test_layers_are_replayed_though_their_mixers_need_no_gradient(family, monkeypatch):
    keep_float64(monkeypatch)
    _, wanted = reference_gradients(make_frozen(family), documents([131]), attention="eager")
    assert max(run_threads(errors_of_frozen, 2, family, wanted)) < 1e-10


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("Zamba2", "layers 0 and 2 share shared_transformer"),
        ("FalconH1", "changes hidden states between its embedding and its layers"),
        ("Bamba", "does not run on hidden states"),
    ],
)
def test_what_is_no_plain_stack_is_refused(family, reason):
    with pytest.raises(NotImplementedError, match=f"{reason}.*; set pipeline_parallel_size=1"):
        cut(make_hybrid(family), 0, 2)


# ---- the carry


def carrying(carry, start, stop, *, keeps_grad=True):
    return Carrying(carry, (0, 1), Part(7, start, stop, 10), keeps_grad)


def test_what_a_chunk_leaves_goes_to_the_next_and_its_gradient_comes_back():
    carry = StateCarry()
    first, second = carrying(carry, 0, 4), carrying(carry, 4, 10)
    assert first.given() is None
    first.store(torch.ones(3))
    assert torch.equal(second.given(), torch.ones(3))
    second.store(torch.zeros(3))
    assert carry.bytes() == 12
    second.store(torch.zeros(3))  # a replay
    assert second.gradient_after() is None
    second.leave_gradient(torch.full((3,), 2.0))
    assert torch.equal(first.gradient_after(), torch.full((3,), 2.0))
    first.leave_gradient(torch.zeros(3))
    carry.check_empty()


def test_without_gradients_nothing_is_left():
    carry = StateCarry()
    carrying(carry, 0, 4, keeps_grad=False).store(torch.ones(3))
    carrying(carry, 4, 10, keeps_grad=False).store(torch.ones(3))
    carry.check_empty()


def test_chunks_in_another_order_are_refused():
    carry = StateCarry()
    with pytest.raises(WrongOrder, match=r"nothing is carried to token 4 of sequence 7"):
        carrying(carry, 4, 10).given()
    carrying(carry, 0, 4).store(torch.ones(3))
    with pytest.raises(WrongOrder, match=r"the forward of \[6, 10\)"):
        carrying(carry, 6, 10).store(torch.ones(3))
    with pytest.raises(WrongOrder, match=r"the backward of \[0, 4\)"):
        carrying(carry, 0, 4).gradient_after()
    with pytest.raises(WrongOrder, match="not drained: sequence 7"):
        carry.check_empty()
