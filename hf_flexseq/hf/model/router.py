"""The router loss of mixtures of experts, over all tokens of a step.

transformers adds it to a model's loss if `output_router_logits` is set, once per batch
(`load_balancing_loss_func`). A router of E experts gives every token of every layer probabilities
p_e, and the token goes to the k largest. Over the rows of a batch, tokens x layers,

    C_e = number of tokens sent to expert e        P_e = sum of p_e
    loss = E * sum over e of (C_e / rows) * (P_e / rows),        rows = (sum of C_e) / k

A token that several rows share (docs/prefixes.md) counts in C and P once for each of them.

This is not a sum over tokens, but C and P are, and C has no gradient. So a step finds C in a first
pass. A micro-batch whose own sums are P' then has the share

    E * sum over e of (C_e / rows) * (P'_e / rows)

of the loss: the shares of a step add up to it, and so do their gradients.

    RouterSums    counts C and P in every micro-batch; sums that a loss on the source ranks may use
    RouterLoss    adds each micro-batch its share of the loss, for a model that predicts tokens

An empty copy of the model shows coefficient and k (head_trial.py), and its own function is tried
on a few numbers: a family with another router loss is refused by name.

Rejected: the loss of each micro-batch by itself. It depends on the plan, and would ask for balance
within a rank's part of a long sequence.
"""

import inspect
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.base.patches import Patch
from hf_flexseq.distributed.transport import CpuGroup
from hf_flexseq.hf.model.head_trial import ROUTER_LOSS, try_head
from hf_flexseq.hf.model.sharding import unsharded_class
from hf_flexseq.kernels.upload import to_device
from hf_flexseq.steps.inputs import Inputs, without_labels
from hf_flexseq.steps.micro_batches import AddUp
from hf_flexseq.steps.source_row import Columns

COUNTS = "router_counts"
"""C, [experts] in float64."""
PROBABILITIES = "router_probabilities"
"""P, [experts]."""
TOTALS = (COUNTS, PROBABILITIES)

OPTION = "output_router_logits"
NO_ROUTER_LOSS = (
    "set config.output_router_logits=False, or for TRL's trainers router_aux_loss_coef=0.0"
)


# ---- what a model's router loss is


class UnknownRouterLoss(Exception):
    """A model's router loss is not the one that is computed here; the message is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterFacts:
    """Arguments of the router loss."""

    top_k: int
    """Experts per token."""
    coefficient: float
    """Factor of the router loss in the loss of the model."""


def asks_for_router_loss(model: PreTrainedModel) -> bool:
    """Tell if `model` adds a router loss to its own."""
    return bool(getattr(model.config.get_text_config(), OPTION, False))


def router_facts(model: PreTrainedModel) -> RouterFacts:
    """Return the facts of a model's router loss. Raises UnknownRouterLoss for another one."""
    trial = try_head(model)
    if trial.top_k is None:
        raise UnknownRouterLoss(f"its forward does not add a {ROUTER_LOSS} of its routers")
    _compare_function(model, trial.top_k)
    return RouterFacts(top_k=trial.top_k, coefficient=trial.coefficient)


def _compare_function(model: PreTrainedModel, top_k: int) -> None:
    """Raise UnknownRouterLoss unless the model's function agrees with ours on a few tokens."""
    experts = max(2 * top_k, 4)
    generator = torch.Generator().manual_seed(0)
    layers = tuple(torch.randn(7, experts, generator=generator) for _ in range(2))
    function = getattr(sys.modules[unsharded_class(model).__module__], ROUTER_LOSS)
    theirs = float(function(layers, experts, top_k, None))
    sums = router_sums(layers, top_k)
    ours = float(router_loss(sums[COUNTS], sums[PROBABILITIES], top_k))
    if not math.isclose(theirs, ours, rel_tol=1e-4):
        raise UnknownRouterLoss(
            f"its {ROUTER_LOSS} gives {theirs:.6f} where transformers' for Mixtral gives "
            f"{ours:.6f}"
        )


# ---- the loss, of sums


def router_sums(
    router_logits: Sequence[torch.Tensor], top_k: int, row_counts: torch.Tensor | None = None
) -> Columns:
    """Return C and P [experts], P in float32 at least, from each layer's router_logits [tokens,
    experts]. row_counts: [tokens] how often each token counts; None for once."""
    assert router_logits, "output_router_logits is set, but the model has no router"
    experts = router_logits[0].shape[-1]
    device = router_logits[0].device
    counts = torch.zeros(experts, dtype=torch.float64, device=device)
    sums = None
    for logits in router_logits:
        probabilities = torch.softmax(logits.to(device), dim=-1)  # [tokens, experts]
        chosen = probabilities.topk(top_k, dim=-1).indices.flatten()  # [tokens * k]
        wide = torch.promote_types(probabilities.dtype, torch.float32)
        probabilities = probabilities.to(wide)
        times = torch.ones_like(chosen, dtype=counts.dtype)
        if row_counts is not None:
            of_token = row_counts.to(device).unsqueeze(1)  # [tokens, 1]
            probabilities = probabilities * of_token
            times = times * of_token.expand(-1, top_k).flatten()
        counts.scatter_add_(0, chosen, times)
        of_layer = probabilities.sum(dim=0)  # [tokens, experts] -> [experts]
        sums = of_layer if sums is None else sums + of_layer
    assert sums is not None, "there is a layer"
    return {COUNTS: counts, PROBABILITIES: sums}


def router_loss(counts: torch.Tensor, probabilities: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the router loss of C and P [experts], a scalar; for a partial P, its share."""
    rows = counts.sum() / top_k
    weights = counts.shape[0] * counts / rows**2  # [experts]
    weights = to_device(weights.to(probabilities.dtype), probabilities.device)
    return (weights * probabilities).sum()


# ---- sums of a micro-batch


class RouterSums:
    """Counts C and P in each call of a model on a micro-batch."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises UnknownRouterLoss for a model with another router loss."""
        self.facts = router_facts(model)
        self._sums: Columns | None = None  # of the last call
        backbone = model.base_model
        self.attached = ExitStack()
        """Closing it leaves nothing on the model."""
        ask = backbone.register_forward_pre_hook(self._ask, with_kwargs=True)
        self.attached.enter_context(ask)
        note = backbone.register_forward_hook(self._note, with_kwargs=True)
        self.attached.enter_context(note)

    def take(self) -> Columns | None:
        """Return C and P of the last micro-batch, once; None without one."""
        sums, self._sums = self._sums, None
        return sums

    def loss(self, sums: Columns) -> torch.Tensor:
        """Return the router loss of C and P, [experts] each among `sums`, a scalar."""
        return router_loss(sums[COUNTS], sums[PROBABILITIES], self.facts.top_k)

    def _ask(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Have the decoder return its routers' logits."""
        if "seq_ctx" not in kwargs:
            return None
        return args, {**kwargs, OPTION: True}

    def _note(self, module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        if "seq_ctx" in kwargs:
            row_counts = getattr(kwargs["seq_ctx"], "row_counts", None)
            self._sums = router_sums(outputs.router_logits, self.facts.top_k, row_counts)


# ---- shares of micro-batches


class RouterLoss:
    """Computes each micro-batch's share of the router loss, in a step that runs
    `RankMicroBatches.micro_batches`, and disables the model's own, one of each micro-batch."""

    def __init__(self, model: nn.Module, base: PreTrainedModel) -> None:
        """model: may be a PEFT model, with `base` inside."""
        self.of_calls = RouterSums(base)
        """Counts C and P per call."""
        entries: set[nn.Module] = {base}
        if model is not base:  # some adapters call the model past its hooks
            entries.add(model.base_model)
        for entry in entries:
            hook = entry.register_forward_pre_hook(self._without_own, with_kwargs=True)
            self.of_calls.attached.enter_context(hook)
        takes = inspect.signature(type(base).forward).parameters
        self._head_options = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._wrapped: nn.Module | None = None  # the model, as accelerate has wrapped it
        self._counts: torch.Tensor | None = None  # C of the step, once it is known
        self._add_up: AddUp | None = None
        self._is_due = False  # True if the micro-batch's share has not been asked for
        self._noted: Columns | None = None  # C and P, where no share of them is wanted
        self.coefficient = self.of_calls.facts.coefficient
        """Factor of the loss."""
        self.value: torch.Tensor | None = None
        """The router loss of the last step, a scalar on the CPU."""

    def of_step(self, model: nn.Module) -> "RouterLoss":
        """Begin a step of `model`, as accelerate has wrapped it; return the loss itself."""
        self._wrapped = model
        self._counts = None
        self._is_due = False
        return self

    def detach(self) -> None:
        """Leave nothing on the model. A second call does nothing."""
        self.of_calls.attached.close()
        self._wrapped = None

    def _without_own(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if "seq_ctx" not in kwargs:
            return None
        return args, {**kwargs, OPTION: False}

    # ---- the passes

    def count(self, inputs: Inputs) -> torch.Tensor:
        """Run a micro-batch forward, with hardly any head: return C and P, [2 * experts]."""
        assert self._wrapped is not None, "of_step comes first"
        self._wrapped(**without_labels(inputs), use_cache=False, **self._head_options)
        return self._as_row(self._taken())

    def know(self, totals: torch.Tensor) -> None:
        """Take C and P of the whole step, [2 * experts] on the CPU."""
        self._counts, probabilities = totals.chunk(2)
        self.value = self.of_calls.loss({COUNTS: self._counts, PROBABILITIES: probabilities})

    def next(self, *, add_up: AddUp | None) -> None:
        """Begin the next micro-batch of the second pass; see `TokenLoss`."""
        self._check_taken()
        self._add_up = add_up
        self._is_due = True

    def share(self) -> torch.Tensor:
        """Return the share of the micro-batch that the model has just run in the router loss of
        the step, a scalar. Collective over the world where the totals are not known yet."""
        sums = self._taken()
        if self._noted is not None:
            for name, value in sums.items():
                self._noted[name] = self._noted.get(name, 0.0) + value.detach()
            return 0.0 * sums[PROBABILITIES].sum()
        if self._add_up is not None:
            self._add_up(self._as_row(sums))
            self._add_up = None
        assert self._counts is not None, "the first micro-batch has made the totals known"
        self._is_due = False
        return self.of_calls.loss({**sums, COUNTS: self._counts})

    def finish(self) -> None:
        """End the last micro-batch of the step."""
        self._check_taken()
        self._counts = None

    @contextmanager
    def noting(self) -> Iterator[Columns]:
        """Let shares be 0 inside the block, which runs micro-batches without a backward; the block
        gets C and P of their tokens, [experts] each, by name."""
        noted: Columns = {}
        with Patch(self, _noted=noted):
            yield noted

    def of_all_ranks(self, sums: Columns, cpu_group: CpuGroup) -> torch.Tensor:
        """Return the router loss of a step, times its coefficient, a scalar. Collective over the
        world. sums: C and P of this rank, [experts] each."""
        totals = self._as_row(sums)
        cpu_group.all_reduce(totals)  # [2 * experts] -> [2 * experts]
        self.know(totals)
        assert self.value is not None, "it is known now"
        return self.coefficient * self.value.to(sums[PROBABILITIES])

    def weighted(self, sums: Columns) -> torch.Tensor:
        """Return the router loss of C and P, [experts] each, times its coefficient, a scalar."""
        return self.coefficient * self.of_calls.loss(sums)

    def _check_taken(self) -> None:
        assert not self._is_due, "a micro-batch has run without its share of the router loss"

    def _taken(self) -> Columns:
        sums = self.of_calls.take()
        assert sums is not None, "the model has run on a micro-batch"
        return sums

    def _as_row(self, sums: Columns) -> torch.Tensor:
        """Return C and P one after the other: [2 * experts] in float64 on the CPU."""
        parts = [sums[name].detach().to("cpu", torch.float64) for name in TOTALS]
        return torch.cat(parts)
