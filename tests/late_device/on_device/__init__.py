"""Tests that run on the device, in a process of their own: `test_late_device.py` starts them."""
