"""How ranks divide the state of a sharded model among them, and what they read of a tensor."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hf_flexseq.checkpoints import sharded_optimizer
from hf_flexseq.checkpoints.optimizer import load_optimizer
from hf_flexseq.checkpoints.sharded_optimizer import divided, save_sharded_optimizer
from hf_flexseq.checkpoints.shards import read_own, whole
from hf_flexseq.distributed.communicator import Communicator
from tests.ranks import run_ranks


def test_every_tensor_is_in_one_part_and_a_part_is_small(monkeypatch):
    sizes = {f"{number}": 1 + (number * 7) % 10 for number in range(100)}
    for ranks in (1, 2, 7):
        parts = divided(sizes, ranks)
        assert [key for part in parts for key in part] == list(sizes)
        assert ranks <= len(parts) <= ranks + 1
    monkeypatch.setattr(sharded_optimizer, "PART_BYTES", 9)
    parts = divided(sizes, 2)
    for part in parts:
        assert len(part) == 1 or sum(sizes[key] for key in part) <= 9
    assert divided({}, 2) == []


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
        load_optimizer(one, fresh, torch.optim.lr_scheduler.ConstantLR(fresh), str(folder))
        for key, value in optimizers[whole_model].state[whole_model.weight].items():
            assert torch.equal(whole(fresh.state[one.weight][key]), value), key


@pytest.mark.processes
def test_a_rank_reads_its_own_part_of_a_tensor(tmp_path):
    run_ranks(own_parts, 4, tmp_path)
