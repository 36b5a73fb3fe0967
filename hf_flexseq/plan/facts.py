"""Facts that a plan depends on, besides the lengths of a step's sequences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Annotated, Any, ClassVar

from hf_flexseq.base.records import Constants, Form
from hf_flexseq.base.values import whole
from hf_flexseq.plan.units import Unit

_UNITS = Form(
    read=lambda name, records: [Unit.from_record(record) for record in records],
    write=lambda units: [unit.to_record() for unit in units],
)
# More than a rank of any planner holds: such a step is infeasible, and no wrong record.
_TOKENS = Form(read=partial(whole, most=1 << 62), write=int)
# Keys of JSON objects are text.
_PAIRS = Form(read=lambda name, pairs: dict(pairs), write=lambda pairs: sorted(pairs.items()))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts(Constants):
    """Facts of a step that its planner is told."""

    what: ClassVar[str] = "the facts of a step"

    units: Annotated[Sequence[Unit], _UNITS] = ()
    """Sequences that begin alike."""
    later_pairs: Annotated[Mapping[int, int], _PAIRS] = field(default_factory=dict)
    """By id of a sequence with blocks, how many pairs of a query and a later key these have
    (`plan.blocks.later_pairs`)."""
    held_tokens: Annotated[int, _TOKENS] = 0
    """Tokens whose memory every rank needs for something else in this step, such as images."""

    def __bool__(self) -> bool:
        """Tell whether there is any."""
        return bool(self.units or any(self.later_pairs.values()) or self.held_tokens)

    @property
    def arguments(self) -> dict[str, Any]:
        """The facts by name, as `make_plan` takes them."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


NO_FACTS = StepFacts()
