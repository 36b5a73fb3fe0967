"""Tune a causal language model on pairs of a better and a worse answer: TRL's DPO on plans.

    # a Llama of 135M parameters learns to answer and not to evade, two CPU processes
    accelerate launch --config_file recipes/accelerate_configs/cpu.yaml recipes/dpo.py \\
        --config recipes/smollm2-135m/dpo.yaml

    # Llama-3.1-8B on eight GPUs
    accelerate launch --config_file recipes/accelerate_configs/fsdp2.yaml recipes/dpo.py \\
        --config recipes/llama-3.1-8b/dpo.yaml

    # your own model and pairs: rows of prompt, chosen and rejected, as text or as messages
    accelerate launch --config_file recipes/accelerate_configs/ddp.yaml recipes/dpo.py \\
        --config recipes/llama-3.1-8b/dpo.yaml --lora_r 64 \\
        --model_name_or_path ./my-model --dataset ./my-pairs.jsonl

The options are those of arguments.py here, of `FlexSeqArguments`, and of TRL's `DPOConfig`. The
reference is the model that training starts from; with LoRA it is the model without its adapters.
Commonly that model has seen the chosen answers before: train it with sft.py and give its folder
as model_name_or_path, or learn both at once with `--loss_type sigmoid sft`.

A run resumes from the last checkpoint in its output_dir; `--resume_from_checkpoint false` starts
anew, a path starts from there. Every step's plan is written to output_dir/plan_trace.jsonl.
"""

import sys
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from trl import DPOConfig, DPOTrainer

import run
from arguments import ModelArguments, PreferenceArguments, parse
from hf_flexseq import FlexSeqArguments, FlexSeqMixin
from launch import device_defaults
from mistakes import errors_in_a_line
from model import load_base, lora_config
from pairs import MADE, texts_of, to_pairs


@dataclass
class FlexSeqDPOConfig(FlexSeqArguments, DPOConfig):
    """`DPOConfig` with the options of hf_flexseq."""


class FlexSeqDPOTrainer(FlexSeqMixin, DPOTrainer):
    """`DPOTrainer` on planned steps."""


def main(argv: list[str]) -> None:
    model_args, data_args, training_args = parse(
        argv, FlexSeqDPOConfig, device_defaults(), PreferenceArguments, prog="dpo.py"
    )
    checkpoint = run.start(training_args)
    tokenizer, train, held_out = run.prepare(
        model_args, data_args, training_args, made=MADE, texts_of=texts_of, to_rows=to_pairs
    )
    if training_args.dataset_num_proc is None:
        training_args.dataset_num_proc = data_args.preprocessing_workers
    set_seed(training_args.seed)
    with errors_in_a_line():
        trainer = FlexSeqDPOTrainer(
            model=load_base(model_args, tokenizer),
            ref_model=load_reference(model_args, training_args, tokenizer),
            args=training_args,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
            peft_config=lora_config(model_args),
        )
    run.train(trainer, checkpoint, summary)


def load_reference(
    model_args: ModelArguments, training_args: DPOConfig, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel | None:
    """Return a second copy of the model that training starts from.

    None where TRL needs none: with adapters, which it turns off, and where the reference's figures
    are computed before training.
    """
    if model_args.lora_r or training_args.precompute_ref_log_probs:
        return None
    set_seed(training_args.seed)  # a new model has the same weights again
    return load_base(model_args, tokenizer)


def summary(trainer: DPOTrainer) -> list[str]:
    """Return lines about what was learned."""
    lines = []
    losses = run.first_and_last(trainer, "eval_loss")
    accuracies = run.first_and_last(trainer, "eval_rewards/accuracies")
    if losses and accuracies:
        lines.append(
            f"held out:      loss {losses[1]:.2f}, {accuracies[1]:.0%} of the pairs in their order"
        )
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])
