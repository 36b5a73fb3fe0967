"""A planted pickle: whoever loads it leaves a mark."""

import os


class Planted:
    """Writes a file named after the process into a folder when it is unpickled."""

    def __init__(self, folder):
        self.command = f"touch {folder}/ran-in-$$"

    def __reduce__(self):
        return os.system, (self.command,)


def marks(folder):
    """The files that planted pickles have written."""
    return list(folder.glob("ran-in-*"))
