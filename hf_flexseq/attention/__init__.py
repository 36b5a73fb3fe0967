"""Sequence-parallel attention, which a model's attention layers call."""

from hf_flexseq.attention.context import SequenceContext
from hf_flexseq.attention.function import sequence_parallel_attention

__all__ = ["SequenceContext", "sequence_parallel_attention"]
