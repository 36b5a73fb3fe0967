"""Router losses of mixtures of experts are those of the whole step, whatever the plan: one process
that has the step as one batch gives the same loss and gradients."""

import random

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments
from transformers.models.mixtral import modeling_mixtral
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from hf_flexseq import FlexSeqArguments, FlexSeqConfig, FlexSeqMixin, FlexSeqTrainer
from hf_flexseq.hf.model.router import PROBABILITIES, RouterLoss, RouterSums, router_facts
from tests.hf.test_exactness import own_batches, whole
from tests.hf.test_mixin import FlexSeqSFTTrainer, tokenizer
from tests.hf.test_reach import keep_float64, make_model
from tests.hf.test_sharding import zero_run
from tests.hf.test_trainer import (
    OPTIONS,
    dataset,
    logged,
    padded,
    plain_run,
    training_arguments,
    update_error,
)
from tests.hf.tiny import (
    VOCAB,
    RandomPlanEngine,
    documents,
    reference_loss,
    relative_errors,
)
from tests.ranks import run_ranks

LENGTHS = [1, 2, 17, 5, 31, 3, 1, 40, 11, 2, 13, 23]
COEFFICIENT = 0.5


def mixture(family="Mixtral", **others):
    """A tiny mixture of experts that asks for its router loss."""
    options = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    return make_model(family, **{**options, **others})


def router_loss_of(model, examples):
    """The router loss of all tokens of all documents, by its definition, in float64."""
    config = model.config
    of_layers = None
    for example in examples:
        outputs = model(
            input_ids=torch.tensor([example["input_ids"]]),
            output_router_logits=True,
            use_cache=False,
        )
        own = [[logits] for logits in outputs.router_logits]  # [tokens, experts] of each layer
        of_layers = (
            own if of_layers is None else [a + b for a, b in zip(of_layers, own, strict=True)]
        )
    logits = torch.cat([torch.cat(parts) for parts in of_layers])  # [layers * tokens, experts]
    probabilities = logits.softmax(dim=-1)
    chosen = probabilities.topk(config.num_experts_per_tok).indices  # [layers * tokens, k]
    experts = logits.shape[-1]
    fractions = F.one_hot(chosen, experts).sum(dim=1).double().mean(dim=0)  # [experts]
    return experts * (fractions * probabilities.mean(dim=0)).sum()


def reference(family, examples):
    """Loss and gradients of one process, with the step as one batch."""
    model = mixture(family)
    model.set_attn_implementation("eager")
    loss = reference_loss(model, examples)
    loss = loss + COEFFICIENT * router_loss_of(model, examples)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients


def errors_under_random_plans(rank, world_size, family, sharding, plans):
    """The largest relative errors of loss and gradients over some random plans."""
    with pytest.MonkeyPatch.context() as patch:
        keep_float64(patch)
        examples = documents(LENGTHS)
        wanted_loss, wanted = reference(family, examples)
        model = mixture(family)
        if sharding == "fsdp2":
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        engine = RandomPlanEngine(Accelerator(cpu=True), seed=world_size)
        engine.attach(model)
        wrapped = DistributedDataParallel(model) if sharding == "ddp" else model
        worst = 0.0
        micro_batches = []
        for _ in range(plans):
            for step in engine.steps(own_batches(examples, rank, world_size), 2):
                loss = step.backward(wrapped)
                micro_batches.append(len(step.plan.micro_batches))
            torch.distributed.all_reduce(loss)
            found = {}
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    found[name] = whole(parameter.grad)
            model.zero_grad()
            errors = relative_errors(found, wanted)
            worst = max(worst, abs(float(loss) / world_size / wanted_loss - 1), *errors.values())
        assert max(micro_batches) > 1
        return worst


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world_size", "family", "sharding"),
    [(3, "Qwen3Moe", "ddp"), (2, "Mixtral", "fsdp2")],
)
def test_gradients_with_a_router_loss_equal_one_process(world_size, family, sharding):
    for worst in run_ranks(errors_under_random_plans, world_size, family, sharding, 4):
        assert worst < 1e-10


# ---- trainers


def plain_or_sft(kind, cls, folder, batch, accumulation, **options):
    """A trainer of next tokens, with its options in common: a step is 8 documents."""
    common = {"optim": "sgd", "bf16": False, "learning_rate": 0.1, "max_steps": 2}
    common |= {"batch": batch, "accumulation": accumulation}
    common |= {"per_device_eval_batch_size": batch * accumulation}
    data = {"train_dataset": Dataset.from_list(dataset(16)), "eval_dataset": dataset(8)}
    if kind == "plain":
        kind_of_args = TrainingArguments if cls is Trainer else FlexSeqConfig
        args = training_arguments(kind_of_args, folder, **common, **options)
        collator = {"data_collator": padded} if cls is Trainer else {}
        return cls(model=mixture(), args=args, **data, **collator)
    skip = {"dataset_kwargs": {"skip_prepare_dataset": True}, "gradient_checkpointing": False}
    args = training_arguments(
        SFTConfig, folder, max_length=None, router_aux_loss_coef=0.3, **skip, **common
    )
    data["eval_dataset"] = Dataset.from_list(data["eval_dataset"])
    options["peft_config"] = LoraConfig(
        target_modules=["q_proj"], r=2, modules_to_save=["mlp.gate"]
    )
    return cls(model=mixture(), args=args, processing_class=tokenizer(), **data, **options)


class FlexSeqDPOTrainer(FlexSeqMixin, DPOTrainer):
    pass


def dpo(cls, folder, batch, accumulation, **options):
    """A DPO trainer: a step is 8 pairs."""
    draw = random.Random(0)

    def words(fewest, most):
        return " ".join(f"t{draw.randrange(2, VOCAB)}" for _ in range(draw.randint(fewest, most)))

    pairs = []
    for _ in range(16):
        sides = {"chosen": " " + words(2, 20), "rejected": " " + words(2, 12)}
        pairs.append({"prompt": words(3, 8), **sides})
    args = training_arguments(
        DPOConfig,
        folder,
        batch=batch,
        accumulation=accumulation,
        max_length=None,
        bf16=False,
        optim="sgd",
        learning_rate=0.1,
        max_steps=2,
        gradient_checkpointing=False,
    )
    return cls(
        model=mixture(output_router_logits=False),
        ref_model=mixture(output_router_logits=False),
        args=args,
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer(),
        **options,
    )


def trained(trainer):
    """Weights before and after training, the log, and what an evaluation says."""
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    log = trainer.state.log_history
    if trainer.eval_dataset is not None:
        log.append(trainer.evaluate())
    after = {name: p.detach().numpy() for name, p in trainer.model.named_parameters()}
    return before, after, log


def flexseq_run(rank, world_size, kind, folder, accumulation):
    batch = 8 // world_size // accumulation
    options = {"flexseq_args": FlexSeqArguments(**OPTIONS)}
    torch.manual_seed(0)
    if kind == "dpo":
        return trained(dpo(FlexSeqDPOTrainer, folder, batch, accumulation, **options))[1:]
    if kind == "plain":
        trainer = plain_or_sft(kind, FlexSeqTrainer, folder, batch, accumulation, **OPTIONS)
    else:
        trainer = plain_or_sft(kind, FlexSeqSFTTrainer, folder, batch, accumulation, **options)
    return trained(trainer)[1:]


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "accumulation"), [("plain", 2), ("sft", 1), ("dpo", 2)])
def test_two_ranks_equal_one_process_with_the_step_as_one_batch(tmp_path, kind, accumulation):
    torch.manual_seed(0)
    if kind == "dpo":
        stock = dpo(DPOTrainer, tmp_path, 8, 1)
    else:
        stock = plain_or_sft(kind, Trainer if kind == "plain" else SFTTrainer, tmp_path, 8, 1)
    before, wanted, history = trained(stock)
    wanted = {name: torch.as_tensor(value) for name, value in wanted.items()}
    names = ["loss", "aux_loss"]
    if kind == "sft":  # DPO's are means over the batches of its ranks
        names += ["mean_token_accuracy", "entropy", "num_tokens"]
    for found, log in run_ranks(flexseq_run, 2, kind, tmp_path, accumulation):
        assert update_error(before, wanted, found) < 2e-6
        for key in (*names, *(f"eval_{name}" for name in names)):
            assert logged(log, key) == pytest.approx(logged(history, key), rel=2e-6), key
    assert kind == "plain" or len(logged(history, "aux_loss")) == 2


def mixture32():
    return mixture().float()


@pytest.mark.nightly
@pytest.mark.processes
def test_zero_3_equals_the_plain_trainer(tmp_path):
    steps = 5
    options = {"model": mixture32(), "learning_rate": 0.1, "max_steps": steps}
    before, wanted, history = plain_run(tmp_path, batch=4, **options)
    settings = (3, 1, False, mixture32, steps)
    for found, log, _ in run_ranks(zero_run, 2, tmp_path, *settings, seconds=120):
        assert len(logged(log, "loss")) == steps
        assert update_error(before, wanted, found) < 2e-6
        assert logged(log, "loss") == pytest.approx(logged(history, "loss"), rel=1e-5)


def likeliest(logits, labels):
    """[rows, tokens]; the plain Trainer hands on all outputs of such a model, aux_loss first."""
    logits = logits[1] if isinstance(logits, tuple) else logits
    return logits.argmax(dim=-1)


def evaluated(cls, folder, batch, **options):
    """What an evaluation with metrics says, beside training, of a model with a router loss."""
    common = {"batch": batch, "accumulation": 1, "per_device_eval_batch_size": batch}
    kind = TrainingArguments if cls is Trainer else FlexSeqConfig
    args = training_arguments(kind, folder, **common, max_steps=1, **options)
    trainer = cls(
        model=mixture(),
        args=args,
        train_dataset=dataset(8),
        eval_dataset=dataset(8),
        data_collator=padded,
        preprocess_logits_for_metrics=likeliest,
        compute_metrics=lambda found: {"first": float(found.predictions[:, 0].sum())},
    )
    trainer.train()
    return trainer.evaluate()


def flexseq_evaluated(rank, world_size, folder):
    return evaluated(FlexSeqTrainer, folder, 8 // world_size, **OPTIONS)


@pytest.mark.processes
def test_an_evaluation_with_metrics_has_the_router_loss(tmp_path):
    wanted = evaluated(Trainer, tmp_path, 8)
    for found in run_ranks(flexseq_evaluated, 2, tmp_path):
        assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=2e-6)
        assert found["eval_first"] == wanted["eval_first"]


# ---- both passes


def counts_of_both_passes(rank, world_size):
    """What the second pass adds up to, and what the first one has found: routers with noise."""
    model = mixture(router_jitter_noise=0.5)
    engine = RandomPlanEngine(
        Accelerator(cpu=True), 1, accepts=lambda plan: len(plan.micro_batches) > 2
    )
    engine.attach(model)
    router = engine.executor.router
    of_second = []
    own_take = router._of_model.take

    def take():
        sums = own_take()
        if torch.is_grad_enabled() and not router._is_dummy:
            of_second.append(sums[PROBABILITIES].detach().double())
        return sums

    router._of_model.take = take
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


# ---- what a model's router loss is


@pytest.mark.parametrize(
    "family", ["Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GptOss", "JetMoe"]
)
def test_a_family_has_the_loss_that_is_computed(family):
    facts = router_facts(mixture(family, **({"aux_loss_coef": 0.5} if family == "JetMoe" else {})))
    assert facts.top_k == 2
    assert facts.coefficient == COEFFICIENT


def test_another_function_is_refused(tmp_path, monkeypatch):
    own = modeling_mixtral.load_balancing_loss_func
    monkeypatch.setattr(
        modeling_mixtral, "load_balancing_loss_func", lambda *given: 2 * own(*given)
    )
    args = training_arguments(FlexSeqConfig, tmp_path, batch=2, accumulation=1)
    with pytest.raises(NotImplementedError, match="its load_balancing_loss_func gives") as raised:
        FlexSeqTrainer(model=mixture(), args=args, train_dataset=dataset())
    assert "set config.output_router_logits=False" in str(raised.value)
    with pytest.raises(NotImplementedError, match="router_aux_loss_coef=0.5 with Mixtral"):
        dpo(FlexSeqDPOTrainer, tmp_path, 2, 1, flexseq_args=FlexSeqArguments(**OPTIONS))


def test_a_loss_of_the_users_own_is_refused(tmp_path):
    args = training_arguments(FlexSeqConfig, tmp_path, batch=2, accumulation=1)
    own = {"compute_loss_func": lambda outputs, labels, num_items_in_batch: outputs.loss}
    with pytest.raises(NotImplementedError, match="output_router_logits=True of Mixtral"):
        FlexSeqTrainer(model=mixture(), args=args, train_dataset=dataset(), **own)


def test_a_pipeline_is_refused(tmp_path):
    options = {"pipeline_parallel_size": 2, **OPTIONS}
    args = training_arguments(FlexSeqConfig, tmp_path, batch=2, accumulation=1, **options)
    with pytest.raises(
        NotImplementedError, match="output_router_logits=True with pipeline_parallel_size"
    ):
        FlexSeqTrainer(model=mixture(), args=args, train_dataset=dataset())


def test_nothing_is_left_on_the_model():
    model = mixture()
    own = (len(model._forward_pre_hooks), len(model.model._forward_hooks))
    RouterLoss(model, model).detach()
    for hook in RouterSums(model).hooks:
        hook.remove()
    assert (len(model._forward_pre_hooks), len(model.model._forward_hooks)) == own
