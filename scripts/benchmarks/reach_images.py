"""The census of images: which vision-language models of the installed transformers hf_flexseq
trains on images.

    python scripts/benchmarks/reach_images.py                 ask all of them
    python scripts/benchmarks/reach_images.py --probe         and run those that are taken, tiny
    python scripts/benchmarks/reach_images.py --only llava    some families
    python scripts/benchmarks/reach_images.py --write         and write the table of docs/models.md

A family is asked with the configuration that transformers makes by default, with the values of
GIVEN where no model could be built of it. To ask is to call `check_model`, as every trainer does,
and `VisionModel`, with the whole model on the meta device.

With --probe a tiny model of `tests/hf/vision_families.py` runs on two ranks under random plans
that cut images, and is compared with one process that calls the model with pixels: loss and all
gradients, and which outputs change when one pixel does. What is taken and fails that would train
wrongly in silence.
"""

import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto import modeling_auto

from common import ROOT, argument_parser, table, write_record
from hf_flexseq.hf.model.vision import VisionModel
from hf_flexseq.steps.images import UnsupportedImages
from reach import (
    ASK_S,
    BUILDING_FAILS,
    NOT_BUILT,
    REFUSED,
    TAKEN,
    in_process,
    one_line,
    refusals_of,
    write_table,
)
from reach_models import Family

sys.path.append(str(ROOT))
from tests.hf.vision_families import FAMILIES
from tests.hf.vision_runs import COUNTS, probe_pixel, worst_errors
from tests.ranks import run_cases

PROBE_S = 240
RANKS = 2
EXACT, CHANGES, LEAKS = 1e-10, 1e-9, 1e-12  # bounds of tests/hf/test_vision.py

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_GLM_ROPE = {**_ROPE, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
_TOKENS = {"image_token_id": 57, "video_token_id": 58}
_LETTERS = "ABCDEFGHIJ"  # Chameleon's digits

# What default configurations lack so that a model could be built of them, or take images.
GIVEN: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"num_attention_heads": 16}},
    "chameleon": {
        "vocabulary_map": {"<image>": 57, **{f"IMGIMG{x}Z": i for i, x in enumerate(_LETTERS)}}
    },
    "cohere_compass": {
        "text_config": {
            "rope_parameters": {
                "full_attention": {**_ROPE, "mrope_section": [24, 20, 20]},
                "sliding_attention": {**_ROPE, "mrope_section": [24, 20, 20]},
            }
        }
    },
    "deepseek_ocr2": {
        "text_config": {
            "num_hidden_layers": 2,
            "num_experts_per_tok": 6,
            "mlp_layer_types": ["dense", "sparse"],
        }
    },
    "emu3": {
        "text_config": {"attention_dropout": 0.0},
        "vocabulary_map": {"<image>": 57, "<|extra_200|>": 58},
    },
    "glm46v": {"text_config": {"rope_parameters": _GLM_ROPE}},
    "glm4v": {"text_config": {"rope_parameters": _GLM_ROPE}},
    "glm4v_moe": {"text_config": {"head_dim": 128, "rope_parameters": _GLM_ROPE}},
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]]},
    "hunyuan_vl": {
        "text_config": {
            "head_dim": 128,
            "rope_parameters": {**_ROPE, "mrope_section": [16, 16, 16, 16]},
        }
    },
    "minicpm_ocr": _TOKENS,
    "minicpmv4_6": _TOKENS,
    "minicpmv4_7": _TOKENS,
    "nemotron_h_omni": {**_TOKENS, "audio_token_id": 59},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 56, "vision_end_token_id": 57},
    "qwen3_omni_moe_thinker": {"text_config": {"head_dim": 128}, "vision_start_token_id": 56},
    "step3p7": {"text_config": {"sliding_window": 512}},
}


class Answer(NamedTuple):
    """What became of one family."""

    family: str
    model: str
    """Name of the class."""
    text: str
    """TAKEN, or why it is not taken on text."""
    verdict: str
    """TAKEN, REFUSED or NOT_BUILT: what becomes of images."""
    said: str
    """The modalities that it takes, or the reason."""
    probe: tuple[str, ...] | None = None
    """What the probe found, () if nothing; None where it has not run."""


def main() -> None:
    """Ask, print the table, and write what was asked for."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="ask these families alone")
    parser.add_argument("--probe", action="store_true", help="run what is taken, tiny")
    parser.add_argument("--write", action="store_true", help="write image_families.csv")
    args = parser.parse_args()
    if args.write and (args.only or not args.probe):
        parser.error("--write needs all families and --probe")
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # forks of a process with more hang in their first parallel region

    answers = []
    for family in image_families():
        if args.only and family.name not in args.only:
            continue
        answer = ask(family)
        if args.probe and answer.verdict == TAKEN and family.name in FAMILIES:
            answer = answer._replace(probe=probed(family.name))
        answers.append(answer)
        print(*answer, sep=" | ", flush=True)
    print()
    print(page(answers))
    write_record(args.json, [answer._asdict() for answer in answers])
    if args.write:
        write_table("image_families.csv", COLUMNS, *image_rows(answers))
    if any(answer.probe for answer in answers):
        sys.exit("a model that is taken fails its probe")


def image_families() -> list[Family]:
    """Return the classes of AutoModelForImageTextToText, in the order of their names."""
    found: dict[str, Family] = {}  # by class
    for name, classes in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items():
        cls = classes if isinstance(classes, str) else classes[0]
        found.setdefault(cls, Family(name, getattr(transformers, cls), None))
    return sorted(found.values(), key=lambda family: family.name)


# ---- questions


def ask(family: Family) -> Answer:
    """Ask a family with one configuration."""
    said = in_process(lambda: verdict_on(family), ASK_S)
    if said[0] == NOT_BUILT:
        said = ("", *said)
    return Answer(family.name, family.kind.__name__, *said)


def verdict_on(family: Family) -> tuple[str, str, str]:
    """Return what becomes of text, the verdict on images, and the modalities or the reason."""
    try:
        config = family.kind.config_class(**GIVEN.get(family.name, {}))
        with torch.device("meta"):
            model = family.kind(config)
    except BUILDING_FAILS as error:
        return "", NOT_BUILT, f"{type(error).__name__}: {one_line(error)}"
    of_text = "; ".join(refusals_of(model))
    if of_text:
        return of_text, REFUSED, of_text
    try:
        vision = VisionModel(model)
    except UnsupportedImages as reason:
        return TAKEN, REFUSED, one_line(reason)
    return TAKEN, TAKEN, ", ".join(f"{name}s" for name in vision.modalities)


def probed(name: str) -> tuple[str, ...]:
    """Return what is wrong with a tiny model of a family on ranks, a line each; () if nothing."""
    found: list[str] = []
    try:
        case = (name, "ddp", False, None, COUNTS, 2)
        (errors,) = run_cases(worst_errors, RANKS, [case], seconds=PROBE_S)
        (changes,) = run_cases(probe_pixel, RANKS, [(name,)], seconds=PROBE_S)
    except AssertionError as failure:
        return (f"it did not run: {one_line(failure)[-300:]}",)
    for of_rank in errors:
        for what in ("loss", "gradients"):
            if not of_rank[what] < EXACT:
                found.append(f"{what} differ by {of_rank[what]:.1e}")
    for of_rank in changes:
        if not of_rank["changed"]:
            found.append("the pixel changes nothing")
        if not of_rank["off"] < CHANGES:
            found.append(f"changes differ by {of_rank['off']:.1e}")
        if not of_rank["leaked"] < LEAKS:
            found.append(f"other outputs change by {of_rank['leaked']:.1e}")
    return tuple(dict.fromkeys(found))


# ---- the page

COLUMNS = ("family", "class", "images")


def page(answers: Sequence[Answer]) -> str:
    """Return the result as Markdown."""
    taken = [answer for answer in answers if answer.verdict == TAKEN]
    run = [answer for answer in taken if answer.probe == ()]
    refused = [answer for answer in answers if answer.verdict == REFUSED]
    counts = (
        f"Of {len(answers)} classes {len(taken)} are taken with images, {len(run)} of them "
        f"probed; {len(refused)} are refused, and {len(answers) - len(taken) - len(refused)} "
        "cannot be built."
    )
    return f"{counts}\n\n{table(COLUMNS, image_rows(answers))}"


def image_rows(answers: Sequence[Answer]) -> Iterator[Sequence[str]]:
    """Yield the rows of the table of classes with images."""
    for answer in answers:
        name = f"`{answer.family}`"
        if answer.verdict == TAKEN and answer.family in GIVEN:
            name += f" (given {', '.join(GIVEN[answer.family])})"
        yield name, f"`{answer.model}`", images_cell(answer)


def images_cell(answer: Answer) -> str:
    """Return what a table says of a family's images."""
    said = answer.said.replace("|", "\\|")
    if answer.verdict != TAKEN:
        of_text = "; taken on text" if answer.text == TAKEN else ""
        return f"{answer.verdict}: {said}{of_text}"
    if answer.probe is None:
        return f"{said}; not probed: there is no tiny model of it here"
    if answer.probe:
        return f"{said}; fails: {'; '.join(answer.probe)}"
    has_videos = FAMILIES[answer.family].video is not None
    return f"{said}; probed" + (" with images" if "videos" in said and not has_videos else "")


if __name__ == "__main__":
    main()
