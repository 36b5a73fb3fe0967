"""Read facts from an HF model, each in one way and in this place alone.

base_model                       the transformers model, without PEFT's wrapper
model_shape, attention_shape     sizes, from the configuration and the parameters
autocast_dtype, compute_dtype    the arithmetic that accelerate is set up for
is_checkpointed                  whether layers are recomputed

How a model is divided between ranks is in `sharding.py`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from hf_flexseq.base.layers import Reach, RecurrentShape
from hf_flexseq.base.versions import is_sharded_at_load
from hf_flexseq.cost.shapes import ExpertShape, HeadShape, ModelShape
from hf_flexseq.distributed.reduction import local
from hf_flexseq.hf.model.layer_kinds import (
    LayerKind,
    attention_layers,
    layers_of,
    unknown_kinds,
)
from hf_flexseq.hf.model.sharding import (
    distributed_config,
)
from hf_flexseq.hf.model.towers import tower_parameters, tower_shape
from hf_flexseq.hf.model.trial import try_model
from hf_flexseq.kernels.kinds import LayerCalls
from hf_flexseq.program.heads import call_heads

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # by accelerate's names


def base_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model, without PEFT's wrapper. Raises ValueError for a model that
    accelerate has wrapped or compiled, NotImplementedError for one of another library."""
    is_wrapped = isinstance(getattr(model, "module", None), nn.Module)
    if is_wrapped and not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"attach the model before accelerator.prepare wraps it in {type(model).__name__}"
        )
    if isinstance(model, OptimizedModule):
        raise ValueError(
            "attach the model before it is compiled by torch.compile or prepare; give a Trainer "
            "the model itself, with torch_compile=True"
        )
    base = without_adapters(model)
    if not isinstance(base, PreTrainedModel):
        raise NotImplementedError(f"expected a transformers model, got {type(base).__name__}")
    return base


def without_adapters(model: Any) -> Any:
    """Return a model without PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


_ADAPTED = "base_layer"  # PEFT's name for the layer that an adapter wraps


def adapter_states(modules: Iterable[nn.Module]) -> tuple[tuple[tuple[str, ...], bool], ...]:
    """Return of each of PEFT's layers among some modules which adapters are active, and whether
    they are switched off."""
    found = []
    for module in modules:
        if hasattr(module, _ADAPTED):
            active = getattr(module, "active_adapters", ())
            found.append((tuple(active), bool(getattr(module, "disable_adapters", False))))
    return tuple(found)


_HEAD_NORM = ("q_norm", "query_layernorm", "q_layernorm")  # modules that normalise queries

_NO_ATTENTION = HeadShape(heads=1, kv_heads=1, head_dim=64)


EXPERT_GROUP = "ep"  # transformers' name of a mesh's dimension, over which experts are spread


# ---- sizes


def attention_shape(config: PreTrainedConfig) -> HeadShape:
    """Read the heads of a decoder-only model's attention from its (text) configuration: the most
    and the largest of all layers; one head for a model without attention."""
    kinds = attention_layers(config).values()
    if not kinds:
        return _NO_ATTENTION
    return HeadShape(
        heads=max(kind.query_heads for kind in kinds),
        kv_heads=max(kind.kv_heads for kind in kinds),
        head_dim=max(kind.width for kind in kinds),
    )


def layer_calls(
    config: PreTrainedConfig, pieces: Mapping[int, int] = MappingProxyType({})
) -> list[LayerCalls]:
    """Return the kernel calls of each attention layer; an unused one without such layers.

    pieces: for each number of ranks that share heads, how many pieces these come in at most; the
    calls have the heads of these numbers.
    """
    calls = []
    for layer, kind in attention_layers(config.get_text_config()).items():
        heads: set[tuple[int, int]] = set()
        for degree, most in pieces.items():
            heads |= call_heads(kind.query_heads, kind.kv_heads, degree, most)
        calls.append(
            LayerCalls(
                name=f"layer {layer}",
                head_dim=kind.width,
                window=kind.reach.window is not None,
                softcap=kind.softcap is not None,
                heads=frozenset(heads),
            )
        )
    if not calls:
        calls.append(
            LayerCalls(
                name="no layer", head_dim=_NO_ATTENTION.head_dim, window=False, softcap=False
            )
        )
    return calls


def model_shape(model: nn.Module) -> ModelShape:
    """Read the sizes of a decoder-only HF model from its configuration and its parameters."""
    config = model.config.get_text_config()
    attention = attention_shape(config)
    params = sum(elements(parameter) for parameter in model.parameters())
    kinds = list(attention_layers(config).values())
    counts = Counter(kind.reach for kind in kinds)  # in the order of first layers
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    return ModelShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        intermediate=_mlp_width(config),
        vocab=config.vocab_size,
        params=params,
        dtype_bytes=computing_parameter(model).element_size(),
        reaches=tuple((count, reach) for reach, count in counts.items() if not reach.is_full),
        recurrent=_recurrent(model),
        without_attention=config.num_hidden_layers - len(kinds),
        active_params=_active_params(model, params),
        frozen_params=sum(elements(parameter) for parameter in frozen),
        frozen_bytes=sum(stored_bytes(one) for one in frozen),
        head_shapes=_head_shapes(kinds, attention),
        head_norms=any(name.endswith(_HEAD_NORM) for name, _ in model.named_modules()),
        experts=_expert_shape(model),
        tower=tower_shape(model),
    )


def _recurrent(model: PreTrainedModel) -> tuple[tuple[int, RecurrentShape], ...]:
    """Return (layers, sizes) of the recurrent layers of each kind, by the first of them, as a
    trial has seen them. Raises UnknownLayers where it has not seen all of them."""
    layers = layers_of(model.config.get_text_config())
    recurrent = [layer.recurrent for layer in layers if layer.recurrent is not None]
    if not recurrent:
        return ()
    shapes = [run.shape for run in try_model(model).mixers if run.shape is not None]
    if len(shapes) < len(recurrent):
        raise unknown_kinds(set(recurrent))
    kinds: dict[str, list[RecurrentShape]] = {}
    for shape in shapes:
        kinds.setdefault(shape.kind, []).append(shape)
    return tuple((len(sizes), sizes[0]) for sizes in kinds.values())


def _head_shapes(
    kinds: Sequence[LayerKind], largest: HeadShape
) -> tuple[tuple[Reach, HeadShape], ...]:
    """Return the largest heads of the layers of each reach; () if all have the model's."""
    shapes: dict[Reach, HeadShape] = {}
    for kind in kinds:
        before = shapes.get(kind.reach, HeadShape(0, 0, 0))
        here = HeadShape(kind.query_heads, kind.kv_heads, kind.width)
        shapes[kind.reach] = HeadShape(*map(max, before, here))
    if set(shapes.values()) <= {largest}:
        return ()
    return tuple(shapes.items())


# Names under which configurations have the experts of a layer, and those that work on a token.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "experts_per_token", "top_k_experts", "moe_topk")


def expert_counts(config: PreTrainedConfig) -> tuple[int, int]:
    """Return the experts of a layer, and those that work on a token; (0, 0) without experts."""
    experts = next(filter(None, (getattr(config, name, None) for name in _EXPERTS)), 0)
    if not experts:
        return 0, 0
    active = next(filter(None, (getattr(config, name, None) for name in _ACTIVE)), experts)
    return experts, min(active, experts)


def _mlp_width(config: PreTrainedConfig) -> int:
    """Return the width inside the MLP, or inside all experts together that work on a token."""
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    _, active = expert_counts(config)
    if active:
        width = getattr(config, "moe_intermediate_size", None) or width
    if isinstance(width, (list, tuple)):  # by layer, or of experts for text and for images
        width = max(width)
    return max(1, active) * width


def _expert_shape(model: nn.Module) -> ExpertShape | None:
    """Return the experts of a model; None without any."""
    of_layer, active = expert_counts(model.config.get_text_config())
    if not of_layer:
        return None
    modules = set()
    params = 0
    for name, parameter in model.named_parameters():
        before, inside, _ = name.partition(".experts.")
        if inside:
            modules.add(before)
            params += elements(parameter)
    return ExpertShape(layers=len(modules), of_layer=of_layer, active=active, params=params)


def _active_params(model: nn.Module, params: int) -> int | None:
    """Return the parameters that work on one token; None if that is each exactly once."""
    experts = _expert_shape(model)
    idle = 0
    if experts is not None:
        idle = experts.params * (experts.of_layer - experts.active) // experts.of_layer
    tied = _tied_elements(model)
    of_towers = sum(elements(parameter) for parameter in tower_parameters(model))
    if not idle and not tied and not of_towers:
        return None
    return params - idle + tied - of_towers


def _tied_elements(model: nn.Module) -> int:
    """Count the elements of an embedding that is also the head; 0 if this rank has not both."""
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    head = getattr(model.get_output_embeddings(), "weight", None)
    if head is None or head is not embedding:
        return 0
    return elements(head)


def elements(parameter: nn.Parameter) -> int:
    """Count the elements of the whole parameter, also of an empty one under ZeRO-3, and of one
    that bitsandbytes has packed into fewer numbers."""
    packed = getattr(parameter, "quant_state", None)
    if packed is not None:
        return math.prod(packed.shape)
    return _stored_elements(parameter)


def stored_bytes(parameter: nn.Parameter) -> int:
    """Count the bytes of the whole parameter, with the factors that bitsandbytes keeps for a
    packed one."""
    beside = 0
    state = getattr(parameter, "quant_state", None)
    while state is not None:  # factors of blocks, and those of the factors if they are packed
        beside += state.absmax.numel() * state.absmax.element_size()
        state = state.state2
    return _stored_elements(parameter) * parameter.element_size() + beside


def _stored_elements(parameter: nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def is_mostly_frozen(model: nn.Module) -> bool:
    """Tell whether less than half of the parameters are trained."""
    return 2 * trained_elements(model) < sum(map(elements, model.parameters()))


def computing_parameter(model: nn.Module) -> nn.Parameter:
    """Return the first parameter whose numbers are computed with, not packed ones."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and getattr(parameter, "quant_state", None) is None:
            return parameter
    return next(model.parameters())


# ---- arithmetic


def autocast_dtype(accelerator: Accelerator) -> torch.dtype | None:
    """Return the dtype that accelerate's autocast computes in, or None without autocast."""
    return AUTOCAST_DTYPES.get(accelerator.mixed_precision)


def compute_dtype(model: nn.Module, accelerator: Accelerator) -> torch.dtype:
    """Return the dtype that the attention of `model` computes in."""
    return autocast_dtype(accelerator) or computing_parameter(model).dtype


# ---- checkpointing


def is_checkpointed(model: nn.Module) -> bool:
    """Tell whether activation checkpointing is on, by the layers' flag, stable across versions."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


# ---- what is gathered and trained


def gathered_itemsize(model: nn.Module, accelerator: Accelerator) -> int:
    """Return the bytes of one number of a parameter as FSDP2 gathers it."""
    gathered: torch.dtype | None = None
    if accelerator.distributed_type == DistributedType.FSDP:
        policy = accelerator.state.fsdp_plugin.mixed_precision_policy
        gathered = getattr(policy, "param_dtype", None)
    elif getattr(distributed_config(model), "fsdp_mixed_precision", False):
        gathered = torch.bfloat16
    return (gathered or computing_parameter(model).dtype).itemsize


def trained_elements(model: nn.Module) -> int:
    """Count the elements of all parameters that get gradients."""
    return sum(elements(p) for p in model.parameters() if p.requires_grad)


def adapters_beside_shards(model: nn.Module) -> tuple[int, int]:
    """Count the elements of trained parameters that FSDP does not shard, where transformers has
    sharded the model. Return the count on this rank, which may have a parameter for its own
    experts alone, and the count of the whole parameters."""
    here = everywhere = 0
    if is_sharded_at_load(model):
        for parameter in model.parameters():
            if parameter.requires_grad and not is_sharded_by_fsdp(parameter.data):
                here += local(parameter).numel()
                everywhere += elements(parameter)
    return here, everywhere


def is_sharded_by_fsdp(data: torch.Tensor) -> bool:
    """Tell if FSDP shards a parameter, which experts over ranks are not."""
    return isinstance(data, DTensor) and data.device_mesh.mesh_dim_names != (EXPERT_GROUP,)


def is_classifier(model: nn.Module) -> bool:
    """Tell if a model gives classes of sequences or of tokens, through a head `score`."""
    kinds = (GenericForSequenceClassification, GenericForTokenClassification)
    return isinstance(model, kinds)
