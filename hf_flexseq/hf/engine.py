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
The engine serves whole models and pipeline stages; its executor differs (`executors.py`).
"""

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from hf_flexseq.base.versions import warn_untested
from hf_flexseq.config import AS_SET, LOOKAHEAD, FlexSeqArguments
from hf_flexseq.cost import CostModel
from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.attachments import ModelSettings
from hf_flexseq.hf.executors import EngineSetup, Executor, base_model
from hf_flexseq.hf.finished_steps import FinishedSteps
from hf_flexseq.hf.loaders import LoaderSettings, batches_on_host
from hf_flexseq.hf.lookahead import any_draws_in_place, own_code_of_data
from hf_flexseq.hf.loop import Evaluation, TrainingItem
from hf_flexseq.hf.model.own_loss import check_own_loss
from hf_flexseq.hf.refusals.accelerator import check_accelerator
from hf_flexseq.hf.shared_prefixes import OFF
from hf_flexseq.hf.sum_trial import SumTrial
from hf_flexseq.hf.whole_model import WholeModelExecutor
from hf_flexseq.planner.process.client import Planner
from hf_flexseq.steps.console import DrawnNotes
from hf_flexseq.steps.inputs import Inputs
from hf_flexseq.steps.micro_batches import BeforeLast, RankMicroBatches
from hf_flexseq.steps.prefetch import PrefetchedSteps, Step
from hf_flexseq.steps.trace import LogFigures

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
        executor: Callable[[EngineSetup], Executor] = WholeModelExecutor,
        on_figures: Callable[[int, LogFigures], None] | None = None,
        uses_trl: bool = False,
    ) -> None:
        """Connect the ranks. Collective over the world.

        Args:
            accelerator: That of the loop, before anything is prepared.
            args: The options.
            communicator: Over all ranks; None makes one.
            timeout: Of every exchange of that one; None takes the timeout of the job's group.
            executor: Makes what runs the steps.
            on_figures: Gets the number and the figures of each step as soon as they are known.
            uses_trl: True for a trainer of TRL's, whose version has to be a tested one.

        Raises ValueError or NotImplementedError for an accelerator, a cost model, a degree or a
        plan trace that cannot work.
        """
        check_accelerator(accelerator, args)
        if accelerator.is_main_process:
            warn_untested(*([] if uses_trl else ["trl"]))
        setup = EngineSetup.of(accelerator, args, communicator, timeout=timeout)
        args.plan_options().check_on(setup.communicator.topology)
        with ErrorCapture() as looking:  # ranks may have machines of different sizes
            setup.host_bytes()
        looking.raise_on_all_ranks(
            setup.communicator.cpu_group.gather_values, "looking at the memory of the machine"
        )
        self.accelerator = accelerator
        self.args = args
        self.communicator = setup.communicator
        self.executor = executor(setup)
        self._finished = FinishedSteps(
            accelerator, setup.communicator, self.executor, args, on_figures=on_figures
        )
        self._costs = setup.costs
        self._training: PrefetchedSteps | None = None
        self._in_place: dict[bool, PrefetchedSteps] = {}  # of calls: with a backward, without one
        self._draws_in_place = False  # training steps, though `lookahead` says otherwise
        self.reason_of_loss: Callable[[], str | None] = lambda: None
        """Returns why the loss keeps rows of training steps from sharing prefixes, in a few words,
        or None; asked before the first step."""
        self._notes = DrawnNotes(setup.communicator.rank)
        self.running: Step | None = None
        """The training step that runs, or has failed."""
        # Dataloaders may be prepared before a model is attached.
        self._loader_settings = LoaderSettings(accelerator)

    @property
    def cost(self) -> CostModel | None:
        """The cost model of the attached model."""
        return self.executor.cost

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
        self._costs.bring(checkpoint, record)

    def cost_record(self) -> dict[str, Any] | None:
        """Return the cost model for a checkpoint as plain JSON values; None if unknown. Steps
        correct it no more from then on, so that a resumed run has the same."""
        return self._costs.to_record()

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
        """Attach a model whose own loss function is unused or has been checked."""
        self.executor.attach(model, lockstep=lockstep)
        self._trial = SumTrial(lambda: model, self.executor)
        self._loader_settings.change()

    def detach(self) -> None:
        """Restore the model and the accelerator, and end the planner, without waiting for other
        ranks: a loop that was broken off calls `check_finite` before, for its last figures."""
        try:
            self.executor.detach()
        finally:
            self._loader_settings.restore()
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
        if self.executor.attached:
            yield
            return
        self._attach(model, lockstep=lockstep)
        try:
            yield
        finally:
            self.detach()

    def keep_loader_settings(self) -> None:
        """Leave accelerate's dataloader settings changed on `detach`, for a Trainer's loaders."""
        self._loader_settings.keep()

    def _check_attached(self) -> None:
        """Raise RuntimeError without an attached model, on every rank alike."""
        if not self.executor.attached:
            raise RuntimeError("call engine.attach(model) before drawing steps")

    # ---- drawing steps

    def draw_in_place(self) -> None:
        """Draw training steps when they run, until `detach`. Called on all ranks, before any."""
        assert self._training is None, "steps have been drawn ahead already"
        self._draws_in_place = True

    def use(self, settings: ModelSettings) -> None:
        """Attach whole models with these settings from now on; stages of a pipeline have none."""
        if isinstance(self.executor, WholeModelExecutor):
            self.executor.settings = settings

    def put_adapters_into(self, optimizer: torch.optim.Optimizer) -> None:
        """Give weights of adapters that `attach` has replaced to an optimizer that was made
        before. Called while a model is attached; one that accelerate has prepared gets them with
        the first step."""
        if isinstance(self.executor, WholeModelExecutor):
            self.executor.put_adapters_into(optimizer)

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
            self._say_who_keeps_activations()
            chosen = LOOKAHEAD if self.args.lookahead is None else self.args.lookahead
            lookahead = 0 if self._draws_in_place else chosen
            shares = self._shares_prefixes()
            self._training = self._prefetched(
                lookahead, first_number, shares_prefixes=shares, trains=True
            )
        step = self._training.next(iterator, num_batches)
        if step is not None:
            self._notes.say_padding(step)
            self._notes.say_other_rows(step)
        return step

    def _say_who_keeps_activations(self) -> None:
        """Log why no plan chooses where activations are, if one might have."""
        if not isinstance(self.executor, WholeModelExecutor) or self.communicator.rank:
            return
        reason = self.executor.reason_without_choices
        if reason is not None and self.args.activation_memory != AS_SET:
            logger.info("activations are kept as they are set for the run: %s", reason)

    def _shares_prefixes(self) -> bool:
        """Tell whether rows of training steps may share prefixes, on all ranks alike; log why
        not. Collective over the world."""
        own = self.reason_of_loss() or self.executor.reason_not_shared
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

        rows: this rank's batch, as DataCollatorForFlexSeq makes it; none for no sequence. What is
            raised while it is made is raised on all ranks.
        number: number of the step, for messages and the plan trace.
        forward_only: True if no pass will have a backward.
        Raises as `next_step` does, and ValueError if no rank has a sequence.
        """
        self._check_attached()
        if forward_only not in self._in_place:
            planner = self.whole_model.forward_planner if forward_only else None
            self._in_place[forward_only] = self._prefetched(
                0,
                what="call",
                planner=planner,
                shares_prefixes=not forward_only and self._shares_prefixes(),
                trains=not forward_only,
            )
        steps = self._in_place[forward_only]
        steps.count_from(number)
        step = steps.next(iter(rows), 1)
        if step is None:
            raise ValueError("no rank has a sequence to compute a loss of")
        assert isinstance(step, RankMicroBatches), "a stage computes no loss of given sequences"
        return step

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

        Raises FloatingPointError as `check_finite` does, a step late, and for the last step when
        no step follows it; RuntimeError when the loop continues without a step's backward.
        """
        self._check_attached()
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
                item = TrainingItem(step, self.executor, self._trial, self.micro_batches)
                yield item
                item.check_has_run()
                self.finish(step)
        self.check_finite()

    def evaluation(self, dataloader: Iterable[Mapping[str, Any]]) -> Evaluation:
        """Return one pass over a prepared dataloader, collated by `DataCollatorForFlexSeq`,
        without gradients: its steps have a `forward` instead of a `backward`."""
        self._check_attached()
        self._trial.look()
        return Evaluation(dataloader, self.evaluation_steps, self.executor, self._trial)

    def _prefetched(
        self,
        lookahead: int,
        first_number: int = 0,
        *,
        what: str = "step",
        planner: Callable[[], Planner] | None = None,
        shares_prefixes: bool = False,
        trains: bool = False,
    ) -> PrefetchedSteps:
        """Return steps planned by rank 0. Collective over the world. planner: makes the planner.
        trains: True if the steps' plans follow what earlier ones teach."""
        start = planner or partial(self.executor.planner, ahead=lookahead > 0)
        return PrefetchedSteps(
            self.communicator,
            self._started(start),
            lookahead,
            dispatch=self.executor.dispatch,
            check=self.executor.check,
            read=self.executor.read,
            first_number=first_number,
            what=what,
            shares_prefixes=shares_prefixes,
            images=self.executor.images,
            virtual_tokens=self.executor.virtual_tokens,
            jobs=self.executor.jobs if trains else None,
        )

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

    def plan_again(self, step: Step) -> Step:
        """Return the training step that was drawn last with another plan, which knows of a cap
        that was lowered since, as do all plans to come. Collective over the world. Raises as
        `next_step` does."""
        assert self._training is not None, "the step was drawn"
        ahead = self._training.plans_ahead
        planner = self._started(partial(self.executor.planner, ahead=ahead))
        return self._training.plan_again(step, planner)

    # ---- running steps

    def micro_batches(
        self, step: Step, model: nn.Module, *, is_last: bool = False
    ) -> Generator[Inputs, None, None]:
        """Yield the inputs of every micro-batch of a training step, once: the caller runs forward
        and backward, and adds the loss with `step.add`. A rank with one stage of the model runs it
        here, and nothing is yielded. Collective over the world.

        Afterwards gradients are those of the whole step, and `step.loss` is this rank's loss, a
        scalar; the mean over ranks is the mean over the step's target tokens.

        model: as accelerate has wrapped it. is_last: True for the last step, if it is known.
        """
        with self._training_step(step, model, is_last=is_last):
            yield from self.executor.micro_batches(step, model, trains=True)

    @contextmanager
    def passes(
        self, step: RankMicroBatches, model: nn.Module, *, is_last: bool = False
    ) -> Iterator[BeforeLast]:
        """Surround the passes of a training step around a loss on the source ranks; the block gets
        what surrounds each micro-batch but the last that runs backward, and sets `step.loss`.
        Collective over the world.

        Afterwards gradients are the mean over ranks of those of their losses. model, is_last: see
        `micro_batches`.
        """
        reducing = self.whole_model.reducing(step, model)
        with self._training_step(step, model, is_last=is_last), reducing as before_last:
            yield before_last

    @contextmanager
    def _training_step(self, step: Step, model: nn.Module, *, is_last: bool) -> Iterator[None]:
        """Surround a training step; then look for NaN and infinity, and dispatch the next step
        while the device still works on this one."""
        self._finished.settle()  # the previous optimizer step is done
        self.running = step
        yield
        self.running = None
        step.has_run = True
        self._finished.look_at(step, model)
        if self._training is not None and not is_last:
            self._training.prefetch()

    @property
    def whole_model(self) -> WholeModelExecutor:
        """The executor of a whole model."""
        if not isinstance(self.executor, WholeModelExecutor):
            raise NotImplementedError(
                "a loss that is computed from figures of whole sequences does not run in pipeline "
                "stages: set pipeline_parallel_size=1"
            )
        return self.executor

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
