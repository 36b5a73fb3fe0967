"""Cost models for `cost_model="auto"` and `"estimate"`.

`estimate` is computed (`cost/analytic.py`), but for the bytes of a token, which are counted
(`layer_trial.py`). `auto` is measured on this machine, now or by an earlier run:

    1. facts about the model, and an estimate from them
    2. a cached measurement for exactly these facts, this machine and these versions
    3. otherwise the profiler (profiler/calibrate.py) measures copies of the model (probe.py),
       which takes seconds, and caches the result

Measurements are cached in the folder `hf_flexseq` of the HuggingFace cache, one file each. Rank 0
reads and writes; all ranks use its cost model.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from huggingface_hub.constants import HF_HOME
from transformers import PreTrainedModel

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.activations import Activations
from hf_flexseq.cost.analytic import PARAMETER_BYTES, analytic_cost_model
from hf_flexseq.cost.shapes import ModelShape
from hf_flexseq.cost.sharding import TRIPS, gathered_params, trip_seconds
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.calibration.expert_copies import ExpertMeshes
from hf_flexseq.hf.calibration.imbalance import has_tokens, measured_imbalance
from hf_flexseq.hf.calibration.layer_trial import count_bytes
from hf_flexseq.hf.calibration.probe import ModelProbes
from hf_flexseq.hf.calibration.tower_trial import try_tower
from hf_flexseq.hf.model.facts import ModelFacts, model_facts
from hf_flexseq.hf.model.loss import has_chunkable_loss
from hf_flexseq.hf.model.towers import attention_of_tower
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.profiler.cache import cache_path, load_cached, save_whole
from hf_flexseq.profiler.calibrate import Calibration, calibrate
from hf_flexseq.profiler.design import Effort
from hf_flexseq.profiler.estimate import device_spec
from hf_flexseq.profiler.measure import device_name

logger = logging.getLogger(__name__)

# Values of `cost_model=` other than presets and files.
MADE_FOR_THE_MODEL = ("auto", "estimate")

# Duration of a whole measurement, including the runs of `Effort`.
USUAL_DURATION = "for 3 to 30 s"


class RunWide(NamedTuple):
    """Settings of a run for the activations of all its micro-batches."""

    as_set: MemoryChoice
    """What activation checkpointing is set to."""
    host_bytes: float
    """Bytes of the host's memory that one rank may use."""


@dataclass(frozen=True, kw_only=True)  # no slots: the estimate is kept
class CostSubject:
    """A model and its training setup, for which a cost model is made."""

    facts: ModelFacts

    has_chunked_loss: bool

    topology: Topology

    device: torch.device

    model: PreTrainedModel | None = field(default=None, repr=False, compare=False)
    """The model, whose layers are tried for the bytes that they keep; None to compute these."""

    run_wide: RunWide | None = None
    """What is set for activations; None without a model."""

    meshes: ExpertMeshes | None = field(default=None, repr=False, compare=False)
    """Meshes of the ranks that experts lie on; None where every rank computes its own."""

    rows: Any = field(default=None, repr=False, compare=False)
    """Dataset on whose first rows routers are tried; None for random tokens."""

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        accelerator: Accelerator,
        topology: Topology,
        *,
        save_attention_output: bool = True,
        run_wide: RunWide | None = None,
        rows: Any = None,
    ) -> "CostSubject":
        """Collect the facts. save_attention_output: True if checkpointed layers keep the output.
        run_wide: what is set for activations, to count bytes of layers; None to compute them.
        rows: dataset on which routers are tried."""
        return cls(
            facts=model_facts(model, accelerator, save_attention_output=save_attention_output),
            has_chunked_loss=has_chunkable_loss(model),
            topology=topology,
            device=accelerator.device,
            model=None if run_wide is None else model,
            run_wide=run_wide,
            meshes=ExpertMeshes.of(model),
            rows=rows,
        )

    @cached_property
    def estimate(self) -> CostModel:
        """Computed cost model, memory included."""
        cost = analytic_cost_model(
            self.facts.shape_in_training,
            device_spec(self.device, self.topology.ranks_per_node),
            self.topology,
            checkpointing=self.facts.checkpointing,
            zero_stage=self.facts.zero_stage,
            replicas=self.facts.replicas,
            expert_ranks=self.facts.expert_ranks,
            chunked_loss=self.has_chunked_loss,
        )
        # which counts all that is trained as sharded
        adapters = self.facts.adapters
        counted = PARAMETER_BYTES * adapters.everywhere * self.facts.replicas
        return replace(
            cost,
            state_bytes=cost.state_bytes + PARAMETER_BYTES * adapters.here,
            sharded_state_bytes=cost.sharded_state_bytes - counted,
        )

    def key(self) -> Mapping[str, object]:
        """Collect everything that a fit depends on, as plain JSON values."""
        return fit_key(self.facts, self.topology, self.device)


def make_cost(
    name: str, subject: CostSubject, communicator: Communicator, folder: Path | None = None
) -> tuple[CostModel, str]:
    """Return a cost model and a short description of its origin. Collective over the world.

    name: "estimate" or "auto". folder: cache of measurements. An implausible measurement is
    replaced by the estimate, with a warning.
    """
    # 1. the estimate
    estimate = subject.estimate
    if name == "estimate":
        return estimate, "estimated"

    # 2. an earlier measurement, read by rank 0: other ranks may not see its disk
    folder = folder or Path(HF_HOME) / "hf_flexseq"
    path = cache_path(folder, subject.key())
    kept = load_cached(path) if communicator.rank == 0 else None
    record = communicator.cpu_group.broadcast_value(None if kept is None else kept.to_record())
    if record is not None:
        cost = with_memory_of(estimate, CostModel.from_record(record))
        return with_imbalance(cost, subject, communicator), f"measured earlier, {path}"

    # 3. a measurement now
    if communicator.rank == 0:
        logger.warning(
            "cost_model='auto' measures this model once on this machine, usually %s, and caches "
            "the result in %s; cost_model='estimate', a preset or a file needs no measurement",
            USUAL_DURATION,
            path,
        )
    began = time.perf_counter()
    try:
        calibration = measured(subject, communicator, Effort())
    except ValueError as error:
        logger.warning(
            "the measured cost model is implausible, so the estimate is used: %s", error
        )
        cost = with_imbalance(estimate, subject, communicator)
        return cost, "estimated, since the measurement failed"
    logger.info(
        "cost model measured in %.1f s; median error on held-out micro-batches: %.1f %%",
        time.perf_counter() - began,
        100 * calibration.median_error,
    )
    if communicator.rank == 0:
        _keep(calibration.cost, path)
    return with_imbalance(calibration.cost, subject, communicator), "measured now"


def with_imbalance(cost: CostModel, subject: CostSubject, communicator: Communicator) -> CostModel:
    """Return `cost` with the imbalance of the experts of the subject's model, if they lie on
    several ranks. Weights decide it, so that it is measured whenever a model is attached.
    Collective over the world."""
    if cost.experts is None or subject.meshes is None or subject.model is None:
        return cost
    imbalance = measured_imbalance(
        subject.model,
        subject.meshes,
        communicator,
        subject.device,
        autocast=subject.facts.autocast,
        rows=subject.rows,
    )
    if communicator.rank == 0:
        logger.info(
            "experts over %d ranks: on %s the busiest rank gets %.2f times the mean",
            cost.experts.ranks,
            "rows of the dataset" if has_tokens(subject.rows) else "random tokens",
            imbalance,
        )
    return replace(cost, experts=replace(cost.experts, imbalance=imbalance))


def measured(subject: CostSubject, communicator: Communicator, effort: Effort) -> Calibration:
    """Fit a cost model now. Raises ValueError for an implausible fit. Collective over the
    world."""
    facts = subject.facts
    estimate = subject.estimate
    # of copies, which are not sharded; what it prices decides how long they run
    of_copies = estimate.micro_batch_s - gathering_s(estimate, subject)
    calibration = calibrate(
        ModelProbes(facts, communicator, subject.device, subject.meshes),
        facts.shape_in_training,
        replace(estimate, micro_batch_s=max(0.0, of_copies)),
        communicator,
        device=subject.device,
        effort=effort,
    )
    objection = calibration.objection()
    if objection is not None:
        raise ValueError(f"{objection}; measure on an idle machine")
    cost = calibration.cost
    if estimate.tower is not None and not calibration.tower_errors:
        logger.info("the vision tower was not timed: it is priced at the measured speed of text")
        cost = with_tower_of(estimate, cost)
    return replace(calibration, cost=with_gathering(cost, subject))


def fit_key(facts: ModelFacts, topology: Topology, device: torch.device) -> Mapping[str, object]:
    """Collect everything that a fit depends on, as plain JSON values."""
    parts: dict[str, object] = {}  # which older checkpoints do not mention
    if facts.expert_ranks > 1:
        parts["expert_ranks"] = facts.expert_ranks
    if facts.shape.tower is not None:
        parts["trained_tower"] = list(facts.trained_tower)
        parts["attention_of_tower"] = attention_of_tower(facts.config)
    return {
        **parts,
        "model": facts.kind.__name__,
        "shape": _shape_key(facts.shape),
        "dtype": str(facts.dtype),
        "autocast": str(facts.autocast),
        "checkpointing": facts.checkpointing,
        "save_attention_output": facts.save_attention_output,
        "frozen": facts.frozen,
        "zero_stage": facts.zero_stage,
        "replicas": facts.replicas,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "topology": asdict(topology),
        "torch": torch.__version__,
        # A cost model with other fields was fitted by another version of hf_flexseq.
        "constants": [constant.name for constant in fields(CostModel)],
    }


def _shape_key(shape: ModelShape) -> dict[str, object]:
    """Return a model's sizes as JSON values, without absent kinds of layers, as older
    checkpoints."""
    sizes = asdict(shape)
    del sizes["hidden_bytes"]  # of training, not of the model
    del sizes["head_norms"], sizes["experts"]  # which the model's class and sizes tell
    if not shape.reaches:
        del sizes["reaches"]
    if shape.active_params is None:
        del sizes["active_params"]
    for name in (
        *("head_shapes", "recurrent", "without_attention", "tower"),
        *("frozen_params", "frozen_bytes"),
    ):
        if not sizes[name]:
            del sizes[name]
    return sizes


def with_memory_of(estimate: CostModel, cost: CostModel) -> CostModel:
    """Return `cost` with the bytes of `estimate`: free memory may have changed since."""
    return replace(
        with_activations(cost, estimate.activations),
        token_bytes=estimate.token_bytes,
        state_bytes=estimate.state_bytes,
        sharded_state_bytes=estimate.sharded_state_bytes,
        budget_bytes=estimate.budget_bytes,
    )


def with_activations(cost: CostModel, activations: Activations | None) -> CostModel:
    """Return `cost` with these activations, and with the rates of the host that it has itself."""
    own = cost.activations
    if activations is not None and own is not None:
        activations = replace(activations, out_rate=own.out_rate, back_rate=own.back_rate)
    return replace(cost, activations=activations)


def with_counted_bytes(cost: CostModel, subject: CostSubject) -> CostModel:
    """Return `cost` with what the layers of the subject's model are counted to hold of a token,
    and its tower of a patch, if they can be, and with what is set for the run."""
    if subject.model is not None:
        cost = with_counted_tower(cost, subject.facts)
    activations = cost.activations
    if subject.model is None or subject.run_wide is None or activations is None:
        return cost
    facts = subject.facts
    as_set, host_bytes = subject.run_wide
    counted = count_bytes(subject.model, dtype=facts.dtype_in_training, autocast=facts.autocast)
    if counted is None or len(counted.order) != activations.layers:
        as_set = activations.as_set
    else:
        imbalance = 1.0 if cost.experts is None else cost.experts.imbalance
        activations = counted.in_place_of(activations, facts.shape_in_training, imbalance)
        cost = replace(cost, token_bytes=activations.token_bytes(as_set))
    activations = replace(activations, as_set=as_set, host_bytes=host_bytes)
    return replace(cost, activations=activations)


def with_host_bytes(cost: CostModel, host_bytes: float) -> CostModel:
    """Return `cost` with these bytes of the host's memory for each rank."""
    if cost.activations is None:
        return cost
    return replace(cost, activations=replace(cost.activations, host_bytes=host_bytes))


def with_counted_tower(cost: CostModel, facts: ModelFacts) -> CostModel:
    """Return `cost` with the bytes of the model's tower, and the tokens of its images, as a trial
    has counted them, if it could."""
    tried = try_tower(facts)
    if cost.tower is None or tried is None:
        return cost
    tower = replace(
        cost.tower,
        patch_bytes=tried.patch_bytes,
        token_bytes=tried.token_bytes,
        patches_per_token=tried.patches_per_token,
    )
    return replace(cost, tower=tower)


def with_tower_of(estimate: CostModel, cost: CostModel) -> CostModel:
    """Return `cost`, measured on text alone, with the tower of `estimate` at the measured speed:
    its patches as slow as tokens in linear layers, its pairs as those of attention."""
    tower = estimate.tower
    if tower is None:
        return replace(cost, tower=None)
    of_tokens = cost.linear_s / estimate.linear_s
    of_pairs = of_tokens
    if estimate.attention_s and cost.attention_s:
        of_pairs = cost.attention_s / estimate.attention_s
    tower = replace(tower, patch_s=tower.patch_s * of_tokens, pair_s=tower.pair_s * of_pairs)
    return replace(cost, tower=tower)


def with_gathering(cost: CostModel, subject: CostSubject) -> CostModel:
    """Return `cost` with the seconds that sharded parameters add to every micro-batch, computed
    because the timed copies are not sharded."""
    return replace(cost, micro_batch_s=cost.micro_batch_s + gathering_s(cost, subject))


def gathering_s(cost: CostModel, subject: CostSubject) -> float:
    """Return the seconds of sharded parameters in a micro-batch: two gathers and one scatter."""
    facts = subject.facts
    if facts.zero_stage < 3:
        return 0.0
    shards = subject.topology.world_size // facts.replicas
    gathered = gathered_params(facts.shape, shards, facts.expert_ranks)
    trip_s = trip_seconds(
        cost,
        moved_bytes=gathered * facts.shape_in_training.dtype_bytes,
        topology=subject.topology,
        replicas=facts.replicas,
    )
    return TRIPS * trip_s


def _keep(cost: CostModel, path: Path) -> None:
    try:
        save_whole(cost, path)
    except OSError as error:
        logger.warning("the measured cost model could not be cached for the next run: %s", error)
