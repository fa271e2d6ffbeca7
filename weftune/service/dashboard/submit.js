// The form that submits a job or a sweep: upload, the plan beside the jobs that run, and then the submission.

import { post, send } from "./api.js";
import { bytes, count, h, plural, seconds, sentence } from "./dom.js";
import { tile, valuesText } from "./jobs.js";

const SHOWN_TRIALS = 50;
/** Share of the trials that a rung of the form keeps. */
const KEPT = 0.5;
/** Share of the rows that a sweep holds out if it has no held-out rows of its own. */
const HELD_OUT = 0.1;

export const newForm = () => ({ files: {}, plan: null, problem: null, busy: "" });

const field = (name, label, input, hint) => h("div", { class: `field-row ${name}` }, h("label", { for: name }, label), input, hint && h("small", { id: `${name}-hint` }, hint));
const box = (name, values) => h("input", { id: name, name, autocomplete: "off", "aria-describedby": `${name}-hint`, ...values });

/** Return the problem with the lines that the server names, one per line of its message. */
const problemBox = (problem) => {
  // "tickets.jsonl:3: …" names a line of a file that the title and the form name already.
  const lines = problem.message.split("\n").filter(Boolean).map((line) => line.replace(/^[^\n]*?:(\d+): /, "Line $1: "));
  return h("div", { class: "note bad problem", role: "alert", id: "problem" },
    h("b", {}, problem.title), lines.length === 1 ? h("p", {}, lines[0]) : h("ul", {}, lines.slice(0, 30).map((line) => h("li", {}, line))),
    lines.length > 30 && h("p", {}, `and ${lines.length - 30} more`));
};

const trialState = (trial) => {
  if (!trial.fits) return ["failed", "cannot run", trial.why_not];
  return trial.waits_for ? ["queued", "waits", trial.waits_for] : ["running", "starts at once", ""];
};

const trialTable = (trials) => h("div", { class: "scroll" }, h("table", { class: "jobs live" },
  h("thead", {}, h("tr", {}, ["trial", "state"].map((text) => h("th", { scope: "col" }, text)),
    ["steps", "ends after", "memory"].map((text) => h("th", { scope: "col", class: "number" }, text)))),
  h("tbody", {}, trials.slice(0, SHOWN_TRIALS).map((one) => {
    const [state, word, why] = trialState(one);
    return h("tr", { "data-key": one.name },
      h("th", { scope: "row" }, one.name, h("small", { class: "under" }, valuesText(one.values))),
      h("td", { "data-label": "state", class: "why" }, h("span", { class: `state ${state}` }, word), why && h("small", { class: "under" }, sentence(why))),
      h("td", { "data-label": "steps", class: "number" }, one.fits ? count(one.steps) : ""),
      h("td", { "data-label": "ends after", class: "number" }, one.fits ? seconds(one.seconds) : ""),
      h("td", { "data-label": "memory", class: "number" }, one.fits ? bytes(one.state_bytes) : ""));
  }))));

const planLead = ({ trials, fits, waits_for: waits }) => {
  if (!fits) return trials.length ? "Not every trial fits." : "It does not fit.";
  if (waits) return trials.length ? `${plural(trials.length, "trial")} wait first.` : "It waits first.";
  if (!trials.length) return "It starts at the next window.";
  const starting = trials.filter((one) => !one.waits_for).length;
  return `${starting < trials.length ? `${starting} of ` : ""}${plural(trials.length, "trial")} ${starting === 1 ? "starts" : "start"} at the next window.`;
};

/** How many trials continue from each rung, and what that saves; empty without rungs. */
const rungWords = ({ rungs, expected_share: share }) => {
  if (rungs.length < 2) return "";
  const kept = rungs.slice(1).map((next, at) => `${count(next.trials)}${at ? "" : next.trials === 1 ? " continues" : " continue"} after step ${count(rungs[at].step)}`);
  return `Of ${plural(rungs[0].trials, "trial")}, ${kept.join(", ")}: about ${Math.round(100 * share)} % of the samples are trained.`;
};

const planBox = ({ plan, request, busy }) => {
  const isSweep = plan.trials.length > 0;
  const heldOut = request.weftune?.eval?.fraction;
  return h("section", { class: "plan", "aria-live": "polite" },
    h("h2", {}, "The plan"),
    h("div", { class: `verdict${plan.fits ? "" : " bad"}` },
      h("p", { class: "lead" }, planLead(plan)),
      plan.fits && plan.ahead > 0 && h("p", {}, `${plural(plan.ahead, "job")} ahead.`),
      h("p", {}, plan.fits ? plan.waits_for || `Beside ${plural(plan.running_jobs, "job")} that ${plan.running_jobs === 1 ? "runs" : "run"} now.` : plan.why_not),
      isSweep && h("p", {}, rungWords(plan)),
      heldOut && h("p", {}, `The trials are compared on ${heldOut * 100} % of the rows, which are held out.`),
      plan.warnings.map((one) => h("p", { class: "caution" }, one))),
    plan.source && h("div", { class: "tiles" },
      tile("until it ends", `about ${seconds(plan.seconds)}`, isSweep && plan.rungs.length > 1 ? "predicted, if no trial is dropped" : "predicted, with the jobs that run now"),
      tile("optimizer steps", count(plan.steps), isSweep ? `of ${plural(plan.trials.length, "trial")}` : ""),
      tile(isSweep ? "memory of the adapters" : "memory of the adapter", bytes(plan.state_bytes), "with optimizer state"),
      tile("peak memory", bytes(plan.needs_bytes), `of ${bytes(plan.budget_bytes)}`)),
    isSweep && trialTable(plan.trials),
    plan.trials.length > SHOWN_TRIALS && h("p", { class: "words" }, `and ${plural(plan.trials.length - SHOWN_TRIALS, "more trial")}`),
    plan.source && h("p", { class: "words" }, `Times are ${plan.source}.`),
    h("button", { type: "button", class: "primary", "data-act": "submit", disabled: busy === "submit" || !plan.fits }, busy === "submit" ? "Submitting…" : isSweep ? `Submit ${plural(plan.trials.length, "trial")}` : "Submit the job"));
};

const chosen = (file) => (file ? `${file.filename} · ${bytes(file.bytes)}` : "");

export const submitPage = (state) => {
  const { form } = state;
  return [
    h("section", {}, h("h2", {}, "New job"),
      h("form", { class: "card form", id: "job-form", "data-act": "plan", novalidate: true },
        h("fieldset", {}, h("legend", {}, "Rows"),
          field("training_file", "Training rows", box("training_file", { type: "file", accept: ".jsonl" }), chosen(form.files.training_file) || "JSONL with messages, or with preferences for DPO. Every row is checked."),
          field("validation_file", "Held-out rows", box("validation_file", { type: "file", accept: ".jsonl" }), chosen(form.files.validation_file) || "Optional: the validation loss is measured on them. A sweep without them holds out a tenth of the rows.")),
        h("fieldset", {}, h("legend", {}, "Job"),
          field("suffix", "Name", box("suffix", { type: "text", maxlength: 64, placeholder: "support-v2" }), "Up to 64 characters; part of the model's name."),
          field("method", "Method", h("select", { id: "method", name: "method", "aria-describedby": "method-hint" }, h("option", { value: "supervised" }, "Supervised (SFT)"), h("option", { value: "dpo" }, "Preferences (DPO)")), "DPO compares a preferred answer with another one."),
          field("priority", "Priority", box("priority", { type: "number", min: -100, max: 100, step: 1, placeholder: "0" }), "Higher goes first."),
          field("seed", "Seed", box("seed", { type: "number", min: 0, step: 1, placeholder: "0" }), "Equal seeds give equal runs.")),
        h("fieldset", {}, h("legend", {}, "Training"),
          field("n_epochs", "Epochs", box("n_epochs", { type: "number", min: 1, max: 50, step: 1, placeholder: "auto" }), "Passes over all rows."),
          field("batch_size", "Batch size", box("batch_size", { type: "number", min: 1, max: 256, step: 1, placeholder: "auto" }), "Rows per optimizer step."),
          field("rank", "Rank", box("rank", { type: "text", placeholder: "16" }), "Of a LoRA on all linears. One, or several such as 8, 64."),
          field("learning_rate", "Learning rate", box("learning_rate", { type: "text", placeholder: "auto" }), "One such as 2e-4, or several such as 1e-4, 4e-4.")),
        h("fieldset", {}, h("legend", {}, "Sweep"),
          field("rungs", "Rungs", box("rungs", { type: "text", placeholder: "none" }), "Several ranks or learning rates make a sweep: every combination is a trial. After each rung, a share of the steps such as 0.25, 0.5, only the better half of the trials continues.")),
        h("div", { class: "buttons" }, h("button", { type: "submit", class: form.plan ? "" : "primary", disabled: Boolean(form.busy) }, form.busy && form.busy !== "submit" ? form.busy : "Check and plan"),
          h("small", { role: "status" }, form.busy === "submit" ? "" : form.busy)))),
    form.problem && problemBox(form.problem),
    form.plan && planBox(form),
  ];
};

class Mistake extends Error {}

/** Return the numbers of a field, which are separated by commas. */
const readNumbers = (values, name, label, kind) => {
  const text = values.get(name).trim();
  if (!text) return [];
  return text.split(",").map((part) => {
    const number = Number(part);
    if (!part.trim() || !Number.isFinite(number) || (kind === "whole" && !Number.isInteger(number))) {
      throw new Mistake(`${label} must be ${kind === "whole" ? "a whole number" : "a number"}, got ${part.trim() || text}`);
    }
    return number;
  });
};
const readNumber = (values, name, label, kind) => readNumbers(values, name, label, kind)[0];

/** Return the sweep over the fields with several values; undefined if there is none. */
const readSweep = (ranks, rates, rungs) => {
  const over = known({ "adapter.rank": ranks.length > 1 ? ranks : undefined, learning_rate: rates.length > 1 ? rates : undefined });
  if (!over && rungs.length) throw new Mistake("Rungs compare the trials of a sweep: give several ranks or learning rates, or leave the rungs out.");
  return over && known({ over, halving: rungs.length ? { at: rungs, keep: KEPT } : undefined });
};

/** Return the values without those that are undefined; undefined if none is left. */
const known = (values) => {
  const kept = Object.entries(values).filter(([, value]) => value !== undefined);
  return kept.length ? Object.fromEntries(kept) : undefined;
};

const requestOf = (form, values, base) => {
  const method = values.get("method");
  const hyperparameters = known({ n_epochs: readNumber(values, "n_epochs", "Epochs", "whole"), batch_size: readNumber(values, "batch_size", "Batch size", "whole") });
  const ranks = readNumbers(values, "rank", "Rank", "whole");
  const rates = readNumbers(values, "learning_rate", "Learning rate", "number");
  const sweep = readSweep(ranks, rates, readNumbers(values, "rungs", "Rungs", "number"));
  return known({
    model: base,
    training_file: form.files.training_file.id,
    validation_file: form.files.validation_file?.id,
    suffix: values.get("suffix").trim() || undefined,
    seed: readNumber(values, "seed", "Seed", "whole"),
    method: { type: method, [method]: known({ hyperparameters }) ?? {} },
    weftune: known({
      adapter: ranks.length === 1 ? { rank: ranks[0] } : undefined,
      learning_rate: rates.length === 1 ? rates[0] : undefined,
      priority: readNumber(values, "priority", "Priority", "whole"),
      sweep,
      eval: sweep && !form.files.validation_file ? { fraction: HELD_OUT } : undefined,
    }),
  });
};

const upload = async (form, name, file, refresh) => {
  if (!file?.size) {
    // The reader took the file out of the form again.
    if (!file?.name) delete form.files[name];
    else throw new Mistake(`${file.name} is empty`);
    return;
  }
  const known_ = form.files[name];
  if (known_ && known_.filename === file.name && known_.bytes === file.size && known_.modified === file.lastModified) return;
  form.busy = `Uploading ${file.name}…`;
  refresh();
  const body = new FormData();
  body.append("purpose", "fine-tune");
  body.append("file", file, file.name);
  form.files[name] = { ...(await (await send("POST", "/v1/files", { body })).json()), modified: file.lastModified };
};

export const checkAndPlan = async (state, element, refresh) => {
  const { form } = state;
  const values = new FormData(element);
  Object.assign(form, { problem: null, plan: null, request: null });
  let title = "The form is not complete.";
  try {
    if (!values.get("training_file")?.name) throw new Mistake("Choose a file with training rows.");
    title = "These rows cannot be trained on.";
    await upload(form, "training_file", values.get("training_file"), refresh);
    title = "The held-out rows cannot be used.";
    await upload(form, "validation_file", values.get("validation_file"), refresh);
    title = "The job cannot run like this.";
    form.request = requestOf(form, values, state.overview.base);
    form.busy = "Planning…";
    refresh();
    form.plan = await post("/api/plan", form.request);
  } catch (error) {
    form.problem = { title, message: error.message };
  }
  form.busy = "";
  refresh();
  document.querySelector(form.problem ? "#problem" : ".plan")?.scrollIntoView({ block: "nearest" });
};

export const submit = async (state, refresh) => {
  const { form } = state;
  form.busy = "submit";
  refresh();
  try {
    const job = await post("/v1/fine_tuning/jobs", form.request);
    state.form = newForm();
    document.querySelector("#job-form")?.reset();
    location.hash = `#/jobs/${job.id}`;
  } catch (error) {
    Object.assign(form, { busy: "", plan: null, problem: { title: "The job was refused.", message: error.message } });
    refresh();
  }
};
