"""No layer makes the host wait for the device: attention of every strategy, the chunks of a
pipeline, the loss and a model, forward and backward, on tensors without data."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_flexseq.attention import (
    SequenceContext,
    recurrent,
    remat,
    replay,
    sequence_parallel_attention,
    uploads,
)
from hf_flexseq.base.topology import Topology
from hf_flexseq.hf.model.attention import NAME
from hf_flexseq.hf.model.loss import attach_chunked_loss
from hf_flexseq.kernels import chunked_loss, fused_operations
from hf_flexseq.kernels.scans import grid
from hf_flexseq.kernels.torch_varlen import TorchVarlen
from hf_flexseq.kernels.upload import to_device
from hf_flexseq.pipeline.carry import KVCarry
from hf_flexseq.pipeline.context import ChunkContext
from hf_flexseq.pipeline.executor import PipelineExecutor
from hf_flexseq.pipeline.stages import cut
from hf_flexseq.pipeline.ulysses import Sharing
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.program import heads, ulysses
from hf_flexseq.steps.inputs import inputs_of
from tests.hf.tiny import VOCAB, tiny_llama
from tests.kernels.reference import Reference
from tests.no_sync import META, HostSync, NoHostSync, alone
from tests.pipeline import test_executor as pipeline
from tests.pipeline.test_exactness import columns_of
from tests.pipelines import chunk_of
from tests.plans import NESTED, one_group
from tests.published.zeppelin.gainful_passes import Always

HEAD_DIM = 8
LAYERS = 2
LENGTHS = (37, 12, 3, 1, 20)
FOUR = tuple(range(4))
RANKS = (0, 3)  # that run, of four: those in most groups and in fewest, with unequal heads
# query heads and KV heads
DIVIDING = (8, 4)  # over 4 ranks: a KV head each
UNEVEN = (7, 7)  # 1 or 2 each
REPEATED = (30, 6)  # 7 or 8 query heads each; a piece of rank 3 reads two KV heads unequally
TWO_NODES = Topology(nodes=2, ranks_per_node=2)
SIZES = {"hidden_size": 80, "num_attention_heads": 10, "num_key_value_heads": 5}  # of a model


@pytest.fixture(autouse=True)
def like_a_gpu_of_few_rows(monkeypatch):
    """Heads come and go in pieces, and what a checkpointed layer keeps does not depend on the mode
    that watches it. autocast does not know the device."""
    monkeypatch.setitem(heads.PIECE_ROWS, "cuda", 1)
    monkeypatch.setattr(ulysses, "HEAD_PIECES", 2)
    monkeypatch.setattr(remat, "_in_dispatch_mode", lambda: False)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: False)
    monkeypatch.setattr(torch, "autocast", lambda device_type, enabled: nullcontext())


MICRO_BATCHES = {"nested": NESTED, "with passes": NESTED}
for strategy in ("ulysses", "zigzag", "balanced", "hybrid"):
    MICRO_BATCHES[strategy] = one_group(FOUR, len(LENGTHS), strategy)


def shard_and_context(rank, name, kernel=None, **options):
    shard = make_shard(MICRO_BATCHES[name], LENGTHS, rank)
    if name == "with passes":
        options["passes"] = Always(TWO_NODES)
        shard = options["passes"].shard(MICRO_BATCHES[name], LENGTHS, rank)
    communicator = alone(rank, TWO_NODES)
    return shard, SequenceContext(shard, communicator, kernel or TorchVarlen(), META, **options)


def context(rank, name, kernel=None, **options):
    return shard_and_context(rank, name, kernel, **options)[1]


def leaf(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device=META, requires_grad=True)


def attend(x, seq_ctx, kv_heads):
    """x [tokens, heads, head_dim] -> the same shape."""
    k = x[:, :kv_heads] * 2
    v = x[:, :kv_heads] * 3
    return x + sequence_parallel_attention(x, k, v, seq_ctx, both_ways=True)


def called(function, *args, checkpointed):
    return checkpoint(function, *args, use_reentrant=False) if checkpointed else function(*args)


def run_layers(seq_ctx, number_of_heads=REPEATED, *, checkpointed=False, dtype=torch.bfloat16):
    """Forward and backward of some layers on tensors without data."""
    query_heads, kv_heads = number_of_heads
    x = leaf(seq_ctx.tokens, query_heads, HEAD_DIM, dtype=dtype)
    y = x
    for _ in range(LAYERS):
        y = called(attend, y, seq_ctx, kv_heads, checkpointed=checkpointed)
    y.sum().backward()
    assert x.grad.shape == x.shape


# ---- what is allowed


# the groups, and what is special to the context and to the layers
ATTENTION = [(name, {}, {}) for name in MICRO_BATCHES]
for name in ("ulysses", "hybrid"):
    ATTENTION += [(name, {}, {"number_of_heads": number}) for number in (DIVIDING, UNEVEN)]
for name in MICRO_BATCHES:
    for is_saved in (True, False):
        ATTENTION.append((name, {"save_attention_output": is_saved}, {"checkpointed": True}))
for name in ("balanced", "ulysses"):
    ATTENTION.append((name, {"kernel": Reference()}, {"dtype": torch.float32}))
SEEING = {"blocks": {sequence: ((0, length),) for sequence, length in enumerate(LENGTHS)}}
for is_checkpointed in (True, False):
    ATTENTION.append(("ulysses", SEEING, {"checkpointed": is_checkpointed}))


PLAIN = ATTENTION[: len(MICRO_BATCHES)]
SPECIAL = [pytest.param(*case, marks=pytest.mark.slow) for case in ATTENTION[len(PLAIN) :]]


@pytest.mark.parametrize("name, of_context, of_layers", PLAIN + SPECIAL)
def test_attention_never_waits(name, of_context, of_layers):
    for rank in RANKS:
        with NoHostSync() as mode:
            seq_ctx = context(rank, name, **of_context)
            run_layers(seq_ctx, **of_layers)
            copies = mode.uploads
            if not of_context:
                run_layers(seq_ctx, **of_layers)
            assert mode.uploads == copies, "layers copy again what the first ones have copied"


def test_a_rank_that_runs_repeats_kv_heads():
    pieces = heads.head_pieces(*REPEATED, len(FOUR), 2)
    assert any(piece.shares[RANKS[-1]].query2kv for piece in pieces)


def recur(kind, x, weight, seq_ctx):
    """A convolution and a scan: x [tokens, 12] -> the same shape."""
    x = recurrent.causal_convolution(x, weight, None, seq_ctx)
    heads = x.view(-1, 3, 4)  # [tokens, heads, 4]
    if kind == "mamba2":
        ones = weight[:3, 0]  # [heads]
        return recurrent.mamba2_scan(
            heads, heads[..., 0], ones, heads[:, :1], heads[:, 1:2], seq_ctx, D=ones
        ).flatten(1)
    rule = recurrent.gated_delta_rule
    g = heads[..., 0]
    if kind == "kimi delta":
        rule, g = recurrent.kimi_delta_rule, heads
    return rule(heads, heads, heads, g, heads[..., 1], seq_ctx, l2norm=True).flatten(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, kind, checkpointed",
    [
        ("ulysses", "gated delta", False),
        ("zigzag", "mamba2", True),
        ("nested", "kimi delta", True),
    ],
)
def test_recurrent_layers_never_wait(monkeypatch, name, kind, checkpointed):
    monkeypatch.setattr(grid, "CHUNK", 16)
    for rank in RANKS:
        with NoHostSync() as mode:
            seq_ctx = context(rank, name)
            weight = leaf(12, 4, dtype=torch.float32)
            copies = None
            for _ in range(2):  # steps, which share a micro-batch here
                x = leaf(seq_ctx.tokens, 12, dtype=torch.float32)
                y = x
                for _ in range(LAYERS):
                    y = called(recur, kind, y, weight, seq_ctx, checkpointed=checkpointed)
                y.sum().backward()
                assert copies in (None, mode.uploads), "layers copy again what others have copied"
                copies = mode.uploads
        assert x.grad.shape == x.shape


CHUNKS = (
    ((0, 0, 30),),
    ((0, 30, 31),),
    ((0, 31, 37), (1, 0, 12), (3, 0, 1)),
    ((2, 0, 3), (4, 0, 20)),
)


def sharing_of(rank, ranks):
    return Sharing(alone(rank, TWO_NODES), FOUR, rank) if ranks > 1 else None


def run_chunks(ranks, *, checkpointed=False):
    """Forward and backward of chunks on a stage, which `ranks` ranks share."""
    query_heads, kv_heads = REPEATED
    for rank in RANKS[:ranks]:
        carry = KVCarry(TorchVarlen())
        outs = []
        with NoHostSync():
            for parts in CHUNKS:
                options = {"sharing": sharing_of(rank, ranks)}
                chunk = ChunkContext(chunk_of(*parts), LENGTHS, carry, META, **options)
                y = leaf(chunk.tokens, query_heads, HEAD_DIM)
                for layer in range(LAYERS):
                    seq_ctx = chunk.of_layer(layer, keeps_grad=True)
                    y = called(attend, y, seq_ctx, kv_heads, checkpointed=checkpointed)
                outs.append(y)
            for out in reversed(outs):
                out.sum().backward()
        carry.check_empty()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_chunks_of_a_pipeline_never_wait(ranks, checkpointed):
    run_chunks(ranks, checkpointed=checkpointed)


def run_loss(backend, dtype, monkeypatch):
    chosen = chunked_loss.Backend("chosen", backend, "by the test")
    monkeypatch.setattr(chunked_loss, "choose_backend", lambda hidden, weight: chosen)
    monkeypatch.setattr(chunked_loss, "chunk_rows", lambda width, vocab, itemsize: 7)
    hidden, weight, bias = (leaf(*shape, dtype=dtype) for shape in ((20, 8), (VOCAB, 8), (VOCAB,)))
    targets = torch.empty(20, dtype=torch.int64, device=META)
    with NoHostSync():
        chunked_loss.chunked_cross_entropy_sum(hidden, weight, bias, targets).backward()
    assert hidden.grad.shape == hidden.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_chunked_loss_never_waits(monkeypatch, dtype):
    run_loss(chunked_loss.loop_sum, dtype, monkeypatch)


@pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch has no such loss"
)
def test_torch_s_chunked_loss_never_waits(monkeypatch):
    run_loss(chunked_loss.torch_sum, torch.float32, monkeypatch)


def model_without_data():
    model = tiny_llama(torch.bfloat16, **SIZES)
    model.set_attn_implementation(NAME)
    return model.train()


def run_model(rank, *, checkpointed):
    """A step of a model: tokens from the host to the device, forward, loss and backward."""
    model = model_without_data().to(META)
    assert attach_chunked_loss(model) is not None
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    shard, _ = shard_and_context(rank, "with passes")
    names = ("input_ids", "labels", "position_ids")
    columns = {name: torch.zeros(shard.tokens, dtype=torch.int64) for name in names}
    with NoHostSync() as mode:
        inputs = inputs_of(shard, columns, META, lambda _: context(rank, "with passes"))
        assert mode.uploads >= len(names)
        items = torch.full((), sum(LENGTHS), device=META)
        model(**inputs, use_cache=False, num_items_in_batch=items).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_model_never_waits(checkpointed):
    for rank in RANKS:
        run_model(rank, checkpointed=checkpointed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "backwards, checkpointed", zip(pipeline.BACKWARDS, (0, pipeline.LAYERS), strict=True)
)
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_stage_never_waits(ranks, backwards, checkpointed):
    plan = pipeline.plan_of(f"{pipeline.FORWARDS} {backwards}", checkpointed)
    model = model_without_data()
    stage = cut(model, 0, 1)
    model.to(META)
    assert attach_chunked_loss(model) is not None
    executor = PipelineExecutor(stage, None, TorchVarlen(), sharing=sharing_of(RANKS[-1], ranks))
    columns = []
    for on_host in columns_of(plan, pipeline.EXAMPLES):
        columns.append({name: to_device(value, META) for name, value in on_host.items()})
    with NoHostSync():
        executor.train(plan, columns, pipeline.TARGETS)
    executor.detach()
    assert all(p.grad is not None for p in model.parameters())


# ---- what is refused


def by_list(run, x, index):
    return x[:, [0] * len(index)]


def made_on_the_device(run, x, index):
    return x.index_select(1, torch.tensor([0] * len(index), device=x.device))


def not_pinned(host, device):
    return host.to(device, non_blocking=True)


def left_on_the_host(host, device):
    return host


def read_in_the_ring(read):
    """The fault of a ring that first does something with a log-sum-exp."""
    merge_into = fused_operations.merge_into

    def merge(out, lse, call_out, call_lse):
        read(lse)
        merge_into(out, lse, call_out, call_lse)

    return "balanced", fused_operations, "merge_into", merge


# the groups, what is replaced where and by what, and words of the error
FAULTS = {
    "a list as an index": (("ulysses", replay.Replay, "repeat_heads", by_list), "is a list"),
    "an index made in a layer": (
        ("ulysses", replay.Replay, "repeat_heads", made_on_the_device),
        "numbers of the host",
    ),
    "rows left on the host": (
        ("zigzag", uploads, "to_device", left_on_the_host),
        "tensor of the host",
    ),
    "rows and lengths": (("balanced", uploads, "to_device", not_pinned), "not pinned"),
    "an item": (read_in_the_ring(lambda lse: lse.sum().item()), "reads from"),
    "a list": (read_in_the_ring(lambda lse: lse.tolist()), "to the host|reads from"),
    "a truth value": (read_in_the_ring(lambda lse: bool((lse > 0).any())), "reads from"),
    "a mask as an index": (read_in_the_ring(lambda lse: lse[lse > 0]), "reads from"),
    "a copy to the host": (read_in_the_ring(lambda lse: lse.cpu()), "to the host"),
}


def run_rank_by_rank(name):
    for rank in RANKS:
        with NoHostSync():
            run_layers(context(rank, name))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(monkeypatch, fault):
    (name, owner, attribute, replacement), words = FAULTS[fault]
    monkeypatch.setattr(owner, attribute, replacement)
    with pytest.raises(HostSync, match=words):
        run_rank_by_rank(name)
