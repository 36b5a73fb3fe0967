"""A pipeline of one stage, in this process: what the executor refuses, and how often it computes
attention."""

import copy
from dataclasses import replace

import pytest
import torch

from hf_flexseq.attention.recurrent.carry import CarriedState, Carry, Carrying, WrongOrder
from hf_flexseq.distributed.links import Neighbours
from hf_flexseq.hf.model.attention import NAME
from hf_flexseq.hf.model.loss import attach_chunked_loss
from hf_flexseq.kernels.cpu_flash import CpuFlash
from hf_flexseq.pipeline.executor import PipelineExecutor
from hf_flexseq.pipeline.planning.plan import parse
from hf_flexseq.pipeline.stages import cut
from hf_flexseq.plan.shard import Slice
from tests import pipelines
from tests.hf.tiny import documents, reference_gradients, tiny_llama
from tests.pipeline.test_exactness import columns_of, gradients_of, largest_error, targets_of
from tests.ranks import join

LAYERS = 2
LENGTHS = (11, 3)
EXAMPLES = documents(LENGTHS)
TARGETS = targets_of(EXAMPLES)
FORWARDS = "0F0.0 0F0.1 0F0.2"
BACKWARDS = ("0B0.2 0B0.1 0B0.0", "0I0.2 0I0.1 0W0.2 0I0.0 0W0.1 0W0.0")


class CountingKernel(CpuFlash):
    """Counts its forwards."""

    def __init__(self):
        self.forwards = 0

    def forward(self, *args, **kwargs):
        self.forwards += 1
        return super().forward(*args, **kwargs)


def plan_of(actions, checkpointed=0):
    """Three chunks: two of the long sequence, and its tail with the short one."""
    parts = [((0, 0, 5),), ((0, 5, 8),), ((0, 8, 11), (1, 0, 3))]
    chunks = tuple(pipelines.chunk_of(*own, index=index) for index, own in enumerate(parts))
    return pipelines.plan_of(
        [parse(actions)], lengths=LENGTHS, chunks=chunks, checkpointed=((checkpointed,) * 3,)
    )


def executor_of(kernel=None):
    model = tiny_llama(num_hidden_layers=LAYERS)
    model.set_attn_implementation(NAME)
    stage = cut(model.train(), 0, 1)
    attach_chunked_loss(model)
    return PipelineExecutor(stage, Neighbours(join(), [[0]]), kernel or CpuFlash())


def train(executor, plan):
    return executor.train(plan, columns_of(plan, EXAMPLES), TARGETS)


def test_a_copy_of_a_stage_at_work_stands_alone():
    model = executor_of().stage.stack.model
    model.set_attn_implementation("sdpa")
    ids = torch.tensor([EXAMPLES[0]["input_ids"]])
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        twin = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(twin(input_ids=ids).logits, wanted)


@pytest.mark.parametrize(
    ("actions", "error", "message"),
    [
        (f"{FORWARDS} 0B0.0 0B0.1 0B0.2", WrongOrder, r"backward of \[0, 5\) is not the next one"),
        ("0F0.0 0F0.2", WrongOrder, r"the forward of \[8, 11\) is not the next one"),
        ("0F0.1", WrongOrder, "sequence 0 begins at 5 instead of 0"),
        ("0F0.0 0F0.1 0B0.1", WrongOrder, r"the backward of \[5, 8\) is not the next one"),
        (f"{FORWARDS} 0B0.2 0B0.1", WrongOrder, "over, but not drained: layer 0, sequence 0"),
        (
            f"{FORWARDS} 0I0.2 0I0.1 0I0.0 0W0.2 0W0.1",
            AssertionError,
            "weight gradients of .* were never added",
        ),
        (f"{FORWARDS} 0B0.2 0B0.2", AssertionError, "0B0.2 comes before its forward, or twice"),
        ("0F0.0 0F0.0", AssertionError, "0F0.0 comes twice"),
    ],
)
def test_a_wrong_order_raises(actions, error, message):
    with pytest.raises(error, match=message):
        train(executor_of(), plan_of(actions))


@pytest.mark.parametrize("part", [(0, 6), (3, 8), (6, 8)])
def test_the_next_part_of_a_recurrent_layer_begins_where_the_last_one_ended(part):
    carry = Carry()

    def store(start, stop):
        part = Slice(0, start, stop)
        carried = carry.find(CarriedState, "layer", part, 8, keeps_grad=True)
        Carrying(carried, part).store(torch.zeros(1))

    store(0, 5)
    start, stop = part
    with pytest.raises(WrongOrder, match=rf"forward of \[{start}, {stop}\) is not the next one"):
        store(start, stop)
    store(5, 8)
    store(5, 8)  # a replay


@pytest.mark.parametrize("checkpointed", [0, 1, LAYERS])
@pytest.mark.parametrize("backwards", BACKWARDS)
def test_attention_runs_once_and_once_more_where_layers_are_checkpointed(backwards, checkpointed):
    """A chunk has a call over its prefix and itself, and one for whole sequences."""
    kernel = CountingKernel()
    executor = executor_of(kernel)
    train(executor, plan_of(f"{FORWARDS} {backwards}", checkpointed))
    calls = 1 + 1 + (1 + 1)
    assert kernel.forwards == calls * (LAYERS + checkpointed)
    _, wanted = reference_gradients(tiny_llama(num_hidden_layers=LAYERS), EXAMPLES)
    assert largest_error(gradients_of(executor), wanted) < 1e-10


def test_a_plan_for_other_stages_is_refused():
    plan = replace(plan_of(FORWARDS), stages=2)
    with pytest.raises(AssertionError, match="a plan for 2 stages on 1 ranks, not 1 on 1"):
        train(executor_of(), plan)


def test_detached_the_layers_are_as_before():
    executor = executor_of()
    executor.detach()
    for layer in executor.stage.own_layers.values():
        assert not any("forward" in vars(module) for module in layer.modules())
