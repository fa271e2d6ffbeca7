// The device's last window, planned and measured, its memory by job, and the queue.

import { bytes, clock, count, h, plural, seconds, sentence } from "./dom.js";
import { aheadWords, tile } from "./jobs.js";

const WIDTH = 1000;
const MAX_PASSES = 400;

const share = (value, whole) => (whole ? `${((100 * value) / whole).toFixed(2)}%` : "0%");
const others = (number) => (number === 1 ? "another tenant" : `${number} jobs of other tenants`);

/** Return who is in a pass: [job id or null, name, tokens], own jobs first. */
const parts = (state, pass) => [
  ...Object.entries(pass.jobs).map(([id, tokens]) => [id, state.nameOf(id), tokens]),
  ...(pass.other_tokens ? [[null, others(pass.other_jobs), pass.other_tokens]] : []),
];

const colourOf = (state, id) => (id === null ? "var(--others)" : state.penOf(id).colour);

const lane = (state, window, name, secondsOf, whole) => {
  let at = 0;
  const bars = window.passes.slice(0, MAX_PASSES).map((pass, number) => {
    const wide = (WIDTH * secondsOf(pass)) / whole;
    const x = at;
    at += wide;
    let y = 0;
    const list = parts(state, pass);
    const tokens = list.reduce((sum, one) => sum + one[2], 0) || 1;
    const tip = [`${name}, pass ${number + 1}: ${seconds(secondsOf(pass))}`, pass.training ? "" : "evaluation", ...list.map(([, who, number_]) => `${who}: ${plural(number_, "token")}`)].filter(Boolean).join("\n");
    return h("g", { "data-tip": tip, opacity: pass.training ? null : 0.55 }, list.map(([id, , part]) => {
      const tall = (100 * part) / tokens;
      const rect = h("rect", { x: x.toFixed(2), y: y.toFixed(2), width: Math.max(0.6, wide - Math.min(1.4, wide * 0.2)).toFixed(2), height: tall.toFixed(2), style: { fill: colourOf(state, id) } });
      y += tall;
      return rect;
    }));
  });
  return h("div", { class: "lane" }, h("span", { class: "lane-name" }, name),
    h("svg", { viewBox: `0 0 ${WIDTH} 100`, preserveAspectRatio: "none", role: "img", "aria-label": `${name}: ${plural(window.passes.length, "pass").replace("passs", "passes")}` }, bars));
};

const key = (colour, name, value) => h("li", {}, h("span", { class: "swatch", style: { background: colour } }), name, " ", value && h("b", {}, value));

const keys = (state, window) => {
  const seen = new Map();
  for (const pass of window.passes) for (const [id, , tokens] of parts(state, pass)) seen.set(id, (seen.get(id) ?? 0) + tokens);
  const whole = [...seen.values()].reduce((sum, one) => sum + one, 0);
  return h("ul", { class: "keys" }, [...seen].sort((a, b) => (a[0] === null) - (b[0] === null) || b[1] - a[1])
    .map(([id, tokens]) => key(colourOf(state, id), id === null ? "other tenants" : state.nameOf(id), `${Math.round((100 * tokens) / whole)} %`)));
};

const passTable = (state, window) => h("details", {}, h("summary", {}, "Pass by pass"), h("div", { class: "scroll" }, h("table", {},
  h("thead", {}, h("tr", {}, ["pass", "who shares it"].map((text) => h("th", { scope: "col" }, text)), ["tokens", "planned", "measured"].map((text) => h("th", { scope: "col", class: "number" }, text)))),
  h("tbody", {}, window.passes.slice(0, MAX_PASSES).map((pass, at) => h("tr", { "data-key": String(at) },
    h("th", { scope: "row" }, `${at + 1}${pass.training ? "" : " (evaluation)"}`),
    h("td", { "data-label": "who shares it", class: "wide" }, parts(state, pass).map(([, name, tokens]) => `${name} ${count(tokens)}`).join(", ")),
    h("td", { "data-label": "tokens", class: "number" }, count(pass.tokens)),
    h("td", { "data-label": "planned", class: "number" }, pass.predicted_seconds === null ? "" : seconds(pass.predicted_seconds)),
    h("td", { "data-label": "measured", class: "number" }, seconds(pass.seconds))))))));

const difference = (measured, planned) => {
  if (planned === null || !planned) return "no prediction yet";
  const percent = 100 * (measured / planned - 1);
  return `planned ${seconds(planned)}: ${Math.abs(percent) < 0.5 ? "as planned" : `${percent < 0 ? "−" : "+"}${Math.abs(percent).toFixed(0)} %`}`;
};

const lastWindow = (state, window) => {
  const planned = window.passes.reduce((sum, pass) => sum + (pass.predicted_seconds ?? 0), 0);
  const measured = window.passes.reduce((sum, pass) => sum + pass.seconds, 0);
  const whole = Math.max(planned, measured, 1e-9);
  return h("section", {}, h("h2", {}, "The last window"),
    h("div", { class: "tiles" },
      tile("seconds", seconds(window.seconds), difference(window.seconds, window.predicted_seconds)),
      tile("jobs", `${window.jobs}`, `${window.shared} of ${plural(window.microbatches, "pass").replace("passs", "passes")} shared`),
      tile("tokens", count(window.tokens), `at most ${count(window.capacity)} per pass`),
      tile("peak memory", bytes(window.peak_bytes), window.predicted_peak_bytes ? `planned ${bytes(window.predicted_peak_bytes)}` : "")),
    window.passes.length > 0 && h("figure", { class: "lanes" },
      planned > 0 && lane(state, window, "planned", (pass) => pass.predicted_seconds ?? 0, whole),
      lane(state, window, "measured", (pass) => pass.seconds, whole),
      h("div", { class: "lane scale" }, h("span", {}), h("div", {}, h("span", {}, "0"), h("span", {}, seconds(whole)))),
      keys(state, window),
      h("figcaption", {}, `A bar is one pass of the base; its colours are the jobs that share it, by tokens. Paler: evaluations. The window ended at ${clock(window.at)}.`)),
    window.passes.length > 0 && passTable(state, window));
};

const memory = (state, one) => {
  const jobs = Object.entries(one.jobs).sort((a, b) => b[1] - a[1]);
  const taken = one.base_bytes + one.answer_bytes + one.other_bytes + jobs.reduce((sum, [, value]) => sum + value, 0);
  const bars = [["var(--soft)", "base", one.base_bytes], ["var(--answers)", "reserved for answers", one.answer_bytes], ...jobs.map(([id, value]) => [state.penOf(id).colour, state.nameOf(id), value]),
    ...(one.other_jobs ? [["var(--others)", others(one.other_jobs), one.other_bytes]] : [])];
  return h("section", {}, h("h2", {}, "Memory"), h("div", { class: "wall" },
    h("p", { class: "label" }, `${bytes(taken)} of ${bytes(one.budget_bytes)} are held by the base, answers and the adapters; passes use the rest`),
    h("div", { class: "stack", "aria-hidden": "true" }, bars.map(([colour, name, value]) => h("span", { style: { width: share(value, one.budget_bytes), background: colour }, "data-tip": `${name}\n${bytes(value)}` }))),
    h("ul", { class: "keys" }, bars.map(([colour, name, value]) => key(colour, name, bytes(value))))));
};

const queue = (state) => {
  const waiting = state.overview.jobs.filter((job) => job.state === "queued").sort((a, b) => (a.ahead ?? 0) - (b.ahead ?? 0));
  return h("section", {}, h("h2", {}, "Why jobs wait"), waiting.length
    ? h("ol", { class: "queue" }, waiting.map((job) => h("li", { "data-key": job.id },
      h("p", {}, h("a", { href: `#/jobs/${job.id}` }, job.name), " ", h("span", { class: "badge" }, job.ahead ? `${plural(job.ahead, "job")} ahead` : "next")),
      h("p", { class: "words" }, sentence(job.reason) || "It starts at the next window."),
      job.ahead > 0 && h("p", { class: "words" }, sentence(aheadWords(job))))))
    : h("p", { class: "words" }, "None of your jobs waits."));
};

export const devicePage = (state) => [
  state.window ? lastWindow(state, state.window) : h("section", { class: "welcome" }, h("h2", {}, "No window yet"), h("p", {}, "As soon as a job trains, its passes are drawn here.")),
  state.window?.memory && memory(state, state.window.memory),
  queue(state),
];
