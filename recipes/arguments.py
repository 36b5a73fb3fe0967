"""Options of the recipes: three dataclasses each, filled from a YAML file and
the command line.

The command line wins. A YAML file holds the options of all three by name, in any order. Its values
go through the same parser as the command line, so a number, a choice or a mapping is checked the
same way wherever it was written; null means the default.
"""

import difflib
import json
from argparse import ArgumentParser
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, NoReturn

import yaml
from transformers import HfArgumentParser
from transformers.distributed import DistributedConfig

from hf_flexseq.config import refuse_removed
from mistakes import end_with, errors_in_a_line
from rewards import load_rewards

# How the columns of a document are called, and their names.
Forms = dict[str, tuple[str, ...]]


@dataclass
class AnyModelArguments:
    """A model of any kind, and LoRA."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Hub id or local path of a trained model."}
    )
    model_revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of the model."}
    )
    model_config: dict | str | None = field(
        default=None,
        metadata={
            "help": "Without one, the config of a new model: a mapping (model_type, sizes) "
            "or a path."
        },
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto",
        metadata={"help": "Type of the parameters; auto: as stored (a new model: float32)."},
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run code that comes with the model."}
    )
    lora_r: int = field(
        default=0, metadata={"help": "Rank of LoRA adapters; 0 trains all parameters."}
    )
    lora_alpha: int = field(
        default=32, metadata={"help": "Scale of the adapters: lora_alpha / lora_r."}
    )
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the adapters."})
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "Modules that get adapters; all-linear: all but the head."},
    )

    def __post_init__(self) -> None:
        if self.model_name_or_path is None and self.model_config is None:
            raise ValueError(
                "give model_name_or_path (a trained model) or model_config (a new one)"
            )
        self._check_folder("model_name_or_path")
        if isinstance(self.model_config, str) and self.model_config.startswith("{"):
            self.model_config = json.loads(self.model_config)
        if self.lora_r < 0:
            raise ValueError(f"lora_r={self.lora_r}: give a rank, or 0 to train all parameters")
        if self.lora_r and self.model_name_or_path is None:
            raise ValueError(
                "lora_r needs model_name_or_path: adapters are saved without the "
                "model they belong to"
            )

    def _check_folder(self, option: str) -> None:
        """Raise ValueError for a path to no folder; a hub id is none."""
        name = getattr(self, option)
        if name and name.startswith((".", "/", "~")) and not Path(name).exists():
            raise ValueError(f"{option}={name!r}: no such folder")


@dataclass
class ModelArguments(AnyModelArguments):
    """A causal language model, its tokenizer, and LoRA."""

    gguf_file: str | None = field(
        default=None,
        metadata={
            "help": "GGUF file in the folder or on the Hub page of model_name_or_path, with "
            "weights, config and tokenizer. Its weights are dequantized."
        },
    )
    config_overrides: dict | str | None = field(
        default=None,
        metadata={
            "help": "Values of a trained model's config that differ from its own, as a mapping, "
            "such as rope_parameters for a longer context."
        },
    )
    distributed_config: dict | str | None = field(
        default=None,
        metadata={
            "help": "How transformers spreads the model over the ranks, as a mapping with the "
            "fields of its DistributedConfig, such as fsdp_size and ep_size."
        },
    )
    tokenizer_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Hub id or local path of a tokenizer. Default: the model's."},
    )
    new_tokenizer: Literal["bpe", "characters"] = field(
        default="bpe",
        metadata={
            "help": "What is trained on the corpus where no tokenizer is named: a byte-level BPE, "
            "or one token for each character."
        },
    )
    tokenizer_vocab_size: int = field(default=4096, metadata={"help": "Vocabulary of that BPE."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_folder("tokenizer_name_or_path")
        if self.gguf_file is not None and self.model_name_or_path is None:
            raise ValueError("gguf_file needs model_name_or_path: the folder that has the file")
        self.config_overrides = _mapping("config_overrides", self.config_overrides)
        if self.config_overrides is not None and self.model_name_or_path is None:
            raise ValueError(
                "config_overrides needs model_name_or_path: a new model has them in model_config"
            )
        self.distributed_config = _mapping("distributed_config", self.distributed_config)
        if self.distributed_config is not None:
            _check_distributed(self.distributed_config)


def _check_distributed(given: dict) -> None:
    """Raise ValueError for what is no DistributedConfig."""
    names = sorted(one.name for one in fields(DistributedConfig))
    unknown = sorted(given.keys() - set(names))
    if unknown:
        raise ValueError(
            f"distributed_config has no field {unknown[0]!r}, its fields are {', '.join(names)}"
        )
    DistributedConfig(**given)  # raises for sizes that do not go together


def _mapping(option: str, value: dict | str | None) -> dict | None:
    """Return an option that is a mapping, perhaps as JSON. Raises ValueError for others."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{option} is not JSON: {error}") from error
    if value is not None and not isinstance(value, dict):
        raise ValueError(f'{option} must be a mapping, such as {{"name": 1}}, got {value!r}')
    return value


@dataclass
class CorpusArguments:
    """Where a corpus comes from, and what part of it is held out."""

    dataset: str = field(
        default="python-stdlib",
        metadata={
            "help": "Hub id, a local file (.jsonl, .json, .parquet, .csv, .txt), a local folder, "
            "python-stdlib: the source files of the running Python's standard library, or "
            "python-topics: questions about Python, with the topics of its help as answers."
        },
    )
    dataset_config: str | None = field(
        default=None, metadata={"help": "Configuration of a hub dataset."}
    )
    dataset_split: str = field(default="train", metadata={"help": "Split that is trained on."})
    held_out_split: str | None = field(
        default=None,
        metadata={
            "help": "Split that is evaluated on. Default: a part of dataset_split is set aside."
        },
    )
    held_out_fraction: float = field(
        default=0.05,
        metadata={"help": "Share of the documents set aside, chosen by a hash of their text."},
    )
    max_train_documents: int | None = field(
        default=None, metadata={"help": "Train on so many documents at most."}
    )
    max_held_out_documents: int | None = field(
        default=None, metadata={"help": "Evaluate on so many at most."}
    )
    preprocessing_workers: int | None = field(
        default=None, metadata={"help": "Processes that tokenize."}
    )
    tokenizer_cache: str | None = field(
        default=None,
        metadata={
            "help": "Folder of trained tokenizers. Default: hf_flexseq in the HuggingFace cache."
        },
    )

    def __post_init__(self) -> None:
        if not 0 <= self.held_out_fraction < 1:
            raise ValueError(
                f"held_out_fraction={self.held_out_fraction}: give a share, 0 to below 1"
            )

    @property
    def forms(self) -> Forms:
        """The columns that may make up a document; the first that are all there do."""
        raise NotImplementedError

    def kinds(self, column: str) -> tuple[str, ...]:
        """Return what a column of a document may hold, in the words of `rows.kind_of`."""
        return ("text", "messages")

    def hashed(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        """Return those columns of a document that decide whether it is held out."""
        return columns


@dataclass
class DataArguments(CorpusArguments):
    """The corpus, and how its documents become sequences."""

    text_column: str = field(
        default="text",
        metadata={
            "help": "Column with the text; without it `messages`, `prompt` and `completion`, "
            "alpaca's columns or sharegpt's `conversations` are used."
        },
    )
    max_length: int = field(
        default=4096, metadata={"help": "The context: most tokens of a sequence."}
    )
    long_sequences: Literal["split", "drop"] | None = field(
        default=None,
        metadata={
            "help": "What happens to longer documents: cut into sequences of max_length, or "
            "left out."
        },
    )
    show_answers: int = field(
        default=0,
        metadata={
            "help": "Answer so many held-out questions greedily, before training and after it, "
            "and compare how likely the written answers are. Needs the whole model on a process."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length < 2:
            raise ValueError(
                f"max_length={self.max_length}: a sequence needs two tokens to predict one"
            )

    @property
    def forms(self) -> Forms:
        return {
            f"a column {self.text_column!r} (text_column)": (self.text_column,),
            "messages": ("messages",),
            "prompt and completion": ("prompt", "completion"),
            # as `other_forms.py` writes them
            "instruction and output (alpaca)": ("prompt", "completion"),
            "conversations (sharegpt)": ("messages",),
        }

    def kinds(self, column: str) -> tuple[str, ...]:
        is_talk = column == "messages" and column != self.text_column
        return ("messages",) if is_talk else ("text",)


@dataclass
class PreferenceArguments(CorpusArguments):
    """The pairs of `dpo.py`: a prompt, a chosen and a rejected answer."""

    dataset: str = field(
        default="python-topics",
        metadata={
            "help": "Hub id, a local file (.jsonl, .json, .parquet, .csv, .txt), a local folder, "
            "or python-topics: questions about Python, with the topics of its help as chosen and "
            "an evasion as rejected answers."
        },
    )
    max_length: int = field(
        default=4096, metadata={"help": "The context: most tokens of a prompt and an answer."}
    )
    long_pairs: Literal["truncate", "drop"] | None = field(
        default=None,
        metadata={
            "help": "What happens to longer pairs: their answers are cut off at max_length, or "
            "they are left out."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length < 2:
            raise ValueError(
                f"max_length={self.max_length}: a prompt and an answer need a token each"
            )

    @property
    def forms(self) -> Forms:
        return {
            "prompt, chosen and rejected": ("prompt", "chosen", "rejected"),
            "chosen and rejected": ("chosen", "rejected"),
        }

    def hashed(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        """All pairs of a prompt are on one side."""
        return ("prompt",) if "prompt" in columns else columns


@dataclass
class PromptArguments(CorpusArguments):
    """The prompts of `grpo.py`, and what completions of them are worth."""

    dataset: str = field(
        default="count-on",
        metadata={
            "help": "Hub id, a local file (.jsonl, .json, .parquet, .csv, .txt), a local folder, "
            "or count-on: prompts of digits to count on from. Its column prompt is text or "
            "messages; reward functions get all other columns."
        },
    )
    max_prompt_length: int = field(default=4096, metadata={"help": "Most tokens of a prompt."})
    long_prompts: Literal["drop"] | None = field(
        default=None, metadata={"help": "What happens to longer prompts: they are left out."}
    )
    reward_functions: list[str] = field(
        default_factory=lambda: ["exact"],
        metadata={
            "help": "What a completion is worth, summed (reward_weights): exact, 1 where it is "
            "the column answer; counts_on, the share of its digits that count on from the "
            "prompt's last; or functions of your own as module:function or file.py:function."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_prompt_length < 1:
            raise ValueError(f"max_prompt_length={self.max_prompt_length}: a prompt needs a token")
        load_rewards(self.reward_functions)

    @property
    def forms(self) -> Forms:
        return {"prompt": ("prompt",)}


class RecipeParser(HfArgumentParser):
    """A parser that prints one line per error, on the first process, and not its 150 options."""

    def error(self, message: str) -> NoReturn:
        end_with(message)


def parse(
    argv: list[str],
    training_type: type,
    defaults: dict | None = None,
    data_type: type = DataArguments,
    prog: str = "sft.py",
    model_type: type[AnyModelArguments] = ModelArguments,
) -> tuple:
    """Return objects of `model_type`, `data_type` and `training_type`.

    Values come from `defaults`, `--config FILE` and the rest of `argv`; the later one wins. An
    option that several types have is one option, which all of them get: TRL's types share some
    with ours, and ours, added later, say what its default is.
    """
    types = (training_type, data_type, model_type)
    parser = RecipeParser(
        types,
        prog=prog,
        allow_abbrev=False,
        conflict_handler="resolve",
        description="Train with hf_flexseq.",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of the options below")
    config, rest = _take_config(argv)
    with errors_in_a_line():
        options = dict(defaults or {})
        if config:
            options |= _read(config, types)
        for argument in rest:
            if argument.startswith("--"):
                refuse_removed(argument.removeprefix("--").partition("=")[0])
        values = vars(parser.parse_args(to_argv(options) + rest))
        training, data, model = (kind(**_of(kind, values)) for kind in types)
    return model, data, training


def _of(kind: type, values: dict) -> dict:
    """Return those values that a dataclass has an option for."""
    return {option.name: values[option.name] for option in fields(kind) if option.init}


def to_argv(options: dict) -> list[str]:
    """Return a mapping as command line arguments."""
    argv = []
    for name, value in options.items():
        if isinstance(value, list):
            argv += [f"--{name}", *map(str, value)]
        elif isinstance(value, dict):
            argv.append(f"--{name}={json.dumps(value)}")
        elif value is not None:
            argv.append(f"--{name}={value}")
    return argv


def _take_config(argv: list[str]) -> tuple[str | None, list[str]]:
    """Return the path after `--config`, if there is one, and the other arguments."""
    first = ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    known, rest = first.parse_known_args(argv)
    return known.config, rest


def _read(path: str, types: tuple[type, ...]) -> dict:
    """Return the options of a YAML file. Raises ValueError for one that no type has."""
    if not Path(path).is_file():
        raise ValueError(f"--config {path}: no such file")
    try:
        options = yaml.safe_load(Path(path).read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(options, dict):
        raise ValueError(f"{path} must be a mapping of options, got a {type(options).__name__}")
    names = {option.name for kind in types for option in fields(kind) if option.init}
    for name in options:
        if name in names:
            continue
        refuse_removed(str(name))
        message = f"{path}: unknown option {name!r}"
        near = difflib.get_close_matches(str(name), sorted(names), n=1)
        if near:
            message += f", did you mean {near[0]!r}?"
        raise ValueError(message)
    return options
