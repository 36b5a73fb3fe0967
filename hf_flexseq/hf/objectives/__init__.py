"""Losses that a trainer computes itself, from log-probabilities or scores of whole sequences.

A trainer's `compute_loss` calls the model on a padded batch. Here such a call is answered with
results that were planned: every sequence was computed by the ranks that the plan gave it to,
packed beside others, and its figures came home (`steps/passes.py`). So the trainer's own code runs
unchanged, once per batch, with its own collectives and metrics.

    calls.py        a call of the model: a padded batch, its tokens in a row, and results padded
    heads.py        what is asked of a model: log-probabilities of labels, or classes
    divergences.py  the same of two models: how far their distributions are apart (distillation)
    answering.py    calls of a model that are answered by somebody else
    reference.py    models that are asked without gradients, beside the trained one
    trainers.py     which calls a trainer's loss will make, so that they can be planned together
    planned.py      a step: first pass, the trainer's loss, second pass
"""
