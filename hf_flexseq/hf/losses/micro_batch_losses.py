"""A trainer's `compute_loss` on micro-batches: the step's router loss is added to its results, and
figures that it notes with every call become means over all target tokens of a step or an
evaluation, such as the token accuracy of TRL's SFTTrainer.

Such a trainer appends a figure of the batch, taken over all ranks, to a list in
`trainer._metrics[mode]`, and logs the mean of the list. On planned steps `compute_loss` runs once
for each micro-batch, and micro-batches have different numbers of target tokens: the mean of their
figures would depend on the plan. So the values that a step has appended become one, their mean
weighted by target tokens; an evaluation's values become one when it ends.

A list counts when it has grown by exactly one value for each micro-batch. Others are left alone:
SFTTrainer's `num_tokens`, for example, which it replaces. That one is freed of the dummy tokens
that ranks without work run.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import Trainer

from hf_flexseq.base.patches import Patch
from hf_flexseq.hf.model.router import RouterLoss

AUX_LOSS = "aux_loss"
"""Name of the router-loss figure, which has one value per step."""


class AddedRouterLoss:
    """Adds each micro-batch's share of the step's router loss to its loss."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._router: RouterLoss | None = None
        self._is_metric = False  # True if the trainer logs the router loss

    @contextmanager
    def adding(self, router: RouterLoss) -> Iterator[None]:
        """Add shares of `router` inside the block instead of SFTTrainer's own router loss. A
        nested block is a no-op."""
        if self._router is not None:
            yield
            return
        trainer = self._trainer
        own_loss = trainer.compute_loss
        # SFTTrainer's coefficient is not always the model's.
        adds_its_own = getattr(trainer, "aux_loss_enabled", False)
        router.coefficient = getattr(trainer, "router_aux_loss_coef", router.coefficient)
        # The mean over ranks is the loss, and a share belongs to one rank.
        factor = router.coefficient * trainer.accelerator.num_processes

        def compute_loss(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            found = own_loss(model, inputs, *args, **kwargs)
            if isinstance(found, tuple):  # loss, outputs
                return (found[0] + factor * router.share(), *found[1:])
            return found + factor * router.share()

        changes = {"aux_loss_enabled": False} if adds_its_own else {}
        with (
            Patch(trainer, compute_loss=compute_loss, **changes),
            Patch(self, _router=router, _is_metric=adds_its_own),
        ):
            yield

    def note(self, mode: str) -> None:
        """Append the router loss of a step to SFTTrainer's metrics. mode: "train" or "eval"."""
        if self._is_metric and self._router is not None and self._router.value is not None:
            self._trainer._metrics[mode][AUX_LOSS].append(float(self._router.value))


class TokenMeans:
    """Replaces the values of micro-batches in a trainer's lists by their weighted means."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer  # one of TRL's has more than a Trainer
        self._lengths: dict[str, int] = {}  # of the lists, when the step or evaluation began
        self._targets: list[int] = []  # of each micro-batch since then
        self._counted: int | None = None  # tokens that SFTTrainer had counted then

    def begin(self, mode: str) -> None:
        """Begin a training step, or an evaluation of several steps. mode: "train" or "eval"."""
        self._lengths = {name: len(values) for name, values in self._lists(mode).items()}
        self._targets = []
        self._counted = getattr(self._trainer, "_total_train_tokens", None)

    def add(self, targets: Sequence[int]) -> None:
        """Add a step. targets: of each micro-batch, in the order of the losses."""
        self._targets += targets

    def end(self, mode: str) -> None:
        """End the step or the evaluation: each list has one value of it."""
        for name, values in self._lists(mode).items():
            own = values[self._lengths.get(name, 0) :]
            if name != AUX_LOSS and own and len(own) == len(self._targets):
                values[-len(own) :] = [_mean(own, self._targets)]

    def count(self, tokens: int) -> None:
        """Count the tokens of a training step, over all ranks."""
        lists = self._lists("train")
        if self._counted is not None and "num_tokens" in lists:
            self._trainer._total_train_tokens = self._counted + tokens
            lists["num_tokens"][:] = [self._counted + tokens]

    def _lists(self, mode: str) -> dict[str, list[Any]]:
        """Return the trainer's own lists of figures, by name; none where it keeps none."""
        of_modes = getattr(self._trainer, "_metrics", None)
        of_mode = of_modes.get(mode) if isinstance(of_modes, Mapping) else None
        if not isinstance(of_mode, Mapping):
            return {}
        return {name: values for name, values in of_mode.items() if isinstance(values, list)}


def _mean(values: Sequence[Any], targets: Sequence[int]) -> Any:
    """Return the mean of values, numbers or tensors of one, weighted by target tokens; the plain
    mean if no value has any."""
    if len(values) == 1:
        return values[0]
    total = sum(targets)
    if not total:
        return sum(values) / len(values)
    # a figure of no token may be NaN
    return sum(value * n for value, n in zip(values, targets, strict=True) if n) / total
