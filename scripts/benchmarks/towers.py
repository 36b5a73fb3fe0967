"""Predicted and measured seconds of small vision towers, and their bytes; the part of `images.py`
with --towers.

Each model is calibrated as `flexseq calibrate` does it, with its tower trained, frozen, or trained
with checkpointing. Then the tower of another copy encodes images of sizes that the calibration did
not time, forward and backward if it is trained, in turns. Beside it stands what the configuration
of the tower says at the measured speed of the text model, which was the cost of a tower before it
was timed. Seconds are those of the processor, in the calibration, too: other work on the machine
does not count.

Bytes are those of all tensors that autograd saves for the backward of images, parameters left out,
on real tensors.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from accelerate import Accelerator
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, PreTrainedModel

from hf_flexseq.cost.tower import TowerCost
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.calibration.choose import (
    CostSubject,
    RunWide,
    measured,
    with_counted_bytes,
    with_tower_of,
)
from hf_flexseq.hf.model.facts import model_facts
from hf_flexseq.hf.model.towers import tower_parameters
from hf_flexseq.hf.model.vision import VisionModel
from hf_flexseq.plan.images import IMAGE, ImageSize
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.profiler import measure
from hf_flexseq.profiler.design import Effort
from hf_flexseq.steps.images import Image

Tensors = dict[str, torch.Tensor]

TOWER_COLUMNS = (
    *("model", "tower", "runs", "measured", "predicted / measured", "error, median", "largest"),
    *("by text / measured", "its error, median", "largest"),
)
BYTE_COLUMNS = ("model", "patches", "KiB per patch, seen", "counted / seen", "estimated / seen")

SMALL_TEXT = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 32768,
}
TEXT = {**SMALL_TEXT, "vocab_size": 1024, "pad_token_id": 0}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}
QWEN_TOWER = {
    "depth": 4,
    "hidden_size": 128,
    "out_hidden_size": 256,
    "intermediate_size": 512,
    "num_heads": 4,
    "patch_size": 4,
}
QWEN3_TOWER = {**QWEN_TOWER, "num_position_embeddings": 256, "deepstack_visual_indexes": [1]}
SIGLIP = {
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "patch_size": 4,
}
QWEN_IDS = {"image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3}
QWEN_IDS |= {"vision_end_token_id": 4}


def grid(height: int, width: int) -> Tensors:
    """An image of patches of 4 x 4 pixels, twice in time."""
    pixels = torch.rand(height * width, 4 * 4 * 3 * 2)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}


def pixels(size: int, *leading: int) -> Tensors:
    """An image of one size."""
    return {"pixel_values": torch.rand(*leading, 3, size, size)}


def masked(size: int) -> Tensors:
    """An image of one size among those of an example."""
    mask = torch.ones(1, 1, size, size, dtype=torch.bool)
    return {**pixels(size, 1, 1), "pixel_attention_mask": mask}


# Numbers of patches of the images of a run.
GRIDS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((12, 20),),
    ((28, 28),),
    ((8, 12), (20, 28)),
    ((6, 8),) * 12,
    ((8, 8), (12, 8), (16, 24), (4, 10)),
    ((36, 44),),
)


class Model(NamedTuple):
    """A small model, and images for its tower."""

    kind: str
    options: dict[str, Any]
    runs: list[Callable[[], list[Tensors]]]
    """Each draws the images of one call."""


def _grids() -> list[Callable[[], list[Tensors]]]:
    return [lambda sizes=sizes: [grid(*size) for size in sizes] for sizes in GRIDS]


def _equal(draw: Callable[[], Tensors]) -> list[Callable[[], list[Tensors]]]:
    counts = (1, 2, 3, 5)
    return [lambda count=count: [draw() for _ in range(count)] for count in counts]


def tower_models() -> dict[str, Model]:
    """Return the models by what they are like."""
    qwen_text = {**TEXT, "rope_parameters": MROPE}
    windows = {**QWEN_TOWER, "window_size": 32, "fullatt_block_indexes": [3]}
    gemma = {"text_config": {**TEXT, "query_pre_attn_scalar": 32}, "image_token_id": 1}
    gemma |= {"vision_config": {**SIGLIP, "image_size": 96, "vision_use_head": False}}
    smol = {"text_config": {"model_type": "llama", **TEXT}, "image_token_id": 1}
    smol |= {"vision_config": {**SIGLIP, "hidden_size": 64, "image_size": 64}, "scale_factor": 2}
    return {
        "Qwen3-VL": Model(
            "qwen3_vl",
            {"text_config": qwen_text, "vision_config": QWEN3_TOWER, **QWEN_IDS},
            _grids(),
        ),
        "Qwen2.5-VL, windows": Model(
            "qwen2_5_vl",
            {"text_config": qwen_text, "vision_config": windows, **QWEN_IDS},
            _grids(),
        ),
        "Gemma 3": Model(
            "gemma3", {**gemma, "mm_tokens_per_image": 64}, _equal(lambda: pixels(96, 1))
        ),
        "SmolVLM": Model("smolvlm", smol, _equal(lambda: masked(64))),
    }


def made(model: Model, state: str) -> PreTrainedModel:
    """Return a model. state: of its tower."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model.kind, **model.options)
    one = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config).train()
    if state == "frozen":
        for parameter in tower_parameters(one):
            parameter.requires_grad_(False)
    if state == "checkpointed":
        one.gradient_checkpointing_enable({"use_reentrant": False})
    return one


class Towers(NamedTuple):
    """What a tower is said to cost."""

    timed: TowerCost
    by_text: TowerCost
    estimated: TowerCost


def calibrated(model: PreTrainedModel, budget_s: float) -> Towers:
    """Calibrate a model on this rank alone."""
    communicator = Communicator()
    facts = model_facts(model, Accelerator(cpu=True))
    subject = CostSubject(
        facts=facts,
        has_chunked_loss=True,
        topology=communicator.topology,
        device=torch.device("cpu"),
        model=model,
        run_wide=RunWide(MemoryChoice(), 1e9),
    )
    clock = SimpleNamespace(perf_counter=time.process_time)
    with patch.object(measure, "time", clock):
        found = measured(subject, communicator, Effort(budget_s=budget_s))
    timed = with_counted_bytes(found.cost, subject).tower
    by_text = with_tower_of(subject.estimate, found.cost).tower
    assert timed is not None
    assert by_text is not None
    assert subject.estimate.tower is not None
    return Towers(timed, by_text, subject.estimate.tower)


class Run(NamedTuple):
    """Images of one call."""

    images: list[Image]
    sizes: list[ImageSize]

    def seconds(self, tower: TowerCost) -> float:
        """Predict the seconds of the run."""
        return tower.placed(self.sizes, 1).seconds


def run_of(vision: VisionModel, tensors: Sequence[Tensors]) -> Run:
    """Return a run on images."""
    images, sizes = [], []
    for one in tensors:
        image = Image(sequence=0, modality=IMAGE, arguments=one, tokens=0, patches=0, pairs=0)
        with torch.no_grad():
            tokens = len(vision.features_of(image))
        patches, pairs = vision.work_of(one)
        images.append(
            Image(
                sequence=0,
                modality=IMAGE,
                arguments=one,
                tokens=tokens,
                patches=patches,
                pairs=pairs,
            )
        )
        sizes.append(
            ImageSize(
                sequence=0,
                modality=IMAGE,
                tokens=tokens,
                patches=patches,
                pairs=pairs,
                data_bytes=0,
            )
        )
    return Run(images, sizes)


def timed(vision: VisionModel, runs: Sequence[Run], rounds: int) -> list[float]:
    """Return the seconds of each run, forward and backward of a trained tower: the median of
    rounds in turns, after one that does not count."""
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds + 1):
        for run, found in zip(runs, seconds, strict=True):
            began = time.process_time()
            with torch.set_grad_enabled(vision.is_trained):
                features = vision.encode(run.images, vision.calls(run.images))
            if vision.is_trained:
                features.sum().backward()
            found.append(time.process_time() - began)
    return [statistics.median(found[1:]) for found in seconds]


def seen_bytes(model: PreTrainedModel, vision: VisionModel, run: Run) -> int:
    """Return the bytes that autograd saves for the backward of a run, without parameters."""
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    own = {one.untyped_storage().data_ptr() for one in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        features = vision.encode(run.images, vision.calls(run.images))
    assert features.requires_grad
    return sum(one.untyped_storage().nbytes() for key, one in kept.items() if key not in own)


def towers_page(
    asked: argparse.Namespace,
) -> tuple[list[list[str]], list[list[str]], list[dict[str, Any]]]:
    """Return the rows of both tables, and raw figures."""
    torch.set_num_threads(1)
    random.seed(0)
    lines, of_bytes, figures = [], [], []
    known = tower_models()
    for name in asked.towers or known:
        model = known[name]
        for state in ("trained", "checkpointed", "frozen"):
            one = made(model, state)
            towers = calibrated(one, asked.budget)
            vision = VisionModel(one)
            runs = [run_of(vision, draw()) for draw in model.runs]
            seconds = timed(vision, runs, asked.rounds)
            predicted = [run.seconds(towers.timed) for run in runs]
            by_text = [run.seconds(towers.by_text) for run in runs]
            lines.append(
                [
                    name,
                    state,
                    str(len(runs)),
                    f"{1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f} ms",
                    *_errors(predicted, seconds),
                    *_errors(by_text, seconds),
                ]
            )
            figure = {"model": name, "tower": state, "seconds": seconds}
            figure |= {"predicted": predicted, "by_text": by_text}
            figure["constants"] = towers.timed.to_record()
            if state == "trained":
                seen = [seen_bytes(one, vision, run) for run in runs]
                largest = max(range(len(runs)), key=lambda index: seen[index])
                patches = sum(size.patches for size in runs[largest].sizes)
                of_patch = seen[largest] / patches
                of_bytes.append(
                    [
                        name,
                        str(patches),
                        f"{of_patch / 1024:.1f}",
                        f"{towers.timed.patch_bytes / of_patch:.3f}",
                        f"{towers.estimated.patch_bytes / of_patch:.3f}",
                    ]
                )
                figure["seen_bytes"] = seen
            figures.append(figure)
    return lines, of_bytes, figures


def _errors(predicted: Sequence[float], measured_s: Sequence[float]) -> list[str]:
    """Return the median ratio, and the median and the largest relative error."""
    ratios = [one / other for one, other in zip(predicted, measured_s, strict=True)]
    errors = [abs(ratio - 1) for ratio in ratios]
    return [
        f"{statistics.median(ratios):.2f}",
        f"{100 * statistics.median(errors):.0f} %",
        f"{100 * max(errors):.0f} %",
    ]
