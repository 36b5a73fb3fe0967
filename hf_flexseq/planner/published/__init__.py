"""Planners re-created from published systems: FlexSP, Zeppelin, Megatron-LM and the two batch
baselines."""
