"""Import and try once, in the parent, what every forked rank would import and try again."""

import contextlib
import functools
import importlib
import importlib.util

import accelerate.utils.imports
import torch

import hf_flexseq.hf.trainer.trainer  # noqa: F401
from hf_flexseq.hf.engine.layer_trial import count_bytes
from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.mlp_trial import token_wise_places
from tests import budget
from tests.hf.tiny import tiny_llama

# accelerate reads the metadata of packages every time that it is asked for one, which it asks
# itself several times in a step. None is installed while tests run.
accelerate.utils.imports._is_package_available = functools.cache(
    accelerate.utils.imports._is_package_available
)

# The quick set forks no rank, and DeepSpeed takes as long to import as a hundred of its tests.
if importlib.util.find_spec("deepspeed") and not budget.quick:
    import deepspeed
    import deepspeed.runtime.zero.muon.muon_optimizer

    # What DeepSpeed imports on every rank that has it for the first time.
    for _name in (
        "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.runtime.superoffload.superoffload_stage3",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(_name)

    # A shared-memory collective that DeepSpeed would compile on the spot, for minutes; gloo does
    # without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

if not budget.quick:
    # The first trial of a process loads torch's operations for tensors without memory.
    model = tiny_llama()
    check_model(model)
    token_wise_places(model)
    count_bytes(model, dtype=torch.float64)
