"""The images of a model with a tower, from rows to features.

ModelImages    reads images of rows, plans where they are encoded, sends them there, encodes ahead

What a step does with them is in `steps/features.py`; how the model takes them is in
`model/vision.py`.
"""

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from hf_flexseq.hf.engine.engine_setup import EngineSetup
from hf_flexseq.hf.engine.model_planning import ModelPlanning
from hf_flexseq.hf.model.sharding import unsharded_class, zero_stage
from hf_flexseq.hf.model.vision import VisionModel
from hf_flexseq.planner.images import plan_images
from hf_flexseq.steps.early_encoding import EarlyEncoder
from hf_flexseq.steps.features import MicroBatchImages, images_of_step
from hf_flexseq.steps.micro_batches import RankMicroBatches
from hf_flexseq.steps.source_row import Columns, DrawnStep, PlannedStep, SourceRow


class ModelImages:
    """The images of an attached model; see `ImageReader` for `read`, `planned`, `draws_noise`."""

    def __init__(
        self,
        setup: EngineSetup,
        base: PreTrainedModel,
        vision: VisionModel,
        planning: ModelPlanning,
    ) -> None:
        """Collective over the world. vision: how `base` takes images."""
        self.vision = vision
        self._setup = setup
        self._base = base
        self._planning = planning
        self._early_encoder: EarlyEncoder | None = None  # where a frozen tower encodes images
        setup.communicator.open_world()  # for features

    # ---- rows, before they are planned

    @property
    def draws_noise(self) -> bool:
        """See `VisionModel.draws_noise`."""
        return self.vision.draws_noise

    def read(self, row: SourceRow) -> SourceRow:
        """See `VisionModel.read`."""
        return self.vision.read(row)

    def planned(self, step: DrawnStep) -> DrawnStep:
        """Return a step that says how its images are encoded, and what memory they take."""
        factors = self._planning.factors_of(step.number)
        cost = self._planning.cost_of_plans(factors)
        plan = plan_images(
            step.images,
            step.lengths,
            replace(self._planning.tower_of(factors), is_sharded=self._is_sharded),
            self._planning.topology,
            cost,
            self._planning.options,
        )
        facts = replace(step.facts, held_tokens=plan.held_tokens(cost.token_bytes))
        return replace(step, image_plan=plan, facts=facts)

    @property
    def _is_sharded(self) -> bool:
        """True if parameters are gathered anew in every micro-batch."""
        return zero_stage(self._base, self._setup.accelerator) == 3

    # ---- steps

    def of_step(
        self, planned: PlannedStep, columns: Sequence[Columns]
    ) -> list[MicroBatchImages] | None:
        """Send images to the ranks that encode them, and return those of each micro-batch; None in
        a step without any. Collective over the world.

        columns: of each micro-batch; see `images_of_step`. Raises NotImplementedError where ranks
        would wait for each other forever.
        """
        if not planned.drawn.images:
            return None
        is_sharded = self._is_sharded
        modalities = {image.modality for image in planned.drawn.images}
        if len(modalities) > 1 and is_sharded and self.vision.has_separate_towers:
            raise NotImplementedError(
                f"{unsharded_class(self._base).__name__} has one tower for images and one for "
                "videos, and ranks gather sharded ones together: train it without sharding, or "
                "give steps images or videos alone"
            )
        return images_of_step(
            planned.drawn,
            columns,
            tower=self.vision,
            communicator=self._setup.communicator,
            device=self._setup.accelerator.device,
            is_sharded=is_sharded,
        )

    def encode_ahead(self, step: RankMicroBatches) -> None:
        """Encode a step's images with a frozen tower, which nothing of the step before changes."""
        if step.images is None:
            return
        if self.vision.is_trained or self.vision.draws_noise or self._is_sharded:
            return
        if self._early_encoder is None:
            self._early_encoder = EarlyEncoder(self._setup.accelerator.device)
        with self._setup.accelerator.autocast():  # as in the model's forward
            timing = step.stopwatch.timing(step.indices[0])
            step.images.encode_ahead(self.vision, self._early_encoder, timing)
