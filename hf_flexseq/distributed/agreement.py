"""Makes an error that one rank alone has met an error of all ranks.

A rank that raised alone would leave the others waiting until their timeout, and they would never
learn the reason.

    with ErrorCapture() as reading:
        text = Path(name).read_text()
    reading.raise_on_all_ranks(cpu_group.gather_values, "reading the file")

1. `ErrorCapture` keeps the error that its block raises. The block exchanges nothing.
2. All ranks show each other their kept errors, in an extra exchange or, where an exchange follows
   anyway, only after that one has told them that some rank has failed.
3. The error of the first rank that failed is raised on all of them, in one line.

Rejected: an exchange at the end of the block itself, which would hide a collective in the closing
of a `with`, and cost one where none is needed.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any

# Values of all ranks, by rank, of this rank's one: plain JSON values. Collective.
Gather = Callable[[Any], list[Any]]

CAUSE_CHARACTERS = 240  # of another rank's error; its own rank shows all of it
KINDS = {kind.__name__: kind for kind in (NotImplementedError, ValueError, RuntimeError)}


class ErrorCapture:
    """Keeps the error of its block for `raise_on_all_ranks`. A block whose error need not reach
    anybody has `contextlib.suppress` instead.

    Interrupts and exits are not errors of the block: they are raised at once.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> "ErrorCapture":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> bool:
        """Keep the error. Whatever a user's dataset or collator raises counts as one."""
        if not isinstance(error, Exception):
            return False
        self.error = error
        return True

    def raise_on_all_ranks(self, gather: Gather, doing: str) -> None:
        """Return when no rank has failed; otherwise raise on all ranks. Collective over the world.

        The error names the first rank that failed, its task (`doing`), and its cause; on a rank
        that failed its own error is the cause of it. Where all ranks have failed alike each raises
        its own error, as it is; so does a rank that the others do not answer, which may wait for
        it somewhere else.
        """
        own = None if self.error is None else _report(self.error)
        try:
            reports = gather(own)
        except RuntimeError as lost:
            if self.error is None:
                raise
            raise self.error from lost
        failed = [rank for rank, report in enumerate(reports) if report is not None]
        if not failed:
            return
        first = reports[failed[0]]
        if self.error is not None and all(report == first for report in reports):
            raise self.error
        kind, cause = first
        raise KINDS[kind](f"rank {failed[0]}, {doing}: {cause}") from self.error


def _report(error: Exception) -> list[str]:
    """Return the name of the kind of error to raise, and its cause in one line."""
    text = _one_line(str(error))
    for kind in (NotImplementedError, ValueError):
        if isinstance(error, kind):
            return [kind.__name__, text]
    if type(error) is not RuntimeError:
        text = f"{type(error).__name__}: {text}"
    return [RuntimeError.__name__, text]


def _one_line(text: str) -> str:
    """Return a message in one line: the first and the last of several lines."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1:
        lines = [lines[0], lines[-1]]
    line = " ... ".join(lines)
    if len(line) > CAUSE_CHARACTERS:
        line = line[: CAUSE_CHARACTERS - 3] + "..."
    return line
