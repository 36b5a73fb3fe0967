"""The loss of a training step: next-token loss, and all that trainers compute by their own code.

    step_loss.py     the interface between a trainer and its loss
    next_token.py    the stock loss of Trainer and SFTTrainer: one pass over planned micro-batches
    on_samples.py    all other losses: first pass, the trainer's own loss, second pass

In the second way a trainer's `compute_loss` calls the model on a padded batch, and the call is
answered with planned results: the plan's ranks have computed every sequence, packed with others,
and its figures were gathered (`steps/figure_passes.py`). So the trainer's own code runs unchanged,
once per batch, with its own collectives and metrics.

    heads.py          results asked of a model: log-probabilities of labels, or classes
    divergences.py    how far the distributions of two models are apart (distillation)
    trainers.py       which calls a trainer's loss will make, so that they can be planned together
    drawing.py        its batches, the samples that a trainer makes itself, and their plans
    answers.py        the loss's calls of its models, answered by the passes' figures
    batch_losses.py   the losses of a step's batches, and their gradients for the answers
    known_weights.py  sums over tokens, whose weights are known before a pass
    outputs.py        the result of such a call in a loss of the user's own

A call itself is a padded batch (`steps/calls.py`), and is answered instead of the model
(`steps/call_answers.py`).
"""
