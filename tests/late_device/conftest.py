"""Tests on the device are collected in a process that has installed it, and in no other."""

import sys

collect_ignore = [] if "tests.late_device.install" in sys.modules else ["on_device"]
