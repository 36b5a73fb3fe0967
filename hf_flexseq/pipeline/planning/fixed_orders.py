"""1F1B and Seq1F1B: orders by the number of chunks alone, which do not adapt to a memory limit.

1f1b       whole sequences
seq1f1b    sequences in chunks (arXiv 2406.03488), also over several stages per rank
"""

from hf_flexseq.pipeline.planning.cuts import CutWork
from hf_flexseq.pipeline.planning.orders import one_forward_one_backward
from hf_flexseq.pipeline.planning.pack import chunked_units, whole_units
from hf_flexseq.pipeline.planning.units import PipelineAnswer, PipelineTask
from hf_flexseq.plan import PlanInfeasible

SEQ1F1B_CHUNKS = 4  # chunks of the longest sequence: Seq1F1B's own setting at 64K tokens


def whole_pipeline(task: PipelineTask) -> PipelineAnswer:
    """Return whole sequences in 1F1B's order. Raises PlanInfeasible if a chunk is too small."""
    longest = max(task.lengths)
    most = task.options.max_tokens
    if most is not None and longest > most:
        raise PlanInfeasible(
            f"sequence {task.lengths.index(longest)} has {longest} tokens, a chunk may have "
            f"{most}: pipeline_schedule='1f1b' does not cut it. Raise max_tokens_per_rank, or "
            "take pipeline_schedule='auto'"
        )
    units = whole_units(task.lengths)
    actions = one_forward_one_backward([len(unit) for unit in units], task.ranks)
    return PipelineAnswer(units=units, actions=actions)


def chunked_pipeline(task: PipelineTask) -> PipelineAnswer:
    """Return sequences in chunks, in Seq1F1B's order."""
    work = CutWork.of(task.cost)
    units = chunked_units(task.lengths, SEQ1F1B_CHUNKS, work, task.options.max_tokens)
    sizes = [len(unit) for unit in units]
    actions = one_forward_one_backward(sizes, task.ranks, task.stages_per_rank)
    return PipelineAnswer(units=units, actions=actions)
