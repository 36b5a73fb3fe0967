"""`flexseq prove`: show on the user's own machine that a model trains as on one process.

small.py       a small model with the layer kinds of a large one
trained.py     one step of FlexSeqTrainer on all ranks, and the same step without hf_flexseq
command.py     both, their differences, and faults that must be found, as one record
"""
