"""Make a folder that stands for the Hub: tiny models, tokenizers and datasets under the names that
TRL's tests ask for.

A test that runs in this folder finds `owner/name` as a local folder, so nothing of the libraries
is patched, and nothing is downloaded. Weights are random, tokenizers are trained on the Zen of
Python.
"""

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

OWNER = "trl-internal-testing"
TEMPLATES = Path(trl.__file__).parent / "chat_templates"

# Sizes as in TRL's own tiny models; a configuration keeps what its model does not know.
SIZES = {
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 4096,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}

# name: (family of classes, options beside the sizes, chat template)
MODELS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2", {}, "qwen2_5"),
    "tiny-Qwen3ForCausalLM": ("Qwen3", {"head_dim": 2}, "qwen3"),
    "tiny-Qwen3MoeForCausalLM": ("Qwen3Moe", {"head_dim": 2, **EXPERTS}, "qwen3"),
    "tiny-Cohere2ForCausalLM": ("Cohere2", {}, "cohere2"),
    "tiny-Glm4MoeForCausalLM": ("Glm4Moe", {"first_k_dense_replace": 1, **EXPERTS}, "glm4moe"),
    "tiny-GptOssForCausalLM": ("GptOss", {"head_dim": 2, **EXPERTS}, "gptoss"),
    "tiny-Olmo3ForCausalLM": ("Olmo3", {}, "qwen2_5"),
    "tiny-GPTNeoXForCausalLM": ("GPTNeoX", {}, None),
    "tiny-LlamaForCausalLM-3.2": ("Llama", {}, "llama3_2"),
    "tiny-MistralForCausalLM-0.2": ("Mistral", {"sliding_window": None}, "qwen2_5"),
    "tiny-Lfm2ForCausalLM": ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "lfm2"),
}
# Qwen2ForSequenceClassification and others, with one class: a reward.
REWARD_MODELS = {
    "tiny-Qwen2ForSequenceClassification-2.5": ("Qwen2", {}, "qwen2_5"),
    "tiny-Qwen3ForSequenceClassification": ("Qwen3", {"head_dim": 2}, "qwen3"),
    "tiny-LlamaForSequenceClassification-3.2": ("Llama", {}, "llama3_2"),
}
TOKENIZERS_ALONE = {"Qwen/Qwen3-4B": "qwen3"}

END = "<|im_end|>"
PADDING = "<|endoftext|>"
SPECIAL = (PADDING, END, "<|im_start|>", "<think>", "</think>", "<|start|>", "<|end|>")
SPECIAL += ("<|message|>", "<|channel|>", "<|return|>", "<|start_header_id|>", "<|eot_id|>")


def make_hub(folder: Path) -> None:
    """Fill `folder` with everything that the tests load by name."""
    lines = zen()
    tokenizer = tokenizer_of(lines)
    for name, template in TOKENIZERS_ALONE.items():
        save_tokenizer(tokenizer, folder / name, template)
    for models_of, head in ((MODELS, "CausalLM"), (REWARD_MODELS, "SequenceClassification")):
        for name, (family, options, template) in models_of.items():
            place = folder / OWNER / name
            save_model(place, f"{family}For{head}", family, options, len(tokenizer), tokenizer)
            save_tokenizer(tokenizer, place, template)
    for name, configurations in datasets_of(lines).items():
        save_dataset(folder / OWNER / name, configurations)


def zen() -> list[str]:
    """Return the 19 sentences of the Zen of Python."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        import this  # noqa: F401, it prints them
    return [line for line in printed.getvalue().splitlines()[1:] if line]


# ---- tokenizers and models


def tokenizer_of(lines: list[str]) -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level tokenizer of a few hundred tokens."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(lines, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=END, pad_token=PADDING
    )


def save_tokenizer(
    tokenizer: transformers.PreTrainedTokenizerFast, place: Path, template: str | None
) -> None:
    """Save a tokenizer with one of TRL's chat templates, or with none."""
    tokenizer.chat_template = None
    if template is not None:
        tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    tokenizer.save_pretrained(place)


def save_model(
    place: Path,
    kind: str,
    family: str,
    options: dict[str, Any],
    vocabulary: int,
    tokenizer: Any,
) -> None:
    """Save a model of random weights, of a class `kind` of a family; a classifier of one class."""
    if kind.endswith("SequenceClassification"):
        options = options | {"num_labels": 1}
    configuration = getattr(transformers, f"{family}Config")(
        vocab_size=vocabulary,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **SIZES,
        **options,
    )
    torch.manual_seed(0)
    model = getattr(transformers, kind)(configuration)
    model.save_pretrained(place)


# ---- datasets


def datasets_of(lines: list[str]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the datasets by name, each the rows of its configurations."""
    return {
        "zen": {
            "standard_language_modeling": [{"text": line} for line in lines],
            "standard_prompt_completion": list(completions(lines)),
            "standard_implicit_prompt_preference": list(preferences(lines)),
            "standard_preference": [
                {"prompt": prompt, "chosen": last, "rejected": " perhaps."}
                for prompt, last in prompts(lines)
            ],
            "standard_unpaired_preference": [
                {"prompt": prompt, "completion": last, "label": number % 2 == 0}
                for number, (prompt, last) in enumerate(prompts(lines))
            ],
            "standard_prompt_only": [{"prompt": prompt} for prompt, _ in prompts(lines)],
            "conversational_language_modeling": [{"messages": talk(line)} for line in lines],
            "conversational_prompt_completion": [
                {"prompt": talk(line)[:1], "completion": talk(line)[1:]} for line in lines
            ],
            "conversational_preference": [
                {"prompt": talk(line)[:1], "chosen": talk(line)[1:], "rejected": doubt()}
                for line in lines
            ],
            "conversational_implicit_prompt_preference": [
                {"chosen": talk(line), "rejected": talk(line)[:1] + doubt()} for line in lines
            ],
            "conversational_unpaired_preference": [
                {"prompt": talk(line)[:1], "completion": talk(line)[1:], "label": number % 2 == 0}
                for number, line in enumerate(lines)
            ],
            "conversational_prompt_only": [{"prompt": talk(line)[:1]} for line in lines],
        },
        "harmony": {
            "language_modeling": [{"messages": thoughtful(line)} for line in lines],
            "prompt_completion": [
                {"prompt": thoughtful(line)[:1], "completion": thoughtful(line)[1:]}
                for line in lines
            ],
        },
        "toolcall": {"language_modeling": [tool_call(line) for line in lines]},
    }


def prompts(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each sentence without its last word, and this word."""
    for line in lines:
        prompt, _, last = line.rpartition(" ")
        yield prompt, f" {last}"


def completions(lines: list[str]) -> Iterator[dict[str, str]]:
    """Yield each sentence, its last word as the completion."""
    for prompt, last in prompts(lines):
        yield {"prompt": prompt, "completion": last}


def preferences(lines: list[str]) -> Iterator[dict[str, str]]:
    """Yield each sentence, and one that is not the Zen's."""
    for line in lines:
        yield {"chosen": line, "rejected": f"{line} Perhaps."}


def talk(line: str) -> list[dict[str, str]]:
    """Return a question and a sentence of the Zen as its answer."""
    question = f"What does the Zen of Python say about {line.split()[0].lower()}?"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": line}]


def doubt() -> list[dict[str, str]]:
    """Return an answer that is not the Zen's."""
    return [{"role": "assistant", "content": "Nothing, perhaps."}]


def thoughtful(line: str) -> list[dict[str, str | None]]:
    """Return the same with a thought in front of the answer."""
    question, answer = talk(line)
    return [question | {"thinking": None}, answer | {"thinking": "The Zen has a line."}]


def tool_call(line: str) -> dict[str, Any]:
    """Return a conversation in which a function is called, and the function's description."""
    word = line.split()[0]
    call = {"type": "function", "function": {"name": "find", "arguments": {"word": word}}}
    parameters = {"type": "object", "properties": {"word": {"type": "string"}}}
    tool = {"name": "find", "description": "Find a line.", "parameters": parameters}
    return {
        "messages": [
            {"role": "user", "content": f"Find {word}.", "tool_calls": None, "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call], "name": None},
            {"role": "tool", "content": line, "tool_calls": None, "name": "find"},
            {"role": "assistant", "content": line, "tool_calls": None, "name": None},
        ],
        "tools": [{"type": "function", "function": tool}],
    }


def save_dataset(place: Path, configurations: dict[str, list[dict[str, Any]]]) -> None:
    """Save a dataset with a `train` and a `test` split of 2 rows per configuration."""
    files: dict[str, dict[str, str]] = {}
    for name, rows in configurations.items():
        files[name] = {}
        for split, part in (("train", rows[:-2]), ("test", rows[-2:])):
            file = place / name / f"{split}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
            files[name][split] = f"{name}/{split}.jsonl"
    described = []
    for name, paths in files.items():
        splits = [{"split": split, "path": path} for split, path in paths.items()]
        described.append({"config_name": name, "data_files": splits})
    # The head of a dataset's card is YAML, of which JSON is a part.
    (place / "README.md").write_text(f"---\nconfigs: {json.dumps(described)}\n---\n")
