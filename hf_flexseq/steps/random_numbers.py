"""States of the random number generators, with which a second computation drops the same
values."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


def random_states() -> list[torch.Tensor]:
    """Return the states of the CPU's generator, and of the current GPU's."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


@contextmanager
def random_numbers_of(states: Sequence[torch.Tensor]) -> Iterator[None]:
    """Draw in the block the random numbers that followed on `random_states`, and after it go on
    from the present states."""
    devices = [torch.cuda.current_device()] if len(states) > 1 else []
    with torch.random.fork_rng(devices):
        torch.set_rng_state(states[0])
        if devices:
            torch.cuda.set_rng_state(states[1])
        yield
