"""The one way to replace attributes of objects that are not ours: on the object itself, where they
hide the class's attributes, for as long as a block runs or until an ExitStack is closed.

A patch is undone only if it is still in place: a later replacement by somebody else stays.
Rejected: a generator (`contextlib.contextmanager`), which would take the patch back when it
is forgotten.
"""

from typing import Any


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

    def __exit__(self, *error: object) -> None:
        for name, value in self._values.items():
            own = vars(self._owner)
            if name not in own or own[name] is not value:
                continue
            if name in self._former:
                setattr(self._owner, name, self._former[name])
            else:
                delattr(self._owner, name)
