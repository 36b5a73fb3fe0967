"""Find silent errors: run a small model with `flexseq` on ranks that are threads, and compare its
outputs with one process, also after a change of one token.

    wrong = probe_model(model)      # a line for each difference; [] without any

1. one process    transformers' own eager attention, on every sequence alone
2. ranks          the same sequences, packed on single ranks and shared by all of them
3. outputs        and gradients of all parameters must be the same
4. changes        one token of a sequence changes; exactly the outputs that change in one process
                  must change on the ranks

Equal outputs show that nothing is missing, such as a sink, a scale, or a state from another rank.
Changes show that nothing else is read, such as the state of the previous sequence. They need no
tolerance: an output that does not depend on a token stays the same to the bit, up to sums of other
sizes in routed experts.

Windows, chunks and original lengths of position embeddings must be shorter than the longest
sequence, of `SEQUENCES[0]` tokens. Full attention and recurrent layers carry a change to all later
tokens, so changes tell most about a model without them.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

import hf_flexseq.hf.model.attention  # noqa: F401  registers "flexseq"
from hf_flexseq.attention import SequenceContext
from hf_flexseq.base.registry import STRATEGIES
from hf_flexseq.base.topology import Topology
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.thread_ranks import ThreadTransport, run_threads
from hf_flexseq.hf.model.facts import layer_calls
from hf_flexseq.hf.model.layer_kinds import has_recurrent
from hf_flexseq.hf.model.positions import attach_positions, needed_columns
from hf_flexseq.hf.model.recurrent import attach_recurrent
from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.kinds import choose_kernels
from hf_flexseq.plan import Group, MicroBatch, Plan
from hf_flexseq.plan.shard import Slice, make_shard
from hf_flexseq.steps.differences import errors_of
from hf_flexseq.steps.token_columns import INDICES, LENGTHS

CPU = torch.device("cpu")
TOPOLOGY = Topology(nodes=2, ranks_per_node=2)
SHARED = STRATEGIES[1:]  # strategies of groups of several ranks

# Tokens of the sequences: two that all ranks share, then two for each rank alone.
SEQUENCES = (41, 23, 14, 3, 1, 11, 9, 12, 2, 13)
SHARED_SEQUENCES = 2
# (sequence, token) that is changed. The first tokens of a sequence are those that everything
# after them may read; the last ones are what a leak into the next sequence begins with.
CHANGES = ((0, 0), (0, 19), (1, 8), (2, 1), (3, 2))

# All in units of the largest output or gradient. A layer may compute in float32 whatever the
# dtype of its model, as norms and softmax do in transformers.
SAME = 1e-5
SAME_SCANS = 1e-4  # in models with recurrent layers, which lose digits in float32
CHANGED = 1e-6  # what has changed, by at least this
UNCHANGED = 1e-10  # what has not, by at most this


class _Run(NamedTuple):
    """Results of a model for all sequences."""

    outputs: list[torch.Tensor]
    """Logits of each sequence, [length, vocabulary]."""
    gradients: dict[str, torch.Tensor]
    """Gradient of each parameter, summed over all sequences; {} if not requested."""


class _Ranks(NamedTuple):
    """Models, strategy and kernel of the ranks."""

    models: list[PreTrainedModel]
    """One for each rank, with its attention."""
    strategy: str
    """Strategy of the shared sequences."""
    kernel: Kernel


def probe_model(
    model: PreTrainedModel,
    *,
    strategies: Sequence[str] = SHARED,
    changes: Sequence[tuple[int, int]] = CHANGES,
    gradients: bool = True,
    attach: Callable[[PreTrainedModel], None] | None = None,
) -> list[str]:
    """Return what `flexseq` computes otherwise than one process, a line each; [] if nothing.

    Args:
        model: A small one on the CPU, without dropout; it stays as it is. The probe takes a copy
            in float64 with random parameters, so that everything depends on everything it can.
        strategies: Of the shared sequences, one after the other.
        changes: (sequence, token) to be changed, one after the other; see `SEQUENCES`.
        gradients: Whether to compare them, too.
        attach: Gives a model its attention and its positions; None attaches as a trainer does.
    """
    twin = lively_copy(model, torch.float64)
    sequences = _sequences(twin.config)
    changed = [_with_change(sequences, change) for change in changes]

    # 1. one process
    alone = copy.deepcopy(twin)
    alone.set_attn_implementation("eager")
    want = _run_alone(alone, sequences, gradients=gradients)
    want_changed = []
    for (sequence, _), tokens in zip(changes, changed, strict=True):
        after = list(want.outputs)
        after[sequence] = _run_alone(alone, [tokens[sequence]]).outputs[0]
        want_changed.append(after)

    # 2. ranks, with a model each
    kernel = choose_kernels(CPU, torch.float64, layer_calls(twin.config.get_text_config()))
    twins = []
    for _ in range(TOPOLOGY.world_size):
        twins.append(copy.deepcopy(twin))
        (attach or _attach)(twins[-1])
    wrong = []
    same = SAME_SCANS if has_recurrent(twin.config.get_text_config()) else SAME
    attach_recurrent(twin)  # of all twins
    for strategy in strategies:
        ranks = _Ranks(twins, strategy, kernel)
        have = _run_ranks(ranks, sequences, gradients=gradients)
        found = _differences(have, want, same)
        if found:
            found.insert(0, _first_difference(ranks, alone, sequences, same))
        wrong += [f"{strategy}: {line}" for line in found]
        for change, tokens, want_after in zip(changes, changed, want_changed, strict=True):
            have_after = _run_ranks(ranks, tokens).outputs
            steps = (want.outputs, want_after, have.outputs, have_after)
            line = _wrong_changes(*steps)
            if line is not None:
                sequence, token = change
                wrong.append(f"{strategy}: with token {token} of sequence {sequence}, {line}")
    return wrong


def _attach(model: PreTrainedModel) -> None:
    model.set_attn_implementation("flexseq")
    attach_positions(model)


# ---- what goes in


def lively_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a copy whose parameters are random and large enough for every token to matter."""
    twin = copy.deepcopy(model).to(dtype).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if name.endswith("A_log"):  # of recurrent layers, whose states then last
                parameter.copy_(0.5 * noise - 3.5)
            elif parameter.dim() < 2:
                parameter += 0.3 * noise  # norms, biases, sinks
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return twin


def usual_tokens(config: Any) -> list[int]:
    """Return all tokens of a model's vocabulary except the special ones, such as those that stand
    for images."""
    special = set()
    of_text = config.get_text_config()
    for one in (config, of_text):
        for name, value in vars(one).items():
            if name.endswith(("_id", "_index")):
                special.update(value if isinstance(value, list) else [value])
    return [token for token in range(of_text.vocab_size) if token not in special]


def _sequences(config: Any) -> list[torch.Tensor]:
    """Return tokens of each sequence, [length], without special tokens."""
    usual = torch.tensor(usual_tokens(config))
    generator = torch.Generator().manual_seed(1)
    sequences = []
    for length in SEQUENCES:
        sequences.append(usual[torch.randint(len(usual), (length,), generator=generator)])
    return sequences


def _with_change(sequences: Sequence[torch.Tensor], change: tuple[int, int]) -> list[torch.Tensor]:
    """Return the sequences with another token, one that stands elsewhere in them."""
    sequence, token = change
    tokens = sequences[sequence].clone()
    others = sequences[0][sequences[0] != tokens[token]]
    tokens[token] = others[-1]
    return [*sequences[:sequence], tokens, *sequences[sequence + 1 :]]


def _plan(strategy: str) -> Plan:
    """Return the plan: all ranks share the first sequences, and each has two of its own."""
    ranks = tuple(range(TOPOLOGY.world_size))
    shared = tuple(range(SHARED_SEQUENCES))
    groups = [Group(ranks=ranks, sequences=shared, strategy=strategy)]
    for rank in ranks:
        first = SHARED_SEQUENCES + 2 * rank
        groups.append(Group(ranks=(rank,), sequences=(first, first + 1), strategy="local"))
    return Plan(
        lengths=SEQUENCES,
        micro_batches=(MicroBatch(groups=tuple(groups)),),
        objective_s=0.0,
        lower_bound_s=0.0,
        planner="probe",
        planning_s=0.0,
    )


# ---- runs


def _run_alone(
    model: PreTrainedModel, sequences: Sequence[torch.Tensor], *, gradients: bool = False
) -> _Run:
    """Run every sequence by itself, without ranks."""
    outputs = []
    with torch.set_grad_enabled(gradients):
        for index, tokens in enumerate(sequences):
            # [length] -> [1, length, vocabulary] -> [length, vocabulary]
            logits = model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0]
            if gradients:
                (logits * _weights(index, 0, logits)).sum().backward()
            outputs.append(logits.detach())
    return _Run(outputs, _taken_gradients(model))


def _run_ranks(
    ranks: _Ranks, sequences: Sequence[torch.Tensor], *, gradients: bool = False
) -> _Run:
    """Run all sequences on ranks that are threads."""
    plan = _plan(ranks.strategy)
    outputs = [torch.empty(0)] * len(sequences)
    summed: dict[str, torch.Tensor] = {}

    def run_rank(transport: ThreadTransport) -> None:
        communicator = Communicator(TOPOLOGY, transport=transport)
        own = ranks.models[communicator.rank]
        shard = make_shard(plan.micro_batches[0], plan.lengths, communicator.rank)
        slices = [part for zone in shard.zones for part in zone.slices]
        context = SequenceContext(shard, communicator, ranks.kernel, CPU)
        with torch.set_grad_enabled(gradients):
            inputs = _inputs(sequences, slices, needed_columns(own))
            logits = own(**inputs, seq_ctx=context, use_cache=False).logits[0]
            # [tokens, vocabulary] -> of each slice
            rows = logits.split([part.tokens for part in slices])
            if gradients:
                loss = torch.zeros((), dtype=logits.dtype)
                for part, part_logits in zip(slices, rows, strict=True):
                    weights = _weights(part.sequence, part.start, part_logits)
                    loss = loss + (part_logits * weights).sum()
                loss.backward()
        for part, part_logits in zip(slices, rows, strict=True):
            if not outputs[part.sequence].numel():
                size = (len(sequences[part.sequence]), logits.shape[-1])
                outputs[part.sequence] = logits.new_full(size, torch.nan)
            outputs[part.sequence][part.start : part.stop] = part_logits.detach()
        for name, gradient in _taken_gradients(own).items():
            summed[name] = summed[name] + gradient if name in summed else gradient

    run_threads(run_rank, TOPOLOGY.world_size)
    return _Run(outputs, summed)


def _inputs(
    sequences: Sequence[torch.Tensor], slices: Sequence[Slice], names: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return the columns of a rank's call, each [1, tokens]. names: of optional columns."""
    parts: dict[str, list[torch.Tensor]] = {}
    for part in slices:
        whole = sequences[part.sequence]
        positions = torch.arange(part.start, part.stop)
        columns = {
            "input_ids": whole[part.start : part.stop],
            "position_ids": positions,
            INDICES: positions,
            LENGTHS: torch.full_like(positions, len(whole)),
        }
        for name, column in columns.items():
            parts.setdefault(name, []).append(column)
    wanted = {"input_ids", "position_ids", *names}
    return {name: torch.cat(parts[name]).unsqueeze(0) for name in wanted}


def _weights(sequence: int, start: int, logits: torch.Tensor) -> torch.Tensor:
    """Return the fixed weights of a loss for logits [tokens, vocabulary] from token `start` on."""
    tokens, vocabulary = logits.shape
    rows = torch.arange(start, start + tokens, dtype=logits.dtype).unsqueeze(1) + 1
    columns = torch.arange(vocabulary, dtype=logits.dtype) + 1
    return torch.sin(rows * columns + sequence)


def _taken_gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the gradients by name of parameter, and leave none on the model."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad
    model.zero_grad()
    return gradients


# ---- modules


@contextmanager
def _noted_outputs(
    model: PreTrainedModel, parts: Sequence[Slice], noted: list[tuple[str, Slice, torch.Tensor]]
) -> Iterator[None]:
    """Note the first output of every module that has a row for each token of `parts`, the parts of
    sequences in a call: by name of the module and part, [tokens, ...]."""
    sizes = [part.tokens for part in parts]
    seen: set[str] = set()

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) and output else output
        if name in seen or not isinstance(output, torch.Tensor) or not output.dim():
            return
        seen.add(name)
        rows = output[0] if output.dim() > 2 and output.shape[0] == 1 else output
        if rows.shape[0] == sum(sizes):
            for part, of_part in zip(parts, rows.detach().double().split(sizes), strict=True):
                noted.append((name, part, of_part))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hooks.callback(module.register_forward_hook(partial(note, name)).remove)
        yield


def _first_difference(
    ranks: _Ranks, alone: PreTrainedModel, sequences: Sequence[torch.Tensor], same: float
) -> str:
    """Name the first module, in the order in which they end, whose output differs on the ranks."""
    # 1. one process: by module and sequence, [length, ...]
    noted: list[tuple[str, Slice, torch.Tensor]] = []
    for index, tokens in enumerate(sequences):
        with _noted_outputs(alone, [Slice(index, 0, len(tokens))], noted):
            _run_alone(alone, [tokens])
    wanted: dict[str, dict[int, torch.Tensor]] = {}
    for name, part, rows in noted:
        wanted.setdefault(name, {})[part.sequence] = rows

    # 2. ranks, each of which has parts of the sequences
    found: list[tuple[str, Slice, torch.Tensor]] = []
    plan = _plan(ranks.strategy)
    with ExitStack() as noting:
        for rank, model in enumerate(ranks.models):
            shard = make_shard(plan.micro_batches[0], plan.lengths, rank)
            parts = [part for zone in shard.zones for part in zone.slices]
            noting.enter_context(_noted_outputs(model, parts, found))
        _run_ranks(ranks, sequences)
    differing: dict[str, int] = {}  # a sequence by module
    for name, part, rows in found:
        of_module = wanted.get(name, {})
        scale = max((float(output.abs().max()) for output in of_module.values()), default=0.0)
        if part.sequence not in of_module:
            continue  # its output has no row for each token
        own = of_module[part.sequence][part.start : part.stop]
        if own.shape == rows.shape and not float((rows - own).abs().max()) <= same * scale:
            differing.setdefault(name, part.sequence)
    for name in wanted:
        if name in differing:
            return (
                f"the first module whose output differs is {name}, in sequence {differing[name]}"
            )
    return "the outputs of all modules inside are equal"


# ---- comparisons


def _differences(have: _Run, want: _Run, same: float) -> list[str]:
    """Return lines on differing outputs and gradients. same: tolerance, tenfold for gradients."""
    found = []
    scale = max(float(output.abs().max()) for output in want.outputs)
    for sequence, (output, wanted) in enumerate(zip(have.outputs, want.outputs, strict=True)):
        off = (output - wanted).abs().amax(dim=-1) / scale  # [length, vocabulary] -> [length]
        at = torch.nonzero(~(off <= same)).flatten().tolist()
        if at:
            found.append(
                f"outputs of sequence {sequence} differ by up to {float(off.max()):.1e} at "
                f"{len(at)} of {len(off)} tokens, the first is {at[0]}"
            )
    if have.gradients.keys() != want.gradients.keys():
        names = sorted(have.gradients.keys() ^ want.gradients.keys())
        found.append(f"gradients are missing or too many: {', '.join(names[:3])}")
        return found
    for name, error in errors_of(have.gradients, want.gradients).items():
        if not error <= 10 * same:
            found.append(f"the gradient of {name} differs by {error:.1e}")
    return found


def _wrong_changes(
    want: Sequence[torch.Tensor],
    want_after: Sequence[torch.Tensor],
    have: Sequence[torch.Tensor],
    have_after: Sequence[torch.Tensor],
) -> str | None:
    """Return which outputs changed wrongly, or wrongly did not; None if neither. Arguments are
    outputs of all sequences, before and after the change of a token."""
    scale = max(float(output.abs().max()) for output in want)
    for sequence in range(len(want)):
        # [length, vocabulary] -> [length]
        wanted = (want_after[sequence] - want[sequence]).abs().amax(dim=-1) / scale
        had = (have_after[sequence] - have[sequence]).abs().amax(dim=-1) / scale
        leaks = (wanted <= UNCHANGED) & ~(had <= CHANGED)
        losses = (wanted >= CHANGED) & ~(had > UNCHANGED)
        for verb, where in (("change", leaks), ("do not change", losses)):
            at = torch.nonzero(where).flatten().tolist()
            if at:
                return (
                    f"{len(at)} outputs of sequence {sequence} {verb}, the first is {at[0]}, "
                    "otherwise than in one process"
                )
    return None
