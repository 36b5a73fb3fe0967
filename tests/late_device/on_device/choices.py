"""Trainers on the device, by what a run may choose: losses, also of evaluations, and parameters
are those of a CPU, and nothing is found."""

from contextlib import ExitStack

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.budget import others_nightly
from tests.hf.plain import logged
from tests.hf.test_shared_prefixes import conversations
from tests.hf.test_step_memory import RunsOut, cap_after
from tests.hf.test_video_parts import PART
from tests.hf.tiny import documents, tiny_llama
from tests.hf.vision import tiny_vision_model, vision_examples
from tests.hf.vision_runs import VIDEOS, frozen
from tests.late_device.install import ops
from tests.late_device.on_device.trainers import trained, trainer
from tests.no_graph import without_graphs

LENGTHS = [5, 33, 8, 21, 60, 2, 9, 17, 30, 4, 12, 50]
IMAGES = [1, 0, 2, 1, 1, 0]

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("in_torch", "one_kernel")]


def with_adapter():
    """A Llama with adapters that are not zero."""
    targets = ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(0)
    return get_peft_model(tiny_llama(torch.float32), config)


def with_tower():
    return tiny_vision_model("qwen3_vl").float()


def on_videos():
    return vision_examples("qwen3_vl", IMAGES, videos=VIDEOS)


def text():
    return documents(LENGTHS)


def images():
    return vision_examples("qwen3_vl", IMAGES)


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
# What a run has: a model, a dataset, and options, of which two are changes of the package.
RUNS = {
    "evaluated": (lambda: tiny_llama(torch.float32), text, EVALUATED),
    "evaluated, checkpointed": (
        lambda: tiny_llama(torch.float32),
        text,
        {"gradient_checkpointing": True, **EVALUATED},
    ),
    "adapters": (with_adapter, text, {}),
    "compiled": (
        lambda: tiny_llama(torch.float32),
        text,
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    ),
    "a tower": (with_tower, images, {}),
    "a frozen tower, ahead": (lambda: frozen(with_tower(), "tower"), images, {"lookahead": 1}),
    "a tower made again": (with_tower, images, {"keeps_graph": False}),
    "a tower made again beside frozen text": (
        lambda: frozen(with_tower(), "text"),
        images,
        {"keeps_graph": False},
    ),
    "frames of videos": (with_tower, on_videos, {"part_patches": 1}),
    "shared prefixes": (
        lambda: tiny_llama(torch.float32),
        lambda: conversations(24),
        {"shared_prefixes": "auto", "max_tokens_per_rank": 128},
    ),
    "shared prefixes, checkpointed": (
        lambda: tiny_llama(torch.float32),
        lambda: conversations(24),
        {"shared_prefixes": "auto", "max_tokens_per_rank": 128, "gradient_checkpointing": True},
    ),
}
EVERY_TIME = (
    "evaluated, checkpointed",
    "a frozen tower, ahead",
    "a tower made again",
    "shared prefixes, checkpointed",
)


def results(folder, name, *, use_cpu):
    """Of two steps. By SGD: updates are in proportion to gradients."""
    make_model, make_rows, options = RUNS[name]
    options = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.1, **options}
    with ExitStack() as stack:
        if not options.pop("keeps_graph", True):
            stack.enter_context(without_graphs())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if "part_patches" in options:
            patch.setattr(PART, options.pop("part_patches"))
        ops.reset_counts()
        options |= {"model": make_model(), "rows": make_rows(), "use_cpu": use_cpu}
        return trained(folder, **options)


@pytest.mark.parametrize("name", others_nightly(RUNS, tried=EVERY_TIME))
def test_it_trains_as_on_a_cpu(tmp_path, name):
    losses, evaluated, wanted = results(tmp_path, name, use_cpu=True)
    found_losses, found_evaluated, found = results(tmp_path, name, use_cpu=False)
    assert len(losses) == 2
    assert len(evaluated) == (2 if "eval_steps" in RUNS[name][2] else 0)
    assert ops.counts()["copies to the host"] == 2  # flags of what is not finite, once a step
    assert found_losses == pytest.approx(losses, rel=1e-5)
    assert found_evaluated == pytest.approx(evaluated, rel=1e-5)
    for parameter, value in wanted.items():
        torch.testing.assert_close(found[parameter], value, rtol=1e-4, atol=1e-6)


def test_training_that_ran_out_of_memory_starts_again(tmp_path):
    """With the losses of a run under the lower cap."""

    def losses(name, cap, *failing):
        fault = RunsOut(*failing, where="backward")
        options = {"max_steps": 2, "max_tokens_per_rank": cap, "auto_find_batch_size": True}
        made = trainer(tmp_path / name, rows=text(), callbacks=[fault], **options)
        with fault.planted():
            made.train()
        assert fault.times == 1 - len(failing)
        return logged(made.state.log_history, "loss")

    found = losses("failed", 100, 0)
    cap = cap_after(tmp_path / "failed")
    assert cap < 100
    assert found == losses("lower", cap)
