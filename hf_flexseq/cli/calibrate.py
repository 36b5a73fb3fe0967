"""`calibrate`: correct a cost model by the seconds of a run, whose plan trace is given, or of some
steps that train a new model on synthetic sequences, alone or under torchrun."""

import os
from argparse import Namespace

from hf_flexseq.command_line import say
from hf_flexseq.cost.correction import learned_from
from hf_flexseq.cost.presets import load_cost_model
from hf_flexseq.plan.files import read_steps
from hf_flexseq.steps.trace_file import is_trace


def calibrate(options: Namespace) -> None:
    """Write a corrected cost model, and report its corrections and how well it holds."""
    if is_trace(options.source):
        _of_trace(options)
        return
    try:
        from hf_flexseq.hf.trainer.synthetic_models import train
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "training a model needs torch and transformers: pip install torch transformers "
            f"accelerate ({error})"
        ) from error
    correction = train(
        options.source,
        options.json,
        dtype=options.dtype,
        checkpointing=options.checkpointing,
        fsdp=options.fsdp,
    )
    if int(os.environ.get("RANK", "0")) == 0:
        print(correction.text())


def _of_trace(options: Namespace) -> None:
    """Correct the cost model that is named by a trace."""
    if options.topology is None or options.cost_model is None:
        raise ValueError(
            f"{options.source} is a plan trace: give --topology, and the --cost-model to correct"
        )
    file = read_steps(options.source, options.limits)
    cost, correction = learned_from(
        file.steps, load_cost_model(options.cost_model), options.topology
    )
    cost.save(options.json)
    print(correction.text())
    if file.broken:
        say(options, f"{options.source}: {file.remark()}")
