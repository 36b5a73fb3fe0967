"""Seconds of the host per launch, per post and per message, from attention on next to no tokens.

Where tokens are so few that they take no time, what is left of a layer is the host's own work, and
`cost/launches.py` counts it:

    seconds(a layer's attention)  = c + launch x launches + post x posts + message x messages
    seconds(its transfers, bare)  =                         post x posts + message x messages

for a rank alone, and for Ulysses and a zigzag of each degree inside a node. The constant c is the
call itself: it is the same in a rank's own attention, and so in the constant of a micro-batch.

On one processor for host and device, as a CPU, a post holds the latency of the link, too: nothing
else goes on meanwhile. Whether launches hide under attention is not measured: it is the
estimate's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_flexseq.cost import CostModel
from hf_flexseq.cost.launches import EXCHANGES, LayerWork, layer_work
from hf_flexseq.cost.rings import RING_PASSES
from hf_flexseq.profiler.design import ProbeShape, disjoint_blocks, measured_degrees
from hf_flexseq.profiler.fit import Sample, relative_nnls
from hf_flexseq.topology import Topology

FEW_TOKENS = 16  # of a rank; a zigzag of any degree has some for both of a rank's chunks

# The strategies of bare transfers, in `ProbeShape` and `Sample`.
ALL_TO_ALLS = "all-to-alls"
RING = "ring"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSeconds:
    """What the host takes, in one layer."""

    launch_s: float
    """Seconds per operation that it launches."""
    post_s: float
    """Seconds per call that posts messages."""
    message_s: float
    """Seconds per message in such a call."""

    @classmethod
    def of(cls, estimate: CostModel, layers: int) -> "HostSeconds":
        """Return the figures of a cost model of `layers` layers."""
        return cls(
            launch_s=estimate.launch_s / layers,
            post_s=estimate.post_s / layers,
            message_s=estimate.message_s / layers,
        )

    def fill(self, model: CostModel, layers: int) -> CostModel:
        """Return `model`, which has `layers` layers, with these seconds."""
        return replace(
            model,
            launch_s=layers * self.launch_s,
            post_s=layers * self.post_s,
            message_s=layers * self.message_s,
        )

    def transfers_s(self, strategy: str, degree: int) -> float:
        """Return the seconds that the host takes for one layer's transfers of a group."""
        work = bare_work(ALL_TO_ALLS if strategy == "ulysses" else RING, degree)
        return self.post_s * work.posts + self.message_s * work.messages


def small_shapes(topology: Topology, rings: bool) -> tuple[ProbeShape, ...]:
    """List the runs on next to no tokens. None on one rank, which posts nothing.

    rings: whether rings are timed, too.
    """
    node = topology.ranks_per_node if topology.ranks_per_node > 1 else topology.world_size
    degrees = [degree for degree in measured_degrees(topology) if degree <= node]
    if not degrees:
        return ()
    shapes = [_shape("local", 1, topology)]
    for degree in degrees:
        shapes += [_shape("ulysses", degree, topology), _shape(ALL_TO_ALLS, degree, topology)]
        if rings:
            shapes += [_shape("zigzag", degree, topology), _shape(RING, degree, topology)]
    return tuple(shapes)


def _shape(strategy: str, degree: int, topology: Topology) -> ProbeShape:
    return ProbeShape(
        strategy=strategy,
        degree=degree,
        lengths=(FEW_TOKENS * degree,),
        starts=disjoint_blocks(topology, degree),
    )


def bare_work(strategy: str, degree: int) -> LayerWork:
    """Return what the host does for one layer's bare transfers, as `runs.py` makes them."""
    if strategy == ALL_TO_ALLS:
        posts, messages_of_post = EXCHANGES, 2 * (degree - 1)
    else:
        posts, messages_of_post = RING_PASSES * (degree - 1), 2
    return LayerWork(calls=0, launches=0, posts=posts, messages=posts * messages_of_post)


def fit_host(samples: Sequence[Sample], estimate: HostSeconds) -> HostSeconds:
    """Fit the seconds to samples of `small_shapes`; without samples they are the estimate's."""
    if not samples:
        return estimate
    rows = []
    for sample in samples:
        if sample.strategy in (ALL_TO_ALLS, RING):
            call, work = 0, bare_work(sample.strategy, sample.degree)
        else:
            call, work = 1, layer_work(sample.strategy, sample.degree)
        rows.append([call, work.launches, work.posts, work.messages])
    seconds = [sample.seconds for sample in samples]
    _, launch_s, post_s, message_s = relative_nnls(rows, seconds)
    return HostSeconds(launch_s=launch_s, post_s=post_s, message_s=message_s)
