"""Import once, in the parent, what every forked rank would import again."""

import importlib.util

import hf_flexseq.hf.trainer  # noqa: F401

if importlib.util.find_spec("deepspeed"):
    import deepspeed  # noqa: F401
