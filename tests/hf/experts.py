"""Tiny mixtures of experts that transformers spreads over ranks, and how far their steps are from
those of one process."""

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
)
from transformers.distributed import DistributedConfig
from trl import SFTTrainer

from hf_flexseq.cost.sharding import PLAIN, FsdpPolicy
from hf_flexseq.plan import Plan
from tests.differential.case import sft_trainer
from tests.hf.hybrids import HYBRIDS, make_hybrid
from tests.hf.objectives import HEADS, Case, make_trainer
from tests.hf.plain import dataset
from tests.hf.test_exactness import LENGTHS
from tests.hf.test_reach import COEFFICIENT, keep_float64, make_model
from tests.hf.test_router import router_loss_of
from tests.hf.test_sharding import figures_for
from tests.hf.tiny import (
    any_choice,
    attached,
    documents,
    own_batches,
    random_steps,
    reference_gradients,
    reference_loss,
    relative_errors,
    taken_gradients,
    worst_of,
)
from tests.hf.trainers import Run, trained, trainer_of

# Eight experts of each family, by the names of its configuration.
EXPERTS: dict[str, dict[str, int]] = {
    "Qwen3Moe": {"num_experts": 8},
    "Qwen3_5Moe": {"num_experts": 8},
    "GptOss": {"num_local_experts": 8},
    "DeepseekV3": {"n_routed_experts": 8},
    "Glm4Moe": {"n_routed_experts": 8},
    "Mixtral": {"num_local_experts": 8},
    "NemotronH": {"n_routed_experts": 8},
    "KimiLinear": {"num_local_experts": 8},
}
# Families that add a router loss to their own.
ROUTED = ("Qwen3Moe", "Qwen3_5Moe", "GptOss", "Mixtral")

# Ranks, and what `DistributedConfig` is given.
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "2 ranks": (2, {"fsdp_size": 2, "ep_size": 2}),
    "4 ranks": (4, {"fsdp_size": 4, "ep_size": 4}),
    "4 ranks in 2 groups": (4, {"fsdp_size": 4, "ep_size": 2}),
    "2 replicas": (4, {"fsdp_size": 2, "ep_size": 2, "dp_replicate_size": 2}),
}
POLICIES = (PLAIN, FsdpPolicy(reduces_each=False, regathers=False))


def make(family: str, **others: Any) -> Any:
    """A tiny model of a family, in one process; others: of its configuration."""
    maker = make_hybrid if family in HYBRIDS else make_model
    return maker(family, **{**EXPERTS.get(family, {}), **others})


def save(training: "Training", folder: Path) -> Path:
    """Save the model of a training, unless it is there; return where."""
    path = folder / f"{training.family}, {training.labels} labels"
    if not path.exists():
        model = make(training.family)
        if training.labels:
            model.config.num_labels = training.labels
            model.config.pad_token_id = 0
            model.config.classifier_dropout = 0.0
            model = training.auto_class.from_config(model.config)
        save_model(model, path)
    return path


def save_model(model: Any, path: Path) -> None:
    """Save a model: in its published form unless transformers cannot shard that one when it loads
    it, as it mixes up rows of Kimi Linear and fails on Lara Mini."""
    is_published = not type(model).__name__.startswith(("KimiLinear", "LaraMini"))
    model.save_pretrained(path, save_original_format=is_published)


def spread(
    path: Path, kind: Any, config: Mapping[str, int], dtype: torch.dtype = torch.float64, **others
) -> Any:
    """The model that was saved at `path`, of class `kind`, sharded at load. config: of
    `DistributedConfig`. others: for `from_pretrained`."""
    model = kind.from_pretrained(
        path,
        dtype=dtype,
        distributed_config=DistributedConfig(**config),
        **{"experts_implementation": "eager", **others},
    )
    for buffer in model.buffers():  # which transformers makes in float32, whatever the dtype
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
    return model.train()


def has_all_degrees(world_size: int, plan: Plan) -> bool:
    """Tell if a plan has groups of 1, 2 and, on four ranks, 4 ranks, and a micro-batch in which a
    rank has no tokens."""
    groups = [group for micro_batch in plan.micro_batches for group in micro_batch.groups]
    degrees = {group.degree for group in groups}
    idle = False
    for micro_batch in plan.micro_batches:
        working = {rank for group in micro_batch.groups for rank in group.ranks}
        idle |= len(working) < world_size
    return idle and {1, 2, world_size} <= degrees


@dataclass(frozen=True, kw_only=True)
class OneProcess:
    """What one process makes of documents of LENGTHS as one batch, in float64."""

    path: Path
    """Where its model is."""
    kind: type[Any]
    """Class of the model."""
    is_training: bool
    """True if the model was in training mode."""
    adapted: Sequence[str] | None
    """Modules with an adapter, beside all experts; None without any."""
    loss: float
    gradients: dict[str, torch.Tensor]


def one_process(
    model: Any, path: Path, *, router_loss: bool = False, adapted: Sequence[str] | None = None
) -> OneProcess:
    """Save `model`, a copy of which can be spread over ranks; return loss and gradients. Call it
    inside `in_float64`. adapted: modules to put an adapter on, beside all experts."""
    kind = type(model)
    save_model(model, path)
    if adapted is not None:
        model = with_adapter(model, adapted)
    examples = documents(LENGTHS)
    if router_loss:
        model.set_attn_implementation("eager")
        loss = reference_loss(model, examples) + COEFFICIENT * router_loss_of(model, examples)
        loss.backward()
        found, gradients = float(loss.detach()), taken_gradients(model)
    else:
        found, gradients = reference_gradients(model, examples, "eager")
    return OneProcess(
        path=path,
        kind=kind,
        is_training=model.training,
        adapted=adapted,
        loss=found,
        gradients=gradients,
    )


def one_process_of(
    family: str, folder: Path, *, router_loss: bool = False, adapted: Sequence[str] | None = None
) -> OneProcess:
    """Return `one_process` of the model of a family."""
    path = folder / f"{family}, router loss: {router_loss}"
    options = {}
    if router_loss:
        options = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    with in_float64():
        model = make(family, **options)
        return one_process(model, path, router_loss=router_loss, adapted=adapted)


def with_adapter(model: Any, modules: Sequence[str] = (), *, seed: int = 0) -> Any:
    """Put LoRA on all experts of a model and on modules, by random numbers of a seed; its product
    is not zero."""
    torch.manual_seed(seed)
    config = LoraConfig(
        r=2,
        target_modules=list(modules),
        target_parameters=matrices_of_experts(model),
        init_lora_weights=False,
    )
    return get_peft_model(model, config).train(model.training)


def matrices_of_experts(model: Any) -> list[str]:
    """The ends of the names of all parameters [experts, rows, columns]."""
    names = set()
    for name, parameter in model.named_parameters():
        if ".experts." in name and parameter.ndim == 3:
            names.add("experts." + name.rpartition(".")[2])
    return sorted(names)


@contextmanager
def in_float64() -> Iterator[None]:
    """Let parts of transformers' models that compute in float32 stay in float64 inside the
    block."""
    with pytest.MonkeyPatch.context() as patch:
        keep_float64(patch)
        yield


def errors_of_steps(
    rank: int,
    world_size: int,
    wanted: OneProcess,
    config: Mapping[str, int],
    *,
    checkpointing: bool = False,
    choices: bool = False,
    steps: int = 2,
) -> dict[str, float]:
    """The largest relative errors of the loss and of the gradients of experts and of all others,
    over some steps in float64. Each has groups of all degrees and a rank without tokens, and every
    second one gathers and reduces once. choices: each micro-batch has one for its activations."""
    with in_float64():
        model = spread(wanted.path, wanted.kind, config).train(wanted.is_training)
        if wanted.adapted is not None:
            model = with_adapter(model, wanted.adapted, seed=rank)  # rank 0's values count
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        layers = model.config.get_text_config().num_hidden_layers
        engine = attached(
            model,
            world_size,
            accepts=partial(has_all_degrees, world_size),
            choose=partial(any_choice, layers) if choices else lambda rng: None,
            # An estimate knows activations, which takes some seconds.
            **({"cost_model": "estimate"} if choices else {}),
        )
        own = own_batches(documents(LENGTHS), rank, world_size)
        found = []
        engine.planning.fsdp.figures = figures_for(POLICIES[0])
        for _, loss, gradients in random_steps(engine, model, own, plans=steps):
            apart: dict[str, float] = {"loss": abs(loss / wanted.loss - 1), "experts": 0.0}
            for name, error in relative_errors(gradients, wanted.gradients).items():
                part = "experts" if ".experts." in name else "others"
                apart[part] = max(apart.get(part, 0.0), error)
            found.append(apart)
            engine.planning.fsdp.figures = figures_for(POLICIES[len(found) % len(POLICIES)])
        return worst_of(found)


# ---- trainers

ATTENTION = ["q_proj", "v_proj"]
MATRICES = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# What LoRA is on, by the options of its configuration.
ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ATTENTION},
    "experts": {"target_modules": [], "target_parameters": MATRICES},
    "attention and experts": {"target_modules": ATTENTION, "target_parameters": MATRICES},
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """A trainer of ten steps in float32 on a mixture of experts."""

    kind: str
    """"plain", the Trainer of transformers, TRL's "sft", or a kind of `objectives.Case`."""
    family: str = "Qwen3Moe"
    adapter: str | None = None
    """A key of ADAPTERS, to train LoRA alone. DPO's reference is the model with its adapter off,
    or, where the adapter has been trained before, with a copy of it."""
    is_retrained: bool = False
    """True for an adapter that has been trained before."""
    steps: int = 10
    batch: int = 4
    """Examples of a step, of all ranks together, where it is not of ranks: those have two each."""

    @property
    def lora(self) -> dict[str, Any]:
        """Options of the adapter."""
        return {} if self.adapter is None else ADAPTERS[self.adapter]

    @property
    def has_reference(self) -> bool:
        """True if the trainer is given a reference model."""
        return self.kind in ("dpo", "kto") and self.adapter is None

    @property
    def labels(self) -> int:
        """Labels of a classification head; 0 for a language model."""
        return HEADS[self.kind][1] if self.kind in HEADS else 0

    @property
    def auto_class(self) -> Any:
        """What loads the model."""
        if not self.labels:
            return AutoModelForCausalLM
        if self.kind == "tokens":
            return AutoModelForTokenClassification
        return AutoModelForSequenceClassification

    @property
    def is_of_ranks(self) -> bool:
        """True if the plain trainer has to run on as many ranks: they draw completions, or losses
        depend on a rank's own batch."""
        return self.kind not in ("plain", "sft", "dpo", "reward")


def train(
    rank: int, world_size: int, folder: Path, training: Training, config: Mapping[str, int] | None
) -> Run:
    """Train on this rank the model that `save` has saved. config: of `DistributedConfig`; None for
    the plain trainer, with a whole model. An adapter is all that is returned where one is trained.
    Collective over the world."""
    path = save(training, folder)
    models = []
    for _ in range(2 if training.has_reference else 1):
        models.append(spread(path, training.auto_class, config or {}, torch.float32))
    # of a new adapter rank 0's values count
    is_alike = training.is_of_ranks or training.is_retrained
    torch.manual_seed(5 if is_alike else 5 + rank)
    if training.is_retrained:
        adapter = LoraConfig(r=2, init_lora_weights=False, **training.lora)
        models[0] = get_peft_model(models[0], adapter)
    trainer = _trainer(training, config is not None, folder, world_size, *models)
    trained_names = {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    with contextlib.redirect_stdout(io.StringIO()):  # what trainers print at each step
        run = trained(trainer, evaluates=training.kind in ("plain", "sft"))
    start, weights = (
        {name: value for name, value in values.items() if name in trained_names}
        for values in (run.start, run.weights)
    )
    return replace(run, start=start, weights=weights)


def _trainer(
    training: Training, is_ours: bool, folder: Path, world_size: int, model: Any, *reference: Any
) -> Any:
    batch = training.batch // world_size
    adapter: dict[str, Any] = {}
    if training.adapter and not training.is_retrained:
        adapter["peft_config"] = LoraConfig(r=2, **training.lora)
    if training.kind not in ("plain", "sft"):
        settings = {"learning_rate": 0.1}
        if training.is_of_ranks:
            batch = 2
        if training.kind in ("grpo", "rloo", "kto"):
            settings["router_aux_loss_coef"] = 0.0  # a mean over batches, which ours is not
        case = Case(
            kind=training.kind,
            steps=training.steps,
            batch=batch,
            settings=settings,
            reference=not training.adapter,
        )
        others = {"ref_model": reference[0].eval()} if reference else {}
        return make_trainer(case, is_ours, folder, model=model, **others, **adapter)
    data = {"train_dataset": dataset(72), "eval_dataset": dataset(8)}
    given: dict[str, Any] = {
        "model": model,
        "flexseq": {} if is_ours else None,
        "batch": batch,
        "max_steps": training.steps,
        "learning_rate": 0.1,
        # one batch in one process, which has a mean over the tokens of all
        "per_device_eval_batch_size": 8 // world_size,
    }
    if training.kind == "plain":
        return trainer_of(Trainer, folder, **given, **data)
    given |= adapter
    data = {name: Dataset.from_list(rows) for name, rows in data.items()}
    return sft_trainer(SFTTrainer, folder, **given, **data)
