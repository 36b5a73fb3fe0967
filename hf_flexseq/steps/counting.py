"""Find modules that count positions themselves, in the source of their forwards.

A rank's row begins anywhere in a sequence and goes on with another one. A module that is given
`position_ids` knows where its tokens stand; one that counts the tokens of its row does not:

    positions = torch.arange(hidden_states.shape[1])              # counts: found
    positions = torch.cumsum(attention_mask, dim=1)               # counts: found

    def forward(self, position_ids=None, pixel_values=None):
        if position_ids is None:                                  # hf_flexseq gives position_ids
            position_ids = torch.arange(inputs_embeds.shape[1])
        if pixel_values is not None:                              # and columns of tokens alone
            self.patches(pixel_values)

What a forward calls is read, too: methods of its class and functions of its package. A range over
sizes of features alone, such as `torch.arange(0, self.d_model, 2)`, counts no tokens; sizes are
known by their names. Whether any other range counts tokens, or something else such as windows, is
not decided here: whoever knows the module does.
"""

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

# Packages whose modules multiply with weights, one token like the other. A range of theirs counts
# features (PEFT's GraLoRA has one).
_TOKENLESS = ("torch", "peft", "bitsandbytes")

# Names of sizes that have nothing to do with how many tokens there are.
_FEATURES = {
    *("d_model", "hidden_size", "head_dim", "rotary_dim"),
    *("embed_dim", "embedding_dim", "half_dim"),
}

# Arguments that hf_flexseq gives no model: what needs them does not run.
_NEVER_GIVEN = ("past_key_values", "pixel_values", "input_features")


class UnreadableForward(Exception):
    """The source of a forward cannot be read; the message is the reason."""


class Count(NamedTuple):
    """A line that counts."""

    where: str
    """File and line, such as `modeling_llama4.py:361`."""
    text: str
    """The call, as the source has it on its first line."""


def count_in(module: nn.Module) -> Count | None:
    """Return the first line in the forward of `module`, without its children, that counts
    positions; None without one.

    Raises UnreadableForward where the source cannot be read.
    """
    forward = inspect.unwrap(module.forward)
    while isinstance(forward, functools.partial):
        forward = inspect.unwrap(forward.func)
    function = getattr(forward, "__func__", forward)
    if _module_of(function).partition(".")[0] in _TOKENLESS:
        return None
    if not isinstance(function, types.FunctionType):
        raise UnreadableForward(f"{function!r} has no source")
    cls: Any = type(module)
    return _count_in(function, cls, _absent_parts(module))


def _absent_parts(module: nn.Module) -> frozenset[str]:
    """Return the names of the attributes of `module` that are None."""
    absent: set[str] = set()
    for attributes in (vars(module), module._modules, module._parameters, module._buffers):
        absent.update(name for name, value in attributes.items() if value is None)
    return frozenset(absent)


@functools.cache
def _count_in(forward: types.FunctionType, cls: type, absent: frozenset[str]) -> Count | None:
    """Return the first line that counts in `forward`, of class `cls`, or in what it calls.

    absent: attributes of the module that are None.
    """
    unread = [forward]
    seen = {forward}
    while unread:
        function = unread.pop(0)
        body = _source_of(function)
        reader = _Reader(inspect.signature(function).parameters, absent)
        reader.visit(body.tree)
        if reader.found is not None:
            file = Path(function.__code__.co_filename).name
            line = body.first_line + reader.found.lineno - 1
            return Count(f"{file}:{line}", ast.unparse(reader.found))
        for called in _called(reader, function, cls):
            if called not in seen:
                seen.add(called)
                unread.append(called)
    return None


class _Source(NamedTuple):
    tree: ast.AST
    first_line: int
    """Of the function in its file."""


def _source_of(function: types.FunctionType) -> _Source:
    try:
        lines, first_line = inspect.getsourcelines(function)
        return _Source(ast.parse(textwrap.dedent("".join(lines))), first_line)
    except (OSError, TypeError, SyntaxError) as error:
        raise UnreadableForward(f"{function.__qualname__}: {error}") from error


class _Reader(ast.NodeVisitor):
    """Reads a function but for what never runs."""

    def __init__(self, parameters: Iterable[str], absent: Set[str]) -> None:
        """parameters: names of the function's arguments. absent: attributes that are None."""
        self._is_given = "position_ids" in parameters
        self._absent = absent
        self.found: ast.Call | None = None
        """The first call that counts."""
        self.methods: set[str] = set()
        """Names of called methods of the same object."""
        self.inherited: set[str] = set()
        """Names of methods that are called by `super()`."""
        self.functions: set[str] = set()
        """Names of called functions."""

    def visit_If(self, node: ast.If) -> None:
        self._visit_branches(node.test, node.body, node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._visit_branches(node.test, [node.body], [node.orelse])

    def _visit_branches(
        self, test: ast.expr, body: Sequence[ast.AST], other: Sequence[ast.AST]
    ) -> None:
        """Visit what may run of two branches."""
        self.visit(test)
        if not self._never_holds(test):
            for node in body:
                self.visit(node)
        if not self._always_holds(test):
            for node in other:
                self.visit(node)

    def _never_holds(self, test: ast.expr) -> bool:
        match test:
            case ast.Compare(ast.Name("position_ids"), [ast.Is()], [ast.Constant(None)]):
                return self._is_given
            case ast.Compare(ast.Name(name), [ast.IsNot()], [ast.Constant(None)]):
                return name in _NEVER_GIVEN
            case ast.Compare(
                ast.Attribute(ast.Name("self"), name), [ast.IsNot()], [ast.Constant(None)]
            ):
                return name in self._absent
            case ast.BoolOp(ast.And(), values):
                return any(self._never_holds(value) for value in values)
        return False

    def _always_holds(self, test: ast.expr) -> bool:
        match test:
            case ast.Compare(ast.Name("position_ids"), [ast.IsNot()], [ast.Constant(None)]):
                return self._is_given
        return False

    def visit_Call(self, node: ast.Call) -> None:
        if self.found is None and _counts(node):
            self.found = node
        match node.func:
            case ast.Attribute(value=ast.Name("self"), attr=name):
                self.methods.add(name)
            case ast.Attribute(value=ast.Call(func=ast.Name("super")), attr=name):
                self.inherited.add(name)
            case ast.Name(id=name):
                self.functions.add(name)
        self.generic_visit(node)


def _counts(call: ast.Call) -> bool:
    """Tell whether a call makes a range, or sums up a mask."""
    match call.func:
        case ast.Attribute(attr="arange") | ast.Name(id="arange"):
            return not _over_features(call)
        case ast.Attribute(value=summed, attr="cumsum"):
            operands = [summed, *call.args]
            return any("mask" in ast.unparse(operand) for operand in operands)
    return False


def _over_features(arange: ast.Call) -> bool:
    """Tell whether the bounds of a range are named as sizes of features, and by nothing else."""
    bounds = list(arange.args)
    bounds += [word.value for word in arange.keywords if word.arg in ("start", "end", "step")]
    names: set[str] = set()
    for bound in bounds:
        for node in ast.walk(bound):
            match node:
                case ast.Attribute(value=ast.Name("self"), attr=name) | ast.Name(id=name):
                    names.add(name)
                case ast.Call() | ast.Subscript() | ast.Attribute():
                    return False
    names.discard("self")
    return bool(names) and names <= _FEATURES


def _called(
    reader: _Reader, function: types.FunctionType, cls: type
) -> Iterator[types.FunctionType]:
    """Yield the methods of `cls` and the functions of the same package that `function` calls."""
    candidates = [inspect.getattr_static(cls, name, None) for name in sorted(reader.methods)]
    for name in sorted(reader.inherited):
        candidates += [vars(kind).get(name) for kind in cls.__mro__[1:]]
    candidates += [function.__globals__.get(name) for name in sorted(reader.functions)]
    for candidate in candidates:
        called = inspect.unwrap(getattr(candidate, "__func__", candidate))
        if isinstance(called, types.FunctionType) and _belong_together(called, function):
            yield called


def _belong_together(called: types.FunctionType, caller: types.FunctionType) -> bool:
    """Tell whether two functions stand in one package, as a model's files do."""
    if _module_of(called) == _module_of(caller):
        return True
    package = _module_of(caller).rpartition(".")[0]
    return bool(package) and _module_of(called).rpartition(".")[0] == package


def _module_of(function: Any) -> str:
    """Return the name of the module in which a function was defined, "" where it is not known."""
    return getattr(function, "__module__", None) or ""
