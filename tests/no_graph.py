"""Plans of steps as if memory held no graph of a vision tower."""

from contextlib import AbstractContextManager
from unittest.mock import patch

from hf_flexseq.hf.engine import whole_model
from hf_flexseq.planner.images import image_plan


def without_graphs() -> AbstractContextManager[object]:
    """Let plans inside the block keep no graph."""

    def planned(images, lengths, tower, topology, cost, options):
        return image_plan(images, tower.run_again(), topology.world_size, keeps_graph=False)

    return patch.object(whole_model, "plan_images", planned)
