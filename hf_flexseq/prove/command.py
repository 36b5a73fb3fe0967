"""Prove on the ranks at hand that a model trains as on one process; see `flexseq prove`.

    record = prove("meta-llama/Llama-3.1-8B")     under torchrun, on every rank

1. model      a small one with the same kinds of layers, and random weights; or the whole one
2. steps      one optimizer step of FlexSeqTrainer for each plan, against the same step without
              hf_flexseq: loss, and every gradient; on text, on images where the model takes them,
              with its router loss where it has one, and with activations recomputed, on the host
              and in tiles
3. changes    `probe_model`: one token is changed, and exactly the outputs that depend on it change
4. control    the steps without hf_flexseq against themselves in less precision
"""

import copy
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import PreTrainedModel

from hf_flexseq.base.topology import Topology
from hf_flexseq.base.versions import (
    SHARDED_LOAD_FROM,
    TESTED,
    installed,
    is_older,
    untested,
)
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.layer_kinds import has_recurrent
from hf_flexseq.hf.model.layer_memory import reason_without_choices
from hf_flexseq.hf.model.probe import lively_copy, probe_model
from hf_flexseq.hf.model.router import RouterFacts, UnknownRouterLoss
from hf_flexseq.hf.model.tiles import find_mlps
from hf_flexseq.hf.model.towers import tower_parameters
from hf_flexseq.hf.model.vision import VisionModel
from hf_flexseq.plan.blocks import SEE_BLOCKS
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.prove.documents import (
    IMAGE_COUNTS,
    ONE_IMAGE,
    Rows,
    documents,
    drawn_images,
    image_documents,
)
from hf_flexseq.prove.pinned import pin_routers
from hf_flexseq.prove.subject import (
    has_experts,
    model_of,
    with_router_loss,
    without_router_loss,
)
from hf_flexseq.prove.trained import call_alone, plans_of, step_alone, step_of_trainer
from hf_flexseq.steps.differences import (
    Difference,
    ErrorBounds,
    StepOutcome,
    difference,
    furthest,
    has_learned,
)
from hf_flexseq.steps.images import UnsupportedImages

# Norms, softmax and rotary embeddings of transformers compute in float32, whatever the dtype.
FLOAT64 = ErrorBounds(loss=1e-6, gradient=1e-4)
FLOAT64_SCANS = ErrorBounds(loss=1e-5, gradient=1e-3)  # scans do so, too, and add up many terms
FLOAT32 = ErrorBounds(loss=1e-4, gradient=1e-3)
TIMES_CONTROL = 2.0  # that 16 bits on ranks may be as far from float32 as on one process
CHANGES = ((0, 19), (2, 1))  # (sequence, token) that the probe changes
AUTO: dict[str, Any] = {}  # options of the plan that the planner chooses
TILES = 3  # of an MLP


class Subject(NamedTuple):
    """A model and its training data, and the step without hf_flexseq."""

    model: PreTrainedModel
    rows: Rows
    wanted: StepOutcome
    control: Difference
    """Of the same step in less precision."""
    bounds: ErrorBounds
    has_learned: bool
    """True if any gradient is not 0, and any of the tower in a step with images."""


class Case(NamedTuple):
    """A step of FlexSeqTrainer."""

    subject: str
    options: dict[str, Any]
    """Of its plan."""
    memory: MemoryChoice | None = None
    """Choice for its activations; None for the plan's own."""
    sharding: dict[str, int] | None = None
    """Options of DistributedConfig; None for whole models."""


def prove(name: str, *, whole: bool = False, bf16: bool | None = None) -> dict[str, Any]:
    """Compare steps and changes, and return the record, plain JSON values, on every rank.
    Collective over the world.

    name: folder or hub id of a model, a config.json, or the name of a class of transformers, with
    its default configuration. whole: the model itself with its weights, instead of a small one; it
    has to fit into one process, and changes of tokens are not tried. bf16: whether it trains in 16
    bits; None to do so on GPUs.

    Raises OSError, ValueError or NotImplementedError for a model that cannot be built, that is
    refused, or that cannot be made small, and on a single rank of a CPU.
    """
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, origin = model_of(name, whole=whole)
    without_router_loss(model)
    check_model(model)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    topology = Communicator().topology
    on_gpu = accelerator.device.type == "cuda"
    if topology.world_size == 1 and not on_gpu:
        raise ValueError(
            "1 rank shares nothing with others, and two are needed: leave out --ranks, or give "
            "--ranks 2"
        )
    if bf16 is None:
        bf16 = on_gpu
    probed = model
    if not whole:
        model = lively_copy(model, torch.float32 if bf16 else torch.float64)
    model = model.to(accelerator.device)

    left = _not_proven(model, topology, on_gpu=on_gpu, whole=whole)
    if bf16 and has_experts(model):
        left.append(_pinned(model))
    subjects = dict(_subjects(model, topology, left, bf16=bf16))
    control = max((one.control for one in subjects.values()), key=lambda one: one.gradient)
    steps: dict[str, dict[str, Any]] = {}
    for title, case in _cases(model, topology, subjects, left).items():
        subject = subjects[case.subject]
        steps[title] = _compared(subject, case, topology, bf16=bf16)
        if "not_run" in steps[title] and title == "auto":
            raise ValueError(steps[title]["not_run"])
    changes: list[str] | None = None
    if not whole and accelerator.is_main_process:
        try:
            changes = probe_model(probed, changes=CHANGES, gradients=False)
        except NotImplementedError as error:  # of a model whose mask depends on its images
            left.append(f"which outputs the change of a token changes: {error}")
    own, low = str(model.dtype).removeprefix("torch."), "bfloat16" if bf16 else "float32"
    return {
        "model": type(model).__name__,
        "origin": origin,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "ranks": [topology.nodes, topology.ranks_per_node],
        "device": accelerator.device.type,
        "dtype": low if bf16 else own,
        "documents": {what: _lengths(one.rows) for what, one in subjects.items()},
        "learned": {what: one.has_learned for what, one in subjects.items()},
        "bounds": {what: one.bounds._asdict() for what, one in subjects.items()},
        "control": {"what": f"{low} on one process, from {own}", **control.to_record()},
        "steps": steps,
        "changes": changes,
        "not_proven": left,
    }


def _pinned(model: PreTrainedModel) -> str:
    """Have tokens choose the experts of a model, and return a line on the part left unproven."""
    if pin_routers(model):
        return "which experts a token goes to: here it alone decides, since 16 bits change some"
    return "which experts a token goes to: no router was found, and 16 bits may change some"


def _lengths(rows: Rows) -> list[int]:
    return [len(row["input_ids"]) for row in rows]


# ---- what is trained

TEXT, ROUTER, IMAGES, IMAGE = "text", "router loss", "images", "one image"


def _subjects(
    model: PreTrainedModel, topology: Topology, left: list[str], *, bf16: bool
) -> Iterator[tuple[str, Subject]]:
    """Yield the subjects by name. left: gets a line for each comparison that is left out."""
    rows = documents(model.config, topology.world_size)
    yield TEXT, _subject(model, rows, bf16=bf16)
    if has_experts(model):
        try:
            routed = with_router_loss(model)
        except UnknownRouterLoss as reason:
            left.append(f"a router loss: {reason}")
        else:
            yield ROUTER, _subject(routed.model, rows, bf16=bf16, router=routed.facts)
    if not _has_tower(model):
        return
    try:
        drawn = drawn_images(model, call_alone)
    except UnsupportedImages as reason:
        left.append(f"images: the comparison is on text alone, for {reason}")
        return
    left.append("videos, and images of other sizes and numbers")
    for what, counts in ((IMAGES, IMAGE_COUNTS), (IMAGE, ONE_IMAGE)):
        pictured = image_documents(drawn, counts, topology.world_size)
        yield what, _subject(model, pictured, bf16=bf16, has_images=True)


def _has_tower(model: PreTrainedModel) -> bool:
    return model.config.get_text_config() is not model.config


def _subject(
    model: PreTrainedModel,
    rows: Rows,
    *,
    bf16: bool,
    router: RouterFacts | None = None,
    has_images: bool = False,
) -> Subject:
    """Return a subject, with its step without hf_flexseq."""
    wanted = step_alone(model, rows, router=router)
    if bf16:
        less_precise = step_alone(model, rows, autocast=torch.bfloat16, router=router)
    else:  # the same for a whole model, which is in float32
        less_precise = step_alone(copy.deepcopy(model).to(torch.float32), rows, router=router)
    control = difference(less_precise, wanted)
    learned = has_learned(wanted)
    if has_images:
        of_tower = {id(parameter) for parameter in tower_parameters(model)}
        names = [name for name, one in model.named_parameters() if id(one) in of_tower]
        learned = any(bool(wanted.gradients[name].any()) for name in names)
    bounds = _bounds(model, control.gradient, bf16=bf16)
    return Subject(model, rows, wanted, control, bounds, learned)


def _cases(
    model: PreTrainedModel, topology: Topology, subjects: dict[str, Subject], left: list[str]
) -> dict[str, Case]:
    """Return the steps to train, by title."""
    cases = {plan: Case(TEXT, options) for plan, options in plans_of(topology).items()}
    reason = reason_without_choices(model)
    if reason is None:
        cases["auto, least memory"] = Case(TEXT, AUTO, _least_memory(model, left))
    else:
        left.append(f"activations recomputed, on the host or in tiles: {reason}")
    cases |= _sharded_cases(model, topology, left)
    if ROUTER in subjects:
        cases[f"auto, {ROUTER}"] = Case(ROUTER, AUTO)
    if IMAGES in subjects:
        see_both_ways = VisionModel(model).both_ways
        if see_both_ways:
            left.append("rings with images, whose tokens see each other both ways: they refuse it")
        for plan, options in plans_of(topology).items():
            if not see_both_ways or plan == "auto" or plan in SEE_BLOCKS:
                cases[f"{plan}, {IMAGES}"] = Case(IMAGES, options)
        cases[f"auto, {IMAGE}"] = Case(IMAGE, AUTO)
    return cases


def _sharded_cases(model: PreTrainedModel, topology: Topology, left: list[str]) -> dict[str, Case]:
    """Return the steps of a model that transformers shards when it loads it, by title."""
    ranks = topology.world_size
    # On GPUs it would compute in 16 bits in another way than whole models do.
    is_tried = model.device.type == "cpu" and topology.nodes == 1
    if not is_tried or is_older("transformers", SHARDED_LOAD_FROM):
        left.append("sharded parameters, FSDP and DeepSpeed's ZeRO: ranks have whole models here")
        if has_experts(model):
            left.append("experts over ranks, ep_size: every rank has all experts here")
        return {}
    left.append("DeepSpeed's ZeRO-1, -2 and -3, and images or router losses of sharded models")
    cases = {"auto, FSDP2": Case(TEXT, AUTO, sharding={"fsdp_size": ranks})}
    if has_experts(model):
        sharding = {"fsdp_size": ranks, "ep_size": ranks}
        cases["auto, experts over ranks"] = Case(TEXT, AUTO, sharding=sharding)
    return cases


def _least_memory(model: PreTrainedModel, left: list[str]) -> MemoryChoice:
    """Return the choice that uses every lever: all layers are recomputed, with inputs on the host,
    and of some the attention."""
    layers = model.config.get_text_config().num_hidden_layers
    on_host = -(-layers // 2)
    found = find_mlps(model)
    if not found.mlps:
        left.append(f"MLPs in tiles: {found.reasons[0]}")
    return MemoryChoice(
        recomputed_layers=layers,
        inputs_on_host=layers,
        outputs_on_host=on_host,
        outputs_recomputed=(layers - on_host) // 2,
        mlp_tiles=TILES if found.mlps else 1,
    )


def _compared(subject: Subject, case: Case, topology: Topology, *, bf16: bool) -> dict[str, Any]:
    """Train a step on all ranks, and return how far it is from the one without hf_flexseq, on the
    rank that is furthest from it. Collective over the world."""
    try:
        run = step_of_trainer(
            subject.model,
            subject.rows,
            topology,
            case.options,
            bf16=bf16,
            memory=case.memory,
            sharding=case.sharding,
        )
    except (ValueError, NotImplementedError) as error:
        return {"not_run": " ".join(str(error).split())}
    # Ranks may have different gradients, and so different weights after the step.
    by_rank = gather_object([(difference(run.step, subject.wanted), run.has_trained)])
    apart = furthest([one for one, _ in by_rank])
    has_trained = all(trained for _, trained in by_rank)
    return {
        "groups": [f"{group.strategy} of {len(group.ranks)}" for group in run.plan.groups],
        "units": len(run.plan.units),
        "has_trained": has_trained,
        "difference": apart.to_record(),
        "holds": has_trained and apart.within(subject.bounds),
    }


def _bounds(model: PreTrainedModel, control: float, *, bf16: bool) -> ErrorBounds:
    """Return how far steps of a model may be. control: error of a gradient in less precision."""
    if bf16:
        return ErrorBounds(loss=1e-2, gradient=TIMES_CONTROL * control)
    if model.dtype == torch.float32:
        return FLOAT32
    own = FLOAT64_SCANS if has_recurrent(model.config.get_text_config()) else FLOAT64
    # A model that loses digits where it computes in float32 has no more of them in float64.
    return own._replace(gradient=max(own.gradient, min(control, FLOAT32.gradient)))


# ---- what is left


def _not_proven(
    model: PreTrainedModel, topology: Topology, *, on_gpu: bool, whole: bool
) -> list[str]:
    """Return the parts that no comparison here sees, a line each."""
    left = []
    if topology.world_size == 1:
        left.append("anything between ranks: there is 1 (start several)")
    if not whole:
        left.append(
            "the widths, the number of layers and the weights of the model itself (--whole)"
        )
    else:
        left.append("which outputs the change of a token changes (leave out --whole)")
    if not on_gpu:
        left.append("16 bits, kernels of GPUs, and NCCL (run it on GPUs)")
    left.append("adapters such as LoRA, and frozen or quantized weights: all weights are trained")
    left.append("pipelines: pipeline_parallel_size is 1")
    left.append("other losses than next-token loss, as of TRL's trainers or of your own")
    for package in TESTED:
        tested = untested(package)
        if tested is not None:
            left.append(f"{package} {installed(package)}: tested versions are {tested}")
    left.append("dropout: it is 0 here")
    left.append("later steps, evaluation, saving and resuming: one step is trained")
    return left
