"""Faults to plant in the package's code, by kind: each changes one place, and breaks a rule that
only a GPU would punish.

A fault is a run and a function that plants. Places are functions of the package, or the strategies
whose programs go through one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hf_flexseq.attention import bound_programs, uploads
from hf_flexseq.attention.replay import Replay
from hf_flexseq.kernels import segments
from hf_flexseq.kernels.fused_operations import TorchFused
from hf_flexseq.kernels.scans import grid
from hf_flexseq.memory.store import HostStore
from hf_flexseq.steps import inputs, nonfinite, stopwatch
from hf_flexseq.steps.early_encoding import EarlyEncoder, EarlyFeatures
from hf_flexseq.steps.features import StepImages
from tests.late_device import changes, lanes, scenarios

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


# ---- transfers: what programs post, and wait for


def in_programs(owner, attribute, change, **options):
    """A fault in what all programs go through, once for every strategy."""
    plant = wrapped(owner, attribute, change)
    return [Fault(f"a program of {name}", layers(name), plant, **options) for name in STRATEGIES]


def freed_too_early():
    def plant(patch):
        wrapped(bound_programs.BoundProgram, "__init__", changes.free_what_is_sent)(patch)
        wrapped(lanes.Late, "ended", changes.forget_what_is_sent)(patch)

    return [Fault(f"a program of {name}", layers(name), plant) for name in STRATEGIES]


def early_events():
    def plant(patch):
        wrapped(Replay, "__init__", changes.record_where_a_program_begins)(patch)
        wrapped(lanes.Late, "begin", changes.post_with_an_early_event)(patch)

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


INDICES = {
    "repeat_heads": "ulysses",
    "sum_heads": "ulysses",
    "take": "zigzag",
    "add": "balanced",
    "attend": "nested",
}


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


def unwritten_memory():
    faults = [
        fault for fault in in_fused(changes.not_done) if fault.place.split(".")[1] in WRITERS
    ]
    plant = wrapped(Replay, "zeros", changes.not_zeroed)
    for name in ("balanced", "zigzag"):
        faults.append(Fault(f"Replay.zeros in {name}", layers(name), plant))
    return faults


# ---- copies to the host


def too_early_at_the_host():
    faults = [
        Fault(
            "steps/nonfinite.py, without a wait",
            scenarios.run_nonfinite,
            wrapped(nonfinite._Flags, "names", changes.unsettled_flags),
        ),
        Fault(
            "steps/stopwatch.py, without a wait",
            scenarios.run_stopwatch,
            wrapped(stopwatch.Stopwatch, "seconds", changes.seconds_without_a_wait),
        ),
    ]
    copies = {name: READERS[name] for name in ("take", "merge", "attend")}
    return faults + in_operations(changes.then_read(changes.early_copy), copies)


def early_event_before_flags():
    plant = wrapped(nonfinite._Flags, "__init__", changes.flags_with_an_early_event)
    return Fault("steps/nonfinite.py", scenarios.run_nonfinite, plant)


def in_store(name, change):
    """A fault in tensors that go to the host and come back."""
    faults = []
    for run in (scenarios.run_store, scenarios.run_store_with_other_work):
        place = f"HostStore.{name} in {run.__name__}"
        faults.append(Fault(place, run, wrapped(HostStore, name, change)))
    return faults


def in_ahead(owner, name, change):
    """A fault in images that are encoded ahead."""
    place = f"steps/early_encoding.py, {owner.__name__}.{name}"
    return [Fault(place, scenarios.run_ahead, wrapped(owner, name, change))]


def in_features(*, before, after):
    """A fault in the exchanges of features and their gradients."""
    change = changes.on_a_side_stream(before=before, after=after)
    plant = wrapped(StepImages, "_exchanged", change)
    return [Fault("StepImages._exchanged", scenarios.run_images, plant)]


def in_sent_tensors():
    faults = in_programs(Replay, "post", changes.change_what_is_sent)
    faults[STRATEGIES.index("ulysses")] = Fault(
        "an all-to-all of ulysses",
        layers("ulysses"),
        wrapped(Replay, "all_to_all", changes.change_what_an_all_to_all_sends),
    )
    return faults


KINDS = {
    "missing copy": (
        uploading(changes.left_on_the_host),
        "wrong device|same device|not the device",
    ),
    "wrong device": (
        in_operations(changes.index_on_the_host, INDICES, waits=True),
        "wrong device|same device",
    ),
    "host waits for a copy": (uploading(changes.not_pinned), "host wait"),
    "host waits in a layer": (
        in_operations(changes.then_read(changes.item), READERS),
        "host wait",
    ),
    "pinned source changed early": (
        uploading(changes.with_a_buffer_used_again),
        "pinned source changed before its copy",
    ),
    "host read before a wait": (
        too_early_at_the_host(),
        "host read before",
    ),
    "missing wait for a copy": (
        uploading(changes.on_a_stream_of_its_own) + in_store("_wait_for", changes.no_wait),
        "missing wait|early reuse",
    ),
    "wait on another stream": (
        in_programs(Replay, "wait", changes.wait_on_another_stream),
        "missing wait",
    ),
    "wait too late": (
        in_programs(bound_programs.BoundProgram, "__init__", changes.wait_later),
        "missing wait|NaN",
    ),
    "sent tensor changed early": (in_sent_tensors(), "missing wait"),
    "event recorded too early": (
        [
            *early_events(),
            early_event_before_flags(),
            *in_store("_copy", changes.wait_for_the_work_before_a_copy),
        ],
        "missing wait|host read before|early reuse",
    ),
    "freed too early": (
        freed_too_early()
        + in_store("put", changes.free_what_leaves)
        + in_store("_collect", changes.arriving_is_forgotten)[1:]
        + in_ahead(EarlyFeatures, "take", changes.taken_and_freed),
        "early reuse",
    ),
    "side stream that waits for nothing": (
        in_fused(changes.on_a_side_stream(before=False, after=True))
        + in_store("_copy", changes.copy_at_once)
        + in_ahead(EarlyEncoder, "encode", changes.without_a_wait_for_weights)
        + in_features(before=False, after=True),
        "missing wait|early reuse",
    ),
    "side stream that nobody waits for": (
        in_fused(changes.on_a_side_stream(before=True, after=False))
        + in_ahead(EarlyFeatures, "take", changes.taken_without_a_wait)
        + in_features(before=True, after=False),
        "missing wait",
    ),
    "memory that nobody has written": (unwritten_memory(), "NaN"),
}
