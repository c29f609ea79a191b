"use strict";
// Shows values at the pointer. Without the script, charts still have axes, titles and tables.
const data = JSON.parse(document.getElementById("data").textContent);
const LEFT = 58, RIGHT = 548, WIDTH = 560; // as in chart.py

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

function short(value) {
  return Math.abs(value) >= 1e4 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

function lines(metric, places, x) {
  const found = [];
  for (const run of data.runs) {
    for (const name of [metric, data.beside[metric]]) {
      const there = run.metrics[name];
      if (!there) continue;
      const xs = places(run, there), at = nearest(xs, x);
      const label = (data.runs.length > 1 ? run.name + "  " : "") + (name === metric ? "" : "held-out  ");
      found.push({ x: xs[at], text: label + short(there.y[at]) + (name === metric ? "" : " at " + short(xs[at])) });
    }
  }
  return found;
}

for (const svg of document.querySelectorAll("svg[data-metric]")) {
  const { metric, view, low, high } = svg.dataset;
  const figure = svg.closest("figure"), cross = svg.querySelector(".cross");
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  figure.append(tip);
  const places = (run, there) =>
    view === "tokens" ? there.tokens ?? there.x.map((step) => step * run.tokens_per_step) : there.x;
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), scale = WIDTH / box.width;
    const place = ((event.clientX - box.left) * scale - LEFT) / (RIGHT - LEFT);
    if (place < 0 || place > 1) return hide();
    const found = lines(metric, places, Number(low) + place * (high - low));
    if (!found.length) return hide();
    const x = found[0].x, at = LEFT + ((x - low) / (high - low)) * (RIGHT - LEFT);
    cross.setAttribute("transform", `translate(${at - LEFT} 0)`);
    cross.style.visibility = "visible";
    tip.textContent = [`${view === "tokens" ? "token" : "step"} ${short(x)}`, ...found.map((f) => f.text)].join("\n");
    tip.hidden = false;
    const left = at / scale + svg.parentElement.offsetLeft + 12;
    const turned = left + tip.offsetWidth > figure.clientWidth;
    tip.style.left = `${Math.max(turned ? left - tip.offsetWidth - 24 : left, 0)}px`;
    tip.style.top = `${box.top - figure.getBoundingClientRect().top + 14}px`;
  });
  const hide = () => { tip.hidden = true; cross.style.visibility = "hidden"; };
  svg.addEventListener("pointerleave", hide);
}
