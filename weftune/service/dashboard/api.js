// Requests with the API key, which lives in this tab's session storage only.

const KEY = "weftune-key";
export const key = () => sessionStorage.getItem(KEY);
export const setKey = (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY));

/** An answer that is not 2xx; `status` is 0 where no answer came. */
export class Refused extends Error {
  constructor(status, error) {
    super(error.message || `the server answered ${status}`);
    this.status = status;
  }
}

export const send = async (method, path, { body, signal, with: given = key() } = {}) => {
  const headers = { Authorization: `Bearer ${given}` };
  const isForm = body instanceof FormData;
  if (body !== undefined && !isForm) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method, headers, signal, cache: "no-store", body: body === undefined || isForm ? body : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, { message: "The server does not answer." });
  }
  if (answer.ok) return answer;
  const text = await answer.text();
  let error = { message: text.slice(0, 500) };
  try {
    error = JSON.parse(text).error ?? error;
  } catch { /* An answer of a proxy is shown as it is. */ }
  throw new Refused(answer.status, error);
};

export const get = async (path, options) => (await send("GET", path, options)).json();
export const post = async (path, body, options) => (await send("POST", path, { ...options, body })).json();

/** Call `handle(name, data, id)` for each server-sent event of an answer, until it ends. */
export const readEvents = async (answer, handle) => {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = { name: "message", data: [], id: null };
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r\n|\n|\r/);
    rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (event.data.length) handle(event.name, event.data.join("\n"), event.id);
        event = { name: "message", data: [], id: null };
      } else if (!line.startsWith(":")) {
        const [, field, text] = line.match(/^([^:]*):? ?(.*)$/);
        if (field === "data") event.data.push(text);
        else if (field === "event") event.name = text;
        else if (field === "id") event.id = text;
      }
    }
  }
};

/** Save an answer's content as a file. The key travels in a header, so a plain link cannot fetch it. */
export const save = async (path, filename) => {
  const url = URL.createObjectURL(await (await send("GET", path)).blob());
  const link = document.createElement("a");
  link.href = url;
  link.download = filename;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
};
