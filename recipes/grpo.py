"""Train a causal language model by rewards for what it says: TRL's GRPO on planned steps.

    # a small Llama learns from nothing to count on, two CPU processes
    accelerate launch --config_file recipes/accelerate_configs/cpu.yaml recipes/grpo.py \\
        --config recipes/quickstart/grpo.yaml

    # Llama-3.1-8B-Instruct with LoRA on eight GPUs
    accelerate launch --config_file recipes/accelerate_configs/ddp.yaml recipes/grpo.py \\
        --config recipes/llama-3.1-8b/grpo_lora.yaml

    # your own model, prompts and rewards
    accelerate launch --config_file recipes/accelerate_configs/ddp.yaml recipes/grpo.py \\
        --config recipes/llama-3.1-8b/grpo_lora.yaml --model_name_or_path ./my-model \\
        --dataset ./my-prompts.jsonl --reward_functions my_rewards.py:is_right exact

The options are those of arguments.py here, of `FlexSeqArguments`, and of TRL's `GRPOConfig`. A
reward function is called with the completions of a batch and the other columns of the dataset,
`is_right(completions, answer, **columns)`, and returns a number for each (rewards.py).

A run resumes from the last checkpoint in its output_dir; `--resume_from_checkpoint false` starts
anew, a path starts from there. Every step's plan is written to output_dir/plan_trace.jsonl.
"""

import sys
from dataclasses import dataclass

from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer

import run
from arguments import ModelArguments, PromptArguments, parse
from hf_flexseq import FlexSeqArguments, FlexSeqMixin
from launch import device_defaults
from mistakes import errors_in_a_line
from model import load_base, lora_config
from prompts import MADE, texts_of, to_prompts
from rewards import check_columns, load_rewards

ENDS = 10  # steps at both ends of a run whose rewards are compared


@dataclass
class FlexSeqGRPOConfig(FlexSeqArguments, GRPOConfig):
    """`GRPOConfig` with the options of hf_flexseq."""


class FlexSeqGRPOTrainer(FlexSeqMixin, GRPOTrainer):
    """`GRPOTrainer` on planned steps."""


def main(argv: list[str]) -> None:
    model_args, data_args, training_args = parse(
        argv, FlexSeqGRPOConfig, device_defaults(), PromptArguments, prog="grpo.py"
    )
    with errors_in_a_line():
        find_reference(training_args, model_args)
    checkpoint = run.start(training_args)
    tokenizer, train, held_out = run.prepare(
        model_args, data_args, training_args, made=MADE, texts_of=texts_of, to_rows=to_prompts
    )
    set_seed(training_args.seed)
    rewards = load_rewards(data_args.reward_functions)
    with errors_in_a_line():
        check_columns(data_args.reward_functions, rewards, train.column_names)
        trainer = FlexSeqGRPOTrainer(
            model=load_base(model_args, tokenizer),
            reward_funcs=rewards,
            args=training_args,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
            peft_config=lora_config(model_args),
        )
    run.train(trainer, checkpoint, summary)


def find_reference(training_args: GRPOConfig, model_args: ModelArguments) -> None:
    """Tell TRL which reference to load for a divergence (beta). Raises ValueError where there is
    none to load."""
    if training_args.beta == 0 or model_args.lora_r:
        return
    if model_args.model_name_or_path is None:
        raise ValueError(
            f"beta={training_args.beta}: TRL loads the reference by name, and a new model has "
            "none; give model_name_or_path, or set beta to 0"
        )
    if model_args.model_revision is not None:
        training_args.model_init_kwargs = {"revision": model_args.model_revision}


def summary(trainer: GRPOTrainer) -> list[str]:
    """Return lines about what was learned."""
    lines = []
    rewards = run.mean_of_ends(trainer, "reward", ENDS)
    if rewards:
        lines.append(f"mean reward:   {rewards[0]:.2f} -> {rewards[1]:.2f} ({ENDS} logs each)")
    rewards = run.first_and_last(trainer, "eval_reward")
    if rewards:
        lines.append(f"held out:      {rewards[0]:.2f} -> {rewards[1]:.2f}")
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])
