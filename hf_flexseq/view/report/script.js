// The timeline: zoom, move, and tell what is under the pointer. Without this script it stands still.
"use strict";

const part = document.getElementById("timeline");
if (part) {
  const facts = JSON.parse(document.getElementById("data").textContent);
  const svg = part.querySelector(".boxes");
  const over = part.querySelector(".over");
  const axis = part.querySelector(".axis");
  const told = document.getElementById("told");
  const chart = document.getElementById("step-chart");
  const lowest = part.clientHeight;
  const view = { from: 0, width: facts.units }; // what is seen of the step, in units
  let pinned = false; // whether a click holds what is told

  // ---- drawing

  function draw() {
    view.width = Math.min(facts.units, Math.max(facts.units / 5000, view.width));
    view.from = Math.min(facts.units - view.width, Math.max(0, view.from));
    svg.setAttribute("viewBox", `${view.from} 0 ${view.width} ${facts.ranks}`);
    const box = svg.getBoundingClientRect();
    const scale = `scale(${view.width / box.width} ${facts.ranks / box.height})`;
    for (const pattern of part.querySelectorAll("pattern[patternTransform]")) {
      pattern.setAttribute("patternTransform", scale);
    }
    drawNumbers(box);
    drawTimes(box);
  }

  // The numbers of micro-batches, and the degree of each group, where there is room.
  function drawNumbers(box) {
    const texts = [];
    let free = 0; // where the number before ends, in pixels
    facts.starts.forEach((start, index) => {
      const stop = facts.starts[index + 1] ?? facts.units;
      const low = Math.max(start, view.from);
      const high = Math.min(stop, view.from + view.width);
      const middle = pixels((low + high) / 2, box);
      if (high <= low || middle - 9 < free) return;
      free = middle + 9;
      texts.push(text(String(index), "batch", middle / box.width, null));
    });
    for (const [start, stop, first, degree] of Object.values(facts.groups)) {
      const low = Math.max(start, view.from);
      const high = Math.min(stop, view.from + view.width);
      if (((high - low) / view.width) * box.width < 18) continue;
      if ((degree / facts.ranks) * box.height < 13) continue;
      const left = pixels((low + high) / 2, box) / box.width;
      texts.push(text(String(degree), "degree", left, (first + degree / 2) / facts.ranks));
    }
    over.replaceChildren(...texts);
  }

  function drawTimes(box) {
    const perUnit = facts.stop / facts.units;
    const rough = (view.width * perUnit) / Math.max(2, box.width / 120);
    if (!(rough > 0)) return;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * ([1, 2, 5].find((factor) => factor * power >= rough) ?? 10);
    const digits = Math.max(0, -Math.floor(Math.log10(step)));
    const texts = [];
    for (let n = Math.ceil((view.from * perUnit) / step); ; n++) {
      const at = (n * step) / perUnit;
      if (at > view.from + view.width) break;
      texts.push(text((n * step).toFixed(digits), "x", pixels(at, box) / box.width, null));
    }
    axis.replaceChildren(...texts);
  }

  // left, top: shares of the picture, so that a text stays in place on paper.
  function text(content, kind, left, top) {
    const made = document.createElement("span");
    made.className = `t ${kind}`;
    made.textContent = content;
    made.style.left = `${100 * left}%`;
    if (top !== null) made.style.top = `${100 * top}%`;
    return made;
  }

  function pixels(unit, box) {
    return ((unit - view.from) / view.width) * box.width;
  }

  // ---- moving

  function zoom(factor, share = 0.5) {
    const at = view.from + share * view.width;
    view.width /= factor;
    view.width = Math.min(facts.units, Math.max(facts.units / 5000, view.width));
    view.from = at - share * view.width;
    draw();
  }

  function move(share) {
    view.from += share * view.width;
    draw();
  }

  function show(from, to) {
    view.from = from;
    view.width = to - from;
    draw();
  }

  const actions = {
    in: () => zoom(2),
    out: () => zoom(1 / 2),
    left: () => move(-1 / 4),
    right: () => move(1 / 4),
    all: () => show(0, facts.units),
    tall: () => {
      const is = part.clientHeight;
      part.style.height = `${is > lowest ? lowest : 2 * lowest}px`;
      draw();
    },
  };
  const keys = { "+": "in", "=": "in", "-": "out", 0: "all", ArrowLeft: "left", ArrowRight: "right" };

  for (const button of document.querySelectorAll("button[data-do]")) {
    button.addEventListener("click", actions[button.dataset.do]);
  }
  for (const select of document.querySelectorAll("select[data-do]")) {
    select.addEventListener("change", () => {
      if (select.dataset.do === "colours") {
        chart.classList.remove("by-degree", "by-work");
        chart.classList.add(select.value);
      } else if (select.value !== "") {
        const index = Number(select.value);
        show(facts.starts[index], facts.starts[index + 1] ?? facts.units);
      }
    });
  }
  part.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    actions[keys[event.key]]();
  });
  part.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey) return; // the page scrolls
      event.preventDefault();
      zoom(event.deltaY < 0 ? 1.25 : 0.8, event.offsetX / svg.clientWidth);
    },
    { passive: false },
  );

  let grabbed = null; // where a drag began
  part.addEventListener("pointerdown", (event) => {
    grabbed = { x: event.clientX, from: view.from, moved: false };
  });
  window.addEventListener("pointermove", (event) => {
    if (!grabbed) return;
    const by = event.clientX - grabbed.x;
    if (Math.abs(by) > 4) grabbed.moved = true;
    if (!grabbed.moved) return;
    view.from = grabbed.from - (by / svg.clientWidth) * view.width;
    draw();
  });
  window.addEventListener("pointerup", () => {
    const clicked = grabbed && !grabbed.moved;
    grabbed = null;
    if (clicked) pinned = !pinned;
  });
  window.addEventListener("pointercancel", () => {
    grabbed = null;
  });

  // ---- telling

  function tell(event) {
    if ((pinned && event.type === "pointermove") || grabbed?.moved) return;
    const box = svg.getBoundingClientRect();
    const unit = view.from + ((event.clientX - box.left) / box.width) * view.width;
    const rank = Math.floor(((event.clientY - box.top) / box.height) * facts.ranks);
    if (unit < 0 || unit > facts.units || rank < 0 || rank >= facts.ranks) return;
    const at = `rank ${rank} at ${amount((unit / facts.units) * facts.stop)}`;
    const path = event.target.closest(".boxes > path[data-l]");
    told.textContent = path ? `${whatIs(path, unit, rank)} (${at})` : `idle (${at})`;
  }

  function whatIs(path, unit, rank) {
    const { b, g, l } = path.dataset;
    const lines = [facts.labels[Number(l)]];
    const found = boxAt(path.getAttribute("d"), unit, rank);
    if (found) lines[0] += `, ${amount((found / facts.units) * facts.stop)}`;
    if (facts.chunks.length) {
      lines.push(facts.chunks[Number(b)]);
      return lines.join("; ");
    }
    lines.push(`micro-batch ${b}`);
    const group = facts.groups[`${b}.${g}`];
    if (!group) return lines.join("; ");
    const [, , first, degree, strategy, tokens, count, longest] = group;
    const ranks = degree > 1 ? `ranks ${first} to ${first + degree - 1}` : `rank ${first}`;
    lines.push(`group ${g} on ${ranks}: degree ${degree}, ${strategy}, ${tokens.toLocaleString("en")} tokens`);
    const names = longest.map(([id, length]) => `${id} (${length.toLocaleString("en")} tokens)`);
    const rest = count > longest.length ? ` and ${count - longest.length} shorter` : "";
    lines.push(`sequence${count > 1 ? "s" : ""} ${names.join(", ")}${rest}`);
    return lines.join("; ");
  }

  // The width of the box of a path in which a point lies, in units.
  function boxAt(path, unit, rank) {
    for (const [, x, y, width, height] of path.matchAll(/M(\d+) (\d+)h(\d+)v(\d+)/g)) {
      const inside = unit >= +x && unit <= +x + +width && rank >= +y && rank < +y + +height;
      if (inside) return Number(width);
    }
    return 0;
  }

  function amount(value) {
    if (facts.unit !== "s") return `${Math.round(value).toLocaleString("en")} tokens`;
    if (value >= 1) return `${value.toFixed(3)} s`;
    return value >= 1e-3 ? `${(1e3 * value).toPrecision(3)} ms` : `${(1e6 * value).toPrecision(3)} us`;
  }

  part.addEventListener("pointermove", tell);
  part.addEventListener("click", tell);
  window.addEventListener("resize", draw);
  document.querySelector(".toolbar").hidden = false;
  draw();
}
