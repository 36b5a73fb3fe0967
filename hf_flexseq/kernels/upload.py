"""Copy tensors from the host to a device without making the host wait.

A copy from ordinary memory waits for all the work that is queued on the device, `non_blocking` or
not; a copy from pinned memory takes its place in the queue. Every index and every batch goes this
way.
"""

import torch


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `host` [...] on `device`, where it arrives before whatever is launched there later.

    A tensor that is on the device already is returned as it is.
    """
    if host.device.type == "cpu" and device.type == "cuda":
        # torch reuses pinned memory only after the copies from it have ended.
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
