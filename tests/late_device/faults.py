"""Faults to plant in the package's code, by kind: each changes one place, and breaks a rule that
only a GPU would punish.

A fault is a run and a function that plants. Places are functions of the package, or the strategies
whose programs go through one.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hf_flexseq.attention import bound, uploads
from hf_flexseq.attention.replay import Replay
from hf_flexseq.kernels import segments
from hf_flexseq.kernels.fused import TorchFused
from hf_flexseq.kernels.scans import grid
from hf_flexseq.steps import inputs, nonfinite, stopwatch
from tests.late_device import lanes, scenarios

STRATEGIES = tuple(scenarios.MICRO_BATCHES)
CUDA = torch.device("cuda")


class Fault(NamedTuple):
    """A fault at one place."""

    place: str
    run: Callable[[], None]
    plant: Callable[[Any], None]
    """Plants the fault by a `MonkeyPatch`."""

    waits: bool = False
    """Whether a host that waits is the fault's own doing, and so no finding."""


def layers(name):
    """A run of attention layers with a strategy."""
    return lambda: scenarios.run_layers(name)


def wrapped(owner, attribute, change):
    """Plant change(original function) at a place."""

    def plant(patch):
        patch.setattr(owner, attribute, change(getattr(owner, attribute)))

    return plant


# ---- uploads: tensors of the host that are brought to the device

UPLOADS = {
    "attention/uploads.py": (uploads, layers("zigzag")),
    "attention/uploads.py, packed heads": (uploads, layers("ulysses")),
    "kernels/segments.py": (segments, scenarios.run_kernel),
    "steps/inputs.py": (inputs, scenarios.run_inputs),
    "kernels/scans/grid.py": (grid, scenarios.run_scan),
}


def uploading(upload, **options):
    """A fault in which another function brings tensors to the device, at every place."""
    faults = []
    for place, (module, run) in UPLOADS.items():
        plant = wrapped(module, "to_device", lambda original: upload)
        faults.append(Fault(place, run, plant, **options))
    return faults


def left_on_the_host(host, device):
    return host


def not_pinned(host, device):
    return host.to(device, non_blocking=True)


def with_a_buffer_used_again(host, device):
    """Copy from pinned memory that is cleared for the next copy, without a wait for this one."""
    pinned = host.pin_memory()
    on_device = pinned.to(device, non_blocking=True)
    pinned.zero_()
    return on_device


def on_a_stream_of_its_own(host, device):
    """Copy on another stream, which nobody waits for."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return host.pin_memory().to(device, non_blocking=True)


# ---- transfers: what programs post, and wait for


def in_programs(owner, attribute, change, **options):
    """A fault in what all programs go through, once for every strategy."""
    plant = wrapped(owner, attribute, change)
    return [Fault(f"a program of {name}", layers(name), plant, **options) for name in STRATEGIES]


def wait_on_another_stream(wait):
    def changed(self, number):
        with torch.cuda.stream(torch.cuda.Stream()):
            wait(self, number)

    return changed


def wait_later(init):
    """Every wait stands three instructions later than it should."""

    def changed(self, *args, **options):
        init(self, *args, **options)
        steps = []
        waits = []  # (wait, number of steps until its place)
        for step in self.steps:
            if step.operation is Replay.wait:
                waits.append([step, 3])
                continue
            steps.append(step)
            for wait in waits:
                wait[1] -= 1
            steps += [wait for wait, left in waits if not left]
            waits = [wait for wait in waits if wait[1]]
        self.steps = [*steps, *(wait for wait, _ in waits)]

    return changed


def free_what_is_sent(init):
    """What is sent is freed when it is posted, not when the transfer was awaited."""

    def changed(self, *args, **options):
        init(self, *args, **options)
        kept = {*self.outputs, *self.saved}
        last = {}  # place of the last step that reads a value
        for at, step in enumerate(self.steps):
            last |= dict.fromkeys(step.ins, at)
        for at, step in enumerate(self.steps):
            if step.operation in (Replay.post, Replay.all_to_all):
                freed = {value for value in step.ins if last[value] == at} - kept
                self.steps[at] = step._replace(frees=(*{*step.frees, *freed},))

    return changed


def change_what_is_sent(post):
    def changed(self, *tensors_and_post):
        *tensors, spec = tensors_and_post
        made = post(self, *tensors_and_post)
        for _, sends, _ in spec.lanes:
            for index, _, _ in sends:
                tensors[index].mul_(1)
        return made

    return changed


def change_what_an_all_to_all_sends(exchange):
    def changed(self, sent, *others):
        exchange(self, sent, *others)
        sent.mul_(1)

    return changed


def forget_what_is_sent(ended):
    """The transport does not keep tensors until the transfer was awaited."""

    def changed(self):
        ended(self)
        if isinstance(self, lanes.LateTransfers):
            self.sends = []
            for recv in self.recvs:
                recv.forget()
        else:
            self.given = []
            self.by_rank = []

    return changed


def freed_too_early():
    def plant(patch):
        wrapped(bound.BoundProgram, "__init__", free_what_is_sent)(patch)
        wrapped(lanes.Late, "ended", forget_what_is_sent)(patch)

    return [Fault(f"a program of {name}", layers(name), plant) for name in STRATEGIES]


_early = threading.local()  # .event: recorded when a program began


def record_where_a_program_begins(init):
    def changed(self, *args):
        init(self, *args)
        _early.event = torch.cuda.current_stream().record_event()

    return changed


def post_with_an_early_event(begin):
    def changed(self, streams):
        begin(self, streams)
        self.posted = getattr(_early, "event", self.posted)

    return changed


def early_events():
    def plant(patch):
        wrapped(Replay, "__init__", record_where_a_program_begins)(patch)
        wrapped(lanes.Late, "begin", post_with_an_early_event)(patch)

    return [Fault(f"a post of {name}", layers(name), plant) for name in STRATEGIES]


# ---- operations of a program


def in_operations(change, places, **options):
    """A fault in single operations. places: strategy by name of the operation in `Replay`."""
    faults = []
    for name, strategy in places.items():
        plant = wrapped(Replay, name, change)
        faults.append(Fault(f"Replay.{name}", layers(strategy), plant, **options))
    return faults


READERS = {
    "take": "balanced",
    "merge": "zigzag",
    "attend": "hybrid",
    "gradients": "ulysses",
    "pack_heads": "ulysses",
}


def then_read(read):
    """Let the host read a result of an operation, or its first tensor."""

    def change(operation):
        def changed(self, *args):
            result = operation(self, *args)
            x = result[0] if isinstance(result, tuple) else result
            read(args[0] if x is None else x)
            return result

        return changed

    return change


def item(x):
    x.sum().item()


def early_copy(x):
    """Read a copy that has not arrived."""
    x.to("cpu", non_blocking=True).float().sum()


INDICES = {
    "repeat_heads": "ulysses",
    "sum_heads": "ulysses",
    "take": "zigzag",
    "add": "balanced",
    "attend": "nested",
}


def index_on_the_host(operation):
    """Give an operation its index, or the lengths of a kernel call, on the host."""

    def changed(self, *args):
        moved = []
        for x in args:
            if isinstance(x, segments.Segments):
                x.place(x.cu_seqlens_q.cpu(), x.cu_seqlens_k.cpu())
            is_index = isinstance(x, torch.Tensor) and x.dtype == torch.int64
            moved.append(x.cpu() if is_index else x)
        return operation(self, *moved)

    return changed


FUSED = {
    "merge": "zigzag",
    "add": "balanced",
    "gather": "zigzag",
    "pack": "ulysses",
    "unpack": "hybrid",
}
WRITERS = ("gather", "pack", "unpack")  # the others add to what is there


def in_fused(change, **options):
    """A fault in the operations between kernel calls."""
    faults = []
    for name, strategy in FUSED.items():
        plant = wrapped(TorchFused, name, change)
        faults.append(Fault(f"TorchFused.{name}", layers(strategy), plant, **options))
    return faults


def on_a_side_stream(*, before, after, recorded=True):
    """Run an operation on another stream. before, after: whether streams wait for each other."""

    def change(operation):
        def changed(self, *args):
            here = torch.cuda.current_stream()
            side = torch.cuda.Stream()
            if before:
                side.wait_stream(here)
            with torch.cuda.stream(side):
                operation(self, *args)
            if recorded:
                for x in _tensors(args):
                    x.record_stream(side)
            if after:
                here.wait_stream(side)

        return changed

    return change


def _tensors(x):
    if isinstance(x, tuple | list):
        return [tensor for one in x for tensor in _tensors(one)]
    return [x] if isinstance(x, torch.Tensor) else []


def not_done(operation):
    return lambda self, *args: None


def not_zeroed(zeros):
    return Replay.empty


def unwritten_memory():
    faults = [fault for fault in in_fused(not_done) if fault.place.split(".")[1] in WRITERS]
    plant = wrapped(Replay, "zeros", not_zeroed)
    for name in ("balanced", "zigzag"):
        faults.append(Fault(f"Replay.zeros in {name}", layers(name), plant))
    return faults


# ---- copies to the host


def unsettled_flags(names):
    """Read the flags of what is not finite without a wait for them."""

    def changed(self):
        self._copied = None
        return names(self)

    return changed


def flags_with_an_early_event(init):
    def changed(self, *args):
        before = torch.cuda.Event()
        before.record()
        init(self, *args)
        self._copied = before

    return changed


def seconds_without_a_wait(seconds):
    def changed(self):
        self._events = [(block, first, Ended(last)) for block, first, last in self._events]
        return seconds(self)

    return changed


class Ended:
    """An event whose `synchronize` does nothing."""

    def __init__(self, event):
        self.event_id = event.event_id
        self._event = event

    def synchronize(self):
        pass


def too_early_at_the_host():
    faults = [
        Fault(
            "steps/nonfinite.py, without a wait",
            scenarios.run_nonfinite,
            wrapped(nonfinite._Flags, "names", unsettled_flags),
        ),
        Fault(
            "steps/stopwatch.py, without a wait",
            scenarios.run_stopwatch,
            wrapped(stopwatch.Stopwatch, "seconds", seconds_without_a_wait),
        ),
    ]
    copies = {name: READERS[name] for name in ("take", "merge", "attend")}
    return faults + in_operations(then_read(early_copy), copies)


def early_event_before_flags():
    plant = wrapped(nonfinite._Flags, "__init__", flags_with_an_early_event)
    return Fault("steps/nonfinite.py", scenarios.run_nonfinite, plant)


def in_sent_tensors():
    faults = in_programs(Replay, "post", change_what_is_sent)
    faults[STRATEGIES.index("ulysses")] = Fault(
        "an all-to-all of ulysses",
        layers("ulysses"),
        wrapped(Replay, "all_to_all", change_what_an_all_to_all_sends),
    )
    return faults


KINDS = {
    "missing copy": (uploading(left_on_the_host), "wrong device|same device|not the device"),
    "wrong device": (
        in_operations(index_on_the_host, INDICES, waits=True),
        "wrong device|same device",
    ),
    "host waits for a copy": (uploading(not_pinned), "host wait"),
    "host waits in a layer": (in_operations(then_read(item), READERS), "host wait"),
    "pinned source changed early": (
        uploading(with_a_buffer_used_again),
        "pinned source changed before its copy",
    ),
    "host read before a wait": (
        too_early_at_the_host(),
        "host read before",
    ),
    "missing wait for a copy": (uploading(on_a_stream_of_its_own), "missing wait"),
    "wait on another stream": (
        in_programs(Replay, "wait", wait_on_another_stream),
        "missing wait",
    ),
    "wait too late": (
        in_programs(bound.BoundProgram, "__init__", wait_later),
        "missing wait|NaN",
    ),
    "sent tensor changed early": (in_sent_tensors(), "missing wait"),
    "event recorded too early": (
        [*early_events(), early_event_before_flags()],
        "missing wait|host read before",
    ),
    "freed too early": (freed_too_early(), "early reuse"),
    "side stream that waits for nothing": (
        in_fused(on_a_side_stream(before=False, after=True)),
        "missing wait",
    ),
    "side stream that nobody waits for": (
        in_fused(on_a_side_stream(before=True, after=False)),
        "missing wait",
    ),
    "memory that nobody has written": (unwritten_memory(), "NaN"),
}
