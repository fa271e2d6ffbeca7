"use strict";
(() => {
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
  const make = (tag, className, text = "") => {
    const element = document.createElement(tag);
    element.className = className;
    element.textContent = text;
    return element;
  };

  // -- what follows the pointer -------------------------------------------------------------------------
  const tip = make("div", "tip");
  tip.hidden = true;
  document.body.append(tip);
  const showTip = (lines, x, y) => {
    tip.replaceChildren(...lines.filter(Boolean).map((line, at) => make("div", at ? "" : "title", line)));
    tip.hidden = false;
    const left = Math.min(x + 14, innerWidth - tip.offsetWidth - 8);
    const above = y - tip.offsetHeight - 12;
    tip.style.left = `${Math.max(8, left) + scrollX}px`;
    tip.style.top = `${(above < 8 ? y + 16 : above) + scrollY}px`;
  };
  const hideTip = () => { tip.hidden = true; };

  // -- curves -------------------------------------------------------------------------------------------
  const numberOf = (axis, share) => {
    const [low, high, kind] = axis.split(" ");
    if (kind === "log") return low * (high / low) ** share;
    return Number(low) + share * (high - low);
  };
  const short = (value) => value.toLocaleString("en", { maximumSignificantDigits: Math.abs(value) < 1000 ? 5 : 6 });
  const pointsOf = (path) => [...path.getAttribute("d").matchAll(/[ML]([\d.-]+) ([\d.-]+)/g)]
    .map((found) => [Number(found[1]) / 1000, Number(found[2]) / 1000]);

  all(".plot").forEach((plot) => {
    const field = plot.querySelector(".field");
    let curves = null;
    field.addEventListener("pointermove", (event) => {
      curves ??= all("path[data-name]:not([data-silent])", field)
        .map((path) => ({ path, points: pointsOf(path), tips: path.dataset.tips?.split("\n") }));
      const box = field.querySelector("svg").getBoundingClientRect();
      let best = null;
      let nearest = 40;
      for (const curve of curves) {
        if (curve.path.hasAttribute("hidden")) continue;
        curve.points.forEach(([x, y], at) => {
          const distance = Math.hypot(x * box.width + box.left - event.clientX, y * box.height + box.top - event.clientY);
          if (distance < nearest) [nearest, best] = [distance, { curve, x, y, at }];
        });
      }
      curves.forEach(({ path }) => path.classList.toggle("near", path === best?.curve.path));
      if (!best) return hideTip();
      const { curve, x, y, at } = best;
      const { dataset } = plot;
      const plain = () => `${dataset.xLabel} ${short(numberOf(dataset.x, x))}: ${short(numberOf(dataset.y, 1 - y))}${dataset.unit}`;
      const isParallel = plot.classList.contains("parallel");
      const lines = isParallel ? curve.tips : [curve.tips ? curve.tips[at] : plain()];
      showTip([curve.path.dataset.name, ...lines], event.clientX, event.clientY);
    });
    field.addEventListener("pointerleave", () => {
      curves?.forEach(({ path }) => path.classList.remove("near"));
      hideTip();
    });
  });

  all("[data-job]").forEach((button) => button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(shown));
    all(`#curves path[data-group="${button.dataset.job}"]`).forEach((path) => path.toggleAttribute("hidden", !shown));
  }));

  // -- tables -------------------------------------------------------------------------------------------
  const sortKey = (row, at) => {
    const cell = row.cells[at];
    const text = (cell.dataset.value ?? cell.innerText).trim();
    const number = Number(text.replace(/[, %s]|steps?|MiB/g, "").replace("−", "-").replace(/GiB/, "e3"));
    return { empty: text === "" || text === "–", text, number };
  };
  all("button.sort").forEach((button) => button.addEventListener("click", () => {
    const head = button.closest("th");
    const body = head.closest("table").tBodies[0];
    const down = head.getAttribute("aria-sort") === "ascending";
    all("th", head.parentElement).forEach((other) => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...body.rows].map((row) => ({ row, ...sortKey(row, head.cellIndex) }));
    const byNumber = rows.every((one) => one.empty || !Number.isNaN(one.number));
    rows.sort((a, b) => {
      // A row without a value comes last either way.
      if (a.empty || b.empty) return a.empty - b.empty;
      const order = byNumber ? a.number - b.number : a.text.localeCompare(b.text, "en", { numeric: true });
      return down ? -order : order;
    });
    body.append(...rows.map((one) => one.row));
  }));

  // -- timelines ----------------------------------------------------------------------------------------
  const UNITS = 1e6;
  const NARROW = 12;
  // Pixels of a column in which actions that are narrower are drawn together.
  const COLUMN = 8;
  const roundTicks = (low, high, count) => {
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
    const found = [];
    for (let at = Math.ceil(low / step); at * step <= high; at += 1) found.push(Number((at * step).toPrecision(9)));
    return found;
  };

  const drawTimeline = (holder, data) => {
    const bars = data.lanes.map(({ bars: flat }) => Array.from({ length: flat.length / 5 }, (_, at) => ({
      start: flat[5 * at], stop: flat[5 * at] + flat[5 * at + 1], kind: flat[5 * at + 2], text: flat[5 * at + 3], microbatch: flat[5 * at + 4],
    })));
    let [from, to] = [0, UNITS];
    let selected = null;
    const canvas = make("canvas", "");
    const buttons = make("div", "zoom");
    const keys = make("ul", "keys");
    const swatch = ([name, colour]) => {
      const entry = make("li", "", name);
      const square = make("span", "swatch");
      square.style.background = colour;
      entry.prepend(square);
      return entry;
    };
    keys.append(...data.kinds.map(swatch));
    const owners = make("ul", "keys owners");
    owners.append(...data.jobs.slice(0, 40).map(swatch));
    if (data.jobs.length > 40) owners.append(make("li", "", `and ${data.jobs.length - 40} more jobs`));

    const place = () => {
      const width = holder.clientWidth;
      const narrow = width < 600;
      const left = narrow ? 0 : 84;
      let y = 4;
      const lanes = data.lanes.map((lane) => {
        const top = y + (narrow && lane.main ? 17 : 0);
        const height = lane.main ? 30 : 11;
        y = top + height + (lane.main ? 4 : 3);
        return { ...lane, top, height };
      });
      return { width, narrow, left, lanes, bottom: y + 4, height: y + 40 };
    };
    const draw = () => {
      const layout = place();
      const { width, narrow, left, lanes, bottom, height } = layout;
      if (!width) return;
      const css = getComputedStyle(document.documentElement);
      const [line, soft, ink, card, accent] = ["--line", "--soft", "--ink", "--card", "--accent"].map((name) => css.getPropertyValue(name).trim());
      const ratio = devicePixelRatio || 1;
      canvas.width = width * ratio;
      canvas.height = height * ratio;
      canvas.style.height = `${height}px`;
      const pen = canvas.getContext("2d");
      pen.scale(ratio, ratio);
      const family = getComputedStyle(document.body).fontFamily;
      const across = (unit) => left + ((unit - from) / (to - from)) * (width - left);
      pen.font = `12px ${family}`;
      pen.textBaseline = "middle";
      // Ticks, in seconds from the start of the window.
      const second = UNITS / data.seconds;
      pen.textAlign = "center";
      roundTicks(from / second, to / second, narrow ? 3 : 7).forEach((tick) => {
        const x = across(tick * second);
        pen.fillStyle = line;
        pen.fillRect(x, 0, 1, bottom);
        pen.fillStyle = soft;
        pen.fillText(String(tick), Math.min(Math.max(x, left + 12), width - 14), bottom + 10);
      });
      pen.textAlign = "right";
      pen.fillText("seconds", width, bottom + 27);
      lanes.forEach((lane, at) => {
        pen.fillStyle = lane.main ? ink : soft;
        pen.textAlign = narrow ? "left" : "right";
        pen.font = `${lane.main ? 12 : 10}px ${family}`;
        // Of a narrow lane below a device only its stream is named.
        const name = lane.main ? lane.name.replace(/ compute$/, "") : lane.name.split(" ").at(-1);
        if (!narrow) pen.fillText(name, left - 10, lane.top + lane.height / 2);
        else if (lane.main) pen.fillText(name, 0, lane.top - 8);
        pen.font = `12px ${family}`;
        drawLane(pen, lane, bars[at], across, left, card);
      });
      if (selected) {
        pen.globalAlpha = 0.15;
        pen.fillStyle = accent;
        pen.fillRect(Math.min(...selected), 0, Math.abs(selected[1] - selected[0]), bottom);
        pen.globalAlpha = 1;
      }
    };
    // Whether the middle one of these bars is too narrow to be seen.
    const isCrowded = (seen, across) => {
      const widths = seen.map((bar) => across(bar.stop) - across(bar.start)).sort((a, b) => a - b);
      return widths.length > 40 && widths[Math.floor(widths.length / 2)] < NARROW;
    };
    const drawLane = (pen, lane, own, across, left, card) => {
      const bins = new Map();
      const seen = own.filter((bar) => bar.stop >= from && bar.start <= to);
      const together = isCrowded(seen, across);
      for (const bar of seen) {
        const [begin, end] = [Math.max(across(bar.start), left), across(Math.min(bar.stop, to))];
        if (!together) drawBar(pen, lane, bar, begin, end, card);
        else {
          for (let key = Math.floor((begin - left) / COLUMN); left + key * COLUMN < end; key += 1) {
            const edge = left + key * COLUMN;
            const part = (Math.min(end, edge + COLUMN) - Math.max(begin, edge)) / COLUMN;
            if (!bins.has(key)) bins.set(key, new Map());
            const shares = bins.get(key);
            shares.set(bar.kind, (shares.get(bar.kind) ?? 0) + part);
          }
        }
      }
      for (const [key, shares] of bins) {
        const whole = Math.max(1, [...shares.values()].reduce((sum, one) => sum + one, 0));
        let bottom = lane.top + lane.height;
        for (const [kind, share] of [...shares].sort(([a], [b]) => a - b)) {
          const tall = Math.max(0.5, (lane.height * share) / whole);
          pen.fillStyle = data.colours[kind];
          pen.fillRect(left + key * COLUMN, bottom - tall, COLUMN, tall);
          bottom -= tall;
        }
      }
    };
    const drawBar = (pen, lane, bar, begin, end, card) => {
      const wide = end - begin;
      pen.fillStyle = data.colours[bar.kind];
      pen.fillRect(begin, lane.top, Math.max(1, wide - (wide > 4 ? 1 : 0)), lane.height);
      const segments = lane.main ? data.microbatches[bar.microbatch] : undefined;
      if (segments) {
        const whole = segments.reduce((sum, one, at) => sum + (at % 2 ? one : 0), 0);
        let x = begin;
        for (let at = 0; at < segments.length; at += 2) {
          const part = ((wide - 1) * segments[at + 1]) / whole;
          pen.fillStyle = data.jobs[segments[at]][1];
          pen.fillRect(x, lane.top + lane.height - 8, part, 8);
          x += part;
        }
      }
      if (lane.main && bar.microbatch >= 0 && wide > 26) {
        pen.fillStyle = "#ffffff";
        pen.textAlign = "center";
        pen.fillText(String(bar.microbatch), begin + wide / 2, lane.top + (segments ? 11 : lane.height / 2));
      }
    };

    const zoomTo = (low, high) => {
      const width = Math.min(UNITS, Math.max(20, high - low));
      from = Math.min(Math.max(0, low), UNITS - width);
      to = from + width;
      draw();
    };
    const scale = (factor, middle = (from + to) / 2) => zoomTo(middle - (middle - from) * factor, middle + (to - middle) * factor);
    const shift = (share) => zoomTo(from + share * (to - from), to + share * (to - from));
    for (const [name, title, act] of [
      ["−", "Zoom out", () => scale(2)], ["+", "Zoom in", () => scale(0.5)],
      ["←", "Earlier", () => shift(-0.5)], ["→", "Later", () => shift(0.5)], ["All", "Show all", () => zoomTo(0, UNITS)],
    ]) {
      const button = make("button", "", name);
      button.type = "button";
      button.title = title;
      button.setAttribute("aria-label", title);
      button.addEventListener("click", act);
      buttons.append(button);
    }
    const head = make("div", "head");
    head.append(keys, buttons);
    holder.append(head, canvas, make("p", "words hint", "Drag over a part to zoom in, double-click to see all."));
    if (data.jobs.length) holder.append(make("p", "words", "Below the colour of a bar, its jobs:"), owners);

    const unitAt = (event) => {
      const { left, width } = place();
      return from + ((event.offsetX - left) / (width - left)) * (to - from);
    };
    let touched = null;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse") {
        selected = [event.offsetX, event.offsetX];
        canvas.setPointerCapture(event.pointerId);
      } else touched = event.offsetX;
    });
    canvas.addEventListener("pointermove", (event) => {
      const { left, width, lanes } = place();
      if (selected) {
        selected[1] = event.offsetX;
        hideTip();
        return draw();
      }
      if (touched !== null) {
        shift((touched - event.offsetX) / (width - left));
        touched = event.offsetX;
        return;
      }
      const lane = lanes.findIndex((one) => event.offsetY >= one.top - 1 && event.offsetY <= one.top + one.height + 1);
      if (lane < 0 || event.offsetX < left) return hideTip();
      const [unit, pixel] = [unitAt(event), (to - from) / (width - left)];
      const near = bars[lane].filter((bar) => bar.start <= unit + 2 * pixel && bar.stop >= unit - 2 * pixel);
      const over = near.find((bar) => bar.start <= unit && bar.stop >= unit && (bar.stop - bar.start) / pixel >= 3);
      if (!near.length) return hideTip();
      const second = UNITS / data.seconds;
      if (!over) {
        const counts = new Map();
        near.forEach((bar) => counts.set(data.names[bar.kind], (counts.get(data.names[bar.kind]) ?? 0) + 1));
        return showTip([`${near.length} actions`, [...counts].map(([kind, count]) => `${count} ${kind}`).join(", ")], event.clientX, event.clientY);
      }
      const segments = data.microbatches[over.microbatch] ?? [];
      const held = [];
      for (let at = 0; at < Math.min(segments.length, 12); at += 2) held.push(`${data.jobs[segments[at]][0]}: ${segments[at + 1].toLocaleString("en")} tokens`);
      if (segments.length > 12) held.push(`and ${segments.length / 2 - 6} more`);
      showTip([`${data.names[over.kind]}, ${((over.stop - over.start) / second).toPrecision(3)} s`, data.texts[over.text], ...held], event.clientX, event.clientY);
    });
    canvas.addEventListener("pointerup", (event) => {
      const chosen = selected;
      selected = null;
      touched = null;
      if (!chosen) return;
      const { left, width } = place();
      const unit = (x) => from + ((x - left) / (width - left)) * (to - from);
      if (Math.abs(chosen[1] - chosen[0]) > 6) zoomTo(unit(Math.min(...chosen)), unit(Math.max(...chosen)));
      else draw();
    });
    canvas.addEventListener("pointercancel", () => { selected = null; touched = null; draw(); });
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("dblclick", () => zoomTo(0, UNITS));
    canvas.addEventListener("wheel", (event) => {
      // A plain wheel scrolls the page.
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      scale(event.deltaY > 0 ? 1.25 : 0.8, unitAt(event));
    }, { passive: false });
    new ResizeObserver(draw).observe(holder);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    draw();
  };
  const timelines = JSON.parse(document.getElementById("timelines").textContent);
  all("[data-timeline]").forEach((holder) => drawTimeline(holder, timelines[holder.dataset.timeline]));

  // -- links and copies ---------------------------------------------------------------------------------
  // A link in the table opens the job that it points to.
  const unfold = () => {
    const target = document.getElementById(location.hash.slice(1));
    if (target instanceof HTMLDetailsElement) target.open = true;
  };
  addEventListener("hashchange", unfold);
  unfold();

  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      return false;
    }
  };
  all(".copy").forEach((button) => button.addEventListener("click", async () => {
    const source = button.parentElement.querySelector("pre");
    const copied = await copy(source.textContent);
    // Where the browser refuses the clipboard, the text is selected for the reader's own Ctrl-C.
    if (!copied) getSelection().selectAllChildren(source);
    button.textContent = copied ? "Copied" : "Selected";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }));
})();
