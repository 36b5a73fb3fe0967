"""Message tags: the one table of who uses which numbers, and the functions that compute them.

A *tag* is a number that both ends give to a point-to-point transfer, so that a transport can tell
several messages between the same two ranks apart. Every tag is a function of the plan (zone, ring
step, leg, head piece), never of events on one rank, so both ends compute the same one. All tags
are below 2^31, because transports take a signed 32-bit number.

    messages of                        tags                              function
    ---------------------------------  --------------------------------  ------------------------
    attention of zone z                z * 2^17 + message                zone_tag
      ulysses, hybrid inside a node    message in [0, 8)                 seq_to_head, head_to_seq
      halos of any strategy            message in [0, 2)                 HALO_KEYS, HALO_GRADIENTS
      recurrent layers                 message in [0, 2)                 RECURRENT_FORWARD, ...
      rings, hybrid across nodes       message in [0, 2^16)              ring_fetch, ring_return
      passes over the zone's posts     message in 2^16 + [0, 2^16)       PASS_MESSAGES
    passes over a whole program        2^30 + [0, 8)                     PASS_TAGS
    links between stages               3 * 2^29 + [0, 2^29)              link_tag
    transfers while no others run      0 and up                          UNTAGGED
    roll call, on the CPU group        0                                 ROLL_CALL
    meetings, on the CPU group         1                                 MEETING
    tokens, on the CPU group           2                                 TOKENS

Why no two messages between the same two ranks are mistaken for each other:

* Zones have separate ranges, and their numbers are below 2^13, where the range of passes begins.
  Any two ranks of a group give its zone the same number (`exchange.Channel`).
* A zone has one strategy, so the rows of its part of the table exclude each other. Only a hybrid
  zone has two: its Ulysses runs between ranks of a node, its ring between nodes, so no pair of
  ranks takes part in both.
* Inside a strategy the functions below give messages of one call different tags. A pass that
  gives a zone's messages other tags has a half of the zone's range to itself, and answers for it.
* Recurrent layers exchange when attention does not; an exchange of theirs has one message from
  each rank to each other one.
* Layers, and forward and backward, repeat all tags. A rank waits for all of its transfers before
  its attention call ends, so two calls never have a transfer of one rank under way together. Where
  a peer is a call behind, messages of one tag arrive in the order in which they were sent, and
  both ends post them in one order.
* The roll call has a separate group, and runs when everything else has failed.
* Between two ranks one side sends on the link of hidden states, the other on the link of
  gradients; where two ranks are a ring, each sends on one link of either kind. The two kinds
  alternate in the numbers, and repeat them long after a message has arrived.
* On a transport without tags the order of the posts takes their place (`transport.py`).

`tests/distributed/test_tags.py` draws calls of every user and holds them to this table.
"""

TAG_LIMIT = 1 << 31  # no tag reaches this

UNTAGGED = 0  # tag of transfers that run when no others do


# ---- zones: attention over the groups of a rank

ZONE_TAGS = 1 << 17  # tags of one zone
PASS_MESSAGES = ZONE_TAGS // 2  # message from which on the tags of a zone belong to passes
MOST_ZONES = 1 << 13  # zones of one rank in a micro-batch, as many as fit below PASS_TAGS

# One exchange may bring several tensors from one peer, and each takes the next tag. The most are
# the five of a ring's backward: q, dout, out, lse and the stacked keys and values.
EXCHANGE_TAGS = 8


def zone_tag(zone: int, message: int) -> int:
    """Return the tag of a message of a zone.

    zone: number of the zone on this rank, widest first.
    message: number from one of the functions below.
    """
    assert 0 <= zone < MOST_ZONES, f"a rank has no zone {zone}"
    assert 0 <= message < ZONE_TAGS, f"a zone has no message {message}"
    return zone * ZONE_TAGS + message


# ulysses: one exchange each way for a piece of the heads

HEAD_PIECES = 4  # of a rank's heads, at most


def seq_to_head(piece: int) -> int:
    """Return the message that brings the tokens of a piece of the heads to the heads' rank."""
    assert 0 <= piece < HEAD_PIECES, f"there is no piece {piece} of the heads"
    return 2 * piece


def head_to_seq(piece: int) -> int:
    """Return the message that brings the results of a piece of the heads to the tokens' rank."""
    assert 0 <= piece < HEAD_PIECES, f"there is no piece {piece} of the heads"
    return 2 * piece + 1


# halos, of layers with a window or a chunk: one exchange each way

HALO_KEYS = 0
HALO_GRADIENTS = 1


# recurrent layers, under every strategy: one exchange at a time

RECURRENT_FORWARD = 0
RECURRENT_BACKWARD = 1


# rings: two exchanges per step


def ring_fetch(step: int) -> int:
    """Return the first message of the exchange that brings a ring step's inputs to its workers."""
    return 2 * step * EXCHANGE_TAGS


def ring_return(step: int) -> int:
    """Return the first message of the exchange that brings a ring step's results to the owners."""
    return (2 * step + 1) * EXCHANGE_TAGS


# ---- passes that add an exchange of their own to a program: one at a time

PASS_TAGS = MOST_ZONES * ZONE_TAGS  # 2^30


# ---- links of a pipeline

LINKS = 3 << 29  # 2^30 + 2^29
LINK_KINDS = 2  # hidden states, gradients

assert PASS_TAGS + ZONE_TAGS <= LINKS, "the tags of passes reach those of links"


def link_tag(kind: int, messages_before: int) -> int:
    """Return the tag of the next message of a link.

    kind: 0 for hidden states, 1 for gradients.
    messages_before: messages that the link has carried so far; both sides count them.
    """
    assert 0 <= kind < LINK_KINDS, f"there is no kind {kind} of links"
    return LINKS + (messages_before * LINK_KINDS + kind) % (TAG_LIMIT - LINKS)


# ---- after a failure

ROLL_CALL = 0

MEETING = 1  # all messages of a meeting; the next one begins when each has arrived

TOKENS = 2  # one message each way between two ranks; the next exchange sends after it
