"""The transport between ranks that are threads of one process: it holds every rank to the rules.

What other transports allow themselves now and then, this one does always, so that a mistake shows
in the first run and not in the thousandth:

* What is received is NaN until it is waited for (the least number of an integer type).
* What is sent is compared at its wait with what it was when it was posted.
* Messages that can never match fail at once, and so does a wait that can never end. Both name both
  sides.
* A post that nobody has waited for when the ranks end is an error.

Ranks take turns: one runs until it waits for something that is not there yet, then another one
that can go on. Without a seed that is the lowest one. With a seed it is any one, and a rank may
lose its turn at every post; the same seed gives the same course of events.

    hub = ThreadHub(4, launches=Launches.ONE_QUEUE, seed=7)
    results = hub.run(function)    # function(transport) on every rank

A rank has one thread of torch's. Tensors may be on the CPU, on the meta device, or on one CUDA
device that all ranks share, each on a stream of its own. `matching.py` says which posts belong
together.
"""

import random
import sys
import threading
import traceback
from contextlib import nullcontext

import torch

from hf_flexseq.distributed.transport import Capabilities, CpuGroup, Transport, own_part, unnamed
from tests.matching import Launches, Matcher, ThreadCollective, ThreadTransfers

STUCK_S = 60.0  # seconds after which a rank that does not pass its turn on is given up
YIELDS = 0.5  # share of the posts at which a rank loses its turn, with a seed


class RankStopped(RuntimeError):
    """Ends a rank because another one has failed."""


def _always():
    return True


def _its_turn():
    return "its turn"


# ---- the ranks


class ThreadHub:
    """The ranks of one process: who runs, and what is under way between them."""

    transfers = ThreadTransfers  # classes of what is posted
    collective = ThreadCollective

    def __init__(self, world_size, *, launches=Launches.BY_LANE, seed=None, device=None):
        """launches: how posts are carried out. seed: of the course of events; None takes the
        simplest one. device: a CUDA device gives every rank a stream of its own."""
        self.world_size = world_size
        self.launches = launches
        self.matcher = Matcher(launches)
        self.device = device or torch.device("cpu")
        self._random = None if seed is None else random.Random(seed)
        self._turns = [threading.Semaphore(0) for _ in range(world_size)]
        self._ended = threading.Semaphore(0)
        self._turns_passed = 0
        self._open = {}  # posts that nobody has waited for yet, in order; the values are None
        # by rank: whether it can go on, and what it waits for; None once it has ended
        self._can_go_on = [_always] * world_size
        self._waits_for = [_its_turn] * world_size
        self._error = None
        self.meetings = Meetings(self)

    def run(self, function, *, seconds=STUCK_S):
        """Run `function(transport)` as every rank, and return the results by rank.

        Raises what the first rank raised that failed; RuntimeError for a post that nobody has
        waited for; and RuntimeError, with the place where each rank is, when one keeps its turn
        for `seconds`. Ranks that wait for each other need no clock: see `wait_until`.
        """
        results = [None] * self.world_size
        self._synchronize()  # what this thread has made is there for the streams of the ranks
        torch_threads = torch.get_num_threads()
        threads = []
        for rank in range(self.world_size):
            arguments = (ThreadTransport(self, rank), function, results)
            thread = threading.Thread(target=self._run_rank, args=arguments, daemon=True)
            thread.start()
            threads.append(thread)
        self._pass_turn()
        turns_before = -1
        while not self._ended.acquire(timeout=seconds):
            if self._turns_passed == turns_before:
                places = _places(threads)
                raise RuntimeError(f"a rank has kept its turn for {seconds:g} s\n{places}")
            turns_before = self._turns_passed
        for thread in threads:
            thread.join()
        torch.set_num_threads(torch_threads)
        self._synchronize()
        if self._error is not None:
            raise self._error
        if self._open:
            forgotten = "; ".join(post.describe() for post in self._open)
            raise RuntimeError(f"nobody has waited for what was posted: {forgotten}")
        return results

    def _run_rank(self, transport, function, results):
        """Run one rank in its thread, from its first turn on."""
        rank = transport.rank
        self._turns[rank].acquire()
        # Ranks share the processors. And libraries that begin threads of their own in this one
        # would leave them to processes that are forked later, which then hang.
        torch.set_num_threads(1)
        try:
            if self._error is None:
                # A backward runs on the thread that asks for it, also on CUDA.
                with torch.autograd.set_multithreading_enabled(False), self._own_stream():
                    results[rank] = function(transport)
        except RankStopped:
            pass
        except BaseException as error:  # raised again by `run`
            self._error = self._error or error
        finally:
            self._can_go_on[rank] = None
            self._pass_turn()

    def _synchronize(self):
        """Wait until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _own_stream(self):
        """Return the context of a new stream, where the device has streams."""
        if self.device.type != "cuda":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self.device))

    # ---- turns

    def wait_until(self, rank, can_go_on, waits_for):
        """Let other ranks run until `can_go_on()` of this one.

        waits_for: a function that says what for, in the error of a wait that can never end.
        """
        if not can_go_on():
            self._give_up_turn(rank, can_go_on, waits_for)

    def post(self, post):
        """Take a post of the rank whose turn it is; it may lose its turn."""
        self._open[post] = None
        self.matcher.add(post)
        if self._random is not None and self._random.random() < YIELDS:
            self._give_up_turn(post.rank, _always, _its_turn)

    def wait(self, post):
        """Let other ranks run until a post is over, and end it."""
        self.wait_until(post.rank, lambda: post.is_over, lambda: self.matcher.waits_for(post))
        post.finish()
        del self._open[post]

    def _give_up_turn(self, rank, can_go_on, waits_for):
        self._can_go_on[rank] = can_go_on
        self._waits_for[rank] = waits_for
        self._pass_turn()
        self._turns[rank].acquire()
        if self._error is not None:
            raise RankStopped(f"rank {rank} stops because another one has failed")

    def _pass_turn(self):
        """Give the turn to a rank that can go on. After a failure all go on, to their end."""
        self._turns_passed += 1
        running = [rank for rank, can_go_on in enumerate(self._can_go_on) if can_go_on is not None]
        if not running:
            self._ended.release()
            return
        ready = running
        if self._error is None:
            ready = [rank for rank in running if self._can_go_on[rank]()]
        if not ready:
            waiting = "; ".join(self._waits_for[rank]() for rank in running)
            ended = [rank for rank in range(self.world_size) if rank not in running]
            after = f", after the end of ranks {ended}" if ended else ""
            self._error = RuntimeError(f"no rank can go on{after}: {waiting}")
            ready = running
        chosen = ready[0] if self._random is None else self._random.choice(ready)
        self._turns[chosen].release()


def _places(threads):
    """Return the stacks of the ranks whose threads still run."""
    frames = sys._current_frames()
    places = []
    for rank, thread in enumerate(threads):
        if thread.is_alive() and thread.ident in frames:
            stack = "".join(traceback.format_stack(frames[thread.ident]))
            places.append(f"rank {rank} is here:\n{stack}")
    return "\n".join(places)


# ---- one rank's way to the others; methods without a docstring are those of `Transport`,
# `Pending`, `RankGroup` and `CpuGroup`


class ThreadTransport(Transport):
    """One rank's way to all others in the same process."""

    def __init__(self, hub, rank):
        self.hub = hub
        self.rank = rank
        self.world_size = hub.world_size
        self.capabilities = Capabilities(ordered=hub.launches is not Launches.BY_TAG)
        self.cpu_group = ThreadCpuGroup(self)

    def open_group(self, parts, *, exchanges=False):
        own = own_part(parts, self.rank)
        return None if own is None else ThreadGroup(self, own)

    def post(self, lane, *, sends, recvs, label=unnamed):
        post = self.hub.transfers(self.rank, lane, sends=sends, recvs=recvs, label=label)
        self.hub.post(post)
        return ThreadPending(self.hub, post)

    def post_collective(self, ranks, what, **tensors):
        """Post this rank's share in a collective. Arguments are those of `ThreadCollective`."""
        post = self.hub.collective(self.rank, ranks, what, **tensors)
        self.hub.post(post)
        return ThreadPending(self.hub, post)


class ThreadPending:
    """Something that this rank has posted."""

    __slots__ = ("_hub", "_post")

    def __init__(self, hub, post):
        self._hub = hub
        self._post = post

    def wait(self):
        post = self._post
        assert post is not None, "this was already waited for"
        self._post = None
        self._hub.wait(post)


class ThreadGroup:
    """Collectives over some ranks."""

    __slots__ = ("_transport", "ranks")

    def __init__(self, transport, ranks):
        self._transport = transport
        self.ranks = ranks

    @property
    def process_group(self):
        """Refuse: torch.distributed knows no threads."""
        raise NotImplementedError("ranks that are threads have no process group")

    def all_reduce(self, tensor):
        self._run("all_reduce", tensor, lambda inputs: [sum_of([own for (own,) in inputs])])

    def broadcast(self, tensor):
        self._run("broadcast", tensor, lambda inputs: inputs[0])

    def _run(self, name, tensor, combine):
        """Post a collective and wait for it."""
        what = f"{name} of {tensor.dtype} {list(tensor.shape)}"  # equal on all ranks
        tensors = {"inputs": [tensor], "outputs": [tensor], "combine": combine}
        self._transport.post_collective(self.ranks, what, **tensors).wait()

    def all_to_all(self, received, sent, received_counts, sent_counts, *, label=unnamed):
        index = self.ranks.index(self._transport.rank)
        return self._transport.post_collective(
            self.ranks,
            f"all_to_all of {sent.dtype}",
            inputs=sent.split(list(sent_counts)),
            outputs=received.split(list(received_counts)),
            combine=lambda inputs: [parts[index] for parts in inputs],
        )


def sum_of(tensors):
    """Added up in their order."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


# ---- values between CPUs


class ThreadCpuGroup(CpuGroup):
    """Exchanges of values between the ranks.

    Tensors are handed over as they are, so nobody may change them afterwards. No rank waits by the
    clock: the timeout is for those who wait for something else.
    """

    __slots__ = ("_transport",)

    def __init__(self, transport):
        super().__init__()
        self._transport = transport

    def gather_bytes(self, data):
        return self._gather(data)

    def exchange_rows(self, rows, sent_counts, received_counts):
        """Refuses ranks that expect other numbers of rows."""
        rank = self._transport.rank
        parts = [of_rank[rank] for of_rank in self._gather(rows.split(list(sent_counts)))]
        sent = [part.shape[0] for part in parts]
        assert sent == list(received_counts), (
            f"rank {rank} expects {list(received_counts)} rows and is sent {sent}"
        )
        return torch.cat(parts)

    def all_reduce(self, tensor):
        of_ranks = self._gather(tensor.clone())
        tensor.copy_(torch.stack(of_ranks).sum(0))  # [world, ...] -> [...]

    def _gather(self, value):
        """Return the value of every rank, by rank, as it is."""
        return self._transport.hub.meetings.gather(self._transport.rank, value)


class Meetings:
    """Values that all ranks show each other, one exchange after the other."""

    def __init__(self, hub):
        self._hub = hub
        self._next = [0] * hub.world_size  # by rank: number of its next exchange
        self._values = {}  # by exchange, by rank

    def gather(self, rank, value):
        """Return the value of every rank, by rank."""
        number = self._next[rank]
        self._next[rank] += 1
        values = self._values.setdefault(number, {})
        values[rank] = value
        self._hub.wait_until(
            rank,
            lambda: len(values) == self._hub.world_size,
            lambda: f"rank {rank} is in exchange {number} of the CPU group",
        )
        # Who comes to the exchange after the next one has read this one, as has everybody else.
        self._values.pop(number - 2, None)
        return [values[other] for other in range(self._hub.world_size)]
