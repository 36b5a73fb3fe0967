"""The one way to replace attributes of objects that are not ours: on the object itself, where they
hide the class's attributes, for as long as a block runs or until an ExitStack is closed.

A patch is undone only if it is still in place: a later replacement by somebody else stays.
Rejected: a generator (`contextlib.contextmanager`), which would take the patch back when it
is forgotten.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

_numbers = count()
_entered: "WeakValueDictionary[int, Patch]" = WeakValueDictionary()  # in their order


class Patch:
    """Gives an object other attributes inside a block."""

    def __init__(self, owner: Any, /, **values: Any) -> None:
        self._owner = owner
        self._values = values
        self._former: dict[str, Any] = {}

    def __enter__(self) -> None:
        own = vars(self._owner)
        self._former = {name: own[name] for name in self._values if name in own}
        for name, value in self._values.items():
            setattr(self._owner, name, value)
        self._number = next(_numbers)
        _entered[self._number] = self

    def __exit__(self, *error: object) -> None:
        _entered.pop(self._number, None)
        for name, value in self._values.items():
            own = vars(self._owner)
            if name not in own or own[name] is not value:
                continue
            if name in self._former:
                setattr(self._owner, name, self._former[name])
            else:
                delattr(self._owner, name)

    def is_in_place(self, owners: Collection[int]) -> bool:
        """Tell if the patch is of an owner and still in place. owners: ids of objects."""
        if id(self._owner) not in owners:
            return False
        own = vars(self._owner)
        return all(name in own and own[name] is value for name, value in self._values.items())


@contextmanager
def unpatched(owners: Iterable[Any]) -> Iterator[None]:
    """Give objects their own attributes back inside a block."""
    numbers = {id(owner) for owner in owners}
    in_place = [patch for patch in list(_entered.values()) if patch.is_in_place(numbers)]
    with ExitStack() as again:
        for patch in reversed(in_place):
            patch.__exit__()
            again.callback(patch.__enter__)
        yield
