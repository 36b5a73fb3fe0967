"""Losses that a trainer computes itself, from log-probabilities or scores of whole sequences.

A trainer's `compute_loss` calls the model on a padded batch. Here such a call is answered with
results that were planned: every sequence was computed by the ranks that the plan gave it to,
packed with others, and its figures were gathered (`steps/figure_passes.py`). So the trainer's own
code runs unchanged, once per batch, with its own collectives and metrics.

    heads.py        what is asked of a model: log-probabilities of labels, or classes
    divergences.py  the same of two models: how far their distributions are apart (distillation)
    reference.py    models that are asked without gradients, besides the trained one
    trainers.py     which calls a trainer's loss will make, so that they can be planned together
    planned.py      a step: first pass, the trainer's loss, second pass
    drawing.py      its batches, and the plan of their sequences
    generations.py  samples that a trainer makes itself, and the steps that they serve
    answers.py      the loss's calls of its models, answered from what the passes gave
    outputs.py      what such a call returns to a loss of the user's own

A call itself is a padded batch (`steps/calls.py`), and is answered instead of the model
(`steps/call_answers.py`).
"""
