"""A model is walked through once in a step to be put into training mode."""

import torch
from torch import nn

from hf_flexseq.steps.training_mode import in_training_mode


class Counting(nn.Linear):
    """Counts how often it is told its mode."""

    told = 0

    def train(self, mode=True):
        self.told += 1
        return super().train(mode)


def test_a_step_walks_once_and_eval_inside_is_undone_by_train():
    model = nn.Sequential(Counting(1, 1), nn.Dropout())
    model[1].eval()  # as plain training would not leave it, either
    with in_training_mode(model):
        assert model[1].training
        assert model.train() is model
        assert model.train(True) is model
        assert model[0].told == 1
        model.eval()
        assert not model[1].training
        model.train()
        assert model[1].training
    model.train()
    assert model[0].told == 4
    assert "train" not in vars(model)


def test_a_compiled_model_keeps_its_own_mode_too():
    model = torch.compile(nn.Sequential(Counting(1, 1)), backend="eager")
    with in_training_mode(model):
        model.train()
    model.eval()
    assert not model._orig_mod.training
    assert model._orig_mod[0].told == 2
