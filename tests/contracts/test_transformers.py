"""Private parts of transformers that hf_flexseq overrides, registers itself with, or reads."""

import inspect
from dataclasses import fields

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from tests.contracts.look import attributes, calls, parameters

TINY = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}

# ---- hf/trainer.py and hf/pipeline: the methods that are overridden, as they are called

OVERRIDDEN = {
    "get_batch_samples": ["epoch_iterator", "num_batches", "device"],
    "set_initial_training_values": ["args", "dataloader"],
    "training_step": ["model", "inputs", "num_items_in_batch"],
    "prediction_step": ["model", "inputs", "prediction_loss_only", "ignore_keys"],
    "evaluation_loop": [
        "dataloader",
        "description",
        "prediction_loss_only",
        "ignore_keys",
        "metric_key_prefix",
    ],
    "get_eval_dataloader": ["eval_dataset"],
    "get_test_dataloader": ["test_dataset"],
    "_inner_training_loop": [
        "batch_size",
        "args",
        "resume_from_checkpoint",
        "trial",
        "ignore_keys_for_eval",
    ],
    "_load_optimizer_and_scheduler": ["checkpoint"],
    "log": ["logs", "start_time"],
    "_maybe_log_save_evaluate": [
        "tr_loss",
        "grad_norm",
        "model",
        "trial",
        "epoch",
        "ignore_keys_for_eval",
        "start_time",
        "learning_rate",
    ],
    "_finalize_training": ["trial", "num_train_samples", "start_time"],
    "_wrap_model": ["model", "training", "dataloader"],
    "_clip_grad_norm": ["model"],
    "_get_grad_norm": ["model", "grad_norm"],
    "_save": ["output_dir", "state_dict"],
    "_save_checkpoint": ["model", "trial"],
    "_save_optimizer_and_scheduler": ["output_dir"],
    "train": ["resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "_load_from_checkpoint": ["resume_from_checkpoint", "model"],
    "_load_best_model": [],
    "floating_point_ops": ["inputs"],
    # called, not overridden
    "compute_loss": ["model", "inputs", "return_outputs", "num_items_in_batch"],
    "get_total_train_batch_size": ["args"],
    "get_decay_parameter_names": ["model"],
    "_get_output_dir": ["trial"],
    "_prepare_inputs": ["inputs"],
    "_set_signature_columns_if_needed": [],
    "get_train_dataloader": [],
    "_get_train_sampler": ["train_dataset"],
    "compute_loss_context_manager": [],
}


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_a_method_of_the_trainer_takes_what_it_took(name):
    assert parameters(getattr(Trainer, name)) == OVERRIDDEN[name]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in OVERRIDDEN
        # called by other names
        if name not in ("log", "_inner_training_loop", "_get_train_sampler")
    ],
)
def test_the_trainer_itself_calls_it(name):
    assert calls(Trainer, name)


def test_training_runs_through_the_inner_loop_by_keyword():
    source = inspect.getsource(Trainer.train)
    assert "_inner_training_loop" in source
    assert "resume_from_checkpoint=resume_from_checkpoint" in source.replace(" ", "")


def test_losses_are_added_up_and_filtered_between_two_log_lines():
    # steps/logged_loss.py does it over
    of_epoch = inspect.getsource(Trainer._run_epoch)
    average = "self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)"
    assert f"self._tr_loss += {average}" in of_epoch
    assert "self._tr_loss.item()" in inspect.getsource(Trainer._finalize_training)


def test_batches_of_a_step_are_drawn_in_one_place_and_counted_as_items():
    (call,) = calls(Trainer, "get_batch_samples")
    assert len(call.args) == 3
    assert not call.keywords


def test_input_tokens_are_counted_from_the_items():
    source = inspect.getsource(Trainer._track_num_input_tokens)
    assert "main_input_name" in source
    assert "numel" in source
    assert 'inputs["attention_mask"].sum()' in source


def test_the_reduction_of_a_model_sharded_at_load_is_deferred_by_the_trainer():
    assert parameters(Trainer._defer_fsdp_gradient_reduction) == []


def test_what_transformers_shards_at_load_is_in_the_model_s_configuration():
    # hf/model/facts.py
    names = {field.name for field in fields(DistributedConfig)}
    assert {"fsdp_size", "dp_replicate_size"} <= names
    assert {"fsdp_cpu_offload", "fsdp_mixed_precision"} <= names
    assert "config.distributed_config = " in inspect.getsource(
        PreTrainedModel.maybe_distribute_model
    )


def test_initial_training_values_are_counted_from_the_loader_s_length():
    source = inspect.getsource(Trainer.set_initial_training_values)
    assert "len(" in source or "has_length" in source


def test_the_optimizer_numbers_decayed_parameters_first():
    # pipeline/optimizer.py reads optimizer.pt of a run without stages by these numbers
    groups = inspect.getsource(Trainer.get_optimizer_cls_and_kwargs) + inspect.getsource(
        Trainer.create_optimizer
    )
    assert groups.index("in decay_parameters") < groups.index("not in decay_parameters")


def test_checkpoints_are_folders_with_the_prefix():
    assert PREFIX_CHECKPOINT_DIR == "checkpoint"


def test_the_trainers_state_is_the_last_file_of_a_checkpoint_and_comes_before_the_rotation():
    # hf/saving.py hangs the manifest on it
    source = inspect.getsource(Trainer._save_checkpoint)
    assert "self.state.save_to_json(os.path.join(output_dir, TRAINER_STATE_NAME))" in source
    order = [
        "self.save_model(",
        "self._save_rng_state(",
        "self.state.save_to_json(",
        "self._push_from_checkpoint(",
        "rotate_checkpoints(",
    ]
    positions = [source.index(call) for call in order]
    assert positions == sorted(positions)
    assert 'f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"' in source


def test_a_trainer_can_change_its_class(tmp_path):
    # hf/callback.py puts the mixin in front of an instance's class
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    trainer = Trainer(LlamaForCausalLM(LlamaConfig(**TINY)), arguments)
    trainer.__class__ = type("Other", (Trainer,), {})
    assert not hasattr(Trainer, "__slots__")


def test_the_trainer_tells_fsdp_by_these_names():
    # hf/pipeline/fsdp.py
    assert attributes(Trainer, "is_fsdp_enabled") >= 1
    assert "fsdp_plugin_args" in inspect.getsource(TrainingArguments)


# ---- hf/attention.py and hf/model/checks.py


def seen_by_an_attention(**inputs):
    """What a Llama hands to a registered attention implementation."""
    seen = {}

    def attention(module, query, key, value, attention_mask, **kwargs):
        seen.update(kwargs, attention_mask=attention_mask, shapes=(query.shape, key.shape))
        return query.transpose(1, 2).contiguous(), None

    AttentionInterface.register("contract", attention)
    model = LlamaForCausalLM._from_config(LlamaConfig(**TINY), attn_implementation="contract")
    model(input_ids=torch.zeros(1, 3, dtype=torch.int64), use_cache=False, **inputs)
    return seen


def test_an_implementation_without_a_mask_function_gets_no_mask_and_all_keywords():
    context = object()
    seen = seen_by_an_attention(seq_ctx=context)
    assert seen["attention_mask"] is None
    assert seen["seq_ctx"] is context
    assert {"scaling", "dropout"} <= set(seen)
    assert seen["shapes"] == ((1, 2, 3, 4), (1, 1, 3, 4))


def test_the_implementation_is_read_from_and_set_on_the_configuration():
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    former = model.config._attn_implementation
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager" != former


def test_models_say_whether_their_attention_can_be_replaced():
    assert LlamaForCausalLM._supports_attention_backend is True


def test_layers_keep_their_index_and_checkpointing_function():
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    assert model.model.layers[0].self_attn.layer_idx == 0
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    assert layers
    assert all(m._gradient_checkpointing_func.keywords["use_reentrant"] is False for m in layers)


# ---- hf/model/loss.py


def test_the_loss_of_a_causal_model_is_the_one_that_is_replaced():
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    assert model.loss_function is ForCausalLMLoss
    assert LOSS_MAPPING["ForCausalLM"] is ForCausalLMLoss
    own = lambda *args, **kwargs: None  # noqa: E731
    model.loss_function = own
    assert vars(model)["_loss_function"] is own
    del model._loss_function
    assert model.loss_function is ForCausalLMLoss


def test_the_loss_takes_shifted_labels_and_a_count():
    assert {"shift_labels", "num_items_in_batch", "ignore_index"} <= set(
        parameters(ForCausalLMLoss)
    )
    assert "float" in inspect.getsource(ForCausalLMLoss)  # logits are cast to float32


def test_the_source_of_a_forward_can_be_read_past_its_decorators():
    source = inspect.getsource(inspect.unwrap(LlamaForCausalLM.forward))
    assert "logits = self.lm_head(" in source
    assert "self.loss_function(" in source


# ---- hf/pipeline/loading.py and pipeline/stages.py


def test_auto_models_map_configurations_to_classes():
    assert issubclass(AutoModelForCausalLM, _BaseAutoModelClass)
    assert AutoModelForCausalLM._model_mapping[LlamaConfig] is LlamaForCausalLM


def test_a_subclass_can_cut_the_model_while_it_is_loaded(tmp_path):
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path)

    def __init__(self, *args, **kwargs):
        LlamaForCausalLM.__init__(self, *args, **kwargs)
        self.model.embed_tokens = torch.nn.Identity()
        self.all_tied_weights_keys = {}

    members = {
        "__init__": __init__,
        "_tied_weights_keys": None,
        "_keys_to_ignore_on_load_unexpected": [".*"],
    }
    kind = type("LlamaForCausalLM", (LlamaForCausalLM,), members)
    model, info = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert "model.embed_tokens.weight" not in dict(model.named_parameters())
    model.__class__ = LlamaForCausalLM
    assert type(model) is LlamaForCausalLM


def test_a_tied_head_names_its_source():
    assert LlamaForCausalLM._tied_weights_keys == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "key_mapping" in inspect.getsource(PreTrainedModel.from_pretrained)


def test_the_decoder_runs_on_hidden_states_and_ends_with_its_norm():
    model = LlamaForCausalLM(LlamaConfig(**TINY)).model
    model.layers, model.norm = torch.nn.ModuleList(), torch.nn.Identity()
    hidden = torch.ones(1, 2, TINY["hidden_size"])
    out = model(inputs_embeds=hidden, use_cache=False).last_hidden_state
    assert torch.equal(out, hidden)


def test_the_head_of_a_stage_sees_what_a_hook_left_in_the_decoder_s_output():
    model = LlamaForCausalLM(LlamaConfig(**TINY))

    def emptied(module, args, output):
        output.last_hidden_state = torch.zeros_like(output.last_hidden_state)

    model.model.register_forward_hook(emptied)
    logits = model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False).logits
    assert not logits.any()
