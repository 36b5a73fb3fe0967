"""Data, arguments and losses of the plain Trainer, and trainers of planned steps."""

import copy
import inspect
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import IterableDataset
from transformers import Trainer

from hf_flexseq import FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.distributed.gloo import GlooTransport
from tests import budget
from tests.hf.tiny import documents, tiny_llama

OPTIONS = {"max_tokens_per_rank": 40, "lookahead": 2, "cost_model": "estimate"}
OF_TRAINER = frozenset(inspect.signature(Trainer.__init__).parameters)


def training_arguments(cls, folder, *, batch, accumulation, **options):
    defaults = {
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0.5,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "learning_rate": 1e-2,
        "max_steps": budget.trainer_steps,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    return cls(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        **{**defaults, **options},
    )


def flexseq_trainer(folder, *, kind=FlexSeqTrainer, batch=2, accumulation=1, **settings):
    """A trainer of planned steps. settings: arguments of the trainer, and of its configuration, by
    their names."""
    given = {name: settings.pop(name) for name in OF_TRAINER & settings.keys()}
    defaults = {"batch": batch, "accumulation": accumulation, **OPTIONS}
    args = training_arguments(FlexSeqConfig, folder, **{**defaults, **settings})
    model = given.pop("model", None) or tiny_llama()
    return kind(model=model, args=args, **{"train_dataset": dataset(), **given})


def padded(examples, multiple=1):
    """The collator of the plain run: right padding, to a multiple, and a mask."""
    width = max(len(e["input_ids"]) for e in examples)
    width += -width % multiple

    def pad(name, value):
        return torch.tensor([e[name] + [value] * (width - len(e[name])) for e in examples])

    lengths = torch.tensor([len(e["input_ids"]) for e in examples])
    values = {"input_ids": 0, "labels": -100, "shift_labels": -100}
    batch = {name: pad(name, value) for name, value in values.items() if name in examples[0]}
    return {**batch, "attention_mask": (torch.arange(width) < lengths[:, None]).long()}


def float64_loss(logits, labels, vocab_size, num_items_in_batch=None, shift_labels=None, **given):
    """transformers' causal loss without its cast to float32; a mean without a count of items."""
    targets = F.pad(labels, (0, 1), value=-100)[..., 1:] if shift_labels is None else shift_labels
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def dataset(size=72):
    """72 is a whole number of steps in every case below; repeats that fill the last batch depend
    on the world size."""
    return documents([1 + (i * i * 7) % 60 for i in range(size)])


class Stream(IterableDataset):
    """Examples without a length, each a copy."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(copy.deepcopy(self.rows))


def logged(history, key):
    return [entry[key] for entry in history if key in entry]


# ---- gloo that claims to carry out transfers in order, as NCCL does


@contextmanager
def ordered_gloo(is_ordered=True):
    """Surround a run whose transport is said to be ordered."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        capabilities = replace(GlooTransport.capabilities, ordered=is_ordered)
        monkeypatch.setattr(GlooTransport, "capabilities", capabilities)
        yield
