"""Costs of FSDP2 in the micro-batches of a step, and its policies that fit into memory.

A micro-batch under FSDP2 moves the sharded state three times: parameters are gathered for the
forward and again for the backward, and gradients are scattered. A policy may leave two of these
for once in a step, and pays with memory:

    policy                   trips, of n micro-batches   held between micro-batches
    regathers, reduces each  2 n + n                     nothing
    keeps parameters         1 + n                       all parameters, whole
    reduces once             2 n + 1                     all gradients, whole
    both                     1 + 1                       both

1. `candidates` orders the policies that could go with a step's lengths, before it is planned: the
   more a rank holds, the fewer tokens fit besides and the more micro-batches the step needs.
2. The step is planned with the trips that the policy makes in every micro-batch, and with the
   tokens that fit besides (`planner/process/jobs.py`).
3. `beside` chooses for the plan as it is: the fewest trips that fit beside its fullest
   micro-batch. A plan of any other origin thus gets a policy that its memory allows, too.

Both are pure, so all ranks choose alike. Transfers that happen once per step, such as DDP's one
reduction, cost the same under every plan and have no price. In HSDP state is sharded over some
ranks and replicated over the others: trips stay among the ranks that share a replica, and the sum
over replicas is made once.

Rejected: one policy for the run. Beside the longest sequences nothing can be held, so either they
would not fit or all other steps would pay for them.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from hf_flexseq.base.records import Amount, Bounds, Constants, Seconds
from hf_flexseq.base.topology import Topology
from hf_flexseq.base.values import MAX_BYTES
from hf_flexseq.cost.choices import token_bytes
from hf_flexseq.cost.model import CostModel
from hf_flexseq.cost.shapes import ModelShape
from hf_flexseq.plan import Plan

# Trips of a micro-batch that leaves none of them out.
TRIPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpPolicy:
    """Behaviour of FSDP2 between the micro-batches of a step."""

    reduces_each: bool = True
    """True if every micro-batch reduces its gradients, False if the last one reduces all."""
    regathers: bool = True
    """True if parameters are gathered for each forward and each backward, False if once."""

    def trips(self, micro_batches: int) -> int:
        """Return how often the sharded state moves in a step of so many micro-batches."""
        gathers = 2 * micro_batches if self.regathers else 1
        reductions = micro_batches if self.reduces_each else 1
        return gathers + reductions

    @property
    def repeated_trips(self) -> int:
        """Trips that every micro-batch makes."""
        return 2 * self.regathers + self.reduces_each

    def __str__(self) -> str:
        reduced = "in every micro-batch" if self.reduces_each else "once"
        gathered = "for every forward and backward" if self.regathers else "once"
        return f"gradients reduced {reduced}, parameters gathered {gathered}"


# What FSDP2 does by itself, and holds nothing for.
PLAIN = FsdpPolicy()

POLICIES = (
    PLAIN,
    FsdpPolicy(regathers=False),
    FsdpPolicy(reduces_each=False),
    FsdpPolicy(reduces_each=False, regathers=False),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpFigures(Constants):
    """Figures that the choice of a policy depends on, besides the step."""

    what: ClassVar[str] = "the figures of FSDP2"

    free_bytes: Annotated[float, Bounds(least=-MAX_BYTES)]
    """Bytes per rank besides its share of the model's state; negative if that is too much."""
    parameter_bytes: Amount
    """Bytes of all parameters as they are gathered."""
    gradient_bytes: Amount
    """Bytes of the gradients of all trained parameters, before they are scattered."""
    trip_s: Seconds
    """Seconds per trip, 0 if the cost model's seconds per micro-batch leave it out."""

    # ---- memory

    def held_bytes(self, policy: FsdpPolicy) -> float:
        """Return the bytes that a rank holds between micro-batches for the policy's sake."""
        held = 0.0
        if not policy.regathers:
            held += self.parameter_bytes
        if not policy.reduces_each:
            held += self.gradient_bytes
        return held

    def left_bytes(self, policy: FsdpPolicy) -> float:
        """Return the bytes that a rank has for tokens besides those held; below 0 for too few."""
        return self.free_bytes - self.held_bytes(policy)

    # ---- the choice

    def beside(
        self,
        plan: Plan,
        world_size: int,
        cost: CostModel,
        *,
        held_tokens: int = 0,
    ) -> FsdpPolicy:
        """Return the policy of fewest trips, then bytes, that fits the fullest micro-batch.

        cost: by which the step was planned. held_tokens: tokens whose memory a rank needs for
        something else, such as images.
        """
        most_bytes = 0.0
        for micro_batch in plan.micro_batches:
            tokens = max(micro_batch.tokens_per_rank(plan.lengths, world_size))
            most_bytes = max(most_bytes, tokens * token_bytes(cost, micro_batch.memory))
        most_bytes += held_tokens * cost.token_bytes
        fitting = [PLAIN]
        for policy in POLICIES:
            if self.left_bytes(policy) >= most_bytes:
                fitting.append(policy)
        count = len(plan.micro_batches)
        return min(fitting, key=lambda policy: (policy.trips(count), self.held_bytes(policy)))

    def beside_held(self, cost: CostModel, policy: FsdpPolicy, world_size: int) -> CostModel:
        """Return `cost` of ranks that follow a policy: with its trips, and with the memory that
        it leaves, which may be none."""
        states = cost.budget_bytes - cost.free_bytes(world_size)
        left = min(cost.free_bytes(world_size), self.free_bytes) - self.held_bytes(policy)
        saved_s = (TRIPS - policy.repeated_trips) * self.trip_s
        return replace(
            cost,
            micro_batch_s=max(0.0, cost.micro_batch_s - saved_s),
            budget_bytes=max(1.0, states + left),
        )

    def once_s(self, policy: FsdpPolicy) -> float:
        """Return the seconds of the trips that a policy makes once in a step."""
        return (policy.trips(1) - policy.repeated_trips) * self.trip_s


# ---- trips


def gathered_params(shape: ModelShape, shards: int, expert_ranks: int) -> int:
    """Return the parameters that a rank gathers for a forward. shards: ranks that share one copy
    of the state. expert_ranks: of these that hold all experts together."""
    if expert_ranks == 1 or shape.experts is None:
        return shape.params
    dense = shape.params - shape.experts.params
    if shards == expert_ranks:
        return dense  # a rank keeps its experts
    return dense + shape.experts.params // expert_ranks


def trip_seconds(
    cost: CostModel, *, moved_bytes: float, topology: Topology, replicas: int
) -> float:
    """Return the seconds of one trip of the sharded state.

    moved_bytes: of all parameters. replicas: over which state is replicated instead of sharded.
    """
    shards = topology.world_size // replicas
    if shards == 1:
        return 0.0
    return moved_bytes / cost.bandwidth(shards, shards_span_nodes(topology, replicas))


def shards_span_nodes(topology: Topology, replicas: int) -> bool:
    """Return True if the ranks of some replica, which are neighbours, span nodes."""
    return topology.ranks_per_node % (topology.world_size // replicas) != 0


def replicated(cost: CostModel, replicas: int) -> CostModel:
    """Return `cost` with the sharded state held by each of so many replicas, instead of once by
    all ranks together."""
    if replicas == 1:
        return cost
    return replace(cost, sharded_state_bytes=cost.sharded_state_bytes * replicas)
