"""The rows of who_is_exact.py: what users meet, and what one process makes of it in float64.

A row has a tiny model, documents, and how many of them an optimizer step takes. The reference
knows no trainer and no batch: each document goes through the model alone, with transformers' own
attention, and the loss of a step is its sum over all targets of the step, divided by their number.
"""

import random
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

RANKS = 2
IGNORED = -100
VOCABULARY = 61
END = 1  # token at the end of a document
ROUTER_COEFFICIENT = 0.1
BETA = 0.1  # of DPO, TRL's default
EVAL_BATCHES = (1, 2, 4)  # documents of a rank and evaluation batch
SAVED_AT = 2  # step of the checkpoint from which a run resumes

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
ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?(?:[\w.]+\.)?(\w+Error): (.+)$", re.MULTILINE)
Weights = dict[str, np.ndarray]  # that learn, by name
Document = dict[str, list[int]]


class Situation(NamedTuple):
    """A row of the table."""

    says: str  # what a user meets, in the words of the page
    lengths: tuple[int, ...] = (40,)  # tokens of the documents in turn
    batch: int = 1  # documents (or packed rows, or pairs) of a rank and batch
    accumulation: int = 1  # batches of a rank and optimizer step
    steps: int = 1  # optimizer steps of SGD
    family: str = "Llama"
    options: tuple[tuple[str, Any], ...] = ()  # of the configuration, besides those of its family
    packed: int = 1  # documents of a row
    masked: bool = False  # whether a different share of each document's labels is ignored
    rate: float = 0.5  # of learning: rounding of weights is small beside an update; 0 keeps them

    @property
    def per_step(self) -> int:
        """Rows of an optimizer step."""
        return RANKS * self.batch * self.accumulation

    @property
    def attention(self) -> str:
        """The model's attention: transformers has no sdpa for sinks."""
        return "eager" if self.family == "GptOss" else "sdpa"

    def settings(self, shares: int) -> dict[str, Any]:
        """Return what all trainers are told alike. shares: of ranks that cut the same row, whose
        steps take as many rows with more accumulation."""
        return {
            "max_steps": self.steps,
            "save_steps": SAVED_AT if self.steps > 1 else 1,
            "per_device_train_batch_size": self.batch,
            "gradient_accumulation_steps": self.accumulation * shares,
            "learning_rate": self.rate,
            "lr_scheduler_type": "linear" if self.steps > 1 else "constant",  # goes on in a resume
            "optim": "sgd",
            "weight_decay": 0.0,
            "max_grad_norm": 0.0,
            "report_to": "none",
            "use_cpu": True,
        }


ROWS: dict[str, Situation] = {
    "packed": Situation("a packed row of documents", (9, 20, 11), packed=3),
    "masked": Situation("labels masked", batch=2, masked=True),
    "unequal": Situation("unequal lengths over ranks", (60, 8)),
    "accumulation": Situation(
        "gradient accumulation, unequal targets", accumulation=2, masked=True
    ),
    "gqa": Situation("fewer KV heads than ranks", options=(("num_key_value_heads", 1),)),
    "windows": Situation("windows (Gemma 3)", family="Gemma3"),
    "sinks": Situation("sinks (gpt-oss)", family="GptOss"),
    "recurrent": Situation("a recurrent layer (Qwen3.5)", family="Qwen3_5"),
    "router": Situation("experts with router loss (Mixtral)", family="Mixtral"),
    "tied": Situation("tied embeddings", options=(("tie_word_embeddings", True),)),
    "lora": Situation("LoRA"),
    "dpo": Situation("DPO pairs", rate=2.0),
    "all_ranks": Situation("a sequence that needs all ranks", (128,)),
    "eval": Situation(
        "evaluation loss, batches of 1, 2, 4", (40, 12, 28, 24), batch=4, masked=True, rate=0.0
    ),
    "resume": Situation("resumed in the middle of an epoch", masked=True, steps=5),
}


class Failed(Exception):
    """A stack ended with an error: the name of its class, and the first line of its message."""

    @classmethod
    def says(cls, text: str, which: int) -> "Failed":
        """Return the error number `which` that is printed in a text."""
        found = ERROR.findall(text) or [("RuntimeError", text.strip().splitlines()[-1])]
        return cls(*found[which])


def make_model(row: str) -> Any:
    """Return the model of a row in float32, the same in each process."""
    situation = ROWS[row]
    name, options = FAMILIES[situation.family]
    options = SIZES | options | dict(situation.options)
    config = getattr(transformers, f"{name}Config")(**options)
    kind = getattr(transformers, f"{situation.family}ForCausalLM")
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation=situation.attention, dtype=torch.float32)
    if row == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = get_peft_model(model, config)
    return model


def trained_weights(model: Any) -> Weights:
    """Return copies of all parameters that learn, whole and in float64."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            value = parameter.detach()
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[name] = value.double().numpy().copy()
    return found


# ---- data


def documents(row: str) -> list[Document]:
    """Return rows of `input_ids`, `labels` and `position_ids`, as many as all steps take.

    A packed row has several documents, of which the first tokens are no targets and the positions
    begin again, as `DataCollatorWithFlattening` of transformers makes them.
    """
    situation = ROWS[row]
    drawn = random.Random(0)
    made = []
    for number in range(situation.steps * situation.per_step):
        whole: Document = {"input_ids": [], "labels": [], "position_ids": []}
        for part in range(situation.packed):
            length = situation.lengths[(number + part) % len(situation.lengths)]
            ids = [drawn.randrange(2, VOCABULARY) for _ in range(length - 1)] + [END]
            ignored = drawn.randrange(1, length - 2) if situation.masked else 1
            whole["input_ids"] += ids
            whole["labels"] += [IGNORED] * ignored + ids[ignored:]
            whole["position_ids"] += range(length)
        made.append(whole)
    return made


def sequences(rows: list[Document]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield tokens and labels of each document: packed rows are cut where positions are 0."""
    for row in rows:
        positions = row["position_ids"]
        starts = [at for at, position in enumerate(positions) if position == 0]
        for first, end in zip(starts, [*starts[1:], len(positions)], strict=True):
            yield row["input_ids"][first:end], row["labels"][first:end]


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


def texts(row: str) -> list[dict[str, str]]:
    """Return a row's documents as TRL takes them: pairs for DPO, a prompt and a completion if
    labels are masked. Trainers add the token at the end, and pack documents themselves."""
    made = []
    for number, (ids, labels) in enumerate(sequences(documents(row))):
        cut = 14 + number % 5
        first = labels.count(IGNORED)
        if row == "dpo":
            parts = {"prompt": ids[:10], "chosen": ids[10:cut], "rejected": ids[cut:-1]}
        elif ROWS[row].masked:
            parts = {"prompt": ids[:first], "completion": ids[first:-1]}
        else:
            parts = {"text": ids[:-1]}
        made.append({name: text(part) for name, part in parts.items()})
    return made


# ---- one process


def reference(row: str) -> tuple[Weights, Weights, float]:
    """Train a row's model in one process, in float64, a document at a time. Return the weights
    before and after, and the loss of the last step."""
    situation = ROWS[row]
    model, frozen = make_model(row).double(), make_model(row).double()
    if hasattr(model.config, "num_local_experts"):
        model.set_experts_implementation("eager")  # torch's grouped products have no float64
    start = trained_weights(model)
    data: list[Any] = texts(row) if row == "dpo" else documents(row)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    for step in range(situation.steps):
        rows = data[step * situation.per_step : (step + 1) * situation.per_step]
        loss = dpo_loss(model, frozen, rows) if row == "dpo" else mean_loss(model, rows)
        loss.backward()
        optimizer.param_groups[0]["lr"] = situation.rate * (1 - step / situation.steps)
        optimizer.step()
        optimizer.zero_grad()
    return start, trained_weights(model), float(loss)


def mean_loss(model: Any, rows: list[Document]) -> torch.Tensor:
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
    config = model.config
    if getattr(config, "output_router_logits", False):
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        layers = tuple(torch.cat(of_layer) for of_layer in zip(*routed, strict=True))
        experts = (config.num_local_experts, config.num_experts_per_tok)
        loss = loss + config.router_aux_loss_coef * load_balancing_loss_func(layers, *experts)
    return loss


def dpo_loss(model: Any, frozen: Any, rows: list[dict[str, str]]) -> torch.Tensor:
    """Return the mean over pairs of DPO's loss (Rafailov et al. 2023, equation 7)."""
    words = tokenizer()

    def log_probability(of: Any, prompt: str, answer: str) -> torch.Tensor:
        """Return the sum over an answer's tokens and its end."""
        given, learned = words(prompt).input_ids, [*words(answer).input_ids, END]
        logits = of(input_ids=torch.tensor([given + learned]), use_cache=False).logits[0].double()
        found = logits.log_softmax(-1)[len(given) - 1 : -1]
        return found.gather(-1, torch.tensor(learned)[:, None]).sum()

    def gain(pair: dict[str, str], side: str) -> torch.Tensor:
        """Return by how much an answer has become likelier."""
        given = (pair["prompt"], pair[side])
        return log_probability(model, *given) - log_probability(frozen, *given).detach()

    margins = [gain(pair, "chosen") - gain(pair, "rejected") for pair in rows]
    return -F.logsigmoid(BETA * torch.stack(margins)).mean()
