"""The stacks of who_is_exact.py that the Trainer runs: trainer, trl, alst, cp and ours.

Each is set up as its documentation says, with what it offers on CPUs; see `settings`.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from exact_peers.situations import (
    EAGER,
    EVAL_BATCHES,
    IGNORED,
    RANKS,
    ROUTER_COEFFICIENT,
    ROWS,
    documents,
    make_model,
    pairs,
    rate,
    sequences,
    text,
    tokenizer,
    trained_weights,
)

MULTIPLES = {"trainer": 1, "alst": RANKS, "cp": 2 * RANKS}  # to which a stack has rows padded
SAVED_AT = 2  # step of the checkpoint from which a run resumes


def padded(stack: str) -> Any:
    """Return a collator with padding on the right, and the columns that a stack asks for."""

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in rows)
        width += -width % MULTIPLES[stack]
        columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
        columns["position_ids" if stack == "alst" else "attention_mask"] = []
        for row in rows:
            length = len(row["input_ids"])
            columns["input_ids"].append(row["input_ids"] + [0] * (width - length))
            columns["labels"].append(row["labels"] + [IGNORED] * (width - length))
            if stack == "alst":
                columns["position_ids"].append(list(range(width)))
            else:
                columns["attention_mask"].append([1] * length + [0] * (width - length))
        return {name: torch.tensor(values) for name, values in columns.items()}

    return collate


def packed(stack: str) -> Any:
    """Return a collator of one packed row: positions that begin again, and no mask."""

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        (row,) = rows
        missing = -len(row["input_ids"]) % MULTIPLES.get(stack, 1)
        fill = {"input_ids": 0, "labels": IGNORED}
        columns = {}
        for name, values in row.items():
            more = [fill[name]] * missing if name in fill else list(range(missing))
            columns[name] = torch.tensor([values + more])
        return columns

    return collate


def parallelism(stack: str, attention: str) -> dict[str, Any]:
    """Return the training arguments by which a stack cuts sequences. attention: the model's."""
    from accelerate.utils import (
        DeepSpeedSequenceParallelConfig,
        ParallelismConfig,
        TorchContextParallelConfig,
    )

    if stack == "alst":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # minutes of compilation
        deepspeed.init_distributed("gloo")
        handler = DeepSpeedSequenceParallelConfig(
            sp_seq_length_is_variable=True, sp_attn_implementation=attention
        )
        return {
            "parallelism_config": ParallelismConfig(
                sp_backend="deepspeed", sp_size=RANKS, sp_handler=handler
            ),
            "deepspeed": {
                "zero_optimization": {"stage": 1},
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
            },
        }
    if stack == "cp":
        handler = TorchContextParallelConfig(cp_comm_strategy="alltoall")
        config = ParallelismConfig(cp_size=RANKS, cp_handler=handler)
        return {"parallelism_config": config, "fsdp": True}
    return {}


def settings(stack: str, row: str, folder: Path) -> dict[str, Any]:
    """Return the training arguments of a row, the same for all stacks but for accumulation.

    Where all ranks cut the same row, a step takes as many rows with more accumulation.
    """
    situation = ROWS[row]
    return {
        "output_dir": str(folder / "run"),
        "max_steps": situation.steps,
        "per_device_train_batch_size": situation.batch,
        "gradient_accumulation_steps": situation.accumulation
        * (RANKS if stack in ("alst", "cp") else 1),
        "learning_rate": rate(row),
        "lr_scheduler_type": "linear" if row == "resume" else "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "save_strategy": "steps" if row == "resume" else "no",
        "save_steps": SAVED_AT,
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "remove_unused_columns": row == "dpo" or stack == "trl",
        "ddp_find_unused_parameters": False,
        "seed": 1,
        **parallelism(stack, "eager" if ROWS[row].family in EAGER else "sdpa"),
    }


def texts(row: str) -> list[dict[str, str]]:
    """Return a row's documents as TRL takes them: a prompt and a completion if labels are masked.
    TRL adds the token at the end, and packs documents itself."""
    made = []
    for ids, labels in sequences(documents(row)):
        if ROWS[row].masked:
            first = labels.count(IGNORED)
            made.append({"prompt": text(ids[:first]), "completion": text(ids[first:-1])})
        else:
            made.append({"text": text(ids[:-1])})
    return made


def make_trainer(stack: str, row: str, folder: Path) -> Trainer:
    """Return a stack's trainer of a row."""
    given: dict[str, Any] = {"model": make_model(row)}
    base, config = Trainer, TrainingArguments
    options = settings(stack, row, folder)
    if row == "dpo" or stack == "trl":
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

        options |= {"max_length": None, "gradient_checkpointing": False, "bf16": False}
        given["processing_class"] = tokenizer()
    if row == "dpo":
        base, config = DPOTrainer, DPOConfig
        if stack in ("alst", "cp"):
            options["pad_to_multiple_of"] = MULTIPLES[stack]
        given |= {"ref_model": make_model(row), "train_dataset": Dataset.from_list(pairs())}
    elif stack == "trl":
        base, config = SFTTrainer, SFTConfig
        if row == "packed":
            options |= {"packing": True, "max_length": sum(ROWS[row].lengths)}
        options["router_aux_loss_coef"] = ROUTER_COEFFICIENT if row == "router" else 0.0
        given["train_dataset"] = given["eval_dataset"] = Dataset.from_list(texts(row))
    else:
        given["train_dataset"] = given["eval_dataset"] = documents(row)
        collate = packed if row == "packed" else padded
        given["data_collator"] = None if stack == "ours" else collate(stack)
    if stack == "ours":
        base, given = ours(base, row, given)
    return base(args=config(**options), **given)


def ours(base: Any, row: str, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the class and arguments with hf_flexseq: the longest document is cut over ranks."""
    from hf_flexseq import DataCollatorForFlexSeq, FlexSeqArguments, FlexSeqMixin

    kind = type("Planned", (FlexSeqMixin, base), {})
    if row != "dpo":
        given["data_collator"] = DataCollatorForFlexSeq()
    most = max(ROWS[row].lengths)
    return kind, given | {"flexseq_args": FlexSeqArguments(max_tokens_per_rank=most // RANKS + 4)}


def trained(stack: str, row: str, folder: Path, resumes: bool) -> dict[str, Any]:
    """Train on this rank; return the weights that learn, and the losses of evaluations.

    folder: for checkpoints, all ranks' own. resumes: whether the run begins with the checkpoint of
    an earlier one.
    """
    trainer = make_trainer(stack, row, folder)
    checkpoint = str(folder / f"run/checkpoint-{SAVED_AT}") if resumes else None
    trainer.train(resume_from_checkpoint=checkpoint)
    losses = []
    if row == "eval":
        for batch in EVAL_BATCHES:
            trainer.args.per_device_eval_batch_size = batch
            losses.append(trainer.evaluate()["eval_loss"])
    weights = trained_weights(trainer.accelerator.unwrap_model(trainer.model))
    return {"weights": weights, "eval_losses": losses}
