"""Planners that the published systems are compared with.

megatron           dynamic context parallelism of Megatron-Core
batch_ada          FlexSP's baseline FlexSP-BatchAda (arXiv 2412.01523, section 6.1)
batch_rebalance    `BatchRebalanceSampler` of transformers
"""
