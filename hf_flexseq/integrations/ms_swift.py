"""ms-swift's pre-training and SFT on planned steps.

A file with two lines is the plugin:

    from hf_flexseq.integrations.ms_swift import register
    register(max_tokens_per_rank=16384)

    NPROC_PER_NODE=8 swift sft --external_plugins plugin.py ...

ms-swift reads the file in every process before it loads the model, and stops if the file fails. It
makes the trainer of the class that its `TrainerFactory` names for a task; `register` puts a class
of this module there.

ms-swift's trainer computes the loss, its input and its accuracy from the logits of padded batches.
`PlannedTrainer` has transformers' own methods in their place; options of ms-swift's own loss are
refused.

With `packing` an example is a list of sequences, and with `padding_free` a batch is one row. Rows
of both have positions that begin again with each sequence, by which `DataCollatorForFlexSeq` takes
them apart. ms-swift gives no first token a label.
"""

from typing import Any, NamedTuple

from swift.trainers import Seq2SeqTrainer, TrainerFactory
from transformers import Trainer

from hf_flexseq.base.refusals import Refusal, option, refuse, same_step, together
from hf_flexseq.base.versions import FUSED_HEAD_FROM
from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.trainer.trainer import FlexSeqMixin
from hf_flexseq.integrations.options import options_in

TASK = "causal_lm"
"""ms-swift's name of next-token loss: `swift pt` and `swift sft`."""

_options: FlexSeqArguments | None = None  # of `register`, which the class is made with


def register(**options: Any) -> None:
    """Let ms-swift train by planned steps.

    options: fields of `FlexSeqArguments`, by their names. Raises as `options_in` does.
    """
    global _options
    _options = options_in(options, "ms-swift")
    for task in TrainerFactory.TRAINER_MAPPING:
        name = PlannedTrainer if task == TASK else RefusedTrainer
        TrainerFactory.TRAINER_MAPPING[task] = f"{__name__}.{name.__name__}"


class RefusedTrainer:
    """Replaces ms-swift's trainers with other losses, which are refused."""

    def __init__(self, *, args: Any, template: Any, **named: Any) -> None:
        """Raises NotImplementedError."""
        task = f"task_type={template.task_type!r}"
        if template.task_type == TASK:
            task = f"swift rlhf ({type(args).__name__})"
        raise NotImplementedError(
            f"hf_flexseq does not support {task} of ms-swift: its trainer computes the loss from "
            "the model's outputs for a padded batch, of preferences and GRPO from logits, a whole "
            "vocabulary for every token; leave the plugin out, or use TRL's trainer with "
            f"FlexSeqMixin, in an environment with TRL {FUSED_HEAD_FROM} or newer"
        )


class TransformersLoss(Seq2SeqTrainer):
    """ms-swift's trainer with the loss, inputs and evaluation steps of transformers."""

    compute_loss = Trainer.compute_loss
    prediction_step = Trainer.prediction_step
    training_step = Trainer.training_step
    _prepare_inputs = Trainer._prepare_inputs


class PlannedTrainer(FlexSeqMixin, TransformersLoss):
    """ms-swift's trainer of next-token loss on planned steps."""

    def __init__(self, *, model: Any, args: Any, template: Any, **named: Any) -> None:
        """Raises NotImplementedError or ValueError for settings that would train otherwise."""
        assert _options is not None, "register comes before"
        together(
            lambda: refuse(SETTINGS, _Settings(model, args, template)),
            lambda: check_model(template.get_base_model(model)),
        )
        _read_router_loss(template.get_base_model(model).config, args.router_aux_loss_coef)
        if args.gradient_checkpointing:
            # ms-swift replaces torch's checkpoint by one that is reentrant unless told otherwise
            told = dict(args.gradient_checkpointing_kwargs or {})
            args.gradient_checkpointing_kwargs = {"use_reentrant": False} | told
        super().__init__(model=model, args=args, template=template, flexseq_args=_options, **named)


class _Settings(NamedTuple):
    """The arguments from which ms-swift makes a trainer."""

    model: Any
    args: Any
    template: Any


def _read_router_loss(config: Any, coefficient: float | None) -> None:
    """Let a mixture of experts compute its router loss, as ms-swift's inputs ask it to."""
    if not coefficient or not hasattr(config, "router_aux_loss_coef"):
        return
    config.router_aux_loss_coef = coefficient
    config.output_router_logits = True


def _weights_of_tokens(settings: _Settings) -> str | None:
    template = settings.template
    is_binary = template.is_binary_loss_scale
    if is_binary is None:
        is_binary = template.loss_scale.is_binary_loss_scale
    return None if is_binary else f"loss_scale={template._loss_scale!r}"


def _images(settings: _Settings) -> str | None:
    if not settings.model.model_meta.is_multimodal:
        return None
    return f"the multimodal model {settings.model.model_meta.model_type}"


SETTINGS: tuple[Refusal[_Settings], ...] = (
    Refusal(
        setting="sequence_parallel_size",
        found=option("sequence_parallel_size", lambda size: size > 1, holder="template"),
        why="ms-swift would cut sequences itself, by one degree for the run",
        instead="leave it out: hf_flexseq chooses degrees",
        error=ValueError,
        keeps=lambda case: same_step(case.template.sequence_parallel_size, case.args),
    ),
    Refusal(
        setting="loss_scale with weights other than 0 and 1",
        found=_weights_of_tokens,
        why="ms-swift weights the losses of tokens by logits of its own call",
        instead="use one whose weights are 0 and 1, such as 'default', 'all' or 'last_round'",
    ),
    *(
        Refusal(
            setting=name,
            found=option(name, holder="args"),
            why="ms-swift computes it from the logits of all tokens",
            instead="leave it out",
        )
        for name in ("enable_dft_loss", "enable_channel_loss", "loss_type")
    ),
    Refusal(
        setting="predict_with_generate",
        found=option("predict_with_generate", holder="args"),
        why="an evaluation runs planned micro-batches",
        instead="leave it out, and generate from a checkpoint",
    ),
    Refusal(
        setting="multimodal models",
        found=_images,
        why="ms-swift's template encodes images in a hook before the model's forward",
        instead="train it with FlexSeqTrainer and its own processor",
    ),
)
