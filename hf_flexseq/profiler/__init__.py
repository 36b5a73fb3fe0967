"""Measure what steps cost on the machine at hand, and fit a `CostModel` to it.

    design.py    which micro-batches are run, and how large, from an amount of work that is counted
                 beforehand
    measure.py   runs them on all ranks in turns, and gathers medians
    fit.py       non-negative least squares: the constants of the closed form, and their errors on
                 other micro-batches
    cache.py     fits kept between runs

Nothing here knows how a model is built: `hf/calibrate.py` hands over functions that run one
micro-batch of it.
"""
