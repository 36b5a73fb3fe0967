"""Helpers of the contract tests: what a signature has, and what a source calls."""

import ast
import functools
import inspect
import textwrap


def parameters(function):
    """The names of a function's parameters in their order, without `self`."""
    names = list(inspect.signature(function).parameters)
    return names[1:] if names[:1] == ["self"] else names


def calls(source_of, name):
    """Every call of a function or method called `name` in the source of a class, function or
    module."""
    found = [node for node in _nodes(source_of) if isinstance(node, ast.Call)]
    return [call for call in found if name in (_get(call, "attr"), _get(call, "id"))]


def _get(call, name):
    return getattr(call.func, name, None)


def attributes(source_of, name):
    """How often the source of a class, function or module reads or writes an attribute called
    `name`."""
    return sum(isinstance(node, ast.Attribute) and node.attr == name for node in _nodes(source_of))


@functools.cache
def _nodes(source_of):
    """Return all nodes of the syntax tree of a source. Kept, for the Trainer's is large."""
    return list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(source_of)))))


def schema_arguments(operation):
    """The names of an aten operation's positional arguments, and of its keyword-only ones."""
    arguments = operation._schema.arguments
    positional = [argument.name for argument in arguments if not argument.kwarg_only]
    keywords = [argument.name for argument in arguments if argument.kwarg_only]
    return positional, keywords
