"""What the boxes of a timeline look like: a colour and marks for each degree, or for each kind of
work, and the legends that say so.

A box has both classes; the class of the chart decides which of the two its colour tells.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hf_flexseq.timeline import ACTION_KINDS, Event, Timeline
from hf_flexseq.view.picture import ACTION_COLOURS, CONSTANT, colour_index, colour_of, paler
from hf_flexseq.view.report.charts import key, pattern
from hf_flexseq.view.report.markup import Markup, element, joined
from hf_flexseq.view.report.words import counted
from hf_flexseq.view.shares import degrees

# Units of the picture along time: as fine as its shapes are, and exact as 32 bit floats.
UNITS = 1_000_000

# What else colours can tell: the kind of work. Each has a colour and the index of its marks.
WORK = {
    "linear": ("linear layers", "#8fb4d9", 0),
    "attention": ("attention of full layers", "#d98032", 2),
    "near": ("attention of layers with a window or a chunk", "#f3d08b", 1),
    "scan": ("recurrent layers", "#7d6ba6", 3),
    "group": ("a group's work", "#8fb4d9", 0),
    "transfer": ("communication", "#5c6670", 4),
    "constant": ("constant per micro-batch", CONSTANT, 0),
}


@dataclass(frozen=True, slots=True)
class Box:
    """What neighbouring ranks do at the same time in the same group."""

    first: int
    """The first of the ranks."""
    stop: int
    """The one past the last."""
    event: Event
    """What one of them does, its times in units of the picture."""


def _degree_class(degree: int) -> str:
    """Return the class of a degree's colour and marks."""
    return f"d{degree}"


def _work_class(event: Event) -> str:
    """Return the class of an event's kind of work, one of `WORK` or of the actions."""
    if event.kind in ACTION_COLOURS:
        return f"a{ACTION_KINDS.index(event.kind)}"
    if event.kind in ("transfer", "constant"):
        return event.kind
    if event.label.startswith("attention, "):
        return "near"
    if event.label in ("linear", "attention", "scan"):
        return event.label
    return "group"


def classes(event: Event) -> str:
    """Return the classes of a box in the style sheet."""
    work = _work_class(event)
    return f"{work} {_degree_class(event.degree)}" if event.degree else work


def marks_class(event: Event) -> str:
    """Return whose marks a box has, "" for none: its degree's, or where it belongs to no group
    those of its work."""
    if event.degree:
        return _degree_class(event.degree) if colour_index(event.degree) else ""
    work = _work_class(event)
    return work if _work_look(work)[1] else ""


def patterns(boxes: Sequence[Box], timeline: Timeline, height: int) -> Markup:
    """Return the marks that the picture uses, and the style that says which box has which colour.

    A tile of marks is as wide as in a picture of 1,000 pixels; the script keeps it so. The keys of
    the legend have tiles of their own, in pixels. Boxes have plain colours, and one shape for each
    degree has the marks of all its boxes: to print a thousand shapes with marks takes minutes.
    """
    scale = f"scale({UNITS / 1000:g} {timeline.world_size / height:.4g})"
    shared = {box.event.degree for box in boxes} - {0}  # degrees; 0 is of no group
    looks = {_degree_class(degree): _degree_look(degree) for degree in sorted(shared)}
    works = {_work_class(box.event): _work_look(_work_class(box.event)) for box in boxes}
    tiles = []
    rules = []
    for name, (colour, index) in (looks | works).items():
        marks = _ink(colour)
        tiles.append(pattern(f"m-{name}", "none", index, marks, transform=scale))
        tiles.append(pattern(f"k-{name}", colour, index, marks))
        rules.append(f".key .{name}{{fill:url(#k-{name})}}")
    for name, (colour, _) in looks.items():
        rules.append(f".by-degree .{name}{{fill:{colour}}}")
        rules.append(f".by-degree .transfer.{name}{{fill:{paler(colour)}}}")
    for name, (colour, index) in works.items():
        # What belongs to no group has the colour of its work whatever colours tell.
        rules.append(f".by-work .{name},.boxes [class='{name}']{{fill:{colour}}}")
        if looks and index:
            tiles.append(pattern(f"t-{name}", colour, index, _ink(colour), transform=scale))
            rules.append(f"@media screen{{.by-work .{name}{{fill:url(#t-{name})}}}}")
    defs = element("svg", element("defs", *tiles), width=0, height=0, class_="defs")
    return joined(defs, element("style", Markup("".join(rules))))


def _degree_look(degree: int) -> tuple[str, int]:
    """Return the colour of a degree, and the index of its marks."""
    return colour_of(degree), colour_index(degree)


def _work_look(name: str) -> tuple[str, int]:
    """Return the colour of a kind of work, and the index of its marks."""
    if name in WORK:
        _, colour, index = WORK[name]
        return colour, index
    index = int(name[1:])
    return ACTION_COLOURS[ACTION_KINDS[index]], index


def _ink(colour: str) -> str:
    """Return the colour of marks on `colour`, written #rrggbb: dark on light, light on dark."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    light = 0.3 * red + 0.59 * green + 0.11 * blue > 120
    return "#2b2f3699" if light else "#ffffffaa"


def legend(timeline: Timeline, boxes: Sequence[Box]) -> Markup:
    """Return both legends, of degrees and of kinds of work; the style sheet shows the one that
    colours tell."""
    by_degree = []
    for degree, count in degrees(timeline).items():
        text = f"degree {degree} ({counted(count, 'group')})"
        by_degree.append(_entry(_degree_class(degree), text))
    works = dict.fromkeys(_work_class(box.event) for box in boxes)
    by_work = []
    for work in works:
        name = WORK[work][0] if work in WORK else ACTION_KINDS[int(work[1:])]
        by_work.append(_entry(work, name))
        if work == "constant":
            by_degree.append(_entry(work, name))
    if "transfer" in works:
        by_degree.append(element("span", "paler: communication ", class_="entry"))
    idle = key("idle", "idle")
    if not degrees(timeline):
        return element("p", *by_work, idle, class_="legend")
    return joined(
        element("p", *by_degree, idle, class_="legend of-degree"),
        element("p", *by_work, idle, class_="legend of-work"),
    )


def _entry(class_: str, text: str) -> Markup:
    """Return an entry of the legend: a sample of a class's colour and marks, and its name."""
    box = element("rect", width="100%", height="100%", class_=class_)
    sample = element("svg", box, class_="key", aria_hidden="true")
    return element("span", sample, f"{text} ", class_="entry")
