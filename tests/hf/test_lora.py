"""Kinds of LoRA through PEFT: two ranks end with the weights of the plain Trainer on one."""

from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hf_flexseq.hf.model.checks import check_model
from tests.differential.case import Case
from tests.differential.runs import both
from tests.hf.plain import dataset, float64_loss
from tests.hf.tiny import refused, tiny_llama
from tests.hf.trainers import weights_apart
from tests.ranks import run_ranks

# Of the update. A head that is saved keeps the model's own loss, which is computed in float32.
BOUNDS = {False: 1e-8, True: 1e-6}
LAYERS = ["q_proj", "v_proj", "down_proj"]
BOTH_ENDS = ["embed_tokens", "lm_head"]
KINDS = {
    "dora": {"use_dora": True},
    "saved": {"modules_to_save": BOTH_ENDS},
    "tied, saved": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "loraplus": {},
}


def adapted(kind):
    """A model with an adapter that is not zero."""
    options = {"r": 4, "target_modules": LAYERS, "init_lora_weights": False, **KINDS[kind]}
    model = tiny_llama(tie_word_embeddings=kind.startswith("tied"))
    return get_peft_model(model, LoraConfig(**options))


def with_loraplus(model):
    optimizer = create_loraplus_optimizer(
        model, optimizer_cls=torch.optim.SGD, lr=1e-2, loraplus_lr_ratio=16
    )
    return {"optimizers": (optimizer, None)}


def case_of(kind):
    return Case(
        model=partial(adapted, kind),
        settings={"train_dataset": dataset(12)},
        stock_loss=float64_loss,
        flexseq={"activation_memory": "as_set"},
        **({"of_model": with_loraplus} if kind == "loraplus" else {}),
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    "kinds",
    [("dora", "tied, saved"), pytest.param(tuple(KINDS), marks=pytest.mark.nightly)],
    ids=["some", "all"],
)
def test_two_ranks_train_as_the_plain_trainer_does(kinds, tmp_path):
    cases = {kind: case_of(kind) for kind in kinds}
    for kind, stock, by_rank in both(cases, tmp_path, seconds=150):
        saves = "modules_to_save" in KINDS[kind]
        assert max(weights_apart(stock, ours) for ours in by_rank) < BOUNDS[saves], kind


def test_adapters_that_share_memory_are_refused(tmp_path):
    """Under DDP the plain Trainer, too, ends far from one process: by 0.7 of the update here."""
    options = {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}
    model = get_peft_model(tiny_llama(tie_word_embeddings=True), LoraConfig(r=4, **options))
    with refused("embed_tokens.lora_embedding_B.default and .*lm_head.lora_A.*share memory"):
        check_model(model.get_base_model())


def check_sharded(rank, world_size):
    model = tiny_llama()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            mesh = init_device_mesh("cpu", (world_size,))
            part = parameter.detach().clone()
            sharded = distribute_tensor(part, mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(sharded))
    places = [parameter.data_ptr() for parameter in model.parameters()]
    assert rank == 0 or len(set(places)) < len(places), "a sharded tensor begins nowhere itself"
    check_model(model)


@pytest.mark.processes
def test_sharded_parameters_share_no_memory():
    run_ranks(check_sharded, 2)
