"""Under activation checkpointing attention and its transfers run once per layer, and no bit of a
gradient changes."""

import copy
from functools import partial

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hf_flexseq.attention import SequenceContext, replay, sequence_parallel_attention
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import MicroBatch
from hf_flexseq.plan.shard import make_shard
from tests.hf.plain import flexseq_trainer
from tests.hf.tiny import VOCAB, sharded, tiny_llama, weights, whole
from tests.plans import group
from tests.ranks import run_cases

CPU = torch.device("cpu")
LENGTHS = (13, 7, 9)
LAYERS = 2
ALONE = (group(0, 1, 0, 1, 2),)
GROUPS = {
    "local": (group(0, 1, 0), group(1, 2, 1)),
    **{
        name: (group(0, 2, 0, 1, 2, strategy=name),)
        for name in ("ulysses", "zigzag", "balanced", "hybrid")
    },
    "mixed": (group(0, 2, 0), group(0, 2, 1, strategy="zigzag"), group(0, 1, 2)),
}


class Counter:
    """Counts the calls of a function that it takes the place of, in this process."""

    def __init__(self, holder, name):
        self.calls, self.function = 0, getattr(holder, name)
        setattr(holder, name, self)

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.function(*args, **kwargs)


def counted_kernel():
    """A kernel of its own, and a counter of its forwards."""
    kernel = copy.copy(choose_kernel(CPU, torch.float64, 8))
    return kernel, Counter(kernel, "forward")


def make_context(groups=ALONE, rank=0, communicator=None, **options):
    """A context, and a counter of its kernel's forwards."""
    shard = make_shard(MicroBatch(groups=groups), LENGTHS, rank)
    kernel, forwards = counted_kernel()
    context = SequenceContext(shard, communicator or Communicator(), kernel, CPU, **options)
    return context, forwards


def model_of(checkpointing=True, **config):
    model = tiny_llama(num_hidden_layers=LAYERS, **config).train()
    model.set_attn_implementation("flexseq")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def loss_of(model, seq_ctx):
    positions = torch.cat([torch.arange(s.start, s.stop) for s in seq_ctx.shard.slices])[None]
    tokens = positions % VOCAB
    outputs = model(input_ids=tokens, position_ids=positions, seq_ctx=seq_ctx, use_cache=False)
    return outputs.logits.square().sum()


def gradients(model):
    found = {
        name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None
    }
    model.zero_grad()
    return found


def assert_same_bits(found, wanted):
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# ---- once per layer, on two ranks


def one_step(model, seq_ctx, counters):
    """What the forward and the backward add to each counter, how many results are kept between
    them, and the gradients."""
    counts = [[counter.calls for counter in counters]]
    loss = loss_of(model, seq_ctx)
    kept = len(seq_ctx.kept or ())
    counts.append([counter.calls for counter in counters])
    loss.backward()
    counts.append([counter.calls for counter in counters])
    assert not seq_ctx.kept, "attention that no replay has taken"
    before, between, after = map(torch.tensor, counts)
    return (between - before).tolist(), (after - between).tolist(), kept, gradients(model)


def steps_of_every_strategy(rank, world_size, sharding):
    """By strategy: the counts without checkpointing, with it, and with attention that is kept."""
    communicator = Communicator()
    transfers = [Counter(replay, "all_to_all"), Counter(torch.distributed, "irecv")]
    wrap = DistributedDataParallel if sharding == "ddp" else sharded
    models = {on: wrap(model_of(on)) for on in (False, True)}
    found = {}
    for strategy, groups in GROUPS.items():
        runs = []
        for checkpointing, remat in ((False, True), (True, False), (True, True)):
            seq_ctx, forwards = make_context(
                groups, rank, communicator, save_attention_output=remat
            )
            runs.append(one_step(models[checkpointing], seq_ctx, [forwards, *transfers]))
        for *_, gradient in runs[1:]:
            assert_same_bits(gradient, runs[0][-1])
        found[strategy] = [run[:-1] for run in runs]
    return found


@pytest.mark.processes
def test_attention_and_its_transfers_run_once():
    for by_rank in run_cases(steps_of_every_strategy, 2, [("ddp",), ("fsdp2",)]):
        for found in by_rank:
            for strategy, (plain, again, once) in found.items():
                forward, backward, _ = plain
                assert (sum(forward[1:]) > 0) == (strategy != "local")
                assert all(calls % LAYERS == 0 for calls in forward)
                assert backward[0] == 0
                replayed = [a + b for a, b in zip(forward, backward, strict=True)]
                assert again[:2] == (forward, replayed), "the replay attends again"
                assert once == (forward, backward, LAYERS), "as often as without checkpointing"


def trainer_run(rank, world_size, folder, remat):
    trainer = flexseq_trainer(
        folder, optim="sgd", max_steps=2, gradient_checkpointing=True, save_attention_output=remat
    )
    trainer.flexseq.kernel, forwards = counted_kernel()
    trainer.train()
    return forwards.calls, weights(trainer.model)


@pytest.mark.processes
def test_a_trainer_keeps_attention_unless_told_otherwise(tmp_path):
    kept, again = run_cases(trainer_run, 2, [(tmp_path, True), (tmp_path, False)])
    for (once, found), (twice, wanted) in zip(kept, again, strict=True):
        assert twice == 2 * once > 0
        assert all((found[name] == wanted[name]).all() for name in wanted)


# ---- other ways to checkpoint


def run_alone(model, *, backward=torch.Tensor.backward, **options):
    """Kernel forwards and gradients of one step on one process."""
    seq_ctx, forwards = make_context(**options)
    backward(loss_of(model, seq_ctx))
    assert not seq_ctx.kept
    return forwards.calls, gradients(model)


def test_selective_checkpointing_decides_itself():
    """Its results come back by their place among the calls of an operator, so that no call may be
    left out."""
    aten = torch.ops.aten
    saved = (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten.mm.default,
        aten.cat.default,
    )

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    model = model_of(checkpointing=False)
    _, wanted = run_alone(model)
    context_fn = partial(create_selective_checkpoint_contexts, policy)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": context_fn})
    forwards, found = run_alone(model)
    assert forwards == 2 * LAYERS
    assert_same_bits(found, wanted)


def attend_twice(x, seq_ctx):
    y = sequence_parallel_attention(x, x, x, seq_ctx)
    return sequence_parallel_attention(y.sin(), x, y, seq_ctx).cos()


def test_regions_of_several_calls_and_regions_within_regions():
    seq_ctx, forwards = make_context()
    x = torch.randn(sum(LENGTHS), 2, 8, dtype=torch.float64, requires_grad=True)
    remat = partial(checkpoint, use_reentrant=False)

    def gradient(out):
        return torch.autograd.grad(out.sum(), x)[0]

    wanted = gradient(attend_twice(x, seq_ctx))
    plain = forwards.calls
    assert torch.equal(gradient(remat(attend_twice, x, seq_ctx)), wanted)
    assert forwards.calls == 2 * plain
    wanted = gradient(attend_twice(x.exp(), seq_ctx).sin())
    found = gradient(remat(lambda x: remat(attend_twice, x.exp(), seq_ctx).sin(), x))
    assert torch.equal(found, wanted)
    assert not seq_ctx.kept


def test_a_second_backward_attends_again():
    model = model_of()

    def twice(loss):
        loss.backward(retain_graph=True)
        loss.backward()

    forwards, found = run_alone(model, backward=twice)
    assert forwards == 2 * LAYERS
    assert_same_bits(found, run_alone(model, backward=twice, save_attention_output=False)[1])


# ---- what is held, and for how long


def test_a_result_that_was_written_to_is_noticed():
    seq_ctx, _ = make_context()
    x = torch.randn(sum(LENGTHS), 2, 8, dtype=torch.float64, requires_grad=True)

    def careless(x):
        out = sequence_parallel_attention(x, x, x, seq_ctx)
        return out.mul_(2).sin()

    with pytest.raises(RuntimeError, match="set save_attention_output=False and activation_m"):
        checkpoint(careless, x, use_reentrant=False).sum().backward()
