"""The lengths: how many sequences, and how many of the tokens, lie between two powers of two."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_flexseq.view.report.charts import HIGH, WIDE, Tick, bar, chart, key, ticks_up_to
from hf_flexseq.view.report.markup import Markup, element, joined, table
from hf_flexseq.view.report.words import share, tokens

QUANTILES = (0.5, 0.9, 0.99)
LONGEST = 0.05  # the share of sequences whose tokens the summary tells


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Some lengths in numbers."""

    sequences: int
    """How many there are."""
    tokens: int
    """Their sum."""
    longest: int
    """The largest one."""
    quantiles: tuple[int, ...]
    """The lengths that a share of `QUANTILES` of the sequences do not exceed."""
    share_of_longest: float
    """Share of the tokens that the longest sequences have, `LONGEST` of all."""
    bins: tuple[tuple[int, int, int], ...]
    """(first length, sequences, tokens) from one power of two to the next, without empty ones at
    the ends."""

    @property
    def mean(self) -> float:
        """Tokens of a sequence on average."""
        return self.tokens / self.sequences


def lengths_of(lengths: Sequence[int]) -> Lengths:
    """Return lengths, at least one, in numbers."""
    ascending = np.sort(np.array(lengths, dtype=np.int64))  # [sequences]
    count = ascending.size
    total = int(ascending.sum())
    places = [min(count - 1, int(np.ceil(q * count)) - 1) for q in QUANTILES]
    long = max(1, round(LONGEST * count))
    bins = []
    first = 1 << (int(ascending[0]).bit_length() - 1)
    while first <= ascending[-1]:
        low, high = np.searchsorted(ascending, (first, 2 * first))
        bins.append((first, int(high - low), int(ascending[low:high].sum())))
        first *= 2
    return Lengths(
        sequences=count,
        tokens=total,
        longest=int(ascending[-1]),
        quantiles=tuple(int(ascending[place]) for place in places),
        share_of_longest=int(ascending[-long:].sum()) / total,
        bins=tuple(bins),
    )


def lengths_part(lengths: Lengths, remarks: Sequence[str]) -> Markup:
    """Return the part of the page about lengths. remarks: paragraphs below the chart."""
    p50, p90, p99 = (f"{one:,}" for one in lengths.quantiles)
    head = ("", "sequences", "tokens", "mean", "median", "90 %", "99 %", "longest")
    row = (
        "tokens of a sequence",
        f"{lengths.sequences:,}",
        f"{lengths.tokens:,}",
        f"{lengths.mean:,.0f}",
        p50,
        p90,
        p99,
        f"{lengths.longest:,}",
    )
    return element(
        "section",
        element("h2", "Lengths"),
        element(
            "p",
            key("few", "share of the sequences"),
            key("much", "share of the tokens"),
            "from each length to twice as many",
            class_="legend",
        ),
        _histogram(lengths),
        table(head, [row], caption="90 %: nine of ten sequences are not longer"),
        *(element("p", remark) for remark in remarks),
        id="lengths",
    )


def _histogram(lengths: Lengths) -> Markup:
    """Return the chart: two bars for each bin."""
    width = WIDE / len(lengths.bins)
    shares = []
    for _, sequences, of_bin in lengths.bins:
        shares.append((sequences / lengths.sequences, of_bin / lengths.tokens))
    top = 1.05 * max(max(pair) for pair in shares)
    bars = []
    for index, pair in enumerate(shares):
        for place, (value, class_) in enumerate(zip(pair, ("few", "much"), strict=True)):
            tall = HIGH * value / top
            left = width * (index + 0.1 + 0.4 * place)
            bars.append(bar(left, HIGH - tall, 0.4 * width, tall, class_))
    x_ticks = []
    for index, (first, _, _) in enumerate(lengths.bins):
        x_ticks.append(Tick(index / len(lengths.bins), tokens(first)))
    x_ticks.append(Tick(1.0, tokens(2 * lengths.bins[-1][0])))
    fullest = max(lengths.bins, key=lambda one: one[2])
    says = (
        f"Lengths from {lengths.bins[0][0]:,} to {lengths.longest:,} tokens; those from "
        f"{fullest[0]:,} to {2 * fullest[0]:,} hold {share(fullest[2] / lengths.tokens)} of the "
        "tokens."
    )
    return chart(
        joined(*bars),
        x_ticks=x_ticks,
        y_ticks=ticks_up_to(100 * top),
        x_label="tokens of a sequence",
        y_label="share, %",
        says=says,
    )
