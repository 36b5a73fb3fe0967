"""The optimizer's state on disk: complete or refused, refused by name, and never unpickled."""

import ast
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import hf_flexseq
from hf_flexseq.pipeline import files
from hf_flexseq.pipeline.files import write_tensors
from hf_flexseq.pipeline.optimizer import (
    FOLDER,
    _load_scheduler,
    _save_scheduler,
    load_optimizer,
)
from hf_flexseq.pipeline.optimizer_files import (
    SavedState,
    check_plain,
    clear,
    write_index,
)
from hf_flexseq.steps.manifest import MANIFEST, MARKER
from tests.hf.tiny import tiny_llama
from tests.pipeline.test_trainer import LAYERS, make_trainer, model_of, saved_run
from tests.ranks import run_ranks

REFUSED = (
    ".metadata is a pickle, which could run any code and is not read: "
    "`python scripts/convert_optimizer.py OLD NEW --i-trust-this-file` makes a checkpoint NEW of "
    "a checkpoint OLD that you trust"
)
SAVED = {"optim": "adamw_torch", "max_steps": 3, "weight_decay": 0.1, "batch": 1}


# ---- a planted pickle


class Planted:
    """Writes a file named after the process when it is unpickled."""

    def __init__(self, folder):
        self.command = f"touch {folder}/ran-in-$$"

    def __reduce__(self):
        return os.system, (self.command,)


def marks(folder):
    return list(folder.glob("ran-in-*"))


def test_the_planted_pickle_would_run(tmp_path):
    pickle.loads(pickle.dumps(Planted(tmp_path)))
    assert len(marks(tmp_path)) == 1


@pytest.mark.processes
def test_a_planted_pickle_does_not_run(tmp_path):
    """Two ranks resume in two stages, and without a pipeline, from a checkpoint that no manifest
    protects."""
    run_ranks(saved_run, 2, tmp_path, 2, True, SAVED)
    checkpoint = tmp_path / "checkpoint-3"
    (checkpoint / MARKER).unlink()
    (checkpoint / MANIFEST).unlink()
    (checkpoint / FOLDER / ".metadata").write_bytes(pickle.dumps(Planted(tmp_path)))
    for is_beside_the_index in (True, False):
        if not is_beside_the_index:
            (checkpoint / FOLDER / "index.json").unlink()
        for stages in (2, 1):
            with pytest.raises(AssertionError) as raised:
                run_ranks(saved_run, 2, tmp_path, stages, True, SAVED, str(checkpoint))
            last = str(raised.value).strip().splitlines()[-1]
            assert last == f"ValueError: {checkpoint}/{FOLDER}/{REFUSED}", stages
            assert not marks(tmp_path), stages


FORBIDDEN = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
UNPICKLING = (
    "torch.distributed.checkpoint.load",
    "torch.distributed.checkpoint.load_state_dict",
    "torch.distributed.checkpoint.state_dict_loader",
    "torch.distributed.checkpoint.format_utils",
    "torch.distributed.checkpoint.FileSystemReader",
)


def unpickles(source):
    """(line, reason) of every import and call by which a module could unpickle a file."""
    tree = ast.parse(source)
    full_name = {}  # what a name in this module stands for
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                full_name[alias.asname or top] = alias.name if alias.asname else top
                if top in FORBIDDEN:
                    found.append((node.lineno, alias.name))
                if alias.name.startswith(UNPICKLING):
                    found.append((node.lineno, alias.name))
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                full_name[alias.asname or alias.name] = name
                if name.partition(".")[0] in FORBIDDEN or name.startswith(UNPICKLING):
                    found.append((node.lineno, name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, *others = ast.unparse(node).split(".")
            name = ".".join([full_name.get(first, first), *others])
            if name in UNPICKLING:
                found.append((node.lineno, name))
        if isinstance(node, ast.Call):
            first, *others = ast.unparse(node.func).split(".")
            name = ".".join([full_name.get(first, first), *others])
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if (
                name in ("torch.load", "torch.serialization.load")
                and options.get("weights_only") != "True"
            ):
                found.append((node.lineno, name))
            if options.get("allow_pickle") not in (None, "False"):
                found.append((node.lineno, name))
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "import torch\ntorch.load(file)",
        "import torch\ntorch.load(file, weights_only=False)",
        "from torch import load as read\nread(file)",
        "import torch.distributed.checkpoint as dcp\ndcp.load(state, checkpoint_id=folder)",
        "from torch.distributed import checkpoint\ncheckpoint.load(state)",
        "from torch.distributed.checkpoint import load",
        "import torch\ntorch.distributed.checkpoint.load(state)",
        "import numpy as np\nnp.load(file, allow_pickle=True)",
    ],
)
def test_the_search_finds_what_unpickles(source):
    assert unpickles(source)


def test_no_module_unpickles_a_file():
    root = Path(hf_flexseq.__file__).parent
    modules = sorted(root.rglob("*.py"))
    assert len(modules) > 50
    found = {
        str(path.relative_to(root)): unpickles(path.read_text(encoding="utf-8"))
        for path in modules
    }
    assert {path: lines for path, lines in found.items() if lines} == {}
    assert not unpickles("import torch\ntorch.load(file, weights_only=True)")


# ---- what is written


@pytest.mark.processes
@pytest.mark.parametrize("tied", [True, False])
def test_each_stage_writes_a_file_and_a_tied_tensor_is_stored_once(tmp_path, tied):
    folder = tmp_path / "checkpoint-3" / FOLDER
    folder.mkdir(parents=True)
    for left in (
        ".metadata",
        "__0_0.distcp",
        "state-00003-of-00004.safetensors",
        "index.json.partial",
    ):
        (folder / left).write_text("left by an earlier run")
    for left in ("optimizer.pt", "scheduler.pt"):  # by one without a pipeline
        (folder.parent / left).write_text("left by an earlier run")
    run_ranks(saved_run, 2, tmp_path, 2, tied, SAVED)
    names = ["state-00001-of-00002.safetensors", "state-00002-of-00002.safetensors"]
    found = sorted(path.name for path in folder.iterdir())
    assert found == ["index.json", "scheduler.json", *names]
    assert not list(folder.parent.glob("*.pt"))
    index = json.loads((folder / "index.json").read_text())
    held = {}
    for name in names:
        with safe_open(folder / name, framework="pt") as opened:
            assert not held.keys() & set(opened.keys())
            held.update(dict.fromkeys(opened.keys(), name))
    assert index["tensors"] == held
    trained = {name for name, _ in model_of(tied).named_parameters()}
    assert {key for key in held if key.endswith(".exp_avg")} == {
        f"state.{name}.exp_avg" for name in trained
    }
    assert SavedState(folder).value("param_groups.model.norm.weight.betas") == [0.9, 0.999]
    assert held["state.model.embed_tokens.weight.exp_avg"] == names[0]


def test_tensors_and_values_come_back_bit_for_bit(tmp_path):
    """Tensors may share memory, be transposed, hold one number or none."""
    table = torch.randn(4, 6)
    tensors = {
        "a": table,
        "b": table,
        "c": table.t(),
        "d": table[1:, 2],
        "e": torch.tensor(7.0),
        "f": torch.ones(0),
    }
    tensors["g"] = torch.randint(0, 255, (5,), dtype=torch.uint8)
    tensors["h"] = torch.randn(3, dtype=torch.bfloat16)
    values = {"lr": 0.1 + 0.2, "step": 3, "foreach": None, "fused": False, "betas": [0.9, 0.999]}
    clear(tmp_path / "state")
    write_tensors(tmp_path / "state" / "one", {key: tensors[key] for key in "abcdef"})
    write_tensors(tmp_path / "state" / "two", {key: tensors[key] for key in "gh"})
    files = dict.fromkeys("abcdef", "one") | dict.fromkeys("gh", "two")
    write_index(tmp_path / "state", files, values)
    saved = SavedState(tmp_path / "state")
    found = dict(saved.tensors(tensors))
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor), key
    assert {key: saved.value(key) for key in values} == values
    assert saved.keys() == tensors.keys() | values.keys()


def test_a_value_that_json_would_change_is_refused_by_name():
    for fine in (1, 0.5, True, None, "std", (0.9, 0.999)):
        check_plain("param_groups.w.option", fine)
    with pytest.raises(
        ValueError, match="param_groups.w.option holds a dtype; only tensors, numbers"
    ):
        check_plain("param_groups.w.option", (1, torch.float32))


def test_a_write_that_breaks_off_leaves_nothing_that_is_read(tmp_path, monkeypatch):
    folder = tmp_path / "state"
    clear(folder)
    write_tensors(folder / "one", {"a": torch.ones(2)})
    write_index(folder, {"a": "one"}, {})
    assert SavedState(folder).keys() == {"a"}

    def broken(tensors, path, **options):
        Path(path).write_bytes(b"half a file")
        raise OSError("no space left")

    monkeypatch.setattr(files, "save_file", broken)
    clear(folder)
    with pytest.raises(OSError, match="no space left"):
        write_tensors(folder / "state-00001-of-00001.safetensors", {"a": torch.ones(2)})
    assert not (folder / "state-00001-of-00001.safetensors").exists()
    with pytest.raises(ValueError, match="has no index.json: its writer did not come to the end"):
        SavedState(folder)
    clear(folder)
    assert [path.name for path in folder.iterdir()] == ["one"], "only files of ours are removed"
    (folder / "index.json").write_text('{"format": 2}')
    with pytest.raises(ValueError, match="index.json is no index of format 1"):
        SavedState(folder)


# ---- states that do not fit


def written(folder, model, optimizer, *, change=None):
    """Write the state of a whole model, changed on its way."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    if change is not None:
        change(state)
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    clear(folder / FOLDER)
    write_tensors(folder / FOLDER / "one", tensors)
    values = {key: value for key, value in state.items() if key not in tensors}
    write_index(folder / FOLDER, dict.fromkeys(tensors, "one"), values)


def small_run(names=("in", "out"), width=3, kind=torch.optim.AdamW, seed=0):
    """A model of named layers, after one step, and its optimizer and scheduler."""
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict(
        {name: torch.nn.Linear(width, width, bias=False) for name in names}
    )
    optimizer = kind(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    scheduler.step()
    return model, optimizer, scheduler


@pytest.mark.parametrize(
    ("kind", "options", "file"),
    [
        ("LinearLR", {"start_factor": 0.1}, f"{FOLDER}/scheduler.json"),
        ("ReduceLROnPlateau", {"patience": 2}, f"{FOLDER}/scheduler.json"),
        # its counts by number are nothing that JSON gives back
        ("MultiStepLR", {"milestones": [1, 2]}, "scheduler.pt"),
    ],
)
def test_the_state_of_a_scheduler_comes_back(tmp_path, kind, options, file):
    def scheduler():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.3)
        return getattr(torch.optim.lr_scheduler, kind)(optimizer, **options)

    first = scheduler()
    for loss in (0.5, 0.4):
        first.optimizer.step()
        first.step(*((loss,) if kind == "ReduceLROnPlateau" else ()))
    (tmp_path / FOLDER).mkdir()
    _save_scheduler(first.state_dict(), tmp_path)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written == [tmp_path / file]
    other = scheduler()
    assert other.state_dict() != first.state_dict()
    _load_scheduler(other, str(tmp_path))
    assert other.state_dict() == first.state_dict()


def without(part):
    def change(state):
        for key in [key for key in state if part in key]:
            del state[key]

    return change


def test_a_state_that_fits_comes_back_bit_for_bit(tmp_path):
    model, optimizer, scheduler = small_run()
    written(tmp_path, model, optimizer)
    torch.save(scheduler.state_dict(), tmp_path / "scheduler.pt")
    other, found, its_scheduler = small_run(seed=1)
    found.param_groups[0]["lr"] = 5.0
    load_optimizer(other, found, its_scheduler, str(tmp_path))
    assert found.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert found.param_groups[0]["betas"] == (0.9, 0.999)
    for mine, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert found.state[mine].keys() == optimizer.state[wanted].keys()
        for key, value in optimizer.state[wanted].items():
            assert torch.equal(found.state[mine][key], value), key


@pytest.mark.parametrize(
    ("saved", "run", "change", "message"),
    [
        (
            {},
            {},
            without("out.weight"),
            "has no optimizer state of out.weight, which this run trains",
        ),
        (
            {},
            {"names": ("in", "new", "out")},
            None,
            "has no optimizer state of new.weight, which this run",
        ),
        (
            {},
            {"names": ("in",)},
            None,
            "has optimizer state of out.weight, which this run does not train",
        ),
        ({}, {"names": "abcde"}, None, "of a.weight, b.weight, c.weight and 2 others, which"),
        (
            {},
            {"width": 4},
            None,
            r"holds state.(in|out).weight.exp_avg\S* as \[3, 3\], but this run has \[4, 4\]",
        ),
        (
            {"width": 1},
            {},
            None,
            r"holds state.(in|out).weight.exp_avg\S* as \[1, 1\], but this run has \[3, 3\]",
        ),
        (
            {"kind": torch.optim.SGD},
            {},
            None,
            r"has no \S*(in|out).weight\S*, .*: it is of another optimizer",
        ),
        (
            {},
            {},
            without("out.weight.exp_avg_sq"),
            "has no state.out.weight.exp_avg_sq: it is of another",
        ),
        (
            {},
            {},
            lambda state: state.update({"param_groups.out.weight.lr": torch.tensor(0.1)}),
            "holds param_groups.out.weight.lr as a tensor, not as this run's number",
        ),
        (
            {},
            {},
            lambda state: state.update({"state.out.weight.step": 1}),
            "holds state.out.weight.step as a number, not as this run's tensor",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_name(tmp_path, saved, run, change, message):
    model, optimizer, _ = small_run(**saved)
    written(tmp_path, model, optimizer, change=change)
    with pytest.raises(ValueError, match=message) as raised:
        load_optimizer(*small_run(**run), str(tmp_path))
    assert "\n" not in str(raised.value)


def run_of_layers(rank, world_size, folder, layers, resume=None):
    model = tiny_llama(num_hidden_layers=layers)
    trainer = make_trainer(model, folder, 2, save_strategy="steps", save_steps=3, **SAVED)
    trainer.train(resume_from_checkpoint=resume)


@pytest.mark.processes
def test_stages_refuse_the_state_of_more_layers_than_they_have_together(tmp_path):
    """The weights of more layers are not refused: each stage reads its own."""
    run_ranks(run_of_layers, 2, tmp_path, LAYERS)
    with pytest.raises(
        AssertionError, match=r"has optimizer state of model.layers.2\S+, .* which this run does"
    ):
        run_ranks(run_of_layers, 2, tmp_path, LAYERS - 1, f"{tmp_path}/checkpoint-3")
