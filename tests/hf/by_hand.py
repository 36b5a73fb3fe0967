"""One planned step without engine, accelerate or DDP, so that ranks can be threads: what the
executor of a whole model does with a plan, and gradients added up over ranks by hand."""

from functools import partial

import torch

from hf_flexseq import DataCollatorForFlexSeq
from hf_flexseq.attention import SequenceContext
from hf_flexseq.base.layers import FULL
from hf_flexseq.base.topology import Topology
from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.facts import attention_shape
from hf_flexseq.hf.model.loss import attach_chunked_loss
from hf_flexseq.hf.model.positions import attach_positions, needed_columns
from hf_flexseq.hf.model.recurrent import attach_recurrent
from hf_flexseq.plan.layout import PlanLayout
from hf_flexseq.program.hybrid import Reordered
from hf_flexseq.program.ulysses import UlyssesZone
from hf_flexseq.steps.exchange import micro_batch_routes, united
from hf_flexseq.steps.inputs import indices_to_run, inputs_of
from hf_flexseq.steps.source_row import common_dtypes, source_row
from hf_flexseq.steps.token_columns import with_token_columns
from tests.device import DEVICE, own_kernel
from tests.hf.tiny import relative_errors, taken_gradients
from tests.ranks import join, run_threads

TWO_NODES = Topology(nodes=2, ranks_per_node=2)


def attach(model):
    """Give `model` the attention, the loss, the positions and the recurrent functions that the
    executor gives it."""
    check_model(model)
    model.set_attn_implementation("flexseq")
    attach_chunked_loss(model)
    attach_positions(model)
    attach_recurrent(model)


def run_plan(model, plan, examples, communicator, *, passes=None):
    """Loss, gradients by parameter name, both of the whole step, and the contexts of this rank's
    micro-batches. Collective over the world.

    model: attached by `attach`. Every rank draws its part of `examples`, in their order.
    """
    targets = target_count(examples)
    loss = torch.zeros((), dtype=torch.float64)
    contexts = []
    for inputs in planned_inputs(model, plan, examples, communicator, passes=passes):
        own = model(**inputs, use_cache=False, num_items_in_batch=targets).loss
        own.backward()
        loss += own.detach().cpu()
        contexts.append(inputs["seq_ctx"])
    communicator.cpu_group.all_reduce(loss)
    return float(loss), summed_gradients(model, communicator), contexts


def planned_inputs(model, plan, examples, communicator, *, passes=None, lockstep=False):
    """Inputs of the model for every micro-batch that this rank runs, each made when it is asked
    for. Collective over the world."""
    # 1. the tokens, from where they were drawn to where the plan wants them
    rank, world_size = communicator.rank, communicator.world_size
    sources = [index * world_size // len(examples) for index in range(len(examples))]
    row = drawn_row(examples, sources, communicator)
    layout = PlanLayout(plan, rank, passes.shards if passes else None)
    row = with_token_columns(row, needed_columns(model))
    routes = micro_batch_routes(row, layout, sources, communicator)
    columns = routes.dispatch(row.columns, united)

    # 2. the context of each micro-batch
    shape = attention_shape(model.config.get_text_config())
    kernel = own_kernel(torch.float64, shape.head_dim)

    def make_context(shard, memory):
        return SequenceContext(shard, communicator, kernel, DEVICE, memory=memory, passes=passes)

    for index in indices_to_run(layout.shards, lockstep=lockstep):
        with_memory = partial(make_context, memory=plan.micro_batches[index].memory)
        yield inputs_of(layout.shards[index], columns[index], DEVICE, with_memory)


def worst_error(make, topology, plans, examples, wanted, attached=lambda model: None):
    """The largest relative error of loss and gradients on any rank, which are threads, under each
    plan, of which every other one is checkpointed.

    make: returns the model. wanted: loss and gradients of one process. attached: is called with
    the attached model.
    """

    def errors(rank, world_size):
        communicator = join(topology)
        model = make().to(DEVICE)
        base = getattr(model, "get_base_model", lambda: model)()
        attach(base)
        attached(base)
        worst = 0.0
        for index, plan in enumerate(plans):
            if model.supports_gradient_checkpointing:
                if index % 2:
                    model.gradient_checkpointing_enable({"use_reentrant": False})
                else:
                    model.gradient_checkpointing_disable()
            loss, gradients, _ = run_plan(model, plan, examples, communicator)
            found = relative_errors(gradients, wanted[1])
            worst = max(worst, abs(loss / wanted[0] - 1), *found.values())
        return worst

    return max(run_threads(errors, topology.world_size))


def target_count(examples):
    return sum(label != IGNORE_INDEX for e in examples for label in e["labels"][1:])


def drawn_row(examples, sources, communicator):
    """The row of the examples that this rank has drawn, with columns of the dtypes that all ranks
    agree on. sources: the rank that draws each example."""
    drawn = [
        example
        for example, source in zip(examples, sources, strict=True)
        if source == communicator.rank
    ]
    row = source_row([DataCollatorForFlexSeq()(drawn)] if drawn else [])
    of_ranks = communicator.cpu_group.gather_values(row.dtypes)
    return row.with_columns(common_dtypes(of_ranks, "a test"))


def summed_gradients(model, communicator):
    """Gradients by parameter name, added up over ranks; the model has none afterwards."""
    gradients = taken_gradients(model)
    for gradient in gradients.values():
        communicator.all_reduce(gradient)
    return gradients


def rows_of(shards):
    """By micro-batch, (sequence, start, stop) of what a rank holds, in the order of its rows."""
    return [[(part.sequence, part.start, part.stop) for part in shard.slices] for shard in shards]


def ways_between_nodes(contexts):
    """What a rank's contexts have of a hybrid's ring, as a set of words."""
    found = set()
    zones = [(one.shard.rank, zone) for one in contexts for zone in one.programs.parts.zones(FULL)]
    for rank, zone in zones:
        if isinstance(zone, UlyssesZone) and isinstance(zone.inner, Reordered):
            steps = zone.inner.inner.steps
            if any(step.read is not None and step.read.keys.peer != rank for step in steps):
                found.add("ring of a hybrid")
    return found
