"""Measure what steps cost on this machine, and fit a `CostModel` to it.

    calibrate.py  design, measure, fit: the entry point
    design.py     decides which micro-batches and transfers are timed, and how large
    measure.py    times them on all ranks in turns, and gathers medians
    transfers.py  the transfers that are timed alone
    fit.py        one linear system for all constants, solved by non-negative least squares
    estimate.py   figures of this device, for the estimate
    cache.py      keeps fits between runs

    live_bytes.py  counts bytes of tensors without memory, with stand-ins for kernels
    layer_watch.py tells which of them a layer keeps, and which it holds in its backward

The profiler does not know how a model is built: `hf/calibration/probe.py` passes a `ProbeFactory`,
whose copies of the model run one micro-batch.
"""
