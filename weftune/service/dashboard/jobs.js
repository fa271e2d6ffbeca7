// The list of jobs with their curves, and the page of one job.

import { chart, pen, smooth } from "./chart.js";
import { clock, count, h, loss, moment, plural, seconds, sentence } from "./dom.js";

const VERBS = { pause: "Pause", resume: "Resume", cancel: "Cancel" };
const CURVES_AT_FIRST = 8;

export const tile = (label, value, detail) => h("div", { class: "tile" },
  h("p", { class: "label" }, label), h("p", { class: "value" }, value), detail && h("p", { class: "detail" }, detail));

export const isLive = (job) => ["validating", "queued", "running", "paused"].includes(job.state);
/** Whether a job is a sweep, which is not trained itself. */
const isSweep = (job) => job.sweep?.id === job.id;
/** The trials of a sweep that the overview has: the best first, then those that came furthest. */
const trialsOf = (state, job) => (isSweep(job) ? state.overview.jobs.filter((one) => one.sweep?.id === job.id && one !== job) : [])
  .sort((a, b) => b.sweep.best - a.sweep.best || b.step - a.step || (a.eval_loss ?? Infinity) - (b.eval_loss ?? Infinity));
const sweepWords = (job) => {
  if (!job.sweep) return null;
  if (isSweep(job)) return "sweep";
  return h("a", { href: `#/jobs/${job.sweep.id}` }, `${job.sweep.best ? "best" : "trial"} of sweep ${job.sweep.name}`);
};
export const valuesText = (values) => Object.entries(values)
  .map(([key, value]) => `${key} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
/** The values in which a trial differs from the sweep's other trials. */
const trialValues = (job) => valuesText(job.sweep?.values ?? {});
const lowestLoss = (jobs) => jobs.map((one) => one.eval_loss).filter((one) => one != null).sort((a, b) => a - b)[0];
const stateWord = (job) => (job.state === "validating" ? "checking rows" : job.state);

/** Whether a job's curves are drawn in the list: the reader's choice, else the newest jobs that have any. */
const isShown = (state, job) => state.shown.get(job.id)
  ?? state.overview.jobs.filter((one) => one.step > 0).slice(0, CURVES_AT_FIRST).includes(job);

export const aheadWords = (job) => {
  const more = job.ahead > job.ahead_names.length ? ", …" : "";
  return `${plural(job.ahead, "job")} ahead: ${job.ahead_names.join(", ")}${more}`;
};
const lastLoss = (state, job) => state.curves.get(job.id)?.train.at(-1)?.[1] ?? null;

const whyWords = (job) => {
  if (job.state === "failed") return job.error?.message || job.reason;
  return [job.state === "queued" && job.ahead !== null ? (job.ahead ? `${plural(job.ahead, "job")} ahead` : "next in the queue") : "", job.reason].filter(Boolean).join(" · ");
};

const endWords = (job, now) => {
  if (job.finished_at) return [moment(job.finished_at), job.started_at ? `after ${seconds(job.finished_at - job.started_at)}` : ""];
  if (job.state === "running" && job.estimated_finish) {
    return [`in ${seconds(Math.max(1, job.estimated_finish - now))}`, `about ${moment(job.estimated_finish)}`];
  }
  return ["", ""];
};

const progress = (job) => h("div", { class: "progress" },
  h("span", { class: `track ${job.state}`, role: "progressbar", "aria-label": `Progress of ${job.name}`, "aria-valuemin": 0, "aria-valuemax": job.steps || 1, "aria-valuenow": job.step },
    h("span", { style: { width: `${job.steps ? (100 * job.step) / job.steps : 0}%` } })),
  h("small", {}, job.steps ? `${count(job.step)} of ${plural(job.steps, "step")}` : isLive(job) ? "not started" : "no steps"));

const relativeLoss = (job) => {
  if (job.eval_loss === null || !job.base_loss) return null;
  const percent = 100 * (job.eval_loss / job.base_loss - 1);
  return h("small", { class: `under ${percent < 0 ? "good" : "worse"}` }, `${percent < 0 ? "−" : "+"}${Math.abs(percent).toFixed(1)} % against the base`);
};

const action = (job, verb, label, busy, extra = {}) => h("button", {
  type: "button", "data-act": "job", "data-job": job.id, "data-verb": verb, "data-key": verb, disabled: busy,
  "aria-label": `${label} ${job.name}`, ...extra,
}, label);

const actions = (state, job) => {
  const busy = state.busy.has(job.id);
  const asked = state.confirming === job.id;
  return h("div", { class: "actions" },
    Object.keys(VERBS).filter((verb) => job.actions.includes(verb)).map((verb) => action(job, verb, verb === "cancel" && asked ? "Really cancel?" : VERBS[verb], busy, { class: verb === "cancel" && asked ? "danger" : "" })),
    job.actions.includes("download") && action(job, "download", "Download", busy),
    job.answers_as && h("a", { class: "button", href: `#/chat/${encodeURIComponent(job.answers_as)}`, "aria-label": `Chat with ${job.name}`, "data-key": "chat" }, "Chat"));
};

const row = (state, job) => {
  const [end, detail] = endWords(job, state.overview.now);
  const why = whyWords(job);
  return h("tr", { "data-key": job.id },
    h("th", { scope: "row" }, pen(state.penOf(job.id)), h("a", { href: `#/jobs/${job.id}` }, job.name),
      job.sweep && h("small", { class: "under" }, sweepWords(job)),
      trialValues(job) && h("small", { class: "under" }, trialValues(job)),
      h("small", { class: "under" }, `${moment(job.created_at)}${job.priority ? ` · priority ${job.priority}` : ""}`)),
    h("td", { "data-label": "state", class: "why" }, h("span", { class: `state ${job.state}` }, stateWord(job)), why && h("small", { class: "under" }, sentence(why))),
    h("td", { "data-label": "progress" }, progress(job)),
    h("td", { "data-label": "training loss", class: "number" }, loss(lastLoss(state, job))),
    h("td", { "data-label": "validation loss", class: "number" }, loss(job.eval_loss), relativeLoss(job)),
    h("td", { "data-label": "end", class: "number" }, end, detail && h("small", { class: "under" }, detail)),
    h("td", { class: "acts" }, actions(state, job)));
};

const table = (state, jobs) => h("div", { class: "scroll" }, h("table", { class: "jobs live" },
  h("thead", {}, h("tr", {}, ["job", "state", "progress"].map((text) => h("th", { scope: "col" }, text)),
    ["training loss", "validation loss", "end"].map((text) => h("th", { scope: "col", class: "number" }, text)),
    h("th", { scope: "col" }, h("span", { class: "unseen" }, "actions")))),
  h("tbody", {}, jobs.map((job) => row(state, job)))));

const curvesOf = (state, jobs, kind) => jobs.flatMap((job) => {
  const curve = state.curves.get(job.id);
  if (!curve) return [];
  const base = { name: job.name, pen: state.penOf(job.id) };
  if (kind === "eval") return [{ ...base, points: curve.eval, dots: curve.eval.length < 60 }];
  return [{ ...base, points: curve.train, faint: true }, { ...base, points: smooth(curve.train) }];
});

const lossCharts = (state, jobs, levels = []) => {
  const names = jobs.map((job) => job.name).join(", ");
  return h("div", { class: "charts" },
    h("figure", {}, h("h3", {}, "Training loss"),
      chart({ label: `Training loss of ${names}`, xLabel: "step", yLabel: "loss", series: curvesOf(state, jobs, "train") }),
      h("figcaption", {}, "Faint: the loss of each global batch. Bold: smoothed.")),
    h("figure", {}, h("h3", {}, "Validation loss"),
      chart({ label: `Validation loss of ${names}`, xLabel: "step", yLabel: "loss", series: curvesOf(state, jobs, "eval"), levels }),
      h("figcaption", {}, levels.length ? "Dashed: the base without an adapter." : "Measured on held-out rows, for jobs that have some.")));
};

const tiles = (state) => {
  const { overview, window } = state;
  const own = overview.jobs.filter((job) => job.state === "running" && !isSweep(job)).length;
  const memory = window?.memory;
  return h("section", { class: "tiles", "aria-label": "Headline numbers" },
    tile("jobs running", `${overview.running}`, overview.running === own ? "all of them yours" : `${own} of them yours`),
    tile("jobs waiting", `${overview.waiting}`, overview.waiting ? "of all tenants" : "a new job starts at once"),
    tile("tokens per second", window ? count(window.tokens / Math.max(window.seconds, 1e-9)) : "–", window ? "all jobs together, last window" : "nothing has been trained yet"),
    tile("peak memory", window ? `${(window.peak_bytes / 2 ** 30).toPrecision(3)} GiB` : "–",
      memory ? `of ${(memory.budget_bytes / 2 ** 30).toPrecision(3)} GiB for training` : overview.device));
};

const welcome = (state) => h("section", { class: "welcome" },
  h("h2", {}, "No jobs yet"),
  h("p", {}, "Upload rows, look at the plan, and submit: the job starts beside those that run already."),
  h("p", {}, h("a", { class: "button primary", href: "#/new" }, "Submit a job")),
  h("p", { class: "label" }, "Or from a shell:"),
  h("div", { class: "code" }, h("pre", {}, `weftune jobs submit jobs.yaml --url ${location.origin}`)));

export const jobsPage = (state) => {
  const { overview } = state;
  if (!overview.jobs.length) return [tiles(state), welcome(state)];
  const drawn = overview.jobs.filter((job) => state.curves.get(job.id)?.train.length);
  const shown = drawn.filter((job) => isShown(state, job));
  return [
    tiles(state),
    h("section", {}, h("h2", {}, "Jobs"), table(state, overview.jobs),
      overview.has_more && h("p", { class: "words" }, `The newest ${overview.jobs.length} jobs are shown; GET /api/jobs lists all.`)),
    drawn.length > 0 && h("section", { id: "curves" }, h("h2", {}, "Curves"),
      drawn.length > 1 && h("div", { class: "legend", role: "group", "aria-label": "Show or hide jobs" },
        drawn.map((job) => h("button", { type: "button", "data-act": "show", "data-job": job.id, "data-key": job.id, "aria-pressed": String(shown.includes(job)) }, pen(state.penOf(job.id)), job.name))),
      lossCharts(state, shown)),
  ];
};

/** Return the jobs whose curves are on the page, so that the page's owner fetches them. */
export const wantedCurves = (state) => {
  if (state.route[0] === "jobs" && state.route[1]) {
    const job = state.overview?.jobs.find((one) => one.id === state.route[1]);
    return [state.route[1], ...(job ? trialsOf(state, job) : []).filter((one) => one.step > 0).map((one) => one.id)];
  }
  if (state.route[0] !== "jobs" || !state.overview) return [];
  return state.overview.jobs.filter((job) => job.step > 0).slice(0, 4 * CURVES_AT_FIRST).map((job) => job.id);
};

// -- one job ------------------------------------------------------------------------------------------------

const settingText = (value) => (typeof value === "object" && value !== null ? JSON.stringify(value) : String(value));
const flat = (value, before = "") => Object.entries(value).flatMap(([key, below]) => (
  below && typeof below === "object" && !Array.isArray(below) ? flat(below, `${before}${key}.`) : [[`${before}${key}`, settingText(below)]]));

const facts = (pairs) => h("dl", { class: "pairs" }, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));

const receipt = (one) => h("section", {}, h("h2", {}, "Receipt"), h("div", { class: "tiles" },
  tile("tokens trained", count(one.tokens), one.padding_tokens ? `and ${plural(one.padding_tokens, "token")} of padding` : "no padding"),
  tile("device time", seconds(one.device_seconds), "shared passes are divided by tokens"),
  tile("passes", count(one.passes), one.passes ? `${Math.round((100 * one.shared_passes) / one.passes)} % shared with other jobs` : "")));

const log = (events) => h("section", {}, h("h2", {}, "Log"),
  h("ol", { class: "log", tabindex: 0, "aria-label": "Events of the job" }, events.map((one) => h("li", { class: one.level, "data-key": one.id },
    h("time", {}, clock(one.at)), h("span", {}, one.message)))));

const checkpoints = (job, list) => h("section", {}, h("h2", {}, "Checkpoints"), h("div", { class: "scroll" }, h("table", { class: "checkpoints" },
  h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "step"), h("th", { scope: "col" }, "time"), h("th", { scope: "col", class: "number" }, "validation loss"), h("th", { scope: "col" }, h("span", { class: "unseen" }, "actions")))),
  h("tbody", {}, list.map((one) => h("tr", { "data-key": one.id },
    h("th", { scope: "row" }, `step ${count(one.step)}`), h("td", { "data-label": "time" }, moment(one.at)),
    h("td", { "data-label": "validation loss", class: "number" }, loss(one.eval_loss)),
    h("td", { class: "acts" }, h("div", { class: "actions" },
      h("button", { type: "button", "data-act": "checkpoint", "data-job": job.id, "data-step": one.step, "aria-label": `Download step ${one.step}` }, "Download"),
      h("a", { class: "button", href: `#/chat/${encodeURIComponent(one.model)}`, "aria-label": `Chat with step ${one.step}` }, "Chat")))))))));

export const jobPage = (state) => {
  const id = state.route[1];
  const job = state.overview.jobs.find((one) => one.id === id) ?? state.detail?.job;
  const detail = state.detail?.id === id ? state.detail : null;
  if (detail?.missing || (!job && detail)) return [h("section", { class: "welcome" }, h("h2", {}, "There is no such job"), h("p", {}, h("a", { href: "#/jobs" }, "All jobs")))];
  if (!job) return [h("p", { class: "words" }, "Loading…")];
  const [end, endDetail] = endWords(job, state.overview.now);
  const why = whyWords(job);
  const trials = trialsOf(state, job);
  return [
    h("p", { class: "crumb" }, h("a", { href: "#/jobs" }, "← All jobs")),
    h("section", { class: "verdict job-head", "data-state": job.state },
      h("div", {}, h("p", { class: "lead" }, pen(state.penOf(job.id)), job.name, " ", h("span", { class: `state ${job.state}` }, stateWord(job))),
        job.sweep && !isSweep(job) && h("p", { class: "why" }, sweepWords(job), ": ", trialValues(job)),
        why && h("p", { class: "why" }, sentence(why)), job.warning && h("p", { class: "caution" }, job.warning),
        progress(job)),
      actions(state, job)),
    h("section", { class: "tiles", "aria-label": "Headline numbers" },
      !isSweep(job) && tile("training loss", loss(lastLoss(state, job)) || "–", job.step ? `at step ${count(job.step)}` : "not started"),
      tile(isSweep(job) ? "lowest validation loss" : "validation loss", loss(lowestLoss([job, ...trials])) || "–", job.base_loss ? `base ${loss(job.base_loss)}` : "no held-out rows"),
      tile("tokens trained", count(job.trained_tokens), detail ? detail.training_file : ""),
      tile(job.finished_at ? "ended" : "ends", end || "–", endDetail)),
    job.notes.map((note) => h("p", { class: "note" }, note)),
    trials.length > 0 && h("section", {}, h("h2", {}, "Trials"), table(state, trials)),
    h("section", { id: "curves" }, h("h2", {}, "Curves"), lossCharts(state, trials.length ? trials : [job], job.base_loss ? [{ value: job.base_loss, name: `base ${loss(job.base_loss)}` }] : [])),
    detail?.receipt && receipt(detail.receipt),
    detail?.checkpoints.length > 0 && checkpoints(job, detail.checkpoints),
    detail?.events.length > 0 && log(detail.events),
    detail && h("section", {}, h("h2", {}, "Settings"),
      job.actions.includes("priority") && h("form", { class: "inline", "data-act": "priority", "data-job": job.id },
        h("label", { for: "priority" }, "Priority"), h("input", { id: "priority", name: "priority", type: "number", min: -100, max: 100, step: 1, value: job.priority, required: true }),
        h("button", { type: "submit" }, "Change")),
      facts([["id", job.id], ...(job.model ? [["model", job.model]] : []), ...flat(detail.settings)])),
  ];
};
