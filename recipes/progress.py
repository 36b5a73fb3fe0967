"""The progress bar, with one line per step: the loss, the plan, and how long it took."""

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback


class PlanProgress(ProgressCallback):
    """Stands in for the Trainer's own progress callback, which writes each log as a dict."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict | None = None, **kwargs
    ) -> None:
        if state.is_world_process_zero and self.training_bar is not None and logs:
            self.training_bar.write(log_line(state.global_step, logs))


def log_line(step: int, logs: dict) -> str:
    if "eval_loss" in logs:
        return f"step {step}: held-out loss {logs['eval_loss']:.3f}"
    return f"step {step}: {logs}"
