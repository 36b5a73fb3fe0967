"""Code of the user's in place of a library's in a model: attention, MLPs, norms, whole layers and
functions, on a class, on a module or as a module, before training, in on_train_begin and between
two steps. Training is exact, or refused by name."""

import copy
import types

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, apply_rotary_pos_emb

from hf_flexseq import FlexSeqEngine
from tests.budget import others_nightly
from tests.hf.objectives import Case, make_trainer, save_inputs
from tests.hf.test_overrides import make
from tests.hf.tiny import batches, documents, reference_loss, refused, tiny_arguments, tiny_llama
from tests.hf.trainers import trained, weights_apart

# ---- what is put into a model: each takes the model and pytest's monkeypatch

_attention = LlamaAttention.forward
_mlp = LlamaMLP.forward


def sdpa(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
    """Causal attention over all of a row."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    projections = (self.q_proj, self.k_proj, self.v_proj)
    q, k, v = (project(hidden_states).view(shape).transpose(1, 2) for project in projections)
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return self.o_proj(out.transpose(1, 2).flatten(2)), None


def shifted_attention(self, hidden_states, **kwargs):
    """The interface is called, but on other tokens, as LongLoRA's shifted heads do."""
    out, weights = _attention(self, hidden_states.roll(1, 1), **kwargs)
    return out.roll(-1, 1), weights


def mixing_mlp(self, x):
    return _mlp(self, x) + 0.1 * x.mean(1, keepdim=True)


def token_wise_mlp(self, x):
    return _mlp(self, x) + 0.1 * x


def mixing_activation(x):
    return torch.relu(x - x.mean(1, keepdim=True))


def squared_relu(x):
    return torch.relu(x).square()


def double_rotation(q, k, cos, sin, *args, **kwargs):
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return apply_rotary_pos_emb(q, k, cos, sin)


class Shifted(LlamaAttention):
    def forward(self, hidden_states, **kwargs):
        out, weights = super().forward(hidden_states.roll(1, 1), **kwargs)
        return out.roll(-1, 1), weights


class Within(nn.Module):
    """Adds to a token the one before it in its sequence, which it tells by positions: a rank has
    only parts of sequences."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.positions = None

    def forward(self, x):
        first = (self.positions == 0)[..., None]
        return self.inner(x) + 0.1 * x.roll(1, 1).masked_fill(first, 0)


class MeanNorm(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x - x.mean(1, keepdim=True))


def on_class(cls, forward):
    return lambda model, patch: patch.setattr(cls, "forward", forward)


def on_module(name, forward):
    def put(model, patch):
        module = model.get_submodule(name)
        module.forward = types.MethodType(forward, module)

    return put


def as_module(name, kind):
    return lambda model, patch: model.set_submodule(name, kind(model.get_submodule(name)))


def shifted_module(model, patch):
    own = model.model.layers[0].self_attn
    new = Shifted(own.config, own.layer_idx).to(own.q_proj.weight.dtype)
    new.load_state_dict(own.state_dict())
    model.model.layers[0].self_attn = new


def within(model, patch):
    module = Within(model.model.layers[0].mlp)
    model.model.layers[0].mlp = module

    def note(_, args, kwargs):
        module.positions = kwargs.get("position_ids")

    model.model.register_forward_pre_hook(note, with_kwargs=True)


def own_configuration(model, patch):
    own = model.model.layers[1].self_attn
    own.config = copy.deepcopy(own.config)
    own.config._attn_implementation = "sdpa"


def hooked(model, patch):
    mlp = model.get_submodule("model.layers.0.mlp")
    mlp.register_forward_hook(lambda module, args, out: out + 0.1 * out.mean(1, keepdim=True))


def scaling(model, patch):
    """The norms behind it hide the scale from the loss, not from gradients."""
    model.model.layers[0].register_forward_hook(lambda module, args, out: out / out.std())


def clipping_gradients(model, patch):
    model.lm_head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def function_on_a_module(function):
    def put(model, patch):
        mlp = model.model.layers[0].mlp
        del mlp.act_fn
        mlp.act_fn = function

    return put


def rotating_twice(model, patch):
    patch.setattr(modeling_llama, "apply_rotary_pos_emb", double_rotation)


ATTENTION, ONE_ROW, LATE = "runs shifted_attention of tests", "two sequences", "while it trains"
HIDDEN = "hidden states of two sequences in one row are"
ALONE = "tokens that see themselves alone"
GRADIENTS = "changes gradients of each micro-batch"
EXACT = None

# by name: what is put in; what a refusal says if it is put in before a step, and between two
CHANGES = {
    "sdpa on the class": (on_class(LlamaAttention, sdpa), "runs sdpa of", "runs sdpa of"),
    "shifted on the class": (on_class(LlamaAttention, shifted_attention), ATTENTION, ATTENTION),
    "shifted on a module": (
        on_module("model.layers.0.self_attn", shifted_attention),
        ATTENTION,
        ATTENTION,
    ),
    "shifted as a module": (shifted_module, ONE_ROW, LATE),
    "another configuration": (own_configuration, "module.config = model", "module.config"),
    "mixing MLP on the class": (on_class(LlamaMLP, mixing_mlp), ONE_ROW, LATE),
    "within a sequence": (within, ALONE, LATE),
    "mixing norm": (as_module("model.layers.0.input_layernorm", MeanNorm), ONE_ROW, LATE),
    "mixing hook": (hooked, ONE_ROW, LATE),
    "scaling hook": (scaling, HIDDEN, LATE),
    "hook on gradients": (clipping_gradients, GRADIENTS, GRADIENTS),
    "mixing activation": (function_on_a_module(mixing_activation), ONE_ROW, None),
    "token-wise activation": (function_on_a_module(squared_relu), EXACT, None),
    "token-wise MLP": (on_class(LlamaMLP, token_wise_mlp), EXACT, LATE),
    "rotation": (rotating_twice, EXACT, LATE),
}


class Puts(TrainerCallback):
    """Puts something into the model in one event, the first time that it is called."""

    def __init__(self, event, put):
        setattr(self, event, self._now)
        self._put = put

    def _now(self, args, state, control, model=None, **kwargs):
        if self._put is not None:
            self._put(model)
            self._put = None


def run(folder, patch, put, event, how="mixin", **given):
    """A run of two steps, into whose model `put` puts something in an event, or before."""
    with patch.context() as own:
        model = tiny_llama()
        if event is None:
            put(model, own)
        callbacks = [] if event is None else [Puts(event, lambda model: put(model, own))]
        given = {"eval_strategy": "no", **given}
        trainer = make(Trainer, folder, how=how, model=model, callbacks=callbacks, **given)
        return trained(trainer)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize(
    "event",
    [
        "on_train_begin",
        pytest.param(None, marks=pytest.mark.nightly),
        pytest.param("on_step_begin", marks=pytest.mark.nightly),
    ],
)
def test_code_that_is_there_when_the_first_step_begins(tmp_path, monkeypatch, name, event):
    put, said, _ = CHANGES[name]
    if said is EXACT:
        runs = [run(tmp_path, monkeypatch, put, event, how) for how in ("stock", "mixin")]
        assert weights_apart(*runs) < 1e-6
        return
    with refused(said):
        run(tmp_path, monkeypatch, put, event)


BETWEEN = [name for name in CHANGES if CHANGES[name][2] is not None]
TRIED = ("sdpa on the class", "shifted as a module", "mixing hook", "hook on gradients")


@pytest.mark.parametrize("name", others_nightly(BETWEEN, tried=TRIED))
def test_code_that_comes_between_two_steps(tmp_path, monkeypatch, name):
    put, _, said = CHANGES[name]
    with refused(said):
        run(tmp_path, monkeypatch, put, "on_step_end")


@pytest.mark.parametrize(
    "name", ["shifted on a module", "another configuration", "mixing norm", "mixing hook"]
)
def test_a_preference_loss_refuses_it_too(tmp_path, monkeypatch, name):
    put, said, _ = CHANGES[name]
    save_inputs(tmp_path)
    trainer = make_trainer(Case(kind="dpo", steps=1), True, tmp_path, model=tiny_llama())
    trainer.add_callback(Puts("on_train_begin", lambda model: put(model, monkeypatch)))
    with refused(said):
        trainer.train()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["within a sequence", "mixing norm", "token-wise MLP"])
def test_a_loop_of_your_own_tries_its_model_too(monkeypatch, name):
    put, said, _ = CHANGES[name]
    model = tiny_llama()
    put(model, monkeypatch)
    engine = FlexSeqEngine(Accelerator(cpu=True), tiny_arguments())
    engine.attach(model)
    if said is not EXACT:
        with refused(said):
            next(iter(engine.evaluation(batches(1)))).forward(model)
        with refused(said):
            next(engine.steps(batches(1))).backward(model)
    else:
        (loss,) = [step.backward(model) for step in engine.steps(batches(1))]
        engine.detach()
        wanted = float(reference_loss(model, documents((5, 9))))
        assert float(loss) == pytest.approx(wanted, rel=1e-6)
    engine.detach()


def test_a_loop_tries_no_model_of_a_library(monkeypatch):
    engine = FlexSeqEngine(Accelerator(cpu=True), tiny_arguments())
    model = tiny_llama()
    engine.attach(model)
    for step in engine.steps(batches(2)):
        assert not engine._trial.has_code
        step.backward(model)
        # as torch.compile does, with code that is in no library's file
        monkeypatch.setattr(modeling_llama, "__compiled_fn_1", lambda *args: args, raising=False)
    engine.detach()


# ---- a decoder that has grown


def grown(*, takes_configuration):
    """A model with a copy of its last layer at its end."""
    model = tiny_llama()
    layer = copy.deepcopy(model.model.layers[-1])
    layer.self_attn.layer_idx = len(model.model.layers)
    if takes_configuration:
        layer.self_attn.config = model.config
    model.model.layers.append(layer)
    model.config.num_hidden_layers += 1
    return model


@pytest.mark.slow
def test_a_layer_that_was_copied_has_a_configuration_of_its_own():
    engine = FlexSeqEngine(Accelerator(cpu=True), tiny_arguments())
    model = grown(takes_configuration=False)
    engine.attach(model)
    with refused(
        r"layer 2 called attention 0 times.* model.layers.2.self_attn has a configuration"
    ):
        next(engine.steps(batches(1))).backward(model)
    engine.detach()
    model = grown(takes_configuration=True)
    wanted = float(reference_loss(model, documents((5, 9))))
    engine.attach(model)
    (loss,) = [step.backward(model) for step in engine.steps(batches(1))]
    engine.detach()
    assert float(loss) == pytest.approx(wanted, rel=1e-6)


# ---- attention functions of the user's, which would not run


def own_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    return query.transpose(1, 2), None


@pytest.mark.parametrize(("name", "other"), [("mine", "sdpa"), ("sdpa", "eager")])
def test_a_registered_attention_function_is_refused_by_name(tmp_path, monkeypatch, name, other):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, name, own_attention)
    model = tiny_llama()
    model.set_attn_implementation(name)
    message = f"attn_implementation='{name}' is own_attention of yours, which would not run.*"
    with refused(message + rf"model\.set_attn_implementation\('{other}'\)"):
        make(Trainer, tmp_path, model=model)
    model.set_attn_implementation(other)
    make(Trainer, tmp_path, model=model).train()


class Annealed(nn.Module):
    """Anneals an MLP by the number of its forwards, if it counts them."""

    def __init__(self, inner, counts):
        super().__init__()
        self.inner, self.counts = inner, counts
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x):
        if self.counts and self.training:
            self.forwards += 1
        return self.inner(x) / (1 + 0.1 * self.forwards)


@pytest.mark.parametrize("counts", [True, False])
def test_a_buffer_that_counts_forwards_is_named_in_the_log(tmp_path, caplog, counts):
    model = tiny_llama()
    model.model.layers[0].mlp = Annealed(model.model.layers[0].mlp, counts)
    make(Trainer, tmp_path, model=model).train()
    said = [r.message for r in caplog.records if "each forward changes" in r.message]
    assert len(said) == counts
    assert all("model.layers.0.mlp.forwards of the model" in line for line in said)
