"""torch.compile by regions: MLPs and norms that are compiled leave loss and gradients as they are.

Most tests compile with `aot_eager`, which traces and differentiates as the default does, and then
runs torch's own operations. The default, inductor, writes C++ on a CPU and needs a compiler.
"""

from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DynamoBackend, TorchDynamoPlugin, compile_regions
from torch._dynamo.utils import counters
from transformers import LlamaForCausalLM

from hf_flexseq.hf.model.compiled_regions import compiled_regions, leave_others_uncompiled
from hf_flexseq.hf.model.tiles import MlpTiles
from tests.budget import others_nightly
from tests.hf import objectives, test_reach
from tests.hf.by_hand import TWO_NODES, worst_error
from tests.hf.objectives import Case
from tests.hf.test_checks import fresh_accelerate, make_trainer  # noqa: F401
from tests.hf.test_exactness import gradients_under_random_plans
from tests.hf.test_reach import keep_float64, make_model, plans_across, stays_in_float64  # noqa: F401
from tests.hf.test_tiles import in_tiles
from tests.hf.tiny import documents, reference_gradients
from tests.ranks import run_ranks

LAYERS = 2  # of the models
REGIONS = 3 * LAYERS  # an MLP and two norms in a layer of Llama


def told_to_compile(backend="aot_eager"):
    plugin = TorchDynamoPlugin(backend=backend)
    return SimpleNamespace(state=SimpleNamespace(dynamo_plugin=plugin))


def compiled(model):
    return [module for module in model.modules() if "forward" in vars(module)]


@pytest.fixture
def compiles_anew():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


# ---- loss and gradients


def worst_of(family, backend="aot_eager"):
    """The largest relative error on four ranks, with tiles and without, of plans of which every
    other one is checkpointed."""
    make = partial(make_model, family)
    examples = documents(test_reach.LENGTHS)
    wanted = reference_gradients(make(), examples, attention="eager")
    plans = plans_across(test_reach.LENGTHS, family)
    with ExitStack() as put_in:

        def attach(model):
            put_in.enter_context(compiled_regions(model, told_to_compile(backend)))
            MlpTiles(model).attach()

        return worst_error(
            make, TWO_NODES, [*plans, *in_tiles(plans)], examples, wanted, attached=attach
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", others_nightly(["Qwen3", "Gemma2", "Phi3"], tried=["Qwen3"]))
def test_compiled_regions_are_exact(family, stays_in_float64, compiles_anew):  # noqa: F811
    assert worst_of(family) < 1e-10
    assert counters["stats"]["unique_graphs"] >= 3
    assert not counters["graph_break"]


@pytest.mark.nightly
@pytest.mark.processes
def test_what_inductor_writes_is_exact(stays_in_float64, compiles_anew):  # noqa: F811
    assert worst_of("Llama", "inductor") < 1e-10
    assert counters["inductor"]


def errors_sharded(rank, world_size):
    """The largest relative errors of two random plans under FSDP2, with checkpointing."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as put_in:
        keep_float64(patch)
        worst = gradients_under_random_plans(
            rank,
            world_size,
            "fsdp2",
            True,
            torch.float64,
            2,
            patched=lambda model: put_in.enter_context(compiled_regions(model, told_to_compile())),
        )
        return worst, counters["stats"]["unique_graphs"]


@pytest.mark.processes
def test_compiled_regions_of_a_sharded_model_are_exact():
    for worst, graphs in run_ranks(errors_sharded, 2, seconds=150):
        assert max(worst.values()) < 1e-10, worst
        assert graphs >= 2


# ---- a trainer


@pytest.mark.slow
def test_a_trainer_compiles_regions_alone_and_leaves_nothing_behind(tmp_path, compiles_anew):
    limit = torch._dynamo.config.recompile_limit
    losses = []
    for settings in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        settings |= {"max_steps": 1, "cost_model": "estimate"}
        trainer = make_trainer(tmp_path, model=make_model("Llama"), **settings)
        losses.append(trainer.train().training_loss)
        assert isinstance(trainer.model_wrapped, LlamaForCausalLM)
        assert not compiled(trainer.model)
    assert counters["stats"]["unique_graphs"] >= 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert trainer.accelerator.state.dynamo_plugin.backend == DynamoBackend.AOT_EAGER
    assert torch._dynamo.config.recompile_limit == limit


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerate", "compiles_anew")
def test_a_reference_model_is_not_compiled(tmp_path):
    settings = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    trainer = objectives.make_trainer(Case(kind="dpo", steps=1, settings=settings), True, tmp_path)
    trainer.train()
    assert counters["stats"]["unique_graphs"] >= 2
    assert type(trainer.ref_model) is LlamaForCausalLM
    # nor one in compiled parts, nor a teacher
    model = make_model("Llama")
    asked = SimpleNamespace(ref_model=compile_regions(model), teacher_model=torch.compile(model))
    assert asked.ref_model is not model
    leave_others_uncompiled(asked)
    assert asked.ref_model is asked.teacher_model is model


def test_nothing_is_compiled_unless_asked_for():
    model = make_model("Llama")
    with compiled_regions(model, told_to_compile("no")):
        assert not compiled(model)
    accelerator = told_to_compile()
    with compiled_regions(model, accelerator):
        assert len(compiled(model)) == REGIONS
        assert accelerator.state.dynamo_plugin.backend == DynamoBackend.NO
    assert not compiled(model)
