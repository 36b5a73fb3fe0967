"""The progress bar, with one line per step: the loss, the plan, and how long it took."""

from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback

from hf_flexseq import FlexSeqEngine
from hf_flexseq.steps.trace import LogFigures, plan_line


class PlanProgress(ProgressCallback):
    """A progress bar instead of the Trainer's own, which writes every log as a dict."""

    def __init__(self, engine: FlexSeqEngine | None) -> None:
        """engine: that of the trainer; None for one without."""
        super().__init__()
        self._engine = engine

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        figures = None if self._engine is None else self._engine.last_figures
        line = log_line(state.global_step, logs or {}, figures)
        if line and state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.write(line)


# What trainers of preferences and of rewards log besides the loss, and what it is called here.
SHOWN = {"rewards/accuracies": "accuracy", "reward": "reward"}


def log_line(step: int, logs: dict[str, Any], figures: LogFigures | None) -> str | None:
    """Return a log in one line; None for a log that is not about a step.

    figures: of the last step.
    """
    if "eval_loss" in logs:
        return f"step {step:>4}  held-out loss {logs['eval_loss']:.3f}{_shown(logs, 'eval_')}"
    if "loss" not in logs:
        return None
    plan = f"  {plan_line(figures)}" if figures is not None else ""
    return f"step {step:>4}  loss {logs['loss']:.3f}{_shown(logs, '')}{plan}"


def _shown(logs: dict[str, Any], prefix: str) -> str:
    """Return the words for those of SHOWN that were logged."""
    words = ""
    for name, called in SHOWN.items():
        value = logs.get(prefix + name)
        if value is not None:
            words += f"  {called} {value:.3f}"
    return words
