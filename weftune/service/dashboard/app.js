// The page's owner: it signs in, follows the stream of events, and draws the page whose address is in the hash.

import { Refused, get, key, post, readEvents, save, send, setKey } from "./api.js";
import { followPointer, penOf } from "./chart.js";
import { ask, chatPage, choose, loadModels, newChat } from "./chat.js";
import { devicePage } from "./device.js";
import { h, morph } from "./dom.js";
import { jobPage, jobsPage, wantedCurves } from "./jobs.js";
import { checkAndPlan, newForm, submit, submitPage } from "./submit.js";

const PAGES = { jobs: "Jobs", device: "Device", new: "New job", chat: "Chat" };
const RETRY_MS = [500, 1000, 2000, 5000, 10_000];
const root = document.querySelector("#app");

const pens = new Map();
const newState = () => ({
  route: ["jobs"], overview: null, window: null, curves: new Map(), early: new Map(), fetching: new Set(), detail: null, shown: new Map(),
  busy: new Set(), confirming: null, notice: null, signing: "", connected: true, form: newForm(), chat: newChat(),
  penOf: (id) => {
    if (!pens.has(id)) pens.set(id, pens.size);
    return penOf(pens.get(id));
  },
  nameOf: (id) => state.overview?.jobs.find((job) => job.id === id)?.name ?? id,
  modelName: (model) => {
    if (model === state.overview?.base) return `${model} (base)`;
    const job = state.overview?.jobs.find((one) => model.includes(one.id));
    const [, step] = model.match(/:ckpt-step-(\d+)$/) ?? [];
    return job ? `${job.name}${step ? ` · step ${step}` : ""}` : model;
  },
});
let state = newState();
let streaming = null;

// -- drawing ------------------------------------------------------------------------------------------------

const signIn = () => h("form", { class: "card sign-in", "data-act": "sign-in" },
  h("p", { class: "brand" }, "Weftune service"), h("h1", {}, "Sign in"),
  h("label", { for: "key" }, "API key"),
  h("input", { id: "key", name: "key", type: "password", autocomplete: "off", spellcheck: "false", required: true, "aria-describedby": "key-hint" }),
  h("small", { id: "key-hint" }, "The last line of ", h("code", {}, "weftune keys create TENANT"), ". It is kept in this tab only."),
  state.signing && h("p", { class: "note bad", role: "alert" }, state.signing),
  h("button", { type: "submit", class: "primary" }, "Sign in"));

const headline = () => {
  const { overview } = state;
  const live = !state.connected ? ["broken", "reconnecting…"] : overview.training ? ["live", "training process runs"] : ["broken", "training process is not running"];
  return h("header", {},
    h("div", { class: "top" }, h("p", { class: "brand" }, "Weftune service"), h("button", { type: "button", "data-act": "sign-out" }, "Sign out")),
    h("h1", {}, overview.base),
    h("ul", { class: "facts" }, [overview.device, `tenant ${overview.tenant}`].filter(Boolean).map((text) => h("li", {}, text)),
      h("li", { role: "status" }, h("span", { class: `dot ${live[0]}` }), live[1])),
    h("nav", { class: "tabs", "aria-label": "Pages" }, Object.entries(PAGES).map(([name, title]) => h("a", { href: `#/${name}`, "aria-current": state.route[0] === name ? "page" : null }, title))));
};

const page = () => {
  if (state.route[0] === "device") return devicePage(state);
  if (state.route[0] === "new") return submitPage(state);
  if (state.route[0] === "chat") return chatPage(state);
  return state.route[1] ? jobPage(state) : jobsPage(state);
};

const draw = () => {
  const target = h("main");
  if (!key() || state.signing) target.append(signIn());
  else if (!state.overview) target.append(h("p", { class: "words" }, "Loading…"));
  else {
    target.append(headline(),
      h("div", { class: "notices", role: "alert" }, state.notice && h("p", { class: "note bad" }, state.notice, h("button", { type: "button", "data-act": "dismiss", "aria-label": "Dismiss" }, "×"))),
      h("div", { id: "content", tabindex: -1, "data-key": state.route.slice(0, 2).join("/") }, page().flat().filter(Boolean)));
  }
  morph(root, target);
  const name = state.overview && key() ? PAGES[state.route[0]] ?? "" : "";
  document.title = name ? `${name} · Weftune service` : "Weftune service";
};

let pending = false;
/** Draw before the next frame, once for everything that has changed until then. */
const refresh = () => {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => {
    pending = false;
    draw();
  });
};

const complain = (error) => {
  if (error instanceof Refused && error.status === 401) return signOut("This key is not valid, or it has been revoked.");
  state.notice = error.message;
  return refresh();
};

// -- data ---------------------------------------------------------------------------------------------------

const addPoints = (points) => {
  const { job, number, train, eval: evaluated } = points;
  const curve = state.curves.get(job);
  // Points that come while the curve is fetched are added to it afterwards.
  if (!curve) state.early.set(job, [...(state.early.get(job) ?? []), points]);
  if (!curve || number <= curve.number) return;
  const last = (points) => points.at(-1)?.[0] ?? -1;
  curve.train.push(...train.filter(([step]) => step > last(curve.train)));
  curve.eval.push(...evaluated.filter(([step]) => step > last(curve.eval)));
  curve.number = number;
};

const fetchCurves = () => wantedCurves(state).filter((id) => !state.curves.has(id) && !state.fetching.has(id)).forEach(async (id) => {
  state.fetching.add(id);
  try {
    const { number, train, eval: evaluated } = await get(`/api/jobs/${id}/curve`);
    state.curves.set(id, { number, train, eval: evaluated });
    state.early.get(id)?.forEach(addPoints);
    state.early.delete(id);
    refresh();
  } catch (error) {
    if (error.status !== 404) complain(error);
  } finally {
    state.fetching.delete(id);
  }
});

const fetchDetail = async () => {
  const [name, id] = state.route;
  if (name !== "jobs" || !id) return;
  try {
    const detail = await get(`/api/jobs/${encodeURIComponent(id)}`);
    state.detail = { id, ...detail };
  } catch (error) {
    if (error.status === 404) state.detail = { id, missing: true };
    else complain(error);
  }
  refresh();
};

const handlers = {
  changes: ({ jobs, ...counts }) => {
    const { overview } = state;
    const known = new Map(overview.jobs.map((job) => [job.id, job]));
    const added = jobs.filter((job) => !known.has(job.id));
    const changed = new Map(jobs.map((job) => [job.id, job]));
    state.overview = { ...overview, ...counts, jobs: [...added, ...overview.jobs.map((job) => changed.get(job.id) ?? job)] };
    added.toReversed().forEach((job) => state.penOf(job.id));
    if (changed.has(state.route[1])) fetchDetail();
    fetchCurves();
  },
  metrics: addPoints,
  window: (window) => { state.window = window; },
};

const fetchOverview = async () => {
  state.overview = await get("/api/overview");
  state.overview.jobs.toReversed().forEach((job) => state.penOf(job.id));
};

const follow = async (controller) => {
  for (let failures = 0; !controller.signal.aborted;) {
    try {
      const answer = await send("GET", "/api/stream", { signal: controller.signal });
      [failures, state.connected] = [0, true];
      // What happened while no stream was open is fetched again.
      state.curves.clear();
      fetchCurves();
      fetchDetail();
      await readEvents(answer, (name, data) => {
        handlers[name]?.(JSON.parse(data));
        refresh();
      });
    } catch (error) {
      if (controller.signal.aborted) return;
      if (error.status === 401) {
        complain(error);
        return;
      }
    }
    state.connected = failures === 0;
    refresh();
    await new Promise((resolve) => { setTimeout(resolve, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]); });
    failures += 1;
  }
};

const start = async () => {
  streaming?.abort();
  streaming = new AbortController();
  try {
    await fetchOverview();
    [state.window] = (await get("/api/windows?limit=1")).data;
  } catch (error) {
    complain(error);
    if (!key()) return;
  }
  go();
  follow(streaming);
};

// -- what the reader does -----------------------------------------------------------------------------------

function signOut(why = "") {
  streaming?.abort();
  setKey(null);
  state = newState();
  state.signing = why;
  refresh();
}

const go = () => {
  state.route = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent).filter(Boolean);
  if (!PAGES[state.route[0]]) state.route = ["jobs"];
  state.confirming = null;
  if (!state.overview) return refresh();
  if (state.route[0] === "chat") loadModels(state, state.route[1]).then(refresh);
  fetchCurves();
  fetchDetail();
  return refresh();
};

const actOnJob = async (id, verb) => {
  if (verb === "cancel" && state.confirming !== id) {
    state.confirming = id;
    refresh();
    return;
  }
  state.confirming = null;
  state.busy.add(id);
  refresh();
  try {
    if (verb === "download") await save(`/api/jobs/${id}/adapter`, `${id}.tar`);
    else await post(`/v1/fine_tuning/jobs/${id}/${verb}`);
  } catch (error) {
    complain(error);
  }
  state.busy.delete(id);
  refresh();
};

const acts = {
  "sign-out": () => signOut(),
  dismiss: () => { state.notice = null; },
  job: ({ job, verb }) => actOnJob(job, verb),
  checkpoint: ({ job, step }) => save(`/api/jobs/${job}/adapter?step=${step}`, `${job}-step-${step}.tar`).catch(complain),
  show: ({ job }, element) => { state.shown.set(job, element.getAttribute("aria-pressed") !== "true"); },
  submit: () => submit(state, refresh),
  model: ({ model }) => choose(state, model),
  stop: () => state.chat.running?.abort(),
  forget: () => { state.chat.turns = []; },
};

const forms = {
  "sign-in": async (element) => {
    const given = new FormData(element).get("key").trim();
    try {
      await get("/api/overview", { with: given });
    } catch (error) {
      state.signing = error.status === 401 ? "This key is not valid, or it has been revoked." : error.message;
      return;
    }
    setKey(given);
    state.signing = "";
    await start();
  },
  plan: (element) => checkAndPlan(state, element, refresh),
  priority: (element) => post(`/api/jobs/${element.dataset.job}/priority`, { priority: Number(new FormData(element).get("priority")) }).catch(complain),
  ask: (element) => ask(state, element, refresh),
};

document.addEventListener("click", async (event) => {
  const element = event.target.closest("button[data-act]");
  if (state.confirming && element?.dataset.verb !== "cancel") state.confirming = null;
  if (element) await acts[element.dataset.act]?.(element.dataset, element);
  refresh();
});
document.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (event.target.reportValidity()) await forms[event.target.dataset.act]?.(event.target);
  refresh();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && event.target.id === "prompt") {
    event.preventDefault();
    event.target.form.requestSubmit();
  }
  if (event.key === "Escape" && state.confirming) {
    state.confirming = null;
    refresh();
  }
});
window.addEventListener("hashchange", () => {
  go();
  scrollTo(0, 0);
});
// Predicted ends come closer while nothing else changes.
setInterval(() => {
  if (!state.overview || document.hidden) return;
  state.overview.now += 5;
  refresh();
}, 5000);

followPointer();
if (key()) start();
else refresh();
