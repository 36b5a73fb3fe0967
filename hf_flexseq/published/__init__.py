"""Published systems, re-created: to plan with, to compare with, and to learn from.

    flexsp/            FlexSP, arXiv 2412.01523: planner
    zeppelin/          Zeppelin, arXiv 2509.21841: planner, routing over several NICs, remapping
    lightseq/          LightSeq, arXiv 2310.03294: the balanced ring
    infinipipe/        InfiniPipe, arXiv 2509.21275: pipeline planner
    baselines/         planners that systems are compared with, Megatron-Core's among them
    aligned_groups.py  ranks of groups of power-of-two degrees: FlexSP and Megatron
    blaster.py         a step cut into micro-batches by tokens: FlexSP and Zeppelin

A folder holds only the code that its system needs besides the core. The core imports none of it:
planners are found by their dotted names (`base/registry.py`), and everything else is a pass over a
finished plan or program. Each planner's header says which step of the published method is which
step of the code, and which steps were left out.
"""
