"""Models by their configurations, without their weights: sizes, and the training of a new model
on long-tailed synthetic sequences that corrects its estimate (`flexseq calibrate MODEL`).

The training runs in one process for one device, or under `torchrun` for all of its ranks and their
links, by FlexSeqTrainer with the plans of the estimate; the plan trace has the seconds.
"""

import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_flexseq.base.reading import DEFAULT_LIMITS
from hf_flexseq.cost.correction import Correction, learned_from
from hf_flexseq.cost.shapes import ModelShape
from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.hf.engine.layer_trial import CountedBytes, count_bytes
from hf_flexseq.hf.model.facts import model_shape
from hf_flexseq.hf.trainer.trainer import FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.plan.files import read_steps
from hf_flexseq.steps.collator import DataCollatorForFlexSeq

DTYPES = ("float32", "bfloat16", "float16", "float64")


def config_of(model: str) -> PreTrainedConfig:
    """Return the configuration of a hub id or a folder of a model, or of a config.json. Raises
    OSError if it cannot be read."""
    # None would prompt on the terminal before running a model's own code
    return AutoConfig.from_pretrained(model, trust_remote_code=False)


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of this name; auto: bfloat16 on a GPU, float32 on a CPU. Raises ValueError
    for another name."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of auto, {', '.join(DTYPES)}; got {name!r}")
    return getattr(torch, name)


def read_model(model: str, dtype: str) -> tuple[ModelShape, CountedBytes | None]:
    """Return the sizes of the model that a hub id or a folder names, or a config.json, and the
    bytes that its layers are counted to hold of a token in `dtype`; None where that cannot be
    tried. Raises OSError and ValueError if `model` names none."""
    numbers = dtype_of(dtype, torch.device("cpu"))
    config = config_of(model)
    with torch.device("meta"):
        made = class_of(config)(config).to(numbers)
    return model_shape(made), count_bytes(made, dtype=numbers)


def class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class that a configuration names, if that predicts tokens, or else the one of its
    kind that does. Raises ValueError for another model."""
    mappings = [MODEL_FOR_CAUSAL_LM_MAPPING]
    if not config.is_encoder_decoder:
        mappings.append(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    kinds: list[type[PreTrainedModel]] = []
    for mapping in mappings:
        if type(config) in mapping:
            kinds.append(mapping[type(config)])
    if not kinds:
        raise ValueError(
            f"model_type={config.model_type!r} is not a causal language model of transformers"
        )
    own = [kind for kind in kinds if kind.__name__ in (config.architectures or ())]
    return (own or kinds)[0]


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
