"""`calibrate`: measure a model's cost model on the machine at hand, alone or under torchrun."""

import os
from argparse import Namespace
from typing import Any


def calibrate(options: Namespace) -> None:
    """Measure, write the cost model, and say how well it holds."""
    from hf_flexseq.hf.calibration import command as measuring

    record = measuring.calibrate(
        options.model,
        dtype=options.dtype,
        output=options.json,
        checkpointing=options.checkpointing,
        zero_stage=options.zero_stage,
    )
    if int(os.environ.get("RANK", "0")) == 0:
        print(_summary(record))


def _summary(record: dict[str, Any]) -> str:
    cost, errors, (nodes, ranks) = record["cost_model"], record["hold_out"], record["topology"]
    speeds = ", ".join(f"{degree}: {speed / 1e9:.3g}" for degree, speed in cost["bandwidths"])
    lines = (
        f"{record['model']} in {record['dtype']} on {nodes} x {ranks} {record['device']}, torch "
        f"{record['torch']}",
        f"attention {1e12 * cost['attention_s']:.4g} ps per squared token, "
        f"the rest {1e6 * cost['linear_s']:.4g} us per token, {1e3 * cost['micro_batch_s']:.4g} "
        f"ms per micro-batch",
        f"GB/s by degree: {speeds}",
        f"on {errors['micro_batches']} micro-batches held out of the fit: off by "
        f"{100 * errors['mean']:.1f} % on "
        f"average, {100 * errors['p95']:.1f} % at the 95th percentile",
    )
    return "\n".join(lines)
