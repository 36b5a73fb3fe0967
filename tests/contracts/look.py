"""Helpers of the contract tests: what a signature has, and what a source calls."""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any


def parameters(function: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters in their order, without `self`."""
    names = list(inspect.signature(function).parameters)
    return names[1:] if names[:1] == ["self"] else names


def calls(source_of: Any, name: str) -> list[ast.Call]:
    """Every call of a function or method called `name` in the source of a class, function or
    module."""
    found = []
    for node in _nodes(source_of):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        called = (
            function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
        )
        if called == name:
            found.append(node)
    return found


def attributes(source_of: Any, name: str) -> int:
    """How often the source of a class, function or module reads or writes an attribute called
    `name`."""
    return sum(isinstance(node, ast.Attribute) and node.attr == name for node in _nodes(source_of))


@functools.cache
def _nodes(source_of: Any) -> list[ast.AST]:
    """Return all nodes of the syntax tree of a source. Kept, for the Trainer's is large."""
    return list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(source_of)))))


def schema_arguments(operation: Any) -> tuple[list[str], list[str]]:
    """The names of an aten operation's positional arguments, and of its keyword-only ones."""
    arguments = operation._schema.arguments
    positional = [argument.name for argument in arguments if not argument.kwarg_only]
    keywords = [argument.name for argument in arguments if argument.kwarg_only]
    return positional, keywords
