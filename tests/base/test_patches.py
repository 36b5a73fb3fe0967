"""Patches of an object's attributes, and what is left of them."""

from hf_flexseq.base.patches import Patch


class Owner:
    of_class = 1


def test_a_patch_is_undone_unless_somebody_has_put_something_else_there():
    owner = Owner()
    owner.own = 2
    with Patch(owner, of_class=10, own=20, new=30):
        assert (owner.of_class, owner.own, owner.new) == (10, 20, 30)
    assert vars(owner) == {"own": 2}
    with Patch(owner, own=20, new=None):
        owner.own = 3
        del owner.new
    assert vars(owner) == {"own": 3}
