"""No attention layer makes the host wait for the device, forward and backward: every strategy, and
the chunks of a pipeline, on the device `meta`, which has shapes but no data.

`NoHostSync` sees every operation of a run, and refuses those that on CUDA make the host wait.
`alone` makes one rank of a job whose transfers end at once and move nothing.
"""

import sys
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from hf_flexseq.attention import (
    SequenceContext,
    remat,
    replay,
    sequence_parallel_attention,
    uploads,
)
from hf_flexseq.base.topology import Topology
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.transport import Capabilities, Lane, own_part
from hf_flexseq.kernels import fused_operations
from hf_flexseq.kernels.torch_varlen import TorchVarlen
from hf_flexseq.kernels.upload import to_device
from hf_flexseq.pipeline.carry import KVCarry
from hf_flexseq.pipeline.context import ChunkContext
from hf_flexseq.pipeline.ulysses import Sharing
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.program import heads, ulysses
from tests.pipelines import chunk_of
from tests.plans import NESTED, one_group
from tests.published.zeppelin.gainful_passes import Always

META = torch.device("meta")

aten = torch.ops.aten

# The shape of the result, or a number for the host, depends on data of the device.
_READ_BY_THE_HOST = {
    aten._local_scalar_dense,  # item, tolist, float, bool, int
    aten.equal,
    aten.is_nonzero,
    aten.masked_select,
    aten.nonzero,
    aten._unique2,
    aten.unique_consecutive,
    aten.unique_dim,
}
_COPIES = {aten._to_copy, aten.copy_}


class HostSync(Exception):
    """Raised by what would make the host wait."""


class NoHostSync:
    """Surrounds a run, and raises HostSync in it for

    * numbers and shapes that the host reads from the device, and copies to the host;
    * a tensor of the host with dimensions, beside tensors of the device: it would be copied;
    * a tensor on the device, or an index of one, that is made of a list;
    * a copy to the device that is not one of `to_device`, which alone pins what it copies.
    """

    def __init__(self):
        self._modes = ExitStack()
        self._operations = _Operations()

    def __enter__(self):
        self._modes.enter_context(_Calls())
        self._modes.enter_context(self._operations)
        return self

    def __exit__(self, *error):
        self._modes.close()

    @property
    def uploads(self):
        """How many tensors `to_device` has copied."""
        return self._operations.uploads


class _Calls(TorchFunctionMode):
    """Sees what is called: torch copies lists to the device where no operation shows it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.asarray):
            device = kwargs.get("device")
            if device is not None and torch.device(device) == META:
                raise HostSync("a tensor on the device is made of numbers of the host")
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if args[0].device == META and any(isinstance(index, list) for index in indices):
                raise HostSync("an index of a tensor on the device is a list")
        if func is torch.Tensor.new_tensor and args[0].device == META:
            raise HostSync("a tensor on the device is made of numbers of the host")
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    """Sees what is computed and copied, in backwards too."""

    def __init__(self):
        super().__init__()
        self.uploads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        on_device = [x for x in tensors if x.device == META]
        on_host = [x for x in tensors if x.device != META]
        operation = func.overloadpacket
        if operation in _COPIES:
            self._check_copy(func, args, kwargs)
        elif on_device:
            if operation in _READ_BY_THE_HOST or _masks(operation, args):
                raise HostSync(f"{func} reads from the device")
            if any(x.dim() for x in on_host):
                raise HostSync(f"{func} takes a tensor of the host beside those of the device")
        return func(*args, **kwargs)

    def _check_copy(self, func, args, kwargs):
        """Raise HostSync for a copy between host and device, but for those of `to_device`."""
        if func.overloadpacket is aten.copy_:
            target, source = args[0].device, args[1]
        else:
            source = args[0]
            target = kwargs.get("device") or source.device
        if source.device == target:
            return
        if source.device == META:
            raise HostSync(f"{func} copies to the host")
        if not _called_by_to_device():
            raise HostSync(f"{func} copies to the device from memory that is not pinned")
        self.uploads += 1


def _masks(operation, args):
    """Whether an index of an indexing is a mask, which the host has to count."""
    if operation not in (aten.index, aten.index_put, aten.index_put_):
        return False
    return any(x is not None and x.dtype == torch.bool for x in args[1])


def _called_by_to_device():
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is to_device.__code__:
            return True
        frame = frame.f_back
    return False


class SilentTransport:
    """The transport of one rank whose peers send at once; nothing moves."""

    capabilities = Capabilities(ordered=True, waits_on_stream=True)

    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size

    def open_lane(self, kind, parts, *, peers=()):
        return Lane(kind, own_part(parts, self.rank))

    def post(self, lane, *, sends, recvs, label):
        for message in (*sends, *recvs):
            assert message.tensor.is_contiguous()
            assert message.tensor.device == META
        return SimpleNamespace(wait=lambda: None)


def alone(rank, topology):
    """The communicator of one rank; what it receives has come when it is posted."""
    return Communicator(topology, transport=SilentTransport(rank, topology.world_size))


# ---- what runs

HEAD_DIM = 8
LAYERS = 2
LENGTHS = (37, 12, 3, 1, 20)
FOUR = tuple(range(4))
RANKS = (0, 3)  # that run, of four: those in most groups and in fewest, with unequal heads
HEADS, KV_HEADS = 30, 6  # 7 or 8 query heads each; a piece of rank 3 reads two KV heads unequally
TWO_NODES = Topology(nodes=2, ranks_per_node=2)


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


def context(rank, name, **options):
    shard = make_shard(MICRO_BATCHES[name], LENGTHS, rank)
    if name == "with passes":
        options["passes"] = Always(TWO_NODES)
        shard = options["passes"].shard(MICRO_BATCHES[name], LENGTHS, rank)
    return SequenceContext(shard, alone(rank, TWO_NODES), TorchVarlen(), META, **options)


def leaf(tokens):
    return torch.empty(
        tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=META, requires_grad=True
    )


def attend(x, seq_ctx):
    """x [tokens, heads, head_dim] -> the same shape."""
    k = x[:, :KV_HEADS] * 2
    v = x[:, :KV_HEADS] * 3
    return x + sequence_parallel_attention(x, k, v, seq_ctx, both_ways=True)


def called(function, *args, checkpointed):
    return checkpoint(function, *args, use_reentrant=False) if checkpointed else function(*args)


def run_layers(seq_ctx, *, checkpointed=False):
    """Forward and backward of some layers on tensors without data."""
    x = y = leaf(seq_ctx.tokens)
    for _ in range(LAYERS):
        y = called(attend, y, seq_ctx, checkpointed=checkpointed)
    y.sum().backward()
    assert x.grad.shape == x.shape


# ---- what is allowed


BLOCKS = {sequence: ((0, length),) for sequence, length in enumerate(LENGTHS)}
SPECIAL = [("ulysses", {"blocks": BLOCKS}, False)]  # and whether layers are checkpointed
for name in MICRO_BATCHES:
    SPECIAL += [(name, {"save_attention_output": is_saved}, True) for is_saved in (True, False)]


@pytest.mark.parametrize("name", MICRO_BATCHES)
def test_attention_never_waits(name):
    for rank in RANKS:
        with NoHostSync() as mode:
            seq_ctx = context(rank, name)
            run_layers(seq_ctx)
            copies = mode.uploads
            run_layers(seq_ctx)
            assert mode.uploads == copies, "layers copy again what the first ones have copied"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "of_context", "checkpointed"), SPECIAL)
def test_nor_do_checkpointed_layers_and_blocks(name, of_context, checkpointed):
    for rank in RANKS:
        with NoHostSync():
            run_layers(context(rank, name, **of_context), checkpointed=checkpointed)


CHUNKS = (
    ((0, 0, 30),),
    ((0, 30, 31),),
    ((0, 31, 37), (1, 0, 12), (3, 0, 1)),
    ((2, 0, 3), (4, 0, 20)),
)


def sharing_of(rank, ranks):
    return Sharing(alone(rank, TWO_NODES), FOUR, rank) if ranks > 1 else None


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_chunks_of_a_pipeline_never_wait(ranks, checkpointed):
    """On a stage, which `ranks` ranks share."""
    for rank in RANKS[:ranks]:
        carry = KVCarry(TorchVarlen())
        outs = []
        with NoHostSync():
            for parts in CHUNKS:
                options = {"sharing": sharing_of(rank, ranks)}
                chunk = ChunkContext(chunk_of(*parts), LENGTHS, carry, META, **options)
                y = leaf(chunk.tokens)
                for layer in range(LAYERS):
                    seq_ctx = chunk.of_layer(layer, keeps_grad=True)
                    y = called(attend, y, seq_ctx, checkpointed=checkpointed)
                outs.append(y)
            for out in reversed(outs):
                out.sum().backward()
        carry.check_empty()


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
