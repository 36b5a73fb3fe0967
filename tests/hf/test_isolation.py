"""Documents that share a row, a rank or a group do not see each other: not one bit of another
document changes."""

import pytest
import torch

from hf_flexseq.attention import SequenceContext
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from tests.hf.tiny import VOCAB, tiny_llama
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes


LENGTHS = [9, 14, 5, 1, 11]
CHANGED = 2


def logits_and_gradient(rank, world_size, strategy, tokens):
    """This rank's logits, and the gradient of the loss of every document but the changed one with
    respect to the input embeddings, row by row, with the document that each row belongs to."""
    model = tiny_llama()
    model.set_attn_implementation("flexseq")
    group = Group(
        ranks=tuple(range(world_size)), sequences=tuple(range(len(LENGTHS))), strategy=strategy
    )
    shard = make_shard(MicroBatch(groups=(group,)), LENGTHS, rank)
    kernel = choose_kernel(torch.device("cpu"), torch.float64, 8)
    seq_ctx = SequenceContext(shard, Communicator(), kernel, torch.device("cpu"))
    rows = torch.tensor(
        [[i, t] for s in shard.slices for i in [s.sequence] for t in range(s.start, s.stop)]
    )
    ids = torch.tensor([[tokens[i][t] for i, t in rows.tolist()]])
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(
        inputs_embeds=embeddings, position_ids=rows[:, 1][None], seq_ctx=seq_ctx, use_cache=False
    ).logits
    others = rows[:, 0] != CHANGED
    (logits[0, others].logsumexp(-1) - logits[0, others, 0]).sum().backward()
    return rows[:, 0].tolist(), logits[0].detach().numpy(), embeddings.grad[0].numpy()


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [
        (1, "local"),
        (2, "ulysses"),
        (3, "ulysses"),
        (2, "zigzag"),
        (3, "zigzag"),
        (3, "balanced"),
        (2, "allgather"),
    ],
)
def test_a_changed_document_changes_no_other(world_size, strategy):
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    changed = [
        [(t + 1) % VOCAB for t in row] if i == CHANGED else row for i, row in enumerate(tokens)
    ]
    before = run_ranks(logits_and_gradient, world_size, strategy, tokens)
    after = run_ranks(logits_and_gradient, world_size, strategy, changed)
    touched = 0
    for (rows, logits, gradient), (_, new_logits, new_gradient) in zip(before, after, strict=True):
        for place, document in enumerate(rows):
            if document == CHANGED:
                touched += int((logits[place] != new_logits[place]).any())
                assert not gradient[place].any()
                assert not new_gradient[place].any()
            else:
                assert (logits[place] == new_logits[place]).all()
                assert (gradient[place] == new_gradient[place]).all()
    assert touched == LENGTHS[CHANGED]
