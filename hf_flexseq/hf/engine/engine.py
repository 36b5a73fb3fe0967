"""The engine turns a dataloader into planned steps and runs them: the one code path of the trainer
and of a plain loop.

    engine = FlexSeqEngine(accelerator, FlexSeqArguments(...))
    engine.attach(model)                                   # before accelerator.prepare
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)
    for step in engine.steps(dataloader, accumulation=4):
        loss = step.backward(model)
        optimizer.step()
        optimizer.zero_grad()
    evaluation = engine.evaluation(held_out)               # prepared as well
    for step in evaluation:
        step.forward(model)
    print(evaluation.mean_loss())
    engine.detach()

A step is drawn, planned, dispatched, run and finished (docs/architecture.md, the path of a batch).
`whole_model.py` has the parts of the attached model that steps need.
"""

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from hf_flexseq.base.patches import Patch
from hf_flexseq.base.versions import warn_untested
from hf_flexseq.config import AS_SET, LOOKAHEAD, FlexSeqArguments
from hf_flexseq.cost import CostModel
from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.connect import connect
from hf_flexseq.hf.engine.accelerator_checks import check_accelerator
from hf_flexseq.hf.engine.cost_source import CostSource, named_cost
from hf_flexseq.hf.engine.finished_steps import FinishedSteps
from hf_flexseq.hf.engine.loaders import batches_on_host
from hf_flexseq.hf.engine.lookahead import any_draws_in_place, own_code_of_data
from hf_flexseq.hf.engine.loop import Evaluation, TrainingItem
from hf_flexseq.hf.engine.model_planning import EngineSetup, ModelPlanning
from hf_flexseq.hf.engine.sum_trial import SumTrial
from hf_flexseq.hf.engine.whole_model import WholeModel
from hf_flexseq.hf.model.attachments import ModelSettings
from hf_flexseq.hf.model.facts import base_model
from hf_flexseq.hf.model.loss_kinds import check_own_loss
from hf_flexseq.hf.model.shared_prefixes import OFF
from hf_flexseq.kernels import Kernel
from hf_flexseq.plan import Plan
from hf_flexseq.planner.process.client import Planner, start_planner
from hf_flexseq.steps.console import DrawnNotes
from hf_flexseq.steps.inputs import Inputs
from hf_flexseq.steps.micro_batches import BeforeLast, RankMicroBatches
from hf_flexseq.steps.prefetch import PrefetchedSteps, Step
from hf_flexseq.steps.source_row import PlannedStep
from hf_flexseq.steps.trace import LogFigures, PlanTrace

logger = logging.getLogger(__name__)


class FlexSeqEngine:
    """Plans and runs optimizer steps of an unmodified HF model under accelerate."""

    def __init__(
        self,
        accelerator: Accelerator,
        args: FlexSeqArguments,
        *,
        communicator: Communicator | None = None,
        timeout: timedelta | None = None,
        on_figures: Callable[[int, LogFigures], None] | None = None,
        uses_trl: bool = False,
    ) -> None:
        """Connect the ranks. Collective over the world.

        Args:
            accelerator: The loop's own, before anything is prepared.
            args: The options.
            communicator: Over all ranks; None makes one.
            timeout: Of every exchange of that one; None takes the timeout of the job's group.
            on_figures: Gets the number and the figures of each step as soon as they are known.
            uses_trl: True for a trainer of TRL's, whose version has to be a tested one.

        Raises ValueError or NotImplementedError for an accelerator, a cost model, a degree or a
        plan trace that cannot work, TypeError for options of another class.
        """
        if not isinstance(args, FlexSeqArguments):
            raise TypeError(f"an engine takes FlexSeqArguments, got {type(args).__name__}")
        check_accelerator(accelerator, args)
        if accelerator.is_main_process:
            warn_untested(*([] if uses_trl else ["trl"]))
        if communicator is None:
            communicator = Communicator(transport=connect(accelerator.device, timeout=timeout))
        self.communicator = communicator
        self._on_figures = on_figures
        self._loader_settings = ExitStack()  # what `detach` undoes of accelerate's
        self.use(accelerator, args)
        self.settings = ModelSettings()
        """Settings of the models that are attached from now on."""
        self.planning: ModelPlanning | None = None
        """Planning of the model that was attached last."""
        self._whole_model: WholeModel | None = None  # between `attach` and `detach`
        self._lowered: int | None = None  # by `lower_cap`
        self._training: PrefetchedSteps | None = None
        self._in_place: dict[bool, PrefetchedSteps] = {}  # of calls: with a backward, without one
        self._draws_in_place = False  # training steps, though `lookahead` says otherwise
        self.reason_of_loss: Callable[[], str | None] = lambda: None
        """Returns why the loss keeps rows of training steps from sharing prefixes, in a few words,
        or None; asked before the first step."""
        self._notes = DrawnNotes(communicator.rank)
        self.running: Step | None = None
        """The training step that runs, or has failed."""

    def use(self, accelerator: Accelerator, args: FlexSeqArguments) -> None:
        """Run the models that are attached from now on under another accelerator and with other
        options, for a trial of `hyperparameter_search`. Collective over the world. Raises
        ValueError as the constructor does."""
        self._check_stages(args)
        communicator = self.communicator
        named = named_cost(args.cost_model, communicator)
        self.setup = setup = EngineSetup(
            accelerator=accelerator,
            args=args,
            communicator=communicator,
            costs=CostSource(args.cost_model, named, communicator),
        )
        args.plan_options().check_on(communicator.topology)
        with ErrorCapture() as looking:  # ranks may have machines of different sizes
            setup.host_bytes()
        looking.raise_on_all_ranks(
            communicator.cpu_group.gather_values, "looking at the memory of the machine"
        )
        self.accelerator = accelerator
        self.args = args
        self.kernel: Kernel | None = None
        """Kernel of the model's attention, chosen with the first step."""
        self._finished = FinishedSteps(
            accelerator,
            communicator,
            args,
            figures_of=self.figures_of,
            on_figures=self._on_figures,
        )
        self._let_every_rank_draw()  # dataloaders may be prepared before a model is attached

    def _check_stages(self, args: FlexSeqArguments) -> None:
        """Raise NotImplementedError for pipeline stages, which a Trainer alone can run."""
        stages = args.pipeline_parallel_size
        if stages > 1:
            raise NotImplementedError(
                f"pipeline_parallel_size={stages} in a loop of your own, or a trial of a search: "
                "use FlexSeqTrainer, or 1"
            )

    @property
    def cost(self) -> CostModel | None:
        """The cost of the model that was attached last, as far as its steps have taught; None
        before."""
        return None if self.planning is None else self.planning.cost_of(None)

    @property
    def last_figures(self) -> LogFigures | None:
        """Figures of the last step for which they were gathered, as `plan_line` prints them."""
        return self._finished.last_figures

    def bring_cost(self, checkpoint: str | None, record: Any) -> None:
        """Offer the cost model of the checkpoint that the run resumes from, for the next `attach`.

        Args:
            checkpoint: Its folder, which is named in the log; None without one.
            record: Result of `cost_record` when the checkpoint was written.
        """
        self.setup.costs.bring(checkpoint, record)

    def cost_record(self) -> dict[str, Any] | None:
        """Return the cost model for a checkpoint as plain JSON values; None if unknown. Steps
        correct it no more from then on, so that a resumed run has the same."""
        return self.setup.costs.to_record()

    # ---- the model

    def attach(self, model: nn.Module, *, lockstep: bool = False) -> None:
        """Make `model` run on planned steps: its attention implementation and its loss. Undone by
        `detach`. Collective over the world.

        Args:
            model: Of transformers, before it is prepared.
            lockstep: True if something outside of the engine makes all ranks run every micro-batch
                together.

        Raises NotImplementedError if the model cannot be trained exactly.
        """
        check_own_loss(base_model(model))
        self._attach(model, lockstep=lockstep)

    def _attach(self, model: nn.Module, *, lockstep: bool) -> None:
        """Attach a model whose own loss function is unused or has been checked. Collective over
        the world."""
        self._whole_model = whole_model = WholeModel(
            self.setup, model, self.settings, lockstep=lockstep, lowered=self._lowered
        )
        self.planning = whole_model.planning
        self._trial = SumTrial(lambda: model, lambda: self.whole_model)
        self._let_every_rank_draw()

    def _detach_model(self) -> None:
        """Leave the model as `_attach` found it."""
        whole_model, self._whole_model = self._whole_model, None
        if whole_model is not None:
            whole_model.detach()

    @property
    def is_attached(self) -> bool:
        """True between `attach` and `detach`."""
        return self._whole_model is not None

    @property
    def whole_model(self) -> WholeModel:
        """The attached model."""
        assert self._whole_model is not None, "attach sets the model"
        return self._whole_model

    def detach(self) -> None:
        """Restore the model and the accelerator, and end the planner, without waiting for other
        ranks: a loop that was broken off calls `check_finite` before, for its last figures."""
        try:
            self._detach_model()
        finally:
            self._loader_settings.close()
            self._finished.forget()
            self._notes = DrawnNotes(self.communicator.rank)
            self.running = None
            for steps in self._in_place.values():
                steps.close()
            self._in_place.clear()
            self._draws_in_place = False
            if self._training is not None:
                self._training.close()
                self._training = None

    @contextmanager
    def attached(self, model: nn.Module, *, lockstep: bool = False) -> Iterator[None]:
        """Surround a block by `attach` and `detach`; a no-op if a model is attached."""
        if self.is_attached:
            yield
            return
        self._attach(model, lockstep=lockstep)
        try:
            yield
        finally:
            self.detach()

    def keep_loader_settings(self) -> None:
        """Leave accelerate's dataloader settings changed on `detach`, for a Trainer's loaders."""
        self._loader_settings.pop_all()

    def _let_every_rank_draw(self) -> None:
        """Keep accelerate from dispatching batches of rank 0, which needs rows of equal length."""
        self._loader_settings.close()
        settings = self.accelerator.dataloader_config
        self._loader_settings.enter_context(Patch(settings, dispatch_batches=False))

    def _check_attached(self) -> None:
        """Raise RuntimeError without an attached model, on every rank alike."""
        if not self.is_attached:
            raise RuntimeError("call engine.attach(model) before drawing steps")

    # ---- drawing steps

    def draw_in_place(self) -> None:
        """Draw training steps when they run, until `detach`. Called on all ranks, before any."""
        assert self._training is None, "steps have been drawn ahead already"
        self._draws_in_place = True

    def put_adapters_into(self, optimizer: torch.optim.Optimizer) -> None:
        """Give weights of adapters that `attach` has replaced to an optimizer that was made
        before. Called while a model is attached; one that accelerate has prepared gets them with
        the first step."""
        if self._whole_model is not None:
            self._whole_model.put_adapters_into(optimizer)

    def lower_cap(self, tokens: int) -> None:
        """Let plans for models to be attached give a rank fewer tokens in a micro-batch: `tokens`
        where activations are as set for the run, and where a choice keeps fewer of their bytes as
        many more. A cap that is lower already stays."""
        self._lowered = min(tokens, self._lowered or tokens)

    def next_step(
        self, iterator: Iterator[Mapping[str, Any]], num_batches: int, *, first_number: int = 0
    ) -> Step | None:
        """Return the next training step, of `num_batches` batches per rank; None if no rank has
        data left. Collective over the world.

        first_number: number of the first step since the model was attached; ignored later.
        Raises RuntimeError without an attached model, PlanInfeasible if a sequence fits nowhere.
        """
        self._check_attached()
        if self._training is None:
            chosen = LOOKAHEAD if self.args.lookahead is None else self.args.lookahead
            lookahead = 0 if self._draws_in_place else chosen
            self._training = self._training_steps(lookahead, first_number)
        step = self._training.next(iterator, num_batches)
        if step is not None:
            self._notes.say_padding(step)
            self._notes.say_other_rows(step)
        return step

    def _training_steps(self, lookahead: int, first_number: int) -> PrefetchedSteps:
        """Return the source of training steps; log why no plan chooses where activations are, if
        one might have. Collective over the world."""
        reason = self.whole_model.planning.reason_without_choices
        if (
            self.communicator.rank == 0
            and reason is not None
            and self.args.activation_memory != AS_SET
        ):
            logger.info("activations are kept as they are set for the run: %s", reason)
        shares = self._shares_prefixes()
        return self._prefetched(lookahead, first_number, shares_prefixes=shares, trains=True)

    def _shares_prefixes(self) -> bool:
        """Tell whether rows of training steps may share prefixes, on all ranks alike; log why
        not. Collective over the world."""
        own = self.reason_of_loss() or self.whole_model.reason_not_shared
        # A hook of the user's may be on one rank alone.
        reasons = self.communicator.cpu_group.gather_values(own)
        reason = next((of_rank for of_rank in reasons if of_rank is not None), None)
        if reason is not None and self.args.shared_prefixes != OFF:
            logger.info("rows share no prefixes: %s", reason)
        return reason is None

    def step_of(
        self, rows: Iterable[Mapping[str, Any]], *, number: int, forward_only: bool = False
    ) -> RankMicroBatches:
        """Return given sequences of all ranks as a step, planned and dispatched in place.
        Collective over the world.

        rows: this rank's batch, as DataCollatorForFlexSeq makes it; none for no sequence. An error
            while it is made is raised on all ranks.
        number: number of the step, for messages and the plan trace.
        forward_only: True if no pass will have a backward.
        Raises as `next_step` does, and ValueError if no rank has a sequence.
        """
        self._check_attached()
        if forward_only not in self._in_place:
            self._in_place[forward_only] = self._prefetched(
                0,
                what="call",
                shares_prefixes=not forward_only and self._shares_prefixes(),
                trains=not forward_only,
            )
        steps = self._in_place[forward_only]
        steps.count_from(number)
        step = steps.next(iter(rows), 1)
        if step is None:
            raise ValueError("no rank has a sequence to compute a loss of")
        return micro_batches_of(step)

    def evaluation_steps(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[Step]:
        """Yield every batch as a step, planned in place. Collective over the world."""
        self._check_attached()
        steps = self._prefetched(0, what="evaluation step")
        iterator = iter(batches)
        while (step := steps.next(iterator, 1)) is not None:
            self._notes.say_other_rows(step)
            yield step

    def steps(
        self,
        dataloader: Iterable[Mapping[str, Any]],
        accumulation: int = 1,
        *,
        first_number: int = 0,
    ) -> Iterator[TrainingItem]:
        """Yield the steps of one pass over a prepared dataloader, of `accumulation` batches per
        rank. Collective over the world.

        Args:
            dataloader: Its collator is a `DataCollatorForFlexSeq`.
            accumulation: Batches that a rank draws for a step.
            first_number: Steps of earlier runs, for a loop that resumes; ignored after the first
                step since the model was attached.

        A loop that ends by `break` has drawn `lookahead` steps more: a later pass over the same
        loader may see another order than without hf_flexseq, unless `set_epoch` decides it.

        Raises FloatingPointError as `check_finite` does, a step late, and for the last step when
        no step follows it; RuntimeError when the loop continues without a step's backward, or
        after another loop of the engine has begun, unless `lookahead` is 0;
        ValueError for `accumulation` below 1, and for settings of the accelerator that the
        engine would have refused.
        """
        self._check_attached()
        if accumulation < 1:
            raise ValueError(f"accumulation={accumulation}: a step has at least 1 batch per rank")
        check_accelerator(self.accelerator, self.args)  # whose settings a loop may have changed
        whole_model = self.whole_model
        self._trial.look()
        self.reason_of_loss = self._trial.reason_not_shared
        if self.args.lookahead is None and self._training is None:
            found = own_code_of_data(dataloader)
            if any_draws_in_place(found, self.communicator):
                self.draw_in_place()
        with batches_on_host(dataloader):
            iterator = iter(dataloader)
            while (
                step := self.next_step(iterator, accumulation, first_number=first_number)
            ) is not None:
                item = TrainingItem(step, whole_model, self._trial, self.micro_batches)
                yield item
                item.check_has_run()
                self.finish(step)
                self._check_pass(iterator)
        self.check_finite()

    def _check_pass(self, iterator: Iterator[Mapping[str, Any]]) -> None:
        """Raise RuntimeError for a pass whose steps drawn ahead another one has left."""
        if self._training is not None and self._training.has_left(iterator):
            raise RuntimeError(
                "a loop goes on after another one has begun to draw from the same engine, which "
                "has left the steps that were drawn ahead: give each of them an engine of its "
                "own, or set lookahead=0"
            )

    def evaluation(self, dataloader: Iterable[Mapping[str, Any]]) -> Evaluation:
        """Return one pass over a prepared dataloader, collated by `DataCollatorForFlexSeq`,
        without gradients: its steps have a `forward` instead of a `backward`."""
        self._check_attached()
        whole_model = self.whole_model
        self._trial.look()
        return Evaluation(
            dataloader,
            self.evaluation_steps,
            whole_model,
            self._trial,
            self.forward_micro_batches,
        )

    def _prefetched(
        self,
        lookahead: int,
        first_number: int = 0,
        *,
        what: str = "step",
        shares_prefixes: bool = False,
        trains: bool = False,
    ) -> PrefetchedSteps:
        """Return steps planned by rank 0. Collective over the world. trains: True if the steps'
        plans follow what earlier ones teach."""
        whole_model = self.whole_model
        return PrefetchedSteps(
            self.communicator,
            self._started(partial(self.planner, ahead=lookahead > 0)),
            lookahead,
            dispatch=self.dispatch,
            check=whole_model.planning.check,
            read=Plan.from_record,
            first_number=first_number,
            what=what,
            shares_prefixes=shares_prefixes,
            images=whole_model.images,
            virtual_tokens=whole_model.virtual_tokens,
            jobs=whole_model.planning if trains else None,
        )

    def planner(self, *, ahead: bool) -> Planner:
        """Make the planner of rank 0. ahead: in a process of its own."""
        return start_planner(self.whole_model.planning.job_of(None), ahead=ahead)

    def _started(self, start: Callable[[], Planner]) -> Planner | None:
        """Return a new planner on rank 0, None elsewhere. Collective over the world."""
        planner: Planner | None = None
        with ErrorCapture() as starting:  # a process may be one too many for the machine
            if self.communicator.rank == 0:
                planner = start()
        starting.raise_on_all_ranks(
            self.communicator.cpu_group.gather_values, "starting the planner"
        )
        return planner

    def dispatch(self, planned: PlannedStep) -> Step:
        """Bring the drawn tokens to the ranks that the plan names. Collective over the world."""
        whole_model = self.whole_model
        if self.kernel is None:
            self.kernel = self.setup.kernel_for(whole_model.base, whole_model.planning.degrees)
        return whole_model.dispatch(planned, self.kernel)

    # ---- running steps

    def micro_batches(
        self, step: Step, model: nn.Module, *, is_last: bool = False
    ) -> Generator[Inputs, None, None]:
        """Yield the inputs of every micro-batch of a training step, once: the caller runs forward
        and backward, and adds the loss with `step.add`. Collective over the world.

        Afterwards gradients cover the whole step, and `step.loss` is this rank's loss, a
        scalar; the mean over ranks is the mean over the step's target tokens.

        model: as accelerate has wrapped it. is_last: True for the last step, if it is known.
        """
        own = micro_batches_of(step)
        router = self.whole_model.router
        passes = self.passes(own, model, is_last=is_last)
        return own.micro_batches(passes, None if router is None else router.of_step(model))

    def forward_micro_batches(self, step: Step) -> Generator[Inputs, None, None]:
        """Yield the inputs of every micro-batch of a step without backward, once; the caller adds
        the loss, without a router loss, which comes at the end. Collective over the world."""
        own = micro_batches_of(step)
        router = self.whole_model.router
        if router is None:
            yield from own.micro_batches()
            return
        with router.noting() as sums:
            yield from own.micro_batches()
        own.add(router.of_all_ranks(sums, self.communicator.cpu_group))

    @contextmanager
    def passes(
        self, step: RankMicroBatches, model: nn.Module, *, is_last: bool = False
    ) -> Iterator[BeforeLast]:
        """Surround the passes of a training step; the block gets a context for each micro-batch
        but the last that runs backward, and sets `step.loss`. Collective over the world.

        Afterwards gradients are averaged over all ranks' losses. model, is_last: see
        `micro_batches`.
        """
        self._begin(step)
        with self.whole_model.reducing(step, model) as before_last:
            yield before_last
        self._end(step, model, is_last=is_last)

    def _begin(self, step: Step) -> None:
        """Begin a training step."""
        self._finished.settle()  # the previous optimizer step is done
        self.running = step

    def _end(self, step: Step, model: nn.Module, *, is_last: bool) -> None:
        """End a training step: look for NaN and infinity, and dispatch the next step while the
        device still works on this one."""
        self.running = None
        self._finished.look_at(step, model)
        if self._training is not None and not is_last:
            self._training.prefetch()

    def figures_of(self, step: Step, trace: PlanTrace) -> LogFigures:
        """Write a finished step's trace; return its figures. Collective over the world."""
        planning = self.planning
        assert planning is not None, "a step that has run has had a model"
        cost = planning.cost_of(step.number)
        return trace.record(micro_batches_of(step), cost, planning.learn)

    def finish(self, step: Step) -> None:
        """Gather the figures of a step that has run, and write its plan trace. Collective over the
        world.

        On a GPU the previous step's are gathered, which can be read without waiting;
        `check_finite` and `gather_figures` wait. Raises FloatingPointError as `check_finite` does,
        for the previous step.
        """
        self._finished.add(step)

    def gather_figures(self) -> None:
        """Gather postponed figures. Collective over the world."""
        self._finished.gather_figures()

    def check_finite(self) -> None:
        """Check, after an optimizer step, that nothing in it was NaN or infinite, and gather all
        figures: call this before saving. Collective over the world.

        Raises FloatingPointError on all ranks alike, or warns if `on_nonfinite` says so. A step
        that fp16's loss scaling has skipped does not count.
        """
        self._finished.check()


def micro_batches_of(step: Step) -> RankMicroBatches:
    """Return a step of a whole model as `RankMicroBatches`."""
    assert isinstance(step, RankMicroBatches), "a whole model runs micro-batches"
    return step
