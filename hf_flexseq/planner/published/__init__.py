"""Planners re-created from published systems, to plan with and to compare with.

    planner            module               published as
    flexsp             flexsp.py            FlexSP, arXiv 2412.01523, with milp.py (section 4.1),
                                            buckets.py (4.1.3) and blaster.py (4.2)
    zeppelin           zeppelin.py          Zeppelin, arXiv 2509.21841
    megatron           megatron.py          dynamic context parallelism of Megatron-Core
    batch-ada          batch_ada.py         FlexSP's baseline FlexSP-BatchAda (section 6.1)
    batch-rebalance    batch_rebalance.py   `BatchRebalanceSampler` of transformers

`aligned.py` is a part of FlexSP's and Megatron's. Each header says which step of the published
method is which step of the code, and what was left out.
"""
