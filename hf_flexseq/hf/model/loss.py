"""Compute the loss of an unmodified causal language model without logits for all its tokens.

One call `model(..., labels=...)`, while a `ChunkedLoss` is attached, takes four steps:

    1. a forward pre-hook of the model notes the targets and `num_items_in_batch`
    2. the head, its `forward` replaced on the instance, sees hidden states [B, S, C] and the
       targets: it computes the loss chunk by chunk (kernels/chunked_loss.py) and returns it, as
       [1, 1, 1], instead of logits [B, S, V]
    3. the model's `loss_function`, replaced on the instance, passes it on
    4. a forward hook puts `NoLogits`, which names itself when it is used, where the outputs would
       have logits

A call without labels (`generate`, a plain forward) runs as if nothing were attached. Two more
results come from the same place, where logits exist chunk by chunk:

    handle.giving_figures()    the head returns log-probabilities and entropies, [B, S, 2]
                               (kernels/token_outputs.py), instead of logits
    handle.reading(read)       `read` sees all logits, a chunk of tokens at a time

The work happens inside the head's own call because only there is its weight a whole plain tensor
under FSDP2 and ZeRO-3. The head divides by the number of items itself: accelerate's FSDP2 casts a
unit's outputs, and their gradients, to 16 bits, and 1/items would be off by up to 0.4 % in every
gradient. The loss's value bypasses that cast, too.

A model is suitable if its head is a plain nn.Linear and nothing else happens to its logits. An
empty copy of the model shows the second (head_trial.py), and no hook of the user's may see what
the head returns.

Rejected: a list of known models, which ages; replacing the model's `forward`, which accelerate
replaces as well; and calling the base model and the head from outside, where the hooks of FSDP2,
ZeRO-3 and DDP do not see the call.
"""

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_flexseq.base.patches import Patch
from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.model.head_trial import try_head
from hf_flexseq.hf.model.sharding import is_tensor_parallel, unsharded_class
from hf_flexseq.kernels.chunked_loss import chunked_cross_entropy_sum, reason_without_liger
from hf_flexseq.kernels.token_outputs import chunk_rows, token_outputs
from hf_flexseq.kernels.upload import to_device
from hf_flexseq.steps.users_code import has_output_hook

logger = logging.getLogger(__name__)


class KeepsOwnLoss(Exception):
    """A model must keep its own loss; the message is the reason."""


# Sees logits [rows, V] of consecutive tokens.
Read = Callable[[torch.Tensor], None]

# Sums the loss, as `chunked_cross_entropy_sum` does.
Total = Callable[..., torch.Tensor]


def attach_chunked_loss(
    model: nn.Module, total: Total = chunked_cross_entropy_sum
) -> "ChunkedLoss | None":
    """Let `model`, a causal language model of transformers or a PEFT model of one, compute its
    loss in chunks.

    To be called before the model is wrapped (DDP, DeepSpeed). Returns the handle, the same one if
    called again, or None when the model is not suitable: then one INFO line names the reason and
    the model keeps its own loss. While attached, a call with labels has `NO_LOGITS` in place of
    logits; where they are wanted, use `handle.disabled()`. total: the function that sums the loss.
    """
    entries = {model}  # modules whose calls the targets are read from
    if hasattr(model, "get_base_model"):
        # PEFT. Some adapters call the model past its hooks, and some past the hooks of the adapter
        # around it, which may still lengthen the labels. Where both run they note the same.
        adapter = model.base_model
        model = model.get_base_model()
        entries = {adapter, model}
    attached = getattr(vars(model).get("_loss_function"), "__self__", None)
    if isinstance(attached, ChunkedLoss):
        return attached
    try:
        head = _suitable_head(model)
    except KeepsOwnLoss as reason:
        logger.info("%s keeps its own loss: %s", type(model).__name__, reason)
        return None
    return ChunkedLoss(entries, model, head, total)


def has_chunkable_loss(model: nn.Module) -> bool:
    """Tell whether `attach_chunked_loss` works without all logits of `model`, not an adapter."""
    try:
        _suitable_head(model)
    except KeepsOwnLoss:
        return False
    return True


@dataclass(slots=True)
class _Call:
    """State of one forward of the model."""

    targets: torch.Tensor
    """[B * S], the token that each position predicts."""
    items: torch.Tensor | int | None
    """Number to divide the sum by; None: the targets that are not IGNORE_INDEX."""
    counts: torch.Tensor | None = None
    """[S] How many rows have each token as one with a target, if some share tokens."""
    loss: torch.Tensor | None = None
    """Scalar, once the head has run."""


class Figures:
    """Figures of the head in one call of the model."""

    def __init__(self, *, with_means: bool, d_log_probs: torch.Tensor | None) -> None:
        self.with_means = with_means
        self.d_log_probs = d_log_probs
        self.value: torch.Tensor | None = None
        """[B * S, 2 or 3] log-probabilities, entropies and means, detached, as the head has
        computed them."""


class LogitsNotKept(NotImplementedError, AttributeError):
    """Logits are asked for, and were not kept. Libraries that look for attributes expect
    AttributeError."""


class NoLogits:
    """Stands for logits [B, S, V] in a model's outputs; raises LogitsNotKept when it is used."""

    __slots__ = ()

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise LogitsNotKept(
            "outputs.logits of a call with labels: the loss is computed in chunks, and the logits "
            "of all tokens are not kept; read outputs.loss, or outputs.log_probs and "
            "outputs.entropy in a compute_loss of your own"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and inspection ask for these
            raise AttributeError(name)
        return self._refuse()

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse functions of torch."""
        return cls()._refuse()

    def __repr__(self) -> str:
        return "NoLogits()"

    __getitem__ = __iter__ = __len__ = __bool__ = __float__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __neg__ = _refuse


NO_LOGITS = NoLogits()


class ChunkedLoss:
    """The chunked loss attached to one model; see `attach_chunked_loss`."""

    def __init__(
        self, entries: set[nn.Module], model: nn.Module, head: nn.Linear, total: Total
    ) -> None:
        self._model = model
        self._total = total
        self._head = head
        self._own_loss = model.loss_function
        names = list(inspect.signature(model.forward).parameters)
        # A forward of **kwargs has labels at no position.
        self._labels_at = names.index("labels") if "labels" in names else sys.maxsize
        self._call: _Call | None = None
        self._enabled = True
        self._figures: Figures | None = None  # asked for, instead of the loss
        self._read: Read | None = None
        self._logged_backends: set[str] = set()
        self._attached = ExitStack()
        attach = self._attached.enter_context
        for entry in entries:
            attach(entry.register_forward_pre_hook(self._begin, with_kwargs=True))
            # always_call: an exception leaves no targets behind.
            attach(entry.register_forward_hook(self._end, always_call=True))
        attach(Patch(head, forward=self._head_forward))
        # what `model.loss_function = ...` sets
        attach(Patch(model, _loss_function=self._loss_function))

    def detach(self) -> None:
        """Give the model its own loss back and leave nothing on it. A second call does nothing."""
        self._attached.close()
        self._enabled = False

    def disabled(self) -> AbstractContextManager[None]:
        """Let calls that begin inside a block have logits [B, S, V] and the model's own loss."""
        return Patch(self, _enabled=False)

    @contextmanager
    def giving_figures(
        self, *, with_means: bool = False, d_log_probs: torch.Tensor | None = None
    ) -> Iterator[Figures]:
        """Let a call with labels [B, S] return the log-probabilities of its targets and the
        entropies [B, S, 2] instead of logits, and an unused loss; with `with_means` also the means
        of all log-probabilities, [B, S, 3]. They bring the gradients; the yielded values are those
        before any cast of FSDP2's. d_log_probs: see `token_outputs`, [B * S]."""
        figures = Figures(with_means=with_means, d_log_probs=d_log_probs)
        with Patch(self, _figures=figures):
            yield figures

    def reading(self, read: Read) -> AbstractContextManager[None]:
        """Let `read` see the logits of calls with labels inside a block, chunk by chunk."""
        return Patch(self, _read=read)

    # ---- 1. the call begins

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the targets of a call with labels [B, S]. Raises NotImplementedError if the model
        has got another loss."""
        self._call = None
        by_position = len(args) > self._labels_at
        labels = args[self._labels_at] if by_position else kwargs.get("labels")
        ignores_another = kwargs.get("ignore_index", IGNORE_INDEX) != IGNORE_INDEX
        if not self._enabled or labels is None or ignores_another:
            return
        if self._model.loss_function != self._loss_function:
            raise NotImplementedError(
                "model.loss_function was set while the model trains: set it before train()"
            )
        targets = kwargs.get("shift_labels")  # [B, S]
        if targets is None:
            # [B, S] -> [B, S + 1] -> [B, S]: position i predicts label i + 1, the last one nothing
            targets = F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
        counts = getattr(kwargs.get("seq_ctx"), "target_counts", None)
        self._call = _Call(targets.reshape(-1), kwargs.get("num_items_in_batch"), counts)

    # ---- 2. the head

    def _head_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [B, S, C] -> the loss [1, 1, 1], or logits [B, S, V] without targets."""
        call = self._call
        if call is None or call.loss is not None:
            return type(self._head).forward(self._head, hidden)
        if has_output_hook(self._head):
            raise NotImplementedError(
                "a hook was registered on the head while its loss is computed in chunks, which "
                "would see the loss instead of logits: register it before the model is trained"
            )
        rows = hidden.reshape(-1, hidden.shape[-1])  # [B, S, C] -> [B * S, C]
        if rows.shape[0] != call.targets.shape[0]:
            raise ValueError(
                f"{rows.shape[0]} hidden states but {call.targets.shape[0]} labels reach the "
                f"head; give every token a label ({IGNORE_INDEX} for those without a target), and "
                "do not give `logits_to_keep` together with labels"
            )
        targets = to_device(call.targets, hidden.device)
        if self._read is not None:
            self._show_logits(rows, self._read)
        if self._figures is not None:
            asked = self._figures
            known = asked.d_log_probs
            if known is not None:
                known = to_device(known, hidden.device)
            compute = partial(token_outputs, with_means=asked.with_means, d_log_probs=known)
            found = torch.stack(self._with_head(compute, rows, targets), dim=1)
            self._figures.value = found.detach()  # [B * S, 2 or 3]
            call.loss = -self._figures.value[:, 0].sum()
            return found.view(*hidden.shape[:-1], found.shape[1])  # -> [B, S, 2 or 3]
        items = call.items
        if items is None:
            items = (targets != IGNORE_INDEX).sum() if call.counts is None else call.counts.sum()
        if isinstance(items, torch.Tensor):
            items = to_device(items, hidden.device)
        # No items mean no targets, a sum of 0 and zero gradients: divided by 1 they stay so.
        total = self._with_head(self._total, rows, targets, call.counts)
        call.loss = total / (items + (items == 0))
        return call.loss.reshape(1, 1, 1)

    def _show_logits(self, rows: torch.Tensor, read: Read) -> None:
        """Let `read` see the logits that the head gives for rows [B * S, C]."""
        vocab, width = self._head.weight.shape
        size = chunk_rows(width, vocab, rows.dtype.itemsize)
        for chunk in rows.split(size):
            read(type(self._head).forward(self._head, chunk))  # [rows, V]

    def _with_head(
        self, compute: Callable[..., Any], rows: torch.Tensor, *of_tokens: torch.Tensor | None
    ) -> Any:
        """Return `compute` of rows [B * S, C], the head and `of_tokens`, [B * S] each, under
        autocast."""
        weight = self._head.weight  # [V, C]
        bias = self._head.bias  # [V] or None
        device_type = rows.device.type
        if torch.is_autocast_enabled(device_type) and rows.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device_type)
            rows = rows.to(dtype)
            weight = weight.to(dtype)
            if bias is not None:
                bias = bias.to(dtype)
        if compute is chunked_cross_entropy_sum and of_tokens[-1] is None:  # no counts
            self._log_backend(rows, weight)
        with torch.autocast(device_type, enabled=False):
            return compute(rows, weight, bias, *of_tokens)

    def _log_backend(self, rows: torch.Tensor, weight: torch.Tensor) -> None:
        """Log once which implementation serves rows [B * S, C] and weight [V, C]."""
        reason = reason_without_liger(rows, weight)
        backend = "Liger" if reason is None else f"a loop: {reason}"
        if backend not in self._logged_backends:
            self._logged_backends.add(backend)
            logger.info("chunked loss of %s by %s", type(self._model).__name__, backend)

    # ---- 3. the loss function

    def _loss_function(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """logits [1, 1, 1], the loss that the head has returned -> the loss as a scalar."""
        if self._call is None or self._call.loss is None:
            return self._own_loss(logits, *args, **kwargs)
        if self._figures is not None:
            return self._call.loss  # unused: figures were requested
        assert logits.numel() == 1, (
            "the head ran twice in one forward of the model, and the loss is of the first time"
        )
        value = self._call.loss.detach()
        # The element may have been rounded on its way here, by a cast of FSDP2's. It brings the
        # gradient; the value is the one that the head has computed.
        loss = logits.sum().to(value.dtype)  # [1, 1, 1] -> []
        return loss + (value - loss.detach())

    # ---- 4. the call ends

    def _end(self, module: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
        """Put NO_LOGITS where the outputs would have logits."""
        call = self._call
        self._call = None
        if call is None or call.loss is None or outputs is None:  # None: the forward raised
            return outputs
        if self._figures is not None:
            return outputs
        if isinstance(outputs, tuple):
            return (outputs[0], NO_LOGITS, *outputs[2:])  # loss, logits, ...
        return type(outputs)(**{**outputs, "logits": NO_LOGITS})


def _suitable_head(model: nn.Module) -> nn.Linear:
    """Return the head of `model`, or raise KeepsOwnLoss with the reason against it."""
    own_loss = getattr(model, "loss_function", None)
    if own_loss is not ForCausalLMLoss:
        raise KeepsOwnLoss(
            f"its loss is {getattr(own_loss, '__name__', own_loss)}, not ForCausalLMLoss"
        )
    if is_tensor_parallel(model):
        raise KeepsOwnLoss("tensor parallelism leaves a part of the head on each rank")
    # accelerate keeps the forward that it has wrapped as _original_forward
    replaced = vars(model).get("_original_forward", vars(model).get("forward"))
    if replaced is not None and getattr(replaced, "__func__", replaced) is not type(model).forward:
        raise KeepsOwnLoss("its forward has been replaced by another one")
    trial = try_head(model)
    if trial.head is None:
        raise KeepsOwnLoss(trial.reason)
    head = model.get_submodule(trial.head)
    kind = unsharded_class(head)
    if kind is not nn.Linear or "forward" in vars(head):
        raise KeepsOwnLoss(
            f"its {trial.head} is a {kind.__name__} or has a replaced forward; expected a plain "
            "nn.Linear"
        )
    if has_output_hook(head):
        raise KeepsOwnLoss(f"a hook on its {trial.head} reads logits")
    return head
