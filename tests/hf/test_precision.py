"""bfloat16: losses under autocast stay close to those of the plain Trainer in it, and the sequence
context reaches attention as itself through the casts of FSDP2."""

from functools import partial

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AttentionInterface

from hf_flexseq.attention import SequenceContext
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from tests.differential.case import Case
from tests.differential.runs import both
from tests.hf.plain import dataset
from tests.hf.tiny import tiny_llama
from tests.hf.trainers import assert_logged_alike
from tests.ranks import run_cases

CPU = torch.device("cpu")

pytestmark = pytest.mark.processes


def test_bf16_follows_the_plain_trainer(tmp_path):
    """After an evaluation, which wraps the model for autocast, and must leave no trace of it."""
    case = Case(
        model=partial(tiny_llama, torch.float32),
        settings={"max_steps": 4, "bf16": True, "learning_rate": 0.1},
        prepare=lambda trainer: trainer.evaluate(dataset(8)),
    )
    for _, stock, by_rank in both({"bf16": case}, tmp_path):
        for ours in by_rank:
            assert_logged_alike(stock, ours, ["loss"], rel=3e-3)
            assert_logged_alike(stock, ours, ["grad_norm"], rel=2e-2)


# ---- FSDP2


def local_context(tokens, communicator):
    group = Group(ranks=(communicator.rank,), sequences=(0,), strategy="local")
    shard = make_shard(MicroBatch(groups=(group,)), [tokens], communicator.rank)
    kernel = choose_kernel(CPU, torch.bfloat16, 8)
    return SequenceContext(shard, communicator, kernel, CPU)


def seen_by_attention(rank, world_size, checkpointing):
    """How often attention saw the context of its micro-batch, in the forward and in a replay."""
    seen = []

    def probe(module, query, key, value, attention_mask, seq_ctx=None, **kwargs):
        seen.append(seq_ctx)
        return query.transpose(1, 2), None

    AttentionInterface.register("probe", probe)
    model = tiny_llama(torch.float32)
    model.set_attn_implementation("probe")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for unit in (*model.model.layers, model):
        fully_shard(unit, mp_policy=policy)
    communicator = Communicator()
    contexts = [local_context(tokens, communicator) for tokens in (3, 5)]
    losses = []
    for seq_ctx in contexts:  # two micro-batches in flight: both forwards before both backwards
        ids = torch.arange(seq_ctx.tokens)[None]
        given = {"input_ids": ids, "position_ids": ids, "labels": ids, "use_cache": False}
        losses.append(model(**given, seq_ctx=seq_ctx).loss)
    forwards = len(seen)
    for loss in losses:
        loss.backward()
    for index, found in enumerate(seen):
        assert found is contexts[index % forwards // len(model.model.layers)]
    return forwards, len(seen) - forwards


def test_the_context_arrives_as_itself_through_fsdp2_in_bfloat16_and_in_the_replay():
    once, replayed = run_cases(seen_by_attention, 2, [(False,), (True,)])
    assert once == [(4, 0), (4, 0)]
    assert replayed == [(4, 4), (4, 4)]
