"""Under activation checkpointing attention and its transfers run once per layer, and no bit of a
gradient changes."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hf_flexseq import FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.attention import SequenceContext, replay, sequence_parallel_attention
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels import Kernel, KernelCall
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from tests.hf.test_exactness import whole
from tests.hf.test_trainer import OPTIONS, dataset, training_arguments
from tests.hf.tiny import VOCAB, tiny_llama
from tests.ranks import run_cases, run_ranks

CPU = torch.device("cpu")
LENGTHS = (13, 7, 9)
LAYERS = 2
GROUPS = {
    "local": (
        Group(ranks=(0,), sequences=(0,), strategy="local"),
        Group(ranks=(1,), sequences=(1,), strategy="local"),
    ),
    "ulysses": (Group(ranks=(0, 1), sequences=(0, 1, 2), strategy="ulysses"),),
    **{
        name: (Group(ranks=(0, 1), sequences=(0, 1, 2), strategy=name),)
        for name in ("zigzag", "balanced", "hybrid")
    },
    "mixed": (
        Group(ranks=(0, 1), sequences=(0,), strategy="ulysses"),
        Group(ranks=(0, 1), sequences=(1,), strategy="zigzag"),
        Group(ranks=(0,), sequences=(2,), strategy="local"),
    ),
}
ALONE = (Group(ranks=(0,), sequences=(0, 1, 2), strategy="local"),)


class CountingKernel:
    """A kernel that counts its calls."""

    def __init__(self, kernel: Kernel) -> None:
        self.name = kernel.name
        self.wide_gradients = kernel.wide_gradients
        self.forwards = 0
        self._kernel = kernel

    def forward(self, call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
        self.forwards += 1
        return self._kernel.forward(call)

    def backward(
        self, call: KernelCall, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._kernel.backward(call, *gradients)


def make_context(groups=ALONE, rank=0, communicator=None, **options):
    shard = make_shard(MicroBatch(groups=groups), LENGTHS, rank)
    kernel = CountingKernel(choose_kernel(CPU, torch.float64, 8))
    return SequenceContext(shard, communicator or Communicator(), kernel, CPU, **options), kernel


def row(seq_ctx):
    positions = torch.cat([torch.arange(s.start, s.stop) for s in seq_ctx.shard.slices])[None]
    return {
        "input_ids": positions % VOCAB,
        "position_ids": positions,
        "seq_ctx": seq_ctx,
        "use_cache": False,
    }


def model_of(checkpointing=True, **config):
    model = tiny_llama(num_hidden_layers=LAYERS, **config).train()
    model.set_attn_implementation("flexseq")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def loss_of(model, seq_ctx):
    return model(**row(seq_ctx)).logits.square().sum()


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


class Counter:
    """Counts calls of what it stands for, in this process."""

    def __init__(self, module, name):
        self.calls, self.function = 0, getattr(module, name)
        setattr(module, name, self)

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.function(*args, **kwargs)


def sharded(model, sharding):
    if sharding == "ddp":
        return DistributedDataParallel(model)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def one_step(model, seq_ctx, kernel, transfers):
    """(attention forwards, transfers) of the forward, then of the backward, the results kept, and
    the gradients."""

    def counted():
        return kernel.forwards, sum(counter.calls for counter in transfers)

    before = counted()
    loss = loss_of(model, seq_ctx)
    kept, forward = len(seq_ctx.kept or ()), counted()
    loss.backward()
    backward = counted()
    assert not seq_ctx.kept, "attention that no replay has taken"
    per_pass = [
        tuple(b - a for a, b in zip(*pair, strict=True))
        for pair in ((before, forward), (forward, backward))
    ]
    return per_pass, kept, gradients(model)


def steps_of_every_strategy(rank, world_size, sharding):
    """By strategy: the counts without checkpointing, with it, and with attention that is kept."""
    communicator = Communicator()
    transfers = [
        Counter(replay, "all_to_all"),
        Counter(torch.distributed, "irecv"),
    ]
    models = {on: sharded(model_of(on), sharding) for on in (False, True)}
    found = {}
    for strategy, groups in GROUPS.items():
        runs = []
        for checkpointing, remat in ((False, True), (True, False), (True, True)):
            seq_ctx, kernel = make_context(groups, rank, communicator, save_attention_output=remat)
            runs.append(one_step(models[checkpointing], seq_ctx, kernel, transfers))
        for _, _, gradient in runs[1:]:
            assert_same_bits(gradient, runs[0][2])
        found[strategy] = [run[:2] for run in runs]
    return found


@pytest.mark.processes
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_attention_and_its_transfers_run_once(sharding):
    for found in run_ranks(steps_of_every_strategy, 2, sharding):
        for strategy, ((plain, _), (again, _), (once, kept)) in found.items():
            (forwards, moved), (_, moved_back) = plain
            assert (moved > 0) == (strategy != "local")
            assert moved % LAYERS == 0
            assert plain[1] == (0, moved_back)
            assert again == [(forwards, moved), (forwards, moved + moved_back)], (
                "the replay attends again"
            )
            assert once == plain, "as many kernel calls and transfers as without checkpointing"
            assert kept == LAYERS


# ---- under the Trainer


def trainer_run(rank, world_size, folder, remat, checkpointing=True):
    model = tiny_llama()
    args = training_arguments(
        FlexSeqConfig,
        folder,
        batch=2,
        accumulation=1,
        optim="sgd",
        max_steps=3,
        gradient_checkpointing=checkpointing,
        save_attention_output=remat,
        **OPTIONS,
    )
    trainer = FlexSeqTrainer(model=model, args=args, train_dataset=dataset())
    kernel = trainer.flexseq.executor.kernel = CountingKernel(choose_kernel(CPU, torch.float64, 8))
    trainer.train()
    return kernel.forwards, {name: p.detach().numpy() for name, p in model.named_parameters()}


@pytest.mark.processes
def test_a_trainer_keeps_attention_unless_told_otherwise(tmp_path):
    cases = [(tmp_path, True), (tmp_path, False), (tmp_path, True, False)]
    kept, again, plain = run_cases(trainer_run, 2, cases)
    for (once, *_, weights), (twice, *_, wanted), (forwards, *_) in zip(
        kept, again, plain, strict=True
    ):
        assert (once, twice) == (forwards, 2 * forwards)
        assert all((weights[name] == wanted[name]).all() for name in wanted)


# ---- other ways to checkpoint


def run_alone(model, *, backward=torch.Tensor.backward, **options):
    """Kernel forwards and gradients of one step on one process."""
    seq_ctx, kernel = make_context(**options)
    backward(loss_of(model, seq_ctx))
    assert not seq_ctx.kept
    return kernel.forwards, gradients(model)


def test_the_checkpoint_wrapper_of_torch():
    model = model_of(checkpointing=False)
    _, wanted = run_alone(model)
    for place, layer in enumerate(model.model.layers):
        model.model.layers[place] = checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT)
    forwards, found = run_alone(model)
    assert forwards == LAYERS
    assert_same_bits(
        {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in found.items()}, wanted
    )


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
    model.gradient_checkpointing_enable(
        {
            "use_reentrant": False,
            "context_fn": partial(create_selective_checkpoint_contexts, policy),
        }
    )
    _, found = run_alone(model)
    assert_same_bits(found, wanted)


def attend_twice(x, seq_ctx):
    y = sequence_parallel_attention(x, x, x, seq_ctx)
    return sequence_parallel_attention(y.sin(), x, y, seq_ctx).cos()


def test_regions_of_several_calls_and_regions_within_regions():
    seq_ctx, kernel = make_context()
    x = torch.randn(sum(LENGTHS), 2, 8, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(attend_twice(x, seq_ctx).sum(), x)
    remat = partial(checkpoint, use_reentrant=False)
    plain = kernel.forwards
    (found,) = torch.autograd.grad(remat(attend_twice, x, seq_ctx).sum(), x)
    assert torch.equal(found, wanted)
    assert kernel.forwards == 2 * plain
    (wanted,) = torch.autograd.grad(attend_twice(x.exp(), seq_ctx).sin().sum(), x)
    (found,) = torch.autograd.grad(
        remat(lambda x: remat(attend_twice, x.exp(), seq_ctx).sin(), x).sum(), x
    )
    assert torch.equal(found, wanted)
    assert not seq_ctx.kept


# ---- one context, several forwards


def test_two_models_share_a_context():
    policy, reference = model_of(), model_of(seed=1)
    wanted = [run_alone(model, save_attention_output=False)[1] for model in (policy, reference)]
    for order in (1, -1):
        seq_ctx, kernel = make_context()
        losses = [loss_of(model, seq_ctx) for model in (policy, reference)]
        for loss in losses[::order]:
            loss.backward()
        assert kernel.forwards == 2 * LAYERS
        for model, expected in zip((policy, reference), wanted, strict=True):
            assert_same_bits(gradients(model), expected)


def test_forwards_of_one_model_in_any_order():
    model = model_of()
    for order in (1, -1):
        found = []
        for remat in (True, False):
            seq_ctx, _ = make_context(save_attention_output=remat)
            losses = [
                model(**(row(seq_ctx) | {"input_ids": ids})).logits.square().sum()
                for ids in some_rows()
            ]
            for loss in losses[::order]:
                loss.backward()
                found.append(gradients(model))
        assert_same_bits(found[0], found[2])
        assert_same_bits(found[1], found[3])


def some_rows():
    return [torch.full((1, sum(LENGTHS)), token) for token in (1, 2)]


def test_a_second_backward_attends_again():
    model = model_of()

    def twice(loss):
        loss.backward(retain_graph=True)
        loss.backward()

    forwards, found = run_alone(model, backward=twice)
    assert forwards == 2 * LAYERS
    assert_same_bits(found, run_alone(model, backward=twice, save_attention_output=False)[1])


# ---- what is held, and for how long


@pytest.mark.parametrize(
    "checkpointing, training, grad",
    [(False, True, True), (True, False, True), (True, True, False)],
)
def test_nothing_is_kept_where_nothing_is_replayed(checkpointing, training, grad):
    model = model_of(checkpointing).train(training)
    seq_ctx, _ = make_context()
    with torch.set_grad_enabled(grad):
        loss_of(model, seq_ctx)
        loss = loss_of(model, seq_ctx)
    assert len(seq_ctx.kept) == 0
    del loss


def kept_tensors(seq_ctx):
    return [
        x
        for calls in seq_ctx.kept._calls.values()
        for kept in calls._kept
        for x in kept
        if torch.is_tensor(x)
    ]


def test_a_graph_that_is_dropped_leaves_nothing():
    model, (seq_ctx, _) = model_of(), make_context()
    gc.collect()
    gc.disable()
    try:
        loss = loss_of(model, seq_ctx)
        tensors = [weakref.ref(x) for x in kept_tensors(seq_ctx)]
        assert len(tensors) == 2 * LAYERS
        del loss
        assert len(seq_ctx.kept) == 0
        assert [x() for x in tensors] == [None] * 2 * LAYERS
    finally:
        gc.enable()


def test_layers_without_gradients_leave_nothing():
    model = model_of().requires_grad_(False)
    model.model.layers[1].mlp.requires_grad_(True)
    forwards, _ = run_alone(model)
    assert forwards == LAYERS


def test_a_result_that_was_written_to_is_noticed():
    seq_ctx, _ = make_context()
    x = torch.randn(sum(LENGTHS), 2, 8, dtype=torch.float64, requires_grad=True)

    def careless(x):
        out = sequence_parallel_attention(x, x, x, seq_ctx)
        return out.mul_(2).sin()

    with pytest.raises(RuntimeError, match="in place: set save_attention_output=False"):
        checkpoint(careless, x, use_reentrant=False).sum().backward()
