// Elements without HTML strings: text from jobs, rows and logs only ever becomes text nodes.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "line", "rect", "circle", "g", "defs", "pattern"]);

/** Create an element. `values` maps attributes to values; null and false leave an attribute out. The keys of
 * `style` are CSS properties, which are set through the object model, as the content security policy asks. */
export const h = (tag, values = {}, ...children) => {
  const element = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") Object.entries(value).forEach(([key, one]) => element.style.setProperty(key, one));
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false && child !== ""));
  return element;
};

const sameKind = (one, other) => one.nodeType === other.nodeType && one.nodeName === other.nodeName
  && (one.nodeType !== Node.ELEMENT_NODE || one.getAttribute("data-key") === other.getAttribute("data-key"));

const copyAttributes = (from, to) => {
  for (const { name } of [...to.attributes]) {
    // What a reader has opened stays open.
    if (!from.hasAttribute(name) && !(name === "open" && to.tagName === "DETAILS")) to.removeAttribute(name);
  }
  for (const { name, value } of from.attributes) {
    if (name === "style") {
      if (to.style.cssText !== from.style.cssText) to.style.cssText = from.style.cssText;
    } else if (to.getAttribute(name) !== value) to.setAttribute(name, value);
  }
};

/** Change the children of `to` into those of `from`. Elements that stay keep focus, selection and input. */
export const morph = (to, from) => {
  const byKey = new Map([...to.children].filter((child) => child.dataset?.key).map((child) => [child.dataset.key, child]));
  let present = to.firstChild;
  for (const wanted of [...from.childNodes]) {
    const key = wanted.dataset?.key;
    const kept = key ? byKey.get(key) : undefined;
    if (kept && kept !== present && sameKind(kept, wanted)) to.insertBefore(kept, present);
    if (kept && sameKind(kept, wanted)) present = kept;
    if (present && sameKind(present, wanted)) {
      if (present.nodeType === Node.TEXT_NODE) {
        if (present.data !== wanted.data) present.data = wanted.data;
      } else if (present.nodeType === Node.ELEMENT_NODE) {
        copyAttributes(wanted, present);
        if (!present.hasAttribute("data-own")) morph(present, wanted);
      }
      present = present.nextSibling;
    } else {
      to.insertBefore(wanted, present);
    }
  }
  while (present) {
    const next = present.nextSibling;
    present.remove();
    present = next;
  }
};

// -- numbers in words ---------------------------------------------------------------------------------------

export const count = (value) => Math.round(value).toLocaleString("en");
export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
export const sentence = (text) => (text ? text[0].toUpperCase() + text.slice(1) : "");
export const short = (value) => value.toLocaleString("en", { maximumSignificantDigits: Math.abs(value) < 1000 ? 4 : 6 });
export const loss = (value) => (value === null || value === undefined ? "" : value.toFixed(Math.abs(value) < 100 ? 4 : 1));

export const bytes = (value) => {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  const power = value < 1024 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(value) / 10));
  const scaled = value / 1024 ** power;
  return `${power && scaled < 100 ? scaled.toPrecision(3) : Math.round(scaled)} ${units[power]}`;
};

export const seconds = (value) => {
  if (value < 1) return `${short(Number(value.toPrecision(2)))} s`;
  if (value < 60) return `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${String(Math.round(value % 60)).padStart(2, "0")} s`.replace("60 s", "59 s");
  if (value < 86400) return `${Math.floor(value / 3600)} h ${String(Math.floor((value % 3600) / 60)).padStart(2, "0")} min`;
  return `${short(Number((value / 86400).toPrecision(2)))} days`;
};

export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
export const moment = (at) => {
  const then = new Date(at * 1000);
  const day = then.toDateString() === new Date().toDateString() ? "" : `${then.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} `;
  return `${day}${then.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" })}`;
};
