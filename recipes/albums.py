"""Albums: documents with drawn pictures, for a model that learns to look at them.

A picture shows one to four squares of one colour in a quarter of it. Behind it three questions
are asked, and their answers are what is trained on:

    [picture] how many ? three which colour ? red where ? northwest

Most albums have one picture, some have twenty, and a tenth has none and asks for the number after
another one; pictures have different sizes. So documents are long-tailed in what the tower has to
do for them, and in tokens.

An image processor of transformers makes the pixels. The whole processor of Qwen3-VL cannot be made
without torchvision, which its videos need, so the tokens of a picture are counted here: one for
every merged square of patches, between the tokens that begin and end an image.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

Example = dict[str, Any]

NUMBERS = ("one", "two", "three", "four")
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 215, 50),
    "black": (20, 20, 20),
    "pink": (240, 140, 190),
}
PLACES = ("northwest", "northeast", "southwest", "southeast")
QUESTIONS = ("how many ?", "which colour ?", "where ?")
AFTER = "which number is after"  # asked where there is no picture

CELL = 8  # pixels: a square fills most of one
SIDES = (32, 32, 32, 48, 64)  # of a picture, in pixels
MOST = 20  # pictures of an album
TAIL = 1.3  # exponent of their Pareto distribution: 59 % have one, 2 % have MOST
WITHOUT = 0.1  # of the albums have no picture

PAD, END, START, PATCH, STOP = "<pad>", "<end>", "<image>", "<patch>", "</image>"
VIDEO = "<video>"
SPECIAL = (PAD, END, START, PATCH, STOP, VIDEO)
IGNORED = -100  # label of a token that is not trained on


@dataclass
class AlbumArguments:
    """How many albums are drawn."""

    train_albums: int = field(default=20000, metadata={"help": "Albums that are trained on."})
    held_out_albums: int = field(default=64, metadata={"help": "Albums that are evaluated on."})
    plain_trainer: bool = field(
        default=False,
        metadata={
            "help": "Train with transformers' own Trainer on padded batches, to compare. Its loss "
            "is the mean over the tokens of a step, too."
        },
    )

    def __post_init__(self) -> None:
        for option in ("train_albums", "held_out_albums"):
            if getattr(self, option) < 1:
                raise ValueError(f"{option}={getattr(self, option)}: give 1 or more")


# ---- what is drawn


class Picture(NamedTuple):
    """A drawn picture, and the answers to QUESTIONS."""

    image: Image.Image
    answers: tuple[str, ...]


def draw_picture(rng: random.Random) -> Picture:
    """Return a picture of squares in one of its quarters."""
    width, height = rng.choice(SIDES), rng.choice(SIDES)
    number, colour = rng.choice(NUMBERS), rng.choice(list(COLOURS))
    place = rng.choice(PLACES)
    image = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(image)
    left = width // 2 if "east" in place else 0
    top = height // 2 if "south" in place else 0
    cells = [
        (left + x, top + y)
        for x in range(0, width // 2 - CELL + 1, CELL)
        for y in range(0, height // 2 - CELL + 1, CELL)
    ]
    for x, y in rng.sample(cells, NUMBERS.index(number) + 1):
        x, y = x + rng.randint(0, 1), y + rng.randint(0, 1)
        pen.rectangle((x, y, x + CELL - 3, y + CELL - 3), fill=COLOURS[colour])
    return Picture(image, (number, colour, place))


def pictures_of_album(rng: random.Random) -> int:
    """Return how many pictures an album has."""
    if rng.random() < WITHOUT:
        return 0
    return min(MOST, int(rng.paretovariate(TAIL)))


def word_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer of all words that albums have."""
    texts = (*NUMBERS, *COLOURS, *PLACES, *QUESTIONS, AFTER)
    words = dict.fromkeys([*SPECIAL, *(word for text in texts for word in text.split())])
    model = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START, PATCH, STOP, VIDEO],
    )


# ---- examples


class Albums(Dataset):
    """Albums as examples: the same ones on all ranks, each drawn when it is asked for."""

    def __init__(
        self,
        count: int,
        seed: int,
        *,
        tokenizer: PreTrainedTokenizerBase,
        image_processor: Any,
        config: PreTrainedConfig,
    ) -> None:
        """config: of the model, which names the tokens of images."""
        self._count = count
        self._seed = seed
        self._tokenizer = tokenizer
        self._image_processor = image_processor
        self._config = config

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Example:
        """Return `input_ids`, `labels` and `mm_token_type_ids`, each [tokens], and for an album
        with pictures `pixel_values`, [patches, values], and `image_grid_thw`, [pictures, 3]."""
        rng = random.Random(f"{self._seed} {index}")
        pictures = [draw_picture(rng) for _ in range(pictures_of_album(rng))]
        ids: list[int] = []
        labels: list[int] = []
        tensors = {}
        if pictures:
            images = [picture.image for picture in pictures]
            made = self._image_processor(images=images, return_tensors="pt")
            tensors = {name: made[name] for name in ("pixel_values", "image_grid_thw")}
            merged = self._config.vision_config.spatial_merge_size**2
            for picture, grid in zip(pictures, tensors["image_grid_thw"], strict=True):
                self._add_image(ids, labels, int(grid.prod()) // merged)
                for question, answer in zip(QUESTIONS, picture.answers, strict=True):
                    self._add(ids, labels, question, is_answer=False)
                    self._add(ids, labels, answer, is_answer=True)
        else:
            number = rng.randrange(len(NUMBERS) - 1)
            self._add(ids, labels, f"{AFTER} {NUMBERS[number]} ?", is_answer=False)
            self._add(ids, labels, NUMBERS[number + 1], is_answer=True)
        types = [int(token == self._config.image_token_id) for token in ids]
        return {"input_ids": ids, "labels": labels, "mm_token_type_ids": types, **tensors}

    def _add(self, ids: list[int], labels: list[int], text: str, *, is_answer: bool) -> None:
        tokens = self._tokenizer(text, add_special_tokens=False).input_ids
        ids += tokens
        labels += tokens if is_answer else [IGNORED] * len(tokens)

    def _add_image(self, ids: list[int], labels: list[int], tokens: int) -> None:
        config = self._config
        inside = [config.image_token_id] * tokens
        ids += [config.vision_start_token_id, *inside, config.vision_end_token_id]
        labels += [IGNORED] * (tokens + 2)


def padded(examples: Sequence[Example], padding: int) -> dict[str, torch.Tensor]:
    """Return a batch as the plain Trainer takes it: columns [examples, longest], and the tensors
    of all images one behind the other. padding: a token."""
    fillers = {"input_ids": padding, "labels": IGNORED, "mm_token_type_ids": 0}
    batch = {}
    for name, filler in fillers.items():
        rows = [torch.as_tensor(example[name]) for example in examples]
        batch[name] = pad_sequence(rows, batch_first=True, padding_value=filler)
    lengths = torch.tensor([len(example["input_ids"]) for example in examples])
    batch["attention_mask"] = (torch.arange(lengths.max()) < lengths[:, None]).long()
    for name in ("pixel_values", "image_grid_thw"):
        own = [example[name] for example in examples if name in example]
        if own:
            batch[name] = torch.cat(own)
    return batch


# ---- how many answers are right


def right_answers(example: Mapping[str, Any], logits: torch.Tensor) -> tuple[int, int]:
    """Return how many answers of an example are right, word for word, and how many there are.

    logits: [tokens, words] of the example's own tokens.
    """
    said = logits[:-1].argmax(dim=-1).tolist()  # of the tokens from the second on
    labels = example["labels"][1:]
    right = answers = 0
    is_right = True
    for index, label in enumerate(labels):
        if label == IGNORED:
            continue
        is_right = is_right and said[index] == label
        if index + 1 == len(labels) or labels[index + 1] == IGNORED:  # the answer's last word
            right += is_right
            answers += 1
            is_right = True
    return right, answers
