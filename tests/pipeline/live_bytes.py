"""How many bytes are alive: of all tensors that were made inside a block, by their storages."""

import weakref

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered; a storage counts until nothing refers to it."""

    def __init__(self):
        super().__init__()
        self.bytes = 0
        self.peak = 0  # the most so far
        self._storages = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        # views and in-place results
        known = {id(x.untyped_storage()) for x in _tensors((args, kwargs))}
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            if id(storage) not in known and storage not in self._storages:
                self._add(storage)
        return made

    def of(self, tensors):
        """Bytes of those of `tensors` that were made inside."""
        storages = {
            id(s): s.nbytes()
            for s in (x.untyped_storage() for x in tensors)
            if s in self._storages
        }
        return sum(storages.values())

    def _add(self, storage):
        self._storages[storage] = True
        self.bytes += storage.nbytes()
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._drop, storage.nbytes())

    def _drop(self, size):
        self.bytes -= size


def _tensors(tree):
    return [x for x in tree_leaves(tree) if hasattr(x, "untyped_storage")]
