"""Recurrent layers over sequences that several ranks hold: `convolution.py`, `layers.py`;
`scan.py` has the idea, `rows.py` the exchanges."""

from hf_flexseq.attention.recurrent.convolution import causal_convolution
from hf_flexseq.attention.recurrent.layers import gated_delta_rule, kimi_delta_rule, mamba2_scan

__all__ = ["causal_convolution", "gated_delta_rule", "kimi_delta_rule", "mamba2_scan"]
