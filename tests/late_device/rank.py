"""One rank of a job whose ranks are processes, each with the device: `python -m
tests.late_device.rank OPTIONS`: three steps of FlexSeqTrainer. OPTIONS, as JSON, are those of its
configuration, `fsdp` for accelerate's FSDP2, and `images` for a Qwen3-VL on images and videos. It
prints what rank 0 has found as JSON, on the last line.
"""

import importlib
import json
import os
import sys
import tempfile
import warnings

os.environ["TRITON_INTERPRET"] = "1"
importlib.import_module("tests.late_device.install")  # before anything imports torch

import torch  # noqa: E402

from hf_flexseq import DataCollatorForFlexSeq, FlexSeqConfig, FlexSeqTrainer  # noqa: E402
from hf_flexseq.kernels import choose  # noqa: E402
from hf_flexseq.kernels.fused_operations import TorchFused  # noqa: E402
from tests.hf.tiny import documents, tiny_llama  # noqa: E402
from tests.hf.vision import tiny_vision_model, vision_examples  # noqa: E402
from tests.hf.vision_runs import VIDEOS  # noqa: E402
from tests.kernels.reference import Reference  # noqa: E402
from tests.late_device import nccl  # noqa: E402
from tests.late_device.install import ops  # noqa: E402
from tests.late_device.on_device.conftest import SETTINGS, AnyCall  # noqa: E402

FSDP2 = {  # as in recipes/accelerate_configs/fsdp2.yaml
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}


def train(folder, options):
    """Return the losses of three steps, the norms of gradients, and the transport's name."""
    if options.pop("fsdp", False):
        os.environ |= FSDP2
    one_kernel = (AnyCall(Reference()),)
    choose.CANDIDATES |= {"cuda": one_kernel, "cpu": one_kernel}
    settings = SETTINGS | {"output_dir": folder, "max_steps": 3}
    if options.get("use_cpu"):
        settings["ddp_backend"] = "gloo"
    model = tiny_llama(torch.float32)
    rows = documents([5, 90, 8, 21, 60, 2, 9, 17, 30, 4, 12, 50] * 3)
    if options.pop("images", False):
        model = tiny_vision_model("qwen3_vl").float()
        rows = vision_examples("qwen3_vl", [1, 0, 2, 0, 1, 0, 3, 1, 1, 0, 0, 1], videos=VIDEOS)
    trainer = FlexSeqTrainer(
        model=model,
        args=FlexSeqConfig(**settings | options),
        train_dataset=rows,
        data_collator=DataCollatorForFlexSeq(),
    )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return {
        "losses": [line["loss"] for line in lines],
        "norms": [line["grad_norm"] for line in lines],
        "transport": type(trainer.flexseq.communicator.transport).__name__,
    }


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    nccl.register()
    choose._fused_for_cuda = TorchFused
    with tempfile.TemporaryDirectory() as folder:
        found = train(folder, json.loads(sys.argv[1]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if os.environ["RANK"] == "0":
        print(json.dumps(found))
    assert not ops.findings(), ops.findings()


if __name__ == "__main__":
    main()
