"""Private parts of packages that are used only where they are installed; `test_source_packages.py`
reads those that no test environment has."""

import inspect

import pytest

from tests.contracts.look import calls, parameters


def test_liger_is_put_into_a_model_with_these_options():
    # hf/model/liger.py leaves them out; Liger passes over those that it does not know
    patches = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    for model_type in ("llama", "qwen3", "mistral"):
        options = parameters(patches.MODEL_TYPE_TO_APPLY_LIGER_FN[model_type])
        assert {"fused_linear_cross_entropy", "cross_entropy", "swiglu"} <= set(options)


def test_rows_that_trl_packs_begin_at_0_in_every_sequence():
    # steps/collator.py takes them apart there
    trl = pytest.importorskip("trl.trainer.sft_trainer")
    row = {"input_ids": [5, 6, 7, 8, 9], "labels": [5, 6, 7, 8, 9], "seq_lengths": [3, 2]}
    batch = trl.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)([row])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert "attention_mask" not in batch


def test_trl_s_sft_trainer_is_what_ours_answers_to():
    trainer = pytest.importorskip("trl").SFTTrainer
    # FlexSeqMixin hands this method, which refuses masks without labels, the collator inside ours
    method = trainer._reject_skip_prepare_without_labels
    assert parameters(method) == ["datasets", "data_collator"]
    assert calls(trainer, "_reject_skip_prepare_without_labels")
    source = inspect.getsource(trainer)
    assert "fused_lm_head" in source  # hf/model/loss.py keeps TRL's head where it is asked for
    # hf/losses/micro_batch_losses.py makes one value of the figures of a step
    assert 'self._metrics[mode]["mean_token_accuracy"].append(' in source
    assert 'self._metrics[mode]["num_tokens"] = [self._total_train_tokens]' in source
