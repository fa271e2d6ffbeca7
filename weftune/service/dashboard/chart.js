// Curves as SVG that is stretched to its box, with ticks and labels as HTML beside it, like the report's.

import { h, short } from "./dom.js";

const COLOURS = ["#3b7ddd", "#e8710a", "#1e9e6a", "#9456d6", "#dc4646", "#0e9db5", "#d9528f", "#8a8f1a", "#a3673f", "#6b7a90"];
const DASHES = ["", "6 4", "2 3", "7 3 2 3"];
const UNITS = 1000;
const MAX_TICKS = 6;
// The ratio of the largest value to the median above which an axis is logarithmic.
const LOG_RATIO = 10;

export const penOf = (number) => ({ colour: COLOURS[number % COLOURS.length], dashes: DASHES[Math.floor(number / COLOURS.length) % DASHES.length] });
export const pen = (one) => h("svg", { class: "pen", viewBox: "0 0 22 4", "aria-hidden": "true" },
  h("line", { x1: 0, y1: 2, x2: 22, y2: 2, stroke: one.colour, "stroke-width": 3.5, "stroke-dasharray": one.dashes || null }));

/** Smooth a curve by exponential means over about a twentieth of it, in both directions to avoid a lag. */
export const smooth = (points) => {
  const keep = 1 - 1 / Math.max(3, points.length / 20);
  const means = (values) => {
    let [mean, weight] = [0, 0];
    return values.map((value) => {
      mean = keep * mean + (1 - keep) * value;
      weight = keep * weight + (1 - keep);
      return mean / weight;
    });
  };
  const values = points.map(([, y]) => y);
  const [forward, backward] = [means(values), means(values.toReversed()).toReversed()];
  return points.map(([x], at) => [x, (forward[at] + backward[at]) / 2]);
};

const roundTicks = (low, high, limit) => {
  const rough = (high - low) / limit;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high * (1 + 1e-9); at += 1) found.push(Number((at * step).toPrecision(9)));
  return found;
};

const valueAxis = (values) => {
  const sorted = values.toSorted((a, b) => a - b);
  let [low, high] = [sorted[0], sorted.at(-1)];
  const middle = sorted[Math.floor(sorted.length / 2)];
  if (low > 0 && high > LOG_RATIO * middle) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
      for (const factor of [1, 2, 5]) {
        const value = factor * 10 ** power;
        if (value >= low && value <= high) ticks.push(value);
      }
    }
    return { low, high, log: true, ticks: ticks.length > MAX_TICKS ? ticks.filter((_, at) => at % Math.ceil(ticks.length / MAX_TICKS) === 0) : ticks };
  }
  const margin = (high - low || Math.abs(high) || 1) * 0.06;
  [low, high] = [low - margin, high + margin];
  return { low, high, log: false, ticks: roundTicks(low, high, MAX_TICKS - 1) };
};

const position = (axis, value) => {
  const [low, high, at] = axis.log ? [axis.low, axis.high, value].map(Math.log) : [axis.low, axis.high, value];
  return high > low ? Math.min(1, Math.max(0, (at - low) / (high - low))) : 0.5;
};

/** Return a chart. A series has `name`, `pen`, `points` [[x, y], …] and, if it is only context, `faint`;
 * `dots` marks each point. Levels are dashed horizontal lines with `value` and `name`. */
export const chart = ({ label, xLabel, yLabel, series, levels = [], height = 230 }) => {
  const drawn = series.filter((one) => one.points.length);
  const all = drawn.flatMap((one) => one.points);
  if (!all.length) return h("p", { class: "empty", style: { "--height": `${height}px` } }, "No values yet.");
  const y = valueAxis([...all.map((point) => point[1]), ...levels.map((one) => one.value)]);
  const last = all.reduce((most, point) => Math.max(most, point[0]), 1);
  const x = { low: 0, high: last, log: false, ticks: roundTicks(0, last, MAX_TICKS - 1).filter(Number.isInteger) };
  const xAt = (value) => (UNITS * position(x, value)).toFixed(1);
  const yAt = (value) => (UNITS * (1 - position(y, value))).toFixed(2);
  const range = (axis) => `${axis.low} ${axis.high} ${axis.log ? "log" : "linear"}`;
  const texts = y.ticks.map(short);
  const draw = (one) => {
    const line = one.points.map(([a, b], at) => `${at ? "L" : "M"}${xAt(a)} ${yAt(b)}`).join("");
    const dots = one.points.map(([a, b]) => `M${xAt(a)} ${yAt(b)}h0`).join("");
    return [
      one.points.length > 1 && h("path", {
        class: "curve", d: line, stroke: one.pen.colour, "stroke-width": one.faint ? 1.5 : 2.2, "stroke-dasharray": one.faint ? null : one.pen.dashes || null,
        opacity: one.faint ? 0.3 : null, "data-name": one.faint ? null : one.name,
      }),
      (one.dots || one.points.length === 1) && !one.faint && h("path", { class: "dots", d: dots, stroke: one.pen.colour, "stroke-width": 6, "data-name": one.points.length === 1 ? one.name : null }),
    ];
  };
  return h("div", { class: "plot", role: "img", "aria-label": label, "data-x": range(x), "data-y": range(y), "data-x-label": xLabel, style: { "--height": `${height}px`, "--room": `${Math.max(2, ...texts.map((text) => text.length))}ch` } },
    h("span", { class: "y-label" }, y.log ? `${yLabel}, log scale` : yLabel),
    h("div", { class: "field" },
      y.ticks.map((value, at) => h("span", { class: "tick y", style: { top: `${(100 - 100 * position(y, value)).toFixed(2)}%` } }, texts[at])),
      h("svg", { viewBox: `0 0 ${UNITS} ${UNITS}`, preserveAspectRatio: "none", "aria-hidden": "true" },
        h("path", { class: "grid", d: y.ticks.map((value) => `M0 ${yAt(value)}H${UNITS}`).join("") }),
        levels.map((one) => h("path", { class: "level", d: `M0 ${yAt(one.value)}H${UNITS}` })),
        drawn.filter((one) => one.faint).map(draw), drawn.filter((one) => !one.faint).map(draw)),
      levels.map((one) => h("span", { class: `level-name${position(y, one.value) > 0.9 ? " below" : ""}`, style: { top: `${(100 - 100 * position(y, one.value)).toFixed(2)}%` } }, one.name)),
      x.ticks.map((value) => h("span", { class: "tick x", style: { left: `${(100 * position(x, value)).toFixed(2)}%` } }, short(value)))),
    h("span", { class: "x-label" }, xLabel));
};

// -- what follows the pointer -------------------------------------------------------------------------------

const tip = h("div", { class: "tip", hidden: true });

const valueAt = (axis, share) => {
  const [low, high, kind] = axis.split(" ");
  return kind === "log" ? low * (high / low) ** share : Number(low) + share * (high - low);
};

const nearestPoint = (plot, event) => {
  const box = plot.querySelector("svg:not(.pen)").getBoundingClientRect();
  let [best, nearest] = [null, 40];
  for (const path of plot.querySelectorAll("path[data-name]")) {
    for (const found of path.getAttribute("d").matchAll(/[ML]([\d.-]+) ([\d.-]+)/g)) {
      const [x, y] = [Number(found[1]) / UNITS, Number(found[2]) / UNITS];
      const distance = Math.hypot(x * box.width + box.left - event.clientX, y * box.height + box.top - event.clientY);
      if (distance < nearest) [nearest, best] = [distance, { path, x, y }];
    }
  }
  return best;
};

const showTip = (lines, event) => {
  tip.replaceChildren(...lines.filter(Boolean).map((line, at) => h("div", { class: at ? "" : "title" }, line)));
  tip.hidden = false;
  const left = Math.max(8, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8));
  const above = event.clientY - tip.offsetHeight - 12;
  tip.style.left = `${left + scrollX}px`;
  tip.style.top = `${(above < 8 ? event.clientY + 16 : above) + scrollY}px`;
};

/** Show the nearest value of a chart, or the `data-tip` of an element, beside the pointer. */
export const followPointer = () => {
  document.body.append(tip);
  document.addEventListener("pointermove", (event) => {
    const plot = event.target.closest?.(".field")?.closest(".plot");
    document.querySelectorAll("path.near").forEach((path) => path.classList.remove("near"));
    const labelled = event.target.closest?.("[data-tip]");
    if (labelled) return showTip(labelled.getAttribute("data-tip").split("\n"), event);
    const best = plot && nearestPoint(plot, event);
    if (!best) {
      tip.hidden = true;
      return undefined;
    }
    best.path.classList.add("near");
    const { dataset } = plot;
    return showTip([best.path.dataset.name, `${dataset.xLabel} ${Math.round(valueAt(dataset.x, best.x))}: ${short(Number(valueAt(dataset.y, 1 - best.y).toPrecision(5)))}`], event);
  });
};
