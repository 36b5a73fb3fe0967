"""`flexseq prove`: show on the user's own machine that a model trains as on one process.

small.py       a small model with the layer kinds of a large one
documents.py   the documents of one optimizer step, of the lengths at which mistakes show
trained.py     one step of FlexSeqTrainer on all ranks, and the same step without hf_flexseq
verdict.py     differences of gradients, and faults that must be found
command.py     all of it, on the ranks of this machine, as one record and one table
"""
