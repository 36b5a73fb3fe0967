"""Kinds of LoRA through PEFT: two ranks end with the weights of the plain Trainer on one."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import Trainer

from hf_flexseq.hf.model.checks import check_model
from tests.hf.test_trainer import dataset, float64_loss
from tests.hf.tiny import refused, tiny_llama
from tests.hf.trainers import trained, trainer_of, weights_apart
from tests.ranks import run_cases, run_ranks

# Of the update. A head that is saved keeps the model's own loss, which is computed in float32.
BOUNDS = {False: 1e-8, True: 1e-6}
LAYERS = ["q_proj", "v_proj", "down_proj"]
BOTH_ENDS = ["embed_tokens", "lm_head"]
KINDS = {
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "saved": {"modules_to_save": BOTH_ENDS},
    "tied, saved": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "loraplus": {},
}


def make_trainer(kind, ours, folder, batch):
    """A trainer of three steps of an adapter that is not zero."""
    options = {"r": 4, "target_modules": LAYERS, "init_lora_weights": False, **KINDS[kind]}
    model = tiny_llama(tie_word_embeddings=kind.startswith("tied"))
    model = get_peft_model(model, LoraConfig(**options))
    if not ours:
        model.get_base_model().loss_function = float64_loss
    settings = {}
    if kind == "loraplus":
        optimizer = create_loraplus_optimizer(
            model, optimizer_cls=torch.optim.SGD, lr=1e-2, loraplus_lr_ratio=16
        )
        settings["optimizers"] = (optimizer, None)
    return trainer_of(
        Trainer,
        folder,
        model=model,
        train_dataset=dataset(12),
        flexseq={"lookahead": 0, "activation_memory": "as_set"} if ours else None,
        batch=batch,
        **settings,
    )


def run(rank, world_size, kind, folder):
    return trained(make_trainer(kind, True, folder, 2))


@pytest.mark.processes
@pytest.mark.parametrize(
    "kinds",
    [("dora", "tied, saved"), pytest.param(tuple(KINDS), marks=pytest.mark.nightly)],
    ids=["some", "all"],
)
def test_two_ranks_train_as_the_plain_trainer_does(kinds, tmp_path):
    by_kind = run_cases(run, 2, [(kind, tmp_path) for kind in kinds], seconds=150)
    for kind, by_rank in zip(kinds, by_kind, strict=True):
        torch.manual_seed(0)
        stock = trained(make_trainer(kind, False, tmp_path, 4))
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
