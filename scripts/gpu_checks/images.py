"""A small Qwen3-VL on drawn images: FlexSeqTrainer against the stock Trainer.

    trained    the tower is trained, and its graph is kept
    again      the same, and the graph is made by a second forward, as where memory is short
    frozen     the tower is frozen, and encodes the next step's images beside the current step
    in step    the same without steps that are planned ahead

Losses must agree to 1 % at every step; tokens per second and peak memory are reported.
"""

import copy
import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, set_seed

from gpu_checks.report import Section, Setting, table, verdict
from gpu_checks.training import losses_agree, measured, options_of
from hf_flexseq.base.versions import IMAGES_FROM, is_older, needs
from tests.no_graph import without_graphs

Example = dict[str, Any]

VOCAB = 8192
PATCH = 16  # pixels of a side
TOKENS = {"image_token_id": 1, "video_token_id": 2}
TOKENS |= {"vision_start_token_id": 3, "vision_end_token_id": 4}
WORD = 5  # the first token of text


class Sizes(NamedTuple):
    """The model and the run."""

    layers: int
    """Of the text model and of the tower."""
    hidden: int
    """Of both."""
    side: int
    """Most patches of an image in a row."""
    batch: int
    """Sequences of a step."""
    steps: int
    warmup: int
    """Steps that are not timed."""


FULL = Sizes(layers=12, hidden=1024, side=64, batch=8, steps=12, warmup=4)
QUICK = FULL._replace(steps=6, warmup=2)
SHORT = Sizes(layers=2, hidden=64, side=6, batch=3, steps=3, warmup=1)


class Lane(NamedTuple):
    """A way to train."""

    name: str
    flexseq: bool
    freezes: bool
    options: dict[str, Any]
    keeps_graph: bool = True


LANES = (
    Lane("stock", False, False, {}),
    Lane("flexseq, trained", True, False, {}),
    Lane("flexseq, again", True, False, {}, keeps_graph=False),
    Lane("stock, frozen", False, True, {}),
    Lane("flexseq, frozen", True, True, {}),
    Lane("flexseq, frozen, in step", True, True, {"lookahead": 0}),
)


def images_section(setting: Setting) -> Section:
    """Train in all ways, and compare the losses with those of the stock Trainer."""
    sizes = SHORT if setting.rehearse else QUICK if setting.quick else FULL
    title = f"Images on one device: text and tower of {sizes.layers} layers of {sizes.hidden}"
    if is_older("transformers", IMAGES_FROM):
        return Section.not_run(title, needs("transformers", IMAGES_FROM))
    rows = []
    holds = True
    wanted: list[float] = []
    model, dataset = small_model(sizes), list(examples(sizes))
    for lane in LANES:
        found = train(lane, model, dataset, sizes, setting)
        if not lane.flexseq:
            wanted = found["losses"]
        agrees = losses_agree(found["losses"], wanted)
        holds = holds and agrees
        speed, peak = f"{found['tokens_per_s']:,.0f}", f"{found['peak_gib']:.2f}"
        losses = f"{found['losses'][0]:.4f}, {found['losses'][-1]:.4f}"
        rows.append([lane.name, speed, peak, losses, verdict(agrees)])
    columns = ["run", "tokens/s", "peak GiB", "loss, first and last", ""]
    return Section(title=title, lines=table(columns, rows), holds=holds)


def train(
    lane: Lane,
    model: Qwen3VLForConditionalGeneration,
    dataset: list[Example],
    sizes: Sizes,
    setting: Setting,
) -> dict[str, Any]:
    """Train a copy of a model in one way; return what was measured."""
    model = copy.deepcopy(model)
    model.accepts_loss_kwargs = True  # so that both divide by the tokens of the step
    if lane.freezes:
        model.model.visual.requires_grad_(False)
    own = options_of("flexseq" if lane.flexseq else "stock", setting)
    with nullcontext() if lane.keeps_graph else without_graphs():
        return measured(
            lane.flexseq,
            model,
            dataset,
            one_row,
            warmup=sizes.warmup,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=sizes.batch,
            max_steps=sizes.steps,
            **own,
            **lane.options,
        )


def small_model(sizes: Sizes) -> Qwen3VLForConditionalGeneration:
    """Return a Qwen3-VL of these sizes."""
    set_seed(0)
    heads = max(4, sizes.hidden // 128)
    width = sizes.hidden // heads  # of a head
    section = [width // 8, width // 8, width // 2 - 2 * (width // 8)]
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": VOCAB,
            "hidden_size": sizes.hidden,
            "intermediate_size": 3 * sizes.hidden,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "head_dim": width,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": section,
            },
            "max_position_embeddings": 65536,
        },
        vision_config={
            "depth": sizes.layers,
            "hidden_size": sizes.hidden,
            "out_hidden_size": sizes.hidden,
            "intermediate_size": 4 * sizes.hidden,
            "num_heads": heads,
            "patch_size": PATCH,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0],
        },
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        **TOKENS,
    )
    return Qwen3VLForConditionalGeneration(config)


def examples(sizes: Sizes) -> Iterator[Example]:
    """Yield sequences of random images and words, enough for one pass."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(sizes.batch * sizes.steps):
        ids: list[int] = []
        patches, grids = [], []
        for _ in range(rng.randint(1, 4)):
            height, width = (2 * rng.randint(1, sizes.side // 2) for _ in range(2))
            grids.append([1, height, width])
            # three colours, twice in time
            values = torch.rand(height * width, 6 * PATCH**2, generator=generator)
            patches.append(values)
            inside = [TOKENS["image_token_id"]] * (height * width // 4)
            ids += [TOKENS["vision_start_token_id"], *inside, TOKENS["vision_end_token_id"]]
            ids += [rng.randrange(WORD, VOCAB) for _ in range(rng.randint(4, 8 * sizes.side))]
        yield {
            "input_ids": ids,
            "labels": [token if token >= WORD else -100 for token in ids],
            "mm_token_type_ids": [int(token == TOKENS["image_token_id"]) for token in ids],
            "pixel_values": torch.cat(patches),
            "image_grid_thw": torch.tensor(grids),
        }


def one_row(batch: list[Example]) -> dict[str, torch.Tensor]:
    """Return a batch of one example, as the stock Trainer takes it."""
    (example,) = batch
    tensors = {}
    for name, value in example.items():
        tensors[name] = value if isinstance(value, torch.Tensor) else torch.tensor([value])
    return tensors
