"""What a `HostStore` holds."""


def used_bytes(store):
    """Bytes of the tensors that are on the host."""
    store._collect()
    return store._used_bytes


def held_bytes(store):
    """Bytes of the host's memory that are held for tensors; pinned, for a GPU."""
    return store._pages.held_bytes


def leaving(store):
    """Number of tensors whose memory on the device is not free yet."""
    return len(store._leaving)
