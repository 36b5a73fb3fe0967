"""What a planner reached on some steps, as `flexseq compare` prints it and a report shows it."""

from dataclasses import dataclass

from hf_flexseq.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a planner reached on average over all steps, or why it did not."""

    name: str
    closed_s: float = 0.0
    """Seconds of a step by the closed form."""
    gap: float = 0.0
    """How far `closed_s` lies above the lower bound, as a share of the bound."""
    simulated_s: float = 0.0
    """Seconds of a step as simulated."""
    transfers: float = 0.0
    """Share of the simulated time in which ranks only send and receive."""
    idle: float = 0.0
    """Share of the simulated time in which ranks wait for each other."""
    peak_bytes: int = 0
    """The most bytes that any rank holds in any step."""
    micro_batches: float = 0.0
    """Micro-batches of a step."""
    planning_s: float = 0.0
    """Seconds that planning a step took."""
    plans: tuple[Plan, ...] = ()
    """The plan of each step."""
    problem: str | None = None
    """Why the planner has no figures; None when it has."""
