"""A CUDA device that is not there: a device whose memory the host cannot touch, and whose streams
run late. It finds, on a machine without a GPU, mistakes that only a GPU would punish.

It registers the device type `cuda` in torch's CPU build. Tensors that say `cuda` lie in memory of
the host, and the CPU's kernels compute on them, at once. What is late is who may know of it:

* Every stream, every event and the host have a clock: what is over for them. A wait, and nothing
  else, joins clocks. Every two bytes of memory know which launches last read and wrote them. A
  launch that touches what another stream has written, or writes what another stream reads, without
  a wait is **a missing wait**. That holds on the first run, whatever the order of events was.
* What is freed may go to the next tensor of the stream that it was allocated on. Where another
  stream uses it still, without `record_stream` and without a wait, that is **an early reuse**.
* Asynchronous copies need pinned memory. Until the host has waited, the pages of a copy's source
  refuse writes (**a pinned source changed**) and those of its target refuse reads and writes (**a
  host read before its copy was awaited**). The target has NaN until then.
* Tensors of the host beside tensors of the device are **a wrong device**, as in CUDA.
* Whatever makes the host wait is counted, by its reason, and is an error in the mode
  `torch.cuda.set_sync_debug_mode("error")`.
* Memory that was never written holds NaN.

`torch.cuda`'s streams, events and functions are those of the device. `kernels.py` has operators
that torch has for CUDA alone, with FlashAttention's rules. `triton_kernels.py` lets Triton's
interpreter work on the device's memory, and checks every address. `lanes.py` has ranks that are
threads, whose transfers are on streams of their own, as NCCL's are; `nccl.py` has a process group
for ranks that are processes.

    python -m tests.late_device tests/late_device/on_device/rules.py     pytest on the device
    import tests.late_device.install                                     before torch

What it cannot see: races inside a kernel, and whether a kernel is right on a GPU; how long
anything takes, and what happens to overlap; NCCL itself, its deadlocks and its order between
communicators; the arithmetic of tensor cores; the end of the device's memory, and fragmentation;
CUDA graphs; several devices; what two launches of one stream do to each other. Kernels that Python
does not start on the device's own operators, such as those of flash-linear-attention, do not run.
A wait too many is not found, either, unless the host is what waits. Where the host waits, all
that came before is in order with all that comes after: what makes the host wait often hides what
else is missing, here as on a GPU.
"""
