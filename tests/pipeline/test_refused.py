"""What a pipeline refuses, when the trainer is made."""

import pytest
from accelerate import Accelerator
from transformers import Trainer

from hf_flexseq import FlexSeqArguments, FlexSeqConfig, FlexSeqEngine, FlexSeqMixin, FlexSeqTrainer
from tests.hf.hybrids import make_hybrid
from tests.hf.plain import dataset, training_arguments
from tests.hf.tiny import tiny_llama


def make(folder, cls=FlexSeqTrainer, model=None, **options):
    options = {"pipeline_parallel_size": 2, "cost_model": "estimate", **options}
    args = training_arguments(FlexSeqConfig, folder, batch=1, accumulation=1, **options)
    return cls(model=model or tiny_llama(), args=args, train_dataset=dataset(8))


class OwnLoss(FlexSeqMixin, Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


OFFLOAD = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"offload": True},
}
WITHOUT = {"pipeline_parallel_size": 1, "pipeline_schedule": "seq1f1b"}


@pytest.mark.parametrize(
    ("error", "options", "reason"),
    [
        (NotImplementedError, {"cls": OwnLoss}, "OwnLoss.compute_loss with pipeline_parallel"),
        (NotImplementedError, {"planner": "zeppelin"}, "planner='zeppelin' with pipeline_paralle"),
        (NotImplementedError, {"strategy": "zigzag"}, "strategy='zigzag' with .*: chunks attend"),
        (NotImplementedError, {"sync": "lockstep"}, "sync='lockstep' with pipeline_parallel_size"),
        (NotImplementedError, {"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
        (NotImplementedError, OFFLOAD, "offload=True of activation checkpointing on a CPU with"),
        (ValueError, {}, "pipeline_parallel_size=2 does not divide the 1 ranks of the job"),
        (ValueError, {"pipeline_parallel_size": 0}, "lel_size=0: must be at least 1"),
        (ValueError, {"pipeline_schedule": "gpipe"}, "schedule must be one of .*got 'gpipe'"),
        (ValueError, WITHOUT, "'seq1f1b' needs a pipeline: set pipeline_parallel_size"),
    ],
)
def test_refused_when_configured(tmp_path, error, options, reason):
    with pytest.raises(error, match=reason):
        make(tmp_path, **options)


def test_a_loop_of_ones_own_is_refused():
    message = "pipeline_parallel_size=2 in a loop of your own"
    with pytest.raises(NotImplementedError, match=message):
        FlexSeqEngine(Accelerator(cpu=True), FlexSeqArguments(pipeline_parallel_size=2))


def test_lora_is_refused(tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(NotImplementedError, match="a PEFT model with pipeline_parallel_size=2"):
        make(tmp_path, model=model)


def test_ranks_that_share_the_chunks_of_recurrent_layers_are_refused(tmp_path):
    with pytest.raises(NotImplementedError, match="sp_degree=2 for the recurrent layers"):
        make(tmp_path, model=make_hybrid("Qwen3_5"), planner="static", sp_degree=2)
