"""Positions that do not follow from position_ids alone: longrope's tables by the length of a
token's own sequence, and the counts of Llama 4's layers without rotary embeddings.

Each model is compared with itself, unattached, on one document at a time. `original_max_position_
embeddings` and `floor_scale` are below some documents' lengths and above others', otherwise there
would be nothing to see. Ranks are threads. Stages of a pipeline are in
`tests/pipeline/test_layer_kinds.py`."""

import random
from functools import partial

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.models.kosmos2_5.modeling_kosmos2_5 import (
    Kosmos2_5TextSinusoidalPositionalEmbedding,
)

from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.positions import attach_positions, needed_columns
from hf_flexseq.steps.source_row import SourceRow
from hf_flexseq.steps.token_columns import INDICES, LENGTHS, with_token_columns
from tests.hf import by_hand, test_reach
from tests.hf.by_hand import TWO_NODES, worst_error
from tests.hf.test_checks import EXPERTS, SIZES
from tests.hf.test_reach import stays_in_float64  # noqa: F401  (a fixture)
from tests.hf.tiny import documents, reference_gradients, refused, tiny_llama
from tests.plans import random_plan

DRAWN = [1, 15, 16, 17, 5, 40, 3, 23]
EXAMPLES = documents(DRAWN)
LIMIT = 16  # tokens that the short table is for
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": LIMIT,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 5.0, 7.0],
}
SCALED = {**LONGROPE, "factor": 4.0}
FULL = {"layer_types": ["full_attention"] * 2}
NO_JITTER = {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}
BY_LAYER = {
    "full_attention": SCALED,
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
# by family, besides its configuration in tests/hf/test_reach.py
FAMILIES = {
    "Llama": {"rope_parameters": SCALED},
    "Phi3": {"rope_parameters": SCALED, "original_max_position_embeddings": LIMIT},
    "Phimoe": {
        "rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3},
        "sliding_window": None,
        **NO_JITTER,
        **EXPERTS,
    },
    "Gemma3": {**FULL, "rope_parameters": BY_LAYER},
    "Llama4": {**FULL, "floor_scale": 6, "attn_scale": 0.5},
}


def make_model(family, *, adapted=False):
    """A model; adapted: with adapters, whose gradients alone are wanted."""
    kind = getattr(transformers, family + "ForCausalLM")
    torch.manual_seed(0)
    known = test_reach.FAMILIES.get(family, {})
    config = kind.config_class(**{**SIZES, **known, **FAMILIES[family]})
    model = kind._from_config(config, dtype=torch.float64, experts_implementation="eager")
    if adapted:
        layers = ["qkv_proj", "q_proj", "v_proj", "o_proj"]
        config = LoraConfig(r=2, target_modules=layers, init_lora_weights=False)
        model = get_peft_model(model, config).double()
    return model.train()


@pytest.mark.usefixtures("stays_in_float64")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "adapted"),
    [*((family, False) for family in FAMILIES), ("Phi3", True), ("Llama4", True)],
)
def test_every_token_stands_where_one_process_has_it(family, adapted, monkeypatch):
    make = partial(make_model, family, adapted=adapted)
    wanted = reference_gradients(make(), EXAMPLES, attention="eager")
    rng = random.Random(family)
    plans = [random_plan(DRAWN, 4, rng, nodes=2) for _ in range(2)]
    if family == "Phimoe":  # whose router cannot be tried in float64
        monkeypatch.setattr(by_hand, "check_model", lambda model: None)
    assert worst_error(make, TWO_NODES, plans, EXAMPLES, wanted) < 1e-10
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_hand, "attach_positions", lambda model: None)
        error = worst_error(make, TWO_NODES, plans, EXAMPLES, wanted)
    assert error > 1e-3, "these documents would not show a wrong position"


# ---- attached, and detached again


def traces(model):
    """What has been put on the modules: forwards of their own, and hooks."""
    found = {}
    for name, module in model.named_modules():
        hooks = (len(module._forward_hooks), len(module._forward_pre_hooks))
        found[name] = ("forward" in vars(module), *hooks)
    return found


def test_detached_it_leaves_nothing_on_the_model():
    for family in FAMILIES:
        model = make_model(family)
        before = traces(model)
        handle = attach_positions(model)
        assert traces(model) != before, family
        handle.close()
        handle.close()
        assert traces(model) == before, family
    plain = tiny_llama()
    before = traces(plain)
    attach_positions(plain)
    assert traces(plain) == before
    assert needed_columns(plain) == ()


# ---- the columns


def test_columns_say_what_one_process_would_of_each_sequence():
    own_positions = torch.tensor([0, 1, 2, 7, 9, 10])  # a dataset's, in the second sequence
    row = SourceRow(columns={"position_ids": own_positions}, lengths=(3, 3))
    columns = with_token_columns(row, (LENGTHS, INDICES)).columns
    assert columns[LENGTHS].tolist() == [3, 3, 3, 11, 11, 11]
    assert columns[INDICES].tolist() == [0, 1, 2, 0, 1, 2]
    assert set(with_token_columns(row, ()).columns) == {"position_ids"}


def test_a_column_of_the_same_name_is_refused():
    columns = {LENGTHS: torch.tensor([1]), "position_ids": torch.tensor([0])}
    row = SourceRow(columns=columns, lengths=(1,))
    with pytest.raises(ValueError, match=f"the dataset has a column '{LENGTHS}'.*rename it"):
        with_token_columns(row, (LENGTHS,))


# ---- modules that count


class Helped(nn.Module):
    def forward(self, x):
        return self.helper(x)

    def helper(self, x):
        return x + positions_of(x)


def positions_of(x):
    return torch.arange(x.shape[1])[:, None]


class Inherits(Helped):
    def forward(self, x):
        return super().forward(x)


class Applies(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def sums_mask(x):
    return x + torch.ones(x.shape[:2], dtype=torch.int64).cumsum(-1)[..., None]


def llama_with(module):
    model = tiny_llama()
    model.model.layers[1].mlp.act_fn = module
    return model


@pytest.mark.parametrize(
    ("module", "line"),
    [
        (Inherits(), r"return torch\.arange\(x\.shape\[1\]\)"),
        (Applies(sums_mask), "cumsum"),
        (Applies(lambda x: x + torch.arange(0, x.shape[1] * 3, 3)[:, None]), r"arange\(0, "),
        (Applies(lambda x: (x + positions_of(x)) * x.sum().item()), r"return torch\.arange"),
    ],
)
def test_a_model_that_counts_is_refused_with_module_and_line(module, line):
    name = type(module).__name__
    said = rf"mlp\.act_fn \({name}\) counts positions itself, in test_positions\.py:\d+: .*{line}"
    with refused(rf"layers\.1\.{said}"):
        check_model(llama_with(module))


def test_positions_behind_a_padding_index_are_refused():
    model = tiny_llama()
    model.model.embed_positions = Kosmos2_5TextSinusoidalPositionalEmbedding(8, 16, padding_idx=1)
    with refused("embed_positions counts positions from its pad"):
        check_model(model)


def test_a_rotary_module_inside_a_layer_is_refused():
    model = make_model("Llama")
    model.model.layers[1].self_attn.rotary_emb = model.model.rotary_emb
    del model.model.rotary_emb
    with refused("rotary module inside a layer"):
        check_model(model)
