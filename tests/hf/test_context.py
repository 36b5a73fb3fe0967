"""How the sequence context reaches attention: as itself, through every wrapper."""

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AttentionInterface

from hf_flexseq.attention import SequenceContext
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from tests.hf.tiny import tiny_llama
from tests.ranks import run_cases

pytestmark = pytest.mark.processes


def local_context(tokens, dtype, communicator):
    group = Group(ranks=(communicator.rank,), sequences=(0,), strategy="local")
    shard = make_shard(MicroBatch(groups=(group,)), [tokens], communicator.rank)
    return SequenceContext(
        shard, communicator, choose_kernel(torch.device("cpu"), dtype, 8), torch.device("cpu")
    )


def seen_by_attention(rank, world_size, checkpointing):
    seen = []

    def probe(module, query, key, value, attention_mask, seq_ctx=None, **kwargs):
        seen.append(seq_ctx)
        return query.transpose(1, 2), None

    AttentionInterface.register("probe", probe)
    model = tiny_llama(torch.float32)
    model.set_attn_implementation("probe")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    communicator = Communicator()
    contexts = [local_context(n, torch.bfloat16, communicator) for n in (3, 5)]
    losses = []
    for seq_ctx in contexts:  # two micro-batches in flight: both forwards before both backwards
        ids = torch.arange(seq_ctx.tokens)[None]
        output = model(
            input_ids=ids, position_ids=ids, labels=ids, seq_ctx=seq_ctx, use_cache=False
        )
        losses.append(output.loss)
    forwards, layers = len(seen), len(model.model.layers)
    assert [c is contexts[i // layers] for i, c in enumerate(seen)] == [True] * forwards
    for loss in losses:
        loss.backward()
    replayed = seen[forwards:]
    assert [c is contexts[i // layers] for i, c in enumerate(replayed)] == [True] * len(replayed)
    return forwards, len(replayed)


def test_the_context_arrives_as_itself_through_fsdp2_in_bfloat16_and_in_the_replay():
    once, replayed = run_cases(seen_by_attention, 2, [(False,), (True,)])
    assert once == [(4, 0), (4, 0)]
    assert replayed == [(4, 4), (4, 4)]
