"""draw(seed): a trainer, its options and what a user has changed, at random."""

import random
from dataclasses import asdict, dataclass
from typing import Any

from tests.hf.drawn_settings.callbacks import CALLBACKS
from tests.hf.drawn_settings.hooks import HOOKS
from tests.hf.drawn_settings.losses import LOSSES
from tests.hf.drawn_settings.methods import METHODS
from tests.hf.drawn_settings.options import ALWAYS, CAUSAL, OURS, SOMETIMES
from tests.hf.drawn_settings.sources import COLLATORS, DATASETS, MODELS, STREAMS

CHANGES = LOSSES | METHODS | HOOKS | CALLBACKS

_REFUSED = [option for option in SOMETIMES if option.weight == 0]

# Seed after seed the next one is drawn, so that a few hundred seeds have all.
_IN_TURN = random.Random(0).sample(list(CHANGES), k=len(CHANGES))

TRAINERS = {"trainer": 55, "sft": 20, "dpo": 8, "reward": 4, "sequences": 7, "tokens": 6}

# How hf_flexseq comes to a trainer: FlexSeqMixin in front of the user's class, that class in front
# of a FlexSeq trainer, or FlexSeqCallback.
WAYS = {"mixin": 60, "subclass": 20, "callback": 20}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A combination, which prints as one line."""

    seed: int
    trainer: str
    way: str
    model: str
    dtype: str
    data: str
    collator: str
    settings: dict[str, Any]
    """Of the trainer's configuration."""
    ours: dict[str, Any]
    """Of FlexSeqArguments."""
    changes: tuple[str, ...]
    """Keys of CHANGES."""
    sharding: str = ""
    """How both trainers' models are sharded: "zero3", or "fsdp2" for a plain causal one."""

    def __str__(self) -> str:
        parts = []
        for name, value in asdict(self).items():
            if isinstance(value, dict):
                value = " ".join(f"{key}={given!r}" for key, given in sorted(value.items()))
            if isinstance(value, tuple):
                value = ", ".join(value)
            parts.append(f"{name}: {value or '-'}")
        return "; ".join(parts)


def draw(seed: int) -> Case:
    """Return the case of a seed, always the same one."""
    rng = random.Random(seed)
    count = rng.choices((0, 1, 2, 3), (2, 5, 3, 1))[0]
    first = _IN_TURN[seed % len(_IN_TURN)]
    trainers = TRAINERS
    if count:
        trainers = {name: TRAINERS[name] for name in CHANGES[first].of}
    trainer = _one_of(rng, trainers)
    is_causal = trainer in CAUSAL
    changes = _changes(rng, trainer, first, count)
    settings = _settings(rng, trainer, evaluates="stops early" in changes)
    if seed % 10 == 9:
        settings |= rng.choice(_REFUSED[seed // 10 % len(_REFUSED)].values)
    ours = {"max_tokens_per_rank": 40, "lookahead": 2}
    if not is_causal or trainer == "sft":
        ours["max_tokens_per_rank"] = 60
    for option in rng.sample(OURS, k=rng.choice((0, 0, 1, 1, 2))):
        ours |= rng.choice(option.values)
    wide = not (settings.get("bf16") or (is_causal is False and rng.random() < 0.2))
    data = _one_of(rng, _weights(DATASETS))
    collator = _one_of(rng, _weights(COLLATORS))
    if trainer == "sft":
        data, collator = rng.choice(("table", "texts")), "its own"
    elif not is_causal:
        data, collator = "its own", "its own"
    if data in STREAMS:
        settings |= {"accelerator_config": {"dispatch_batches": False}}
        settings["max_steps"] = max(settings["max_steps"], 2)  # nothing else ends it
        settings.pop("train_sampling_strategy", None)
    model = _one_of(rng, _weights(MODELS))
    if model == "gpt_oss" and trainer == "sft":
        model = "llama"  # SFTTrainer adds a router loss, which differs on purpose
    if model == "gpt_oss":
        wide = False  # torch multiplies no experts in float64
    return Case(
        seed=seed,
        trainer=trainer,
        way=_one_of(rng, WAYS),
        model=model if is_causal else "its own",
        dtype="float64" if wide else "float32",
        data=data,
        collator=collator,
        settings=settings,
        ours=ours,
        changes=changes,
    )


def _one_of(rng, weights):
    return rng.choices(list(weights), list(weights.values()))[0]


def _weights(table):
    return {name: weight for name, (_, weight) in table.items()}


def _settings(rng, trainer, *, evaluates):
    """Return the settings of a trainer: those of all cases, and two to seven others, likely ones
    by their weight. evaluates: whether it must."""
    settings = {}
    for option in ALWAYS:
        settings |= rng.choice(option.values)
    options = [one for one in SOMETIMES if trainer in one.of and one.weight]
    count = rng.randint(2, 7)
    options.sort(key=lambda option: rng.random() ** (1 / option.weight), reverse=True)
    for option in options[:count]:
        settings |= rng.choice(option.values)

    needs_evaluation = ("load_best_model_at_end", "batch_eval_metrics", "eval_on_start")
    evaluates = evaluates or any(settings.get(name) for name in needs_evaluation)
    evaluates = evaluates or settings.get("save_strategy") == "best"
    if evaluates and settings["eval_strategy"] == "no":
        settings |= {"eval_strategy": "steps", "eval_steps": 1}
    if settings.get("load_best_model_at_end"):
        settings["save_strategy"] = settings["eval_strategy"]
        if "eval_steps" in settings:
            settings["save_steps"] = settings["eval_steps"]
    return settings


def _changes(rng, trainer, first, count):
    """Return at most `count` customisations that do not take each other's place.

    first: one of them, if there are any.
    """
    if count == 0:
        return ()
    weights = {name: one.weight for name, one in CHANGES.items() if trainer in one.of}
    found = [first]
    for _ in range(count - 1):
        name = _one_of(rng, weights)
        slots = {CHANGES[other].slot for other in found}
        if name in found or (CHANGES[name].slot and CHANGES[name].slot in slots):
            continue
        found.append(name)
    return tuple(found)
