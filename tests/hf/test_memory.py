"""Whatever a plan chooses for activations, loss and gradients are those of one process, and what
is chosen is done: where tensors are between forward and backward, and how often attention runs."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch

from hf_flexseq.memory.store import HostStore
from tests.hf.test_exactness import gradients_under_random_plans
from tests.hf.test_remat import counted_kernel
from tests.hf.test_trainer import flexseq_trainer
from tests.hf.tiny import any_choice, tiny_llama, weights
from tests.ranks import run_cases

LAYERS = 5
deep_llama = partial(tiny_llama, num_hidden_layers=LAYERS)


# ---- exact, mixed over micro-batches and layers


def under_choices(
    rank, world_size, sharding, checkpointing, make=deep_llama, layers=LAYERS, **options
):
    return gradients_under_random_plans(
        rank,
        world_size,
        sharding,
        checkpointing,
        torch.float64,
        4,
        make=make,
        choose=partial(any_choice, layers),
        cost_model="estimate",  # that prices choices
        **options,
    )


@pytest.mark.processes
def test_gradients_equal_one_process_under_any_choices():
    cases = [(sharding, on) for sharding in ("ddp", "fsdp2") for on in (False, True)]
    for by_rank in run_cases(under_choices, 2, cases, seconds=150):
        for worst in by_rank:
            assert worst["loss"] < 1e-12
            assert worst["gradients"] < 1e-10


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
    trainer.flexseq.executor.kernel, forwards = counted_kernel()
    with noted_stores() as stores:
        trainer.train()
    return weights(trainer.model), forwards.calls, stores


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
        assert store.held_bytes == store.used_bytes == 0
        # of each token a layer's input and the result of its attention, and log-sum-exps
        layers = len(range(0, LAYERS, every))
        tokens, rest = divmod(store.peak_bytes, layers * (2 * 32 + 4) * 8)
        assert rest == 0
        assert 48 <= tokens <= 64
