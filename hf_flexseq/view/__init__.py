"""Show a timeline: as text in a terminal, as a picture, or as a trace for Perfetto.

    text_grid(timeline)              ranks downwards, time to the right, one symbol per degree
    save_picture(timeline, "x.png")  the same with colours: PNG, SVG, or another of matplotlib's
    chrome_trace(timeline)           JSON values for ui.perfetto.dev and chrome://tracing
    chrome_text(draw, layers=4)      the same as text that a viewer opens quickly

All draw a `Timeline`: a simulated one, or the sketch of a plan (`timeline.sketch`) where
there is no cost model.
"""

from hf_flexseq.view.chrome import chrome_text, chrome_trace
from hf_flexseq.view.picture import save_picture
from hf_flexseq.view.text import text_grid

__all__ = ["chrome_text", "chrome_trace", "save_picture", "text_grid"]
