"""Prove on the ranks at hand that a model trains as on one process; see `flexseq prove`.

    record = prove("meta-llama/Llama-3.1-8B")     under torchrun, on every rank

1. model      a small one with the same kinds of layers, and random weights; or the whole one
2. steps      one optimizer step of FlexSeqTrainer for each plan, against the same step without
              hf_flexseq: loss, and every gradient
3. changes    `probe_model`: one token is changed, and exactly the outputs that depend on it change
4. control    the step without hf_flexseq against itself in less precision
5. faults     that were made on purpose, and must be found

Gradients are compared, not losses: a loss agrees to many digits where a gradient is wrong. The
error of a parameter is ||found - wanted|| / ||wanted||, with 1e-3 of the largest norm of all
parameters as the smallest divisor, below which no digits are left.
"""

import copy
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import transformers
from accelerate import Accelerator
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.layer_kinds import recurrent_kinds
from hf_flexseq.hf.model.small import plain_options, small_model
from hf_flexseq.hf.probe import lively_copy, probe_model
from hf_flexseq.hf.prove.trained import (
    Gradients,
    Step,
    documents,
    plans_of,
    step_alone,
    step_of_trainer,
)

FLOOR = 1e-3  # of the largest norm of a gradient
LEAST_FAULT = 0.01  # relative error that is planted, where the bounds are narrow
TIMES_BOUND = 2.0  # planted error over the bound, in 16 bits


class Bounds(NamedTuple):
    """How far a step may be from the one without hf_flexseq."""

    loss: float
    """Relative error of the loss."""
    gradient: float
    """Error of any gradient."""


class Difference(NamedTuple):
    """How far a step is from another one."""

    loss: float
    """Relative error of the loss."""
    gradient: float
    """Largest error of a gradient."""
    parameter: str
    """Name of the parameter with that error; "" without gradients."""
    missing: tuple[str, ...]
    """Parameters that have a gradient in one step alone."""

    def within(self, bounds: Bounds) -> bool:
        """Return True if nothing is missing and no error is above its bound or NaN."""
        is_close = self.loss <= bounds.loss and self.gradient <= bounds.gradient
        return is_close and not self.missing

    def to_record(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**self._asdict(), "missing": list(self.missing)}


# Norms, softmax and rotary embeddings of transformers compute in float32, whatever the dtype.
FLOAT64 = Bounds(loss=1e-6, gradient=1e-4)
FLOAT64_SCANS = Bounds(loss=1e-5, gradient=1e-3)  # scans do so, too, and add up many terms
FLOAT32 = Bounds(loss=1e-4, gradient=1e-3)
TIMES_CONTROL = 2.0  # that 16 bits on ranks may be as far from float32 as on one process
# What transformers raises for configurations that no model can be built from.
_BUILDING_FAILS = (ImportError, AttributeError, KeyError, TypeError, ValueError, RuntimeError)
CHANGES = ((0, 19), (2, 1))  # (sequence, token) that the probe changes


class Precision(NamedTuple):
    """How the model computes, and what its step without hf_flexseq is compared with as control."""

    dtype: torch.dtype
    bf16: bool
    """True for autocast to bfloat16, as on a GPU."""
    control: str


def prove(name: str, *, whole: bool = False) -> dict[str, Any]:
    """Compare steps and changes, and return the record, plain JSON values, on every rank.
    Collective over the world.

    name: folder or hub id of a model, a config.json, or the name of a class of transformers, which
    stands for its default configuration. whole: the model itself with its weights, instead of a
    small one; it has to fit into one process, and changes of tokens are not tried.

    Raises ValueError or NotImplementedError for a model that cannot be built, that is refused, or
    that cannot be made small.
    """
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    topology = Communicator().topology
    on_gpu = accelerator.device.type == "cuda"
    precision = _precision(on_gpu=on_gpu, whole=whole)
    model, origin = _model(name, whole=whole)
    check_model(model)
    probed = model
    model = model.to(precision.dtype) if whole else lively_copy(model, precision.dtype)
    model = model.to(accelerator.device)
    config = model.config.get_text_config()
    rows = documents(config, topology.world_size)

    wanted = step_alone(model, rows)
    control = difference(_control(model, rows, precision), wanted)
    bounds = _bounds(model, precision, control.gradient)
    steps: dict[str, dict[str, Any]] = {}
    for plan, options in plans_of(topology).items():
        try:
            run = step_of_trainer(model, rows, topology, options, bf16=precision.bf16)
        except (ValueError, NotImplementedError) as error:
            if plan == "auto":
                raise
            steps[plan] = {"not_run": " ".join(str(error).split())}
            continue
        apart = difference(run.step, wanted)
        steps[plan] = {
            "groups": run.groups,
            "units": run.units,
            "has_trained": run.has_trained,
            "difference": apart.to_record(),
            "holds": run.has_trained and apart.within(bounds),
        }
    changes: list[str] | None = None
    if not whole and accelerator.is_main_process:
        changes = probe_model(probed, changes=CHANGES, gradients=False)
    return {
        "model": type(model).__name__,
        "origin": origin,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "ranks": [topology.nodes, topology.ranks_per_node],
        "device": accelerator.device.type,
        "dtype": "bfloat16" if precision.bf16 else str(precision.dtype).removeprefix("torch."),
        "documents": [len(row["input_ids"]) for row in rows],
        "learned": has_learned(wanted),
        "bounds": bounds._asdict(),
        "control": {"what": precision.control, **control.to_record()},
        "steps": steps,
        "changes": changes,
        "faults": planted_faults(wanted, bounds),
        "not_proven": _not_proven(model, on_gpu=on_gpu, whole=whole),
    }


# ---- differences


def difference(found: Step, wanted: Step) -> Difference:
    """Return how far the step `found` is from the step `wanted`."""
    loss = abs(found.loss - wanted.loss) / max(abs(wanted.loss), 1e-12)
    missing = tuple(sorted(found.gradients.keys() ^ wanted.gradients.keys()))
    errors = errors_of(found.gradients, wanted.gradients)
    # NaN is never the largest, so it is looked for first.
    worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]), default="")
    return Difference(loss, errors.get(worst, 0.0), worst, missing)


def errors_of(found: Gradients, wanted: Gradients) -> dict[str, float]:
    """Return the error of each parameter that both steps have."""
    floor = FLOOR * max((float(gradient.norm()) for gradient in wanted.values()), default=0.0)
    errors = {}
    for name in wanted.keys() & found.keys():
        size = max(float(wanted[name].norm()), floor, 1e-300)
        errors[name] = float((found[name] - wanted[name]).norm()) / size
    return dict(sorted(errors.items()))


def has_learned(step: Step) -> bool:
    """Return True if any gradient is not 0: two steps that compute nothing agree."""
    return any(bool(gradient.any()) for gradient in step.gradients.values())


def planted_faults(step: Step, bounds: Bounds) -> dict[str, bool]:
    """Return faults of a step that were made on purpose, and whether the comparison finds each.

    Errors of 1 % are planted, or of twice the bounds where those are wide, as in 16 bits.
    """
    factor = 1 + max(LEAST_FAULT, TIMES_BOUND * bounds.gradient)
    loss_factor = 1 + max(LEAST_FAULT, TIMES_BOUND * bounds.loss)
    largest = max(step.gradients, key=lambda name: float(step.gradients[name].norm()))
    scaled = {**step.gradients, largest: factor * step.gradients[largest]}
    halved = {name: gradient / 2 for name, gradient in step.gradients.items()}
    without = {name: step.gradients[name] for name in step.gradients if name != largest}
    faults: Mapping[str, Step] = {
        f"the gradient of {largest} times {factor:.3g}": step._replace(gradients=scaled),
        "all gradients halved, as by a mean over two ranks": step._replace(gradients=halved),
        f"no gradient of {largest}": step._replace(gradients=without),
        f"the loss times {loss_factor:.3g}": step._replace(loss=loss_factor * step.loss),
        "NaN in one gradient": step._replace(
            gradients={**step.gradients, largest: step.gradients[largest] * torch.nan}
        ),
    }
    return {name: not difference(fault, step).within(bounds) for name, fault in faults.items()}


# ---- the model


def _model(name: str, *, whole: bool) -> tuple[PreTrainedModel, str]:
    """Return the model to prove, on the CPU in float32, and what it is made of."""
    if whole:
        kind = transformers.AutoModelForCausalLM
        return kind.from_pretrained(name, trust_remote_code=False, dtype=torch.float32), name
    named = getattr(transformers, name, None) if name.isidentifier() else None
    if isinstance(named, type) and issubclass(named, PreTrainedModel):
        return _small(named, {}), f"the default configuration of {name}"
    # None would prompt on the terminal before running a model's own code
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"model_type={config.model_type!r} is not a causal language model of transformers"
        )
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return _small(kind, plain_options(config.to_diff_dict())), name


def _small(kind: type[PreTrainedModel], options: dict[str, Any]) -> PreTrainedModel:
    try:
        return small_model(kind, options)
    except NotImplementedError as error:  # layers of an unknown kind
        raise NotImplementedError(f"{kind.__name__}: {error}") from error
    except _BUILDING_FAILS as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{kind.__name__} cannot be made small ({reason}): give the folder or config.json of "
            "a model that can be built, or prove the model itself with --whole"
        ) from error


# ---- precision


def _precision(*, on_gpu: bool, whole: bool) -> Precision:
    if on_gpu:
        return Precision(torch.float32, True, "bfloat16 on one process, from float32")
    if whole:
        return Precision(torch.float32, False, "float32 twice on one process")
    return Precision(torch.float64, False, "float32 on one process, from float64")


def _control(model: PreTrainedModel, rows: list[dict[str, list[int]]], own: Precision) -> Step:
    """Return the step without hf_flexseq in less precision."""
    if own.bf16:
        return step_alone(model, rows, autocast=torch.bfloat16)
    if own.dtype == torch.float64:
        return step_alone(copy.deepcopy(model).to(torch.float32), rows)
    return step_alone(model, rows)


def _bounds(model: PreTrainedModel, precision: Precision, control: float) -> Bounds:
    if precision.bf16:
        return Bounds(loss=1e-2, gradient=TIMES_CONTROL * control)
    if precision.dtype == torch.float32:
        return FLOAT32
    return FLOAT64_SCANS if recurrent_kinds(model.config.get_text_config()) else FLOAT64


# ---- what is left


def _not_proven(model: PreTrainedModel, *, on_gpu: bool, whole: bool) -> list[str]:
    """Return what the comparison cannot see, a line each."""
    config = model.config
    left = ["sharded parameters: FSDP, ZeRO-2 and ZeRO-3 (ranks have whole models here)"]
    if not whole:
        left.append(
            "the widths, the number of layers and the weights of the model itself (--whole)"
        )
    if not on_gpu:
        left.append("kernels of GPUs, and NCCL (run it on GPUs)")
    if getattr(config.get_text_config(), "output_router_logits", None) is not None:
        left.append("the router loss of experts")
    if getattr(config, "vision_config", None) is not None:
        left.append("images: the comparison is on text")
    left.append("dropout: it is 0 here")
    return left
