"""The tuned numbers of the search: how much work it may do, and which candidates it starts from.

Each number trades seconds of the planned step against seconds of planning. The benchmark for both
is `scripts/benchmarks/planners.py` (distance to the lower bound and CPU seconds of
planning on batches of 512 lengths on 64 ranks, where the recipes were tuned). To tune a number
again, change it here, run the benchmark and compare both columns with its last result.

Work is bounded by counts, never by the clock, so that every machine makes the same plan.
"""

from dataclasses import dataclass

# Shares and factors are whole numbers of thousandths: integers decide alike on every machine.
PERMILLE = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchEffort:
    """The work that each stage of the search may do; `search/__init__` lists the stages."""

    # ---- the rounds over candidates (auto.py)

    charged_both_ways: int = 32
    """Sequences, at most, for which a second search leaves out what groups wait for."""
    kept: int = 1
    """Candidates whose targets the next round changes, and one more for each recipe."""
    completed_first: int = 6
    """Candidates that get their short sequences in the first round."""
    completed_later: int = 3
    """Candidates that get their short sequences in the second round."""
    change: int = 60
    """Per mille by which targets change after the first round. Three more rounds gained 0.03 % of
    the step, and took a fifth of planning."""
    promise_margin: int = 1005
    """Per mille of the objective of the worst kept candidate (the second best, or the third best
    where both recipes take part). A candidate whose promise is not below is not completed."""
    nearly_full: int = 950
    """Per mille of all ranks' memory, above which one more micro-batch is tried."""
    starts_with_rival: int = 4
    """Starting candidates where the search with fewer micro-batches has found a plan already."""
    hopeless: int = 1015
    """Per mille of that plan's objective, above which no more rounds are spent."""

    # ---- where candidates start (targets.py)

    full_chunk: int = 960
    """Per mille of a micro-batch's memory that a chunk "as full as memory allows" takes."""
    round_cells: int = 8_000_000
    """(candidate, micro-batch, block, long row) quadruples that a round may look at."""
    fewest_candidates: int = 4
    """Candidates of a round, however many quadruples they need."""
    forced_rows: int = 6
    """Longest rows whose block shapes are tried in every combination."""
    forced_cells_each: int = 20_000
    """(row, micro-batch, block) triples of one such combination, at most."""
    forced_cells: int = 400_000
    """(row, micro-batch, block) triples of all such combinations together, at most."""
    free_factors: tuple[int, ...] = (1000, 1020, 1050, 1100)
    """Per mille of the mean rank's seconds, at which the candidates of free ranks want to end."""
    crowded_from: float = 2.5
    """Sequences per rank and micro-batch, from which the recipe CROWDED takes part."""
    sparse_below: float = 3.0
    """Sequences per rank and micro-batch, below which the recipe SPARSE takes part."""

    # ---- short sequences and repairs (fill.py, repair.py)

    water_steps: int = 24
    """Halvings of the interval in which a water level lies: to 1 part in 2^24 of it."""
    repair_rounds: int = 100
    """Rounds of repairs over the micro-batches; on free ranks, single repairs."""
    reshape_cells: int = 300_000
    """(micro-batch, rank of a block) pairs that changes of degree may look at."""


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
class Setting:
    """A choice of long sequences, and of their placement."""

    fit: int
    """1 prefers blocks with little time left below the target (best fit), -1 with much of it."""
    long_above: int
    """Per mille of the mean target: a sequence that takes longer than that on one rank is long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The starting candidates for one density of sequences: every mix with every setting."""

    mixes: tuple[Mix, ...]
    """Targets to start from, the most promising first."""
    settings: tuple[Setting, ...]
    """Settings for each mix in lockstep."""
    free_settings: tuple[Setting, ...]
    """Settings for each end of the step that is tried for free ranks."""
    copies: int
    """Changed copies of a good candidate that a round tries, at most."""


EFFORT = SearchEffort()

# Many sequences for each rank and micro-batch: the short ones even out what the long ones leave.
CROWDED = Recipe(
    mixes=(
        Mix(full=True, chunk=900, factor=1040),
        Mix(full=True, chunk=700, factor=1020),
        Mix(full=False, chunk=800, factor=1040),
        Mix(full=True, chunk=1000, factor=1000),
        Mix(full=False, chunk=1000, factor=1040),
        Mix(full=True, chunk=300, factor=1000),
    ),
    settings=(
        Setting(fit=1, long_above=600),
        Setting(fit=-1, long_above=400),
        Setting(fit=1, long_above=250),
    ),
    free_settings=(
        Setting(fit=1, long_above=600),
        Setting(fit=-1, long_above=400),
        Setting(fit=1, long_above=250),
    ),
    copies=8,
)

# Few sequences for each rank and micro-batch: nearly all count as long, and targets are generous.
SPARSE = Recipe(
    mixes=(
        Mix(full=True, chunk=800, factor=1060),
        Mix(full=True, chunk=300, factor=1060),
        Mix(full=False, chunk=0, factor=1060),
        Mix(full=False, chunk=600, factor=1060),
        Mix(full=True, chunk=900, factor=1060),
        Mix(full=False, chunk=300, factor=1040),
        Mix(full=True, chunk=1000, factor=1060),
        Mix(full=True, chunk=600, factor=1060),
        Mix(full=True, chunk=850, factor=1030),
        Mix(full=True, chunk=900, factor=1100),
    ),
    settings=(Setting(fit=-1, long_above=120),),
    free_settings=(
        Setting(fit=-1, long_above=120),
        Setting(fit=1, long_above=120),
    ),
    copies=5,
)
