"""The cost of a whole model on its ranks, and the planners that know it.

EngineSetup      the parts of an engine before it has seen a model
ModelPlanning    the cost model, the tokens that memory leaves room for, FSDP2's figures
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from accelerate import Accelerator
from transformers import PreTrainedModel

from hf_flexseq.base.registry import PLANNERS, object_of
from hf_flexseq.base.topology import Topology
from hf_flexseq.config import AS_SET, LOOKAHEAD, FlexSeqArguments
from hf_flexseq.cost import CostModel, FloatArray, step_ns
from hf_flexseq.cost.choices import held_at_most
from hf_flexseq.cost.correction import TOWER, MeasuredStep, meeting_seconds
from hf_flexseq.cost.lengths import with_shares
from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.engine.cost_choice import CostSubject, with_host_bytes
from hf_flexseq.hf.engine.cost_source import CostSource
from hf_flexseq.hf.engine.sharding import FsdpPolicies, fsdp_figures
from hf_flexseq.hf.model.facts import compute_dtype, layer_calls
from hf_flexseq.hf.model.layer_memory import LayerMemory
from hf_flexseq.hf.model.sharding import reduces_each_batch
from hf_flexseq.hf.model.tiles import priced_for
from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.kinds import choose_kernels
from hf_flexseq.memory.machine import budget_bytes
from hf_flexseq.plan import Plan
from hf_flexseq.plan import check as check_plan
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner.blocks import exchange_degrees
from hf_flexseq.planner.process.jobs import GroupsJob
from hf_flexseq.program.passes import PlanPasses
from hf_flexseq.program.tags import HEAD_PIECES
from hf_flexseq.steps.learned_cost import corrected_cost
from hf_flexseq.steps.micro_batches import RankMicroBatches
from hf_flexseq.steps.trace import Learned


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSetup:
    """The parts of an engine before it has seen a model."""

    accelerator: Accelerator
    args: FlexSeqArguments
    communicator: Communicator

    costs: CostSource
    """Source of the cost model."""

    def host_bytes(self) -> int:
        """Return the most bytes of the host for activations of this rank, by the memory that the
        machine has now. Raises ValueError if the user asks for more than it has at all."""
        return budget_bytes(self.args.host_memory_gib, self.communicator.topology.ranks_per_node)

    def kernel_for(
        self, model: PreTrainedModel, degrees: Iterable[int], *, whose: str = ""
    ) -> Kernel:
        """Return a kernel for all attention layers of a model. Raises ValueError, on all ranks,
        without one. Collective over the world.

        degrees: numbers of ranks that may share heads. whose: words for the error.
        """
        pieces = {1: 1}
        for degree in degrees:
            spans_nodes = self.communicator.topology.spans_nodes(0, degree)
            pieces[degree] = HEAD_PIECES if spans_nodes else 1
        with ErrorCapture() as choosing:
            dtype = compute_dtype(model, self.accelerator)
            layers = layer_calls(model.config, pieces)
            kernel = choose_kernels(self.accelerator.device, dtype, layers)
        choosing.raise_on_all_ranks(
            self.communicator.cpu_group.gather_values, f"choosing the attention kernel{whose}"
        )
        return kernel


Factors = tuple[float, ...] | None  # of the estimate's terms; None for the estimate itself


class ModelPlanning:
    """The cost of a whole model, and the jobs of its planners.

    cost: of the model. degrees: numbers of ranks that may share heads. passes: None if the planner
    has none. fsdp: FSDP2's policies.
    """

    def __init__(
        self,
        setup: EngineSetup,
        base: PreTrainedModel,
        layers: LayerMemory,
        *,
        host_memory_bytes: int,
        reason_as_set: str | None,
        lockstep: bool,
        lowered: int | None,
    ) -> None:
        """Find what `base` costs, and make the groups that exchange heads by a collective where
        they are faster. Collective over the world.

        layers: which obey a plan's choice for memory. host_memory_bytes: for activations of a
        rank. reason_as_set: why the trainer keeps plans from choosing where these are; None if it
        does not. lockstep: whether all ranks run each micro-batch together. lowered: the cap of
        `FlexSeqEngine.lower_cap`; None without.
        Raises ValueError for a strategy that the cost model has no figures for, and if the model's
        state alone is too large.
        """
        args = setup.args
        communicator = setup.communicator
        self.setup = setup
        self.lockstep = lockstep
        """True if all ranks run each micro-batch together."""
        self._sync = "lockstep" if lockstep else "free"
        self._base: PreTrainedModel | None = base  # until it is detached
        self._reason_of_model = reason_as_set or layers.reason_without_choices
        self._lowered = lowered
        self._costs = costs = setup.costs
        subject = CostSubject(
            base,
            setup.accelerator,
            communicator.topology,
            save_attention_output=args.save_attention_output,
            as_set=layers.as_set,
            host_bytes=host_memory_bytes,
        )
        cost = costs.find(subject)
        if args.host_memory_gib is not None:
            cost = with_host_bytes(cost, host_memory_bytes)
        self.cost = cost = self._lowered_cost(cost)
        cost.strategies(args.strategy)  # raises for one that it has no figures for
        self.degrees = exchange_degrees(
            cost, communicator.topology, strategy=args.strategy, sp_degree=args.sp_degree
        )
        communicator.open_fast_blocks(self.degrees)
        self.passes: PlanPasses | None = None
        dotted = PLANNERS[args.planner].passes
        if dotted is not None:
            self.passes = object_of(dotted)(cost, communicator.topology, lockstep=lockstep)
        if args.max_tokens_per_rank is None:
            cost.max_tokens_per_rank(communicator.world_size)  # raises where nothing is left
        self.fsdp = FsdpPolicies(
            fsdp_figures(base, setup.accelerator, communicator, cost),
            communicator,
            over_replicas=reduces_each_batch(setup.accelerator),
        )

    def forget_model(self) -> None:
        """Drop the model; its cost stays known."""
        self._base = None

    # ---- memory

    def _lowered_cost(self, cost: CostModel) -> CostModel:
        """Return a cost model whose memory is lowered with the cap, unless the user has set one
        in tokens."""
        if self._lowered is None or self.setup.args.max_tokens_per_rank is not None:
            return cost
        return held_at_most(cost, self._lowered, self.setup.communicator.world_size)

    @property
    def max_tokens_per_rank(self) -> int | None:
        """The user's cap, or the lowered one; None where memory alone bounds a micro-batch."""
        cap = self.setup.args.max_tokens_per_rank
        return cap if cap is None or self._lowered is None else min(cap, self._lowered)

    @property
    def reason_without_choices(self) -> str | None:
        """Why no plan may choose where activations are; None if it may."""
        if self.setup.args.activation_memory == AS_SET:
            return f"activation_memory={AS_SET!r}"
        plugin = getattr(self.setup.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.activation_checkpointing:
            return "activation_checkpointing of FSDP is on"
        return self._reason_of_model

    # ---- planners

    @property
    def topology(self) -> Topology:
        """The ranks."""
        return self.setup.communicator.topology

    @property
    def options(self) -> PlanOptions:
        """How to plan."""
        options = self.setup.args.plan_options(self._sync)
        return replace(options, max_tokens_per_rank=self.max_tokens_per_rank)

    def cost_of_plans(self, number: int | None) -> CostModel:
        """Return the cost model by which step `number` is planned, with the choices of plans; see
        `cost_of`."""
        cost = self._lowered_cost(self.cost_of(number))
        return cost if self.reason_without_choices is None else replace(cost, activations=None)

    def version_of(self, number: int | None) -> Factors:
        """Return the factors of the cost model by which training step `number` is planned, which
        tell the jobs of steps apart; for None the newest."""
        learned = self._costs.learned
        return learned.newest if number is None else learned.factors_of(number)

    def job_of(self, number: int | None) -> GroupsJob:
        """Return the job by which step `number` is planned; for None, as for passes in place, by
        all figures that steps have taught."""
        assert self._base is not None, "steps are planned of an attached model"
        cost = self.cost_of_plans(number)
        figures = self.fsdp.figures
        if figures is not None and self.cost.micro_batch_s:
            # the seconds of trips are part of a micro-batch's
            factor = cost.micro_batch_s / self.cost.micro_batch_s
            figures = replace(figures, trip_s=factor * figures.trip_s)
        return GroupsJob(
            topology=self.topology,
            # not earlier: FSDP wraps MLPs after `attach`, and the user may put hooks on them
            cost=priced_for(cost, self._base),
            options=self.options,
            fsdp=figures,
        )

    def check(self, plan: Plan) -> None:
        """Raise ValueError for a plan that would compute something wrong or hang."""
        check_plan(plan, self.topology, self.max_tokens_per_rank)

    # ---- what steps teach

    def cost_of(self, number: int | None) -> CostModel:
        """Return the cost model with the corrections by which step `number` is planned; for None
        with all that steps have taught."""
        return corrected_cost(self.cost, self.version_of(number))

    def learn(self, step: RankMicroBatches, by_rank: FloatArray, peak_share: float) -> Learned:
        """Learn from a training step that has run. Collective over the world.

        by_rank: [world_size, micro-batches] seconds that each rank has measured. peak_share: the
        bytes that devices have held of tokens over those that the step was planned with.
        """
        plan, newest = step.plan, self.version_of(None)
        planned_by = self.version_of(step.number)
        tower_s = 0.0
        if step.images is not None:
            tower_s = step.images.plan.seconds
        predicted_s = plan.objective_s + tower_s
        tower_s /= 1.0 if planned_by is None else planned_by[TOWER]  # by the estimate
        lengths: Sequence[int] = plan.lengths
        if plan.units or step.drawn.facts.later_pairs:
            lengths = with_shares(lengths, plan.units, step.drawn.facts.later_pairs)
        if newest is not None and newest != planned_by:
            cost = corrected_cost(self.cost, newest)
            text_ns = step_ns(cost, plan.micro_batches, lengths, self.topology, sync=self._sync)
            predicted_s = text_ns / 1e9 + newest[TOWER] * tower_s
        is_first = self.setup.communicator.rank == 0  # which alone fits and writes
        batches = plan.micro_batches
        measured = MeasuredStep(
            micro_batches=batches,
            lengths=lengths,
            sync=self._sync,
            seconds=meeting_seconds(batches, by_rank, self._sync) if is_first else [],
            tower_s=tower_s,
            is_whole=step.passes > 1,
        )
        # steps up to the lookahead are drawn while the next one runs
        lookahead = LOOKAHEAD if self.setup.args.lookahead is None else self.setup.args.lookahead
        first_step = step.number + lookahead + 2 + step.stopwatch.is_behind
        learned = self._costs.learned
        if planned_by is not None:  # relative to the estimate
            peak_share *= self.cost_of(step.number).token_bytes / self.cost.token_bytes
        learned.take(
            measured,
            self.cost,
            self.setup.communicator,
            first_step=first_step,
            held=peak_share,
        )
        return Learned(self._sync, measured.seconds, tower_s, predicted_s)
