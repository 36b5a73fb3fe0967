"""Every module stands in the room that its imports name: hf/ is where HuggingFace libraries are
used, and a module that uses none belongs elsewhere."""

import ast
from pathlib import Path

import hf_flexseq

PACKAGE = Path(hf_flexseq.__file__).parent
HUGGINGFACE = {"transformers", "accelerate", "datasets", "deepspeed", "huggingface_hub"}
HUGGINGFACE |= {"peft", "tokenizers", "trl"}


def imported(source):
    """The top packages that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found


def modules(folder):
    """The modules of a folder, without those that hold nothing but a docstring."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        only_docstring = all(isinstance(node, ast.Expr) for node in body)
        if path.name != "__init__.py" and not only_docstring:
            found.append(path)
    return found


def test_modules_in_hf_use_a_huggingface_library():
    """A module that uses none belongs in another folder."""
    paths = modules(PACKAGE / "hf")
    assert len(paths) > 50
    without = [
        str(path.relative_to(PACKAGE))
        for path in paths
        if not imported(path.read_text(encoding="utf-8")) & HUGGINGFACE
    ]
    assert not without


def test_the_search_finds_imports_wherever_they_stand():
    source = "import os.path\ndef f():\n    from accelerate.utils import X\n    from . import y"
    assert imported(source) == {"os", "accelerate"}
