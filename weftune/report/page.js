"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const holders = [...document.querySelectorAll("[data-chart]")];
  const config = { displayModeBar: false, responsive: true };
  // On a touch screen a drag scrolls the page; with a mouse it zooms, and a double click zooms back.
  const dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";

  // The figures carry no colours of the page, so that they follow the reader's scheme.
  const themed = (layout) => {
    const css = getComputedStyle(document.documentElement);
    const colour = (name) => css.getPropertyValue(name).trim();
    const axis = { gridcolor: colour("--line"), linecolor: colour("--line"), tickcolor: colour("--line") };
    return {
      ...layout,
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: colour("--soft") },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      xaxis: { ...layout.xaxis, ...axis },
      yaxis: { ...layout.yaxis, ...axis },
      annotations: (layout.annotations || []).map((note) => ({ ...note, bgcolor: colour("--card") })),
      hoverlabel: { ...layout.hoverlabel, bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
      dragmode,
    };
  };

  const draw = () => holders.forEach((holder) => {
    const figure = figures[holder.dataset.chart];
    Plotly.react(holder, figure.data, themed(figure.layout), config);
  });

  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

  document.querySelectorAll("[data-job]").forEach((button) => button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(shown));
    Object.values(figures).forEach((figure) => figure.data
      .filter((trace) => String(trace.meta) === button.dataset.job)
      .forEach((trace) => { trace.visible = shown; }));
    draw();
  }));

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
  document.querySelectorAll(".copy").forEach((button) => button.addEventListener("click", async () => {
    const source = button.parentElement.querySelector("pre");
    const copied = await copy(source.textContent);
    // Where the browser refuses the clipboard, the text is selected for the reader's own Ctrl-C.
    if (!copied) getSelection().selectAllChildren(source);
    button.textContent = copied ? "Copied" : "Selected";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }));
})();
