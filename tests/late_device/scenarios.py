"""Small runs on the device, free of findings until a fault is planted in one."""

import contextlib
from types import SimpleNamespace

import torch
from torch.utils.checkpoint import checkpoint

from hf_flexseq.attention import SequenceContext, recurrent, sequence_parallel_attention
from hf_flexseq.attention.recurrent.carry import Carry
from hf_flexseq.base.topology import Topology
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels import KernelCall
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.kernels.torch_varlen import TorchVarlen
from hf_flexseq.kernels.upload import to_device
from hf_flexseq.memory.store import HostStore
from hf_flexseq.pipeline.context import ChunkContext
from hf_flexseq.pipeline.ulysses import Sharing
from hf_flexseq.plan import MicroBatch
from hf_flexseq.plan.images import IMAGE, ImagePlan, ImageSize
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.steps.early_encoding import EarlyEncoder, weights_of
from hf_flexseq.steps.features import StepImages
from hf_flexseq.steps.images import Image
from hf_flexseq.steps.inputs import inputs_of
from hf_flexseq.steps.nonfinite import NonfiniteWatch
from hf_flexseq.steps.stopwatch import Stopwatch
from tests.late_device.install import ops
from tests.late_device.lanes import LateHub
from tests.pipelines import chunk_of
from tests.plans import NESTED, group, one_group

CUDA = torch.device("cuda")
RANKS = 4
TOPOLOGY = Topology(nodes=2, ranks_per_node=2)
HEAD_DIM = 8
HEADS, KV_HEADS = 30, 6  # over four ranks: 7 or 8 query heads each, and unequal KV heads
LENGTHS = (37, 12, 3, 1, 20)
MICRO_BATCHES = {"nested": NESTED}
for _strategy in ("ulysses", "zigzag", "balanced", "hybrid"):
    MICRO_BATCHES[_strategy] = one_group(range(RANKS), len(LENGTHS), _strategy)


def run_layers(
    name,
    *,
    layers=2,
    blocks=False,
    checkpointed=False,
    passes=None,
    sees=None,
    after=lambda: None,
    **of_context,
):
    """Forward and backward of some attention layers on four ranks, and the sum of all gradients
    of the input; raise what the device finds, and ValueError where a number is not finite. sees:
    the blocks of sequences whose tokens see each other both ways."""
    micro_batch = MICRO_BATCHES[name]

    def run(transport):
        communicator = Communicator(TOPOLOGY, transport=transport)
        if blocks:
            communicator.open_blocks(range(2, RANKS + 1))
        if passes is None:
            shard = make_shard(micro_batch, LENGTHS, transport.rank)
        else:
            shard = passes.shard(micro_batch, LENGTHS, transport.rank)
        seq_ctx = SequenceContext(
            shard,
            communicator,
            TorchVarlen(),
            CUDA,
            passes=passes,
            blocks=sees or {},
            **of_context,
        )
        attend = attention_of(seq_ctx, both_ways=sees is not None)
        x = y = leaf(shard.tokens)
        for _ in range(layers):
            y = called(attend, y, checkpointed=checkpointed)
            after()
        y.sum().backward()
        after()
        communicator.all_reduce(x.grad.new_ones(3))
        return x.grad

    gradients = LateHub(RANKS).run(run)
    check(*gradients)


def leaf(tokens):
    shape = (tokens, HEADS, HEAD_DIM)
    return torch.randn(shape, dtype=torch.bfloat16, device=CUDA, requires_grad=True)


def attention_of(seq_ctx, *, both_ways=False):
    """A layer: [tokens, heads, head_dim] -> the same shape."""

    def attend(y):
        k = y[:, :KV_HEADS] * 2
        v = y[:, :KV_HEADS] * 3
        return y + sequence_parallel_attention(y, k, v, seq_ctx, both_ways=both_ways)

    return attend


def called(layer, x, *, checkpointed):
    return checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)


CHUNKS = (
    ((0, 0, 30),),
    ((0, 30, 31),),
    ((0, 31, 37), (1, 0, 12), (3, 0, 1)),
    ((2, 0, 3), (4, 0, 20)),
)


def run_chunks(ranks, *, checkpointed=False, layers=2, after=lambda: None):
    """The chunks of a pipeline's stage, which `ranks` ranks share."""

    def run(transport):
        carry = Carry()
        sharing = None
        if ranks > 1:
            communicator = Communicator(TOPOLOGY, transport=transport)
            sharing = Sharing(communicator, tuple(range(ranks)), transport.rank)
        of_stage = {"kernel": TorchVarlen(), "sharing": sharing}
        leaves, outs = [], []
        for parts in CHUNKS:
            chunk = ChunkContext(chunk_of(*parts), LENGTHS, carry, CUDA, **of_stage)
            y = leaf(chunk.tokens)
            leaves.append(y)
            for layer in range(layers):
                attend = attention_of(chunk.of_layer(layer, keeps_grad=True))
                y = called(attend, y, checkpointed=checkpointed)
            outs.append(y)
            after()
        for out in reversed(outs):
            out.sum().backward()
            after()
        carry.check_empty()
        return [x.grad for x in leaves]

    check(*(gradient for of_rank in LateHub(ranks).run(run) for gradient in of_rank))


def check(*tensors):
    """Raise what was found, and ValueError where a number is not finite."""
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        if not all(bool(x.isfinite().all()) for x in tensors):
            raise ValueError("NaN: memory that nobody has written")
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    for finding in ops.findings():
        raise RuntimeError(finding)


def run_kernel():
    """A kernel call with lengths of its own."""
    segments = Segments([5, 0, 9], [0, 7, 33], causal=False, device=CUDA)
    q = torch.randn(14, 4, HEAD_DIM, device=CUDA).bfloat16()
    k = torch.randn(40, 2, HEAD_DIM, device=CUDA).bfloat16()
    call = KernelCall(q, k, k, segments, 0.3)
    out, lse = TorchVarlen().forward(call)
    check(out, *TorchVarlen().backward(call, q, out, lse))


def run_inputs():
    """The tokens of a micro-batch, from the host to an embedding on the device."""
    shard = make_shard(MicroBatch(groups=(group(0, 1, 0),)), [6], 0)
    columns = {name: torch.arange(6) for name in ("input_ids", "labels", "position_ids")}
    inputs = inputs_of(shard, columns, CUDA, lambda shard: None)
    table = torch.randn(8, 4, device=CUDA, requires_grad=True)
    hidden = torch.nn.functional.embedding(inputs["input_ids"], table)
    loss = torch.nn.functional.cross_entropy(hidden[0].repeat(1, 2), inputs["labels"][0])
    loss.backward()
    check(table.grad)


def run_scan():
    """A convolution and a scan of a recurrent layer, on two ranks."""

    def run(transport):
        communicator = Communicator(Topology(nodes=1, ranks_per_node=2), transport=transport)
        shard = make_shard(one_group(range(2), 3, "zigzag"), (131, 5, 70), transport.rank)
        seq_ctx = SequenceContext(shard, communicator, TorchVarlen(), CUDA)
        x = torch.randn(shard.tokens, 12, device=CUDA, requires_grad=True)
        weight = torch.ones(12, 4, device=CUDA)
        y = recurrent.causal_convolution(x, weight, None, seq_ctx).view(-1, 3, 4)
        decay = -y[..., 0].abs()
        y = recurrent.gated_delta_rule(y, y, y, decay, y[..., 1].sigmoid(), seq_ctx, l2norm=True)
        y.sum().backward()
        return x.grad

    check(*LateHub(2).run(run))


def run_nonfinite():
    """The flags of a step, read after the next one."""
    watch = NonfiniteWatch("raise", 0)
    gradients = {"a": torch.ones(3, device=CUDA), "b": torch.ones(2, 2, device=CUDA)}
    watch.take(0, torch.ones((), device=CUDA), gradients)
    watch.settle(skipped=False)
    assert watch.report() is None
    check()


def run_stopwatch():
    """Seconds of two parts of a step."""
    watch = Stopwatch(CUDA)
    for block in (0, 1):
        with watch.timing(block):
            torch.ones(3, device=CUDA) * 2
    assert set(watch.seconds()) == {0, 1}
    check()


def run_store(layers=4, steps=2):
    """Layers whose input and result go to the host, as a GPU sees it: no tensor that has left is
    alive, and its memory is used again at once."""
    store = HostStore(CUDA, 1 << 20)
    for step in range(steps):
        shape = (40 - 7 * step, 8)
        x = torch.ones(shape, device=CUDA)
        handles = []
        for layer in range(layers):
            store.begin_layer()
            y = x * (layer + 1)
            handles.append((store.put(x), store.put(y)))
            x = y + 1
        store.settle()
        gradient = torch.ones(shape, device=CUDA)
        for _ in range(layers):
            of_input, of_result = handles.pop()
            gradient = gradient * of_input.take() + of_result.take()
            del of_input, of_result
        check(gradient)
    store.close()


def run_store_with_other_work(layers=4):
    """The same, with tensors of the size of those that leave and come back in between."""
    store = HostStore(CUDA, 1 << 20)
    handles = []
    for _ in range(layers):
        store.begin_layer()
        handles.append(store.put(torch.ones(30, 8, device=CUDA)))
        torch.zeros(30, 8, device=CUDA).add_(1)
    handles.pop().take()
    handles.pop()  # is on its way, and nobody takes it
    torch.zeros(30, 8, device=CUDA).add_(1)
    check(handles.pop().take())
    store.close()


def run_ahead(steps=4):
    """Images that a frozen tower encodes beside the end of the step before; its weights change
    once, in the middle."""
    encoder = EarlyEncoder(CUDA)
    tower = torch.nn.Parameter(torch.ones(8, 8, device=CUDA), requires_grad=False)

    def encode():
        return to_device(torch.ones(30, 8), CUDA) @ tower

    total = torch.zeros(30, 8, device=CUDA)
    for step in range(steps):
        if step == steps // 2:
            with torch.no_grad():
                tower.mul_(2)
        ahead = encoder.encode(encode, weights_of([tower]), contextlib.nullcontext())
        total.mul_(2)  # the end of the step before
        # an error, also one that the device finds, is left to the step
        rows = (encode() if ahead is None else ahead.take()) * 2
        del ahead
        total += rows
    check(total)


def run_images(rows=8, width=6):
    """Features of an image of each of two ranks, which the other one uses, and their gradients."""
    sizes = {"modality": IMAGE, "tokens": rows, "patches": rows, "pairs": rows}
    plan = ImagePlan(owners=(0, 1), loads=(1, 1), cheapest=0)

    def run(transport):
        communicator = Communicator(Topology(nodes=1, ranks_per_node=2), transport=transport)
        rank = transport.rank
        weight = torch.ones(width, device=CUDA, requires_grad=True)
        tower = SimpleNamespace(
            is_trained=True,
            encode=lambda images, calls: torch.ones(rows, width, device=CUDA) * weight,
            agree=lambda modalities, cpu_group: None,
        )
        step = StepImages(
            [Image(size=ImageSize(sequence=rank, data_bytes=1, **sizes), arguments={})],
            [torch.arange(rows) + rows * (1 - rank)],
            images=[ImageSize(sequence=one, data_bytes=1, **sizes) for one in range(2)],
            plan=plan,
            calls=1,
            communicator=communicator,
            device=CUDA,
            is_sharded=False,
        )
        step.begin(0)
        (step.of_micro_batch(0, tower) * 2).sum().backward()
        return weight.grad

    check(*LateHub(2).run(run))
