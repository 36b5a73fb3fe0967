"""One optimizer step of FlexSeqTrainer on all ranks, and the same step without hf_flexseq.

The step without it knows nothing of this project: transformers' own attention on one document at a
time, with its pixels, the cross-entropy of all target tokens divided by their number, the router
loss of transformers over all tokens, and torch's backward.
"""

import copy
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback
from transformers.distributed import DistributedConfig

from hf_flexseq.base.registry import STRATEGIES
from hf_flexseq.base.topology import Topology
from hf_flexseq.checkpoints.shards import whole
from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.distributed.reduction import local
from hf_flexseq.hf.model.experts import spreads_experts
from hf_flexseq.hf.model.head_trial import ROUTER_LOSS
from hf_flexseq.hf.model.rehearsal import FAULTS
from hf_flexseq.hf.model.router import OPTION, RouterFacts
from hf_flexseq.hf.trainer.trainer import FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.kernels import lse_dtype
from hf_flexseq.plan import Plan
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.prove.documents import Rows, tokens_per_rank
from hf_flexseq.steps.collator import DataCollatorForFlexSeq
from hf_flexseq.steps.differences import Gradients, StepOutcome

LEARNING_RATE = 0.01


class PlannedRun(NamedTuple):
    """A step of FlexSeqTrainer, and the plan that it ran."""

    step: StepOutcome
    plan: Plan
    has_trained: bool
    """True if the optimizer changed a weight."""


# ---- without hf_flexseq


def step_alone(
    model: PreTrainedModel,
    rows: Rows,
    *,
    autocast: torch.dtype | None = None,
    router: RouterFacts | None = None,
) -> StepOutcome:
    """Return one step of a copy of a model on this process alone. router: of the router loss that
    is added; None for none."""
    twin = copy.deepcopy(model).train()
    twin.set_attn_implementation("eager")
    device = next(twin.parameters()).device
    targets = sum(_targets(row) for row in rows)
    total = 0.0
    losses = []
    routed = []  # of each row, by layer [tokens, experts]
    for row in rows:
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            outputs = call_alone(twin, row, **({OPTION: True} if router else {}))
        logits = outputs.logits[0]  # [tokens, vocabulary]
        labels = torch.tensor([*row["labels"][1:], IGNORE_INDEX], device=device)  # [tokens]
        wide = logits.to(lse_dtype(logits.dtype))
        loss = F.cross_entropy(wide, labels, ignore_index=IGNORE_INDEX, reduction="sum") / targets
        total += float(loss.detach())
        if router is None:
            loss.backward()
        else:
            losses.append(loss)
            routed.append(outputs.router_logits)
    if router is not None:
        layers = tuple(torch.cat(of_layer) for of_layer in zip(*routed, strict=True))
        theirs = getattr(sys.modules[type(model).__module__], ROUTER_LOSS)
        added = router.coefficient * theirs(layers, layers[0].shape[-1], router.top_k)
        total += float(added.detach())
        torch.stack([*losses, added.to(losses[0].dtype)]).sum().backward()
    return StepOutcome(total, gradients_of(twin))


def call_alone(model: PreTrainedModel, row: dict[str, Any], **options: Any) -> Any:
    """Return a model's outputs for one document alone, called as transformers' processors have
    it."""
    device = next(model.parameters()).device
    ids = torch.tensor([row["input_ids"]], device=device)  # [1, tokens]
    given: dict[str, torch.Tensor] = {}
    for name, value in row.items():
        if isinstance(value, torch.Tensor):  # of images
            dtype = model.dtype if value.is_floating_point() else value.dtype
            given[name] = value.to(device, dtype)
        elif name not in ("input_ids", "labels"):  # of each token, in documents with images
            given[name] = torch.tensor([value], device=device)
            given["attention_mask"] = torch.ones_like(ids)
    return model(input_ids=ids, use_cache=False, **given, **options)


def _targets(row: dict[str, Any]) -> int:
    return sum(label != IGNORE_INDEX for label in row["labels"][1:])


def gradients_of(model: torch.nn.Module) -> Gradients:
    """Return the gradients of all trainable parameters, by the names that the user knows.
    Collective over the world for a sharded model."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[name.removeprefix("module.")] = whole(gradient.detach()).to("cpu", torch.float64)
    return found


# ---- with hf_flexseq


def plans_of(topology: Topology) -> dict[str, dict[str, Any]]:
    """Return the options of the plans to run, by name: the planner's own choice, and every
    strategy on all ranks."""
    plans: dict[str, dict[str, Any]] = {"auto": {}}
    if topology.world_size == 1:
        return plans
    for strategy in STRATEGIES[1:]:
        if strategy != "hybrid" or topology.nodes > 1:
            degree = topology.world_size
            plans[strategy] = {"planner": "static", "sp_degree": degree, "strategy": strategy}
    return plans


class _NotedStep(TrainerCallback):
    """Notes the plan of a trainer's step, and its gradients before the optimizer uses them."""

    def __init__(self, trainer: FlexSeqTrainer, memory: MemoryChoice | None) -> None:
        """memory: choice of all micro-batches for their activations; None for the plan's own."""
        self.gradients: Gradients = {}
        self.plan: Plan | None = None
        self.has_used_host = False
        """True if activations were brought to the host."""
        self._memory = memory
        self._engine = trainer.flexseq
        self._dispatch = self._engine.dispatch
        self._engine.dispatch = self._dispatch_noted  # type: ignore[method-assign]
        trainer.add_callback(self)

    def _dispatch_noted(self, planned: Any) -> Any:
        plan = planned.plan
        if self._memory is not None:
            chosen = tuple(replace(one, memory=self._memory) for one in plan.micro_batches)
            plan = replace(plan, micro_batches=chosen)
        self.plan = plan
        return self._dispatch(replace(planned, plan=plan))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.gradients = gradients_of(given["model"])
        store = self._engine.whole_model.layers.store
        self.has_used_host = store is not None and store.peak_bytes > 0


def step_of_trainer(
    model: PreTrainedModel,
    rows: Rows,
    topology: Topology,
    plan: dict[str, Any],
    *,
    bf16: bool,
    memory: MemoryChoice | None = None,
    sharding: Mapping[str, int] | None = None,
) -> PlannedRun:
    """Train one step of a copy of a model on all ranks. Collective over the world.

    memory: choice of all micro-batches for their activations; None for the plan's own. sharding:
    options of DistributedConfig, of a copy that is sharded when it is loaded; None for whole
    models. All ranks must then see one file system. Raises ValueError or NotImplementedError, on
    all ranks, for models and settings that hf_flexseq refuses.
    """
    world_size = topology.world_size
    with tempfile.TemporaryDirectory() as folder:
        twin = copy.deepcopy(model) if sharding is None else _sharded(model, sharding, folder)
        before = [local(parameter.detach()).cpu().clone() for parameter in twin.parameters()]
        args = FlexSeqConfig(
            output_dir=folder,
            max_steps=1,
            per_device_train_batch_size=len(rows) // world_size,
            optim="sgd",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            use_cpu=model.device.type == "cpu",
            bf16=bf16,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            cost_model="estimate",
            lookahead=0,
            max_tokens_per_rank=tokens_per_rank(rows, world_size),
            **plan,
        )
        trainer = FlexSeqTrainer(
            model=twin,
            args=args,
            train_dataset=rows,
            data_collator=DataCollatorForFlexSeq(),
        )
        trainer.remove_callback(PrinterCallback)
        noted = _NotedStep(trainer, memory)
        loss = trainer.train().training_loss
    if memory is not None and not any(gather_object([noted.has_used_host])):
        raise NotImplementedError("nothing has gone to the host, which every layer should use")
    after = [local(parameter.detach()).cpu() for parameter in twin.parameters()]
    changed = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert noted.plan is not None, "a step has run"
    return PlannedRun(StepOutcome(loss, noted.gradients), noted.plan, changed)


def _sharded(model: PreTrainedModel, sharding: Mapping[str, int], folder: str) -> PreTrainedModel:
    """Return a copy of a model that transformers shards when it loads it. Collective over the
    world. folder: of this rank; rank 0's is used."""
    (shared,) = broadcast_object_list([folder])
    if PartialState().is_main_process:
        # In the published form transformers cannot shard the experts of every family.
        model.save_pretrained(shared, save_original_format=False)
    PartialState().wait_for_everyone()
    try:
        twin = type(model).from_pretrained(
            shared,
            dtype=model.dtype,
            experts_implementation="eager",
            distributed_config=DistributedConfig(**sharding),
        )
    except FAULTS as error:  # alike on all ranks
        raise NotImplementedError(f"transformers cannot load it in shards: {error}") from error
    finally:
        PartialState().wait_for_everyone()  # before rank 0 removes the folder
    if any(not isinstance(parameter, DTensor) for parameter in twin.parameters()):
        raise NotImplementedError("transformers has left parameters whole on every rank")
    if sharding.get("ep_size", 1) > 1 and not spreads_experts(twin):
        raise NotImplementedError("transformers has left all experts on every rank")
    for buffer in twin.buffers():  # which transformers makes in float32, whatever the dtype
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(model.dtype)
    return twin
