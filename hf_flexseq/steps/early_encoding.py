"""Features of the next step's images, encoded beside the end of the current step.

A frozen tower whose parameters are whole on every rank does not depend on the current step. It
runs when the next step has been dispatched, with all work of the current one launched: on a GPU on
a stream of its own, so that it fills the time in which a rank waits for the gradients of others. A
step that is not dispatched before its turn, as in evaluations, encodes its images itself.

The stream allocates separate memory, beside the step's. When no memory is left for it, images are
encoded in the first micro-batch, in this step and in all later ones.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)

Weights = tuple[object, ...]
"""State of the parameters that features depend on; equal as long as none is seen to change."""


def weights_of(parameters: Sequence[torch.nn.Parameter]) -> Weights:
    """Return of each parameter its address, and how often it has been changed in place, except
    through its `data`, whose changes torch does not count."""
    return tuple((parameter.data_ptr(), parameter._version) for parameter in parameters)


def first_values(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """Return the first value of each parameter, [parameters], which tells of changes through their
    `data` as well."""
    firsts = []
    for parameter in parameters:
        first = parameter.detach()[(slice(0, 1),) * parameter.dim()]
        firsts.append(first.reshape(-1))
    return torch.cat(firsts)


@dataclass(frozen=True, slots=True)
class EarlyFeatures:
    """Features that were encoded ahead."""

    rows: torch.Tensor
    """[rows, width]"""
    weights: Weights
    """The tower's parameters when it encoded them."""
    done: "torch.cuda.Event | None"
    """Recorded when the rows are done; None on a CPU."""

    def take(self) -> torch.Tensor:
        """Return the rows for the current stream, [rows, width]."""
        if self.done is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.done)
            self.rows.record_stream(stream)
        return self.rows


class EarlyEncoder:
    """Encodes images beside the end of a step."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._weights: Weights | None = None  # of the last run
        self._has_room = True

    def encode(
        self,
        encode: Callable[[], torch.Tensor],
        weights: Weights,
        timing: AbstractContextManager[None],
    ) -> EarlyFeatures | None:
        """Return the features that `encode` makes, without gradients; None where memory does not
        suffice, and where it fails: the step will meet the error in its forward, as other errors.

        weights: of the tower. timing: surrounds the work on the device.
        """
        if not self._has_room:
            return None
        stream = self._stream
        if stream is not None and weights != self._weights:  # they may still be written
            stream.wait_stream(torch.cuda.current_stream())
            self._weights = weights
        aside = nullcontext() if stream is None else torch.cuda.stream(stream)
        try:
            with aside, torch.no_grad(), timing:
                rows = encode()
        except torch.OutOfMemoryError:
            self._has_room = False
            logger.info("images are encoded in each step: no memory is left to do it ahead")
            return None
        except Exception:
            return None
        return EarlyFeatures(rows, weights, None if stream is None else stream.record_event())
