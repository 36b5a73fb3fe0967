"""No attention layer makes the host wait for the device, forward and backward, on the device of
`tests/late_device`: every strategy, checkpointed layers, Zeppelin's passes, and the chunks of a
pipeline. `on_device/planted.py` and `rules.py` show that every way to wait is found."""

from tests.late_device.test_late_device import pytestmark, run_on_device

__all__ = ["pytestmark"]


def test_no_layer_makes_the_host_wait():
    run_on_device("layers")
