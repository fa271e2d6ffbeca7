// One prompt for up to three models side by side, streamed.

import { get, readEvents, send } from "./api.js";
import { h, plural } from "./dom.js";

const MAX_MODELS = 3;

export const newChat = () => ({ models: null, chosen: [], turns: [], running: null, problem: "" });

const column = (answer, name) => h("div", { class: `answer${answer.error ? " failed" : ""}` },
  h("p", { class: "label" }, name),
  answer.error ? h("p", { class: "worse" }, answer.error) : h("p", { class: "said" }, answer.text, answer.done ? "" : h("span", { class: "caret", "aria-label": "still writing" })),
  answer.done && !answer.error && h("small", {}, answer.tokens === null ? "" : `${plural(answer.tokens, "token")}${answer.first === null ? "" : ` · first after ${answer.first} ms`}${answer.finish === "length" ? " · cut off at the limit" : ""}`));

const turn = (state, one, at) => h("li", { class: "turn", "data-key": String(at) },
  h("p", { class: "prompt" }, one.prompt),
  h("div", { class: "answers" }, one.answers.map((answer) => column(answer, state.modelName(answer.model)))));

export const chatPage = (state) => {
  const { chat } = state;
  const models = chat.models ?? [];
  return [h("section", { class: "chat" }, h("h2", {}, "Compare adapters"),
    h("div", { class: "legend models", role: "group", "aria-label": `Models to ask, at most ${MAX_MODELS}` },
      models.map((model) => h("button", { type: "button", "data-act": "model", "data-model": model, "data-key": model, "aria-pressed": String(chat.chosen.includes(model)), class: "choice", title: model, disabled: !chat.chosen.includes(model) && chat.chosen.length >= MAX_MODELS },
        state.modelName(model)))),
    chat.models && !chat.turns.length && h("p", { class: "words" }, models.length > 1 ? `Choose up to ${MAX_MODELS} models; each gets the same messages.` : "Only the base answers so far: an adapter joins it as soon as its job has trained."),
    chat.problem && h("p", { class: "note bad", role: "alert" }, chat.problem),
    h("ol", { class: "turns", "aria-live": "off" }, chat.turns.map((one, at) => turn(state, one, at))),
    h("form", { class: "card ask", "data-act": "ask" },
      h("label", { class: "unseen", for: "prompt" }, "Message"),
      h("textarea", { id: "prompt", name: "prompt", rows: 3, placeholder: "Ask all of them…", required: true }),
      h("div", { class: "buttons" },
        h("label", { for: "max_tokens" }, "Tokens"), h("input", { id: "max_tokens", name: "max_tokens", type: "number", min: 1, max: 4096, value: 128, required: true }),
        h("label", { for: "temperature" }, "Temperature"), h("input", { id: "temperature", name: "temperature", type: "number", min: 0, max: 2, step: 0.1, value: 0, required: true }),
        h("span", { class: "spring" }),
        chat.turns.length > 0 && !chat.running && h("button", { type: "button", "data-act": "forget", "data-key": "forget" }, "New chat"),
        chat.running ? h("button", { type: "button", "data-act": "stop", "data-key": "stop" }, "Stop") : h("button", { type: "submit", class: "primary", "data-key": "ask", disabled: !chat.chosen.length }, chat.chosen.length > 1 ? `Ask ${chat.chosen.length} models` : "Ask"))))];
};

export const loadModels = async (state, wanted) => {
  const { chat } = state;
  try {
    const training = state.overview.jobs.map((job) => job.answers_as).filter(Boolean);
    chat.models = [...new Set([...(await get("/v1/models")).data.map((model) => model.id), ...training])];
    // A checkpoint is not in the list.
    if (wanted && !chat.models.includes(wanted)) chat.models.push((await get(`/v1/models/${wanted}`)).id);
    // The adapter that a link names comes first, beside the base.
    const before = chat.chosen.filter((model) => chat.models.includes(model));
    const asked = wanted && chat.models.includes(wanted) ? [state.overview.base, wanted].filter((model) => chat.models.includes(model)) : [];
    chat.chosen = asked.length && !asked.every((model) => before.includes(model)) ? asked : before.length ? before : chat.models.slice(0, 2);
    chat.problem = "";
  } catch (error) {
    chat.problem = error.message;
    chat.models ??= [];
  }
};

export const choose = ({ chat }, model) => {
  chat.chosen = chat.chosen.includes(model) ? chat.chosen.filter((one) => one !== model) : [...chat.chosen, model].slice(0, MAX_MODELS);
};

const messagesFor = (chat, model) => chat.turns.flatMap((one) => {
  const answer = one.answers.find((found) => found.model === model);
  const said = answer && answer.done && !answer.error ? [{ role: "assistant", content: answer.text }] : [];
  return answer ? [{ role: "user", content: one.prompt }, ...said] : [];
});

const stream = async (state, answer, messages, sampling, signal, refresh) => {
  const began = performance.now();
  try {
    const body = { model: answer.model, messages, stream: true, stream_options: { include_usage: true }, ...sampling };
    await readEvents(await send("POST", "/v1/chat/completions", { body, signal }), (_, data) => {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const [choice] = chunk.choices ?? [];
      if (choice?.delta?.content) {
        answer.first ??= Math.round(performance.now() - began);
        answer.text += choice.delta.content;
      }
      answer.finish = choice?.finish_reason ?? answer.finish;
      answer.tokens = chunk.usage?.completion_tokens ?? answer.tokens;
      refresh();
    });
  } catch (error) {
    if (error.name !== "AbortError") answer.error = error.message;
  }
  answer.done = true;
  refresh();
};

export const ask = async (state, element, refresh) => {
  const { chat } = state;
  const values = new FormData(element);
  const prompt = values.get("prompt").trim();
  if (!prompt || chat.running || !chat.chosen.length) return;
  const answers = chat.chosen.map((model) => ({ model, text: "", done: false, error: "", tokens: null, finish: "", first: null }));
  chat.turns.push({ prompt, answers });
  chat.running = new AbortController();
  element.querySelector("textarea").value = "";
  refresh();
  document.querySelector(".turns")?.lastElementChild?.scrollIntoView({ block: "nearest" });
  const sampling = { max_completion_tokens: Number(values.get("max_tokens")), temperature: Number(values.get("temperature")) };
  await Promise.all(answers.map((answer) => stream(state, answer, messagesFor(chat, answer.model), sampling, chat.running.signal, refresh)));
  chat.running = null;
  refresh();
};
