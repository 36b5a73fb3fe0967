"""LightSeq's ring (DistFlashAttn, arXiv 2310.03294, section 3.1): the strategy `balanced`.

A rank holds one chunk, so late ranks have more keys to read than early ones. Ranks that have run
out of keys before their own queries compute for the late ones.

This departs from the paper, which is right for even degrees only: as printed, and in the code
published with it, no rank helps at the last time, which loses (d - 1) / 2 blocks of an odd degree
d. With these blocks an odd degree has no idle rank at any time. An even degree idles for half a
block's time per rank and takes (d + 1) / d of the ideal time.

The core executes these rounds like any other ring's, and prices them by its trips and its pace.
"""

from hf_flexseq.plan.rings import FRONT, Ring, Role, Round

# Trips of a helper's tensors, as wide as queries: results; queries, their gradients and results.
HELP_TRIPS = 4
# Width of queries over that of keys and values, where each head has its own.
QUERY_WIDTH = 0.5


def balanced_rounds(degree: int) -> list[Round]:
    """Return the rounds after the first in which ranks without keys to read help ranks with many.

    At time t a rank reads the keys of the rank t indices before it. A rank that has none there
    helps the rank t indices before it, counted around the end, with its own keys. Half way round
    an even degree these would be blocks that are computed already, so no rank helps there.
    """
    reads = Role(helps=False, queries=(FRONT,), keys=(FRONT,))
    helps = Role(helps=True, queries=(FRONT,), keys=(FRONT,))
    rounds = []
    for distance in range(1, degree // 2 + 1):
        half_way = 2 * distance == degree
        rounds.append(Round(distance, reads, None if half_way else helps))
    return rounds


def balanced_trips(degree: int) -> float:
    """Return the trips of the busiest rank's keys and values, and queries counted as such."""
    fetches = degree // 2
    helps = (degree - 1) // 2  # calls that the busiest helper computes for others
    return 2 * fetches + HELP_TRIPS * QUERY_WIDTH * helps


def balanced_stretch(degree: int) -> float:
    """Return the seconds of attention over an even split's."""
    return 1.0 if degree % 2 else (degree + 1) / degree


RING = Ring(
    chunks_per_rank=1, rounds=balanced_rounds, trips=balanced_trips, stretch=balanced_stretch
)
