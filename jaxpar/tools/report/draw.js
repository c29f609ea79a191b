"use strict";
// Draws the charts, and again when a control of the page changes. Without the script there are the
// tables of values. Sizes are those of chart.py.
const data = JSON.parse(document.getElementById("data").textContent);
const LEFT = 58, RIGHT = 548, TOP = 16, BOTTOM = 228, WIDTH = 560, COLOURS = 7, SVG = "http://www.w3.org/2000/svg";
const state = { x: "steps", smooth: 2, logy: false, logx: false, bits: false, off: new Set(), zoom: null };

function element(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const name in attributes) made.setAttribute(name, attributes[name]);
  if (text !== undefined) made.textContent = text;
  return made;
}

// ------------------------------------------------------------------------------------- numbers

function short(value) {
  if (value === 0) return "0";
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]])
    if (Math.abs(value) >= size) return String(Number((value / (letter === "k" ? 1e3 : size)).toPrecision(4))) + letter;
  return String(Number(value.toPrecision(4)));
}

function interpolate(xs, ys, x) {
  const at = nearest(xs, x), low = xs[at] <= x || at === 0 ? at : at - 1, high = Math.min(low + 1, xs.length - 1);
  if (xs[high] === xs[low]) return ys[low];
  return ys[low] + (ys[high] - ys[low]) * Math.min(Math.max((x - xs[low]) / (xs[high] - xs[low]), 0), 1);
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

// Where a step of a run is on the horizontal axis.
function across(run, step) {
  if (state.x === "tokens") return run.tokens ? interpolate(run.tokens[0], run.tokens[1], step) : step * run.tokens_per_step;
  return state.x === "hours" ? interpolate(run.hours[0], run.hours[1], step) : step;
}

// The moving average of series.py, over the ranges of steps that it kept.
function smoothed(values, share) {
  const span = Math.max((share / 100) * values.length, 1);
  let mean = 0;
  return values.map((value, i) => (mean += (value - mean) / Math.min(1 + 0.1 * i, span)));
}

// ------------------------------------------------------------------------------------ the lines

function inBits(metric, run) {
  return state.bits && run.bits && ["loss", "last half", "held_out_loss"].includes(metric) ? run.bits : 1;
}

// The chart of progress over time has its own axis; the others have that of the controls.
const own = (svg) => svg.dataset.metric === "progress";
const chosen = (svg) => (own(svg) ? { ...state, x: svg.dataset.unit, logx: false, logy: false, zoom: null } : state);

function linesOf(svg) {
  const found = [], { metric, factor } = svg.dataset;
  if (own(svg)) {
    data.runs.forEach((run, index) => {
      for (const [hours, steps] of state.off.has(index) ? [] : run.progress)
        found.push({ run, index, x: hours.map((at) => at * factor), y: steps, means: steps });
    });
    return found;
  }
  data.runs.forEach((run, index) => {
    if (state.off.has(index)) return;
    for (const name of [metric, data.beside[metric]]) {
      const there = run.metrics[name];
      if (!there) continue;
      const beside = name !== metric, by = inBits(name, run);
      const of = (values) => values.map((value) => value * by);
      const line = { run, index, beside, steps: there.x, x: there.x.map((step) => across(run, step)) };
      line.means = of(there.m || there.y);
      line.y = there.m && state.smooth !== 2 ? smoothed(line.means, state.smooth) : of(there.y);
      line.raw = Boolean(there.m) && !there.lo;
      if (there.lo) { line.lo = of(there.lo); line.hi = of(there.hi); }
      found.push(line);
    }
  });
  return found;
}

// The part of a line within the axis, with its ends where the line leaves it.
function cut(line, low, high, logx) {
  const kept = [];
  line.x.forEach((x, i) => { if (x >= low && x <= high && (!logx || x > 0)) kept.push(i); });
  return kept;
}

// ------------------------------------------------------------------------------------- the axes

function roundStep(least) {
  const size = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((f) => f * size).find((step) => step >= least * (1 - 1e-9));
}

function scale(low, high, log) {
  const at = log ? (v) => Math.log(v / low) / Math.log(high / low) : (v) => (v - low) / (high - low);
  const value = log ? (p) => low * (high / low) ** p : (p) => low + p * (high - low);
  let ticks = [];
  if (log) {
    for (const factors of [[1, 2, 5], [1, 3], [1]]) {
      ticks = [];
      for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
        for (const f of factors) if (f * 10 ** p >= low && f * 10 ** p <= high) ticks.push(f * 10 ** p);
      if (ticks.length <= 6) break;
    }
    while (ticks.length > 6) ticks = ticks.filter((_, i) => i % 2 === 0);
  }
  if (!log || ticks.length < 2) {
    ticks = [];
    const step = roundStep((high - low) / 6);
    for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) ticks.push(i * step);
  }
  return { low, high, at, value, ticks };
}

function verticalScale(values, least, log) {
  let low = Math.min(...values), high = Math.max(...values);
  if (log && low > 0) {
    const margin = Math.max((high / low) ** 0.04, 1.001);
    return scale(low / margin, high * margin, true);
  }
  const spare = Math.max(least * Math.abs(high) - (high - low), 0);
  low = low >= 0 ? Math.max(low - spare, 0) : low - spare;
  const margin = 0.05 * (high - low) || 0.05 * Math.abs(high) || 1;
  return scale(low >= 0 ? Math.max(low - margin, 0) : low - margin, high + margin, false);
}

// Of all charts: that of the zoom, or of a chart's own points.
function horizontalScale(svg, lines) {
  const xs = lines.flatMap((line) => line.x), { zoom, logx } = chosen(svg);
  let low = svg.dataset.metric === "last half" ? Math.min(...lines.flatMap((l) => (l.beside ? [] : l.x))) : 0;
  let high = Math.max(...xs);
  if (zoom) [low, high] = zoom;
  if (logx) {
    const least = Math.min(...xs.filter((x) => x > 0));
    if (low <= 0) low = least;
  }
  if (!(high > low)) high = low + 1;
  return scale(low, high, logx && low > 0);
}

// ------------------------------------------------------------------------------------- drawing

function colour(index) {
  const dashes = Math.min(Math.floor(index / COLOURS), 2);
  return `r${index % COLOURS}` + (dashes ? ` dash${dashes}` : "");
}

function draw(svg) {
  return svg.dataset.map ? drawMap(svg) : drawLines(svg);
}

// Removes the drawing. Returns a function that puts an element into it, below the pointer's line.
function emptied(svg) {
  svg.replaceChildren(...[...svg.children].filter((c) => c.matches("title, desc, .cross, .zoom")));
  svg.scales = null;
  return (made) => svg.insertBefore(made, svg.querySelector(".cross"));
}

function putNone(svg, put, text) {
  put(element("text", { class: "xlabel", x: (LEFT + RIGHT) / 2, y: (TOP + floor(svg)) / 2 }, text));
}

function drawLines(svg) {
  const lines = linesOf(svg), { least, log } = svg.dataset, { logx, logy, x: unit } = chosen(svg);
  const put = emptied(svg);
  if (!lines.some((line) => line.x.length)) return putNone(svg, put, "no run is selected");
  const x = horizontalScale(svg, lines), kept = lines.map((line) => cut(line, x.low, x.high, logx));
  const heights = lines.flatMap((line, n) => kept[n].flatMap((i) => [line.y[i], ...(line.lo ? [line.lo[i], line.hi[i]] : line.raw ? [line.means[i]] : [])]));
  const positive = heights.every((value) => value > 0), wide = Math.max(...heights) / Math.min(...heights) > 50;
  const logarithmic = positive && (logy || (log === "True" && wide));
  const y = verticalScale(own(svg) ? [0, ...heights] : heights.length ? heights : [0, 1], Number(least || 0), logarithmic);
  svg.scales = { x, y };
  const px = (value) => (LEFT + x.at(value) * (RIGHT - LEFT)).toFixed(1);
  const py = (value) => (BOTTOM - y.at(value) * (BOTTOM - TOP)).toFixed(1);
  for (const tick of y.ticks) {
    put(element("path", { class: "grid", d: `M${LEFT} ${py(tick)}H${RIGHT}` }));
    put(element("text", { class: "ylabel", x: LEFT - 7, y: py(tick), dy: "0.35em" }, short(tick)));
  }
  drawAxis(put, x, px, BOTTOM, unit);
  lines.forEach((line, n) => drawLine(put, line, kept[n], px, py));
  drawMarks(put, svg, x);
}

function drawAxis(put, x, px, bottom, unit) {
  put(element("path", { class: "axis", d: `M${LEFT} ${bottom}H${RIGHT}` }));
  for (const tick of x.ticks) {
    put(element("path", { class: "axis", d: `M${px(tick)} ${bottom}v5` }));
    put(element("text", { class: "xlabel", x: px(tick), y: bottom + 20 }, short(tick)));
  }
  put(element("text", { class: "xname", x: RIGHT, y: bottom + 38 }, unit));
}

function drawLine(put, line, kept, px, py) {
  const path = (values) => "M" + kept.map((i) => `${px(line.x[i])} ${py(values[i])}`).join("L");
  const name = colour(line.index);
  if (!kept.length) return;
  if (line.lo) {
    const under = [...kept].reverse().map((i) => `${px(line.x[i])} ${py(line.lo[i])}`).join("L");
    put(element("path", { class: `band ${name}`, d: `${path(line.hi)}L${under}Z` }));
  }
  if (kept.length > 1) {
    if (line.raw) put(element("path", { class: `raw ${name}`, d: path(line.means) }));
    put(element("path", { class: `line ${line.beside ? "thin " : ""}${name}`, d: path(line.y) }));
  }
  if (!line.beside && kept.length > 1) return;
  const dots = element("g", { class: `dots ${name}` }), every = Math.ceil(kept.length / 20);
  kept.forEach((i, n) => {
    if ((kept.length - 1 - n) % every) return;
    const dot = element("circle", { r: 3, cx: px(line.x[i]), cy: py(line.y[i]) });
    dot.append(element("title", {}, `${short(line.y[i])} at ${short(line.x[i])}`));
    dots.append(dot);
  });
  put(dots);
}

// ------------------------------------------------------------------------------------ heat maps

// Of Matplotlib's viridis: equal steps look equal, also to the color-blind and in grey.
const PALETTE = ["440154", "482878", "3e4a89", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725"];
const LEVELS = 40;

// The lower end of the plot.
const floor = (svg) => Number(svg.dataset.bottom || BOTTOM);

function heatColour(level) {
  const at = (level / (LEVELS - 1)) * (PALETTE.length - 1), low = Math.min(Math.floor(at), PALETTE.length - 2);
  const part = (which, i) => parseInt(PALETTE[which].slice(2 * i, 2 * i + 2), 16);
  return `rgb(${[0, 1, 2].map((i) => Math.round(part(low, i) + (at - low) * (part(low + 1, i) - part(low, i))))})`;
}

// The values of a metric of layers, the ends of their columns on the horizontal axis, and the scale of colors.
function mapOf(svg) {
  const run = data.runs[svg.dataset.run], { x: steps, rows } = run.layers[svg.dataset.map];
  const before = steps.length > 1 ? Math.max(2 * steps[0] - steps[1], 0) : 0;
  const edges = [before, ...steps].map((step) => across(run, step));
  let low = Infinity, high = -Infinity;
  for (const value of rows.flat()) if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
  const log = low > 0 && high / low > 10;
  if (!(high > low)) { low -= Math.abs(low) / 2 || 1; high += Math.abs(high) / 2 || 1; }
  return { run, steps, rows, edges, scale: scale(low, high, log), log };
}

function drawMap(svg) {
  const put = emptied(svg), bottom = floor(svg), { logx, x: unit } = chosen(svg);
  if (state.off.has(Number(svg.dataset.run))) return putNone(svg, put, "the run is not selected");
  const map = mapOf(svg), x = horizontalScale(svg, [{ x: map.edges }]), height = (bottom - TOP) / map.rows.length;
  svg.scales = { x, map };
  const px = (value) => (LEFT + Math.min(Math.max(x.at(value), 0), 1) * (RIGHT - LEFT)).toFixed(1);
  const left = map.edges.map((edge) => (logx && edge <= 0 ? x.low : edge)), paths = [];
  map.rows.forEach((row, layer) => {
    const top = (TOP + layer * height).toFixed(1), below = (TOP + (layer + 1) * height).toFixed(1);
    row.forEach((value, i) => {
      if (value === null || left[i + 1] <= x.low || left[i] >= x.high) return;
      const level = Math.round(map.scale.at(value) * (LEVELS - 1));
      (paths[level] ||= []).push(`M${px(left[i])} ${top}H${px(left[i + 1])}V${below}H${px(left[i])}Z`);
    });
  });
  paths.forEach((boxes, level) => put(element("path", { class: "cells", fill: heatColour(level), d: boxes.join("") })));
  const every = Math.ceil(map.rows.length / Math.max(Math.floor((bottom - TOP) / 32), 1));
  map.rows.forEach((_, layer) => {
    if (layer % every) return;
    put(element("text", { class: "ylabel", x: LEFT - 7, y: TOP + (layer + 0.5) * height, dy: "0.35em" }, layer ? String(layer) : "layer 0"));
  });
  drawAxis(put, x, px, bottom, unit);
  drawLegend(put, map, bottom + 50);
}

function drawLegend(put, { scale: of, log }, top) {
  const width = (RIGHT - LEFT) / LEVELS;
  for (let level = 0; level < LEVELS; level++)
    put(element("rect", { class: "cells", x: LEFT + level * width, y: top, width: width + 0.5, height: 10, fill: heatColour(level) }));
  for (const tick of of.ticks) {
    const at = (LEFT + of.at(tick) * (RIGHT - LEFT)).toFixed(1);
    put(element("path", { class: "axis", d: `M${at} ${top + 10}v4` }));
    put(element("text", { class: "xlabel", x: at, y: top + 28 }, short(tick)));
  }
  if (log) put(element("text", { class: "ylabel", x: LEFT - 7, y: top + 5, dy: "0.35em" }, "log"));
}

// Each kind of mark, from (0, 0) on the step axis; the plot is 212 high.
const SHAPES = {
  restart: "M0 0V-212M-4 -205L0 -212L4 -205", rewind: "M0 0V-212M7 -212H0L4 -208M0 -212L4 -216",
  skipped: "M-4 -3L4 -11M4 -3L-4 -11", failed: "M0 0V-8M-3 -11L3 -17M3 -11L-3 -17", saved: "M0 0V-8",
};

function drawMarks(put, svg, x) {
  data.runs.forEach((run, index) => {
    if (state.off.has(index)) return;
    for (const [kind, step, hours, text] of run.marks) {
      if (own(svg) && hours === null) continue;
      const at = x.at(own(svg) ? hours * svg.dataset.factor : across(run, step));
      if (!(at >= 0 && at <= 1)) continue;
      const place = `translate(${(LEFT + at * (RIGHT - LEFT)).toFixed(1)} ${BOTTOM})`;
      const mark = element("g", { class: `mark ${kind} ${colour(index)}`, transform: place });
      mark.append(element("title", {}, `${run.name}: ${text}`), element("path", { d: SHAPES[kind] }));
      put(mark);
    }
  });
}

for (const sign of document.querySelectorAll("[data-sign]")) {
  const kind = sign.dataset.sign, high = ["restart", "rewind"].includes(kind);
  sign.setAttribute("viewBox", high ? "-10 -217 20 24" : "-10 -20 20 24");
  sign.append(element("path", { class: `mark ${kind}`, d: SHAPES[kind] }));
}
