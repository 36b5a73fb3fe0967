"""Watch the user's code for changes of a micro-batch's labels, and for changes of gradients and
weights before the step's gradients are complete.

A micro-batch has parts of samples in one row, and its labels are shifted already: `labels` and
`shift_labels` are one tensor, and the model reads the second. A hook on the model may change them,
which would silently give another loss. Each of these changes raises a NotImplementedError that
says what to change.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from hf_flexseq.base.values import listed
from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.distributed.reduction import local
from hf_flexseq.distributed.transport import CpuGroup
from hf_flexseq.hf.model.facts import base_model
from hf_flexseq.steps.inputs import LABELS, Inputs
from hf_flexseq.steps.users_code import users_methods

SAMPLED = 1_000  # values of a parameter that are looked at
ROUNDING = 1e-6  # of a parameter's largest value: what remains of changes that are taken back


class LabelGuard:
    """Refuses calls of a trainer's model on a micro-batch with other labels than its own."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._noted: NotImplementedError | None = None
        self._who = f"{type(trainer).__name__} or a hook"

    def raise_together(self, cpu_group: CpuGroup) -> None:
        """Raise on all ranks the error that any rank has noted. Collective over the world."""
        with ErrorCapture() as watching:
            if self._noted is not None:
                raise self._noted
        self._noted = None
        watching.raise_on_all_ranks(cpu_group.gather_values, "running a micro-batch")

    @contextmanager
    def of(self, micro_batch: Inputs) -> Iterator[None]:
        """Refuse calls of the model inside the block without labels; note changed ones, maybe of
        one rank, for `raise_together`."""
        targets: torch.Tensor = micro_batch[LABELS[0]]  # [1, tokens]
        version = targets._version

        def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if kwargs.get("labels") is None or kwargs.get("seq_ctx") is None:
                raise NotImplementedError(
                    f"{self._who} calls the model without the labels or the seq_ctx of a "
                    "micro-batch, which has parts of samples: pass all inputs on"
                )
            is_same = targets._version == version
            if not is_same or not all(_equals(kwargs.get(name), targets) for name in LABELS):
                self._noted = NotImplementedError(
                    f"{self._who} changes the labels of a micro-batch, which are shifted and "
                    "parts of samples: change them in the dataset or in the data_collator"
                )

        base = base_model(self._trainer.model)
        with base.register_forward_pre_hook(check, with_kwargs=True):
            yield


@contextmanager
def no_gradients_yet(trainer: Trainer, model: nn.Module) -> Iterator[None]:
    """Refuse all use of gradients by a user's `training_step` inside the block, before all
    backwards of a step."""
    methods = users_methods(trainer, ("training_step",))
    if not methods:
        yield
        return
    empty = [p for p in model.parameters() if p.requires_grad and p.grad is None]
    for parameter in empty:
        parameter.grad = torch.zeros_like(parameter).as_subclass(_NoGradientYet)
    before = _versions(model)
    try:
        yield
        if before != _versions(model):
            raise used_gradients(methods)
    except _UsedTooEarly as error:
        raise used_gradients(methods) from error
    finally:
        for parameter in empty:
            parameter.grad = None


class WeightWatch:
    """Watches the weights while methods of the user's compute the losses of a step, between its
    two passes: both must run with equal weights."""

    def __init__(self, trainer: Trainer, parameters: Sequence[torch.Tensor]) -> None:
        self._methods = users_methods(trainer, ("training_step", "compute_loss"))
        self._parameters = parameters if self._methods else ()
        self._values = self._sample()
        self._allowed = [ROUNDING * one.abs().max() for one in self._values]

    def check(self) -> None:
        """Raise NotImplementedError if weights have changed, by more than is left where they are
        brought back by arithmetic."""
        moved = [
            (now - then).abs().max() > allowed  # False for NaN
            for now, then, allowed in zip(self._sample(), self._values, self._allowed, strict=True)
        ]
        if moved and bool(torch.stack(moved).any()):
            raise NotImplementedError(
                f"{listed(self._methods)} changes weights while the losses of a step are "
                "computed, whose batches run together, before and afterwards: change weights "
                "between steps, in on_step_begin or on_step_end, or in a module's forward"
            )

    def _sample(self) -> list[torch.Tensor]:
        """Return values of this rank's part of each parameter, [values] in float64: enough to show
        a change, where a pass over all of them would take a noticeable part of a step."""
        values = []
        with torch.no_grad():
            for parameter in self._parameters:
                # of ZeRO-3's shard, too, which is there between its gathers
                own = local(getattr(parameter, "ds_tensor", parameter)).flatten()
                sample = own[:: max(1, own.numel() // SAMPLED)]
                if sample.numel():  # FSDP leaves some ranks no rows of a small parameter
                    values.append(sample.to(torch.float64, copy=True))
        return values


class _UsedTooEarly(NotImplementedError):
    """A gradient was used before it was known."""


class _NoGradientYet(torch.Tensor):
    """A gradient that is not known yet: all but its form raises _UsedTooEarly."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(getattr(function, "__self__", None), "__name__", "")  # of an attribute
        if name not in ("_version", "shape", "dtype", "device"):
            raise _UsedTooEarly("the gradients of this step are not known yet")
        return super().__torch_function__(function, types, args, kwargs)


def used_gradients(methods: list[str]) -> NotImplementedError:
    """Return the refusal of gradients that some methods have read or changed."""
    return NotImplementedError(
        f"{listed(methods)} uses gradients before the step's gradients are complete: read and "
        "change them in the callback event on_pre_optimizer_step"
    )


def _steps_before(trainer: type, mixin: type) -> list[Any]:
    """Return each `training_step` of a trainer's class that comes before the mixin's."""
    classes = trainer.__mro__
    own = (vars(cls).get("training_step") for cls in classes[: classes.index(mixin)])
    return [step for step in own if step is not None]


def replaces_step(trainer: type, mixin: type) -> bool:
    """Tell if a `training_step` before the mixin's calls none behind it by `super()`."""
    for step in _steps_before(trainer, mixin):
        code = getattr(inspect.unwrap(step), "__code__", None)
        if code is None or not {"super", "__class__"} & {*code.co_names, *code.co_freevars}:
            return True
    return False


class StepInFront:
    """Watches a user's `training_step` before the mixin: gradients come with the last batch, and
    every batch runs once."""

    def __init__(self, trainer: Trainer, mixin: type) -> None:
        """mixin: the class before which a `training_step` may come."""
        self._trainer = trainer
        self._is_watched = bool(_steps_before(type(trainer), mixin))
        self._methods = users_methods(trainer, ("training_step",))
        self._after_step: list[Any] | None = None
        self._batches = 0  # of the step, which have not run
        self._weights: WeightWatch | None = None  # of the step's first batch

    def expect(self, batches: int) -> None:
        """Begin a step of so many batches."""
        self._batches = batches
        self._weights = None

    def count(self, model: nn.Module) -> None:
        """Count a batch that runs. Raises NotImplementedError for one more than the step has, and
        for weights that have changed since the step's first batch."""
        self._batches -= 1
        if self._batches < 0:
            raise NotImplementedError(
                f"{listed(self._methods) or 'training_step'} runs a batch again, after "
                "perturbing weights, say: a step's batches are planned together and run once"
            )
        if not self._is_watched:
            return
        if self._weights is not None:
            self._weights.check()
        elif self._batches:  # others follow
            trained = [one for one in model.parameters() if one.requires_grad]
            self._weights = WeightWatch(self._trainer, trained)

    def note(self, model: nn.Module, accumulation: int) -> None:
        """Note the gradients of a step; one batch alone is as under the plain Trainer."""
        if self._is_watched and accumulation > 1:
            self._after_step = _versions(model)

    def check(self, model: nn.Module) -> None:
        """Raise NotImplementedError if gradients have changed since then."""
        noted, self._after_step = self._after_step, None
        if noted is not None and noted != _versions(model):
            raise used_gradients(self._methods)


def _equals(given: torch.Tensor | None, targets: torch.Tensor) -> bool:
    """Tell if labels that the model is given are the targets [1, tokens] of its micro-batch."""
    if given is None or given.shape != targets.shape:
        return False
    return given is targets or torch.equal(given.to(targets.device), targets)


def _versions(model: nn.Module) -> list[Any]:
    """Return identity and version of each gradient, which change with it."""
    found: list[Any] = []
    for parameter in model.parameters():
        gradient = parameter.grad
        found.append(None if gradient is None else (id(gradient), gradient._version))
    return found
