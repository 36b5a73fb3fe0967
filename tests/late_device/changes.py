"""What a planted fault makes of the function in whose place it is. Functions that bring tensors to
the device take its place as they are; each of the others takes the original."""

import collections
import threading

import torch

from hf_flexseq.attention.replay import Replay
from hf_flexseq.kernels import segments
from tests.late_device import lanes


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
            for end in (*self.sends, *self.recvs):
                end.message = None  # at once: ends and posts are a cycle, which waits to be found
                end.forget()
            self.sends = []
        else:
            self.given = []
            self.by_rank = []

    return changed


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


def index_on_the_host(operation):
    """Give an operation its index, or the lengths of a kernel call, on the host."""

    def changed(self, *args):
        moved = []
        for x in args:
            if isinstance(x, segments.Segments):
                x._cu_seqlens_q, x._cu_seqlens_k = x.cu_seqlens_q.cpu(), x.cu_seqlens_k.cpu()
            is_index = isinstance(x, torch.Tensor) and x.dtype == torch.int64
            moved.append(x.cpu() if is_index else x)
        return operation(self, *moved)

    return changed


def on_a_side_stream(*, before, after, recorded=True):
    """Run an operation on another stream. before, after: whether streams wait for each other."""

    def change(operation):
        def changed(self, *args):
            here = torch.cuda.current_stream()
            side = torch.cuda.Stream()
            if before:
                side.wait_stream(here)
            with torch.cuda.stream(side):
                result = operation(self, *args)
            if recorded:
                for x in _tensors(args):
                    x.record_stream(side)
            if after:
                here.wait_stream(side)
            return result

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


# ---- tensors that go to the host and come back


def copy_at_once(copy):
    """A copy does not wait for the tensor, or for whoever used its memory before."""

    def changed(self, *args, **options):
        stream = self._copies
        self._copies = _Impatient(stream)
        try:
            return copy(self, *args, **options)
        finally:
            self._copies = stream

    return changed


class _Impatient:
    """A stream that waits for no other one."""

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def wait_stream(self, stream):
        pass


def wait_for_the_work_before_a_copy(copy):
    """The event is recorded before the copy."""

    def changed(self, *args, **options):
        before = torch.cuda.Event()
        before.record(self._copies)
        copy(self, *args, **options)
        return before

    return changed


def free_what_leaves(put):
    """The memory of a tensor is free while it is copied."""

    def changed(self, tensor):
        stored = put(self, tensor)
        self._leaving.clear()
        return stored

    return changed


def no_wait(wait):
    return lambda self, under_way: None


def arriving_is_forgotten(collect):
    """A tensor that nobody has taken is freed while it comes."""

    def changed(self):
        self._dropped = collections.deque((pieces, None) for pieces, _ in self._dropped)
        collect(self)

    return changed


# ---- images that are encoded ahead


def taken_without_a_wait(take):
    def changed(self):
        self.rows.record_stream(torch.cuda.current_stream())
        return self.rows

    return changed


def taken_and_freed(take):
    """The memory of what was taken is freed with its last reference, though work that reads it may
    not have run yet."""

    def changed(self):
        torch.cuda.current_stream().wait_event(self.done)
        return self.rows

    return changed


def without_a_wait_for_weights(encode):
    def changed(self, run, weights, timing):
        self._weights = weights
        return encode(self, run, weights, timing)

    return changed
