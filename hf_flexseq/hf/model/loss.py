"""The loss of an unmodified causal language model, without logits for all its tokens.

How one `model(..., labels=...)` goes while a `ChunkedLoss` is attached:

    1. a forward pre-hook of the model notes the targets and `num_items_in_batch`
    2. the head, its `forward` replaced on the instance, sees hidden states [B, S, C] and the
       targets: it computes the loss chunk by chunk (chunked_loss.py) and returns it, as [1, 1, 1],
       where logits [B, S, V] are expected
    3. the model's `loss_function`, replaced on the instance, hands it on
    4. a forward hook puts None where the outputs would have logits

A call without labels (`generate`, a plain forward) finds nothing noted and runs as if nothing were
attached.

The work happens inside the head's own call because only there is its weight a whole plain tensor
under FSDP2 and ZeRO-3. The head divides by the number of items itself, though the loss function
could: accelerate's FSDP2 casts a unit's outputs, and their gradients, to 16 bits, and 1/items
would be off by up to 0.4 % in every gradient. The loss's value goes around that cast, too.

A model is suitable when nothing else happens to its logits. That is read from its `forward`:
`logits` is assigned once, from a head that is a plain nn.Linear, and then only handed to
`self.loss_function` and to the output. A loss added afterwards, as the router loss of a mixture of
experts, does no harm.

Rejected: a list of known models, which ages; replacing the model's `forward`, which differs from
model to model and fights with accelerate, which replaces it as well; and calling the base model
and the head from outside, where the hooks of FSDP2, ZeRO-3 and DDP do not see the call.
"""

import ast
import inspect
import logging
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.kernels.chunked_loss import choose_backend, chunked_cross_entropy_sum

logger = logging.getLogger(__name__)


def attach_chunked_loss(model: nn.Module) -> "ChunkedLoss | None":
    """Let `model`, a causal language model of transformers or a PEFT model of one, compute its
    loss in chunks.

    To be called before the model is wrapped (DDP, DeepSpeed). Returns the handle, the same one if
    called again, or None when the model is not suitable: then one INFO line names the reason and
    the model keeps its own loss. While attached, a call with labels has no logits in its outputs;
    where they are wanted, use `handle.disabled()`.
    """
    entries = {model}
    if hasattr(model, "get_base_model"):
        # PEFT. Some adapters call the model past its hooks, some past those of the adapter around
        # it, and what is around that may still lengthen the labels. Where both run they note the
        # same.
        adapter, model = model.base_model, model.get_base_model()
        entries = {adapter, model}
    attached = getattr(vars(model).get("_loss_function"), "__self__", None)
    if isinstance(attached, ChunkedLoss):
        return attached
    try:
        head = _suitable_head(model)
    except _Unsuitable as reason:
        logger.info("%s keeps its own loss: %s", type(model).__name__, reason)
        return None
    return ChunkedLoss(entries, model, head)


def has_chunkable_loss(model: nn.Module) -> bool:
    """Whether `attach_chunked_loss` can do without the logits of all tokens of `model`, itself not
    an adapter."""
    try:
        _suitable_head(model)
    except _Unsuitable:
        return False
    return True


@dataclass(slots=True)
class _Call:
    """One forward of the model: its targets [B * S], what to divide by, and the loss once the head
    has run."""

    targets: torch.Tensor
    items: torch.Tensor | int | None
    loss: torch.Tensor | None = None


class ChunkedLoss:
    """The chunked loss attached to one model; see `attach_chunked_loss`."""

    def __init__(self, entries: set[nn.Module], model: nn.Module, head: nn.Linear):
        self._model, self._head = model, head
        self._own_loss, self._had_own = model.loss_function, "_loss_function" in vars(model)
        self._labels_at = list(inspect.signature(model.forward).parameters).index("labels")
        self._call: _Call | None = None
        self._enabled = True
        self._said: set[str] = set()  # backends that have been logged
        self._hooks = [
            entry.register_forward_pre_hook(self._begin, with_kwargs=True) for entry in entries
        ]
        # always_call: an exception leaves no targets behind.
        self._hooks += [
            entry.register_forward_hook(self._end, always_call=True) for entry in entries
        ]
        head.forward = self._head_forward
        model.loss_function = self._loss_function

    def detach(self) -> None:
        """Give the model its own loss back and leave nothing on it. A second call does nothing."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._enabled = [], False
        del self._head.forward
        if self._had_own:
            self._model.loss_function = self._own_loss
        else:
            del self._model._loss_function

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Calls that begin inside have logits [B, S, V] and the model's own loss."""
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = None
        labels = args[self._labels_at] if len(args) > self._labels_at else kwargs.get("labels")
        if (
            not self._enabled
            or labels is None
            or kwargs.get("ignore_index", IGNORE_INDEX) != IGNORE_INDEX
        ):
            return
        targets = kwargs.get("shift_labels")  # [B, S]
        if targets is None:
            targets = F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
        self._call = _Call(targets.reshape(-1), kwargs.get("num_items_in_batch"))

    def _head_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        call = self._call
        if call is None or call.loss is not None:
            return type(self._head).forward(self._head, hidden)
        rows = hidden.reshape(-1, hidden.shape[-1])  # [B * S, C]
        if rows.shape[0] != call.targets.shape[0]:
            raise ValueError(
                f"{rows.shape[0]} hidden states but {call.targets.shape[0]} labels reach the "
                f"head; give every token a "
                f"label ({IGNORE_INDEX} for those without a target), and do not give "
                f"`logits_to_keep` together with labels"
            )
        targets = call.targets.to(hidden.device)
        items = (targets != IGNORE_INDEX).sum() if call.items is None else call.items
        items = items.to(hidden.device) if isinstance(items, torch.Tensor) else items
        # No items mean no targets, a sum of 0 and zero gradients: divided by 1 they stay so.
        call.loss = self._sum(rows, targets) / (items + (items == 0))
        return call.loss.reshape(1, 1, 1)

    def _sum(self, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        operands, device = (rows, self._head.weight, self._head.bias), rows.device.type
        if torch.is_autocast_enabled(device) and rows.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
            operands = tuple(None if x is None else x.to(dtype) for x in operands)
        backend = choose_backend(*operands[:2])
        if backend.name not in self._said:
            self._said.add(backend.name)
            logger.info(
                "chunked loss of %s by %s: %s",
                type(self._model).__name__,
                backend.name,
                backend.why,
            )
        with torch.autocast(device, enabled=False):
            return chunked_cross_entropy_sum(*operands, targets)

    def _loss_function(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._call is None or self._call.loss is None:
            return self._own_loss(logits, *args, **kwargs)
        assert logits.numel() == 1, (
            "the head ran twice in one forward of the model, and the loss is of the first time"
        )
        exact = self._call.loss.detach()
        # one element, perhaps rounded on its way here: it has the gradient ...
        loss = logits.sum().to(exact.dtype)
        return loss + (exact - loss.detach())  # ... and this is the value

    def _end(self, module: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
        call, self._call = self._call, None
        if call is None or call.loss is None or outputs is None:  # None: the forward raised
            return outputs
        if isinstance(outputs, tuple):
            return (outputs[0], None, *outputs[2:])  # loss, logits, ...
        return type(outputs)(**{**outputs, "logits": None})


class _Unsuitable(Exception):
    """Why a model must keep its own loss."""


def _suitable_head(model: nn.Module) -> nn.Linear:
    own_loss = getattr(model, "loss_function", None)
    if own_loss is not ForCausalLMLoss:
        raise _Unsuitable(
            f"its loss is {getattr(own_loss, '__name__', own_loss)}, not ForCausalLMLoss"
        )
    if (getattr(model, "tp_size", None) or 1) > 1:
        raise _Unsuitable("tensor parallelism leaves a part of the head on each rank")
    # the first: accelerate has wrapped it
    replaced = vars(model).get("_original_forward", vars(model).get("forward"))
    if replaced is not None and getattr(replaced, "__func__", replaced) is not type(model).forward:
        raise _Unsuitable("its forward has been replaced by another one")
    name = _head_name(type(model))
    head = getattr(model, name, None)
    # fully_shard turns the class Linear into FSDPLinear(FSDPModule, Linear).
    kind = next(cls for cls in type(head).__mro__ if not issubclass(cls, FSDPModule))
    if kind is not nn.Linear or "forward" in vars(head):
        raise _Unsuitable(
            f"its {name} is no plain nn.Linear but {kind.__name__}, or has a forward of its own"
        )
    return head


def _head_name(cls: type[nn.Module]) -> str:
    """The attribute that makes the logits in the forward of `cls`; _Unsuitable if they are not
    just passed on."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward))))
    except (OSError, TypeError, SyntaxError) as error:
        raise _Unsuitable(f"the source of its forward cannot be read ({error})") from error
    head, passed = None, _logits_passed_on(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Assign(
                [ast.Name("logits")], ast.Call(ast.Attribute(ast.Name("self"), name))
            ) if head is None:
                head = name
                passed.add(node.targets[0])
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "logits" and node not in passed:
            raise _Unsuitable(
                f"its forward does more with the logits than to pass them on (its "
                f"line {node.lineno})"
            )
    uses = [
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == head
    ]
    if len(uses) != 1:
        raise _Unsuitable("its forward has no `logits = self.<head>(...)`, or uses the head twice")
    return head


def _logits_passed_on(tree: ast.AST) -> set[ast.AST]:
    """The uses of `logits` as an argument of the loss or, by name, of the output."""
    passed, losses = set(), 0
    for node in ast.walk(tree):
        match node:
            case ast.Name("labels", ast.Store()):
                raise _Unsuitable("its forward changes the labels")
            case ast.Call(ast.Attribute(ast.Name("self"), "loss_function"), arguments, keywords):
                losses += _is_whole_loss(node)
                passed.update(arguments[:1], _values_of_logits(keywords))
            case ast.Call(ast.Name(name), _, keywords) if "Output" in name:
                passed.update(_values_of_logits(keywords))
    if losses != 1:
        raise _Unsuitable(
            "its forward has no `self.loss_function(logits, labels, ..., **kwargs)`, or several"
        )
    return passed


def _is_whole_loss(call: ast.Call) -> bool:
    """Whether the labels go in as they came, and **kwargs with them: shift_labels and
    num_items_in_batch."""
    arguments = call.args + [keyword.value for keyword in call.keywords]
    has_labels = any(
        isinstance(argument, ast.Name) and argument.id == "labels" for argument in arguments
    )
    return has_labels and any(keyword.arg is None for keyword in call.keywords)


def _values_of_logits(keywords: list[ast.keyword]) -> list[ast.AST]:
    return [keyword.value for keyword in keywords if keyword.arg == "logits"]
