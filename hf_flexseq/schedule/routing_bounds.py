"""Seconds that no paths of an exchange undercut, so that most need not be looked for.

Both bounds follow from `routing.py`: a NIC carries the level at least, and bytes that the busiest
NIC does not carry take a leg inside its node, in a round of its own.
"""

from hf_flexseq.schedule.routing import MOST_PACKETS, NicFigures, worth_it

ROUNDING = 1 - 1e-9  # of seconds that `routing.py` sums in another order


def may_gain(busiest: int, level: int, links: NicFigures) -> bool:
    """Return whether paths could be worth it, whatever they are: False is sure, True is not.

    busiest: bytes of the busiest NIC, or more. level: bytes of the level, or less. No paths carry
    less than the level over some NIC; and those that are not straight take a round more, for a
    leg inside a node.
    """
    direct_s = busiest * links.across_s + links.transfer_s
    least_s = level * links.across_s + 2 * links.transfer_s
    return worth_it(least_s * ROUNDING, direct_s)


def least_seconds(sent: int, received: int, level: int, links: NicFigures) -> float:
    """Return seconds that no paths undercut, other than all straight ones.

    sent, received: bytes of the NICs that send, and receive, most if all goes straight. level:
    bytes, see the module's step 1.

    Where NICs carry `cross` bytes at most, what the busiest had above that takes a leg inside its
    node, and with it a round. Less across is always less in all, since a byte takes twice as long
    between nodes at least; unless one leg more is needed for it.
    """
    ranks_per_nic = -(-links.ranks_per_node // links.nics_per_node)
    found = []
    for cross in (level, max(level, min(sent, received))):
        legs = []
        for nbytes in (sent, received):
            if nbytes > cross:
                legs.append((nbytes - cross) / ranks_per_nic * links.inside_s)
        for packets in range(1, MOST_PACKETS + 1):
            rounds = packets + len(legs)
            seconds = cross * links.across_s + sum(legs) / packets + rounds * links.transfer_s
            found.append(seconds)
    return min(found)
