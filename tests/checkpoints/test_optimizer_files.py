"""The optimizer's state on disk: complete or refused, refused by name, and never unpickled; and
how ranks divide that of a sharded model. What a pipeline writes is in `test_checkpoints.py`."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hf_flexseq.checkpoints import files, sharded_optimizer
from hf_flexseq.checkpoints.files import clear, write_tensors
from hf_flexseq.checkpoints.optimizer import (
    FOLDER,
    _for_groups,
    _load_scheduler,
    _save_scheduler,
    load_optimizer,
    state_of,
    write_optimizer,
)
from hf_flexseq.checkpoints.optimizer_files import (
    WRITTEN,
    check_plain,
    named_state,
    write_index,
)
from hf_flexseq.checkpoints.sharded_optimizer import save_sharded_optimizer
from hf_flexseq.checkpoints.shards import read_own, whole
from hf_flexseq.distributed.communicator import Communicator
from tests.planted import Planted, marks
from tests.ranks import run_ranks

REFUSED = (
    ".metadata is a pickle, which could run any code and is not read: "
    "`python scripts/convert_optimizer.py OLD NEW --i-trust-this-file` makes a checkpoint NEW of "
    "a checkpoint OLD that you trust"
)


# ---- a planted pickle


def test_a_planted_pickle_does_not_run(tmp_path):
    model, optimizer, scheduler = small_run()
    written(tmp_path, model, optimizer)
    planted = tmp_path / FOLDER / ".metadata"
    planted.write_bytes(pickle.dumps(Planted(tmp_path)))
    for is_beside_the_index in (True, False):
        if not is_beside_the_index:
            (tmp_path / FOLDER / "index.json").unlink()
        with pytest.raises(ValueError) as raised:
            load_optimizer(model, optimizer, scheduler, str(tmp_path), Communicator())
        assert str(raised.value) == f"{tmp_path}/{FOLDER}/{REFUSED}"
        assert not marks(tmp_path)
    pickle.loads(planted.read_bytes())
    assert len(marks(tmp_path)) == 1, "it would run"


# ---- what is written


def test_tensors_and_values_come_back_bit_for_bit(tmp_path):
    """Tensors may share memory, be transposed, hold one number or none."""
    table = torch.randn(4, 6)
    tensors = {"a": table, "b": table, "c": table.t(), "d": table[1:, 2]}
    tensors |= {"e": torch.tensor(7.0), "f": torch.ones(0)}
    tensors["g"] = torch.randint(0, 255, (5,), dtype=torch.uint8)
    tensors["h"] = torch.randn(3, dtype=torch.bfloat16)
    values = {"lr": 0.1 + 0.2, "step": 3, "foreach": None, "fused": False, "betas": [0.9, 0.999]}
    clear(tmp_path / "state", WRITTEN)
    write_tensors(tmp_path / "state" / "one", {key: tensors[key] for key in "abcdef"})
    write_tensors(tmp_path / "state" / "two", {key: tensors[key] for key in "gh"})
    files = dict.fromkeys("abcdef", "one") | dict.fromkeys("gh", "two")
    write_index(tmp_path / "state", files, values)
    saved = named_state(tmp_path / "state")
    found = {key: stored[...] for key, stored in saved.tensors(tensors)}
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
    clear(folder, WRITTEN)
    write_tensors(folder / "one", {"a": torch.ones(2)})
    write_index(folder, {"a": "one"}, {})
    assert named_state(folder).keys() == {"a"}

    def broken(tensors, path, **options):
        Path(path).write_bytes(b"half a file")
        raise OSError("no space left")

    monkeypatch.setattr(files, "save_file", broken)
    clear(folder, WRITTEN)
    with pytest.raises(OSError, match="no space left"):
        write_tensors(folder / "state-00001-of-00001.safetensors", {"a": torch.ones(2)})
    assert not (folder / "state-00001-of-00001.safetensors").exists()
    with pytest.raises(ValueError, match="has no index.json: saving was interrupted"):
        named_state(folder)
    clear(folder, WRITTEN)
    assert [path.name for path in folder.iterdir()] == ["one"], "only files of ours are removed"
    (folder / "index.json").write_text('{"format": 2}')
    with pytest.raises(ValueError, match="index.json is not an index of format 1"):
        named_state(folder)


# ---- states that do not fit


def written(folder, model, optimizer, *, change=None):
    """Write the state of a whole model, changed on its way."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    if change is not None:
        change(state)
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    clear(folder / FOLDER, WRITTEN)
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
    _load_scheduler(other, other.optimizer, str(tmp_path))
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
    load_optimizer(other, found, its_scheduler, str(tmp_path), Communicator())
    assert found.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert found.param_groups[0]["betas"] == (0.9, 0.999)
    for mine, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert found.state[mine].keys() == optimizer.state[wanted].keys()
        for key, value in optimizer.state[wanted].items():
            assert torch.equal(found.state[mine][key], value), key


def changed(key, value):
    return lambda state: state.update({key: value})


class WithAnEmptyGroup(torch.optim.AdamW):
    def __init__(self, parameters, **options):
        super().__init__([{"params": list(parameters)}, {"params": []}], **options)


def test_a_parameter_without_a_gradient_has_no_state_afterwards_either(tmp_path):
    """And a group without parameters, as the Trainer makes for LoRA, is kept as it is."""
    model, optimizer, scheduler = small_run(kind=WithAnEmptyGroup)
    del optimizer.state[model["out"].weight]
    tensors, values = state_of(model, optimizer)
    assert values["state.out.weight"] is None
    write_optimizer(str(tmp_path), [("one", tensors)], values, scheduler, Communicator())
    other, found, its_scheduler = small_run(kind=WithAnEmptyGroup, seed=1)
    found.param_groups[0]["lr"] = 5.0
    load_optimizer(other, found, its_scheduler, str(tmp_path), Communicator())
    assert set(found.state) == {other["in"].weight}
    assert [len(group["params"]) for group in found.param_groups] == [2, 0]
    assert found.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert its_scheduler.state_dict() == scheduler.state_dict()


IN, OUT = "in.weight", "out.weight"


@pytest.mark.parametrize("names", [[[IN, OUT]], [[IN], [OUT]]])
def test_a_state_by_numbers_is_read_by_names(tmp_path, names):
    """As a Trainer writes it, of parameters in one group or in two."""

    class InGroups(torch.optim.AdamW):
        def __init__(self, parameters, **options):
            parameters = list(parameters)
            groups = [parameters] if len(names) == 1 else [[one] for one in parameters]
            super().__init__([{"params": group} for group in groups], **options)

    model, optimizer, scheduler = small_run(kind=InGroups)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save(scheduler.state_dict(), tmp_path / "scheduler.pt")
    other, found, its_scheduler = small_run(seed=1)  # in one group
    load_optimizer(other, found, its_scheduler, str(tmp_path), Communicator(), numbered=names)
    for mine, wanted in zip(other.parameters(), model.parameters(), strict=True):
        for key, value in optimizer.state[wanted].items():
            assert torch.equal(found.state[mine][key], value), key
    assert its_scheduler.get_last_lr() == scheduler.get_last_lr()[:1]
    assert its_scheduler.base_lrs == scheduler.base_lrs[:1]
    with pytest.raises(ValueError, match=r"has the state of 2 parameters in groups of \["):
        load_optimizer(other, found, its_scheduler, str(tmp_path), Communicator(), numbered=[[IN]])


def test_a_scheduler_whose_groups_differ_is_not_read_for_another_number_of_them():
    state = {"_last_lr": [1.0, 2.0], "factors": [1, 2], "last_epoch": 3}
    groups = [{"lr": 5.0}]
    with pytest.raises(ValueError, match="a scheduler for 2 groups of parameters, which"):
        _for_groups(state, groups, "here")
    fitting = _for_groups(state | {"factors": [1, 1]}, groups, "here")
    assert fitting == {"_last_lr": [5.0], "factors": [1], "last_epoch": 3}
    assert _for_groups(state, groups * 2, "here") == state


@pytest.mark.parametrize(
    ("saved", "run", "change", "message"),
    [
        ({}, {}, without("out.weight"), "has no optimizer state of out.weight, which this run tr"),
        ({}, {"names": ("in", "new", "out")}, None, "no optimizer state of new.weight, which"),
        ({}, {"names": ("in",)}, None, "has optimizer state of out.weight, which this run does n"),
        ({}, {"names": "abcde"}, None, "of a.weight, b.weight, c.weight and 2 others, which"),
        ({}, {"width": 4}, None, r"weight.exp_avg\S* as \[3, 3\], but this run has \[4, 4\]"),
        ({"width": 1}, {}, None, r"weight.exp_avg\S* as \[1, 1\], but this run has \[3, 3\]"),
        ({"kind": torch.optim.SGD}, {}, None, r"has no \S*weight\S*, .*: it is of another opti"),
        ({}, {}, without("out.weight.exp_avg_sq"), "has no state.out.weight.exp_avg_sq: it is of"),
        ({}, {}, changed("state.out.weight.more", torch.ones(3)), "has state.out.weight.more: it"),
        (
            {},
            {},
            changed("param_groups.out.weight.lr", torch.tensor(0.1)),
            "holds param_groups.out.weight.lr as a tensor, not as this run's number",
        ),
        (
            {},
            {},
            changed("state.out.weight.step", 1),
            "holds state.out.weight.step as a number, not as this run's tensor",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_name(tmp_path, saved, run, change, message):
    model, optimizer, _ = small_run(**saved)
    written(tmp_path, model, optimizer, change=change)
    with pytest.raises(ValueError, match=message) as raised:
        load_optimizer(*small_run(**run), str(tmp_path), Communicator())
    assert "\n" not in str(raised.value)


# ---- of a sharded model


def own_parts(rank, ranks, folder):
    """Whether this rank has read what distribute_tensor gives it, from a file and from memory."""
    tensors = {"many": torch.randn(11, 6), "few": torch.randn(3, 5), "one": torch.tensor(2.0)}
    path = folder / f"{rank}.safetensors"
    save_file(tensors, path)
    rows = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2))
    for placements in ([Shard(0)], [Shard(1)], [Replicate(), Shard(0)], [Shard(0), Shard(1)]):
        mesh = rows if len(placements) == 1 else square
        with safe_open(path, framework="pt") as opened:
            for name in ("many", "few"):
                wanted = distribute_tensor(tensors[name], mesh, placements, src_data_rank=None)
                for stored in (tensors[name], opened.get_slice(name)):
                    own = torch.zeros_like(wanted)
                    read_own(stored, own)
                    assert torch.equal(own.to_local(), wanted.to_local()), (name, placements)
                assert torch.equal(whole(own), tensors[name])
    with safe_open(path, framework="pt") as opened:
        own = torch.zeros(())
        read_own(opened.get_slice("one"), own)
        assert own == tensors["one"]
    check_strided(rank, folder)


def check_strided(rank, folder):
    """Experts over two ranks, which two such groups share: rows are interleaved over the mesh. The
    state goes through files in several rounds, and into a model without shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    whole_model = torch.nn.Linear(3, 10, bias=False)
    model = torch.nn.Linear(3, 10, bias=False)
    placed = distribute_tensor(whole_model.weight.detach(), mesh["ep"], [Shard(0)])
    model.weight = torch.nn.Parameter(placed)
    fully_shard(model, mesh=mesh["efsdp"])
    assert not model.weight.placements[0].is_shard(), "torch has another placement for these"
    optimizers = {}
    for one in (whole_model, model):
        optimizers[one] = torch.optim.AdamW(one.parameters(), lr=0.1)
        gradient = torch.arange(30.0).view(10, 3)
        if one is model:
            gradient = distribute_tensor(
                gradient, model.weight.device_mesh, model.weight.placements, src_data_rank=None
            )
        one.weight.grad = gradient
        optimizers[one].step()
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizers[model])
    sharded_optimizer.PART_BYTES = 1
    save_sharded_optimizer(model, optimizers[model], scheduler, str(folder), Communicator())
    for one in (whole_model, model):
        fresh = torch.optim.AdamW(one.parameters(), lr=0.1)
        load_optimizer(
            one, fresh, torch.optim.lr_scheduler.ConstantLR(fresh), str(folder), Communicator()
        )
        for key, value in optimizers[whole_model].state[whole_model.weight].items():
            assert torch.equal(whole(fresh.state[one.weight][key]), value), key


@pytest.mark.processes
def test_a_rank_reads_its_own_part_of_a_tensor(tmp_path):
    run_ranks(own_parts, 4, tmp_path)
