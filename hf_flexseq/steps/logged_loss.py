"""The loss that a Trainer logs of steps whose loss is NaN or infinite.

The Trainer adds up the losses of batches between two log lines. With `logging_nan_inf_filter` it
replaces a loss that is not finite by its sum so far, divided by 1 + the steps since the last line.
It asks this of every rank's own loss.

A rank's loss of a planned step is its share, of whatever tokens the plan has given it: a NaN would
be taken out of the share of one rank, and leave the others' in. So the steps' losses are put
together from all shares, and the filter is asked again.
"""

import torch

from hf_flexseq.distributed.communicator import Communicator


def filtered(loss: torch.Tensor, *, before: torch.Tensor, steps: int) -> torch.Tensor:
    """Return the number that the Trainer's filter adds for a loss, a scalar, after `steps` with
    the sum `before`."""
    return torch.where(torch.isfinite(loss), loss, before / (1 + steps))


class StepLosses:
    """Keeps this rank's shares of the losses since the last log line."""

    def __init__(self) -> None:
        self._shares: list[torch.Tensor] = []  # of each step, scalars

    def add(self, share: torch.Tensor, *, steps: int) -> None:
        """Keep the share of one more step. steps: since the last log line; 0 drops the shares that
        an interrupted training left."""
        if steps == 0:
            self._shares = []
        self._shares.append(share)

    def settle(self, logged: torch.Tensor, communicator: Communicator) -> None:
        """Replace the Trainer's sum since the last log line by the sum over whole steps, if the
        loss of a step is not finite. Collective over the world. logged: a scalar, averaged over
        ranks later."""
        if not self._shares:
            return
        losses = torch.stack(self._shares).double().cpu()  # [steps]
        self._shares = []
        communicator.cpu_group.all_reduce(losses)
        losses /= communicator.world_size
        if torch.isfinite(losses).all():
            return
        total = torch.zeros((), dtype=losses.dtype)
        for steps, loss in enumerate(losses):
            total += filtered(loss, before=total, steps=steps)
        logged.fill_(float(total))
