"""Options of a run: one dataclass, usable alone or mixed into `TrainingArguments`.

Invalid values and combinations are refused when the options are created, with what to change.
Checks that depend on the ranks or on the model follow when these are known.
"""

from dataclasses import dataclass, field, fields
from os import PathLike, fspath
from typing import Any, Self

from hf_flexseq.base.refusals import together
from hf_flexseq.base.registry import PIPELINE_SCHEDULES, entry_of
from hf_flexseq.base.values import MAX_RANKS, flag, number, one_of, quoted, whole
from hf_flexseq.plan import options as plan_options
from hf_flexseq.plan.options import PlanOptions

SYNCS = ("auto", *plan_options.SYNCS)
ON_NONFINITE = ("raise", "warn")
SHARED_PREFIXES = ("auto", "groups", "off")
AS_SET = "as_set"
ACTIVATION_MEMORY = ("auto", AS_SET)

# Optimizer steps that may be planned ahead: their token ids stay in memory.
LOOKAHEAD, MAX_LOOKAHEAD = 4, 1 << 16  # steps planned ahead unless the user chooses, and at most

# Options of the previous release, and removed values as `name='value'`, with their replacement. An
# entry stays for one release.
REMOVED = {
    "attention_remat": "write save_attention_output, with the same value",
    "pipeline_chunks": "leave it out; max_tokens_per_rank bounds the tokens of a chunk",
    "pipeline_virtual_stages": "write pipeline_schedule='seq1f1b-i' for two stages per rank",
    "deterministic": (
        "call torch.use_deterministic_algorithms(True) for the same bits in every run of one plan"
    ),
    "strategy='allgather'": "write strategy='zigzag', which moves fewer bytes, or 'auto'",
    "remap": "leave it out; planner='zeppelin' remaps if the cost model predicts a gain",
    "routing": "leave it out; planner='zeppelin' routes if the cost model predicts a gain",
}

# The label of a token without a target, as in transformers and torch.
IGNORE_INDEX = -100


@dataclass
class FlexSeqArguments:
    """Options of hf_flexseq, each explained by the `help` of its field.

    Creating them raises ValueError for invalid values, and NotImplementedError for unsupported
    combinations.
    """

    planner: str = field(
        default="auto",
        metadata={
            "help": (
                "Planner that forms each step's groups: `auto`, or `static` (one degree for the "
                "run). The others are published systems, for comparison; `flexsp` takes seconds "
                'and needs `pip install "hf_flexseq[planner]"`.'
            )
        },
    )
    strategy: str = field(
        default="auto",
        metadata={
            "help": (
                "Sharing of attention in a group: `auto` (the cheapest per group), `ulysses` "
                "(heads for tokens), `zigzag` (a ring with even work), `balanced` (LightSeq's "
                "ring with helpers), `hybrid` (Ulysses inside nodes, a ring across them), or "
                "`local` (sequences are never split)."
            )
        },
    )
    sp_degree: int | None = field(
        default=None,
        metadata={"help": "Ranks per sequence; needed by planner='static' and refused otherwise."},
    )
    max_tokens_per_rank: int | None = field(
        default=None,
        metadata={
            "help": (
                "Maximum tokens of one rank in a micro-batch. Default: the limit of the memory "
                "model."
            )
        },
    )
    cost_model: str = field(
        default="auto",
        metadata={
            "help": (
                "Source of predicted costs: `auto` (computed from the sizes of the model and the "
                "device, and corrected by the first steps), `estimate` (without corrections), the "
                "name of a preset, or the path of a JSON file."
            )
        },
    )
    lookahead: int | None = field(
        default=None,
        metadata={
            "help": (
                "Number of optimizer steps planned ahead of the running one; 0 plans each step "
                "when it is needed. None is 4 if the code of libraries alone makes the samples "
                "and runs between steps, else 0: samples may depend on how far training has come."
            )
        },
    )
    sync: str = field(
        default="auto",
        metadata={
            "help": (
                "Meeting of ranks: `lockstep` (all ranks run every micro-batch together: FSDP, "
                "ZeRO-2/3), `free` (ranks meet only in their groups and at the step's end: DDP, "
                "ZeRO-1), or `auto` (by the sharding in use)."
            )
        },
    )
    plan_trace: str | None = field(
        default=None,
        metadata={
            "help": (
                "Path of a JSONL file for plans and measured seconds; its directory must exist."
            )
        },
    )
    save_attention_output: bool = field(
        default=True,
        metadata={
            "help": (
                "True if checkpointed layers keep the output and log-sum-exp of attention, so "
                "that attention never runs twice. False recomputes it with the rest of the layer."
            )
        },
    )
    activation_memory: str = field(
        default="auto",
        metadata={
            "help": (
                "Activations between forward and backward: `auto` (each micro-batch may compute "
                "layers again, keep parts of them on the host, or cut MLPs into tiles, where it "
                "gains by that), or `as_set` (all do as activation checkpointing is set for the "
                "run)."
            )
        },
    )
    host_memory_gib: float | None = field(
        default=None,
        metadata={
            "help": (
                "Maximum memory of the host, in GiB, for activations of one rank; it is pinned "
                "on machines with GPUs. 0 leaves all on the device. Default: half of what is "
                "available, divided by the ranks of the machine."
            )
        },
    )
    shared_prefixes: str = field(
        default="auto",
        metadata={
            "help": (
                "Computing once what rows of a step begin with: `auto` (where that is exact and "
                "predicted to gain 5 % or more), `groups` (the same, and the samples of a prompt "
                "that GRPO or RLOO generate are kept in one step), or `off`."
            )
        },
    )
    pipeline_parallel_size: int = field(
        default=1,
        metadata={
            "help": (
                "Number of stages that the model's layers are divided into; it must divide the "
                "number of ranks."
            )
        },
    )
    pipeline_schedule: str = field(
        default="auto",
        metadata={
            "help": (
                "Order of the pipeline: `1f1b` (whole sequences), `seq1f1b` (chunks of "
                "sequences), `seq1f1b-i` (the same, interleaved: two stages on each rank, a "
                "shorter bubble for more transfers), `infinipipe` (long sequences in chunks, "
                "short ones packed), or `auto`."
            )
        },
    )
    on_nonfinite: str = field(
        default="raise",
        metadata={
            "help": (
                "Reaction to NaN or infinity in a loss or a gradient: `raise` ends training one "
                "optimizer step later, on all ranks and before anything is saved; `warn` logs it "
                "and continues. Steps that fp16's loss scaling skips do not count."
            )
        },
    )

    def __new__(cls, *given: object, **named: object) -> Self:
        """Raise ValueError for removed options: each subclass gets a new `__init__`."""
        for name in named:
            refuse_removed(name)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("planner", "strategy"):
            refuse_removed(f"{name}={getattr(self, name)!r}")
        memory, ahead = self.host_memory_gib, self.lookahead
        together(
            lambda: one_of("sync", self.sync, SYNCS),
            self.plan_options,
            lambda: one_of("on_nonfinite", self.on_nonfinite, ON_NONFINITE),
            lambda: one_of("shared_prefixes", self.shared_prefixes, SHARED_PREFIXES),
            lambda: one_of("activation_memory", self.activation_memory, ACTIVATION_MEMORY),
            lambda: memory is None or number("host_memory_gib", memory),
            lambda: ahead is None or whole("lookahead", ahead, least=0, most=MAX_LOOKAHEAD),
            lambda: flag("save_attention_output", self.save_attention_output),
            self._check_pipeline,
        )
        advice = "give `auto`, `estimate`, a preset's name or a path"
        self.cost_model = _path("cost_model", self.cost_model, advice)
        if self.plan_trace is not None:
            self.plan_trace = _path("plan_trace", self.plan_trace, "give a path")
        # A mixin (TrainingArguments) has checks of its own.
        following: Any = getattr(super(), "__post_init__", None)
        if following is not None:
            following()

    def plan_options(self, sync: str = "lockstep") -> PlanOptions:
        """Return the options of planning. Raises ValueError for contradicting options.

        sync: "lockstep" or "free". `self.sync` may be "auto", which depends on the sharding.
        """
        return PlanOptions(
            planner=self.planner,
            strategy=self.strategy,
            sp_degree=self.sp_degree,
            max_tokens_per_rank=self.max_tokens_per_rank,
            sync=sync,
        )

    @property
    def stages_per_rank(self) -> int:
        """Number of stages per rank of a pipeline."""
        return PIPELINE_SCHEDULES[self.pipeline_schedule].stages_per_rank

    def _check_pipeline(self) -> None:
        """Raise ValueError for pipeline options that do not fit together."""
        whole("pipeline_parallel_size", self.pipeline_parallel_size, least=1, most=MAX_RANKS)
        entry_of("pipeline_schedule", self.pipeline_schedule, PIPELINE_SCHEDULES)
        if self.pipeline_parallel_size == 1 and self.pipeline_schedule != "auto":
            raise ValueError(
                f"pipeline_schedule={self.pipeline_schedule!r} needs a pipeline: set "
                "pipeline_parallel_size to 2 or more"
            )
        if self.pipeline_parallel_size > 1 and self.host_memory_gib is not None:
            raise ValueError(
                f"host_memory_gib={self.host_memory_gib}: the stages of a pipeline keep nothing "
                "on the host; leave it out, or set pipeline_parallel_size=1"
            )


def refuse_removed(option: str) -> None:
    """Raise ValueError with the replacement if `option` is in `REMOVED`."""
    if option in REMOVED:
        raise ValueError(f"{option} was removed: {REMOVED[option]}")


def arguments_on(args: Any) -> FlexSeqArguments:
    """Return the options of training arguments. Raises ValueError if they have none."""
    names = [option.name for option in fields(FlexSeqArguments)]
    if not all(hasattr(args, name) for name in names):
        raise ValueError(
            f"{type(args).__name__} has no hf_flexseq options: "
            "pass a FlexSeqConfig, or flexseq_args=FlexSeqArguments(...)"
        )
    return FlexSeqArguments(**{name: getattr(args, name) for name in names})


def _path(name: str, value: object, advice: str) -> str:
    """Return a path as text. Raises ValueError, which ends with `advice`, for other values."""
    if not isinstance(value, str | PathLike) or not str(value):
        raise ValueError(f"{name}={quoted(value)}: {advice}")
    return fspath(value)
