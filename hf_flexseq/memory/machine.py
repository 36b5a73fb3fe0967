"""How much memory the machine has for activations.

A container may have less than its machine; Linux says so in the files of its control group. Where
nothing says how much there is, nothing is known.
"""

from pathlib import Path

from hf_flexseq.memory.pages import GIB

# Of the memory that is available when a model is attached, for activations of all ranks.
SHARE = 0.5

_MEMINFO = Path("/proc/meminfo")
_GROUPS = (  # (limit, in use) of a control group, by its version
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def total_bytes() -> int | None:
    """Return the bytes of memory that this machine or container has; None if unknown."""
    return _least([_meminfo("MemTotal"), *(_number(limit) for limit, _ in _GROUPS)])


def available_bytes() -> int | None:
    """Return the bytes of memory that are not in use; None if unknown."""
    left = [_meminfo("MemAvailable")]
    for limit, used in _GROUPS:
        most = _number(limit)
        now = _number(used)
        if most is not None and now is not None:
            left.append(max(0, most - now))
    return _least(left)


def budget_bytes(asked_gib: float | None, ranks_per_node: int) -> int:
    """Return the most bytes of the host for activations of one rank.

    asked_gib: `host_memory_gib`; None for a share of the available memory, 0 bytes where that is
    not known. ranks_per_node: ranks that share the machine. Raises ValueError for more than the
    machine has.
    """
    if asked_gib is None:
        available = available_bytes()
        return 0 if available is None else int(SHARE * available) // ranks_per_node
    total = total_bytes()
    if total is not None and asked_gib * GIB * ranks_per_node > total:
        raise ValueError(
            f"host_memory_gib={asked_gib:g} for each of {ranks_per_node} ranks: the machine has "
            f"{total / GIB:.1f} GiB, so set it to {total / GIB / ranks_per_node:.1f} at most"
        )
    return int(asked_gib * GIB)


def _least(values: list[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _meminfo(name: str) -> int | None:
    """Return a figure of the machine in bytes; None where there is none."""
    if not _MEMINFO.exists():
        return None
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _number(path: Path) -> int | None:
    """Return the number in a file; None without a file, and where it says `max`."""
    if not path.exists():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdigit() else None
