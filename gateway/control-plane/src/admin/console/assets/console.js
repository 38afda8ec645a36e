// Scripts of the pages: copying secrets and drawing charts. htmx refreshes live parts.
"use strict";
(() => {
  const SIZE = 190;
  const REFRESH_MS = 15_000;
  const TIMEOUT_MS = 20_000;

  // Secrets: a copy button for each, and an address that can be reloaded in place of the form's.

  const once = document.querySelector(".once[data-reload]");
  if (once) history.replaceState(null, "", once.dataset.reload);

  for (const block of document.querySelectorAll(".copyable")) {
    const [title, text] = [block.querySelector("h2"), block.querySelector("pre")];
    const bar = document.createElement("div");
    bar.className = "bar";
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.setAttribute("aria-label", `Copy: ${title.textContent}`);
    // A status for screen readers, because the accessible name of the button does not change.
    const said = document.createElement("span");
    said.className = "unseen";
    said.setAttribute("role", "status");
    button.addEventListener("click", async () => {
      button.textContent = (await copied(text)) ? "Copied" : "Selected: press Ctrl+C";
      said.textContent = `${title.textContent}: ${button.textContent}`;
      setTimeout(() => { button.textContent = "Copy"; said.textContent = ""; }, 2500);
    });
    title.replaceWith(bar);
    bar.append(title, button, said);
  }

  // The clipboard requires https or localhost; otherwise the text is selected.
  async function copied(element) {
    try {
      await navigator.clipboard.writeText(element.textContent);
      return true;
    } catch {
      getSelection().selectAllChildren(element);
      return false;
    }
  }

  // Replay: editing the text selects the edited body, and selecting the recorded body discards the edit.

  const text = document.querySelector("textarea[data-recorded]");
  const [asRecorded, asText] = ["body-recorded", "body-text"].map((id) => document.getElementById(id));
  if (text && asRecorded && asText) {
    text.addEventListener("input", () => { asText.checked = true; });
    // Text areas normalize line breaks to line feeds.
    const recorded = text.dataset.recorded.replace(/\r\n?/g, "\n");
    asRecorded.addEventListener("change", () => { text.value = recorded; });
  }

  // Live parts show when they were last refreshed, if a refresh fails.

  /** Adds a status line before a part of the page. Returns a function that takes whether the part was refreshed. */
  function watch(part) {
    const line = document.createElement("p");
    line.className = "stale";
    line.setAttribute("role", "status");
    part.before(line);
    let last = new Date();
    return (isRefreshed) => {
      if (isRefreshed) last = new Date();
      const text = isRefreshed ? "" : `Not refreshed since ${last.toISOString().slice(11, 19)} UTC`;
      // Unchanged text is not set again, so that screen readers announce it once.
      if (line.textContent !== text) line.textContent = text;
    };
  }

  const live = document.getElementById("live");
  if (live) {
    const tell = watch(live);
    // Keep the part if the response has none, as the sign-in page of a proxy.
    live.addEventListener("htmx:before:swap", (event) => {
      const { ctx, tasks } = event.detail;
      const isThere = ctx.response.raw.ok && tasks.some((task) => task.fragment.querySelector("#live"));
      if (!isThere) event.preventDefault();
      tell(isThere);
    });
    live.addEventListener("htmx:error", () => tell(false));
  }

  // Charts.

  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
  const exact = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });
  const number = (value) => (value == null ? "–" : value >= 10_000 ? compact.format(value) : exact.format(value));
  const size = (value) => {
    if (value == null) return "–";
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (value >= 1024 && unit + 1 < units.length) value /= 1024, unit++;
    return `${value.toFixed(unit && value < 100 ? 1 : 0)} ${units[unit]}`;
  };

  /** Names, columns and colours of each kind of chart. */
  const KINDS = {
    rate: (data) => ({ series: [["Requests", perSecond(data.requests, data), "--one"]], fill: true }),
    latency: (data) => ({
      series: [["p50", data.p50, "--two"], ["p90", data.p90, "--three"], ["p99", data.p99, "--four"]],
    }),
    status: (data) => ({
      series: ["--two", "--six", "--three", "--four"].map((colour, index) =>
        [`${index + 2}xx`, perSecond(data.by_class[index], data), colour]),
    }),
    errors: (data) => ({
      series: data.errors.map(([code, counts], index) =>
        [code, perSecond(counts, data), ["--four", "--three", "--five", "--one", "--two", "--six"][index % 6]]),
    }),
    bytes: (data) => ({
      series: [["In", perSecond(data.bytes_in, data), "--one"], ["Out", perSecond(data.bytes_out, data), "--two"]],
      format: size,
    }),
  };

  // All times of the console are UTC.
  const timeZone = "UTC";
  const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", timeZone });
  const day = (at) => new Date(at * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short", timeZone });

  /** Points without a neighbour, which no line connects. */
  function alone(chart, series) {
    const column = chart.data[series];
    return [...column.keys()].filter((at) => column[at] != null && column[at - 1] == null && column[at + 1] == null);
  }

  function perSecond(counts, data) {
    const last = counts.length - 1;
    return counts.map((count, index) => count / (index === last ? data.last_seconds : data.step_seconds));
  }

  function draw(plot, data) {
    const { series, fill, format = number } = KINDS[plot.dataset.chart](data);
    const styles = getComputedStyle(document.documentElement);
    const colour = (name) => styles.getPropertyValue(name).trim();
    const axis = {
      stroke: colour("--muted"), font: "11px system-ui, sans-serif",
      grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false },
    };
    const isEmpty = !series.some(([, column]) => column.some((value) => value));
    const options = {
      width: plot.clientWidth, height: SIZE,
      tzDate: (at) => uPlot.tzDate(new Date(at * 1000), timeZone),
      padding: [8, 18, 0, 0],
      cursor: { points: { size: 6 }, drag: { x: false, y: false } },
      legend: { live: true, show: !isEmpty },
      scales: { y: { range: (_, low, high) => [0, isEmpty ? 1 : Math.max(high * 1.1, 1e-6)] } },
      axes: [{ ...axis, size: 28, space: 70, values: (_, ticks, __, ___, step) => ticks.map(step < 86_400 ? clock : day) }, { ...axis, size: 54, values: (_, ticks) => ticks.map((tick) => (isEmpty ? "" : format(tick))) }],
      series: [
        { label: "Time, UTC", value: (_, at) => (at == null ? "–" : `${day(at)} ${clock(at)}`) },
        ...series.map(([label, , name]) => ({
          label, stroke: colour(name), width: isEmpty ? 0 : 1.5, points: { show: true, size: 4, filter: alone }, spanGaps: false,
          fill: fill && !isEmpty ? `color-mix(in srgb, ${colour(name)} 12%, transparent)` : undefined,
          value: (_, value) => format(value),
        })),
      ],
    };
    // uPlot needs at least one series to draw the scales.
    const columns = series.length ? series.map(([, column]) => column) : [data.at.map(() => null)];
    if (!series.length) options.series.push({ label: "", show: true });
    // Removes the chart's listeners on the window, which would keep its data alive.
    plot.drawn?.chart.destroy();
    plot.replaceChildren();
    const chart = new uPlot(options, [data.at, ...columns], plot);
    // Outside the plot, which is an image for screen readers.
    plot.parentElement.querySelector(".absent")?.remove();
    if (isEmpty) {
      const absent = document.createElement("p");
      absent.className = "absent";
      absent.textContent = "No data in this time span";
      plot.after(absent);
    }
    plot.drawn = { chart, data };
  }

  async function refresh(section) {
    try {
      const options = { headers: { accept: "application/json" }, signal: AbortSignal.timeout(TIMEOUT_MS) };
      const response = await fetch(section.dataset.series, options);
      if (response.status === 401) return location.reload();
      section.tell(response.ok);
      if (!response.ok) return;
      const data = await response.json();
      for (const plot of section.querySelectorAll("[data-chart]")) {
        // A chart under the pointer keeps its data.
        if (!plot.drawn || !plot.matches(":hover")) draw(plot, data);
      }
    } catch {
      // The gateway is unreachable; the next refresh tries again.
      section.tell(false);
    }
  }

  const sections = document.querySelectorAll("[data-series]");
  for (const section of sections) {
    section.tell = watch(section);
    refresh(section);
  }
  if (sections.length) {
    setInterval(() => { if (!document.hidden) sections.forEach(refresh); }, REFRESH_MS);
    new ResizeObserver((entries) => {
      for (const { target } of entries) {
        for (const plot of target.querySelectorAll("[data-chart]")) {
          plot.drawn?.chart.setSize({ width: plot.clientWidth, height: SIZE });
        }
      }
    }).observe(sections[0]);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const plot of document.querySelectorAll("[data-chart]")) if (plot.drawn) draw(plot, plot.drawn.data);
    });
  }
})();
