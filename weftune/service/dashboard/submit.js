// The form that submits a job: upload, the plan beside the jobs that run, and then the submission.

import { post, send } from "./api.js";
import { bytes, count, h, plural, seconds } from "./dom.js";
import { tile } from "./jobs.js";

export const newForm = () => ({ files: {}, plan: null, problem: null, busy: "" });

const field = (name, label, input, hint) => h("div", { class: "field-row" }, h("label", { for: name }, label), input, hint && h("small", { id: `${name}-hint` }, hint));
const box = (name, values) => h("input", { id: name, name, autocomplete: "off", "aria-describedby": `${name}-hint`, ...values });

/** Return the problem with the lines that the server names, one per line of its message. */
const problemBox = (problem) => {
  // "tickets.jsonl:3: …" names a line of a file that the title and the form name already.
  const lines = problem.message.split("\n").filter(Boolean).map((line) => line.replace(/^[^\n]*?:(\d+): /, "Line $1: "));
  return h("div", { class: "note bad problem", role: "alert", id: "problem" },
    h("b", {}, problem.title), lines.length === 1 ? h("p", {}, lines[0]) : h("ul", {}, lines.slice(0, 30).map((line) => h("li", {}, line))),
    lines.length > 30 && h("p", {}, `and ${lines.length - 30} more`));
};

const planBox = (plan, busy) => h("section", { class: "plan", "aria-live": "polite" },
  h("h2", {}, "The plan"),
  h("div", { class: `verdict${plan.fits ? "" : " bad"}` },
    h("p", { class: "lead" }, !plan.fits ? "It does not fit." : plan.waits_for ? "It waits first." : "It starts at the next window."),
    plan.fits && plan.ahead > 0 && h("p", {}, `${plural(plan.ahead, "job")} ahead.`),
    h("p", {}, plan.fits ? plan.waits_for || `Beside ${plural(plan.running_jobs, "job")} that ${plan.running_jobs === 1 ? "runs" : "run"} now.` : plan.why_not)),
  h("div", { class: "tiles" },
    tile("until it ends", plan.seconds === null ? "–" : `about ${seconds(plan.seconds)}`, "predicted, with the jobs that run now"),
    tile("optimizer steps", count(plan.steps), plan.is_lower_bound ? "at least" : ""),
    tile("memory of the adapter", bytes(plan.state_bytes), "with optimizer state"),
    tile("peak memory", bytes(plan.needs_bytes), `of ${bytes(plan.budget_bytes)}`)),
  h("p", { class: "words" }, `Times are ${plan.source}.`),
  h("button", { type: "button", class: "primary", "data-act": "submit", disabled: busy || !plan.fits }, busy ? "Submitting…" : "Submit the job"));

const chosen = (file) => (file ? `${file.filename} · ${bytes(file.bytes)}` : "");

export const submitPage = (state) => {
  const { form } = state;
  return [
    h("section", {}, h("h2", {}, "New job"),
      h("form", { class: "card form", id: "job-form", "data-act": "plan", novalidate: true },
        h("fieldset", {}, h("legend", {}, "Rows"),
          field("training_file", "Training rows", box("training_file", { type: "file", accept: ".jsonl" }), chosen(form.files.training_file) || "JSONL with messages, or with preferences for DPO. Every row is checked."),
          field("validation_file", "Held-out rows", box("validation_file", { type: "file", accept: ".jsonl" }), chosen(form.files.validation_file) || "Optional: the validation loss is measured on them.")),
        h("fieldset", {}, h("legend", {}, "Job"),
          field("suffix", "Name", box("suffix", { type: "text", maxlength: 64, placeholder: "support-v2" }), "Up to 64 characters; part of the model's name."),
          field("method", "Method", h("select", { id: "method", name: "method", "aria-describedby": "method-hint" }, h("option", { value: "supervised" }, "Supervised (SFT)"), h("option", { value: "dpo" }, "Preferences (DPO)")), "DPO compares a preferred answer with another one."),
          field("n_epochs", "Epochs", box("n_epochs", { type: "number", min: 1, max: 50, step: 1, placeholder: "auto" }), "Passes over all rows."),
          field("batch_size", "Batch size", box("batch_size", { type: "number", min: 1, max: 256, step: 1, placeholder: "auto" }), "Rows per optimizer step.")),
        h("fieldset", {}, h("legend", {}, "Adapter"),
          field("rank", "Rank", box("rank", { type: "number", min: 1, max: 512, step: 1, placeholder: "16" }), "Of a LoRA on all linears."),
          field("learning_rate", "Learning rate", box("learning_rate", { type: "text", inputmode: "decimal", placeholder: "auto" }), "Such as 2e-4."),
          field("priority", "Priority", box("priority", { type: "number", min: -100, max: 100, step: 1, placeholder: "0" }), "Higher goes first."),
          field("seed", "Seed", box("seed", { type: "number", min: 0, step: 1, placeholder: "0" }), "Equal seeds give equal runs.")),
        h("div", { class: "buttons" }, h("button", { type: "submit", class: form.plan ? "" : "primary", disabled: Boolean(form.busy) }, form.busy && form.busy !== "submit" ? form.busy : "Check and plan"),
          h("small", { role: "status" }, form.busy === "submit" ? "" : form.busy)))),
    form.problem && problemBox(form.problem),
    form.plan && planBox(form.plan, form.busy === "submit"),
  ];
};

class Mistake extends Error {}

const readNumber = (values, name, label, kind) => {
  const text = values.get(name).trim();
  if (!text) return undefined;
  const number = Number(text);
  if (!Number.isFinite(number) || (kind === "whole" && !Number.isInteger(number))) {
    throw new Mistake(`${label} must be ${kind === "whole" ? "a whole number" : "a number"}, got ${text}`);
  }
  return number;
};

/** Return the values without those that are undefined; undefined if none is left. */
const known = (values) => {
  const kept = Object.entries(values).filter(([, value]) => value !== undefined);
  return kept.length ? Object.fromEntries(kept) : undefined;
};

const requestOf = (form, values, base) => {
  const method = values.get("method");
  const hyperparameters = known({ n_epochs: readNumber(values, "n_epochs", "Epochs", "whole"), batch_size: readNumber(values, "batch_size", "Batch size", "whole") });
  const rank = readNumber(values, "rank", "Rank", "whole");
  return known({
    model: base,
    training_file: form.files.training_file.id,
    validation_file: form.files.validation_file?.id,
    suffix: values.get("suffix").trim() || undefined,
    seed: readNumber(values, "seed", "Seed", "whole"),
    method: { type: method, [method]: known({ hyperparameters }) ?? {} },
    weftune: known({
      adapter: rank === undefined ? undefined : { rank },
      learning_rate: readNumber(values, "learning_rate", "Learning rate", "number"),
      priority: readNumber(values, "priority", "Priority", "whole"),
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
