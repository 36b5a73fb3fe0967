"""The estimate of a model on its devices. It is computed from the sizes of both
(`cost/analytic_model.py`), but for the bytes of a token, which are counted (`layer_trial.py`)."""

from collections.abc import Mapping
from dataclasses import asdict, replace
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
    elements,
    is_checkpointed,
    is_mostly_frozen,
    model_shape,
)
from hf_flexseq.hf.model.loss import has_chunkable_loss
from hf_flexseq.hf.model.sharding import expert_group_size, replicas, unsharded_class, zero_stage
from hf_flexseq.hf.model.towers import attention_of_tower, tower_parameters
from hf_flexseq.memory.device import device_name, device_spec
from hf_flexseq.plan.memory import MemoryChoice


class CostSubject:
    """A model and its training setup, for which a cost model is made: the facts as they are now,
    since a pipeline cuts the model afterwards."""

    def __init__(
        self,
        model: PreTrainedModel,
        accelerator: Accelerator,
        topology: Topology,
        *,
        save_attention_output: bool = True,
        as_set: MemoryChoice | None = None,
        host_bytes: float = 0.0,
    ) -> None:
        """model: to be trained as `accelerator` is set up to do.
        save_attention_output: True if recomputed layers keep their attention's results.
        as_set: what activation checkpointing is set to for the run; None to compute the bytes of
            layers instead of counting them.
        host_bytes: of the host's memory that one rank may use for activations."""
        self.kind = unsharded_class(model).__name__
        self.shape = model_shape(model)
        self.dtype = computing_parameter(model).dtype
        self.autocast = autocast_dtype(accelerator)
        self.checkpointing = is_checkpointed(model)
        self.save_attention_output = save_attention_output
        self.frozen = is_mostly_frozen(model)
        self.zero_stage = zero_stage(model, accelerator)
        self.replicas = replicas(model, accelerator)
        self.expert_ranks = expert_group_size(model)
        self.adapters = adapters_beside_shards(model)
        of_tower = [p for p in tower_parameters(model) if p.requires_grad]
        self.trained_in_tower = sum(map(elements, of_tower))
        self.tower_attention = attention_of_tower(model.config)
        self.has_chunked_loss = has_chunkable_loss(model)
        self.topology = topology
        self.device = accelerator.device
        self.as_set = as_set
        self._model = None if as_set is None else model  # whose layers are tried
        self._host_bytes = host_bytes

    @property
    def shape_in_training(self) -> ModelShape:
        """The sizes, with the compute dtype's bytes. FSDP casts weights before it gathers them, so
        that nothing stays in their own dtype; autocast leaves the hidden states in it."""
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
        """Return the estimate with the bytes per token that the model's layers are counted to
        hold, if they can be counted, and with the settings of the run."""
        cost = self.estimate
        activations = cost.activations
        if self._model is None or self.as_set is None or activations is None:
            return cost
        # FSDP and DeepSpeed cast the weights that a layer computes with
        dtype = self.autocast if self.autocast and self.zero_stage else self.dtype
        counted = count_bytes(self._model, dtype=dtype, autocast=self.autocast)
        as_set = self.as_set
        if counted is None or len(counted.order) != activations.layers:
            as_set = activations.as_set
        else:
            imbalance = 1.0 if cost.experts is None else cost.experts.imbalance
            activations = counted.in_place_of(activations, self.shape_in_training, imbalance)
            cost = replace(cost, token_bytes=activations.token_bytes(as_set))
        activations = replace(activations, as_set=as_set, host_bytes=self._host_bytes)
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
            "trained_tower": [self.trained_in_tower] if self.trained_in_tower else [],
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
