"""Checkpointing with use_reentrant=True: layers run again the other way while a model is attached,
with the results of the plain Trainer, and have their own function back afterwards."""

from contextlib import contextmanager
from functools import partial

import pytest
from accelerate import Accelerator
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from tests.differential.case import Case
from tests.differential.runs import assert_alike
from tests.hf.test_checks import make_trainer
from tests.hf.tiny import RandomPlanEngine, batches, refused, tiny_llama

LINE = "use_reentrant=True: layers of LlamaForCausalLM are checkpointed with use_reentrant=False"


def functions_of(model):
    return [layer._gradient_checkpointing_func for layer in model.model.layers]


@contextmanager
def without_reentrant():
    """Fail where torch checkpoints a layer in the reentrant way."""

    def fail(*given):
        raise AssertionError("a layer is checkpointed in the reentrant way")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFunction, "forward", fail)
        yield


REENTRANT = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
}
COMMON = {"around": without_reentrant}
CASES = {
    # two ranks share each sequence's attention
    "mixin": Case(settings=REENTRANT, flexseq={"planner": "static", "sp_degree": 2}, **COMMON),
    "callback": Case(settings=REENTRANT | {"callback": True}, **COMMON),
}


@pytest.mark.processes
def test_steps_are_those_of_the_plain_trainer(tmp_path):
    assert_alike(CASES, tmp_path, weights=1e-6)


def run_in_loop(model, engine, between):
    """Run two steps; `between` follows each."""
    with engine.attached(model):
        for step in engine.steps(batches(2)):
            step.backward(model)
            between()


def test_a_loop_whose_layers_are_reentrant(caplog):
    model = tiny_llama()
    model.gradient_checkpointing_enable({"use_reentrant": True, "preserve_rng_state": False})
    second = model.model.layers[1]
    second._gradient_checkpointing_func = checkpoint  # which is reentrant by default
    own = functions_of(model)
    engine = RandomPlanEngine(Accelerator(cpu=True), 0)
    used = []
    with caplog.at_level("INFO"):
        run_in_loop(model, engine, lambda: used.append(functions_of(model)))
    other_way = {"use_reentrant": False}
    for of_first, of_second in used:
        assert of_first.keywords == other_way | {"preserve_rng_state": False}
        assert of_second.keywords == other_way
    assert caplog.text.count(LINE) == 1
    assert functions_of(model) == own

    def set_anew():
        used.append(functions_of(model))
        model.gradient_checkpointing_enable({"use_reentrant": True})

    run_in_loop(model, engine, set_anew)
    assert all(function.keywords == other_way for function in used[-1])
    for function in functions_of(model):
        assert function.keywords == {"use_reentrant": True}, "the last one that the owner has set"


def test_a_reentrant_function_of_ones_own_is_refused(tmp_path):
    def own(function, *args, use_reentrant):
        return function(*args)

    model = tiny_llama()
    for layer in model.model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(own, use_reentrant=True)
    with refused("is checkpointed by a function of your own that is reentrant.*=False"):
        make_trainer(tmp_path, model=model)
    for layer in model.model.layers:
        layer._gradient_checkpointing_func = partial(own, use_reentrant=False)
    make_trainer(tmp_path, model=model)
    with refused("LlamaForCausalLM: LlamaDecoderLayer is checkpointed by a function of your own"):
        run_in_loop(
            model,
            RandomPlanEngine(Accelerator(cpu=True), 0),
            lambda: setattr(
                model.model.layers[1],
                "_gradient_checkpointing_func",
                partial(own, use_reentrant=True),
            ),
        )
