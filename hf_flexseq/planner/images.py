"""How the images of a step are encoded: on which ranks, and whether the tower's graph is kept.

The graph of a trained tower is held from the first micro-batch to the last, beside the
activations of text. Without it an image runs forward once more. The memory that a rank has left
for tokens decides: a step is planned without the graph if that promises less time, the second
forward included, or if a sequence fits nowhere beside the graph. The graph of a sharded tower is
kept where the step is one micro-batch.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.tower import TowerCost
from hf_flexseq.plan.images import ImagePlan, ImageSize
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner.memory import promise_ns

# Share of all memory that the tokens of one micro-batch can fill.
FILLED = 0.95

# Share of a rank's memory below which a graph is kept without asking what it costs.
SMALL = 0.05


def plan_images(
    images: Sequence[ImageSize],
    lengths: Sequence[int],
    tower: TowerCost,
    topology: Topology,
    cost: CostModel,
    options: PlanOptions,
) -> ImagePlan:
    """Return how the images of a step, at least one, are encoded.

    lengths: tokens of each sequence. tower, cost: of the model. options: how the step is planned.
    Raises ValueError where model states leave no room for a token.
    """
    world = topology.world_size
    kept = tower.placed(images, world)
    if not tower.patch_bytes:
        return kept
    again = replace(tower.run_again().placed(images, world), keeps_graph=False)
    cap = options.max_tokens_per_rank or (
        cost.max_tokens_per_rank(world) - kept.held_tokens(cost.token_bytes)
    )
    if tower.is_sharded and sum(lengths) > FILLED * world * cap:
        return again
    if options.max_tokens_per_rank or kept.held_bytes <= SMALL * cost.free_bytes(world):
        return kept

    def promised_ns(plan: ImagePlan) -> float:
        held_tokens = plan.held_tokens(cost.token_bytes)
        text_ns = promise_ns(lengths, topology, cost, options, held_tokens=held_tokens)
        return text_ns + 1e9 * plan.seconds

    kept_ns = promised_ns(kept)
    return kept if math.isfinite(kept_ns) and kept_ns <= promised_ns(again) else again
