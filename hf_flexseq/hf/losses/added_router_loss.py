"""Adds the step's router loss to the result of `compute_loss` on each micro-batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import Trainer

from hf_flexseq.hf.model.router import RouterLoss


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
        own = vars(trainer)  # the user may have set `compute_loss` on the instance
        former = own.get("compute_loss")
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

        own["compute_loss"] = compute_loss
        self._router = router
        self._is_metric = adds_its_own
        if adds_its_own:
            trainer.aux_loss_enabled = False
        try:
            yield
        finally:
            del own["compute_loss"]
            if former is not None:
                own["compute_loss"] = former
            if adds_its_own:
                trainer.aux_loss_enabled = True
            self._router = None
            self._is_metric = False

    def note(self, mode: str) -> None:
        """Append the router loss of a step to SFTTrainer's metrics. mode: "train" or "eval"."""
        if self._is_metric and self._router is not None and self._router.value is not None:
            self._trainer._metrics[mode]["aux_loss"].append(float(self._router.value))
