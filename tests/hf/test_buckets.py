"""Gradients of small models travel in several buckets; large models and users' choices are left
alone."""

import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import nn

from hf_flexseq import FlexSeqArguments, FlexSeqEngine
from hf_flexseq.hf.model.attachments import early_buckets
from tests.hf.tiny import tiny_llama
from tests.ranks import run_cases

MIB = 2**20


def bucket_mib(rank, world_size, chosen):
    """Of a model of 16 MiB and some as accelerate wraps it, and of the handler afterwards."""
    handlers = [] if chosen is None else [DistributedDataParallelKwargs(bucket_cap_mb=chosen)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    model = tiny_llama(torch.float32, vocab_size=2**16)
    assert round(sum(p.numel() * 4 for p in model.parameters()) / MIB) == 16
    engine = FlexSeqEngine(accelerator, FlexSeqArguments(cost_model="estimate"))
    engine.attach(model)
    found = accelerator.prepare(model).bucket_bytes_cap / MIB
    engine.detach()
    return found, accelerator.ddp_handler and accelerator.ddp_handler.bucket_cap_mb


@pytest.mark.processes
def test_a_small_model_has_several_buckets_unless_the_user_chose():
    chosen = (None, 25, 7)
    by_case = run_cases(bucket_mib, 2, [(size,) for size in chosen])
    assert by_case == [[(3, None)] * 2, [(3, 25)] * 2, [(7, 7)] * 2]


def test_a_large_model_keeps_the_default_and_frozen_weights_do_not_count():
    large = nn.Linear(10_000, 10_000, device="meta")
    assert early_buckets(None, large).bucket_cap_mb == 25
    assert early_buckets(None, large.requires_grad_(False)).bucket_cap_mb == 1
