"""Losses and gradients that are not finite, noticed without making the host wait for the device.

1. `take`, after a step's last backward and before the optimizer changes the weights: one flag for
   the loss and one for each gradient, made on the device and copied to the host asynchronously.
2. `settle`, when the optimizer step is done: a step that fp16's loss scaling made it skip does
   not count.
3. `report` and `judge`, at the end of the next step or before a checkpoint: each rank may have
   other rows (FSDP) or other layers (pipelines), so ranks gather their findings. All of them
   raise, or rank 0 warns.

A gradient's flag comes from its 2-norm, which is infinite also where elements are finite but so
large (1e19) that clipping to a norm would make zeros of all gradients.

Rejected: names only if the norm of all gradients is not finite, since gradients are gone by then;
largest elements instead of norms, which take a CPU ten times as long.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_flexseq.base.values import listed
from hf_flexseq.distributed.reduction import local

logger = logging.getLogger(__name__)

LOSS = "the loss"

Report = dict[str, Any]  # of one rank: the step's number, and names of what is not finite


class NonfiniteWatch:
    """Watches the losses and gradients of optimizer steps on this rank."""

    def __init__(self, on_nonfinite: str, rank: int) -> None:
        """on_nonfinite: `raise` or `warn`."""
        self._raises = on_nonfinite == "raise"
        self._rank = rank
        self._taken: _Flags | None = None  # before its optimizer step
        self._due: _Flags | None = None  # after it, and not yet reported

    def forget(self) -> None:
        """Forget all steps that have not been reported."""
        self._taken = None
        self._due = None

    def take(self, step: int, loss: torch.Tensor, gradients: Mapping[str, torch.Tensor]) -> None:
        """Make the flags of a step without waiting: its loss, a scalar, and gradients by name."""
        self._taken = _Flags(step, loss, gradients)

    def settle(self, *, skipped: bool) -> None:
        """Count the last flagged step. skipped: True if loss scaling skipped its optimizer."""
        if self._taken is not None and not skipped:
            self._due = self._taken
        self._taken = None

    def report(self) -> Report | None:
        """Return this rank's findings in the settled step, as a JSON value, or None."""
        due = self._due
        self._due = None
        names = due.names() if due is not None else []
        return {"step": due.step, "names": names} if due is not None and names else None

    def judge(self, reports: Sequence[Report | None]) -> None:
        """Raise FloatingPointError, or warn, if a rank has found something. reports: of all
        ranks."""
        found = [report for report in reports if report is not None]
        if not found:
            return
        names: dict[str, None] = {}  # in order, each once
        for report in found:
            names |= dict.fromkeys(report["names"])
        message = _message(found[0]["step"], list(names))
        if self._raises:
            raise FloatingPointError(f"{message}; on_nonfinite='warn' would go on")
        if self._rank == 0:
            logger.warning("%s", message)


class _Flags:
    """Flags of one step, on their way from the device."""

    def __init__(
        self, step: int, loss: torch.Tensor, gradients: Mapping[str, torch.Tensor]
    ) -> None:
        self.step = step
        self._names, on_device = _flagged({LOSS: loss, **gradients})
        self._flags = on_device.to("cpu", non_blocking=True)  # pinned where it has to be
        self._copied: torch.cuda.Event | None = None
        if on_device.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def names(self) -> list[str]:
        """Return the names of values that are not finite; wait until the flags are here."""
        if self._copied is not None:
            self._copied.synchronize()
        flags = self._flags.tolist()
        return [name for name, flag in zip(self._names, flags, strict=True) if flag]


def _flagged(tensors: Mapping[str, torch.Tensor]) -> tuple[list[str], torch.Tensor]:
    """Return tensors' names, and flags, bool [tensors] on a device: True if not finite."""
    # 1. one launch for all tensors of a kind
    kinds: dict[Any, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        own = local(tensor.detach())  # of this rank
        if own.is_sparse:
            own = own._values()
        kinds.setdefault((own.device, own.dtype), {})[name] = own

    # 2. their flags, bool [tensors of a kind] each
    names: list[str] = []
    flags: list[torch.Tensor] = []
    for of_kind in kinds.values():
        names += of_kind
        flags.append(_not_finite(list(of_kind.values())))

    # 3. together; a share that is kept on the host is there already
    device = flags[0].device
    return names, torch.cat([flag.to(device, non_blocking=True) for flag in flags])


def _not_finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return, bool [tensors], which tensors of one device and dtype are not finite."""
    dtype = tensors[0].dtype
    if dtype == torch.float16:
        dtype = torch.float32  # float16 has no room for the norm of many numbers
    norms = torch._foreach_norm(tensors, 2, dtype=dtype)
    return ~torch.isfinite(torch.stack(norms))


def _message(step: int, names: Sequence[str]) -> str:
    """Return one line that says where a step is not finite, and what to do."""
    places = []
    if LOSS in names:
        places.append(LOSS)
    parameters = [name for name in names if name != LOSS]
    if parameters:
        places.append(f"the gradients of {listed(parameters)}")
        advice = (
            "go on from the last checkpoint, with a lower learning rate or without that step's "
            "data"
        )
    else:
        places.append("no gradient")
        advice = (
            "look for a division by 0 or a logarithm of 0 in what computes the loss, and for a "
            "batch without what it needs in that step's data"
        )
    return (
        f"optimizer step {step}, counted from 0: NaN or infinity in {' and in '.join(places)}; "
        f"{advice}"
    )
