"""The timeline of a plan, and pictures of it.

timeline_of(plan, topology, cost)    a Timeline by the closed form; `sketch` without a cost model
text_grid(timeline)                  ranks downwards, time to the right, a symbol per degree
save_picture(timeline, "x.png")      the same with colours: PNG, SVG, or another of matplotlib's
chrome_text(timeline)                JSON for ui.perfetto.dev and chrome://tracing
"""

from hf_flexseq.view.chrome import chrome_text, chrome_trace
from hf_flexseq.view.closed_form import sketch, timeline_of
from hf_flexseq.view.picture import save_picture
from hf_flexseq.view.text import text_grid

__all__ = [
    "chrome_text",
    "chrome_trace",
    "save_picture",
    "sketch",
    "text_grid",
    "timeline_of",
]
