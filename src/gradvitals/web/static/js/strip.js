// One vital sign: its name and value now, and its chart. Holds the numbers of each run, all of them and those of the stretch.
import * as api from "./api.js";
import { Chart } from "./chart.js";
import { choice, el, fill } from "./dom.js";
import { duration, number, step } from "./format.js";
import { lineColour } from "./palette.js";

const MOST_POINTS = 9000; // beyond this, numbers that came one by one are fetched again in buckets

export const NAMES = {
  loss: "Loss", "grad/norm": "Gradient norm", gsnr: "GSNR", noise_scale: "Noise scale",
  "update/ratio": "Update ratio", "weight/norm": "Weight norm", lr: "Learning rate",
};
// How to have what a run does not measure.
const ENABLE = {
  loss: "call monitor.observe(loss) after backward.",
  "grad/norm": "this run has no gradient readings.",
  gsnr: "use gradient accumulation (two or more backward passes per step), several ranks, or an Adam-like optimizer.",
  noise_scale: "use gradient accumulation or several ranks, and gv.watch(..., batch_size=...).",
  lr: "the optimizer has no learning rate.",
};
const UNITS = { noise_scale: "samples" };
const LOG = new Set(["grad/norm", "gsnr", "noise_scale", "update/ratio"]);
const BROKEN = new Set(["loss", "grad/norm"]); // where NaN is news; elsewhere it only means that nothing can be told
const ESTIMATED = new Set(["gsnr", "noise_scale"]);

export class Strip {
  // where: {kind, rows}, with the row of each run.
  constructor({ metric, axis, texts, showX, where = {}, sync = "run", oncursor, height }) {
    this.metric = metric;
    this.axis = axis;
    this.where = where;
    this.runs = [];
    this.all = new Map();
    this.stretch = new Map();
    this.turns = new Map(); // run -> the last of its requests
    this.coming = new Map(); // run -> an extension that has not begun
    this.sources = new Map(); // run -> {metrics, source}
    this.starts = new Map();
    this.log = LOG.has(metric);
    this.value = el("div", { class: "value" });
    this.more = el("div", { class: "more" });
    this.plotHost = el("div", { class: "plot" });
    this.state = el("div", { class: "plot-state", text: "Loading" });
    const scale = this.scale = choice(`Scale of ${NAMES[metric] || metric}`, [["linear", "lin", "Linear scale"], ["log", "log", "Logarithmic scale"]], this.log ? "log" : "linear", (chosen) => {
      this.isChosen = true;
      this.log = chosen === "log";
      this.chart.setLog(this.log);
    });
    this.missing = el("p", { class: "strip-missing dim", hidden: true, text: `${NAMES[metric] || metric} is not measured: ${ENABLE[metric] || "this run does not record it."}` });
    this.element = el("section", { class: "strip", "aria-label": NAMES[metric] || metric },
      el("div", { class: "strip-head" },
        el("div", { class: "strip-name" }, el("h3", { text: NAMES[metric] || metric, title: texts?.[metric] || "" }), scale), this.value, this.more),
      el("div", { class: "plot-box" }, this.plotHost, this.state), this.missing);
    this.plotHost.setAttribute("role", "img");
    this.chart = new Chart(this.plotHost, { axis, showX, log: this.log, height: height || (showX ? 138 : 112), sync, oncursor });
  }

  setRuns(runs, described) {
    this.runs = runs;
    this.sources = described;
    for (const known of [...this.all.keys()]) if (!runs.includes(known)) { this.all.delete(known); this.stretch.delete(known); }
  }

  has(run) { return this.sources.has(run); }

  ask(run, more) {
    const { metrics, source } = this.sources.get(run);
    return api.series(run, { metric: metrics, source, kind: this.where.kind, row: this.where.rows?.get(run), ...more });
  }

  // Requests for one run wait for each other, so that an answer that was long on its way never replaces a newer one.
  inTurn(run, work) {
    const turn = (this.turns.get(run) ?? Promise.resolve()).then(work, work);
    this.turns.set(run, turn);
    return turn;
  }

  load(run) { return this.inTurn(run, () => this.fetchAll(run)); }

  // Fetch what came after the last step that is there. Whoever asks before it has begun is served by the same request,
  // and all wait until it is drawn.
  extend(run) {
    if (!this.coming.has(run)) this.coming.set(run, this.inTurn(run, () => { this.coming.delete(run); return this.fetchMore(run); }));
    return this.coming.get(run);
  }

  async fetchAll(run) {
    if (!this.has(run)) return;
    const got = await this.ask(run, { buckets: 2000 });
    if (!this.runs.includes(run)) return;
    this.all.set(run, got);
    this.show();
  }

  async fetchMore(run) {
    const have = this.all.get(run);
    if (!have) return this.fetchAll(run);
    if (!this.has(run)) return;
    const got = await this.ask(run, { since: Number.isFinite(have.last) ? have.last : undefined });
    if (!got.steps.length || this.all.get(run) !== have) return;
    if (have.steps.length + got.steps.length > MOST_POINTS) await this.fetchAll(run);
    else { this.all.set(run, joined(have, got)); this.show(); }
  }

  // Fetch the stretch that is looked at, in finer buckets; keep what is there until it comes.
  async refine() {
    const range = this.axis.range;
    if (!range) { this.stretch.clear(); this.show(); return; }
    await Promise.all(this.runs.filter((run) => this.has(run)).map(async (run) => {
      const all = this.all.get(run);
      if (all && all.readings <= all.steps.length) return; // nothing was left out
      const [low, high] = range.map((x) => this.axis.step(run, x));
      const room = 0.02 * (high - low);
      const got = await this.ask(run, { since: Math.floor(low - room) - 1, until: Math.ceil(high + room), buckets: 2000 });
      if (this.axis.range === range) this.stretch.set(run, got);
    }));
    if (this.axis.range !== range) return;
    this.show();
    requestAnimationFrame(() => performance.mark("finer"));
  }

  xOf(run, data) {
    if (this.axis.mode === "step") return data.steps;
    const start = this.starts.get(run) ?? data.times[0];
    return data.times.map((time) => time - start);
  }

  show() {
    const lines = [];
    for (const [i, run] of this.runs.entries()) {
      const data = this.stretch.get(run) || this.all.get(run);
      if (!data || !data.steps.length) continue;
      const [value, low, high] = data.lines;
      const x = this.xOf(run, data);
      const line = { run, x, mean: value.mean, colour: lineColour(i), dash: i, now: nowOf(this.all.get(run) || data) };
      if (i === 0 && low && high) Object.assign(line, { low: low.mean, high: high.mean, band: true });
      else if (data.readings > data.steps.length && !low) Object.assign(line, { low: value.low, high: value.high });
      if (BROKEN.has(this.metric)) line.broken = x.filter((_, at) => value.bad[at] > 0);
      lines.push(line);
    }
    if (this.metric === "loss" && !this.isChosen) this.suit(lines);
    const isUntold = lines.length > 0 && ESTIMATED.has(this.metric) && !lines.some((line) => line.mean.some(Number.isFinite));
    this.state.hidden = lines.length > 0 && !isUntold;
    if (isUntold) this.state.textContent = "Not identifiable at any step so far";
    else if (!lines.length) {
      const missing = this.runs.length && this.runs.every((run) => !this.has(run) || this.all.has(run));
      this.state.textContent = missing ? "No readings yet" : "Loading";
    }
    this.collapse();
    this.chart.setLines(lines);
    this.showValue(null);
    this.describe(lines.find((line) => line.run === this.runs[0]));
  }

  // A chart that no run has anything for takes one line, which says how to have it.
  collapse() {
    const none = this.runs.length > 0 && !this.runs.some((run) => this.has(run));
    this.missing.hidden = !none;
    if (none) this.state.hidden = true;
    this.element.classList.toggle("missing", none);
  }

  // A value in words where it is no number: what is estimated may not be told from the readings.
  worded(value) {
    if (!Number.isNaN(value)) return number(value);
    return ESTIMATED.has(this.metric) ? "not identifiable" : BROKEN.has(this.metric) ? "NaN" : "–";
  }

  // A loss that jumped is drawn on a log axis, where the rest of it can still be seen.
  suit(lines) {
    const values = lines.flatMap((line) => Array.from(line.high || line.mean)).filter(Number.isFinite).sort((a, b) => a - b);
    const log = values.length > 0 && values[0] > 0 && values.at(-1) > 4 * values[Math.floor(0.75 * values.length)];
    if (log === this.log) return;
    this.log = log;
    for (const button of this.scale.children) button.setAttribute("aria-pressed", String((button.dataset.value === "log") === log));
    this.chart.options.log = log;
  }

  // The value at a place on the axis, or the last one.
  showValue(x) {
    const lines = this.chart.lines;
    if (!lines.length) { fill(this.value, "–"); fill(this.more); return; }
    const at = x === null ? lines.map((line) => line.now) : this.chart.valuesAt(x);
    const own = lines.findIndex((line) => line.run === this.runs[0]); // it may have no such reading, and the others have
    const first = at[own];
    fill(this.value, first ? this.worded(first.mean) : "–");
    this.value.classList.toggle("words", this.value.textContent.length > 9);
    const parts = [];
    if (first && lines[own].band && Number.isFinite(first.low)) parts.push(el("span", { text: `${number(first.low)} to ${number(first.high)}`, title: "95% interval" }));
    if (UNITS[this.metric] && lines.length === 1) parts.push(el("span", { text: UNITS[this.metric] }));
    for (const [i, found] of at.entries()) {
      if (i !== own && found) parts.push(el("span", { class: "other", "--c": lines[i].colour, text: this.worded(found.mean) }));
    }
    const source = this.sources.get(this.runs[0])?.source;
    if (x !== null && first) parts.unshift(el("span", { class: "at", text: this.axis.mode === "step" ? `step ${step(first.x)}` : duration(first.x) }));
    else if (this.metric === "gsnr" && own >= 0) parts.push(...noSignal(lines[own].mean));
    if (source && !(x !== null && first)) parts.push(el("span", { class: "source", text: `from ${source}`, title: "Source of the samples" }));
    fill(this.more, parts);
  }

  describe(line) {
    if (!line) { this.plotHost.setAttribute("aria-label", `${NAMES[this.metric] || this.metric}: no values yet`); return; }
    let low = Infinity;
    let high = -Infinity;
    for (const value of line.mean) if (Number.isFinite(value)) { low = Math.min(low, value); high = Math.max(high, value); }
    if (low > high) { this.plotHost.setAttribute("aria-label", `${NAMES[this.metric] || this.metric}: ${this.worded(line.now.mean)} at any step`); return; }
    this.plotHost.setAttribute("aria-label", `${NAMES[this.metric] || this.metric} over ${this.axis.mode === "step" ? "steps" : "time"}: now ${this.worded(line.now.mean)}, between ${number(low)} and ${number(high)}${low <= 0 && this.metric === "gsnr" ? `, ${belowZero(line.mean)}` : ""}`);
  }

  destroy() { this.chart.destroy(); }
}

// The last reading, which is neither the mean of the last bucket nor the last one that could be told.
function nowOf(data) {
  const [mean, low, high] = data.now;
  return { mean, low, high };
}

// How often no signal could be told from noise, where that was so.
function noSignal(values) {
  const text = belowZero(values);
  return text ? [el("span", { class: "below-zero", text, title: "A GSNR of 0 or less: signal and noise cannot be distinguished" })] : [];
}

function belowZero(values) {
  let below = 0;
  let known = 0;
  for (const value of values) if (Number.isFinite(value)) { known += 1; below += value <= 0; }
  return below ? `0 or less: ${step(below)} of ${step(known)}` : "";
}

function joined(before, after) {
  const both = (kind, a, b) => {
    const made = new kind(a.length + b.length);
    made.set(a);
    made.set(b, a.length);
    return made;
  };
  return {
    readings: before.readings + after.readings,
    last: after.last,
    now: after.now,
    steps: both(Float64Array, before.steps, after.steps),
    times: both(Float64Array, before.times, after.times),
    lines: before.lines.map((line, i) => ({
      low: both(Float32Array, line.low, after.lines[i].low),
      high: both(Float32Array, line.high, after.lines[i].high),
      mean: both(Float32Array, line.mean, after.lines[i].mean),
      bad: both(Float32Array, line.bad, after.lines[i].bad),
    })),
  };
}
