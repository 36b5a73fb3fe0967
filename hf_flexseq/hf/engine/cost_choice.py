"""The estimate of a model on its devices. It is computed from the sizes of both
(`cost/analytic_model.py`), but for the bytes of a token, which are counted (`layer_trial.py`)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic_model import PARAMETER_BYTES, analytic_cost_model
from hf_flexseq.hf.engine.layer_trial import count_bytes
from hf_flexseq.hf.model.facts import ModelFacts, model_facts
from hf_flexseq.hf.model.loss import has_chunkable_loss
from hf_flexseq.hf.model.towers import attention_of_tower
from hf_flexseq.memory.device import device_name, device_spec
from hf_flexseq.plan.memory import MemoryChoice


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

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        accelerator: Accelerator,
        topology: Topology,
        *,
        save_attention_output: bool = True,
        run_wide: RunWide | None = None,
    ) -> "CostSubject":
        """Collect the facts. save_attention_output: True if checkpointed layers keep the output.
        run_wide: what is set for activations, to count bytes of layers; None to compute them."""
        return cls(
            facts=model_facts(model, accelerator, save_attention_output=save_attention_output),
            has_chunked_loss=has_chunkable_loss(model),
            topology=topology,
            device=accelerator.device,
            model=None if run_wide is None else model,
            run_wide=run_wide,
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

    def counted(self) -> CostModel:
        """Return the estimate with what the layers of the model are counted to hold of a token, if
        they can be, and with what is set for the run."""
        cost = self.estimate
        activations = cost.activations
        if self.model is None or self.run_wide is None or activations is None:
            return cost
        facts = self.facts
        as_set, host_bytes = self.run_wide
        counted = count_bytes(self.model, dtype=facts.dtype_in_training, autocast=facts.autocast)
        if counted is None or len(counted.order) != activations.layers:
            as_set = activations.as_set
        else:
            imbalance = 1.0 if cost.experts is None else cost.experts.imbalance
            activations = counted.in_place_of(activations, facts.shape_in_training, imbalance)
            cost = replace(cost, token_bytes=activations.token_bytes(as_set))
        activations = replace(activations, as_set=as_set, host_bytes=host_bytes)
        return replace(cost, activations=activations)

    def seconds_digest(self) -> str:
        """Return a digest of the estimate without its bytes."""
        cost = replace(self.estimate, activations=None, token_bytes=1.0, budget_bytes=1.0)
        return replace(cost, state_bytes=0.0, sharded_state_bytes=0.0).digest()

    def key(self) -> Mapping[str, object]:
        """Return everything that seconds depend on, as plain JSON values."""
        facts = self.facts
        return {
            "model": facts.kind.__name__,
            "shape": asdict(facts.shape),
            "trained_tower": list(facts.trained_tower),
            "attention_of_tower": attention_of_tower(facts.config),
            "dtype": str(facts.dtype),
            "autocast": str(facts.autocast),
            "checkpointing": facts.checkpointing,
            "save_attention_output": facts.save_attention_output,
            "frozen": facts.frozen,
            "zero_stage": facts.zero_stage,
            "replicas": facts.replicas,
            "expert_ranks": facts.expert_ranks,
            "device": device_name(self.device),
            "threads": torch.get_num_threads(),
            "topology": asdict(self.topology),
            "torch": torch.__version__,
        }


def with_host_bytes(cost: CostModel, host_bytes: float) -> CostModel:
    """Return `cost` with these bytes of the host's memory for each rank."""
    if cost.activations is None:
        return cost
    return replace(cost, activations=replace(cost.activations, host_bytes=host_bytes))
