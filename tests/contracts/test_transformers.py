"""Private parts of transformers that hf_flexseq overrides, registers itself with, or reads."""

import inspect
from dataclasses import fields

import pytest
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import AllToAllEP
from transformers.integrations.liger import apply_liger_kernel
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from tests.contracts.look import attributes, calls, parameters

# ---- the methods that hf/trainer and pipeline/trainer override, as they are called

METHODS = {
    "get_batch_samples": "epoch_iterator num_batches device",
    "set_initial_training_values": "args dataloader",
    "training_step": "model inputs num_items_in_batch",
    "prediction_step": "model inputs prediction_loss_only ignore_keys",
    "evaluation_loop": "dataloader description prediction_loss_only ignore_keys metric_key_prefix",
    "get_eval_dataloader": "eval_dataset",
    "get_test_dataloader": "test_dataset",
    "_inner_training_loop": "batch_size args resume_from_checkpoint trial ignore_keys_for_eval",
    "_load_optimizer_and_scheduler": "checkpoint",
    "log": "logs start_time",
    "_maybe_log_save_evaluate": (
        "tr_loss grad_norm model trial epoch ignore_keys_for_eval start_time learning_rate"
    ),
    "_finalize_training": "trial num_train_samples start_time",
    "_wrap_model": "model training dataloader",
    "_clip_grad_norm": "model",
    "_get_grad_norm": "model grad_norm",
    "_save": "output_dir state_dict",
    "_save_checkpoint": "model trial",
    "_save_optimizer_and_scheduler": "output_dir",
    "train": "resume_from_checkpoint trial ignore_keys_for_eval",
    "_load_from_checkpoint": "resume_from_checkpoint model",
    "_load_best_model": "",
    "floating_point_ops": "inputs",
    # called, not overridden
    "compute_loss": "model inputs return_outputs num_items_in_batch",
    "get_total_train_batch_size": "args",
    "get_decay_parameter_names": "model",
    "_get_output_dir": "trial",
    "_prepare_inputs": "inputs",
    "_set_signature_columns_if_needed": "",
    "get_train_dataloader": "",
    "_get_train_sampler": "train_dataset",
    "compute_loss_context_manager": "",
    "_defer_fsdp_gradient_reduction": "",  # of a model that was sharded at load
}
CALLED_BY_OTHER_NAMES = {
    *("log", "_inner_training_loop", "_get_train_sampler", "_defer_fsdp_gradient_reduction")
}


def test_methods_of_the_trainer_take_what_they_took_and_are_called():
    found = {name: " ".join(parameters(getattr(Trainer, name))) for name in METHODS}
    assert found == METHODS
    assert {name for name in METHODS if not calls(Trainer, name)} <= CALLED_BY_OTHER_NAMES


AVERAGE = "self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)"


@pytest.mark.parametrize(
    ("function", "texts"),  # in this order
    [
        (Trainer.train, ["_inner_training_loop", "resume_from_checkpoint=resume_from_checkpoint"]),
        # steps/logged_loss.py adds losses up and filters them between two log lines, as this does
        (Trainer._run_epoch, [f"self._tr_loss += {AVERAGE}"]),
        (Trainer._finalize_training, ["self._tr_loss.item()"]),
        # input tokens are counted from the items
        (Trainer._track_num_input_tokens, ["main_input_name"]),
        (Trainer._track_num_input_tokens, ["numel"]),
        (Trainer._track_num_input_tokens, ['inputs["attention_mask"].sum()']),
        (Trainer.set_initial_training_values, ["len("]),
        # checkpoints/optimizer.py reads optimizer.pt of an ordinary run by these numbers
        (Trainer.create_optimizer, ["in decay_parameters", "not in decay_parameters"]),
        # hf/trainer/whole_checkpoints.py: the manifest follows the last file, before the rotation
        (
            Trainer._save_checkpoint,
            [
                'f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"',
                "self.save_model(",
                "self._save_rng_state(",
                "self.state.save_to_json(os.path.join(output_dir, TRAINER_STATE_NAME))",
                "self._push_from_checkpoint(",
                "rotate_checkpoints(",
            ],
        ),
        # hf/trainer/trainer.py keeps the Trainer from both: the engine does them
        (
            Trainer.train,
            [
                "if self.args.use_liger_kernel:",
                "apply_liger_kernel(self.model, self.args.liger_kernel_config)",
                "if self.neftune_noise_alpha is not None:",
                "activate_neftune(self.model, self.neftune_noise_alpha",
            ],
        ),
        (Trainer.__init__, ["self.neftune_noise_alpha = args.neftune_noise_alpha"]),
        (
            apply_liger_kernel,
            ["to_instance(model=base_model, **kernel_config"],
        ),
        # steps/embedding_noise.py draws noise of the same size
        (neftune_post_forward_hook, ["module.training", "/ torch.sqrt(dims)", "uniform_(-mag_"]),
        (TrainingArguments, ["fsdp_plugin_args"]),  # pipeline/trainer/fsdp.py
        (PreTrainedModel.maybe_distribute_model, ["config.distributed_config = "]),
        # docs/architecture.md: exchanges of experts, with one wait of the host
        (
            AllToAllEP._dispatch_tokens,
            ["all_to_all_single(recv_counts", ".tolist()", "all_to_all_single_autograd("],
        ),
        (AllToAllEP.__call__, ["_dispatch_tokens(", "experts_forward(", "_combine_tokens("]),
        (AllToAllEP._combine_tokens, ["all_to_all_single_autograd("]),
        # hf/trainer/checkpoint_forms.py sets the one, and replaces the other
        (Trainer.__init__, ["not args.save_only_model", "callback_handler.on_init_end("]),
        (Trainer._save_checkpoint, ["if not self.args.save_only_model:", "_save_optimizer_and"]),
        # checkpoint_forms.py there reads in another way, and into a model on the same meshes
        (Trainer._load_from_checkpoint, ["load_state_dict(state_dict, False)"]),
        (PreTrainedModel.from_pretrained, ["cls.prepare_distribute_model("]),
        (PreTrainedModel.maybe_distribute_model, ["model._mesh_manager = mesh_manager"]),
        (PreTrainedModel.from_pretrained, ["key_mapping"]),
        (ForCausalLMLoss, ["float"]),  # logits are cast to float32
        # past its decorators
        (inspect.unwrap(LlamaForCausalLM.forward), ["logits = self.lm_head("]),
        (inspect.unwrap(LlamaForCausalLM.forward), ["self.loss_function("]),
    ],
)
def test_a_source_has_what_is_done_as_it_does(function, texts):
    source = inspect.getsource(function)
    positions = [source.index(text) for text in texts]
    assert positions == sorted(positions)


def test_names_that_are_read():
    assert PREFIX_CHECKPOINT_DIR == "checkpoint"
    assert attributes(Trainer, "is_fsdp_enabled") >= 1  # pipeline/trainer/fsdp.py
    # hf/model/facts.py: what transformers shards at load
    names = {field.name for field in fields(DistributedConfig)}
    assert {"fsdp_size", "dp_replicate_size", "fsdp_cpu_offload", "fsdp_mixed_precision"} <= names
