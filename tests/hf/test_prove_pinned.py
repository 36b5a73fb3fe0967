"""`flexseq prove` in 16 bits: a token's experts do not depend on how sums are rounded."""

import pytest
import torch

from hf_flexseq.hf.model import probe
from hf_flexseq.prove import command
from hf_flexseq.prove.documents import documents
from hf_flexseq.prove.pinned import pin_routers
from hf_flexseq.prove.subject import model_of
from hf_flexseq.prove.trained import call_alone, step_alone
from tests.budget import others_nightly
from tests.ranks import run_ranks

FAMILIES = ("Qwen3MoeForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM")


def chosen(model, rows, *, autocast):
    """The experts of each token in each layer, in the order of their numbers."""
    found = []

    def note(module, args, kwargs):
        found.append((args[1] if len(args) > 1 else kwargs["top_k_index"]).sort(-1).values)

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for row in rows:
            call_alone(model, row)
    return torch.cat([one.reshape(-1, one.shape[-1]) for one in found])


@pytest.mark.slow
@pytest.mark.parametrize("name", others_nightly(FAMILIES, tried=["GptOssForCausalLM"]))
def test_rounding_changes_no_experts(name):
    model, _ = model_of(name, whole=False)
    model = probe.lively_copy(model, torch.float32)
    rows = documents(model.config, 2)
    free, rounded = (chosen(model, rows, autocast=autocast) for autocast in (False, True))
    assert not torch.equal(free, rounded)
    assert pin_routers(model) >= 3
    free, rounded = (chosen(model, rows, autocast=autocast) for autocast in (False, True))
    assert torch.equal(free, rounded)
    assert len(free.unique(dim=0)) > 3, "not all tokens go to the same experts"
    gradients = step_alone(model, rows).gradients
    routers = [n for n in gradients if n.endswith(("mlp.router.weight", "mlp.gate.weight"))]
    assert len(routers) >= 3
    assert all(gradients[name].any() for name in routers)


def in_16_bits(rank, world_size, name):
    return command.prove(name, bf16=True)


@pytest.mark.processes
@pytest.mark.nightly
def test_a_mixture_is_proven_in_16_bits():
    for record in run_ranks(in_16_bits, 2, FAMILIES[0], seconds=170):
        steps = {title: one for title, one in record["steps"].items() if "not_run" not in one}
        assert {"auto", "zigzag", "auto, least memory", "auto, router loss"} <= steps.keys()
        for title, one in steps.items():
            if "FSDP2" not in title and "over ranks" not in title:  # which do not run on GPUs
                assert one["holds"], title
        assert any("it alone decides" in line for line in record["not_proven"])
