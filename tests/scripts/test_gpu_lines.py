"""scripts/benchmarks/gpu_lines.py: which lines only a GPU runs, by its definition."""

import ast
import importlib
import re

import pytest

from tests.programs import ROOT


@pytest.fixture
def lines(monkeypatch):
    """The benchmark."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts/benchmarks"))
    return importlib.import_module("gpu_lines")


def found_in(lines, monkeypatch, tmp_path, source, **definition):
    """The texts of the lines that only a GPU runs in a module `one.py` of this source."""
    monkeypatch.setattr(lines, "PACKAGE", tmp_path)
    for name, value in definition.items():
        monkeypatch.setattr(lines, name, value)
    (tmp_path / "one.py").write_text(source)
    return [one.text for one in lines.gpu_lines(tmp_path / "one.py")]


SOURCE = '''
ONCE = 1

def shared(x, device):
    """Says so."""
    if device.type == "cuda":
        x = x.pin()
    elif x:
        y = 2
    else:
        return 3
    return 4

def early(device):
    if device.type != "cuda":
        return 0
    a = (
        1 +
        2
    )
    for i in a:
        b = 3
    return a

class Both:
    def late(self):
        with self.lock:
            if self.transport.capabilities.ordered:
                self.wait()
        match self.name:
            case "nccl":
                x = 5
            case _:
                x = 6
        return x

    def own(self):
        """Says so, too."""
        size: int
        size = 7
'''


def test_branches_that_ask_for_a_gpu_and_what_follows_a_return_without_one(
    lines, monkeypatch, tmp_path
):
    found = found_in(lines, monkeypatch, tmp_path, SOURCE, ASKS_IN={"one.py": "'nccl'"})
    early = ["a = (", "for i in a:", "b = 3", "return a"]
    assert found == ["x = x.pin()", *early, "self.wait()", "x = 5"]


def test_functions_and_modules_by_name(lines, monkeypatch, tmp_path):
    source = SOURCE.replace("cuda", "cpu")
    functions = {"one.py": ("Both.own",)}
    found = found_in(lines, monkeypatch, tmp_path, source, ASKS="$.", FUNCTIONS=functions)
    assert "size = 7" in found
    assert "size: int" not in found
    whole = found_in(lines, monkeypatch, tmp_path, source, MODULES=("one.py",))
    assert {"y = 2", "return 0", "with self.lock:", "size = 7"} <= set(whole)
    assert not {"ONCE = 1", "def shared(x, device):", '"""Says so."""'} & set(whole)


def test_a_statement_of_several_lines_ran_if_one_of_them_did(lines, monkeypatch, tmp_path):
    found_in(lines, monkeypatch, tmp_path, SOURCE)
    early = [one for one in lines.gpu_lines(tmp_path / "one.py") if one.text in ("a = (", "b = 3")]
    first = SOURCE.splitlines().index("        1 +") + 1
    assert [one.text for one in lines.not_executed(early, {first})] == ["b = 3"]
    assert lines.not_executed(early, set(range(first + 10))) == []


def test_the_definition_names_what_there_is(lines):
    for name in {*lines.MODULES, *lines.SHARED, *lines.FUNCTIONS, *lines.ASKS_IN}:
        path = (lines.ROOT if name.startswith("scripts/") else lines.PACKAGE) / name
        assert lines.gpu_lines(path), name
        there = dict(lines.functions(ast.parse(path.read_text())))
        named = {*lines.FUNCTIONS.get(name, ()), *lines.SHARED.get(name, ())}
        assert named <= there.keys(), name
        if name in lines.ASKS_IN:
            conditions = [condition for _, condition in conditions_of(path)]
            assert any(re.search(lines.ASKS_IN[name], one) for one in conditions), name


def test_every_condition_that_names_cuda_is_in_the_definition(lines):
    for path in lines.PACKAGE.rglob("*.py"):
        inside = {one.number for one in lines.gpu_lines(path)}
        also = lines.ASKS_IN.get(lines.name_of(path))
        for number, condition in conditions_of(path):
            if number not in inside and re.search(r"cuda|nccl|is_available", condition):
                known = re.search(lines.ASKS_NOT, condition)
                assert known or lines.asks(condition, also), (path, condition)


def test_every_statement_that_names_cuda_is_in_the_definition_or_runs_on_all_devices(lines):
    on_all = set()
    for path in lines.files():
        name = lines.name_of(path)
        inside = {one.number for one in lines.gpu_lines(path)}
        source = path.read_text().splitlines()
        for statement in heads_of(lines, path):
            text = " ".join(source[statement.lineno - 1 : lines.last_line(statement)])
            if statement.lineno in inside or not re.search(lines.NAMES, text):
                continue
            assert re.search(lines.ON_ALL.get(name, "$."), text), (name, text)
            on_all.add(name)
    assert on_all == lines.ON_ALL.keys()


def heads_of(lines, path):
    """The statements of all functions of a module, of which compound ones count by their first
    line."""
    for _, function in lines.functions(ast.parse(path.read_text())):
        yield from lines.inside(function.body)


def conditions_of(path):
    """What decides about branches of a module, as `ast` writes it, each with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If):
            yield node.lineno, ast.unparse(node.test)
        elif isinstance(node, ast.For):
            yield node.lineno, ast.unparse(node.iter)
        elif isinstance(node, ast.match_case):
            yield node.pattern.lineno, ast.unparse(node.pattern)
