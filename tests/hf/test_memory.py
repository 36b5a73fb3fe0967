"""Whatever a plan chooses for activations, loss and gradients are those of one process, and what
is chosen is done: where tensors are between forward and backward, and how often attention runs."""

import os
import random
import threading
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainerCallback
from trl import SFTTrainer
from trl.trainer import sft_trainer as sft_module

from hf_flexseq import FlexSeqEngine
from hf_flexseq.hf.model.layer_memory import LayerMemory, reason_without_choices
from hf_flexseq.memory.pages import MIB, HostMemoryFull
from hf_flexseq.memory.store import HostStore
from hf_flexseq.plan.memory import MemoryChoice
from tests.budget import others_nightly
from tests.differential.case import Case, sft_trainer
from tests.differential.runs import run
from tests.hf import objectives
from tests.hf.by_hand import TWO_NODES, worst_error
from tests.hf.hybrids import HYBRIDS, make_hybrid
from tests.hf.objectives import BOUNDS, assert_alike, compare, save_inputs
from tests.hf.plain import flexseq_trainer
from tests.hf.test_exactness import gradients_under_random_plans
from tests.hf.test_reach import FAMILIES, keep_float64, make_model, plans_across
from tests.hf.test_reach import LENGTHS as REACH_LENGTHS
from tests.hf.test_remat import (
    CPU,
    assert_same_bits,
    counted_kernel,
    gradients,
    loss_of,
    make_context,
)
from tests.hf.tiny import (
    SIZES,
    any_choice,
    any_choices,
    documents,
    reference_gradients,
    refused,
    tiny_arguments,
    tiny_llama,
    weights,
)
from tests.host_store import held_bytes, used_bytes
from tests.ranks import run_cases, run_ranks

LAYERS = 5
deep_llama = partial(tiny_llama, num_hidden_layers=LAYERS)


def layers_of(model):
    return LayerMemory(
        model, save_attention_output=True, make_store=lambda: HostStore(CPU, 16 * MIB)
    )


# ---- exact, mixed over micro-batches and layers

TILES = (1, 3)


def under_choices(rank, world_size, sharding, checkpointing):
    settings = (sharding, checkpointing, torch.float64, 3)
    choose = partial(any_choice, LAYERS, tiles=TILES)
    # the estimate prices choices
    options = {"make": deep_llama, "choose": choose, "cost_model": "estimate"}
    return gradients_under_random_plans(rank, world_size, *settings, **options)


@pytest.mark.processes
def test_gradients_equal_one_process_under_any_choices():
    cases = [("ddp", False), ("fsdp2", False), ("fsdp2", True)]
    for by_rank in run_cases(under_choices, 2, cases, seconds=150):
        for worst in by_rank:
            assert worst["loss"] < 1e-12
            assert worst["gradients"] < 1e-10


WITHOUT_CHOICES = ("LongcatFlash", "JetMoe", "Zamba2")
WITH_CHOICES = [name for name in (*FAMILIES, *HYBRIDS) if name not in WITHOUT_CHOICES]
# Windows and softcaps; sinks and experts; recurrent layers.
CHOOSING = ["Gemma2", "GptOss", "KimiLinear"]


@pytest.mark.slow
@pytest.mark.parametrize("family", others_nightly(WITH_CHOICES, tried=CHOOSING))
def test_every_family_is_exact_under_any_choices_on_two_nodes(monkeypatch, family):
    keep_float64(monkeypatch)
    make = partial(make_hybrid if family in HYBRIDS else make_model, family)
    count = make().config.num_hidden_layers
    rng = random.Random(family)
    plans = []
    for plan in plans_across(REACH_LENGTHS, family):
        chosen = [replace(one, memory=any_choice(count, rng)) for one in plan.micro_batches]
        plans.append(replace(plan, micro_batches=tuple(chosen)))
    wanted = reference_gradients(make(), documents(REACH_LENGTHS), attention="eager")
    with ExitStack() as attached:

        def attach(model):
            attached.enter_context(layers_of(model).attached())

        examples = documents(REACH_LENGTHS)
        assert worst_error(make, TWO_NODES, plans, examples, wanted, attached=attach) < 1e-10


def compared_under_choices(rank, world_size, folder, case):
    with any_choices(SIZES["num_hidden_layers"], TILES), noted_stores() as stores:
        return compare(rank, world_size, folder, case), len(stores)


@pytest.mark.processes
def test_pairs_and_adapters_train_as_the_plain_trainer_does_under_any_choices(tmp_path):
    save_inputs(tmp_path)
    case = objectives.Case(kind="dpo", steps=4, adapter="new")
    for apart, stores in run_ranks(compared_under_choices, 2, tmp_path, case, seconds=150):
        assert_alike(apart, weights=BOUNDS["dpo"])
        assert stores == 1


def zero_under_choices(rank, world_size, folder, chooses):
    case = Case(model=partial(tiny_llama, torch.float32), settings={"learning_rate": 0.1}, stage=3)
    with any_choices(SIZES["num_hidden_layers"]) if chooses else nullcontext():
        return run(rank, world_size, case, folder).weights


@pytest.mark.processes
def test_zero_3_has_the_same_bits_under_any_choices(tmp_path):
    """But for tiles, which add up in another order."""
    cases = [(tmp_path, chooses) for chooses in (False, True)]
    as_set, chosen = run_cases(zero_under_choices, 2, cases, seconds=150)
    for wanted, found in zip(as_set, chosen, strict=True):
        assert all((found[name] == wanted[name]).all() for name in wanted)


# ---- what is chosen is done, on one process

HOST = {"inputs_on_host": 3, "outputs_on_host": 2}
CHOICES = (
    {},
    {"recomputed_layers": 3},
    {"recomputed_layers": 3, "outputs_recomputed": 3},
    {"recomputed_layers": 3, **HOST},
    {"recomputed_layers": LAYERS, **HOST, "outputs_recomputed": 2},
    {"recomputed_layers": LAYERS, "inputs_on_host": LAYERS, "outputs_on_host": LAYERS},
)


@contextmanager
def told(model, **choice):
    """A context with this choice for a model's layers, the counter of its kernel's forwards, and
    the layers; None for what is set."""
    layers = layers_of(model)
    with layers.attached():
        yield *make_context(memory=MemoryChoice(**choice)), layers


def deep_model():
    model = deep_llama().train()
    model.set_attn_implementation("flexseq")
    return model


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_gives_the_same_bits_and_attends_as_often_as_it_says(choice):
    model = deep_model()
    with told(model) as (seq_ctx, plain, _):
        loss_of(model, seq_ctx).backward()
    wanted = gradients(model)
    with told(model, **choice) as (seq_ctx, forwards, layers):
        loss = loss_of(model, seq_ctx)
        assert forwards.calls == plain.calls
        loss.backward()
        assert forwards.calls == plain.calls + choice.get("outputs_recomputed", 0)
        assert (layers.store is not None) == seq_ctx.memory.uses_host
        assert layers.store is None or used_bytes(layers.store) == 0
    assert_same_bits(gradients(model), wanted)
    assert layers.store is None
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)
    assert not any("_gradient_checkpointing_func" in vars(layer) for layer in model.model.layers)


# ---- models and settings that choices leave alone


@pytest.mark.parametrize(
    ("make", "family", "reason"),
    [
        (make_model, "LongcatFlash", "it has 1 layers, and num_hidden_layers=2"),
        (make_model, "JetMoe", "JetMoeForCausalLM does not support activation checkpointing"),
        (make_hybrid, "Zamba2", "Zamba2HybridLayer has layers inside that are checkpointed"),
    ],
)
def test_models_whose_layers_do_not_choose_say_why(make, family, reason):
    model = make(family)
    assert reason in reason_without_choices(model)
    if family == "Zamba2":
        model.gradient_checkpointing_enable(offload=True)
        with refused(f"offload=True of activation checkpointing with .*: {reason}"):
            LayerMemory(model, save_attention_output=True, make_store=HostStore)


def nothing(*args):
    return None


def reason_with_a_hook_on_one_rank(rank, world_size):
    model = deep_llama()
    if rank == 1:
        model.model.layers[0].mlp.register_forward_hook(nothing)
    engine = FlexSeqEngine(Accelerator(cpu=True), tiny_arguments())
    with engine.attached(model):
        return engine.planning.reason_without_choices


@pytest.mark.processes
def test_a_hook_on_one_rank_alone_is_a_reason_on_all():
    for reason in run_ranks(reason_with_a_hook_on_one_rank, 2, seconds=60):
        assert reason == "a hook of yours in mlp of LlamaDecoderLayer would run twice"


def sft(folder, **settings):
    return sft_trainer(SFTTrainer, folder, 2, flexseq={}, settings=settings)


@pytest.mark.slow
def test_trl_and_activation_checkpointing_do_not_both_offload(tmp_path, monkeypatch):
    # without a GPU TRL finds no device to offload from
    monkeypatch.setattr(sft_module, "get_act_offloading_ctx_manager", lambda model: nullcontext())
    trainer = sft(tmp_path, activation_offloading=True)
    with trainer._attached():
        reason = trainer.flexseq.planning.reason_without_choices
    assert reason == "activation_offloading=True offloads them"
    with refused("activation_offloading=True and offload=True in .*_kwargs", ValueError):
        sft(
            tmp_path,
            activation_offloading=True,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"offload": True},
        )


def test_more_memory_of_the_host_than_there_is():
    with refused(r"host_memory_gib=1e\+06 for each of 1 ranks: the machine has", ValueError):
        FlexSeqEngine(Accelerator(cpu=True), tiny_arguments(host_memory_gib=1e6))


# ---- offload=True of transformers


@contextmanager
def noted_stores():
    """The stores that are made inside the block, and what the model's kernel does."""
    made = []
    original = HostStore.__init__

    def noting(self, *args):
        made.append(self)
        original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostStore, "__init__", noting)
        yield made


def trained(folder, **settings):
    """Weights after a few steps, calls of the kernel, and the store that was used, if any."""
    trainer = flexseq_trainer(
        folder,
        optim="sgd",
        max_steps=3,
        lookahead=0,
        max_tokens_per_rank=64,
        model=deep_llama(),
        gradient_checkpointing=True,
        **settings,
    )
    trainer.flexseq.kernel, forwards = counted_kernel()
    with noted_stores() as stores:
        trainer.train()
    return weights(trainer.model), forwards.calls, stores


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"]
)
def test_offload_of_transformers_trains_on_a_cpu_with_attention_on_the_host(tmp_path, name):
    wanted, calls, stores = trained(tmp_path)
    assert not stores
    for every in (1, 2):
        options = {name: {"offload": True, "every_n_layers": every}}
        found, found_calls, (store,) = trained(tmp_path, **options)
        assert all((found[key] == wanted[key]).all() for key in wanted)
        assert found_calls == calls
        assert held_bytes(store) == used_bytes(store) == 0
        # of each token a layer's input and the result of its attention, and log-sum-exps
        layers = len(range(0, LAYERS, every))
        tokens, rest = divmod(store.peak_bytes, layers * (2 * 32 + 4) * 8)
        assert rest == 0
        assert 48 <= tokens <= 64


@pytest.mark.slow
def test_a_budget_that_does_not_suffice_ends_training_in_one_line(tmp_path):
    options = {"gradient_checkpointing_kwargs": {"offload": True}}
    with noted_stores() as stores, refused("need more than host_memory_gib=2e-05", HostMemoryFull):
        trained(tmp_path, **options, host_memory_gib=2e-5)
    assert held_bytes(stores[0]) == 0


# ---- how long a store lives


def files_and_threads():
    return len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.slow
def test_fifty_steps_hold_no_more_than_the_first_and_the_end_frees_it(tmp_path):
    held = []

    class Notes(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            store = trainer.flexseq.whole_model.layers.store
            held.append((held_bytes(store), used_bytes(store), *files_and_threads()))
            if state.global_step == 51:
                raise KeyError("in the middle")

    trainer = flexseq_trainer(
        tmp_path,
        batch=1,
        max_steps=100,
        lookahead=0,
        max_tokens_per_rank=64,
        callbacks=[Notes()],
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"offload": True},
    )
    with noted_stores() as stores, pytest.raises(KeyError, match="in the middle"):
        trainer.train()
    assert len(held) == 51
    assert set(held[1:]) == {held[1]}
    assert held[1][0] > held[1][1] == 0
    (store,) = stores
    assert held_bytes(store) == 0
    assert not trainer.flexseq.is_attached
