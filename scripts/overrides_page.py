"""Write docs/overrides.md: what a user may override or register, and its effect.

    python scripts/overrides_page.py

Rules for methods of trainers are those of `hf_flexseq/hf/overrides.py`. The other tables are data
below. A test compares their names with the classes of transformers and torch, so that a new method
there needs an entry here.
"""

from pathlib import Path

from transformers import Trainer
from trl import DPOTrainer, GRPOTrainer, SFTTrainer

from hf_flexseq.hf.overrides import OF_SHARDED_CHECKPOINTS, RULES, Rule
from hf_flexseq.pipeline.trainer.refusals import REPLACED

PAGE = Path(__file__).parents[1] / "docs/overrides.md"

HONOURED = "honoured"
REFUSED = "refused"
LOGGED = "named in the log"
TRIED = "honoured if a trial passes, otherwise refused"
HARMLESS = "harmless"

# Arguments of the Trainer's constructor, except `model` and `args`.
ARGUMENTS = {
    "data_collator": (
        TRIED,
        "it is called with one example at a time; the log names a collator whose rows depend on "
        "the other examples of a batch",
    ),
    "train_dataset": (
        HONOURED,
        "data that depend on training, or on torch's random numbers, are not drawn ahead",
    ),
    "eval_dataset": (HONOURED, "a data set, or a dictionary of data sets"),
    "processing_class": (HONOURED, "saved with the model"),
    "model_init": (HONOURED, "the model of each run is checked when it is attached"),
    "compute_loss_func": (HONOURED, "it reads log-probabilities and entropies of whole samples"),
    "compute_metrics": (HONOURED, "with `preprocess_logits_for_metrics`"),
    "callbacks": (HONOURED, "see the events below"),
    "optimizers": (HONOURED, "an optimizer that updates weights in every backward is refused"),
    "optimizer_cls_and_kwargs": (HONOURED, "as `optimizers`"),
    "preprocess_logits_for_metrics": (HONOURED, "it gets the logits of a few tokens at a time"),
}

# Where a user can put a function on a module or a parameter.
HOOKS = {
    "register_forward_hook": (TRIED, "a hook on the head makes the model keep its logits"),
    "register_forward_pre_hook": (TRIED, "changed labels are refused"),
    "register_backward_hook": (LOGGED, "it sees the gradients of each micro-batch"),
    "register_full_backward_hook": (LOGGED, "it sees the gradients of each micro-batch"),
    "register_full_backward_pre_hook": (LOGGED, "it sees the gradients of each micro-batch"),
    "register_load_state_dict_post_hook": (HARMLESS, "called as weights are loaded"),
    "register_load_state_dict_pre_hook": (HARMLESS, "called as weights are loaded"),
    "register_state_dict_post_hook": (HARMLESS, "called as weights are saved"),
    "register_state_dict_pre_hook": (HARMLESS, "called as weights are saved"),
    "register_buffer": (HARMLESS, "a buffer is moved and saved with the model"),
    "register_module": (TRIED, "a module of your own class takes part in the trial"),
    "register_parameter": (HARMLESS, "a parameter is trained and saved with the model"),
    "register_hook": (TRIED, "on a parameter: it must be linear, such as a mask or a factor"),
    "register_post_accumulate_grad_hook": (
        REFUSED,
        "it runs after each micro-batch; use the event on_pre_optimizer_step",
    ),
}

# Attributes that a user can set on a model of transformers.
MODEL = {
    "loss_function": (TRIED, "it must use `shift_labels` and divide by `num_items_in_batch`"),
    "forward": (TRIED, "that of the model or of a module, in a subclass or on the instance"),
    "loss_type": (LOGGED, "if it changes the divisor of the plain Trainer's loss"),
    "set_attn_implementation": (
        HONOURED,
        "the implementation that was set last serves calls between steps, and is restored "
        "afterwards",
    ),
}

# Events of a callback.
EVENTS = {
    "on_init_end": (HONOURED, ""),
    "on_train_begin": (HONOURED, ""),
    "on_train_end": (HONOURED, ""),
    "on_epoch_begin": (HONOURED, ""),
    "on_epoch_end": (HONOURED, ""),
    "on_step_begin": (HONOURED, ""),
    "on_pre_optimizer_step": (HONOURED, "it sees and may change the gradients of the whole step"),
    "on_optimizer_step": (HONOURED, ""),
    "on_substep_end": (LOGGED, "the batches of a step are trained together, after this event"),
    "on_step_end": (HONOURED, ""),
    "on_evaluate": (HONOURED, ""),
    "on_predict": (HONOURED, ""),
    "on_save": (HONOURED, ""),
    "on_log": (HONOURED, ""),
    "on_prediction_step": (HONOURED, "once for each planned batch"),
    "on_push_begin": (HONOURED, ""),
}

TABLES = {
    "Arguments of the constructor": ("argument", ARGUMENTS),
    "Hooks on modules and parameters": ("method", HOOKS),
    "Attributes of a model": ("name", MODEL),
    "Events of a callback": ("event", EVENTS),
}

INTRODUCTION = """\
# What you may override

Subclasses of a trainer, hooks on modules, callbacks and collators run your own code during a step.
On planned steps such code works as under the plain Trainer. Otherwise the trainer refuses it, at
the latest in the first step, with one line that names it and says what to change. The log names
each intended difference once, and [differences](differences.md) gives the reason. This page lists
every place for such code in transformers 5.24 and TRL 1.16.

Code counts as yours if it is defined outside of the known packages. So a function that you assign
to a trainer, to a class or to a file of transformers counts as well, and so does a decorator.

Attention of a library's model must stay as its class has it. Another `forward`, from you or from a
library, is refused whenever it comes. Every forward also counts the calls of attention, layer by
layer, and refuses one that has not called it as a model of this class and configuration does.
A layer that was copied within a model has a configuration of its own, for example: give it
`layer.self_attn.config = model.config`.

## Your code in the loss

A method of the loss sees the batches of the plain Trainer, and its gradients are those that it has
there ([a loss of your own](objectives/own.md)). Nothing is assumed of it. What it cannot have are
logits and hidden states, which stay where the plan has put their tokens: `flexseq_figures`, a
method of your class, makes a few values of each token there
([example](objectives/own.md#hidden-states-and-logits)).

## The trial of your code in the model

The plan decides which sequences share a micro-batch. A module or a hook must not depend on that:

    L(A and B in one row) = L(A) + L(B) = L(A and B as rows of a padded batch)

If your own module, `forward` or hook takes part in a forward, these losses are computed on nine
tokens before the first step. A plan may also cut a sequence anywhere, so only attention may read
neighbouring tokens. The trial makes each token a sequence of its own, and their order must not
matter. If the losses disagree, training ends with an error that shows the numbers. If the trainer
computes its loss on its own batches, the squares of its figures take the place of the loss.

The trial sees code that is there when the first step begins: put yours in before `train()`, or in
`on_train_begin`. Modules, forwards and hooks that come later are refused. The trial cannot detect
code that changes its behaviour later in training.

## Calls of the model between steps

A callback may call the model and generate with it, as under the plain Trainer. A call without
`seq_ctx` runs with the model's own attention and its own loss.

## Methods of a trainer
"""


def main() -> None:
    PAGE.write_text(page_text(), encoding="utf-8")


def page_text() -> str:
    """Return the page as Markdown."""
    lines = [INTRODUCTION, "| method | | |", "|---|---|---|"]
    lines += [_row_of(rule) for rule in RULES]
    pipelines = ", ".join(f"`{name}`" for name in REPLACED)
    called = ", ".join(f"`{name}`" for name in methods_without_rule())
    replaced = ", ".join(f"`{name}`" for name in OF_SHARDED_CHECKPOINTS)
    lines += [
        "",
        f"A [pipeline](pipelines.md) also refuses these: {pipelines}, every method of the loss, "
        "every `compute_loss` except the Trainer's, forward hooks, and modules of your own in a "
        "library's model.",
        "",
        f"For a model that `DistributedConfig` has sharded, {replaced} are replaced "
        "([checkpoints](reliability.md#models-that-distributedconfig-has-sharded)). Overrides in "
        "a subclass of `FlexSeqTrainer` or `FlexSeqMixin` are honoured; in a class behind the "
        "mixin they are refused.",
        "",
        "All other methods of `Trainer` and of TRL's SFT, DPO and GRPO trainers are called as by "
        f"the plain trainer: {called}.",
    ]
    for title, (kind, entries) in TABLES.items():
        lines += ["", f"## {title}", "", f"| {kind} | | |", "|---|---|---|"]
        for name, (standing, why) in entries.items():
            lines.append(f"| `{name}` | {standing} | {why} |")
    return "\n".join(lines) + "\n"


def _row_of(rule: Rule) -> str:
    names = ", ".join(f"`{name}`" for name in rule.names)
    instead = f". Instead: {rule.instead}" if rule.instead else ""
    return f"| {names} | {rule.standing.value} | {rule.why}{instead} |"


def methods_without_rule() -> list[str]:
    """Return the methods that are called as by the plain trainer, by name."""
    named = {name for rule in RULES for name in rule.names}
    methods: set[str] = set()
    for trainer in (Trainer, SFTTrainer, DPOTrainer, GRPOTrainer):
        for cls in trainer.__mro__[:-1]:
            methods |= {name for name, member in vars(cls).items() if callable(member)}
    return sorted(name for name in methods - named if not name.startswith("__"))


if __name__ == "__main__":
    main()
