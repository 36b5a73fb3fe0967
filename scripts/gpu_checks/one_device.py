"""All strategies, zones, Zeppelin's passes and pipelines on one device, with ranks that are
threads of one process.

Eight ranks share the device, and their messages are copies on it; so this says nothing about speed
and nothing about NCCL. It shows that plans are exact with the device's own kernels and streams,
and that they end when each lane carries out one post after the other, or all lanes together do.

Every plan goes another way: in turns the two kinds of launches, the two precisions, one node and
two (then with passes), layers checkpointed and not. Ranks run every micro-batch together
(lockstep) or only their own (free), with groups for aligned blocks and without.
"""

import copy
import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import LlamaForCausalLM

from gpu_checks import subject
from gpu_checks.kernels import synchronize
from gpu_checks.report import Section, Setting, table, verdict
from gpu_checks.subject import Gradients, Precision
from hf_flexseq.attention import SequenceContext
from hf_flexseq.base.topology import Topology
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.links import Neighbours
from hf_flexseq.hf.attention import NAME
from hf_flexseq.hf.model.loss import attach_chunked_loss
from hf_flexseq.pipeline.executor import PipelineExecutor
from hf_flexseq.pipeline.planning import PipelineOptions, make_pipeline_plan
from hf_flexseq.pipeline.planning.plan import PipelinePlan
from hf_flexseq.pipeline.planning.stage_cost import PipelineCost, StageCost
from hf_flexseq.pipeline.reduction import reduce_gradients
from hf_flexseq.pipeline.stages import cut
from hf_flexseq.pipeline.ulysses import Sharing
from hf_flexseq.plan import Group, MicroBatch, Plan
from hf_flexseq.plan.layout import PlanLayout
from hf_flexseq.steps.drawn import common_dtypes, source_row
from hf_flexseq.steps.exchange import RowExchange
from hf_flexseq.steps.inputs import indices_to_run, inputs_of
from tests.matching import Launches
from tests.threads import ThreadHub, ThreadTransport

RANKS = 8
REHEARSED_RANKS = 4
LAYERS = 2
HUB_S = 3600.0  # after which threads that do not end are given up
LAUNCHES = (Launches.BY_LANE, Launches.ONE_QUEUE)
QUICK_FORMS = 2  # of pipelines
WAYS = 16  # that plans go in turns: two of each of four things


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How one step is run."""

    precision: Precision
    lockstep: bool
    checkpointing: bool
    passes: bool


# ---- plans of groups


def plans_section(setting: Setting) -> Section:
    """Run random plans on threads, and compare their gradients with the truth."""
    device = setting.device
    examples = subject.documents(setting)
    model = subject.small_llama(device, layers=LAYERS)
    true = subject.true_gradients(model, examples)
    bounds = {}
    for precision in subject.precisions(device):
        alone = _error_of_one_rank(model, examples, precision, true)
        bounds[precision.name] = subject.bound_of(precision, alone)

    rows = []
    holds = True
    counts: Counter[str] = Counter()
    for index, (lockstep, blocks) in enumerate(itertools.product((False, True), repeat=2)):
        worst: dict[str, float] = {}
        # Few plans, as in a rehearsal, still go different ways in every row.
        first = index * (WAYS // 3)
        for number in range(first, first + setting.plans):
            case = _case_of(number, setting, lockstep=lockstep, blocks=blocks)
            error = _error_of(case, model, examples, true)
            name = case.way.precision.name
            worst[name] = max(worst.get(name, 0.0), error)
            counts += subject.features(case.plan, case.topology)
        is_close = all(error <= bounds[name] for name, error in worst.items())
        holds = holds and is_close
        cells = []
        for name, bound in bounds.items():
            cells.append(f"{worst[name]:.1e} ({bound:.1e})" if name in worst else "no plan")
        names = ["lockstep" if lockstep else "free", "blocks" if blocks else "none"]
        rows.append([*names, setting.plans, *cells, verdict(is_close)])
    columns = ["ranks run", "groups of", "plans", *bounds, ""]
    return Section(
        title=f"{_ranks(setting)} ranks as threads on one device: largest error of a gradient "
        "(bound)",
        lines=(*table(columns, rows), "", subject.counts_line(counts)),
        holds=holds,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A plan, and all that it is run with."""

    plan: Plan
    topology: Topology
    launches: Launches
    blocks: bool
    seed: int
    way: Way


def _ranks(setting: Setting) -> int:
    return REHEARSED_RANKS if setting.rehearse else RANKS


def _case_of(number: int, setting: Setting, *, lockstep: bool, blocks: bool) -> Case:
    """Return the plan of this number, and the way that it goes."""
    ranks = _ranks(setting)
    nodes = 1 + number // 4 % 2
    topology = Topology(nodes=nodes, ranks_per_node=ranks // nodes)
    examples = subject.documents(setting)
    lengths = []
    for rank in range(ranks):
        lengths += [len(example["input_ids"]) for example in examples[rank::ranks]]
    rng = random.Random(f"{number} {lockstep} {blocks}")
    way = Way(
        precision=subject.precisions(setting.device)[number // 2 % 2],
        lockstep=lockstep,
        checkpointing=number // 8 % 2 == 1,
        passes=nodes > 1,
    )
    return Case(
        plan=subject.random_plan(lengths, topology, rng),
        topology=topology,
        launches=LAUNCHES[number % 2],
        blocks=blocks,
        seed=number,
        way=way,
    )


def _error_of(
    case: Case, model: LlamaForCausalLM, examples: Sequence[dict[str, Any]], true: Gradients
) -> float:
    """Run a case on threads, and return the largest error of its gradients."""
    device = model.device
    twins = [subject.planned(copy.deepcopy(model)) for _ in range(case.topology.world_size)]
    synchronize(device)  # every rank works on a stream of its own, which waits for no other

    def run_rank(transport: ThreadTransport) -> None:
        communicator = Communicator(case.topology, transport=transport, use_blocks=case.blocks)
        twin = twins[transport.rank]
        _step(communicator, twin, case.plan, examples, case.way)

    hub = ThreadHub(
        case.topology.world_size, launches=case.launches, seed=case.seed, device=device
    )
    hub.run(run_rank, seconds=HUB_S)
    synchronize(device)
    found = {name: parameter.grad for name, parameter in twins[0].named_parameters()}
    return subject.largest_error(found, true)


def _error_of_one_rank(
    model: LlamaForCausalLM,
    examples: Sequence[dict[str, Any]],
    precision: Precision,
    true: Gradients,
) -> float:
    """Return the largest error of the gradients of one rank that holds all documents."""
    everything = Group(ranks=(0,), sequences=tuple(range(len(examples))), strategy="local")
    plan = Plan(
        lengths=tuple(len(example["input_ids"]) for example in examples),
        micro_batches=(MicroBatch(groups=(everything,)),),
        objective_s=0.0,
        lower_bound_s=0.0,
        planner="one rank",
        planning_s=0.0,
    )
    case = Case(
        plan=plan,
        topology=Topology(nodes=1, ranks_per_node=1),
        launches=Launches.BY_LANE,
        blocks=False,
        seed=0,
        way=Way(precision=precision, lockstep=True, checkpointing=False, passes=False),
    )
    return _error_of(case, model, examples, true)


def _step(
    communicator: Communicator,
    model: LlamaForCausalLM,
    plan: Plan,
    examples: Sequence[dict[str, Any]],
    way: Way,
) -> None:
    """Run one step of a plan as a rank, up to gradients that are summed over all ranks."""
    # 1. tokens to where the plan wants them
    world_size = communicator.world_size
    sources = []
    for rank in range(world_size):
        sources += [rank] * len(examples[rank::world_size])
    row = source_row(subject.drawn_by(communicator.rank, world_size, examples))
    passes = subject.EagerPasses(communicator.topology) if way.passes else None
    layout = PlanLayout(plan, communicator.rank, passes and passes.shards)
    row = row.with_columns(common_dtypes(row, communicator.cpu_group))
    columns = RowExchange(communicator)(row, layout, sources)

    # 2. forward and backward of every micro-batch
    make_context = partial(
        SequenceContext,
        communicator=communicator,
        kernel=way.precision.kernel,
        device=model.device,
        passes=passes,
    )
    if way.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for index in indices_to_run(layout.shards, lockstep=way.lockstep):
        inputs = inputs_of(layout.shards[index], columns[index], model.device, make_context)
        with way.precision.forward(model.device):
            outputs = model(
                **inputs, use_cache=False, num_items_in_batch=subject.targets_of(examples)
            )
        outputs.loss.backward()

    # 3. one reduction, behind the plan's last micro-batch
    for parameter in model.parameters():
        communicator.all_reduce(parameter.grad)


# ---- pipelines


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """The form of a pipeline, and its schedule."""

    stages: int
    """Ranks of a pipeline."""
    degree: int
    """Ranks that share every chunk of a stage."""
    virtual: int
    """Stages of each rank."""
    schedule: str
    chunks: int | None
    """Of the longest sequence; None to be planned."""


def pipelines_section(setting: Setting) -> Section:
    """Run pipelines on threads, and compare their gradients with the truth."""
    device = setting.device
    ranks = _ranks(setting)
    examples = subject.documents(setting)
    model = subject.small_llama(device, layers=ranks)
    true = subject.true_gradients(model, examples)
    bounds = {}
    for precision in subject.precisions(device):
        alone = _error_of_one_rank(model, examples, precision, true)
        bounds[precision.name] = subject.bound_of(precision, alone)

    rows = []
    holds = True
    forms = _forms(ranks)
    if setting.rehearse or setting.quick:
        forms = forms[-QUICK_FORMS:]
    for form in forms:
        cells = []
        is_close = True
        for precision in subject.precisions(device):
            bound = bounds[precision.name]
            error = _pipeline_error(form, model, examples, precision, true)
            is_close = is_close and error <= bound
            cells.append(f"{error:.1e} ({bound:.1e})")
        holds = holds and is_close
        shape = [form.schedule, form.stages, form.virtual, form.degree]
        rows.append([*shape, *cells, verdict(is_close)])
    columns = ["schedule", "ranks", "stages of each", "sharing a chunk"]
    return Section(
        title="Pipelines as threads on one device: largest error of a gradient (bound)",
        lines=table([*columns, "float32", "bfloat16", ""], rows),
        holds=holds,
    )


def _forms(ranks: int) -> list[Pipeline]:
    """Return pipelines of all ranks, and of half of them with two that share every chunk."""
    forms = []
    for schedule, chunks in (("1f1b", None), ("seq1f1b", 3), ("infinipipe", None), ("auto", None)):
        for degree in (1, 2):
            form = Pipeline(
                stages=ranks // degree, degree=degree, virtual=1, schedule=schedule, chunks=chunks
            )
            forms.append(form)
    interleaved = Pipeline(
        stages=ranks // 2, degree=2, virtual=2, schedule="seq1f1b-i", chunks=ranks // 2
    )
    return [*forms, interleaved]


def _pipeline_error(
    form: Pipeline,
    model: LlamaForCausalLM,
    examples: Sequence[dict[str, Any]],
    precision: Precision,
    true: Gradients,
) -> float:
    """Run one step of a pipeline on threads, and return the largest error on any stage."""
    even = StageCost(linear_ns=1000.0, attention_ns=1.0, chunk_ns=1000.0, token_bytes=1.0)
    lengths = [len(example["input_ids"]) for example in examples]
    plan = make_pipeline_plan(
        lengths,
        PipelineCost.even(form.stages * form.virtual, even),
        PipelineOptions(schedule=form.schedule, chunks=form.chunks),
    )
    world_size = form.stages * form.degree
    twins = [copy.deepcopy(model) for _ in range(world_size)]
    columns = chunk_columns(plan, examples, model.device)
    targets = subject.targets_of(examples)
    synchronize(model.device)

    def run_rank(transport: ThreadTransport) -> float:
        topology = Topology(nodes=1, ranks_per_node=world_size)
        communicator = Communicator(topology, transport=transport)
        executor = _stage_executor(form, twins[transport.rank], communicator, precision)
        executor.train(plan, columns, targets, lambda: precision.forward(model.device))
        reduce_gradients(executor.stage, executor.neighbours)
        found = {name: p.grad for name, p in executor.stage.global_parameters()}
        return subject.largest_error(found, true)

    hub = ThreadHub(world_size, launches=Launches.ONE_QUEUE, seed=0, device=model.device)
    return max(hub.run(run_rank, seconds=HUB_S))


def _stage_executor(
    form: Pipeline, model: LlamaForCausalLM, communicator: Communicator, precision: Precision
) -> PipelineExecutor:
    """Return the executor of this rank's stages."""
    model.set_attn_implementation(NAME)
    index, place = divmod(communicator.rank, form.degree)
    stage = cut(model, index, form.stages, virtual=form.virtual)
    if stage.is_last:
        attach_chunked_loss(model)
    pipelines = []
    for i in range(form.degree):
        pipelines.append([s * form.degree + i for s in range(form.stages)])
    neighbours = Neighbours(communicator, pipelines, ring=form.virtual > 1)
    sharing = None
    if form.degree > 1:
        ranks = tuple(range(index * form.degree, (index + 1) * form.degree))
        sharing = Sharing(communicator, ranks, place)
    return PipelineExecutor(stage, neighbours, precision.kernel, sharing=sharing)


def chunk_columns(
    plan: PipelinePlan, examples: Sequence[Mapping[str, list[int]]], device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """Return the columns of every chunk, each [1, tokens]."""
    columns = []
    for chunk in plan.chunks:
        ids: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        for part in chunk.slices:
            example = examples[part.sequence]
            shifted = [*example["labels"][1:], -100]
            ids += example["input_ids"][part.start : part.stop]
            labels += shifted[part.start : part.stop]
            positions += range(part.start, part.stop)
        rows = {"input_ids": ids, "labels": labels, "position_ids": positions}
        columns.append({name: torch.tensor([row], device=device) for name, row in rows.items()})
    return columns
