"""Options of hf_flexseq as another tool hands them on: a block of its file, or keywords."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hf_flexseq.base.values import did_you_mean, quoted
from hf_flexseq.config import FlexSeqArguments, refuse_removed


def options_in(given: Mapping[str, Any] | None, tool: str) -> FlexSeqArguments:
    """Return the options with these values. Raises ValueError for unknown names and for a
    pipeline, and as `FlexSeqArguments` does.

    given: None for no value. tool: name of the tool, which loads the model itself.
    """
    given = given or {}
    known = [one.name for one in fields(FlexSeqArguments)]
    for name in map(str, given):
        if name not in known:
            refuse_removed(name)
            raise ValueError(f"flexseq has no option {quoted(name)}{did_you_mean(name, known)}")
    options = FlexSeqArguments(**given)
    stages = options.pipeline_parallel_size
    if stages > 1:
        raise ValueError(
            f"flexseq: pipeline_parallel_size={stages}: {tool} loads the whole model on every "
            "rank; leave it out"
        )
    return options
