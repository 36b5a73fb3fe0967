"""The tuned numbers of the search: how much work it may do, and which candidates it starts from.

Each number trades seconds of the planned step against seconds of planning. The benchmark for both
is `scripts/benchmarks/planners.py` (distance to the lower bound and CPU seconds of planning on
batches of 512 lengths on 64 ranks). To tune a number again, change it here, run the benchmark and
compare both columns with its last result.

Work is bounded by counts, never by the clock, so that every machine makes the same plan. Shares
and factors are whole numbers of thousandths, since integers decide alike on every machine.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """A rule for the targets of the micro-batches: a mix of two divisions of the total time."""

    full: bool
    """True for chunks of sequences as full as memory allows, False for chunks of equal tokens."""
    chunk: int
    """Per mille of a target that follows the chunk's time; the rest is an equal share."""
    factor: int
    """Per mille that all targets are multiplied with; above 1000 leaves some time for bad fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchEffort:
    """The work that each stage of the search may do; `search/__init__` lists the stages."""

    # ---- where candidates start (targets.py)

    mixes: tuple[Mix, ...] = (
        Mix(full=True, chunk=800, factor=1100),
        Mix(full=False, chunk=900, factor=1060),
        Mix(full=False, chunk=700, factor=1030),
        Mix(full=False, chunk=1100, factor=1100),
        Mix(full=True, chunk=700, factor=1060),
        Mix(full=False, chunk=500, factor=1100),
        Mix(full=False, chunk=1000, factor=1030),
        Mix(full=True, chunk=900, factor=1030),
        Mix(full=True, chunk=1100, factor=1100),
        Mix(full=True, chunk=1000, factor=1100),
        Mix(full=True, chunk=300, factor=1000),
        Mix(full=False, chunk=800, factor=1020),
        Mix(full=True, chunk=900, factor=1040),
        Mix(full=False, chunk=300, factor=1040),
    )
    """Targets to start from, the most promising first."""
    long_above: int = 350
    """Per mille of the first mix's shortest target: a sequence that takes longer than that on one
    rank is long."""
    full_chunk: int = 960
    """Per mille of a micro-batch's memory that a chunk "as full as memory allows" takes."""
    round_cells: int = 8_000_000
    """(candidate, micro-batch, block, long row) quadruples that placing may look at."""
    fewest_candidates: int = 4
    """Candidates, however many quadruples they need."""
    forced_rows: int = 6
    """Longest rows whose block shapes are tried in every combination."""
    forced_cells_each: int = 20_000
    """(row, micro-batch, block) triples of one such combination, at most."""
    forced_cells: int = 400_000
    """(row, micro-batch, block) triples of all such combinations together, at most."""

    # ---- short sequences and repairs (fill.py, repair.py)

    completed: int = 14
    """Candidates that get their short sequences."""
    repair_rounds: int = 100
    """Rounds of repairs over the micro-batches."""
    idle_again: int = 40
    """Per mille of a micro-batch that its ranks idle, above which it is searched by itself."""


EFFORT = SearchEffort()
