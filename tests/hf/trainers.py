"""Trainers with hf_flexseq and without, on the same data, and how far apart their runs are."""

import copy
import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

from hf_flexseq import FlexSeqArguments, FlexSeqCallback, FlexSeqMixin
from tests.hf.plain import OPTIONS, dataset, logged, padded, training_arguments
from tests.hf.tiny import VOCAB, tiny_llama, whole

Array = np.ndarray[Any, np.dtype[np.float64]]
CLOCKS = ("runtime", "per_second", "time", "total_flos", "flexseq/")  # parts of names of figures


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are words, such as w17 for the number 17; 0 pads and 1 ends."""
    words = {f"w{number}": number for number in range(2, VOCAB)}
    vocabulary = {"<pad>": 0, "<end>": 1, **words}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
    )


def flexseq_class(base: Any) -> Any:
    """`base` with FlexSeqMixin in front, unless it has it."""
    if issubclass(base, FlexSeqMixin):
        return base
    return type(f"Flex{base.__name__}", (FlexSeqMixin, base), {})


def trainer_of(
    base: Any,
    folder: Any,
    *,
    config: Any = TrainingArguments,
    flexseq: Mapping[str, Any] | None = None,
    callback: bool = False,
    batch: int = 2,
    accumulation: int = 1,
    **settings: Any,
) -> Any:
    """A trainer of a user's class `base`: three steps of SGD on padded documents.

    config: class of its arguments. flexseq: options besides OPTIONS, None for the stock trainer;
    they plan a step when it runs, without a process of the planner's, unless they say otherwise.
    callback: let FlexSeqCallback switch hf_flexseq on, in place of the mixin.
    settings: arguments of the trainer, and of its config, by their names.
    """
    own = {name for cls in base.__mro__ for name in inspect.signature(cls.__init__).parameters}
    given = {name: settings.pop(name) for name in own & settings.keys()}
    if "model" not in given:
        given["model"] = tiny_llama()
    if flexseq is not None:
        options = FlexSeqArguments(**{**OPTIONS, "lookahead": 0, **flexseq})
        if not callback:
            base = flexseq_class(base)
            given["flexseq_args"] = options
    defaults = {"optim": "sgd", "max_steps": 3, "per_device_eval_batch_size": 2}
    settings = {"batch": batch, "accumulation": accumulation, **defaults, **settings}
    given["args"] = training_arguments(config, folder, **settings)
    given = {"train_dataset": dataset(16), "data_collator": padded, **given}
    if given["data_collator"] is None:
        del given["data_collator"]  # which some trainers of TRL do not take
    trainer = base(**given)
    if flexseq is not None and callback:
        trainer.add_callback(FlexSeqCallback(trainer, options))
    return trainer


ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "communication_data_type": "fp32",
}


def zero(stage: int) -> dict[str, Any]:
    """The settings of DeepSpeed for a stage of ZeRO on CPUs, which takes no float64 parameters.
    Make the model before: they make transformers draw other weights. Collective over the world."""
    import deepspeed  # which takes long, and need not be installed elsewhere

    # Where a processor computes in float16, DeepSpeed refuses references in float64.
    deepspeed.get_accelerator().is_fp16_supported = lambda: False
    deepspeed.init_distributed("gloo")
    parts = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return copy.deepcopy(ZERO) | {"zero_optimization": parts}


class OwnLoss(Trainer):
    """A user's loss, on its own batches."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def loss_of_squares(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A loss of a user's own: the mean square of samples' log-probabilities, from our outputs or
    from logits."""
    found = getattr(outputs, "log_probs", None)
    if found is None:
        of_all = outputs.logits[:, :-1].double().log_softmax(-1)
        targets = labels[:, 1:]
        found = of_all.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        found = found.masked_fill(targets == -100, 0)
    return found.sum(dim=1).square().mean() / 100


# ---- what a trainer makes of its model


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a trainer has made of its model."""

    start: dict[str, Array]
    weights: dict[str, Array]
    log: list[dict[str, float]]


def trained(trainer: Any, *, evaluates: bool = False) -> Run:
    """Train, and return the weights before and after, in float64, and all that was logged."""
    start = weights_of(trainer.model)
    trainer.train()
    if evaluates:  # not before: the plain Trainer would never wrap the model in DDP then
        trainer.evaluate()
    return Run(start=start, weights=weights_of(trainer.model), log=trainer.state.log_history)


def weights_of(model: Any) -> dict[str, Array]:
    """A copy of all weights, whole and in float64, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        gathered: Any = nullcontext()
        if hasattr(parameter, "ds_id"):  # under ZeRO-3; DeepSpeed need not be installed elsewhere
            import deepspeed

            gathered = deepspeed.zero.GatheredParameters([parameter])
        with gathered:
            found[name] = whole(parameter.detach()).double().numpy().copy()
    return found


# ---- two runs


def weights_apart(stock: Run, ours: Run) -> float:
    """||ours - stock|| over ||stock - start||, all weights together."""
    return update_error(stock.start, stock.weights, ours.weights)


def update_error(
    before: Mapping[str, Array], wanted: Mapping[str, Array], found: Mapping[str, Array]
) -> float:
    """||found - wanted|| over ||wanted - before||, all weights together."""
    return distance(wanted, found) / distance(wanted, before)


def distance(some: Mapping[str, Array], others: Mapping[str, Array]) -> float:
    """||some - others||, all weights together."""
    return math.hypot(*(float(np.linalg.norm(others[n] - own)) for n, own in some.items()))


def assert_logged_alike(stock: Run, ours: Run, keys: Sequence[str], *, rel: float) -> None:
    """Compare figures of two logs."""
    for key in keys:
        assert logged(ours.log, key) == pytest.approx(logged(stock.log, key), rel=rel), key


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far ours is from stock."""

    weights: float
    """||ours - stock|| over ||stock - start||, all weights together."""
    metrics: float
    """The largest difference of a figure that was logged, over its size where that exceeds 1;
    see `size_of`."""
    metric: str
    """The name of that figure."""
    missing: tuple[str, ...]
    """Figures that stock logs and ours does not."""
    figures: int
    """So many were compared."""


def difference(stock: Run, ours: Run) -> Difference:
    """Compare weights and logs."""
    worst, missing, count = (0.0, ""), [], 0
    assert len(stock.log) == len(ours.log), "both log as often"
    for wanted, found in zip(stock.log, ours.log, strict=True):
        for name, value in wanted.items():
            if not isinstance(value, int | float) or any(clock in name for clock in CLOCKS):
                continue
            if name not in found:
                missing.append(name)
                continue
            count += 1
            if math.isnan(value) and math.isnan(found[name]):
                continue
            worst = max(worst, (abs(value - found[name]) / size_of(name, wanted), name))
    return Difference(
        weights=weights_apart(stock, ours),
        metrics=worst[0],
        metric=worst[1],
        missing=tuple(missing),
        figures=count,
    )


def size_of(name: str, entry: Mapping[str, float]) -> float:
    """What the rounding of a figure in an entry of a log is measured by: its own size, at least 1.
    Rewards of DPO and KTO are differences of log-probabilities of whole sequences, and have their
    rounding."""
    names = [name]
    if name.removeprefix("eval_").startswith("rewards/"):
        names += [other for other in entry if "logps/" in other]
    return max(1.0, *(abs(entry[one]) for one in names))
