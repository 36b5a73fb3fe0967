"""Train a vision-language model on documents with very different numbers of images.

    # a small Qwen3-VL learns from nothing to look at drawn pictures, two CPU processes
    accelerate launch --config_file recipes/accelerate_configs/cpu.yaml recipes/vlm.py \\
        --config recipes/quickstart/vlm.yaml

    # the same with transformers' own Trainer: equal losses, step by step
    accelerate launch --config_file recipes/accelerate_configs/cpu.yaml recipes/vlm.py \\
        --config recipes/quickstart/vlm.yaml --plain_trainer true --output_dir runs/vlm-plain

    # what has been trained once more, with LoRA on text and tower, or with a frozen tower
    accelerate launch --config_file recipes/accelerate_configs/cpu.yaml recipes/vlm.py \\
        --config recipes/quickstart/vlm.yaml --model_name_or_path runs/vlm \\
        --lora_r 8 --output_dir runs/vlm-lora
    accelerate launch --config_file recipes/accelerate_configs/cpu.yaml recipes/vlm.py \\
        --config recipes/quickstart/vlm.yaml --model_name_or_path runs/vlm \\
        --freeze tower --output_dir runs/vlm-frozen

The documents are drawn (albums.py); for your own give the trainer examples of the model's own
processor, with `input_ids`, `labels` and the tensors of their images. The options are those of
`VisionModelArguments` (vision_model.py), of `AlbumArguments` (albums.py), of `FlexSeqArguments`,
and of `TrainingArguments`. A run resumes from the last checkpoint in its output_dir;
`--resume_from_checkpoint false` starts anew, a path starts from there. Every step's plan is
written to output_dir/plan_trace.jsonl.
"""

import sys
from functools import partial
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

import run
from albums import AlbumArguments, Albums, padded, right_answers
from arguments import parse
from hf_flexseq import DataCollatorForFlexSeq, FlexSeqConfig, FlexSeqTrainer
from launch import device_defaults
from mistakes import errors_in_a_line
from vision_model import VisionModelArguments, load_model, load_processors

AUTO_CLASS = "AutoModelForImageTextToText"
HELD_OUT_SEED = -1  # of the held-out albums, which no run trains on


def main(argv: list[str]) -> None:
    model_args, album_args, training_args = parse(
        argv,
        FlexSeqConfig,
        device_defaults(),
        AlbumArguments,
        prog="vlm.py",
        model_type=VisionModelArguments,
    )
    checkpoint = run.start(training_args)
    set_seed(training_args.seed)
    with errors_in_a_line():
        tokenizer, image_processor = load_processors(model_args)
        model = load_model(model_args, tokenizer)
        albums = partial(
            Albums, tokenizer=tokenizer, image_processor=image_processor, config=model.config
        )
        held_out = albums(album_args.held_out_albums, HELD_OUT_SEED)
        trainer = make_trainer(
            album_args.plain_trainer,
            model=model,
            args=training_args,
            train_dataset=albums(album_args.train_albums, training_args.data_seed or 0),
            eval_dataset=held_out,
            processing_class=tokenizer,
        )
    exact = ExactMatch(trainer, held_out)
    trainer.add_callback(exact)
    image_processor.save_pretrained(training_args.output_dir)
    run.train(trainer, checkpoint, lambda _: exact.summary(), AUTO_CLASS)


def make_trainer(plain: bool, **given: Any) -> Trainer:
    """Return a FlexSeqTrainer, or transformers' own Trainer on padded batches."""
    if not plain:
        return FlexSeqTrainer(data_collator=DataCollatorForFlexSeq(), **given)
    given["args"].plan_trace = None
    # Otherwise the plain Trainer's loss is the mean over ranks of their means over tokens.
    given["model"].accepts_loss_kwargs = True
    collate = partial(padded, padding=given["processing_class"].pad_token_id)
    return Trainer(data_collator=collate, **given)


class ExactMatch(TrainerCallback):
    """Counts the answers about held-out pictures that are right, word for word, with every
    evaluation."""

    def __init__(self, trainer: Trainer, albums: Albums) -> None:
        self._accelerator = trainer.accelerator
        self._albums = albums
        self.shares: list[float] = []
        """Of right answers, one for each evaluation."""

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: PreTrainedModel,
        **given: Any,
    ) -> None:
        was_training = model.training
        model.eval()
        counts = self._counts(model, args.process_index, args.world_size)
        model.train(was_training)
        right, answers = self._accelerator.reduce(counts, "sum").tolist()
        self.shares.append(right / answers)

    @torch.no_grad()
    def _counts(self, model: PreTrainedModel, rank: int, world_size: int) -> torch.Tensor:
        """Return the answers of this rank's albums that are right, and all of them, [2]. Every
        rank calls the model equally often: a sharded one is gathered by all together."""
        device = self._accelerator.device
        counts = torch.zeros(2, dtype=torch.int64, device=device)
        for start in range(0, len(self._albums), world_size):
            example = self._albums[(start + rank) % len(self._albums)]
            batch = {name: value.to(device) for name, value in padded([example], 0).items()}
            del batch["labels"]
            logits = model(**batch, use_cache=False).logits[0]
            if start + rank < len(self._albums) and "pixel_values" in example:
                counts += torch.tensor(right_answers(example, logits), device=device)
        return counts

    def summary(self) -> list[str]:
        """Return lines about what was learned."""
        if not self.shares:
            return []
        return [f"right answers: {self.shares[0]:.0%} -> {self.shares[-1]:.0%} (held out)"]


if __name__ == "__main__":
    main(sys.argv[1:])
