"""A rank's activations between forward and backward: how many, where, and in which pieces.

store.py     tensors that leave the device behind the forward and come back before the backward
pages.py     memory of the host for them, in pages of one size, under a budget
machine.py   how much memory the machine has for this
tiles.py     MLPs in tiles of tokens
device.py    the figures of a device, and the memory that it has
live_bytes.py, layer_watch.py   count the bytes that layers keep, on tensors without memory
"""
