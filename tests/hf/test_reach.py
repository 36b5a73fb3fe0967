"""Model families: on two ranks, under random plans, plain and checkpointed, each one's loss and
gradients are those of one process. What is refused is in `test_checks.py`."""

import zlib

import pytest
import torch
import transformers
from accelerate import Accelerator
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.hf.test_checks import EXPERTS, ROPE, SIZES
from tests.hf.test_exactness import own_batches
from tests.hf.tiny import RandomPlanEngine, documents, reference_gradients, relative_errors
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes


LENGTHS = [1, 2, 17, 5, 23, 3, 40, 11]
FULL = {"layer_types": ["full_attention"] * 2}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "Llama": {},
    "Llama with yarn": {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0}},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": None},
    "Gemma": {"head_dim": 16},
    "Gemma2 of full attention": {"head_dim": 8, "attn_logit_softcapping": None, **FULL},
    "Gemma3 of full attention": {"head_dim": 8, "query_pre_attn_scalar": 16, **FULL},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3 of full attention": FULL,
    "Phi": {},
    "Phi3": {},
    "Granite": {"attention_multiplier": 0.3},
    "SmolLM3": {},
    "Glm4": {"head_dim": 8},
    "Cohere": {},
    "Cohere2 of full attention": FULL,
    "Ministral of full attention": {"head_dim": 8, **FULL},
    "SeedOss": {"head_dim": 8, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "Ernie4_5": {"head_dim": 8},
    "Arcee": {},
    "Apertus": {},
    "Helium": {"head_dim": 8},
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "Mixtral": EXPERTS,
    "Qwen2Moe": {**ROUTED, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": ROUTED,
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}


def make_model(family):
    kind = getattr(transformers, family.split()[0] + "ForCausalLM")
    torch.manual_seed(0)
    config = kind.config_class(**{**SIZES, **FAMILIES[family]})
    return kind._from_config(config, dtype=torch.float64, experts_implementation="eager").train()


def stay_in_float64():
    """Norms and routers of transformers compute in float32 whatever the dtype; in this process
    they no longer do."""
    to, softmax = torch.Tensor.to, F.softmax

    def stays(tensor, dtype):
        return tensor.dtype == torch.float64 and dtype == torch.float32

    def patched_to(tensor, *args, **kwargs):
        return (
            tensor
            if stays(tensor, kwargs.get("dtype", args[0] if args else None))
            else to(tensor, *args, **kwargs)
        )

    def patched_softmax(tensor, *args, **kwargs):
        if stays(tensor, kwargs.get("dtype")):
            kwargs["dtype"] = None
        return softmax(tensor, *args, **kwargs)

    torch.Tensor.to, F.softmax = patched_to, patched_softmax
    torch.Tensor.float = lambda tensor: patched_to(tensor, torch.float32)


def splits_a_sequence(plan):
    """Whether some sequence of two tokens or more is on several ranks."""
    groups = [group for micro_batch in plan.micro_batches for group in micro_batch.groups]
    return any(
        group.degree > 1 and plan.lengths[sequence] > 1
        for group in groups
        for sequence in group.sequences
    )


def error_of(family, rank, world_size):
    """The largest relative error of loss and gradients, and whether its plans split a sequence,
    plain and under checkpointing."""
    examples = documents(LENGTHS)
    model = make_model(family)
    wanted_loss, wanted = reference_gradients(model, examples, attention="eager")
    engine = RandomPlanEngine(
        Accelerator(cpu=True), seed=zlib.crc32(family.encode()), accepts=splits_a_sequence
    )
    engine.attach(model)
    wrapped = DistributedDataParallel(model)
    worst, split = 0.0, []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        (loss,) = [
            split.append(splits_a_sequence(step.plan)) or step.backward(wrapped)
            for step in engine.steps(own_batches(examples, rank, world_size), 2)
        ]
        torch.distributed.all_reduce(loss)
        found = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        worst = max(
            worst,
            abs(float(loss) / world_size / wanted_loss - 1),
            *relative_errors(found, wanted).values(),
        )
    engine.detach()
    return worst, split


def errors_of_all(rank, world_size):
    stay_in_float64()
    return {family: error_of(family, rank, world_size) for family in FAMILIES}


@pytest.fixture(scope="module")
def errors():
    return run_ranks(errors_of_all, 2, seconds=170)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_exact(errors, family):
    for worst, split in (found[family] for found in errors):
        assert worst < 1e-10
        assert split == [True, True]
