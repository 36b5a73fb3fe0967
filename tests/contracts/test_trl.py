"""Private parts of TRL's SFTTrainer that hf_flexseq/hf/ answers to."""

import inspect

import pytest

from tests.contracts.look import calls, parameters

trl = pytest.importorskip("trl")


def test_sft_refuses_masks_without_labels_in_a_method_that_is_given_the_collator():
    # FlexSeqMixin hands it the collator inside ours
    method = trl.SFTTrainer._reject_skip_prepare_without_labels
    assert parameters(method) == ["datasets", "data_collator"]
    assert calls(trl.SFTTrainer, "_reject_skip_prepare_without_labels")


def test_sft_asks_the_model_for_a_fused_head():
    # hf/model/loss.py keeps TRL's head where it is asked for
    assert "fused_lm_head" in inspect.getsource(trl.SFTTrainer)


def test_sft_keeps_a_list_for_each_figure_and_counts_tokens():
    # hf/token_means.py makes one value of those of a step
    source = inspect.getsource(trl.SFTTrainer)
    assert 'self._metrics[mode]["mean_token_accuracy"].append(' in source
    assert 'self._metrics[mode]["num_tokens"] = [self._total_train_tokens]' in source
