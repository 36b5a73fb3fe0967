"""Read from the source of a model's `forward` which module makes its logits, and whether anything
else happens to them.

A chunked loss replaces the logits by one number, so a `forward` may do nothing with them but pass
them on. This one is suitable, and `lm_head` is its head:

    def forward(self, input_ids, labels=None, logits_to_keep=0, **kwargs):
        outputs = self.model(input_ids, **kwargs)
        hidden = outputs.last_hidden_state
        logits = self.lm_head(hidden[:, -logits_to_keep:])        # assigned once, from a head
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, **kwargs)
        if output_router_logits:
            loss += self.router_aux_loss_coef * aux_loss          # added afterwards: no harm
        return CausalLMOutputWithPast(loss=loss, logits=logits)   # an output, by its name

Each of these lines in its place makes a `forward` unsuitable:

    logits = self.lm_head(hidden).float()                         # no bare call of a head
    logits = logits / self.config.logits_scaling                  # logits are changed
    logits = self.lm_head(self.lm_head(hidden))                   # the head is used twice
    labels = labels[:, 1:]                                        # labels are changed
    loss = self.loss_function(logits, labels)                     # no **kwargs, which bring
                                                                  # num_items_in_batch
    loss = F.cross_entropy(logits, labels)                        # another loss function
"""

import ast
import inspect
import textwrap

from transformers import PreTrainedModel


class KeepsOwnLoss(Exception):
    """A model must keep its own loss; the message is the reason."""


def head_name(cls: type[PreTrainedModel]) -> str:
    """Return the attribute that makes the logits in the forward of `cls`, such as `lm_head`.

    Raises KeepsOwnLoss when anything else happens to the logits, or the source cannot be read.
    """
    try:
        source = inspect.getsource(inspect.unwrap(cls.forward))
        tree = ast.parse(textwrap.dedent(source))
    except (OSError, TypeError, SyntaxError) as error:
        raise KeepsOwnLoss(f"the source of its forward cannot be read ({error})") from error
    return head_in(tree)


def head_in(tree: ast.AST) -> str:
    """Return the attribute that makes the logits in the parsed source of a forward.

    Raises KeepsOwnLoss when anything else happens to the logits.
    """
    # 1. the uses of `logits` that pass them on
    allowed = _logits_passed_on(tree)

    # 2. the assignment `logits = self.<head>(...)`
    head: str | None = None
    for node in ast.walk(tree):
        match node:
            case ast.Assign(
                targets=[ast.Name("logits") as target],
                value=ast.Call(func=ast.Attribute(value=ast.Name("self"), attr=name)),
            ) if head is None:
                head = name
                allowed.add(target)

    # 3. no other use, neither of the logits nor of the head
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "logits" and node not in allowed:
            raise KeepsOwnLoss(
                "its forward does more with the logits than to pass them on "
                f"(its line {node.lineno})"
            )
    head_uses = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == head:
            head_uses += 1
    if head is None or head_uses != 1:
        raise KeepsOwnLoss(
            "its forward has no `logits = self.<head>(...)`, or uses the head twice"
        )
    return head


def _logits_passed_on(tree: ast.AST) -> set[ast.AST]:
    """Collect the uses of `logits` as an argument of the loss or, by keyword, of the output."""
    passed: set[ast.AST] = set()
    losses = 0
    for node in ast.walk(tree):
        match node:
            # labels = ...
            case ast.Name(id="labels", ctx=ast.Store()):
                raise KeepsOwnLoss("its forward changes the labels")
            # self.loss_function(logits, ...) or self.loss_function(..., logits=logits)
            case ast.Call(
                func=ast.Attribute(value=ast.Name("self"), attr="loss_function"),
                args=arguments,
                keywords=keywords,
            ):
                losses += _is_whole_loss(node)
                passed.update(arguments[:1])
                passed.update(_values_of_logits(keywords))
            # CausalLMOutputWithPast(..., logits=logits)
            case ast.Call(func=ast.Name(id=name), keywords=keywords) if "Output" in name:
                passed.update(_values_of_logits(keywords))
    if losses != 1:
        raise KeepsOwnLoss(
            "its forward has no `self.loss_function(logits, labels, ..., **kwargs)`, or several"
        )
    return passed


def _is_whole_loss(call: ast.Call) -> bool:
    """Tell whether the loss gets the labels as they came, and **kwargs, which bring shift_labels
    and num_items_in_batch."""
    values = list(call.args)
    for keyword in call.keywords:
        values.append(keyword.value)
    has_labels = any(isinstance(value, ast.Name) and value.id == "labels" for value in values)
    has_kwargs = any(keyword.arg is None for keyword in call.keywords)  # **kwargs has no name
    return has_labels and has_kwargs


def _values_of_logits(keywords: list[ast.keyword]) -> list[ast.expr]:
    """Return the values that are given by the keyword `logits`."""
    return [keyword.value for keyword in keywords if keyword.arg == "logits"]
