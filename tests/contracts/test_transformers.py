"""Private parts of transformers that hf_flexseq overrides, registers itself with, or reads."""

import inspect
from dataclasses import fields

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
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
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.models.llava.modeling_llava import (
    LlavaCausalLMOutputWithPast,
    LlavaModelOutputWithPast,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from tests.contracts.look import attributes, calls, parameters
from tests.versions import since


def llama():
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))


IDS = {"input_ids": torch.zeros(1, 3, dtype=torch.int64), "use_cache": False}

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


def test_batches_of_a_step_are_drawn_in_one_place_and_counted_as_items():
    (call,) = calls(Trainer, "get_batch_samples")
    assert len(call.args) == 3
    assert not call.keywords


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


def test_experts_can_be_put_over_ranks():
    # hf/trainer/checkpoint_forms.py, hf/model/sharding.py; older versions do not dispatch tokens
    pytest.importorskip("transformers.distributed.expert_parallel")
    names = {field.name for field in fields(DistributedConfig)}
    assert {"ep_size", "ep_plan", "ep_implementation"} <= names
    assert PreTrainedModel._mesh_manager is None


# ---- pipeline/trainer/loading.py and pipeline/stages.py


def test_auto_models_map_configurations_to_classes():
    assert issubclass(AutoModelForCausalLM, _BaseAutoModelClass)
    assert AutoModelForCausalLM._model_mapping[LlamaConfig] is LlamaForCausalLM
    tied = {"lm_head.weight": "model.embed_tokens.weight"}  # a tied head names its source
    assert LlamaForCausalLM._tied_weights_keys == tied


def test_a_subclass_can_cut_the_model_while_it_is_loaded(tmp_path):
    llama().save_pretrained(tmp_path)

    def __init__(self, *args, **kwargs):
        LlamaForCausalLM.__init__(self, *args, **kwargs)
        self.model.embed_tokens = torch.nn.Identity()
        self.all_tied_weights_keys = {}

    members = {"_tied_weights_keys": None, "_keys_to_ignore_on_load_unexpected": [".*"]}
    kind = type("LlamaForCausalLM", (LlamaForCausalLM,), members | {"__init__": __init__})
    model, info = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert "model.embed_tokens.weight" not in dict(model.named_parameters())
    model.__class__ = LlamaForCausalLM
    assert type(model) is LlamaForCausalLM


def test_the_decoder_runs_on_hidden_states_and_ends_with_its_norm():
    model = llama().model
    model.layers, model.norm = torch.nn.ModuleList(), torch.nn.Identity()
    hidden = torch.ones(1, 2, 8)
    out = model(inputs_embeds=hidden, use_cache=False).last_hidden_state
    assert torch.equal(out, hidden)


def test_the_head_of_a_stage_sees_what_a_hook_left_in_the_decoder_s_output():
    model = llama()

    def emptied(module, args, output):
        output.last_hidden_state = torch.zeros_like(output.last_hidden_state)

    model.model.register_forward_hook(emptied)
    assert not model(**IDS).logits.any()


# ---- steps/feature_form.py: what is asked of features that an output holds


@since("transformers", "5.24", "no output holds features")
def test_an_output_that_is_read_by_number_makes_a_tuple_of_its_features():
    class Features:
        def __init__(self):
            self.asked = []

        def to_tuple(self):
            self.asked.append("to_tuple")
            return ("features",)

        def __getattr__(self, name):
            self.asked.append(name)
            raise AttributeError(name)

    features = Features()
    output = LlavaModelOutputWithPast(last_hidden_state="rows", image_outputs=features)
    assert output[:] == ("rows", ("features",))
    output = LlavaCausalLMOutputWithPast(logits="logits", image_outputs=output.image_outputs)
    assert output[:] == ("logits", ("features",))
    assert features.asked == ["to_tuple", "to_tuple"]
