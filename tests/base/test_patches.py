"""A patch stands on the object itself, and goes unless somebody else has put something there."""

from types import SimpleNamespace

from hf_flexseq.base.patches import Patch


class Layer:
    def forward(self):
        return "own"


def test_an_object_gets_back_what_it_had_of_its_own_and_of_its_class():
    layer = Layer()
    layer.flag = False
    with Patch(layer, forward=lambda: "ours", flag=True):
        assert layer.forward() == "ours"
        assert layer.flag
    assert layer.forward() == "own"
    assert vars(layer) == {"flag": False}


def test_what_somebody_else_has_set_since_stays():
    args = SimpleNamespace(kept=1, removed=2, emptied=3)
    with Patch(args, kept=3, removed=4, emptied=None):
        args.kept = 5
        del args.removed, args.emptied
    assert vars(args) == {"kept": 5}


def test_a_patch_that_is_forgotten_stays():
    layer = Layer()
    Patch(layer, forward=lambda: "ours").__enter__()
    assert layer.forward() == "ours"
