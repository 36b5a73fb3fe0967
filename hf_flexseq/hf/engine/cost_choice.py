"""The estimate of a model on its devices. It is computed from the sizes of both
(`cost/analytic_model.py`), but for the bytes of a token, which are counted (`layer_trial.py`)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic_model import PARAMETER_BYTES, analytic_cost_model
from hf_flexseq.cost.shapes import ModelShape
from hf_flexseq.hf.engine.layer_trial import count_bytes
from hf_flexseq.hf.model.facts import (
    adapters_beside_shards,
    autocast_dtype,
    computing_parameter,
    is_checkpointed,
    is_mostly_frozen,
    model_shape,
)
from hf_flexseq.hf.model.loss import has_chunkable_loss
from hf_flexseq.hf.model.sharding import expert_group_size, replicas, unsharded_class, zero_stage
from hf_flexseq.hf.model.towers import attention_of_tower, trained_parts
from hf_flexseq.memory.device import device_name, device_spec
from hf_flexseq.plan.memory import MemoryChoice


@dataclass(frozen=True, kw_only=True)  # no slots: the estimate is kept
class CostSubject:
    """A model and its training setup, for which a cost model is made."""

    kind: str
    """Name of the model's class."""

    shape: ModelShape

    dtype: torch.dtype
    """Dtype of the parameters."""

    autocast: torch.dtype | None
    """Dtype of the arithmetic, if it is not the parameters' dtype."""

    checkpointing: bool
    """True if layers are recomputed in the backward."""

    save_attention_output: bool = True
    """True if the attention of such layers is kept instead of recomputed."""

    frozen: bool
    """True if only activations get gradients, as under adapters."""

    zero_stage: int
    """Sharded part of the model's state, in DeepSpeed's numbering."""

    replicas: int = 1
    """Copies of the sharded state: more than one in HSDP."""

    expert_ranks: int = 1
    """Neighbouring ranks that hold all experts together."""

    adapters: tuple[int, int] = (0, 0)
    """See `adapters_beside_shards`."""

    trained_tower: tuple[str, ...] = ()
    """Parts of the tower that get gradients, by `trained_parts`."""

    tower_attention: str | None = None
    """Implementation of attention in the tower."""

    has_chunked_loss: bool

    topology: Topology

    device: torch.device

    model: PreTrainedModel | None = field(default=None, repr=False, compare=False)
    """The model, whose layers are tried for the bytes that they keep; None to compute these."""

    as_set: MemoryChoice | None = None
    """What activation checkpointing is set to for the run; None without a model."""

    host_bytes: float = 0.0
    """Bytes of the host's memory that one rank may use for activations."""

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        accelerator: Accelerator,
        topology: Topology,
        *,
        save_attention_output: bool = True,
        as_set: MemoryChoice | None = None,
        host_bytes: float = 0.0,
    ) -> "CostSubject":
        """Collect the facts about `model`, to be trained as accelerate is set up to do. as_set:
        None to compute the bytes of layers instead of counting them."""
        return cls(
            kind=unsharded_class(model).__name__,
            shape=model_shape(model),
            dtype=computing_parameter(model).dtype,
            autocast=autocast_dtype(accelerator),
            checkpointing=is_checkpointed(model),
            save_attention_output=save_attention_output,
            frozen=is_mostly_frozen(model),
            zero_stage=zero_stage(model, accelerator),
            replicas=replicas(model, accelerator),
            expert_ranks=expert_group_size(model),
            adapters=adapters_beside_shards(model),
            trained_tower=trained_parts(model),
            tower_attention=attention_of_tower(model.config),
            has_chunked_loss=has_chunkable_loss(model),
            topology=topology,
            device=accelerator.device,
            model=None if as_set is None else model,
            as_set=as_set,
            host_bytes=host_bytes,
        )

    @property
    def shape_in_training(self) -> ModelShape:
        """The sizes, with the bytes of what is computed in. FSDP casts weights before it gathers
        them, so that nothing stays in their own dtype; autocast leaves the hidden states in it."""
        if self.autocast is None:
            return self.shape
        return replace(
            self.shape,
            dtype_bytes=self.autocast.itemsize,
            hidden_bytes=None if self.zero_stage == 3 else self.dtype.itemsize,
        )

    @cached_property
    def estimate(self) -> CostModel:
        """Computed cost model, memory included."""
        cost = analytic_cost_model(
            self.shape_in_training,
            device_spec(self.device, self.topology.ranks_per_node),
            self.topology,
            checkpointing=self.checkpointing,
            zero_stage=self.zero_stage,
            replicas=self.replicas,
            expert_ranks=self.expert_ranks,
            chunked_loss=self.has_chunked_loss,
        )
        # which counts all that is trained as sharded
        here, everywhere = self.adapters
        counted = PARAMETER_BYTES * everywhere * self.replicas
        return replace(
            cost,
            state_bytes=cost.state_bytes + PARAMETER_BYTES * here,
            sharded_state_bytes=cost.sharded_state_bytes - counted,
        )

    def counted(self) -> CostModel:
        """Return the estimate with what the layers of the model are counted to hold of a token, if
        they can be, and with what is set for the run."""
        cost = self.estimate
        activations = cost.activations
        if self.model is None or self.as_set is None or activations is None:
            return cost
        # FSDP and DeepSpeed cast the weights that a layer computes with
        dtype = self.autocast if self.autocast and self.zero_stage else self.dtype
        counted = count_bytes(self.model, dtype=dtype, autocast=self.autocast)
        as_set = self.as_set
        if counted is None or len(counted.order) != activations.layers:
            as_set = activations.as_set
        else:
            imbalance = 1.0 if cost.experts is None else cost.experts.imbalance
            activations = counted.in_place_of(activations, self.shape_in_training, imbalance)
            cost = replace(cost, token_bytes=activations.token_bytes(as_set))
        activations = replace(activations, as_set=as_set, host_bytes=self.host_bytes)
        return replace(cost, activations=activations)

    def seconds_digest(self) -> str:
        """Return a digest of the estimate without its bytes."""
        cost = replace(self.estimate, activations=None, token_bytes=1.0, budget_bytes=1.0)
        return replace(cost, state_bytes=0.0, sharded_state_bytes=0.0).digest()

    def key(self) -> Mapping[str, object]:
        """Return everything that seconds depend on, as plain JSON values."""
        return {
            "model": self.kind,
            "shape": asdict(self.shape),
            "trained_tower": list(self.trained_tower),
            "attention_of_tower": self.tower_attention,
            "dtype": str(self.dtype),
            "autocast": str(self.autocast),
            "checkpointing": self.checkpointing,
            "save_attention_output": self.save_attention_output,
            "frozen": self.frozen,
            "zero_stage": self.zero_stage,
            "replicas": self.replicas,
            "expert_ranks": self.expert_ranks,
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
