"""Experts over ranks, the wide matrix (`-m nightly`): loss and gradients of steps under planned
groups, or trained weights, are those of one process.

Steps have groups of 1, 2 and 4 ranks and a rank without tokens, and gather and reduce in each
micro-batch or once. float64 tests run `experts_implementation="eager"`. The plain trainer runs in
one process with the step as one batch; on as many ranks where these draw completions, or the loss
depends on a rank's own batch. PEFT cannot put adapters on the attention of a model in replicas."""

import pytest
import torch

from hf_flexseq.hf.model.small import small_model
from tests.hf.experts import (
    EXPERTS,
    LAYOUTS,
    ROUTED,
    Training,
    errors_of_steps,
    in_float64,
    matrices_of_experts,
    one_process,
    one_process_of,
    save,
    train,
)
from tests.hf.hybrids import HYBRIDS
from tests.hf.model_families import SETTING, TAKEN, families, options_of, rows_of
from tests.hf.trainers import difference
from tests.ranks import run_cases, run_ranks
from tests.versions import pinned_transformers

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(1000)]

SECONDS = 900  # for the ranks of a test


def of_steps(rank, world_size, *case):
    *given, options = case
    return errors_of_steps(rank, world_size, *given, **options)


def assert_exact(cases, ranks):
    """cases: (what one process has made, the layout, options of `errors_of_steps`)."""
    for case, by_rank in zip(
        cases, run_cases(of_steps, ranks, cases, seconds=SECONDS), strict=True
    ):
        for found in by_rank:
            assert max(found.values()) < 1e-10, case[2]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", EXPERTS)
def test_gradients(tmp_path, family, layout):
    ranks, config = LAYOUTS[layout]
    plain = one_process_of(family, tmp_path)
    cases = [(plain, config, {}), (plain, config, {"checkpointing": True})]
    cases.append((plain, config, {"choices": True}))
    if family in ROUTED:
        routed = one_process_of(family, tmp_path, router_loss=True)
        cases.append((routed, config, {"checkpointing": True}))
    assert_exact(cases, ranks)


# In all layouts; adapters of other families on two ranks.
ADAPTED = ("Qwen3Moe", "GptOss", "Mixtral")


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        (one, layout)
        for one in EXPERTS
        for layout in LAYOUTS
        if layout == "2 ranks" or one in ADAPTED
    ],
)
def test_gradients_of_lora_on_experts(tmp_path, family, layout):
    ranks, config = LAYOUTS[layout]
    plain = one_process_of(family, tmp_path, adapted=())
    assert_exact([(plain, config, {}), (plain, config, {"checkpointing": True})], ranks)


# Taken, and with a plan that spreads experts alone. The plan of Gemma 4 cuts dense layers, too,
# which transformers refuses beside FSDP; rows of Kimi's convolutions are mixed up in a checkpoint
# of Bailing's.
SPREAD = [
    row[0].strip("`")
    for row in rows_of("families.csv")
    if row[1].startswith((TAKEN, SETTING)) and row[3] == "yes" and row[0] != "`bailing_hybrid`"
]


@pinned_transformers
@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.parametrize("name", SPREAD)
def test_gradients_of_every_family_with_a_plan_for_experts(tmp_path, name, is_adapted):
    """In evaluation mode, where routers draw no noise; adapted: of LoRA on experts."""
    family = families()[name]
    torch.manual_seed(0)
    model = small_model(family.kind, options_of(family, None)).double().eval()
    assert not is_adapted or matrices_of_experts(model)
    model.set_experts_implementation("eager")
    ranks, config = LAYOUTS["2 ranks"]
    with in_float64():
        wanted = one_process(model, tmp_path / name, adapted=() if is_adapted else None)
    assert_exact([(wanted, config, {})], ranks)


# ---- trainers

BOTH = "attention and experts"
TRAININGS = [Training(kind=kind) for kind in ("plain", "sft", "dpo", "grpo", "kto", "reward")]
TRAININGS += [
    Training(kind=kind) for kind in ("rloo", "distillation", "sequences", "tokens", "own")
]
TRAININGS += [Training(kind="sft", adapter=adapter) for adapter in ("attention", "experts", BOTH)]
TRAININGS += [Training(kind=kind, adapter=BOTH) for kind in ("dpo", "grpo")]
ROWS = [
    (training, layout)
    for training in TRAININGS
    for layout in LAYOUTS
    if "attention" not in (training.adapter or "") or "replicas" not in layout
]
ROWS += [(Training(kind="plain", family=family), "2 ranks") for family in EXPERTS]


@pytest.mark.parametrize(("training", "layout"), ROWS, ids=lambda one: getattr(one, "kind", one))
def test_ten_steps_of_trainers(tmp_path, training, layout):
    ranks, config = LAYOUTS[layout]
    save(training, tmp_path)
    alone = ranks if training.is_of_ranks else 1
    wanted = run_ranks(train, alone, tmp_path, training, None, seconds=SECONDS)[0]
    found = run_ranks(train, ranks, tmp_path, training, config, seconds=SECONDS)[0]
    # Recurrent layers round more, whether or not experts are spread. So does distillation, where
    # the plain trainer is 4e-6 from itself with halved batches.
    rounds_more = training.family in HYBRIDS or training.kind == "distillation"
    bound = 1e-5 if rounds_more else 2e-6
    apart = difference(wanted, found)
    assert apart.weights < bound
    # KTO's KL comes of sums of log-probabilities of about 40 in float32, whose last bit is 4e-6
    assert apart.metrics < (1e-5 if training.kind == "kto" else bound), apart.metric
    assert not apart.missing
