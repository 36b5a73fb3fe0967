"""Operators of torch, seen as they run."""

from torch.utils._python_dispatch import TorchDispatchMode


class Noted(TorchDispatchMode):
    """Keeps in `found` what `note(operator, args, result)` says of each operator inside of it,
    unless that is None."""

    def __init__(self, note):
        super().__init__()
        self.note, self.found = note, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        said = self.note(function, args, result)
        if said is not None:
            self.found.append(said)
        return result
