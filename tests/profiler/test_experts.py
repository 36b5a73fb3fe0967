"""Experts over ranks: what is timed, what the fit finds, and how routers spread tokens."""

import dataclasses
import random

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import JetMoeConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from hf_flexseq.base.layers import FULL
from hf_flexseq.base.topology import Topology
from hf_flexseq.cli.calibrate import _summary
from hf_flexseq.cost import lockstep_ns
from hf_flexseq.cost.activations import LayerBytes
from hf_flexseq.cost.analytic import analytic_cost_model
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.experts import IMBALANCE
from hf_flexseq.cost.layer_bytes import with_uneven_experts
from hf_flexseq.cost.shapes import ExpertShape, ModelShape
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.calibration import choose
from hf_flexseq.hf.calibration.choose import CostSubject, RunWide, make_cost
from hf_flexseq.hf.calibration.command import calibrate
from hf_flexseq.hf.calibration.expert_copies import ExpertMeshes
from hf_flexseq.hf.calibration.imbalance import measured_imbalance
from hf_flexseq.hf.calibration.probe import ModelProbes
from hf_flexseq.hf.model.facts import model_shape
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.profiler import calibrate as profiler
from hf_flexseq.profiler.calibrate import Calibration
from hf_flexseq.profiler.design import (
    Effort,
    ExpertsShape,
    LayerType,
    in_groups,
    make_design,
)
from hf_flexseq.profiler.fit import ExpertTerms, Sample, Terms, fit, price
from tests.hf.tiny import tiny_llama
from tests.ranks import run_ranks

ATTENTION = LayerType(FULL, None)
MODEL = {ATTENTION: 8}
NODE = Topology(nodes=1, ranks_per_node=4)
CPU = torch.device("cpu")
QUICK = Effort(budget_s=0.01, rounds=1, held_out=2)
SHAPE = ModelShape(
    layers=8,
    hidden=1024,
    heads=8,
    kv_heads=2,
    head_dim=128,
    intermediate=2048,
    vocab=32000,
    params=400_000_000,
    active_params=200_000_000,
    experts=ExpertShape(layers=7, of_layer=8, active=2, params=250_000_000),
)
SECONDS = {
    "linear": 3e-7,
    "head": 5e-7,
    "layer": 1e-4,
    "micro-batch": 2e-3,
    FULL: 2e-10,
    "launch": 1e-5,
    "post": 1e-4,
    "message": 2e-6,
    "group": 3e-4,
    ("ulysses", 2): 1 / 4e9,
    ("ulysses", 4): 1 / 2e9,
    ("zigzag", 2): 1.5 / 4e9,
    ("zigzag", 4): 1.5 / 2e9,
    "experts": 2e-6,
    "dispatch": 4e-7,
    "expert layer": 5e-4,
    "expert bytes": 1 / 3e10,
    "exchange": 5e-5,
}


def expert_layers(layers):
    """All but the first of the model; every one of a smaller copy."""
    depth = sum(layers.values())
    return min(depth, SHAPE.experts.layers)


# ---- the fit


def found_by(ranks, noise):
    """Cost models of a model with experts over `ranks` of four ranks: the true one, and the one
    fitted to timings of it."""
    estimate = analytic_cost_model(SHAPE, DEVICES["H100"], NODE, zero_stage=3, expert_ranks=ranks)
    overlap = {"ring_overlap": 0.0, "all_to_all_overlap": 0.0, "host_overlap": 0.0}
    even = dataclasses.replace(estimate.experts, imbalance=1.0)
    estimate = dataclasses.replace(estimate, experts=even, **overlap)
    experts = ExpertTerms(
        ranks=ranks,
        layer_bytes=even.exchanged_bytes / SHAPE.experts.layers,
        layers_of=expert_layers,
    )
    terms = Terms.of(estimate, SHAPE, experts)
    rng = random.Random(3)
    samples = []
    for shape in make_design(MODEL, SHAPE, estimate, NODE, Effort()).shapes:
        if isinstance(shape, ExpertsShape):
            seconds = experts_by_hand(shape, experts)
        elif shape.layers:
            cost = price(SECONDS, estimate, MODEL, shape.layers, None)
            cost = dataclasses.replace(cost, experts=None)  # copies leave them out
            layout = in_groups(shape, NODE)
            (whole_ns,) = lockstep_ns(cost, [layout.micro_batch], layout.lengths, NODE)
            seconds = whole_ns / 1e9
        else:
            seconds = sum(SECONDS[name] * count for name, count in terms.row(shape).items())
        samples.append(Sample(shape=shape, seconds=seconds * (1 + noise * rng.uniform(-1, 1))))
    seconds = fit(samples, terms)
    return (price(one, estimate, MODEL, MODEL, experts) for one in (SECONDS, seconds))


def experts_by_hand(shape, experts):
    """Seconds of the experts of a layer alone, or of its exchanges."""
    most, ranks = max(shape.tokens), len(shape.tokens)
    busiest = sum(shape.tokens) / ranks
    if shape.to_first:
        busiest = sum(shape.tokens)
    bytes_moved = max(most, busiest) * experts.layer_bytes * (ranks - 1) / ranks
    moving = bytes_moved * SECONDS["expert bytes"]
    if not shape.computes:
        return moving + 4 * SECONDS["exchange"]
    computing = busiest * SECONDS["experts"] + most * SECONDS["dispatch"]
    return moving + computing + SECONDS["expert layer"]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("noise, tolerance", [(0.0, 0.01), (0.02, 0.1)])
def test_a_fit_tells_experts_from_linear_layers(ranks, noise, tolerance):
    truth, found = found_by(ranks, noise)
    assert truth.experts.token_s == pytest.approx(7 * SECONDS["experts"])
    assert truth.linear_s == pytest.approx(8 * 3e-7 + 5e-7 + 7 * SECONDS["dispatch"])
    assert found.token_s == pytest.approx(truth.token_s, rel=tolerance)  # all that a token takes
    for name in ("linear_s", "attention_s", "micro_batch_s"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=2 * tolerance), name
    assert found.experts.token_s == pytest.approx(truth.experts.token_s, rel=tolerance)
    assert found.experts.rate == pytest.approx(3e10, rel=tolerance)
    assert found.experts.exchanged_bytes == truth.experts.exchanged_bytes


def test_experts_that_take_no_time_make_no_sense():
    cost = analytic_cost_model(SHAPE, DEVICES["H100"], NODE, zero_stage=3, expert_ranks=2)
    free = dataclasses.replace(cost, experts=dataclasses.replace(cost.experts, token_s=0.0))
    objections = [
        Calibration(cost=one, errors=(0.1,), tokens=1).objection() for one in (cost, free)
    ]
    assert objections == [None, "experts take no measurable time"]


# ---- on real ranks

MODELS = ("drawn", "all to one", "all of them")
ROWS = 2048
LAYER = LayerBytes(
    input_bytes=1.0,
    output_bytes=0.0,
    kept_bytes=1.0,
    mlp_bytes=0.0,
    peak_bytes=1.0,
    tiled_bytes=0.0,
    rest_bytes=1.0,
)


def config(**options):
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Qwen3MoeConfig(**{**sizes, **options})


def state_of(model):
    """Everything of a model that a measurement might have changed."""
    tensors = {}
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        local = value.to_local() if hasattr(value, "to_local") else value
        tensors[name] = (type(value), value.requires_grad, local.detach().clone(), value.grad)
    modules = []
    for module in model.modules():
        hooks = (len(module._forward_pre_hooks), len(module._forward_hooks))
        modules.append((module.training, *hooks, vars(module).get("forward")))
    return tensors, modules, torch.random.get_rng_state()


def is_same(before, after):
    """Tell if two states are equal to the bit."""
    if before[1] != after[1] or not torch.equal(before[2], after[2]):
        return False
    for name, (kind, trained, value, gradient) in before[0].items():
        other = after[0][name]
        if (kind, trained, gradient) != (other[0], other[1], other[3]) or gradient is not None:
            return False
        if not torch.equal(value, other[2]):
            return False
    return before[0].keys() == after[0].keys()


def kept_bytes(experts, chosen):
    """Bytes that the experts of a layer keep for their backward, for each token of a rank.
    chosen: [tokens, k] experts."""
    hidden = torch.randn(ROWS, 32, requires_grad=True)
    weights = torch.rand(ROWS, 2, requires_grad=True)
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = experts._dispatch(hidden, chosen, weights)
    output.sum().backward()
    return sum(nbytes for nbytes, _ in kept.values()) / ROWS


ONE_WORD = Dataset.from_dict({"input_ids": [[], [5] * 300, [5]]})


def measure(rank, world_size, folder):
    """What two attaches find of a model with experts over all ranks; how uneven three models are,
    and whether they stayed as they were; of a copy, where tokens go and what it holds; what
    `flexseq calibrate` finds."""
    communicator, accelerator = Communicator(), Accelerator(cpu=True)
    models = {}
    for name in MODELS:
        models[name] = Qwen3MoeForCausalLM.from_pretrained(
            folder / name, distributed_config=DistributedConfig(fsdp_size=2, ep_size=2)
        ).train()
        models[name].model.layers[0].eval()  # a mode of its own

    # 1. two attaches
    model = models["drawn"]
    run_wide = RunWide(MemoryChoice(), 1e9)
    subject = CostSubject.of(model, accelerator, communicator.topology, run_wide=run_wide)
    attached = []
    for _ in range(2):
        cost, origin = make_cost("auto", subject, communicator, folder / "cache")
        attached.append((cost, origin.partition(",")[0]))

    # 2. routers
    uneven = {}
    for name, model in models.items():
        before = state_of(model)
        meshes = ExpertMeshes.of(model)
        imbalance = measured_imbalance(model, meshes, communicator, CPU, autocast=None)
        uneven[name] = (imbalance, is_same(before, state_of(model)))
    of_rows = []
    for rows in (ONE_WORD, [{"input_ids": [1]}], ONE_WORD.to_iterable_dataset()):
        meshes = ExpertMeshes.of(models["drawn"])
        of_rows.append(
            measured_imbalance(
                models["drawn"], meshes, communicator, CPU, autocast=None, rows=rows
            )
        )

    # 3. a copy sends tokens to all experts alike
    probes = ModelProbes(subject.facts, communicator, CPU, subject.meshes)
    experts, _ = probes(probes.layers)._experts
    even = experts.even(torch.zeros(ROWS, 2, dtype=torch.int64))
    shares = torch.bincount(even.flatten()).tolist()
    sizes = [tuple(weight.shape) for weight in experts.module.parameters()]
    kept = [kept_bytes(experts, chosen) for chosen in (even, even % 4)]  # all on the first rank
    by_rank = communicator.cpu_group.gather_values(kept)
    copy = shares, sizes, probes.expert_layers(probes.layers), by_rank[0]

    sizes = config().to_dict()
    record = calibrate(sizes, dtype="float32", zero_stage=3, expert_ranks=2, effort=QUICK)
    return attached, (uneven, of_rows), copy, record


@pytest.mark.processes
def test_experts_over_ranks_are_measured_and_the_model_stays_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(profiler, "fit", lambda *args: fit(*args) | {"head": 1e-12})
    monkeypatch.setattr(Calibration, "objection", lambda self: None)  # noise on so tiny a model
    monkeypatch.setattr(choose, "Effort", lambda: QUICK)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config())
    model.save_pretrained(tmp_path / "drawn")
    for layer in model.model.layers:
        layer.post_attention_layernorm.weight.data.zero_()  # all experts are as good: the first
    model.save_pretrained(tmp_path / "all to one")
    Qwen3MoeForCausalLM(config(num_experts_per_tok=8)).save_pretrained(tmp_path / "all of them")

    results = run_ranks(measure, 2, tmp_path, seconds=120)
    assert results[0] == results[1]
    ((cost, origin), again), (uneven, of_rows), copy, record = results[0]
    assert origin == "measured now"
    assert again[0] == cost
    assert again[1] == "measured earlier"
    assert cost.experts.rate > 0
    assert cost.experts.imbalance == uneven["drawn"][0]

    assert all(stayed for _, stayed in uneven.values())
    assert 1 < uneven["drawn"][0] < 2
    assert (uneven["all to one"][0], uneven["all of them"][0]) == (2.0, 1.0)
    assert of_rows[0] in (1.0, 1.5, 2.0)  # in each layer all rows go to the same two experts
    assert of_rows[1:] == [uneven["drawn"][0]] * 2  # nothing that is read, so random tokens

    *copy, (evenly, by_the_first) = copy
    assert copy == [[ROWS // 4] * 8, [(4, 32, 32), (4, 32, 16)], 2]
    # the first rank keeps all rows twice but for those that came back, and some numbers of them
    counted = model_shape(Qwen3MoeForCausalLM(config()))
    layer = with_uneven_experts(LAYER, counted, 2.0)
    more = layer.kept_bytes - LAYER.kept_bytes
    assert by_the_first - evenly == pytest.approx(more, rel=0.1)
    assert record["cost_model"]["experts"]["imbalance"] == IMBALANCE
    assert "experts over 2 ranks: " in _summary(record)


@pytest.mark.parametrize(
    "model, options, message",
    [
        (tiny_llama().config, {}, "for a model without experts: use 1"),
        (JetMoeConfig(), {}, "no plan for experts of JetMoeForCausalLM on several ranks"),
        (config(), {}, "experts over 2 ranks on 1 ranks"),
        (config(), {"expert_ranks": 3}, "expert_ranks=3 for 8 experts"),
    ],
)
def test_experts_that_cannot_lie_on_ranks_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        calibrate(model.to_dict(), **({"expert_ranks": 2} | options))
