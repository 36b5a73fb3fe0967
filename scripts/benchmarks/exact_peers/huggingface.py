"""The stacks of who_is_exact.py that the Trainer runs: trainer, trl, alst, cp and ours.

Each is set up as its documentation says, with what it offers on CPUs.
"""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from common import alst_options
from exact_peers.situations import (
    EVAL_BATCHES,
    IGNORED,
    RANKS,
    ROUTER_COEFFICIENT,
    ROWS,
    SAVED_AT,
    Document,
    Weights,
    documents,
    make_model,
    texts,
    tokenizer,
    trained_weights,
)

MULTIPLES = {"trainer": 1, "alst": RANKS, "cp": 2 * RANKS}  # to which a stack has rows padded


def collator(stack: str, row: str) -> Any:
    """Return a collator with padding on the right, and the columns that a stack asks for.

    A packed row has positions that begin again, and no mask.
    """
    position = "position_ids" if stack == "alst" or row == "packed" else "attention_mask"

    def collate(rows: list[Document]) -> dict[str, torch.Tensor]:
        width = max(len(one["input_ids"]) for one in rows)
        width += -width % MULTIPLES[stack]
        columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], position: []}
        for one in rows:
            length = len(one["input_ids"])
            missing = width - length
            columns["input_ids"].append(one["input_ids"] + [0] * missing)
            columns["labels"].append(one["labels"] + [IGNORED] * missing)
            if position == "position_ids":
                columns[position].append([*one[position], *range(missing)])
            else:
                columns[position].append([1] * length + [0] * missing)
        return {name: torch.tensor(values) for name, values in columns.items()}

    return collate


def parallelism(stack: str, attention: str) -> dict[str, Any]:
    """Return the training arguments by which a stack cuts sequences. attention: the model's."""
    from accelerate.utils import ParallelismConfig, TorchContextParallelConfig

    if stack == "alst":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # minutes of compilation
        return alst_options(RANKS, attention)
    if stack == "cp":
        handler = TorchContextParallelConfig(cp_comm_strategy="alltoall")
        config = ParallelismConfig(cp_size=RANKS, cp_handler=handler)
        return {"parallelism_config": config, "fsdp": True}
    return {}


def make_trainer(stack: str, row: str, folder: Path) -> Trainer:
    """Return a stack's trainer of a row."""
    situation = ROWS[row]
    is_cut = stack in ("alst", "cp")
    options = {
        "output_dir": str(folder / "run"),
        "train_sampling_strategy": "sequential",
        "save_strategy": "steps" if row == "resume" else "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "remove_unused_columns": row == "dpo" or stack == "trl",
        "ddp_find_unused_parameters": False,
        "seed": 1,
        **situation.settings(RANKS if is_cut else 1),
        **parallelism(stack, situation.attention),
    }
    given: dict[str, Any] = {"model": make_model(row)}
    base, config = Trainer, TrainingArguments
    if row == "dpo" or stack == "trl":
        from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

        options |= {"max_length": None, "gradient_checkpointing": False, "bf16": False}
        given |= {"processing_class": tokenizer(), "train_dataset": Dataset.from_list(texts(row))}
        if row == "dpo":
            base, config = DPOTrainer, DPOConfig
            options |= {"pad_to_multiple_of": MULTIPLES[stack]} if is_cut else {}
            given["ref_model"] = make_model(row)
        else:
            base, config = SFTTrainer, SFTConfig
            options["router_aux_loss_coef"] = ROUTER_COEFFICIENT if row == "router" else 0.0
            if row == "packed":
                options |= {"packing": True, "max_length": sum(situation.lengths)}
    else:
        given["train_dataset"] = documents(row)
        given["data_collator"] = None if stack == "ours" else collator(stack, row)
    if stack == "ours":  # the longest document is cut over ranks
        from hf_flexseq import DataCollatorForFlexSeq, FlexSeqArguments, FlexSeqMixin

        base = type("Planned", (FlexSeqMixin, base), {})
        if row != "dpo":
            given["data_collator"] = DataCollatorForFlexSeq()
        most = max(situation.lengths) // RANKS + 4
        given["flexseq_args"] = FlexSeqArguments(max_tokens_per_rank=most)
    given["eval_dataset"] = given["train_dataset"] if row == "eval" else None
    return base(args=config(**options), **given)


def trained(
    rank: int, world_size: int, stack: str, row: str, folder: Path, resumes: bool
) -> tuple[Weights, list[float]]:
    """Train on this rank; return the weights that learn, and the losses of evaluations.

    folder: for checkpoints, all ranks' own. resumes: whether the run begins with the checkpoint of
    an earlier one.
    """
    trainer = make_trainer(stack, row, folder)
    checkpoint = str(folder / f"run/checkpoint-{SAVED_AT}") if resumes else None
    trainer.train(resume_from_checkpoint=checkpoint)
    losses = []
    for batch in EVAL_BATCHES if row == "eval" else ():
        trainer.args.per_device_eval_batch_size = batch
        losses.append(trainer.evaluate()["eval_loss"])
    return trained_weights(trainer.accelerator.unwrap_model(trainer.model)), losses
