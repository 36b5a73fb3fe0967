"""Correct a cost model by the seconds of steps that have run.

A cost model's seconds are a sum of terms (`terms.py`), and each term gets one factor. Every
micro-batch is one equation for the factors: the terms that the estimate has for it, and the
seconds that it took.

Ranks that *meet* in a micro-batch, in groups of several ranks or under `lockstep` all together,
wait for each other in every layer and take as long as the slowest of them. A rank's measurement
begins when it arrives, and may include waiting for others: a meeting begins when its last rank
arrives, by the sums of each rank's earlier measurements.

The factors minimise the squared relative errors of the equations, where large errors count
linearly (Huber), plus a penalty on each factor's distance from the common one, by which the
estimate is too low or too high as a whole. Micro-batches that are all alike say nothing of single
terms and move the common factor alone: the estimate decides the ratios then.

The penalty counts a factor's distance times its term's share of the seconds: launches and links
of a group may take many times their estimate, at no higher penalty than a few percent of a linear
layer. With a penalty on bare distances such terms kept their estimate, and steps of five small
models were off by 5.2 % instead of 4.1 % on average at the median.

Rejected: SciPy's `nnls`, a dependency for thirty lines. Rejected: clipping of plain least squares,
whose other unknowns then compensate for the clipped ones.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.base.topology import Topology
from hf_flexseq.base.values import duration, items, quoted
from hf_flexseq.cost.kernels import FloatArray
from hf_flexseq.cost.lengths import lengths_of
from hf_flexseq.cost.model import TERMS, CostModel
from hf_flexseq.cost.peak import with_measured_peak
from hf_flexseq.cost.terms import scaled, term_seconds
from hf_flexseq.plan import MicroBatch, Plan, check
from hf_flexseq.plan.files import RecordedStep
from hf_flexseq.plan.options import SYNCS

logger = logging.getLogger(__name__)

# The vision tower is a term of whole steps; no micro-batch has its images to itself.
ALL_TERMS = (*TERMS, "tower")

# What a correction multiplies: all terms, and the bytes of a token (`peak.py`).
FACTORS = (*ALL_TERMS, "memory")
TOWER, MEMORY = len(ALL_TERMS) - 1, len(ALL_TERMS)

# Weight of the penalty, as that of so many equations, and the least share that a term counts with.
# Tuned on traces of `scripts/benchmarks/online.py`.
PRIOR, LEAST_SHARE = 1.0, 0.02
# Factors at least, so that what the estimate has can be told again from what was corrected.
LEAST = 1e-3
# Relative errors from which on they count linearly, in median errors, and at least.
HUBER, LEAST_HUBER = 2.0, 0.05
ROUNDS = 10  # of weights for large errors


class Observation(NamedTuple):
    """The estimated terms of a meeting, or of a step, and its measured seconds."""

    terms: FloatArray
    """[all terms] seconds by the estimate."""
    seconds: float


class Correction(NamedTuple):
    """Factors of the estimate's terms."""

    factors: tuple[float, ...]
    """[all terms], none negative."""
    error: float
    """Median relative error on the observations."""
    seen: tuple[bool, ...]
    """[all terms] whether an observation has the term; the others have the common factor."""

    def text(self) -> str:
        """Return the factors of seen terms, and the error, in words."""
        of_terms = zip(ALL_TERMS, self.factors, self.seen, strict=True)
        named = [f"{name} x {factor:.3g}" for name, factor, is_seen in of_terms if is_seen]
        return (
            f"the estimate with {', '.join(named)}; off by {100 * self.error:.0f} % at the median "
            "of their micro-batches"
        )


def corrected(cost: CostModel, factors: Sequence[float]) -> CostModel:
    """Return `cost` with each of its terms, and the bytes per token, multiplied by its factor.

    factors: [FACTORS]
    """
    cost = with_measured_peak(scaled(cost, factors[:TOWER]), factors[MEMORY])
    tower, factor = cost.tower, factors[TOWER]
    if tower is None:
        return cost
    tower = replace(tower, patch_s=factor * tower.patch_s, pair_s=factor * tower.pair_s)
    return replace(cost, tower=tower)


# ---- what ranks have measured


def meetings(micro_batch: MicroBatch, world_size: int, sync: str) -> list[tuple[int, int]]:
    """Return the ranks [start, stop) that wait for each other in a micro-batch, directly or
    through others, ascending. Ranks without a sequence are in none under `free`."""
    if sync == "lockstep":
        return [(0, world_size)]
    found: list[tuple[int, int]] = []
    for start, stop in sorted((group.start, group.stop) for group in micro_batch.groups):
        if found and start < found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def meeting_seconds(
    micro_batches: Sequence[MicroBatch], by_rank: FloatArray, sync: str
) -> list[list[float]]:
    """Return the seconds of the meetings of each micro-batch.

    by_rank: [world_size, micro-batches] seconds that each rank has measured. sync: see `meetings`.
    """
    ends = np.cumsum(by_rank, axis=1)
    starts = ends - by_rank
    seconds = []
    for index, micro_batch in enumerate(micro_batches):
        bounds = np.array(meetings(micro_batch, len(by_rank), sync)).ravel()
        first = _most_between(starts[:, index], bounds)
        seconds.append((_most_between(ends[:, index], bounds) - first).tolist())
    return seconds


def _most_between(values: FloatArray, bounds: NDArray[np.int64]) -> FloatArray:
    """Return the most of the values of each meeting, [meetings]. values: [world_size]. bounds:
    [2 meetings], ascending."""
    padded = np.append(values, 0.0)  # a bound may be behind the last rank
    most: FloatArray = np.maximum.reduceat(padded, bounds)[::2]
    return most


class MeasuredStep(NamedTuple):
    """A step that has run."""

    micro_batches: Sequence[MicroBatch]
    lengths: Sequence[int]
    """Tokens per sequence, by id, with their shares; see `cost/lengths.py`."""
    sync: str
    seconds: Sequence[Sequence[float]]
    """Of each meeting of each micro-batch, see `meeting_seconds`."""
    tower_s: float = 0.0
    """Estimated for the step's images."""
    is_whole: bool = False
    """True where micro-batches have run more than once."""

    @classmethod
    def of_trace(cls, step: RecordedStep, topology: Topology) -> "MeasuredStep":
        """Return a step of a plan trace. Raises ValueError for one without the seconds of its
        meetings, or that another topology ran."""
        plan = step.plan
        if not isinstance(plan, Plan) or step.learned is None:
            raise ValueError(
                f"step {step.number} has no seconds of meetings: give the trace of a run in "
                "groups, by this version of hf_flexseq"
            )
        check(plan, topology)
        sync = step.learned.get("sync")
        if sync not in SYNCS:
            raise ValueError(f"step {step.number}: sync={quoted(sync)}: must be one of {SYNCS}")
        seconds = []
        batches = items("meetings_s", step.learned.get("meetings_s"))
        for micro_batch, given in zip(plan.micro_batches, batches, strict=False):
            count = len(meetings(micro_batch, topology.world_size, sync))
            of_batch = [one for one in items("meetings_s", given) if isinstance(one, int | float)]
            if len(of_batch) != count:
                break
            seconds.append(of_batch)
        if len(seconds) != len(plan.micro_batches):
            raise ValueError(f"step {step.number}: meetings_s are not of its plan on {topology}")
        tower_s = duration("tower_s", step.learned.get("tower_s", 0.0))
        return cls(plan.micro_batches, lengths_of(plan), sync, seconds, tower_s, step.passes > 1)

    def observations(self, cost: CostModel, topology: Topology) -> list[Observation]:
        """Return an observation of each meeting, with its terms by the estimate `cost`; one of the
        whole step where its parts are not known, as with images, which are encoded within some
        micro-batches."""
        found = []
        longest = []  # of each micro-batch
        for micro_batch, of_batch in zip(self.micro_batches, self.seconds, strict=True):
            terms = term_seconds(cost, micro_batch, self.lengths, topology)  # [world_size, terms]
            of_ranks = meetings(micro_batch, topology.world_size, self.sync)
            for (start, stop), measured in zip(of_ranks, of_batch, strict=True):
                slowest = start + int(terms[start:stop].sum(axis=1).argmax())
                found.append(Observation(np.append(terms[slowest], 0.0), measured))
            longest.append(max(found[-len(of_batch) :], key=lambda one: one.terms.sum()).terms)
        if not self.tower_s and not self.is_whole:
            return found
        together = np.sum(longest, axis=0)
        together[-1] = self.tower_s
        return [Observation(together, sum(map(max, self.seconds)))]


def usable(observations: Sequence[Observation]) -> list[Observation]:
    """Return the observations with seconds to learn from, and say how many have none."""
    good = [one for one in observations if np.isfinite(one.seconds) and one.seconds > 0]
    if len(good) < len(observations):
        logger.warning(
            "%d of %d micro-batches are left out of the fit: their measured seconds are zero, "
            "negative or not finite",
            len(observations) - len(good),
            len(observations),
        )
    return good


def learned_from(
    steps: Sequence[RecordedStep], cost: CostModel, topology: Topology
) -> tuple[CostModel, Correction]:
    """Return `cost` as corrected by the steps of a plan trace, and the correction. Raises
    ValueError for a trace without any seconds, or of another topology."""
    observations: list[Observation] = []
    for step in steps:
        observations += MeasuredStep.of_trace(step, topology).observations(cost, topology)
    correction = fit(usable(observations))
    return corrected(cost, (*correction.factors, 1.0)), correction


# ---- the fit


def fit(observations: Sequence[Observation]) -> Correction:
    """Return the factors of the terms that fit the estimate to the observed seconds. Raises
    ValueError without an observation."""
    if not observations:
        raise ValueError("no micro-batch has seconds to fit a cost model to")
    terms = np.array([one.terms for one in observations])  # [observations, all terms]
    seconds = np.array([one.seconds for one in observations])
    common = float(np.median(seconds / terms.sum(axis=1)))
    rows = common * terms / seconds[:, None]  # with relative factors they sum up to 1
    shares = np.sqrt(np.mean(rows**2, axis=0))  # [all terms]
    prior = np.diag(np.sqrt(PRIOR) * np.maximum(LEAST_SHARE, shares))
    relative = np.ones(len(shares))
    for _ in range(ROUNDS):
        errors = np.abs(rows @ relative - 1)
        bound = max(LEAST_HUBER, HUBER * float(np.median(errors)))
        weights = np.sqrt(np.minimum(1, bound / np.maximum(errors, 1e-12)))
        left = np.vstack([weights[:, None] * rows, prior])
        right = np.concatenate([weights, np.diag(prior)])
        relative = nnls(left, right)
    errors = np.abs(rows @ relative - 1)
    factors = tuple((common * np.maximum(LEAST, relative)).tolist())
    return Correction(factors, float(np.median(errors)), tuple((shares > 0).tolist()))


def nnls(rows: FloatArray, seconds: FloatArray) -> FloatArray:
    """Return the x >= 0, [unknowns], that minimises ||rows x - seconds||, by Lawson and Hanson.

    rows: [equations, unknowns]. seconds: [equations].
    """
    # Columns differ by many orders of magnitude (a constant, a squared length): scaled to 1.
    scale = np.maximum(np.abs(rows).max(axis=0), np.finfo(np.float64).tiny)  # [unknowns]
    matrix = rows / scale
    x = np.zeros(rows.shape[1])
    free = np.zeros(rows.shape[1], dtype=bool)  # which unknowns may be positive
    for _ in range(10 * len(x)):
        slope = matrix.T @ (seconds - matrix @ x)  # of the squared error, downwards
        slope[free] = 0.0
        if slope.max() <= 1e-10 * np.abs(seconds).max():
            break
        free[slope.argmax()] = True
        while True:
            wanted = np.zeros_like(x)
            wanted[free] = np.linalg.lstsq(matrix[:, free], seconds, rcond=None)[0]
            negative = free & (wanted < 0)
            if not negative.any():
                break
            # Go towards `wanted` until the first unknown is 0, and leave that one there.
            step = (x[negative] / (x[negative] - wanted[negative])).min(initial=1.0)
            x = x + step * (wanted - x)
            free &= ~(negative & (x <= 1e-14 * x.max()))
            x[~free] = 0.0
        x = wanted
    found: FloatArray = x / scale
    return found
