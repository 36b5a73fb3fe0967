"""Fine-tune a causal language model on documents of very different lengths.

    # a Llama of 135M parameters answers questions about Python, two CPU processes
    accelerate launch --config_file recipes/accelerate_configs/cpu.yaml recipes/sft.py \\
        --config recipes/smollm2-135m/chat.yaml

    # Llama-3.1-8B on eight GPUs
    accelerate launch --config_file recipes/accelerate_configs/fsdp2.yaml recipes/sft.py \\
        --config recipes/llama-3.1-8b/long_context.yaml

    # your own model and data: any option of the YAML file can be given here too, and wins
    accelerate launch --config_file recipes/accelerate_configs/ddp.yaml recipes/sft.py \\
        --config recipes/llama-3.1-8b/long_context_lora.yaml \\
        --model_name_or_path ./my-model --dataset ./my-data.jsonl

The options are those of arguments.py here, of `FlexSeqArguments`, and of `TrainingArguments`. A
run resumes from the last checkpoint in its output_dir; `--resume_from_checkpoint false` starts
anew, a path starts from there. Every step's plan is written to output_dir/plan_trace.jsonl.
"""

import sys

from datasets import Dataset
from transformers import PreTrainedTokenizerBase, set_seed

import run
from answers import Answers
from arguments import DataArguments, ModelArguments, parse
from corpus import MADE
from data import to_sequences
from hf_flexseq import DataCollatorForFlexSeq, FlexSeqConfig, FlexSeqTrainer
from launch import device_defaults
from mistakes import errors_in_a_line
from model import load_model
from topics import TOPICS, load_topics


def main(argv: list[str]) -> None:
    model_args, data_args, training_args = parse(argv, FlexSeqConfig, device_defaults())
    checkpoint = run.start(training_args)
    set_seed(training_args.seed)
    tokenizer, train, held_out = prepare(model_args, data_args, training_args)
    with errors_in_a_line():
        trainer = FlexSeqTrainer(
            model=load_model(model_args, tokenizer),
            args=training_args,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
            data_collator=DataCollatorForFlexSeq(),
        )
        answers = Answers(held_out, data_args.show_answers, tokenizer)
        answers.ask(trainer)

    def learned(trainer: FlexSeqTrainer) -> list[str]:
        answers.ask(trainer)
        return summary(trainer) + answers.lines()

    run.train(trainer, checkpoint, learned)


def prepare(
    model_args: ModelArguments, data_args: DataArguments, training_args: FlexSeqConfig
) -> tuple[PreTrainedTokenizerBase, Dataset, Dataset | None]:
    """Return (tokenizer, sequences to train on, held-out sequences or None)."""

    def texts_of(documents: Dataset) -> list[str] | None:
        if data_args.text_column not in documents.column_names:
            return None
        return documents[data_args.text_column]

    made = MADE | {TOPICS: load_topics}
    return run.prepare(
        model_args, data_args, training_args, made=made, texts_of=texts_of, to_rows=to_sequences
    )


def summary(trainer: FlexSeqTrainer) -> list[str]:
    """Return lines about what was learned."""
    lines = []
    losses = run.first_and_last(trainer, "eval_loss")
    if losses:
        lines.append(f"held-out loss: {losses[0]:.2f} -> {losses[1]:.2f}")
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])
