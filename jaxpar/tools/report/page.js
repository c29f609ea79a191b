// The controls of the page: what they show is kept in the address, so that a reload and a link keep it.
const charts = [...document.querySelectorAll("svg[data-metric], svg[data-map]")];
const controls = document.getElementById("controls");

function drawAll() {
  charts.forEach(draw);
  for (const svg of charts) {
    const unit = svg.closest("figure").querySelector("h3 span");
    if (unit && unit.dataset.nats) unit.textContent = state.bits ? " bits per byte" : unit.dataset.nats;
  }
  if (controls) document.getElementById("reset").disabled = !state.zoom;
}

function remember() {
  const parts = [`x=${state.x}`, `smooth=${state.smooth}`];
  for (const name of ["logy", "logx", "bits"]) if (state[name]) parts.push(name);
  if (state.off.size) parts.push(`off=${[...state.off].join(",")}`);
  if (state.zoom) parts.push(`zoom=${state.zoom.map((v) => v.toPrecision(6)).join(",")}`);
  try { history.replaceState(null, "", `#${parts.join("&")}`); } catch { /* a viewer without history */ }
}

function changed() {
  drawAll();
  remember();
}

function remembered() {
  const given = new URLSearchParams(location.hash.slice(1));
  const numbers = (name) => (given.get(name) || "").split(",").filter(Boolean).map(Number).filter(Number.isFinite);
  if (document.getElementById(`view-${given.get("x")}`)) state.x = given.get("x");
  if (given.has("smooth")) state.smooth = Math.min(Math.max(Number(given.get("smooth")) || 0, 0), 30);
  for (const name of ["logy", "logx", "bits"]) state[name] = given.has(name) && Boolean(document.getElementById(name));
  state.off = new Set(numbers("off").filter((index) => index in data.runs));
  const zoom = numbers("zoom");
  state.zoom = zoom.length === 2 && zoom[0] < zoom[1] ? zoom : null;
}

function zoomTo(low, high) {
  state.zoom = high > low ? [low, high] : null;
  changed();
}

if (controls) {
  remembered();
  document.getElementById(`view-${state.x}`).checked = true;
  for (const choice of controls.querySelectorAll("input[name=view]"))
    choice.addEventListener("change", () => { state.x = choice.value; state.zoom = null; changed(); });
  const slider = document.getElementById("smooth"), told = document.getElementById("smooth-told");
  const say = () => { told.textContent = `${state.smooth}% of the run`; };
  slider.value = state.smooth;
  slider.addEventListener("input", () => { state.smooth = Number(slider.value); say(); changed(); });
  say();
  for (const name of ["logy", "logx", "bits"]) {
    const box = document.getElementById(name);
    if (!box) continue;
    box.checked = state[name];
    box.addEventListener("change", () => { state[name] = box.checked; changed(); });
  }
  document.querySelectorAll("input[data-run]").forEach((box) => {
    const index = Number(box.dataset.run);
    box.checked = !state.off.has(index);
    box.addEventListener("change", () => { state.off[box.checked ? "delete" : "add"](index); changed(); });
  });
  document.getElementById("reset").addEventListener("click", () => zoomTo(0, 0));
}
document.body.classList.add("scripted");
for (const svg of charts) svg.append(element("path", { class: "cross", d: `M${LEFT} ${TOP}V${floor(svg)}` }));
drawAll();

// --------------------------------------------------------------------------- values at the pointer

function valuesAt(svg, x, row) {
  if (svg.dataset.map) {
    const { run, steps, rows, edges } = svg.scales.map, layer = Math.min(Math.floor(row * rows.length + 1e-6), rows.length - 1);
    const column = edges.slice(1).findIndex((edge) => x <= edge);
    if (column < 0 || x < edges[0]) return [];
    const value = rows[layer][column];
    return [{ x: across(run, steps[column]), text: `layer ${layer}  ${value === null ? "no value" : short(value)}` }];
  }
  const there = (line) => line.x.length && (!own(svg) || (line.x[0] <= x && x <= line.x.at(-1)));
  return linesOf(svg).filter(there).map((line) => {
    const at = nearest(line.x, x);
    const name = (data.runs.length > 1 ? line.run.name + "  " : "") + (line.beside ? "held-out  " : "");
    return { x: line.x[at], text: name + short(line.y[at]) + (line.beside ? " at " + short(line.x[at]) : "") };
  });
}

for (const svg of charts) {
  const figure = svg.closest("figure"), cross = svg.querySelector(".cross");
  const tip = document.createElement("div"), zoom = element("rect", { class: "zoom", y: TOP, height: floor(svg) - TOP, width: 0 });
  tip.className = "tip";
  tip.hidden = true;
  figure.append(tip);
  svg.append(zoom);
  svg.setAttribute("tabindex", 0);
  const scales = () => { if (!svg.scales) draw(svg); return svg.scales; };
  let from = null, held = null, row = 0;

  const hide = () => { tip.hidden = true; cross.style.visibility = "hidden"; held = null; };
  const placeOf = (event) => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientY - box.top) * (WIDTH / box.width) - TOP;
    row = Math.min(Math.max(at / (floor(svg) - TOP), 0), 0.9999);
    return ((event.clientX - box.left) * (WIDTH / box.width) - LEFT) / (RIGHT - LEFT);
  };
  const show = (place) => {
    const there = scales();
    if (!there || place < 0 || place > 1) return hide();
    const found = valuesAt(svg, there.x.value(place), row);
    if (!found.length) return hide();
    const x = found[0].x, at = LEFT + Math.min(Math.max(there.x.at(x), 0), 1) * (RIGHT - LEFT);
    const box = svg.getBoundingClientRect();
    held = place;
    cross.setAttribute("transform", `translate(${at - LEFT} 0)`);
    cross.style.visibility = "visible";
    tip.textContent = [`${chosen(svg).x.replace(/s$/, "")} ${short(x)}`, ...found.map((f) => f.text)].join("\n");
    tip.hidden = false;
    const left = (at * box.width) / WIDTH + svg.parentElement.offsetLeft + 12;
    const turned = left + tip.offsetWidth > figure.clientWidth;
    tip.style.left = `${Math.max(turned ? left - tip.offsetWidth - 24 : left, 0)}px`;
    tip.style.top = `${box.top - figure.getBoundingClientRect().top + 14}px`;
  };
  const inside = (place) => Math.min(Math.max(place, 0), 1);

  svg.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !scales()) return;
    from = inside(placeOf(event));
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    show(placeOf(event));
    if (from === null) return;
    const to = inside(placeOf(event)), [low, high] = from < to ? [from, to] : [to, from];
    zoom.setAttribute("x", LEFT + low * (RIGHT - LEFT));
    zoom.setAttribute("width", (high - low) * (RIGHT - LEFT));
  });
  const ended = (event) => {
    zoom.setAttribute("width", 0);
    const to = inside(placeOf(event)), start = from, x = svg.scales && svg.scales.x;
    from = null;
    if (event.type !== "pointerup" || start === null || !x || own(svg) || Math.abs(to - start) < 0.02) return;
    zoomTo(x.value(Math.min(start, to)), x.value(Math.max(start, to)));
  };
  svg.addEventListener("pointerup", ended);
  svg.addEventListener("pointercancel", ended);
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("dblclick", () => zoomTo(0, 0));
  svg.addEventListener("blur", hide);
  // The same by keys: arrows move along the line, + and - zoom around it, Escape shows all.
  svg.addEventListener("keydown", (event) => {
    const there = scales(), at = held === null ? 0.5 : held;
    if (!there) return;
    const { low, high, value } = there.x, middle = value(at);
    const around = (factor) => !own(svg) && zoomTo(Math.max(middle - (middle - low) * factor, 0), middle + (high - middle) * factor);
    const turn = (by) => { row = inside(row + by); show(at); };
    const keys = {
      ArrowLeft: () => show(inside(at - 0.01)), ArrowRight: () => show(inside(at + 0.01)),
      ...(there.map ? { ArrowUp: () => turn(-1 / there.map.rows.length), ArrowDown: () => turn(1 / there.map.rows.length) } : {}),
      Home: () => show(0), End: () => show(1),
      "+": () => around(0.5), "=": () => around(0.5), "-": () => (state.zoom ? around(2) : null),
      Escape: () => { hide(); zoomTo(0, 0); },
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
    if (["+", "=", "-"].includes(event.key)) show(at);
  });
}

// A run in progress: the file is written again every few seconds.
const live = Number(document.body.dataset.live);
if (live) setInterval(() => { if (!document.hidden && !document.querySelector(".zoom:active")) location.reload(); }, live * 1000);
