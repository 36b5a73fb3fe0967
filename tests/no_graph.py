"""Plans of steps as if memory held no graph of a vision tower."""

from contextlib import AbstractContextManager
from dataclasses import replace
from unittest.mock import patch

from hf_flexseq.hf.engine import whole_model


def without_graphs() -> AbstractContextManager[object]:
    """Let plans inside the block keep no graph."""

    def planned(images, lengths, tower, topology, cost, options):
        plan = tower.run_again().placed(images, topology.world_size)
        return replace(plan, keeps_graph=False)

    return patch.object(whole_model, "plan_images", planned)
