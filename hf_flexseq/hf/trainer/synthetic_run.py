"""`flexseq calibrate MODEL`: train a new model for some steps of long-tailed synthetic sequences,
and correct its estimate by their plan trace.

It runs in one process for one device, or under `torchrun` for all of its ranks and their links, by
FlexSeqTrainer with the plans of the estimate.
"""

import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_flexseq.base.reading import DEFAULT_LIMITS
from hf_flexseq.cost.correction import Correction, learned_from
from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.hf.engine.model_configuration import class_of, config_of, dtype_of
from hf_flexseq.hf.trainer.trainer import FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.plan.files import read_steps
from hf_flexseq.steps.collator import DataCollatorForFlexSeq

STEPS, WARM_UP = 12, 1
SEQUENCES = 4  # of a rank and step
MEDIAN_TOKENS, SPREAD, MOST_TOKENS = 500, 1.2, 16384  # of log-normal lengths


def train(
    model: str, output: str, *, dtype: str = "auto", checkpointing: bool = True, fsdp: bool = False
) -> Correction:
    """Train, correct the estimate, and write it to `output`; return the correction, the same on
    all ranks. Collective over the world.

    model: hub id or folder of a model or a config.json. dtype: of the parameters; auto: bfloat16
    on a GPU, float32 on a CPU. fsdp: to shard by FSDP2. Raises ValueError for an unknown model or
    dtype, and for FSDP2 on a CPU; OSError if the config cannot be read or the result cannot be
    written.
    """
    on_gpu = torch.cuda.is_available()
    if fsdp and not on_gpu:
        raise ValueError("--fsdp without a GPU: accelerate shards on GPUs only; leave it out")
    config = config_of(model)
    with tempfile.TemporaryDirectory() as own:
        args = FlexSeqConfig(
            output_dir=own,
            max_steps=STEPS,
            per_device_train_batch_size=SEQUENCES,
            use_cpu=not on_gpu,
            gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            fsdp=fsdp,
            fsdp_config={"version": 2} if fsdp else None,
            ddp_find_unused_parameters=False,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            cost_model="estimate",
            plan_trace=str(Path(own) / "trace.jsonl"),  # rank 0 writes and reads its own
        )
        numbers = dtype_of(dtype, args.device)
        trainer = FlexSeqTrainer(
            model=class_of(config)(config).to(numbers),
            args=args,
            train_dataset=_sequences(config, STEPS * SEQUENCES * args.world_size),
            data_collator=DataCollatorForFlexSeq(),
        )
        trainer.train()
        communicator = trainer.flexseq.communicator
        found = None
        with ErrorCapture() as fitting:
            if communicator.rank == 0:
                estimate = trainer.flexseq.cost
                assert estimate is not None, "the model was attached"
                assert args.plan_trace is not None, "set above"
                steps = read_steps(args.plan_trace, DEFAULT_LIMITS).steps[WARM_UP:]
                cost, correction = learned_from(steps, estimate, communicator.topology)
                cost.save(output)
                found = list(correction)
        fitting.raise_on_all_ranks(communicator.cpu_group.gather_values, "correcting the estimate")
        factors, error, seen = communicator.cpu_group.broadcast_value(found)
    return Correction(tuple(factors), error, tuple(seen))


def _sequences(config: PreTrainedConfig, count: int) -> list[dict[str, Any]]:
    """Return random sequences with long-tailed lengths, the same every time."""
    text = config.get_text_config()
    most = min(MOST_TOKENS, getattr(text, "max_position_embeddings", None) or MOST_TOKENS)
    drawn = random.Random(0)
    found = []
    for _ in range(count):
        length = min(most, max(2, int(MEDIAN_TOKENS * drawn.lognormvariate(0, SPREAD))))
        tokens = [drawn.randrange(text.vocab_size) for _ in range(length)]
        found.append({"input_ids": tokens, "labels": tokens})
    return found
