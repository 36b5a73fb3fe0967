"""The message of a rank that runs out of memory: the tokens that it held, and options to set.

`step_memory.py` goes on from there where it may.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate.utils.memory import should_reduce_batch_size

from hf_flexseq.config import AS_SET, FlexSeqArguments
from hf_flexseq.cost.choices import token_bytes
from hf_flexseq.hf.engine.model_planning import ModelPlanning
from hf_flexseq.steps.micro_batches import RankMicroBatches
from hf_flexseq.steps.prefetch import Step

CAP = "max_tokens_per_rank"

# Of what the fullest rank held: accelerate lowers batch sizes by as much.
SHARE = 0.9


def is_out_of_memory(error: RuntimeError) -> bool:
    """Tell if an error says that a device, or the CPU, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)


@dataclass(frozen=True, kw_only=True, slots=True)
class RanOut:
    """A micro-batch in which this rank ran out of memory."""

    what: str
    """Rank, micro-batch and step, with the tokens that it held and the memory that its plan had
    counted, in words."""
    cap: int
    """Tokens of a rank that plans allowed, activations being as set for the run."""
    lowered: int
    """The cap to go on with; 0 if nothing is left of it."""

    @classmethod
    def of(cls, planning: ModelPlanning | None, step: Step | None) -> "RanOut | None":
        """Return the micro-batch that this rank was running; None outside of micro-batches.
        planning: of the model; None before it is attached."""
        if not isinstance(step, RankMicroBatches) or step.current is None or planning is None:
            return None
        communicator = planning.setup.communicator
        cost = planning.cost_of(None)
        micro_batch = step.plan.micro_batches[step.current]
        # bytes of a token, relative to those as set for the run
        size = token_bytes(cost, micro_batch.memory) / cost.token_bytes
        by_rank = micro_batch.tokens_per_rank(step.plan.lengths, communicator.world_size)
        tokens = by_rank[communicator.rank]
        # tokens as set for the run whose memory the fullest rank took, and may take
        fullest = max(by_rank) * size
        beside = step.drawn.facts.held_tokens
        free_bytes = cost.free_bytes(communicator.world_size)
        cap = planning.max_tokens_per_rank
        if cap is None:  # the memory model counts what is held beside
            cap = max(0, int(free_bytes // cost.token_bytes))
            fullest += beside
        planned = cost.budget_bytes - free_bytes + (tokens * size + beside) * cost.token_bytes
        choice = "" if micro_batch.memory is None else f" ({micro_batch.memory})"
        return cls(
            what=f"rank {communicator.rank} ran out of memory in micro-batch {step.current + 1} "
            f"of {len(step.plan.micro_batches)} of step {step.number}, with {tokens:,} "
            f"tokens{choice}: {planned / 2**30:.2f} of {cost.budget_bytes / 2**30:.2f} GiB were "
            "planned, model states included",
            cap=cap,
            lowered=int(SHARE * fullest),
        )

    def advice(self, args: FlexSeqArguments) -> str:
        """Return options that the user may set, in words."""
        levers = []
        if self.lowered:
            levers.append(f"{CAP}={self.lowered}")
        if args.activation_memory == AS_SET:
            levers.append("activation_memory='auto'")
        if args.sp_degree is not None:
            levers.append(f"sp_degree above {args.sp_degree}")
        levers.append("activation checkpointing")
        return (
            f"set {', or '.join(levers)}; a Trainer lowers the cap by itself with "
            "auto_find_batch_size=True (docs/memory.md)"
        )


@contextmanager
def noted(planning: ModelPlanning, step: Step) -> Iterator[None]:
    """Add a note to an error about memory inside the block: the tokens held, and options to
    set."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            add_note(error, planning, step)
        raise


def add_note(error: RuntimeError, planning: ModelPlanning | None, step: Step | None) -> None:
    """Add a note to an error: the tokens that this rank held, and options to set, if it ran a
    micro-batch."""
    ran_out = RanOut.of(planning, step)
    if ran_out is not None and planning is not None:
        error.add_note(f"{ran_out.what}; {ran_out.advice(planning.setup.args)}")
