"""Plays the programs of all ranks without tensors, and says whether they come to their end.

1. A rank goes on until it waits. What it posts stands in one queue of its own: a post is carried
   out when all before it are over, which is the strictest transport there is.
2. A message passes when the posts on both of its ends stand first in the queues of their ranks. It
   must be there on both ends, with the same tag and bytes.
3. Nobody reads what is still on its way to it, or writes to what is on its way from it: be it the
   value itself, or another one in the same memory (`memory.py`).
4. Nobody reads a value before it is made.

Programs that pass end on every transport, in whatever order messages arrive. `test_check.py` plays
random plans, and groups of 32 ranks; tests/attention runs them.
"""

from collections import deque
from typing import NamedTuple

from tests.program.memory import VIEWS, places_of
from tests.program.rank_programs import TRANSFERS, messages_of

# Operations that write to some of the values that they read: how many of them, the first ones.
WRITES = {
    "put": 1,
    "add": 1,
    "accumulate": 1,
    "merge": 2,
    "sink": 2,
    "sink_gradient": 1,
}


class ProgramError(ValueError):
    """Says which rank of which program does something that cannot work."""


class _Message(NamedTuple):
    """One end of a message."""

    source: int
    target: int
    tag: int
    nbytes: int


class _Post(NamedTuple):
    """A post under way on a rank."""

    number: int
    left: set[_Message]  # that have not passed


def check(programs, shape):
    """Raise ProgramError unless the programs of one direction, by rank, come to their end.

    shape: of the layer that they are compiled for.
    """
    players = {rank: _Player(rank, program, shape) for rank, program in programs.items()}
    moved = True
    while moved:
        moved = False
        for player in players.values():
            moved |= player.go_on()
        for player in players.values():
            moved |= _pass_messages(player, players)
    for player in players.values():
        player.check_ended()


def _pass_messages(player, players):
    """Let the messages of a rank's first post pass whose other end stands first, too. Return
    whether any does."""
    if not player.queue:
        return False
    post = player.queue[0]
    passed = False
    for message in sorted(post.left):
        peer = message.target if message.source == player.rank else message.source
        if peer not in players:
            raise ProgramError(f"rank {player.rank} exchanges with rank {peer}, which has nothing")
        other = players[peer]
        if other.queue and message in other.queue[0].left:
            post.left.discard(message)
            other.queue[0].left.discard(message)
            other.drop_over()
            passed = True
    player.drop_over()
    return passed


class _Player:
    """One rank on its way through its program."""

    def __init__(self, rank, program, shape):
        self.rank = rank
        self.queue = deque()  # posts that are not over
        self._program = program
        self._shape = shape
        self._next = 0  # instruction
        self._over = set()  # posts that are over, and not yet waited for
        self._places = places_of(program)
        self._made = {value.number for value in program.inputs}
        self._arriving = {}  # by post: places of what is received
        self._leaving = {}  # and of what is sent

    def go_on(self):
        """Carry out instructions up to a wait for what is not over. Return whether there were
        any."""
        began = self._next
        while self._next < len(self._program.instructions):
            one = self._program.instructions[self._next]
            if one.operation == "wait":
                (number,) = one.constants
                if any(post.number == number for post in self.queue):
                    break
                if number not in self._over:
                    raise ProgramError(f"rank {self.rank} waits for {number}, has not posted it")
                self._over.discard(number)
                del self._arriving[number]
                del self._leaving[number]
            else:
                if not self._made.issuperset(one.ins):
                    raise ProgramError(f"rank {self.rank} reads what does not exist yet: {one}")
                self._made.update(one.outs)
                if one.operation in TRANSFERS:
                    self._start(one)
                elif one.operation not in VIEWS:
                    self._check(one, one.ins, one.ins[: WRITES.get(one.operation, 0)])
            self._next += 1
        return self._next > began

    def drop_over(self):
        """Take the first posts that are over from the queue."""
        while self.queue and not self.queue[0].left:
            self._over.add(self.queue.popleft().number)

    def check_ended(self):
        """Raise ProgramError unless all is done, and all posts were waited for."""
        if self._next < len(self._program.instructions):
            waiting = sorted(self.queue[0].left)[0] if self.queue else None
            raise ProgramError(
                f"rank {self.rank} cannot go on at instruction {self._next}: {waiting} "
                "never passes"
            )
        if self._arriving:
            raise ProgramError(f"rank {self.rank} never waits for posts {sorted(self._arriving)}")

    def _check(self, one, read, written):
        """Raise ProgramError where something is arriving in values that an instruction reads, or
        leaving those that it writes to."""
        if self._overlap(read, self._arriving):
            raise ProgramError(f"rank {self.rank} reads before it waits: {one}")
        if self._overlap(written, self._leaving):
            raise ProgramError(f"rank {self.rank} writes to what is being sent: {one}")

    def _overlap(self, values, under_way):
        places = [place for of_post in under_way.values() for place in of_post]
        return any(self._places[value].overlaps(place) for place in places for value in values)

    def _start(self, one):
        """Begin a post or an all-to-all."""
        number, spec, *_ = one.constants
        if one.operation == "post":
            sent = [message.value for message in spec.sends]
            received = [message.value for message in spec.recvs]
        else:
            sent, received = one.ins[:1], one.ins[1:2]
        # What is received must not be on its way here already, nor be sent by this very post.
        self._leaving[number] = [self._places[value] for value in sent]
        self._check(one, (*sent, *received), received)
        self._arriving[number] = [self._places[value] for value in received]
        messages = set()
        for is_sent, peer, *tag_and_bytes in messages_of(one, self._program, self._shape):
            ends = (self.rank, peer) if is_sent else (peer, self.rank)
            messages.add(_Message(*ends, *tag_and_bytes))
        self.queue.append(_Post(number, messages))
        self.drop_over()
