"""Measure what steps cost on the machine at hand, and fit a `CostModel` to it.

    calibrate.py  the door: design, measure, fit
    design.py     decides which micro-batches are run, and how large, from an amount of work that
                  is counted beforehand
    bench.py      makes their runs, with copies of the model
    measure.py    times these on all ranks in turns, and gathers medians
    host.py       seconds of the host per launch, post and message, from next to no tokens
    runs.py       the parts of a layer that are run alone: attention, all-to-alls, ring transfers
    fit.py        non-negative least squares: the constants of the closed form, and their errors on
                  other micro-batches
    cache.py      keeps fits between runs

Nothing here knows how a model is built: `hf/calibration/probe.py` hands over a `ProbeFactory`,
whose copies of the model run one micro-batch.
"""
