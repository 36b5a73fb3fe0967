"""Layers that keep what a choice says: bytes on the device between forward and backward, and
gradients, while nobody waits."""

import pytest
import torch

from hf_flexseq.attention import SequenceContext
from hf_flexseq.cost.peak import Peak
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.model.layer_memory import LayerMemory
from hf_flexseq.hf.model.tiles import MlpTiles
from hf_flexseq.memory.pages import MIB
from hf_flexseq.memory.store import HostStore
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.steps.peaks import peaks_of
from tests.hf.test_remat import gradients
from tests.hf.tiny import SIZES, VOCAB, tiny_llama
from tests.kernels.reference import Reference
from tests.late_device.scenarios import CUDA, check
from tests.plans import one_group

LAYERS = 3
TOKENS = 128
INPUT = TOKENS * SIZES["hidden_size"] * 4  # bytes
OUTPUT = INPUT + TOKENS * SIZES["num_attention_heads"] * 4  # with log-sum-exps
EVERY = {"recomputed_layers": LAYERS, "inputs_on_host": LAYERS, "outputs_on_host": LAYERS}

pytestmark = pytest.mark.usefixtures("in_torch", "one_kernel")


def model_of():
    model = tiny_llama(torch.float32, num_hidden_layers=LAYERS).to(CUDA).train()
    model.set_attn_implementation("flexseq")
    return model


def held_and_gradients(model, **choice):
    """Bytes on the device between forward and backward, and gradients; the host does not wait."""
    shard = make_shard(one_group(range(1), 1, "local"), (TOKENS,), 0)
    chosen = MemoryChoice(**choice)
    seq_ctx = SequenceContext(shard, Communicator(), Reference(), CUDA, memory=chosen)
    ids = (torch.arange(TOKENS) % VOCAB).unsqueeze(0).to(CUDA)
    layers = LayerMemory(
        model, save_attention_output=True, make_store=lambda: HostStore(CUDA, MIB)
    )
    held = []
    with layers.attached():
        for _ in range(2):  # programs are made in the first
            torch.cuda.set_sync_debug_mode("error")
            before = torch.cuda.memory_allocated()
            out = model.model(input_ids=ids, position_ids=ids, seq_ctx=seq_ctx, use_cache=False)
            held.append(torch.cuda.memory_allocated() - before)
            out.last_hidden_state.square().sum().backward()
            del out
            torch.cuda.set_sync_debug_mode("default")
        found = gradients(model)
        check(*found.values())
    return held[1], found


MORE = (  # than with everything on the host
    (EVERY | {"inputs_on_host": 1}, (LAYERS - 1) * INPUT),
    (EVERY | {"outputs_on_host": 1}, (LAYERS - 1) * OUTPUT),
    (EVERY | {"outputs_on_host": 1, "outputs_recomputed": 1}, OUTPUT),
    ({"recomputed_layers": LAYERS}, LAYERS * (INPUT + OUTPUT)),
)


def test_what_is_chosen_is_what_is_on_the_device():
    model = model_of()
    _, wanted = held_and_gradients(model)  # nothing is recomputed
    least, gradients_of_host = held_and_gradients(model, **EVERY)
    found = [gradients_of_host]
    for choice, more in MORE:
        held, of_choice = held_and_gradients(model, **choice)
        assert held - least == more
        found.append(of_choice)
    for one in found:
        assert all(torch.equal(one[name], gradient) for name, gradient in wanted.items())


def test_mlps_in_tiles_have_the_same_gradients_and_hold_less():
    model = model_of()
    _, wanted = held_and_gradients(model)
    tiles = MlpTiles(model)
    tiles.attach()
    whole, _ = held_and_gradients(model)
    held, found = held_and_gradients(model, mlp_tiles=4)
    tiles.detach()
    assert held < whole
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient)


def test_a_block_that_holds_more_than_all_before_it_is_noted_without_waiting():
    peaks = peaks_of(CUDA)
    before, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    size = (most - before + 4096) // 1024 * 1024
    torch.cuda.set_sync_debug_mode("error")
    for block in range(2):
        with peaks.watching(block):
            torch.empty(size, dtype=torch.uint8, device=CUDA)
    torch.cuda.set_sync_debug_mode("default")
    assert peaks.found == {0: Peak(before, before + size, before)}
