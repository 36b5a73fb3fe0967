"""Seconds of steps on images of a small Qwen3-VL, and how often an image passes a tower.

    torchrun --nproc_per_node 2 scripts/benchmarks/images.py

It is trained on two ranks, in turns, on the same steps:

    plain       transformers' Trainer, padded batches
    flexseq     FlexSeqTrainer: every image is encoded once
    every rank  FlexSeqTrainer, but every rank of a group encodes all images of its sequences and
                takes its own tokens' features, as other stacks with sequence parallelism do

in two cases: sequences with long-tailed images, planned freely; and sequences of images alone, one
group of two ranks for every sequence. A tenth of the sequences has no image; the others have
min(20, floor of a Pareto variable with exponent 1.3). Patches of an image are log-normal, median
1,200 and sigma 1, cut to 256 and 16,384. They are divided by 8, as the widths of layers are those
of Qwen3-VL-2B over 8, so that attention has the share that it has there. A hook counts the images
that towers encode. The Trainer's loss is told to be the mean over the tokens of a step, so that
all three train alike; the losses of a step are compared.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    PrinterCallback,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Trainer,
    TrainerCallback,
    set_seed,
)

from common import argument_parser, load_average, machine, ratios, spread, table, write_record
from hf_flexseq import DataCollatorForFlexSeq, FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.cost.tower import TowerCost
from hf_flexseq.plan.images import ImagePlan, ImageSize

Example = dict[str, Any]

VOCAB, WIDTH = 2700, 4 * 4 * 3 * 2  # values of a patch of 4 x 4 pixels, twice in time
TOKENS = {"image_token_id": 1, "video_token_id": 2}
TOKENS |= {"vision_start_token_id": 3, "vision_end_token_id": 4}
WORD = 5  # the first token of text
TEXT = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 32768,
}
TOWER = {
    "depth": 4,
    "hidden_size": 128,
    "out_hidden_size": 256,
    "intermediate_size": 512,
    "num_heads": 4,
    "patch_size": 4,
    "num_position_embeddings": 256,
    "deepstack_visual_indexes": [1],
}
WARMUP = 1  # steps that are not timed
MERGED = 4  # patches of a token
MOST, TAIL, WITHOUT = 20, 1.3, 0.1  # images of a sequence


# ---- steps


class EveryRank(ImagePlan):
    """All images on every rank."""

    __slots__ = ()

    def by_rank(self) -> list[list[int]]:
        return [list(range(len(self.owners)))] * len(self.loads)


def on_every_rank(tower: TowerCost, images: Sequence[ImageSize], world_size: int) -> EveryRank:
    """Return a plan by which a rank takes all features from itself."""
    return EveryRank(
        owners=(dist.get_rank(),) * len(images),
        loads=(sum(tower.image_ns(image) for image in images),) * world_size,
        cheapest=0,
        held_bytes=sum(image.patches for image in images) * tower.patch_bytes,
    )


class Case(NamedTuple):
    """Steps that all lanes train on."""

    examples: list[Example]
    options: dict[str, Any]
    """For FlexSeqConfig."""
    lanes: tuple[str, ...]


def cases(per_rank: int, steps: int, ranks: int) -> dict[str, Case]:
    """Return the cases by name. per_rank: sequences of a rank and a step."""
    count = per_rank * ranks * steps
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    tailed = [
        sequence(rng, generator, images_of_sequence(rng), words=rng.randint(8, 64))
        for _ in range(count)
    ]
    alone = [
        sequence(rng, generator, max(1, images_of_sequence(rng)), words=0) for _ in range(count)
    ]
    degree = {"planner": "static", "sp_degree": ranks, "strategy": "ulysses"}
    return {
        "long-tailed images": Case(tailed, {}, ("plain", "flexseq")),
        "images alone, degree 2": Case(alone, degree, ("flexseq", "every rank")),
    }


def sequence(rng: random.Random, generator: torch.Generator, images: int, words: int) -> Example:
    """Return a sequence of random images, with so many words behind each of them."""
    ids: list[int] = []
    patches, grids = [], []
    for _ in range(images):
        height, width = sides_of_image(rng)
        grids.append([1, height, width])
        patches.append(torch.rand(height * width, WIDTH, generator=generator))
        inside = [TOKENS["image_token_id"]] * (height * width // MERGED)
        ids += [TOKENS["vision_start_token_id"], *inside, TOKENS["vision_end_token_id"]]
        ids += [rng.randrange(WORD, VOCAB) for _ in range(words)]
    ids += [rng.randrange(WORD, VOCAB) for _ in range(4)]
    labels = [token if token >= WORD else -100 for token in ids]
    types = [int(token == TOKENS["image_token_id"]) for token in ids]
    example: Example = {"input_ids": ids, "labels": labels, "mm_token_type_ids": types}
    if images:
        example["pixel_values"] = torch.cat(patches)
        example["image_grid_thw"] = torch.tensor(grids)
    return example


def images_of_sequence(rng: random.Random) -> int:
    """Return how many images a sequence has."""
    return 0 if rng.random() < WITHOUT else min(MOST, int(rng.paretovariate(TAIL)))


def sides_of_image(rng: random.Random) -> tuple[int, int]:
    """Return height and width of an image in patches, both even, nearly equal."""
    patches = min(max(rng.lognormvariate(7.09, 1.0), 256), 16384) / 8  # e^7.09 = 1,200
    height = max(2, 2 * round(patches**0.5 / 2))
    return height, max(2, 2 * round(patches / height / 2))


def padded(examples: list[Example]) -> dict[str, torch.Tensor]:
    """Return a batch as the plain Trainer takes it."""
    batch = {}
    for name, filler in {"input_ids": 0, "labels": -100, "mm_token_type_ids": 0}.items():
        rows = [torch.tensor(example[name]) for example in examples]
        batch[name] = pad_sequence(rows, batch_first=True, padding_value=filler)
    lengths = torch.tensor([len(example["input_ids"]) for example in examples])
    batch["attention_mask"] = (torch.arange(lengths.max()) < lengths[:, None]).long()
    for name in ("pixel_values", "image_grid_thw"):
        batch[name] = torch.cat([example[name] for example in examples if name in example])
    return batch


def small_model() -> Qwen3VLForConditionalGeneration:
    """Return a Qwen3-VL whose widths are those of Qwen3-VL-2B over 8, of four layers each."""
    set_seed(0)
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [6, 5, 5]}
    config = Qwen3VLConfig(
        text_config={**TEXT, "vocab_size": VOCAB, "rope_parameters": rope},
        vision_config=dict(TOWER),
        tie_word_embeddings=True,
        **TOKENS,
    )
    return Qwen3VLForConditionalGeneration(config)


class Clock(TrainerCallback):
    """Seconds of each step, by the wall clock and on this rank's processor."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.processor: list[float] = []
        self._began = (0.0, 0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._began = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        wall, processor = self._began
        self.seconds.append(time.perf_counter() - wall)
        self.processor.append(time.process_time() - processor)


@contextmanager
def counting_images(model: Qwen3VLForConditionalGeneration) -> Iterator[list[int]]:
    """Count the images of every call of the tower inside the block."""
    counts: list[int] = []

    def count(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        counts.append(len(kwargs["grid_thw"]))

    hook = model.model.visual.register_forward_pre_hook(count, with_kwargs=True)
    yield counts
    hook.remove()


class Trained(NamedTuple):
    """What one training has shown."""

    seconds: float
    """Of a step, after those that warm up."""
    processor: float
    """The same on the processors of all ranks, which other work on the machine changes little."""
    encoded: float
    """Images through the towers of all ranks, over the images of the steps."""
    losses: list[float]


def train(case: Case, lane: str, per_rank: int, steps: int) -> Trained:
    """Train a new model. Collective over the world."""
    model = small_model()
    clock = Clock()
    placed = on_every_rank if lane == "every rank" else TowerCost.placed
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(TowerCost, "placed", placed),
        counting_images(model) as counts,
    ):
        args = FlexSeqConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=per_rank,
            learning_rate=1e-4,
            use_cpu=True,
            report_to="none",
            logging_steps=1,
            save_strategy="no",
            cost_model="estimate",
            disable_tqdm=True,
            train_sampling_strategy="sequential",
            ddp_find_unused_parameters=False,
            **({} if lane == "plain" else case.options),
        )
        model.accepts_loss_kwargs = True
        made = Trainer if lane == "plain" else FlexSeqTrainer
        trainer = made(
            model=model,
            args=args,
            train_dataset=case.examples,
            data_collator=padded if lane == "plain" else DataCollatorForFlexSeq(),
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    summed = torch.tensor([sum(counts), sum(clock.processor[WARMUP:])], dtype=torch.float64)
    dist.all_reduce(summed)
    encoded, processor = summed.tolist()
    drawn = sum(len(example.get("image_grid_thw", ())) for example in case.examples)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    timed = steps - WARMUP
    return Trained(sum(clock.seconds[WARMUP:]) / timed, processor / timed, encoded / drawn, losses)


def steps_page(asked: argparse.Namespace) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """Train every case in turns; return rows of the table, and raw figures."""
    world = int(os.environ["WORLD_SIZE"])
    lines = []
    figures = []
    for name, case in cases(asked.per_rank, asked.steps, world).items():
        found: dict[str, list[Trained]] = {lane: [] for lane in case.lanes}
        for number in range(asked.rounds):
            order = case.lanes if number % 2 == 0 else case.lanes[::-1]
            for lane in order:
                found[lane].append(train(case, lane, asked.per_rank, asked.steps))
        ours = found["flexseq"]
        seconds = {lane: [one.seconds for one in runs] for lane, runs in found.items()}
        processor = {lane: [one.processor for one in runs] for lane, runs in found.items()}
        for lane, runs in found.items():
            for one, other in zip(runs[0].losses, ours[0].losses, strict=True):
                assert abs(one / other - 1) < 1e-4, f"{lane} trains otherwise: {one} and {other}"
            lines.append(
                [
                    name,
                    lane,
                    f"{statistics.median(seconds[lane]):.2f} s",
                    spread(ratios(seconds["flexseq"], seconds[lane]), 2),
                    f"{statistics.median(processor[lane]):.2f} s",
                    spread(ratios(processor["flexseq"], processor[lane]), 2),
                    f"{runs[0].encoded:.2f}",
                ]
            )
        encoded = {lane: runs[0].encoded for lane, runs in found.items()}
        figures.append(
            {"case": name, "seconds": seconds, "processor_s": processor, "encoded": encoded}
        )
    return lines, figures


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=6, help="of a training, the first untimed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--per-rank", type=int, default=4, help="sequences of a rank and a step")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    before = load_average()
    lines, figures = steps_page(asked)
    if int(os.environ["RANK"]) == 0:
        columns = ("case", "lane", "a step", "flexseq / lane", "processors", "flexseq / lane")
        columns += ("an image through a tower",)
        print(table(columns, lines, numbers=range(2, 7)))
        print(
            f"\n{machine('torch', 'transformers')}; load before {before}; after {load_average()}"
        )
        write_record(asked.json, figures)


if __name__ == "__main__":
    main()
