"""What the engine promises whatever executes its steps: it draws only for an attached model, when
it is detached the accelerator is as it was, and what one machine lacks is refused on all ranks."""

import copy
import pickle

import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from peft import LoraConfig, get_peft_model

from hf_flexseq import FlexSeqEngine
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.hf.engine import cost_source as source
from hf_flexseq.hf.engine import model_planning
from hf_flexseq.hf.model.attention import NAME
from hf_flexseq.hf.model.facts import base_model
from hf_flexseq.pipeline.trainer.engine import PipelineEngine
from tests.hf.hybrids import make_hybrid
from tests.hf.tiny import (
    batches,
    documents,
    own_batches,
    reference_gradients,
    relative_errors,
    taken_gradients,
    tiny_arguments,
    tiny_llama,
)
from tests.hf.vision import tiny_vision_model
from tests.ranks import join, run_cases, run_threads

KINDS = ("whole", "stages")
EXAMPLES = documents([5, 9, 17, 3])


def engine_of(kind, model, accelerator=None):
    """An engine of either kind, on two ranks."""
    accelerator = accelerator or Accelerator(cpu=True)
    if kind == "whole":
        return FlexSeqEngine(accelerator, tiny_arguments())
    args = tiny_arguments(pipeline_parallel_size=2)
    return PipelineEngine(accelerator, args, model=model)


def on_two_ranks(function, *cases):
    """The results of `function(rank, world_size, *case)` of each case, which are alike on both
    ranks."""
    results = run_cases(function, 2, cases)
    assert all(first == second for first, second in results)
    return [first for first, _ in results]


def drawn_too_early(rank, world_size, kind):
    """Every way to draw raises, before `attach` and after `detach`, and draws nothing."""
    model = tiny_llama()
    engine = engine_of(kind, model)
    for is_detached in (False, True):
        if is_detached:
            engine.attach(model)
            engine.detach()
        untouched = iter(batches(3))
        ways = (
            lambda source: engine.next_step(source, 1),
            lambda source: next(engine.steps(source)),
            lambda source: next(engine.evaluation_steps(source)),
        )
        for draw in ways:
            with pytest.raises(RuntimeError, match=r"call engine\.attach\(model\) before drawing"):
                draw(untouched)
        assert len(list(untouched)) == 3
    # All ranks have raised, and none waits for another: they go on together.
    with engine.attached(model):
        return engine.next_step(iter(batches(3)), 1).number


@pytest.mark.processes
def test_drawing_without_a_model_raises_on_every_rank():
    assert on_two_ranks(drawn_too_early, *[(kind,) for kind in KINDS]) == [0, 0]


def settings(accelerator):
    """All attributes of an accelerator, its state and its configuration of dataloaders."""
    parts = {
        "accelerator": accelerator,
        "dataloaders": accelerator.dataloader_config,
        "state": accelerator.state,
    }
    found = {}
    for part, holder in parts.items():
        for name, value in vars(holder).items():
            found[part, name] = (id(value), repr(value))
    return found


def before_and_after(rank, world_size, kind, dispatch, has_handler):
    """What changes by a step, attached before it and detached after it, and again."""
    handlers = [DistributedDataParallelKwargs(bucket_cap_mb=25)] if has_handler else []
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    accelerator.dataloader_config.dispatch_batches = dispatch
    before = settings(accelerator)
    assert (before["accelerator", "ddp_handler"][1] != "None") == has_handler
    model = tiny_llama()
    engine = engine_of(kind, model, accelerator)
    changed = []
    for _ in range(2):
        engine.attach(model)
        step = engine.next_step(iter(batches(3)), 1)
        assert accelerator.dataloader_config.dispatch_batches is False
        assert step.plan.lengths == (5, 9) * world_size
        engine.detach()
        after = settings(accelerator)
        assert after.keys() == before.keys()
        changed += [name for name, value in after.items() if value != before[name]]
    assert model.config._attn_implementation == "sdpa"
    return changed


@pytest.mark.processes
def test_detached_it_leaves_the_accelerator_as_it_was():
    cases = [
        (kind, dispatch, has_handler)
        for kind in KINDS
        for dispatch, has_handler in ((None, True), (False, False))
    ]
    assert on_two_ranks(before_and_after, *cases) == [[]] * len(cases)


def after_a_failure(rank, world_size, kind, place):
    """What an `attach` that fails in its last call leaves behind."""
    accelerator = Accelerator(cpu=True, dynamo_backend="aot_eager" if kind == "whole" else "no")
    model = tiny_llama()
    engine = engine_of(kind, model, accelerator)

    def state():
        parts = [sorted(vars(module)) for module in model.modules()]
        hooks = [
            (*module._forward_pre_hooks, *module._forward_hooks) for module in model.modules()
        ]
        plugin = accelerator.state.dynamo_plugin
        return parts, hooks, model.config._attn_implementation, plugin.backend

    before = settings(accelerator), state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, FailsNow(OSError("no room")))
        with pytest.raises(OSError, match="no room"):
            engine.attach(model)
    assert not engine.is_attached
    return (settings(accelerator), state()) == before


class FailsNow:
    """Stands for a function, and raises an error."""

    def __init__(self, error):
        self.error = error

    def __call__(self, *args, **kwargs):
        raise self.error


@pytest.mark.processes
def test_an_attach_that_fails_leaves_model_and_accelerator_as_they_were():
    cases = [
        ("whole", "hf_flexseq.hf.model.attachments.refuse_noise"),
        ("stages", "hf_flexseq.pipeline.trainer.engine.PipelineExecutor"),
    ]
    assert on_two_ranks(after_a_failure, *cases) == [True, True]


def steps_of_stages(rank, world_size):
    model = tiny_llama()
    engine = engine_of("stages", model)
    with pytest.raises(ValueError, match="the engine was made for another model"):
        engine.attach(tiny_llama())
    losses = []
    with engine.attached(model):
        for ask in (engine.steps, engine.evaluation):
            with pytest.raises(NotImplementedError, match="set pipeline_parallel_size=1"):
                list(ask(batches(3)))
        drawn = iter(batches(3))
        while (step := engine.next_step(drawn, 1)) is not None:
            engine.run(step, model, is_last=False)
            engine.finish(step)
            losses.append(float(step.final_loss))
    assert any(p.grad is not None for p in model.parameters())
    return losses


@pytest.mark.processes
def test_an_engine_runs_the_stages_of_the_model_that_it_was_made_for():
    ((first, last),) = run_cases(steps_of_stages, 2, [()])
    assert first == [0.0] * 3
    assert all(loss > 0 for loss in last)


def llama_with_lora():
    model = tiny_llama()
    model.model.layers[0].mlp.register_forward_hook(doubled)
    model.gradient_checkpointing_enable()
    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "up_proj"], r=2))


def doubled(module, args, output):
    return 2 * output


def copies_in_training(model):
    """Copies of the model without adapters, and of the whole, made between steps."""
    engine = FlexSeqEngine(Accelerator(cpu=True), tiny_arguments())
    with engine.attached(model):
        for step in engine.steps(own_batches(EXAMPLES, 0, 1), 2):
            step.backward(model)
        return copy.deepcopy(base_model(model)), copy.deepcopy(model)


def names_of(hooks):
    return [hook.__qualname__ for hook in hooks.values()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [llama_with_lora, lambda: make_hybrid("Qwen3Next", output_router_logits=True)],
    ids=["LoRA", "recurrent, router"],
)
def test_a_copy_of_an_attached_model_is_an_ordinary_one(make):
    """A callback that averages weights makes one."""
    plain, model = make(), make()
    model.load_state_dict(plain.state_dict())
    for like, made in zip((base_model(plain), plain), copies_in_training(model), strict=True):
        assert base_model(made).config._attn_implementation == "sdpa"
        wanted_loss, wanted = reference_gradients(like, EXAMPLES)
        loss, gradients = reference_gradients(made, EXAMPLES)
        assert loss == wanted_loss
        assert max(relative_errors(gradients, wanted).values()) == 0.0
        for own, copied in zip(like.modules(), made.modules(), strict=True):
            assert vars(copied).keys() == vars(own).keys()
            assert names_of(copied._forward_pre_hooks) == names_of(own._forward_pre_hooks)
            assert names_of(copied._forward_hooks) == names_of(own._forward_hooks)


def test_an_attached_model_is_pickled_as_an_ordinary_one():
    model = tiny_llama()
    wanted_loss, _ = reference_gradients(model, EXAMPLES)
    engine = FlexSeqEngine(Accelerator(cpu=True), tiny_arguments())
    with engine.attached(model):
        made = pickle.loads(pickle.dumps(model))
    assert made.config._attn_implementation == "sdpa"
    assert reference_gradients(made, EXAMPLES)[0] == wanted_loss


def test_a_step_after_an_interrupted_generation_has_our_attention_again():
    examples = documents([5, 9, 17, 3])
    wanted_loss, wanted = reference_gradients(tiny_llama(), examples)
    model = tiny_llama()
    engine = FlexSeqEngine(Accelerator(cpu=True), tiny_arguments())
    engine.attach(model)
    ctrl_c = model.model.layers[1].register_forward_pre_hook(FailsNow(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        model.generate(torch.arange(2, 9).unsqueeze(0), max_new_tokens=3)
    ctrl_c.remove()
    (loss,) = [step.backward(model) for step in engine.steps(own_batches(examples, 0, 1), 2)]
    assert model.config._attn_implementation == NAME
    engine.detach()
    assert float(loss) == pytest.approx(wanted_loss, rel=1e-10)  # float32 by its own loss
    assert max(relative_errors(taken_gradients(model), wanted).values()) < 1e-10
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_text_keeps_another_attention_than_the_model_around_it():
    model = tiny_vision_model("qwen2_5_vl")
    model.set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "eager"})
    configs = model.config, model.config.text_config, model.config.vision_config
    seen = []

    def note(module, args):
        seen.append([config._attn_implementation for config in configs])

    with model.get_decoder().layers[0].register_forward_pre_hook(note):
        engine = FlexSeqEngine(Accelerator(cpu=True), tiny_arguments())
        with engine.attached(model), torch.no_grad():
            model(input_ids=torch.arange(2, 9).unsqueeze(0))
    note(model, ())
    assert seen == [["sdpa", "eager", "eager"]] * 2


# ---- what one machine lacks


def cost_model_named(rank, world_size, names):
    try:
        return source.named_cost(names[rank], join()).name
    except ValueError as error:
        return str(error)


def test_rank_0_s_file_of_a_cost_model_counts_and_no_other_rank_needs_it(tmp_path):
    cost = PRESETS["flexsp-gpt-7b-a100"]
    path = str(tmp_path / "cost.json")
    cost.save(path)
    missing = str(tmp_path / "not-there.json")
    assert run_threads(cost_model_named, 2, [path, missing]) == [cost.name] * 2
    first, second = run_threads(cost_model_named, 2, [missing, path])
    assert first == second
    assert first.startswith(f"rank 0, loading the cost model: cost_model='{missing}' is neither")


def without_a_kernel_or_a_process(rank, world_size, kind):
    """What is raised where rank 1 has no kernel for its heads, and then where rank 0 can start no
    process."""

    def no_kernel(device, dtype, layers):
        raise ValueError(f"no attention kernel for heads {sorted(layers[0].heads)}")

    def no_process(*, ahead):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    model = tiny_llama()
    engine = engine_of(kind, model)

    def refused(error):
        with pytest.raises(error) as raised, engine.attached(model):
            engine.next_step(iter(batches(3)), 1)
        return str(raised.value)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(model_planning, "choose_kernels", no_kernel)
        kernel = refused(ValueError)
    if rank == 0:
        engine.planner = no_process
    return kernel, refused(RuntimeError)


@pytest.mark.processes
def test_what_one_machine_lacks_is_refused_on_all_ranks():
    kernel = "rank 1, choosing the attention kernel: no attention kernel for heads"
    kernels = (f"{kernel} [(2, 1), (4, 2)]", f"{kernel} [(4, 2)]")  # a stage has one rank here
    process = (
        "rank 0, starting the planner: BlockingIOError: [Errno 11] Resource temporarily "
        "unavailable"
    )
    cases = [(kind,) for kind in KINDS]
    assert on_two_ranks(without_a_kernel_or_a_process, *cases) == [
        (kernel, process) for kernel in kernels
    ]
