"""Peaks of a device's memory, read from a device that is made up."""

from hf_flexseq.cost.peak import Peak
from hf_flexseq.steps.peaks import Peaks


class Device:
    """Counts what is allocated, as CUDA's allocator does."""

    def __init__(self):
        self.allocated = self.most = 0

    def allocate(self, size):
        self.allocated += size
        self.most = max(self.most, self.allocated)

    def read(self):
        return self.allocated, self.most


def test_blocks_that_set_a_new_peak_are_noted_with_what_was_there_before():
    device = Device()
    device.allocate(100)
    peaks = Peaks(device.read)
    for block, held, left in ((4, 50, 7), (5, 20, 0), (6, 60, 0)):
        with peaks.watching(block):
            device.allocate(held)
            device.allocate(left - held)
    assert peaks.found == {4: Peak(100, 150, 107), 6: Peak(107, 167, 107)}
