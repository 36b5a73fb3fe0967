"""Documents that share a row, a rank or a group do not see each other: not one bit of another
document changes. Ranks are threads."""

import pytest
import torch

from hf_flexseq.attention import SequenceContext
from hf_flexseq.base.topology import Topology
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from tests.hf.by_hand import ways_between_nodes
from tests.hf.tiny import VOCAB, tiny_llama
from tests.published.zeppelin.gainful_passes import Always
from tests.ranks import join, run_threads

CPU = torch.device("cpu")

LENGTHS = [9, 14, 5, 1, 11]
CHANGED = 2


def changed_tokens(changed):
    """The tokens of all documents, before and after one of them has changed."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    after = list(tokens)
    after[changed] = [(token + 1) % VOCAB for token in tokens[changed]]
    return tokens, after


def rows_of_slices(slices):
    """[rows, 2] of slices: each a document and a position in it."""
    return torch.tensor([[s.sequence, t] for s in slices for t in range(s.start, s.stop)])


def logits_of(model, rows, tokens, seq_ctx):
    """Logits [1, rows, V] of rows [rows, 2], and the embeddings [1, rows, C] that they are of."""
    ids = torch.tensor([[tokens[document][position] for document, position in rows.tolist()]])
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    given = {"position_ids": rows[:, 1][None], "seq_ctx": seq_ctx, "use_cache": False}
    return model(inputs_embeds=embeddings, **given).logits, embeddings


def loss_of_others(logits, rows, changed):
    """The loss of every document but the changed one, from logits [1, rows, V]."""
    others = rows[:, 0] != changed
    return (logits[0, others].logsumexp(-1) - logits[0, others, 0]).sum()


def check_isolated(before, after, changed):
    """Compare (rows, logits, gradient of the others' loss) of every part of a batch: bits of the
    other documents are the same, every token of the changed one has other logits, and the others'
    loss does not depend on it."""
    touched = 0
    for (rows, logits, gradient), (_, new_logits, new_gradient) in zip(before, after, strict=True):
        own = rows[:, 0] == changed
        touched += int((logits[own] != new_logits[own]).any(-1).sum())
        assert not gradient[own].any()
        assert not new_gradient[own].any()
        assert torch.equal(logits[~own], new_logits[~own])
        assert torch.equal(gradient[~own], new_gradient[~own])
    assert touched == LENGTHS[changed]


# ---- micro-batches of groups


def micro_batch_of(strategy, world_size, *, nested):
    """All documents in one group; nested, besides one that rank 0 has alone."""
    everyone = tuple(range(world_size))
    shared = (0, 1, 2, 3) if nested else (0, 1, 2, 3, 4)
    groups = [Group(ranks=everyone, sequences=shared, strategy=strategy)]
    if nested:
        groups.append(Group(ranks=(0,), sequences=(4,), strategy="local"))
    return MicroBatch(groups=tuple(groups))


def logits_and_gradient(rank, world_size, topology, micro_batch, passes, tokens):
    """This rank's rows [rows, 2], logits [rows, V], the gradient [rows, C] of the other documents'
    loss with respect to the embeddings, and its ways between nodes."""
    communicator = join(topology)
    model = tiny_llama()
    model.set_attn_implementation("flexseq")
    shard = (passes.shard if passes else make_shard)(micro_batch, tuple(LENGTHS), rank)
    rows = rows_of_slices(shard.slices)
    kernel = choose_kernel(CPU, torch.float64, 8)
    seq_ctx = SequenceContext(shard, communicator, kernel, CPU, passes=passes)
    logits, embeddings = logits_of(model, rows, tokens, seq_ctx)
    loss_of_others(logits, rows, CHANGED).backward()
    return (rows, logits[0].detach(), embeddings.grad[0]), ways_between_nodes([seq_ctx])


# nodes, ranks of each, strategy, whether the groups are nested, and whether Zeppelin's passes run
LAYOUTS = [
    (1, 1, "local", False, False),
    (1, 3, "ulysses", False, False),
    (2, 2, "ulysses", True, True),
    (1, 2, "zigzag", False, False),
    (2, 2, "zigzag", False, True),
    (2, 2, "zigzag", True, True),
    (1, 3, "balanced", True, False),
    (2, 2, "balanced", False, False),
    (1, 2, "hybrid", False, False),
    (2, 2, "hybrid", False, False),
    (3, 1, "hybrid", True, False),
]


@pytest.mark.parametrize(("nodes", "per_node", "strategy", "nested", "with_passes"), LAYOUTS)
def test_a_changed_document_changes_no_other(nodes, per_node, strategy, nested, with_passes):
    topology = Topology(nodes=nodes, ranks_per_node=per_node)
    ranks = topology.world_size
    micro_batch = micro_batch_of(strategy, ranks, nested=nested)
    given = (topology, micro_batch, Always(topology) if with_passes else None)
    parts = []
    for tokens in changed_tokens(CHANGED):
        by_rank = run_threads(logits_and_gradient, ranks, *given, tokens)
        parts.append([part for part, _ in by_rank])
        has_ring = all("ring of a hybrid" in ways for _, ways in by_rank)
        assert has_ring == (strategy == "hybrid" and nodes > 1)
    check_isolated(*parts, CHANGED)
