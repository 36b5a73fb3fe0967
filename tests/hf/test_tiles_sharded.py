"""MLPs in tiles under FSDP2 and ZeRO-3: weights are gathered once for all tiles, and gradients
reduced once. Under ZeRO-3 gradients are those of one process; under DDP and FSDP2
`test_memory.py` shows it."""

from collections import Counter
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_grad, z3_leaf_module
from torch.utils._python_dispatch import TorchDispatchMode

from hf_flexseq.hf.model.tiles import MlpTiles
from hf_flexseq.plan.memory import MemoryChoice
from tests.hf.tiny import relative_errors, tiny_llama
from tests.ranks import run_cases

pytestmark = pytest.mark.processes

LAYERS = 2


# ---- ZeRO-3

ZERO3 = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        # nothing is gathered ahead, nor kept between forward and backward
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 0,
    },
}
WEIGHT = 32 * 48  # numbers in a weight of an MLP


class Gathers(TorchDispatchMode):
    """Counts gathers inside of it by the numbers that they bring."""

    def __init__(self):
        super().__init__()
        self.sizes = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.c10d._allgather_base_.default:
            self.sizes[args[0].numel()] += 1
        return function(*args, **(kwargs or {}))


def loss_of(model, tokens, count):
    """The loss of so many tokens, in so many tiles."""
    memory = None if count is None else MemoryChoice(mlp_tiles=count)
    row = torch.arange(tokens)[None] % 61
    context = SimpleNamespace(memory=memory)
    return model(input_ids=row, labels=row, use_cache=False, seq_ctx=context).loss


def zero3_steps(rank, world_size, checkpointing, counts):
    """For each micro-batch: how many gathers bring one weight of an MLP, and how many all three;
    and the largest error of a gradient. counts: its tiles; None before any are attached."""
    # 1. one process: ranks have different numbers of tokens, fewer than tiles as well
    lengths = (40, 2)
    plain = tiny_llama(torch.float32)
    for tokens in lengths:
        (loss_of(plain, tokens, None) / world_size).backward()
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}

    # 2. the same under ZeRO-3, again and again
    deepspeed.init_distributed("gloo")
    model = tiny_llama(torch.float32).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ZERO3)
    attached = MlpTiles(model)
    found = []
    for count in counts:
        if count is not None:
            attached.attach()
        with Gathers() as gathers:
            engine.backward(loss_of(engine, lengths[rank], count))
        gradients = {name: safe_get_full_grad(p) for name, p in model.named_parameters()}
        error = max(relative_errors(gradients, wanted).values())
        found.append((gathers.sizes[WEIGHT], gathers.sizes[3 * WEIGHT], error))
        engine.step()
    mlp = model.model.layers[0].mlp
    assert z3_leaf_module(mlp)
    attached.detach()
    assert not z3_leaf_module(mlp)
    return found


def test_zero3_equals_one_process_and_gathers_once_for_all_tiles():
    """Once in the forward and once in the backward, whatever a rank's number of tokens, also where
    DeepSpeed has learned another order of modules before the first tiles come."""
    always, late = (5, 9, 1, 5), (None, None, None, 5, 9, 1, 5)
    cases = [
        (checkpointing, counts) for checkpointing in (False, True) for counts in (always, late)
    ]
    by_case = run_cases(zero3_steps, 2, cases, seconds=300)
    for (checkpointing, counts), by_rank in zip(cases, by_case, strict=True):
        for found in by_rank:
            assert max(error for *_, error in found) < 1e-5
            gathers = [counted for *counted, _ in found]
            if counts == always:
                assert gathers == [[0, 2 * LAYERS]] * 4
            else:
                alone = (
                    3 * 2 + (2 if checkpointing else 0)
                ) * LAYERS  # a replay gathers two again
                assert gathers[:3] == [[alone, 0]] * 3
                # of one MLP a weight is gathered alone, since the others were not freed
                assert all(sum(counted) == 2 * LAYERS for counted in gathers[3:])
