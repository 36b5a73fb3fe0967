"""How much memory the machine has for activations.

A container may have less than its machine, and a job less than its node; Linux says so in the
files of the control groups that the process is in.
"""

from collections.abc import Iterator
from pathlib import Path

import psutil

from hf_flexseq.memory.pages import GIB

# Of the memory that is available when a model is attached, for activations of all ranks.
SHARE = 0.5

_OWN_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
# limit, bytes in use, and those of them that files are cached in, by the version of the groups
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def total_bytes() -> int:
    """Return the bytes of memory that this machine, container or job has."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits())])


def available_bytes() -> int:
    """Return the bytes of memory that are not in use; cached files can leave."""
    left = [max(0, limit - used) for limit, used in _limits()]
    return min([psutil.virtual_memory().available, *left])


def _limits() -> Iterator[tuple[int, int]]:
    """Yield the limit of each control group that this process is in, and its bytes in use."""
    groups = _OWN_GROUPS.read_text().splitlines() if _OWN_GROUPS.exists() else []
    for line in groups:
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _ROOT / "memory" if controllers else _ROOT
        group = root / name.lstrip("/")
        # in a container the name may be that of the machine, where the container sees its own root
        for folder in (root, *(one for one in (group, *group.parents) if root in one.parents)):
            limit, used, cached = _VERSION_1 if controllers else _VERSION_2
            try:
                most, now = ((folder / name).read_text().strip() for name in (limit, used))
                lines = (folder / "memory.stat").read_text().splitlines()
            except OSError:
                continue  # the root of version 2 has none of these
            if most.isdigit():  # else "max"
                stat = dict(line.split() for line in lines)
                yield int(most), int(now) - int(stat.get(cached, 0))


def budget_bytes(asked_gib: float | None, ranks_per_node: int) -> int:
    """Return the most bytes of the host for activations of one rank.

    asked_gib: `host_memory_gib`; None for a share of the available memory. ranks_per_node: ranks
    that share the machine. Raises ValueError for more than the machine has.
    """
    if asked_gib is None:
        return int(SHARE * available_bytes()) // ranks_per_node
    total = total_bytes()
    if asked_gib * GIB * ranks_per_node > total:
        raise ValueError(
            f"host_memory_gib={asked_gib:g} for each of {ranks_per_node} ranks: the machine has "
            f"{total / GIB:.1f} GiB, so set it to {total / GIB / ranks_per_node:.1f} at most"
        )
    return int(asked_gib * GIB)
