"""Import once, in the parent, what every forked rank would import again."""

import importlib.util

import hf_flexseq.hf.trainer  # noqa: F401
from tests import budget

if importlib.util.find_spec("torch.nn.modules.linear_cross_entropy"):
    import torch.nn.modules.linear_cross_entropy  # noqa: F401

# The quick set forks no rank, and DeepSpeed takes as long to import as a hundred of its tests.
if importlib.util.find_spec("deepspeed") and not budget.quick:
    import deepspeed
    import deepspeed.runtime.zero.muon.muon_optimizer

    # A shared-memory collective that DeepSpeed would compile on the spot, for minutes; gloo does
    # without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
