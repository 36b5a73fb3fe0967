"""The rows of who_is_exact.py: what users meet, and what one process makes of it in float64.

A row has a tiny model, documents, and how many of them an optimizer step takes. The reference
knows no trainer and no batch: each document goes through the model alone, with transformers' own
attention, and the loss of a step is its sum over all targets of the step, divided by their number.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast

RANKS = 2
IGNORED = -100
VOCABULARY = 61
END = 1  # token at the end of a document
ROUTER_COEFFICIENT = 0.1
BETA = 0.1  # of DPO, TRL's default
EVAL_BATCHES = (1, 2, 4)  # documents of a rank and evaluation batch

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": END,
    "tie_word_embeddings": False,
}
NEAR, FULL, RECURRENT = "sliding_attention", "full_attention", "linear_attention"
EXPERTS = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": ROUTER_COEFFICIENT}
LINEAR = {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
LINEAR |= {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # configuration and its options
    "Llama": ("Llama", {}),
    "Gemma3": ("Gemma3Text", {"head_dim": 8, "sliding_window": 8, "layer_types": [NEAR, FULL]}),
    "GptOss": ("GptOss", {**EXPERTS, "layer_types": [FULL, FULL]}),
    "Qwen3_5": ("Qwen3_5Text", {"head_dim": 8, **LINEAR, "layer_types": [RECURRENT, FULL]}),
    "Mixtral": ("Mixtral", {**EXPERTS, **ROUTED, "sliding_window": None}),
}
EAGER = ("GptOss",)  # transformers has no sdpa for sinks


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A row of the table."""

    says: str
    """What a user meets, in the words of the page."""

    lengths: tuple[int, ...]
    """Tokens of the documents, in their order; they repeat through the steps."""

    batch: int = 1
    """Documents (or packed rows, or pairs) of a rank and batch under data parallelism."""

    accumulation: int = 1
    """Batches of a rank and optimizer step under data parallelism."""

    steps: int = 1
    """Optimizer steps of SGD."""

    family: str = "Llama"
    options: tuple[tuple[str, Any], ...] = ()
    """Of the model's configuration, besides those of its family."""

    packed: int = 1
    """Documents of a row."""

    masked: bool = False
    """True if labels of the first tokens are ignored, a different share of each document."""

    @property
    def per_step(self) -> int:
        """Rows of an optimizer step."""
        return RANKS * self.batch * self.accumulation


EVEN = (40, 40, 40, 40)
UNEVEN = (40, 12, 28, 24)
ROWS: dict[str, Situation] = {
    "packed": Situation(says="a packed row of documents", lengths=(9, 20, 11), packed=3),
    "masked": Situation(says="labels masked", lengths=EVEN, batch=2, masked=True),
    "unequal": Situation(says="unequal lengths over ranks", lengths=(60, 8)),
    "accumulation": Situation(
        says="gradient accumulation, unequal targets", lengths=EVEN, accumulation=2, masked=True
    ),
    "gqa": Situation(
        says="fewer KV heads than ranks", lengths=EVEN, options=(("num_key_value_heads", 1),)
    ),
    "windows": Situation(says="windows (Gemma 3)", lengths=EVEN, family="Gemma3"),
    "sinks": Situation(says="sinks (gpt-oss)", lengths=EVEN, family="GptOss"),
    "recurrent": Situation(says="a recurrent layer (Qwen3.5)", lengths=EVEN, family="Qwen3_5"),
    "router": Situation(says="experts with router loss (Mixtral)", lengths=EVEN, family="Mixtral"),
    "tied": Situation(
        says="tied embeddings", lengths=EVEN, options=(("tie_word_embeddings", True),)
    ),
    "lora": Situation(says="LoRA", lengths=EVEN),
    "dpo": Situation(says="DPO pairs", lengths=EVEN),
    "all_ranks": Situation(says="a sequence that needs all ranks", lengths=(128, 128)),
    "eval": Situation(
        says="evaluation loss, batches of 1, 2, 4", lengths=UNEVEN, masked=True, batch=4
    ),
    "resume": Situation(
        says="resumed in the middle of an epoch", lengths=EVEN, masked=True, steps=5
    ),
}
RATES = {"eval": 0.0, "dpo": 2.0}  # learning rates; an evaluation leaves the weights
RATE = 0.5


def rate(row: str) -> float:
    """Return the learning rate of a row, large: rounding of weights is small beside an update."""
    return RATES.get(row, RATE)


def make_model(row: str) -> Any:
    """Return the model of a row in float32, the same in each process."""
    situation = ROWS[row]
    name, options = FAMILIES[situation.family]
    config = getattr(transformers, f"{name}Config")(
        **{**SIZES, **options, **dict(situation.options)}
    )
    kind = getattr(transformers, f"{situation.family}ForCausalLM")
    attention = "eager" if situation.family in EAGER else "sdpa"
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation=attention, dtype=torch.float32)
    if row == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        options = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
        model = get_peft_model(model, LoraConfig(init_lora_weights=False, **options))
    return model


# ---- data


def documents(row: str) -> list[dict[str, list[int]]]:
    """Return rows of `input_ids`, `labels` and `position_ids`, as many as all steps take.

    A packed row has several documents, of which the first tokens are no targets and the positions
    begin again, as `DataCollatorWithFlattening` of transformers makes them.
    """
    situation = ROWS[row]
    drawn = random.Random(0)
    lengths = situation.lengths
    made = []
    for number in range(situation.steps * situation.per_step):
        whole: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
        for part in range(situation.packed):
            length = lengths[(number + part) % len(lengths)]
            ids = [drawn.randrange(2, VOCABULARY) for _ in range(length - 1)] + [END]
            ignored = drawn.randrange(1, length - 2) if situation.masked else 1
            whole["input_ids"] += ids
            whole["labels"] += [IGNORED] * ignored + ids[ignored:]
            whole["position_ids"] += range(length)
        made.append(whole)
    return made


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are words, such as w17 for the number 17; 0 pads, 1 ends."""
    words = {f"w{number}": number for number in range(2, VOCABULARY)}
    made = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1, **words}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<pad>"
    )


def text(ids: list[int]) -> str:
    """Return the words of tokens."""
    return "".join(f" w{number}" for number in ids)


def pairs() -> list[dict[str, str]]:
    """Return pairs for DPO: a prompt and two answers of different lengths."""
    made = []
    for number, row in enumerate(documents("dpo")):
        ids = row["input_ids"][:-1]  # TRL adds the end
        cut = 14 + number % 5
        parts = {"prompt": ids[:10], "chosen": ids[10:cut], "rejected": ids[cut:]}
        made.append({name: text(part) for name, part in parts.items()})
    return made


# ---- one process


@dataclass(frozen=True)
class Reference:
    """What one process finds in float64."""

    start: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    eval_loss: float | None


def reference(row: str) -> Reference:
    """Train a row's model in one process, in float64, a document at a time."""
    situation = ROWS[row]
    model = make_model(row).double()
    if hasattr(model.config, "num_local_experts"):
        model.set_experts_implementation("eager")  # torch's grouped products have no float64
    start = trained_weights(model)
    frozen = make_model(row).double() if row == "dpo" else None
    data: list[Any] = pairs() if row == "dpo" else documents(row)
    if row == "eval":
        with torch.no_grad():
            return Reference(start, start, float(mean_loss(model, data)))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    for step in range(situation.steps):
        rows = data[step * situation.per_step : (step + 1) * situation.per_step]
        loss = mean_loss(model, rows) if frozen is None else dpo_loss(model, frozen, rows)
        loss.backward()
        optimizer.param_groups[0]["lr"] = rate(row) * decay(row, step)
        optimizer.step()
        optimizer.zero_grad()
    return Reference(start, trained_weights(model), None)


def decay(row: str, step: int) -> float:
    """Return the learning rate of a step over the first: linear where a run resumes."""
    return 1 - step / ROWS[row].steps if row == "resume" else 1.0


def trained_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return copies of all parameters that learn, by name, whole and in float64."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            value = parameter.detach()
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[name] = value.double().clone()
    return found


def mean_loss(model: PreTrainedModel, rows: list[dict[str, list[int]]]) -> torch.Tensor:
    """Return the mean loss over all targets of rows, and the router loss of all their tokens."""
    total, targets, routed = torch.zeros((), dtype=torch.float64), 0, []
    for ids, labels in sequences(rows):
        found = model(input_ids=torch.tensor([ids]), use_cache=False)
        wanted = torch.tensor([*labels[1:], IGNORED])
        total = total + F.cross_entropy(
            found.logits[0].double(), wanted, ignore_index=IGNORED, reduction="sum"
        )
        targets += int((wanted != IGNORED).sum())
        routed.append(getattr(found, "router_logits", None))
    loss = total / targets
    if getattr(model.config, "output_router_logits", False):
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        layers = tuple(torch.cat(of_layer) for of_layer in zip(*routed, strict=True))
        config = model.config
        balance = load_balancing_loss_func(
            layers, config.num_local_experts, config.num_experts_per_tok
        )
        loss = loss + config.router_aux_loss_coef * balance
    return loss


def sequences(rows: list[dict[str, list[int]]]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield tokens and labels of each document: packed rows are cut where positions are 0."""
    for row in rows:
        positions = row["position_ids"]
        starts = [at for at, position in enumerate(positions) if position == 0]
        for first, end in zip(starts, [*starts[1:], len(positions)], strict=True):
            yield row["input_ids"][first:end], row["labels"][first:end]


def dpo_loss(model: Any, frozen: Any, rows: list[dict[str, str]]) -> torch.Tensor:
    """Return the mean over pairs of DPO's loss (Rafailov et al. 2023, equation 7)."""
    words = tokenizer()

    def log_probability(of: Any, prompt: str, answer: str) -> torch.Tensor:
        """Return the sum over an answer's tokens and its end."""
        given, learned = words(prompt).input_ids, [*words(answer).input_ids, words.eos_token_id]
        logits = of(input_ids=torch.tensor([given + learned]), use_cache=False).logits[0].double()
        found = logits.log_softmax(-1)[len(given) - 1 : -1]
        return found.gather(-1, torch.tensor(learned)[:, None]).sum()

    losses = []
    for row in rows:
        margin = torch.zeros((), dtype=torch.float64)
        for side, sign in (("chosen", 1), ("rejected", -1)):
            with torch.no_grad():
                before = log_probability(frozen, row["prompt"], row[side])
            margin = margin + sign * (log_probability(model, row["prompt"], row[side]) - before)
        losses.append(-F.logsigmoid(BETA * margin))
    return torch.stack(losses).mean()
