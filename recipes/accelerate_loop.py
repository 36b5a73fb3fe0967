"""A training loop of your own on planned steps: Accelerate and hf_flexseq, without the Trainer.

    accelerate launch --config_file recipes/accelerate_configs/cpu.yaml recipes/accelerate_loop.py

Lines that differ from a plain Accelerate loop are marked. docs/integrations.md has a loop that
also saves and resumes.
"""

import time

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from hf_flexseq import DataCollatorForFlexSeq, FlexSeqArguments, FlexSeqEngine

STEPS = 20  # optimizer steps
BATCH = 4  # sequences that a rank draws at once
ACCUMULATION = 2  # draws of an optimizer step
HELD_OUT = 20  # documents that are evaluated on


def documents(count: int = 340, vocab: int = 128) -> list[dict[str, list[int]]]:
    """Return counting sequences of long-tailed lengths, which a small model learns quickly."""
    lengths = torch.empty(count).log_normal_(mean=4.0, std=1.2).clamp(2, 2000).int().tolist()
    examples = []
    for start, length in enumerate(lengths):
        row = [(start + i) % vocab for i in range(length)]
        examples.append({"input_ids": row, "labels": row})
    return examples


def main() -> None:
    set_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # (1) our collator
    collator = DataCollatorForFlexSeq()
    examples = documents()
    dataloader = DataLoader(examples[HELD_OUT:], BATCH, shuffle=True, collate_fn=collator)
    held_out = DataLoader(examples[:HELD_OUT], BATCH, collate_fn=collator)

    # (2) an engine
    engine = FlexSeqEngine(accelerator, FlexSeqArguments(max_tokens_per_rank=1500))
    engine.attach(model)
    model, optimizer, dataloader, held_out = accelerator.prepare(
        model, optimizer, dataloader, held_out
    )

    model.train()
    # (3) steps, not batches
    for index, step in enumerate(engine.steps(dataloader, accumulation=ACCUMULATION)):
        step.backward(model)  # (4) forward and backward of the whole step
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = step.mean_loss()  # (5) over all target tokens of the step, on every rank
        accelerator.print(
            f"step {index:2d}  loss {loss:.3f}  groups by degree {step.plan.degrees()}"
        )
        if index + 1 == STEPS:
            break

    model.eval()
    evaluation = engine.evaluation(held_out)  # (6) steps without a backward
    for step in evaluation:
        step.forward(model)
    accelerator.print(f"held-out loss {evaluation.mean_loss():.3f}")  # over all target tokens
    engine.detach()
    accelerator.wait_for_everyone()
    # gloo's thread drops its last tensors, for which it needs the interpreter, before the group
    # ends
    time.sleep(0.5)
    accelerator.end_training()


if __name__ == "__main__":
    main()
