"""The options of a plan, and the rules on their combinations.

The options of a run (`config.py`) and of the commands become a `PlanOptions`, which refuses
contradictions. `check_on` refuses options that do not fit the ranks.
"""

from dataclasses import dataclass
from typing import ClassVar

from hf_flexseq.base.records import Constants
from hf_flexseq.base.refusals import together
from hf_flexseq.base.registry import PLANNERS, STRATEGIES, entry_of
from hf_flexseq.base.topology import Topology
from hf_flexseq.base.values import MAX_RANKS, MAX_TOKENS_PER_RANK, one_of, quoted, whole

SYNCS = ("lockstep", "free")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions(Constants):
    """Options of planning."""

    what: ClassVar[str] = "the options of a plan"

    planner: str = "auto"
    """Name of the planner, one of `PLANNERS`."""
    strategy: str = "auto"
    """Strategy of groups of two or more ranks, one of `STRATEGIES`; "auto" for any."""
    sp_degree: int | None = None
    """Ranks per sequence, for planner="static" only."""
    max_tokens_per_rank: int | None = None
    """Maximum tokens per rank in a micro-batch; None for the limit of the cost model's memory."""
    sync: str = "lockstep"
    """"lockstep" if all ranks run every micro-batch together, "free" if they meet in groups."""

    def __post_init__(self) -> None:
        cap, most = self.max_tokens_per_rank, MAX_TOKENS_PER_RANK
        together(
            self._check_planner,
            lambda: one_of("strategy", self.strategy, ("auto", *STRATEGIES)),
            lambda: one_of("sync", self.sync, SYNCS),
            lambda: cap is None or whole("max_tokens_per_rank", cap, least=1, most=most),
        )

    def _check_planner(self) -> None:
        """Raise ValueError for an unknown planner, or if `sp_degree` contradicts it."""
        entry_of("planner", self.planner, PLANNERS)
        if self.planner != "static":
            if self.sp_degree is not None:
                raise ValueError(
                    f"sp_degree={quoted(self.sp_degree)} needs planner='static', got "
                    f"planner={self.planner!r}: set planner='static', or leave sp_degree out"
                )
            return
        if self.sp_degree is None:
            raise ValueError("planner='static' needs sp_degree, the ranks per sequence")
        whole("sp_degree", self.sp_degree, least=1, most=MAX_RANKS)
        if self.strategy == "local" and self.sp_degree > 1:
            raise ValueError(
                f"sp_degree={self.sp_degree} does not go with strategy='local', which never "
                "splits a sequence: set sp_degree=1"
            )

    def check_on(self, topology: Topology) -> None:
        """Raise ValueError if groups of `sp_degree` ranks cannot cover `topology`."""
        if self.sp_degree is None:
            return
        degrees = topology.degrees()
        if self.sp_degree not in degrees:
            raise ValueError(
                f"sp_degree={self.sp_degree} does not divide {topology.nodes} nodes of "
                f"{topology.ranks_per_node} ranks into equal groups inside nodes or of whole "
                f"nodes: choose one of {', '.join(map(str, degrees))}"
            )

    def widest_degree(self, topology: Topology) -> int:
        """Return the maximum number of ranks per sequence."""
        if self.sp_degree is not None:
            return self.sp_degree
        if self.strategy == "local" or not PLANNERS[self.planner].splits:
            return 1
        return topology.world_size
