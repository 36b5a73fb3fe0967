"""A layer of experts, over the ranks of expert groups and on one process.

    over_ranks        exchanges tokens as transformers' `AllToAllEP` does, in the same order
    on_one_process    computes the same of all tokens, with all experts

An expert group is some neighbouring ranks, which together hold all experts. Each of them sends its
tokens to the experts of their choice, and gets the results back:

    counts    how many tokens each rank sends to each expert; read on the host
    there     the tokens
    back      the results

The backward runs two exchanges, of the gradients of the results and of the tokens. A rank without
tokens, or without tokens for its experts, takes part in all of them.

`tests/hf/test_one_order.py` records what the real layer launches, and in which order.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The experts of every layer."""

    group_ranks: int
    """Ranks of an expert group."""
    of_rank: int
    """Experts that each of them holds."""
    top_k: int
    """Experts that work on a token."""
    one_rank_is_preferred: bool
    """Whether all tokens go to the last experts, so that the other ranks may receive none."""

    @property
    def count(self) -> int:
        """Experts of a layer."""
        return self.group_ranks * self.of_rank


def open_expert_group(communicator, experts):
    """Return this rank's expert group. Collective over the world."""
    first_ranks = range(0, communicator.world_size, experts.group_ranks)
    parts = [range(first, first + experts.group_ranks) for first in first_ranks]
    return communicator.transport.open_group(parts)


def over_ranks(x, weight, experts, group, rank):
    """[tokens, heads, head_dim] -> the same shape. Collective over the expert group.

    weight: [heads, head_dim], of which all experts are made.
    """
    rows = x.flatten(1)  # -> [tokens, width]
    width = rows.shape[1]
    choices, shares = _routed(rows, experts)  # [tokens, top_k] each

    # 1. tokens in the order of their experts, and how many of them each expert of each rank gets
    flat_choices = choices.flatten()  # -> [tokens * top_k]
    order = torch.argsort(flat_choices, stable=True)
    sent_counts = torch.bincount(flat_choices, minlength=experts.count)
    received_counts = torch.empty_like(sent_counts)
    of_each = [experts.of_rank] * experts.group_ranks
    group.all_to_all(received_counts, sent_counts, of_each, of_each).wait()
    sent = _sums_by_rank(sent_counts, experts)
    received = _sums_by_rank(received_counts, experts)

    # 2. there
    arrived = _Exchange.apply(rows[order // experts.top_k], group, sent, received)

    # 3. this rank's experts
    first = group.ranks.index(rank) * experts.of_rank
    own_experts = torch.arange(first, first + experts.of_rank).repeat(experts.group_ranks)
    results = _expert(arrived, weight, own_experts.repeat_interleave(received_counts))

    # 4. back, and into the order of the tokens
    returned = _Exchange.apply(results, group, received, sent)
    by_choice = torch.zeros_like(returned).index_copy(0, order, returned)
    by_token = by_choice.view(-1, experts.top_k, width)
    return (by_token * shares.unsqueeze(-1)).sum(1).view_as(x)


def on_one_process(x, weight, experts):
    """What `over_ranks` returns, of any tokens."""
    rows = x.flatten(1)  # -> [tokens, width]
    choices, shares = _routed(rows, experts)  # [tokens, top_k] each
    total = torch.zeros_like(rows)
    for choice in range(experts.top_k):
        results = _expert(rows, weight, choices[:, choice])
        total = total + results * shares[:, choice, None]
    return total.view_as(x)


def _routed(rows, experts):
    """[tokens, width] -> the experts of every token and their shares, [tokens, top_k] each."""
    numbers = torch.arange(1, 1 + experts.count * rows.shape[1], dtype=rows.dtype)
    scores = rows @ numbers.view(-1, experts.count).sin()  # -> [tokens, experts]
    preferences = scores.detach()
    if experts.one_rank_is_preferred:
        preferences = torch.arange(experts.count).expand_as(scores)
    choices = preferences.topk(experts.top_k).indices
    return choices, scores.gather(1, choices).softmax(-1)


def _expert(rows, weight, numbers):
    """Rows [n, width] through one expert each, whose numbers are [n]."""
    weights = (weight.flatten() * (1 + numbers.unsqueeze(1))).sin()  # [width] -> [n, width]
    return (rows * weights).tanh()


def _sums_by_rank(counts, experts):
    """[experts] -> a list of as many numbers as the group has ranks."""
    return counts.view(experts.group_ranks, experts.of_rank).sum(1).tolist()


class _Exchange(torch.autograd.Function):
    """Rows to the ranks of a group, and their gradients back."""

    @staticmethod
    def forward(ctx, rows, group, sent, received):
        """[sent rows, width] -> [received rows, width]. sent, received: rows by rank."""
        ctx.group = group
        ctx.sent = sent
        ctx.received = received
        return exchanged(rows, group, sent, received)

    @staticmethod
    def backward(ctx, gradient):
        return exchanged(gradient, ctx.group, ctx.received, ctx.sent), None, None, None


def exchanged(rows, group, sent, received):
    """[sent rows, width] -> [received rows, width]"""
    width = rows.shape[1]
    arrived = rows.new_empty(sum(received), width)
    sent_elements = [count * width for count in sent]
    received_elements = [count * width for count in received]
    flat = rows.contiguous().view(-1)
    group.all_to_all(arrived.view(-1), flat, received_elements, sent_elements).wait()
    return arrived
