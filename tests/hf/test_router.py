"""Router losses of mixtures of experts are those of the whole step, whatever the plan: one process
that has the step as one batch gives the same loss and gradients."""

import itertools

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer
from transformers.models.mixtral import modeling_mixtral
from trl import SFTTrainer

from hf_flexseq.hf.model import router
from hf_flexseq.hf.model.router import PROBABILITIES
from hf_flexseq.steps.collator import DataCollatorForFlexSeq
from tests.differential.case import sft_trainer
from tests.hf import objectives
from tests.hf.objectives import Case
from tests.hf.plain import dataset, logged
from tests.hf.test_reach import COEFFICIENT, keep_float64, mixture
from tests.hf.test_shared_prefixes import conversations, long_pairs, rows_alike, spared
from tests.hf.tiny import (
    RandomPlanEngine,
    attached,
    documents,
    errors,
    own_batches,
    random_steps,
    reference_loss,
    refused,
    sharded,
    taken_gradients,
    worst_of,
)
from tests.hf.trainers import OwnLoss, assert_logged_alike, trained, trainer_of, weights_apart
from tests.ranks import run_cases, run_ranks

LENGTHS = [1, 2, 17, 5, 31, 3, 1, 40, 11, 2, 13, 23]


def router_loss_of(model, examples):
    """The router loss of all tokens of all documents, by its definition, in float64."""
    by_document = []
    for example in examples:
        ids = torch.tensor([example["input_ids"]])
        outputs = model(input_ids=ids, output_router_logits=True, use_cache=False)
        by_document.append(torch.stack(outputs.router_logits))  # [layers, tokens, experts]
    logits = torch.cat(by_document, dim=1).flatten(0, 1)  # [layers * tokens, experts]
    probabilities = logits.softmax(dim=-1)
    chosen = probabilities.topk(model.config.num_experts_per_tok).indices  # [layers * tokens, k]
    experts = logits.shape[-1]
    fractions = F.one_hot(chosen, experts).sum(dim=1).double().mean(dim=0)  # [experts]
    return experts * (fractions * probabilities.mean(dim=0)).sum()


_references = {}  # of examples that were there before


def reference(family, examples):
    """Loss and gradients of one process, with the step as one batch."""
    key = (family, str(examples))
    if key not in _references:
        model = mixture(family)
        model.set_attn_implementation("eager")
        loss = reference_loss(model, examples) + COEFFICIENT * router_loss_of(model, examples)
        loss.backward()
        _references[key] = float(loss.detach()), taken_gradients(model)
    return _references[key]


def errors_under_random_plans(rank, world_size, family, sharding, plans, examples):
    """The largest relative error of loss and gradients over some random plans, and the tokens
    that all of these spare."""
    with pytest.MonkeyPatch.context() as patch:
        keep_float64(patch)
        wanted = reference(family, examples)
        model = mixture(family)
        if sharding == "fsdp2":
            model.gradient_checkpointing_enable({"use_reentrant": False})
            sharded(model)
        engine = attached(model, world_size)
        batches = own_batches(examples, rank, world_size)
        ddp = {} if sharding == "ddp" else None
        found, micro_batches, spares = [], [], 0
        for step, loss, gradients in random_steps(engine, model, batches, ddp=ddp, plans=plans):
            found.append(errors(loss, gradients, wanted))
            micro_batches.append(len(step.plan.micro_batches))
            spares += step.plan.tokens_spared
        assert max(micro_batches) > 1
        return max(worst_of(found).values()), spares


FAMILIES = ("Qwen3Moe", "Mixtral")


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 3, pytest.param(1, marks=pytest.mark.nightly)])
def test_gradients_equal_one_process_and_a_shared_token_counts_once_for_each_row(world_size):
    rows = conversations(18)
    cases = list(zip(FAMILIES, ("ddp", "fsdp2"), strict=True))
    if world_size == 3:
        cases = cases[:1]
    if world_size == 1:
        cases = list(itertools.product(FAMILIES, ("ddp", "fsdp2")))
    cases = [(family, sharding, 3, rows) for family, sharding in cases]
    by_case = run_cases(errors_under_random_plans, world_size, cases, seconds=200)
    for case, by_rank in zip(cases, by_case, strict=True):
        for worst, spares in by_rank:
            assert worst < 1e-10, case
            assert spares > 300, case


# ---- trainers


KINDS = ("plain, with metrics", "sft", "dpo", "own")


def likeliest(logits, labels):
    """[rows, tokens]; the plain Trainer hands on all outputs of such a model, aux_loss first."""
    logits = logits[1] if isinstance(logits, tuple) else logits
    return logits.argmax(dim=-1)


def make(kind, ours, folder, batch, accumulation=1):
    """A trainer of two steps of eight documents or pairs."""
    if kind == "dpo":
        options = {"batch": batch, "accumulation": accumulation, "steps": 2, "evaluates": True}
        options["flexseq"] = {"max_tokens_per_rank": 120}
        case = Case(kind="dpo", settings={"learning_rate": 0.1}, **options)
        models = {name: mixture(output_router_logits=False) for name in ("model", "ref_model")}
        given = {"train_dataset": long_pairs(16), "eval_dataset": None, **models}
        return objectives.make_trainer(case, ours, folder, **given)
    data = {"train_dataset": dataset(16), "eval_dataset": dataset(8)}
    settings = {"learning_rate": 0.1, "max_steps": 2, "model": mixture()}
    settings["per_device_eval_batch_size"] = batch * accumulation
    settings |= {"flexseq": {} if ours else None, "batch": batch, "accumulation": accumulation}
    if kind == "sft":
        data = {name: Dataset.from_list(rows_alike(len(rows))) for name, rows in data.items()}
        layers = {"target_modules": ["q_proj"], "modules_to_save": ["mlp.gate"]}
        settings |= {"peft_config": LoraConfig(r=2, **layers), "router_aux_loss_coef": 0.3}
        return sft_trainer(SFTTrainer, folder, **data, **settings)
    if kind == "plain, with metrics":
        data["preprocess_logits_for_metrics"] = likeliest
        data["compute_metrics"] = lambda found: {"first": float(found.predictions[:, 0].sum())}
    base = OwnLoss if kind == "own" else Trainer
    return trainer_of(base, folder, **data, **settings)


def run(rank, world_size, kind, folder):
    torch.manual_seed(0)
    trainer = make(kind, True, folder, 2, accumulation=2)
    return trained(trainer, evaluates=kind != "dpo")


@pytest.mark.processes
def test_two_ranks_equal_one_process_with_the_step_as_one_batch(tmp_path):
    by_kind = run_cases(run, 2, [(kind, tmp_path) for kind in KINDS], seconds=120)
    for kind, by_rank in zip(KINDS, by_kind, strict=True):
        torch.manual_seed(0)
        stock = trained(make(kind, False, tmp_path, 8), evaluates=kind != "dpo")
        names = ["loss", "aux_loss"]
        if kind == "sft":  # DPO's are means over the batches of its ranks
            names += ["mean_token_accuracy", "entropy", "num_tokens"]
        for ours in by_rank:
            assert weights_apart(stock, ours) < 2e-6, kind
            keys = [*names, *(f"eval_{name}" for name in names), "eval_first"]
            assert_logged_alike(stock, ours, keys, rel=2e-6)
            assert (spared(ours) > 0) == (kind in ("sft", "dpo")), kind
        assert len(logged(stock.log, "aux_loss")) == (2 if kind in ("sft", "dpo") else 0)


@pytest.mark.slow
def test_sums_of_routers_are_computed_once_in_a_call(tmp_path, monkeypatch):
    calls = []
    original = router.router_sums

    def counted(*given):
        calls.extend(["sums"] if len(given) == 3 else [])  # else on numbers, before training
        return original(*given)

    monkeypatch.setattr(router, "router_sums", counted)
    trainer = trainer_of(
        *(OwnLoss, tmp_path),
        model=mixture(),
        train_dataset=dataset(8),
        batch=8,
        max_steps=1,
        flexseq={"max_tokens_per_rank": 1000},
    )

    def note(module, args, kwargs):
        if kwargs.get("seq_ctx") is not None:
            calls.append("call")

    model = trainer.model.get_decoder()
    with model.register_forward_pre_hook(note, with_kwargs=True):
        trainer.train()
    assert calls.count("sums") == calls.count("call") > 0


# ---- both passes


def counts_of_both_passes(rank, world_size):
    """What the second pass adds up to, and what the first one has found: routers with noise."""
    model = mixture(router_jitter_noise=0.5)
    engine = RandomPlanEngine(
        Accelerator(cpu=True), 1, accepts=lambda plan: len(plan.micro_batches) > 2
    )
    engine.attach(model)
    router = engine.whole_model.router
    of_second = []
    own_take = router.of_calls.take

    def take():
        sums = own_take()
        if torch.is_grad_enabled():
            of_second.append(sums[PROBABILITIES].detach().double())
        return sums

    router.of_calls.take = take
    known = []
    own_know = router.know
    router.know = lambda totals: (known.append(totals.clone()), own_know(totals))
    for step in engine.steps(own_batches(documents(LENGTHS), rank, world_size), 2):
        step.backward(DistributedDataParallel(model))
    total = torch.stack(of_second).sum(dim=0)
    torch.distributed.all_reduce(total)
    return total.tolist(), known[0].chunk(2)[1].tolist()


@pytest.mark.processes
def test_both_passes_draw_the_same_random_numbers():
    for second, first in run_ranks(counts_of_both_passes, 2):
        assert second == pytest.approx(first, rel=1e-6)


def test_an_evaluation_runs_each_micro_batch_once(monkeypatch):
    keep_float64(monkeypatch)
    examples = documents(LENGTHS)
    model = mixture()
    engine = RandomPlanEngine(
        Accelerator(cpu=True), 1, accepts=lambda plan: len(plan.micro_batches) > 2
    )
    engine.attach(model)
    evaluation = engine.evaluation([DataCollatorForFlexSeq()(examples)])
    for step in evaluation:
        step.forward(model)
        assert step.step.passes == 1
    wanted, _ = reference("Mixtral", examples)
    assert evaluation.mean_loss() == pytest.approx(wanted, rel=1e-10)


# ---- what a model's router loss is


def test_another_function_is_refused(tmp_path, monkeypatch):
    own = modeling_mixtral.load_balancing_loss_func
    monkeypatch.setattr(
        modeling_mixtral, "load_balancing_loss_func", lambda *given: 2 * own(*given)
    )
    with refused("its load_balancing_loss_func gives .*set config.output_router_logits=False"):
        make("plain", True, tmp_path, 2)
    with refused("router_aux_loss_coef=0.5 with Mixtral"):
        make("dpo", True, tmp_path, 2)


def test_a_pipeline_is_refused(tmp_path):
    with refused("output_router_logits=True with pipeline_parallel_size"):
        trainer_of(Trainer, tmp_path, flexseq={"pipeline_parallel_size": 2}, model=mixture())
