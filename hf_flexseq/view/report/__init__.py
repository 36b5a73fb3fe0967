"""A page to send around: what planning brings on some lengths, or what a run did.

    page(report)    one HTML file: no network, inline SVG, a little script, below two megabytes

    markup.py       elements; everything that is not made there is escaped
    charts.py       axes, bars, lines, and marks that tell colours apart
    lengths.py      the distribution of lengths
    planners.py     seconds, gap, communication and memory of each planner
    step.py         a step as a timeline; looks.py, its colours and legends
    run.py          predicted against measured over the steps of a run
    page.py         the summary, and the whole
    style.css, script.js

The page says in a policy of its own that it loads nothing and runs nothing but `script.js`.
"""

from hf_flexseq.view.report.lengths import Lengths, lengths_of
from hf_flexseq.view.report.page import Report, page
from hf_flexseq.view.report.run import RunStep
from hf_flexseq.view.report.step import Step

__all__ = ["Lengths", "Report", "RunStep", "Step", "lengths_of", "page"]
