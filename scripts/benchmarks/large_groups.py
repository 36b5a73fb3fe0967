"""Measured: what one rank works out for itself before it takes part in a group, up to 1,024 ranks.

    python scripts/benchmarks/large_groups.py
    python scripts/benchmarks/large_groups.py --degrees 8 64 --rounds 20 --json large.json

    schedule    its calls in a zigzag ring (`calls_of_rank`)
    gather      its messages in an all-gather (`gather_of_rank`)
    routing     its part in what is routed in that ring, of both directions of all turns
                (`ring_routings`)
    moves       its moves in a remapped micro-batch with a group for each rank (`remap_moves`)

The group has nodes of 8 ranks with a NIC each, 4,096 tokens a rank and two sequences that lie
opposite ways round, so that the ring has two lanes and every chunk a turn of its own: the most
turns there are. Beside each figure stands that of its twin, which lists the calls, hops and
transfers of all ranks, or asks each of them, up to `--twins` ranks. Milliseconds are CPU time of
the thread, the median of some rounds, with nothing left from the round before; of a twin there is
one round.
"""

import sys
import time
from collections.abc import Callable
from statistics import median

from common import argument_parser, load_average, machine, table_head, table_row, write_record
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.remap import transport
from hf_flexseq.plan.shard import Cut, cuts, make_shard, remap_moves
from hf_flexseq.schedule.attention import attention_schedule, calls_of_rank, lanes_of
from hf_flexseq.schedule.gather import gather_hops, gather_of_rank
from hf_flexseq.schedule.ring_routing import ring_routings
from hf_flexseq.schedule.rounds import ring_rounds
from hf_flexseq.schedule.routing import NicFigures, make_routing
from hf_flexseq.schedule.transfers import fetch_transfers, group_fetches, ring_fetches
from hf_flexseq.topology import Topology

NODE = 8  # ranks
RANK_TOKENS = 4096
QUERY_BYTES, KEY_BYTES = (8192,), (4096,)  # of a row: 32 heads of 128 over 8, of 16 bits
LINKS = NicFigures(
    ranks_per_node=NODE, nics_per_node=NODE, inside_s=5e-12, across_s=4e-11, transfer_s=2e-5
)
COLUMNS = ("degree", "part", "ms, p50", "worst", "twin, ms")
Work = Callable[[], object]


class Part:
    """What one rank of a group works out, and the twins that do so for all of its ranks."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self.rank = degree // 2 + 1  # neither the first nor the last of its node
        half = degree * RANK_TOKENS // 2
        self.lengths = (half + 1, half)
        self.ring = Group(ranks=tuple(range(degree)), sequences=(0, 1), strategy="zigzag")
        # a remapped micro-batch with a group for each rank, of 1 to 4,096 tokens
        locals_ = [Group(ranks=(r,), sequences=(r,), strategy="local") for r in range(degree)]
        self.uneven = MicroBatch(groups=tuple(locals_), remap=True)
        self.uneven_lengths = [1 + r * 1783 % RANK_TOKENS for r in range(degree)]
        self.topology = Topology(nodes=degree // NODE, ranks_per_node=NODE)

    def works(self) -> dict[str, tuple[Work, Work]]:
        """Return (the work of the rank, its twin) by name."""
        return {
            "schedule": (self.schedule, self.whole_schedule),
            "gather": (self.gather, self.whole_gather),
            "routing": (self.routing, self.whole_routing),
            "moves": (self.moves, self.whole_moves),
        }

    def _cuts(self, strategy: str) -> tuple[Cut, ...]:
        return cuts(strategy, self.lengths, self.degree)

    # -- of the rank

    def schedule(self) -> None:
        for lane in lanes_of(self._cuts("zigzag")):
            calls_of_rank(
                "zigzag",
                self.degree,
                self.rank,
                mirrored=lane.mirrored,
                chunk_by_chunk=lane.chunk_by_chunk,
            )

    def gather(self) -> None:
        gather_of_rank(self._cuts("allgather"), self.degree, NODE, self.rank)

    def routing(self) -> None:
        for returns in (False, True):
            ring_routings(
                self.ring,
                self.lengths,
                LINKS,
                QUERY_BYTES,
                KEY_BYTES,
                returns=returns,
                rank=self.rank,
            )

    def moves(self) -> None:
        remap_moves(self.uneven, self.uneven_lengths, self.topology, rank=self.rank)

    # -- of all ranks

    def whole_schedule(self) -> None:
        for lane in lanes_of(self._cuts("zigzag")):
            lane.schedule("zigzag", self.degree)

    def whole_gather(self) -> None:
        gather_hops(self._cuts("allgather"), self.degree, NODE)

    def whole_routing(self) -> None:
        for returns in (False, True):
            for fetches in group_fetches(self.ring, self.lengths):
                make_routing(
                    fetch_transfers(fetches, 0, QUERY_BYTES, KEY_BYTES, returns=returns), LINKS
                )

    def whole_moves(self) -> None:
        tokens = []
        for rank in range(self.degree):
            tokens.append(make_shard(self.uneven, self.uneven_lengths, rank).attention_tokens)
        transport(tokens, self.topology)


def milliseconds(work: Work) -> float:
    """Return the milliseconds of some work with nothing left from before."""
    for kept in (cuts, ring_rounds, calls_of_rank, attention_schedule, ring_fetches, make_routing):
        kept.cache_clear()
    began = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - began)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--degrees", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--twins", type=int, default=256, help="the most ranks of a twin")
    asked = parser.parse_args()
    for degree in asked.degrees:
        if degree % NODE:
            parser.error(f"--degrees {degree}: must be a multiple of {NODE}, the ranks of a node")
    print(f"large_groups.py {' '.join(sys.argv[1:])}\non {machine('numpy')}")
    print(f"load {load_average()}\n")
    print(table_head(COLUMNS))
    figures = []
    for degree in asked.degrees:
        for name, (work, twin) in Part(degree).works().items():
            times = [milliseconds(work) for _ in range(asked.rounds)]
            twin_ms = milliseconds(twin) if degree <= asked.twins else None
            figures.append({"degree": degree, "part": name, "ms": times, "twin_ms": twin_ms})
            cells = [f"{degree:,}", name, f"{median(times):.2f}", f"{max(times):.2f}"]
            cells.append("-" if twin_ms is None else f"{twin_ms:,.1f}")
            print(table_row(cells), flush=True)
    write_record(asked.json, {"parts": figures})


if __name__ == "__main__":
    main()
