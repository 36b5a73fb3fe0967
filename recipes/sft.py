"""Fine-tune a causal language model on documents of very different lengths.

    # a small Llama on the Python standard library's own source, two CPU processes
    accelerate launch --config_file recipes/accelerate_configs/cpu.yaml recipes/sft.py \\
        --config recipes/quickstart/small_llama.yaml

    # Llama-3.1-8B on eight GPUs
    accelerate launch --config_file recipes/accelerate_configs/fsdp2.yaml recipes/sft.py \\
        --config recipes/llama-3.1-8b/long_context.yaml

    # your own model and data: any option of the YAML file can be given here too, and wins
    accelerate launch --config_file recipes/accelerate_configs/ddp.yaml recipes/sft.py \\
        --config recipes/llama-3.1-8b/long_context_lora.yaml \\
        --model_name_or_path ./my-model --dataset ./my-data.jsonl

The options are those of arguments.py here, of `FlexSeqArguments`, and of `TrainingArguments`. A
run goes on from the last checkpoint in its output_dir; `--resume_from_checkpoint false` starts
anew, a path starts from there. Every step's plan is written to output_dir/plan_trace.jsonl.
"""

import sys
import time
from pathlib import Path

import datasets
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import get_last_checkpoint

from arguments import DataArguments, ModelArguments, parse
from bpe import cached_bpe
from corpus import load_documents
from data import to_sequences
from hf_flexseq import DataCollatorForFlexSeq, FlexSeqConfig, FlexSeqTrainer
from launch import check_world, device_defaults
from model import load_model, load_tokenizer
from progress import PlanProgress


def main(argv: list[str]) -> None:
    model_args, data_args, training_args = parse(argv, FlexSeqConfig, device_defaults())
    check_world(training_args)
    checkpoint = checkpoint_to_resume(training_args)
    start_trace(training_args, anew=checkpoint is None)
    set_seed(training_args.seed)
    tokenizer, train, held_out = prepare(model_args, data_args, training_args)
    trainer = FlexSeqTrainer(
        model=load_model(model_args, tokenizer),
        args=training_args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=DataCollatorForFlexSeq(),
    )
    if not training_args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(PlanProgress)
    trainer.train(resume_from_checkpoint=checkpoint)
    if held_out is not None:
        trainer.evaluate()
    save(trainer)
    if trainer.is_world_process_zero():
        print(summary(trainer))
    end(trainer)


def prepare(
    model_args: ModelArguments, data_args: DataArguments, training_args: FlexSeqConfig
) -> tuple[PreTrainedTokenizerBase, Dataset, Dataset | None]:
    """Return (tokenizer, sequences to train on, held-out sequences or None).

    The first process of a node works, the others read its cache.
    """
    if training_args.process_index:
        datasets.disable_progress_bars()
    with training_args.main_process_first():
        documents, held_out_documents = load_documents(data_args)
        tokenizer = choose_tokenizer(model_args, data_args, documents)
        train, report = to_sequences(documents, tokenizer, data_args)
        held_out, held_out_report = None, "nothing"
        if len(held_out_documents):
            held_out, held_out_report = to_sequences(held_out_documents, tokenizer, data_args)
    if training_args.process_index == 0:
        print(f"train on: {report}\nheld out: {held_out_report}")
    return tokenizer, train, held_out


def choose_tokenizer(
    model_args: ModelArguments, data_args: DataArguments, documents: Dataset
) -> PreTrainedTokenizerBase:
    """Return the tokenizer that was named, or one trained on these documents."""
    named = load_tokenizer(model_args)
    if named is not None:
        return named
    if data_args.text_column not in documents.column_names:
        raise ValueError(
            f"a tokenizer is trained on text only: name a tokenizer_name_or_path for "
            f"{data_args.dataset}"
        )
    texts = documents[data_args.text_column]
    return cached_bpe(texts, model_args.tokenizer_vocab_size, data_args.tokenizer_cache)


def checkpoint_to_resume(args: FlexSeqConfig) -> str | None:
    """Return the checkpoint that was asked for, by default the last one of this output_dir."""
    asked = args.resume_from_checkpoint
    if str(asked).lower() == "false":
        return None
    if asked is not None and str(asked).lower() != "true":
        return asked
    last = None
    if Path(args.output_dir).is_dir():
        last = get_last_checkpoint(args.output_dir)
    if asked is not None and last is None:
        raise ValueError(
            f"resume_from_checkpoint={asked}, but there is no checkpoint in {args.output_dir}"
        )
    return last


def start_trace(args: FlexSeqConfig, anew: bool) -> None:
    """Name the plan trace; a run that starts anew does not go on in the file of an earlier one."""
    args.plan_trace = args.plan_trace or f"{args.output_dir}/plan_trace.jsonl"
    if anew and args.process_index == 0:
        Path(args.plan_trace).unlink(missing_ok=True)


def save(trainer: FlexSeqTrainer) -> None:
    """Save the whole model in one place, however it was sharded."""
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()


def summary(trainer: FlexSeqTrainer) -> str:
    """Return the last lines of a run: what was learned, and where it lies."""
    args = trainer.args
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    lines = []
    if losses:
        lines.append(f"held-out loss: {losses[0]:.2f} -> {losses[-1]:.2f}")
    if args.plan_trace:
        lines.append(f"plan trace:    {args.plan_trace}")
    lines.append(
        f"checkpoint:    {args.output_dir}  "
        f'(AutoModelForCausalLM.from_pretrained("{args.output_dir}"))'
    )
    return "\n".join(lines)


def end(trainer: FlexSeqTrainer) -> None:
    """Leave together: a process that ends while another still talks to it may abort.

    In between gloo's own thread drops the tensors of its last transfers, for which it needs the
    interpreter. Were the group destroyed meanwhile, which holds the interpreter and waits for that
    thread, the process would hang.
    """
    trainer.accelerator.wait_for_everyone()
    time.sleep(0.5)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1:])
