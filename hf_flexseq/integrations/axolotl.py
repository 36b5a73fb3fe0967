"""axolotl's supervised trainers on planned steps, as a plugin of its configuration:

    plugins:
      - hf_flexseq.integrations.axolotl.FlexSeqPlugin
    flexseq:
      max_tokens_per_rank: 16384

1. `FlexSeqInput` adds the key `flexseq` to axolotl's configuration. It refuses wrong options, and
   settings of axolotl that contradict planned steps, while axolotl reads the file.
2. `FlexSeqPlugin` gets the trainer that axolotl has made, and puts `FlexSeqMixin` in front of its
   class (`FlexSeqCallback`). So axolotl's own trainer, with its optimizers, schedulers and
   checkpoints, stays below.

axolotl catches an ImportError of a plugin and trains without it. Therefore nothing of the
executing half is imported before there is a trainer.

Rejected: a trainer class from `get_trainer_cls`, which takes the place of axolotl's own classes,
and which its builder for reinforcement learning calls without a model.
"""

import math
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, model_validator

from hf_flexseq.base.refusals import Refusal, above_one, option, refuse, same_step, together
from hf_flexseq.base.values import listed
from hf_flexseq.base.versions import FUSED_HEAD_FROM, is_older, needs
from hf_flexseq.integrations.options import options_in

PATH = "hf_flexseq.integrations.axolotl.FlexSeqPlugin"

# Trainers of axolotl that were tried. Others compute losses of their own.
TRAINERS = ("AxolotlTrainer", "AxolotlRewardTrainer")

# Plugins of axolotl that compute the loss, by their packages.
_LOSS_PLUGINS = ("cut_cross_entropy", "diffusion", "kd")

# Implementations of attention whose numbers differ, which planned steps would not use.
_OTHER_ATTENTION = ("fp8", "sage", "xformers", "flex_attention")

_OWN_RL = ("dpo", "ipo", "kto", "grpo", "gdpo")  # losses on log-probabilities of TRL's head


# ---- settings of axolotl that are refused


def _degrees(cfg: Any) -> dict[str, int]:
    names = ("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size")
    return above_one(cfg, *names)


def _loss_plugin(cfg: Any) -> str | None:
    for plugin in getattr(cfg, "plugins", None) or ():
        package = str(plugin).removeprefix("axolotl.integrations.").partition(".")[0]
        if package in _LOSS_PLUGINS:
            return f"the plugin {plugin}"
    return None


def _reinforcement(cfg: Any) -> str | None:
    kind = getattr(cfg, "rl", None)
    if kind is None:
        return None
    name = str(getattr(kind, "value", kind))
    if name in _OWN_RL and is_older("trl", FUSED_HEAD_FROM):
        return f"rl: {name} ({needs('trl', FUSED_HEAD_FROM)})"
    return f"rl: {name}"


def _attention(cfg: Any) -> str | None:
    name = getattr(cfg, "attn_implementation", None)
    return f"attn_implementation: {name}" if name in _OTHER_ATTENTION else None


def _any_of(*names: str) -> Any:
    """Return a function that finds which of some settings are on."""

    def found(cfg: Any) -> str:
        values = {name: getattr(cfg, name, None) for name in names}
        on = {name: "true" if value is True else value for name, value in values.items() if value}
        return ", ".join(f"{name}: {value}" for name, value in on.items())

    return found


CONFIGURATION: tuple[Refusal[Any], ...] = (
    Refusal(
        setting="sample_packing, eval_sample_packing, batch_flattening",
        found=_any_of("sample_packing", "eval_sample_packing", "batch_flattening"),
        why="its sampler fixes which sequences share a row, and plans choose that for each step",
        instead="leave it out, and let micro_batch_size count sequences: sequence_len / the mean "
        "tokens of a sequence times as many keep the tokens of a step",
        error=ValueError,
    ),
    Refusal(
        setting="context_parallel_size, sequence_parallel_degree, tensor_parallel_size above 1",
        found=lambda cfg: ", ".join(f"{name}={size}" for name, size in _degrees(cfg).items()),
        why="plans choose the ranks that share a sequence, out of all ranks",
        instead="leave it out, with ring_attn_func",
        error=ValueError,
        keeps=lambda cfg: same_step(
            math.prod(_degrees(cfg).values()),
            None if cfg.sample_packing else cfg,  # whose rows become sequences
            batch="micro_batch_size",
        ),
    ),
    Refusal(
        setting="the plugins for cut cross-entropy, distillation and diffusion",
        found=_loss_plugin,
        why="it computes the loss itself",
        instead="leave the plugin out, since hf_flexseq computes the loss in chunks by itself",
        error=ValueError,
    ),
    Refusal(
        setting="liger_fused_linear_cross_entropy, liger_cross_entropy, chunked_cross_entropy",
        found=_any_of(
            "liger_fused_linear_cross_entropy", "liger_cross_entropy", "chunked_cross_entropy"
        ),
        why="it replaces the loss, which hf_flexseq computes in chunks by itself",
        instead="leave it out",
        error=ValueError,
    ),
    Refusal(
        setting="use_eaft, orpo_alpha",
        found=_any_of("use_eaft", "orpo_alpha"),
        why="its loss reads logits, a whole vocabulary for every token",
        instead="leave it out",
    ),
    Refusal(
        setting="tiled_mlp",
        found=_any_of("tiled_mlp"),
        why="it cuts MLPs by the length of a batch, which differs between ranks",
        instead="leave it out: activation_memory of flexseq cuts MLPs into tiles by the plan",
        error=ValueError,
    ),
    Refusal(
        setting="activation_offloading, layer_offloading, gradient_checkpointing: offload",
        found=lambda cfg: (
            _any_of("activation_offloading", "layer_offloading")(cfg)
            or option("gradient_checkpointing", lambda value: "offload" in str(value))(cfg)
        ),
        why="it bypasses activation checkpointing, and plans do not know of it",
        instead="leave it out: activation_memory of flexseq brings activations to the host",
        error=ValueError,
    ),
    Refusal(
        setting="attn_implementation fp8, sage, xformers, flex_attention",
        found=_attention,
        why="planned steps have attention kernels of their own and would not use it",
        instead="use sdpa or a flash_attention kind, which the same numbers come from",
        error=ValueError,
    ),
    Refusal(
        setting="gemma4_hybrid_attn_impl, fused_attn_kernel",
        found=_any_of("gemma4_hybrid_attn_impl", "fused_attn_kernel"),
        why="it replaces the attention modules of the model",
        instead="leave it out",
        error=ValueError,
    ),
    Refusal(
        setting="rl",
        found=_reinforcement,
        why="its trainers were not tried on planned steps here",
        instead="use TRL's trainers with FlexSeqMixin for objectives on pairs and rewards",
    ),
    Refusal(
        setting="process_reward_model, do_bench_eval",
        found=_any_of("process_reward_model", "do_bench_eval"),
        why="it reads the logits of padded batches",
        instead="leave it out",
    ),
)


class FlexSeqInput(BaseModel):
    """The keys that the plugin adds to axolotl's configuration."""

    flexseq: dict[str, Any] | None = None
    """Options of `FlexSeqArguments` by their names."""

    @model_validator(mode="after")
    def check_flexseq(self) -> "FlexSeqInput":
        """Raise ValueError for options that are unknown or wrong, and for settings of axolotl that
        contradict planned steps."""
        try:
            together(
                lambda: options_in(self.flexseq, "axolotl"), lambda: refuse(CONFIGURATION, self)
            )
        except NotImplementedError as error:
            raise ValueError(str(error)) from error
        return self


class FlexSeqPlugin(BasePlugin):
    """Makes the trainer of an axolotl run plan its steps."""

    def get_input_args(self) -> str:
        """Return the dotted path of the keys that this plugin adds."""
        return "hf_flexseq.integrations.axolotl.FlexSeqInput"

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """Return training arguments that replace axolotl's own: the loss is a mean over the tokens
        of all ranks. axolotl always gives every rank's mean the same weight."""
        return {"average_tokens_across_devices": True}

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        """Put `FlexSeqMixin` in front of the class of a trainer; return its callback. Collective
        over the world. Raises as `FlexSeqTrainer` does, and NotImplementedError for a trainer of
        axolotl that was not tried."""
        from hf_flexseq.hf.trainer.callback import FlexSeqCallback
        from hf_flexseq.hf.trainer.training_data import flexseq_collator

        check_trainer_class(trainer)
        options = options_in(cfg.get("flexseq"), "axolotl")
        callback = FlexSeqCallback(trainer, options)
        # axolotl's evaluations collate with this one, and not with the trainer's data_collator
        if getattr(trainer, "eval_data_collator", None) is not None:
            trainer.eval_data_collator = flexseq_collator(trainer.eval_data_collator)
        return [callback]


def check_trainer_class(trainer: Any) -> None:
    """Raise NotImplementedError for a trainer of axolotl with a loss of its own, or with a loss
    function that reads logits."""
    of_axolotl = [
        cls.__name__
        for cls in type(trainer).__mro__
        if cls.__module__.startswith("axolotl.") and "compute_loss" in vars(cls)
    ]
    if of_axolotl and of_axolotl[0] not in TRAINERS:
        raise NotImplementedError(
            f"hf_flexseq does not support {of_axolotl[0]} of axolotl: its loss was not tried on "
            f"planned steps; use {listed(TRAINERS)}, or leave {PATH} out"
        )
    if getattr(trainer, "compute_loss_func", None) is not None:
        raise NotImplementedError(
            f"hf_flexseq does not support the loss function that axolotl gives to "
            f"{type(trainer).__name__}: it reads logits, a whole vocabulary for every token; "
            "train with next-token loss"
        )
