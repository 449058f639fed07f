// The engine panel: polls /engine every 500 ms, only while the panel is open and the tab is visible.

import { el } from "./dom.js";
import { engine } from "./client.js";
import { t, translate } from "./words.js";

const EVERY_MS = 500;
const HISTORY = 120; // a minute of samples
const SHORTEST = 20; // minimum samples over the whole width: at the scale of a minute, the first ones would be a dot
const MAP_HEIGHT = 220; // px; if more blocks than fit, several share a square

const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const milliseconds = (value) => `${number(value, value < 10 ? 1 : 0)} ms`;

// Rows of the table: label, field of /engine, format. A field that the server does not send has no row.
const ROWS = [
  ["batch", "batch_size", number],
  ["running", "running", number],
  ["waiting", "waiting", number],
  ["ttft", "ttft_ms_p50", milliseconds],
  ["tick", "tick_ms", milliseconds],
  ["prefix_hits", "prefix_hit_percent", (n) => `${number(n, 1)} %`],
  ["draft_accept", "draft_accept_percent", (n) => `${number(n, 1)} %`],
  ["tokens_per_draft", "tokens_per_draft", (n) => number(n, 1)],
  ["preemptions", "preemptions", number],
];

export class EnginePanel {
  constructor(root, key) {
    this.root = root;
    this.key = key; // a function: the key may change
    this.rates = [];
    this.timer = null;
    this.open = false;
    document.addEventListener("visibilitychange", () => this.schedule(0));
    new ResizeObserver(() => this.draw()).observe(root.querySelector("#block-map"));
  }

  show(open) {
    this.open = open;
    this.schedule(0);
  }

  schedule(delay) {
    clearTimeout(this.timer);
    if (this.open && document.visibilityState === "visible") this.timer = setTimeout(() => this.poll(), delay);
  }

  async poll() {
    const note = this.root.querySelector("#engine-note");
    try {
      this.stats = await engine(this.key(), AbortSignal.timeout(5000));
      this.rates = [...this.rates, this.stats.tokens_per_s].slice(-HISTORY);
      note.hidden = true;
      this.draw();
    } catch (error) {
      note.textContent = t("engine_gone", { why: error.message });
      note.hidden = false;
    }
    this.schedule(EVERY_MS);
  }

  draw() {
    if (!this.stats || !this.open) return;
    const { stats, root } = this;
    root.querySelector("#rate").textContent = number(stats.tokens_per_s, stats.tokens_per_s < 100 ? 1 : 0);
    const rows = ROWS.filter(([, field]) => typeof stats[field] === "number");
    const cells = rows.map(([word, field, write]) => [el("dt", { "data-t": word }), el("dd", {}, write(stats[field]))]);
    root.querySelector("#engine-rows").replaceChildren(...cells.flat());
    translate(root);
    spark(root.querySelector("#spark"), this.rates);
    if (stats.blocks) this.drawBlocks(stats.blocks);
  }

  drawBlocks({ total, used, cached, map }) {
    const canvas = this.root.querySelector("#block-map");
    const free = total - used - cached;
    const perCell = blockMap(canvas, map);
    canvas.setAttribute("aria-label", t("blocks_label", { used, cached, free, total }));
    for (const [name, value] of Object.entries({ used, cached, free })) {
      this.root.querySelector(`#blocks-${name}`).textContent = number(value);
    }
    this.root.querySelector("#blocks-total").textContent = number(total);
    this.root.querySelector("#cell-note").textContent = perCell > 1 ? t("cell", { n: perCell }) : "";
  }
}

/** Sets a canvas to the CSS size width × height at the screen's resolution; its 2d context, and the colours by name. */
function prepare(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(canvas); // the colours of the map are those of the legend's elements
  const colours = { u: style.getPropertyValue("accent-color"), ".": style.getPropertyValue("border-top-color") };
  return { context, colours };
}

function spark(canvas, rates) {
  const [width, height] = [canvas.clientWidth, 44];
  const { context, colours } = prepare(canvas, width, height);
  const [top, span] = [Math.max(...rates, 1), Math.max(rates.length, SHORTEST)];
  const x = (at) => width - 4 - ((rates.length - 1 - at) * (width - 4)) / (span - 1);
  const y = (rate) => height - 2 - (rate / top) * (height - 6);
  context.strokeStyle = colours["."];
  context.strokeRect(0, height - 0.5, width, 0);
  context.strokeStyle = colours.u;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.beginPath();
  rates.forEach((rate, at) => (at ? context.lineTo(x(at), y(rate)) : context.moveTo(x(at), y(rate))));
  context.stroke();
  context.lineTo(x(rates.length - 1), height);
  context.lineTo(x(0), height);
  context.fillStyle = colours.u;
  context.globalAlpha = 0.1;
  context.fill();
  context.globalAlpha = 1;
  context.beginPath();
  context.arc(x(rates.length - 1), y(rates.at(-1)), 2.5, 0, 2 * Math.PI); // now
  context.fill();
}

/** Draws one square per block, or per several if they do not fit; returns how many. A shared square has the mean
 * opacity of its blocks. */
export function blockMap(canvas, map) {
  const width = canvas.clientWidth;
  if (!width) return 1;
  let cell = 12;
  const rows = (size, perCell) => Math.ceil(Math.ceil(map.length / perCell) / Math.floor(width / size));
  while (cell > 4 && rows(cell, 1) * cell > MAP_HEIGHT) cell -= 1;
  let perCell = 1;
  while (rows(cell, perCell) * cell > MAP_HEIGHT) perCell += 1;
  const columns = Math.floor(width / cell);
  const { context, colours } = prepare(canvas, width, Math.max(1, rows(cell, perCell)) * cell);
  const gap = cell > 6 ? 2 : 1;
  const step = (width + gap) / columns; // aligns the last column with the panel's text
  for (let at = 0; at * perCell < map.length; at += 1) {
    const here = map.slice(at * perCell, (at + 1) * perCell);
    const [left, top] = [Math.round((at % columns) * step), Math.floor(at / columns) * cell];
    const share = (state) => here.split(state).length - 1;
    context.globalAlpha = 1;
    context.fillStyle = colours["."];
    context.fillRect(left, top, cell - gap, cell - gap);
    context.globalAlpha = (share("u") + 0.4 * share("c")) / here.length;
    context.fillStyle = colours.u;
    context.fillRect(left, top, cell - gap, cell - gap);
  }
  return perCell;
}
