// Layer × step: every layer in depth order, one colour a stretch of steps. A layer opens into its tensors and heads.
import * as api from "./api.js";
import { choice, el, fill, say } from "./dom.js";
import { number, step } from "./format.js";
import { ROW, paintAxis, paintCells, paintCursor, paintNames } from "./heat_paint.js";
import { RatioScale, SizeScale } from "./heat_scale.js";
import { columnAt, ratios, span } from "./heat_table.js";

const MOST_HEIGHT = 420;
const COLUMNS = 600;
const PICTURES = { norm: ["norm", "Gradient norm: the largest in each bin"], gsnr: ["GSNR", "GSNR: the mean of each bin"], update: ["update", "Update over weight: the largest in each bin"], dead: ["dead units", "Share of units that are off for every sample: the largest in each bin"], zero: ["zeros", "Share of gradient elements that are exactly zero: the largest in each bin"] };

export class Heatmap {
  constructor({ axis, onopen }) {
    this.axis = axis;
    this.onopen = onopen;
    this.picture = "norm";
    this.expanded = new Set();
    this.isPointed = false; // whether the mouse chose last, and not the keys
    this.tables = new Map(); // rows -> picture
    this.cell = null;
    this.runs = [];
    this.run = null; // the run whose layers and steps are shown, and the other one where their ratio is
    this.other = null;
    this.which = el("select", { "aria-label": "Run in the heatmap", title: "Which run the heatmap shows, or where two differ (d)", hidden: true, onchange: () => this.choose(this.which.value) });
    this.canvas = el("canvas", { tabindex: "0", role: "application", "aria-roledescription": "heatmap", "aria-label": "Layers by steps" });
    this.spacer = el("div", { class: "heat-spacer" });
    this.scroller = el("div", { class: "heat-scroll" }, this.spacer, this.canvas);
    this.tip = el("div", { class: "heat-tip", hidden: true });
    this.state = el("div", { class: "plot-state", text: "Loading" });
    this.legend = el("div", { class: "heat-legend" });
    this.buttons = el("div", { class: "heat-buttons" });
    this.element = el("section", { class: "heat card", "aria-label": "Layers by steps" },
      el("div", { class: "card-head" }, el("h2", { text: "Layers" }), this.which, this.buttons, el("span", { class: "gap" }), this.legend),
      el("div", { class: "heat-box" }, this.scroller, this.tip, this.state));
    this.canvas.addEventListener("mousemove", (event) => this.hover(event));
    this.canvas.addEventListener("mouseleave", () => this.leave());
    this.canvas.addEventListener("click", (event) => this.click(event));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("mousedown", (event) => { this.pressed = this.at(event); });
    this.scroller.addEventListener("scroll", () => this.draw());
    this.visible = false;
    new ResizeObserver(() => this.draw()).observe(this.scroller);
    new IntersectionObserver(([entry]) => { this.visible = entry.isIntersecting; if (this.visible) this.wake(); }, { rootMargin: "200px" }).observe(this.element);
  }

  // runs: [{id, name, pictures}], the one that is looked at first; layoutOf: what the rows of a run stand for.
  async set(runs, layoutOf) {
    const first = this.runs[0]?.id;
    this.runs = runs;
    this.layoutOf = layoutOf;
    const options = this.options();
    const kept = runs[0].id === first && options.some((each) => each.key === this.chosen);
    const group = (label, made) => el("optgroup", { label }, made.map((each) => el("option", { value: each.key, text: each.text })));
    fill(this.which, group("One run", options.filter((each) => !each.other)), group("Where they differ", options.filter((each) => each.other)));
    this.which.hidden = runs.length < 2;
    await this.choose(kept ? this.chosen : options[0].key);
  }

  // What can be shown: each run, and how much larger the numbers of each other run are than those of the first.
  options() {
    const [first, ...others] = this.runs;
    return [...this.runs.map((run) => ({ key: run.id, run, other: null, text: run.name })),
      ...others.map((other) => ({ key: `${other.id} ratio`, run: first, other, text: `${other.name} ÷ ${first.name}` }))];
  }

  // The next of them, by a key.
  next() {
    const options = this.options();
    if (options.length < 2) return;
    const chosen = options[(options.findIndex((each) => each.key === this.chosen) + 1) % options.length];
    this.choose(chosen.key);
    say(`Layers: ${chosen.text}`);
  }

  shows(run) { return run === this.run || run === this.other?.id; }

  async choose(key) {
    const { run, other, text } = this.options().find((each) => each.key === key);
    const turn = this.turn = {};
    const changed = key !== this.chosen;
    this.chosen = this.which.value = key;
    let layouts;
    try {
      layouts = await Promise.all([run, other].filter(Boolean).map((each) => this.layoutOf(each.id)));
    } catch (trouble) {
      if (turn === this.turn) this.tell(trouble.message);
      return;
    }
    if (turn !== this.turn) return;
    const [layout, others] = layouts;
    const alike = this.layout && JSON.stringify(this.layout.layers) === JSON.stringify(layout.layers);
    if (!alike) { this.expanded.clear(); this.scroller.scrollTop = 0; }
    if (changed) { this.tables.clear(); this.cell = null; this.tell("Loading"); }
    Object.assign(this, { run: run.id, other, layout, names: [run.name, other?.name] });
    this.matched = other ? { layers: matches(layout.layers.map(named), others.layers.map(named)), tensors: matches(layout.tensors, others.tensors), heads: matches(layout.heads, others.heads) } : null;
    const have = run.pictures.filter((name) => !other || other.pictures.includes(name));
    if (!have.includes(this.picture)) this.picture = have[0] || "norm";
    this.nothing = !have.length || !layout.layers.length;
    fill(this.buttons, have.length ? choice("Picture", have.map((name) => [name, ...PICTURES[name]]), this.picture, (name) => { this.picture = name; this.tables.clear(); this.load(); }) : null,
      layout.layers.length > 1 ? el("button", { type: "button", class: "quiet small", text: this.expanded.size < layout.layers.length ? "Open all" : "Close all", onclick: (event) => this.openAll(event.target) }) : null);
    this.canvas.setAttribute("aria-label", `Layers by steps${this.runs.length > 1 ? `, ${text}` : ""}. Arrow keys move, Enter opens, plus and minus open and close a layer.`);
    this.stale = true;
    this.wake();
  }

  tell(text) {
    this.state.hidden = !text;
    this.state.textContent = text;
  }

  openAll(button) {
    const open = this.expanded.size < this.layout.layers.length;
    this.expanded = new Set(open ? this.layout.layers.keys() : []);
    button.textContent = open ? "Close all" : "Open all";
    this.load();
  }

  refresh() { this.stale = true; this.wake(); }

  wake() {
    if (!this.visible) return;
    if (this.stale) this.load(); else this.draw();
  }

  async load() {
    this.stale = false;
    if (!this.run) return;
    this.scroller.hidden = this.nothing;
    if (this.nothing) { this.tell(this.other ? "One of the two runs has no readings of single tensors" : "This run has no readings of single tensors"); fill(this.legend); return; }
    const { run, other, picture, turn } = this;
    const wanted = ["layers", ...(this.expanded.size ? ["tensors"] : []), ...(this.expanded.size && picture === "gsnr" && this.layout.heads.length ? ["heads"] : [])];
    const ask = (id, rows) => api.heatmap(id, { picture, columns: COLUMNS, rows, ...this.stretch(id) });
    try {
      const found = await Promise.all(wanted.map(async (rows) => {
        const [own, others] = await Promise.all([ask(run, rows), other ? ask(other.id, rows) : null]);
        return other ? ratios(own, others, this.matched[rows], (at) => this.axis.stepOf(run, other.id, at), picture === "gsnr") : own;
      }));
      if (turn !== this.turn || picture !== this.picture) return;
      this.tables = new Map(wanted.map((rows, i) => [rows, found[i]]));
      this.measure();
      const shared = !other || this.matched.layers.some((row) => row >= 0);
      this.tell(!shared ? "The runs have no layer in common" : found[0].columns ? "" : other ? "The runs have no step in common" : this.axis.range ? "No readings in these steps" : "Nothing read yet");
    } catch (trouble) {
      if (turn === this.turn) this.tell(trouble.message);
    }
    this.draw();
    requestAnimationFrame(() => performance.mark("layers"));
  }

  // The steps of a run to ask for: what is looked at, of two runs what both have.
  stretch(id) {
    const axis = this.axis;
    const reach = axis.reach(id);
    const all = [this.run, this.other?.id].filter(Boolean).map((each) => axis.reach(each)).filter(Boolean);
    const [low, high] = [...(axis.range ? [axis.range] : []), ...(this.other ? all : [])].reduce((a, b) => [Math.max(a[0], b[0]), Math.min(a[1], b[1])], [-Infinity, Infinity]);
    return {
      since: !reach || low > reach[0] ? whole(Math.floor(axis.step(id, low)) - 1) : undefined,
      until: !reach || high < reach[1] ? whole(Math.ceil(axis.step(id, high))) : undefined,
    };
  }

  // The rows that are shown, from the input to the output.
  rows() {
    const rows = [];
    for (const [i, layer] of this.layout.layers.entries()) {
      const inner = layer.tensors.length + layer.heads.length;
      rows.push({ kind: "layers", row: i, layer: i, name: layer.kind ? `${layer.name} · ${layer.kind}` : layer.name, inner, depth: 0 });
      if (!this.expanded.has(i)) continue;
      for (const row of layer.tensors) rows.push({ kind: "tensors", row, layer: i, name: shortened(this.layout.tensors[row], layer.name), full: this.layout.tensors[row], depth: 1 });
      if (this.picture === "gsnr") for (const row of layer.heads) rows.push({ kind: "heads", row, layer: i, name: shortened(this.layout.heads[row], layer.name), full: this.layout.heads[row], depth: 1 });
    }
    return rows;
  }

  // The value of a row at a step, and the steps that it stands for. Tensors may be read at other steps than layers are.
  value(row, at) {
    const table = this.tables.get(row.kind);
    const column = table?.columns ? columnAt(table, at) : -1;
    if (column < 0) return { value: NaN, steps: [at, at + 1] };
    const place = row.row * table.columns + column;
    return { value: table.values[place], steps: span(table, column), own: table.own?.[place], others: table.others?.[place] };
  }

  measure() {
    this.scale = new (this.other ? RatioScale : SizeScale)(this.tables, this.rows(), this.picture);
    fill(this.legend, this.scale.legend());
  }

  restyle() {
    if (this.scale) fill(this.legend, this.scale.legend());
    this.draw();
  }

  gutter() { return this.scroller.clientWidth < 560 ? 104 : 202; }

  geometry() {
    const width = this.scroller.clientWidth;
    const left = this.gutter();
    return { width, left, plot: Math.max(10, width - left - 12) };
  }

  draw() {
    if (!this.visible || !this.layout || this.scroller.hidden) return;
    const rows = this.shown = this.rows();
    const total = rows.length * ROW;
    const height = Math.min(MOST_HEIGHT, total);
    this.scroller.style.height = `${height + 22}px`;
    this.spacer.style.height = `${total + 22}px`;
    const { width, left, plot } = this.geometry();
    const ratio = devicePixelRatio || 1;
    const tall = height + 22;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(tall * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(tall * ratio);
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${tall}px`;
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, tall);
    const top = this.scroller.scrollTop;
    const first = Math.floor(top / ROW);
    const last = Math.min(rows.length, Math.ceil((top + height) / ROW));
    context.save();
    context.beginPath();
    context.rect(0, 0, width, height);
    context.clip();
    const box = { rows, first, last, top, left, plot, height };
    paintCells(context, this, box);
    paintNames(context, this, box);
    context.restore();
    paintAxis(context, this, box);
    paintCursor(context, this, box);
  }

  pointAt(x) {
    this.cursorX = x;
    this.draw();
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const { left, plot } = this.geometry();
    const x = event.clientX - box.left;
    const index = Math.floor((event.clientY - box.top + this.scroller.scrollTop) / ROW);
    if (event.clientY - box.top > box.height - 22 || index < 0 || index >= (this.shown?.length ?? 0)) return null;
    const table = this.tables.get("layers");
    if (x < left || !table?.columns) return { index, column: -1, label: x < left };
    const [low, high] = this.axis.shown();
    const place = low + ((x - left) / plot) * (high - low);
    const at = this.axis.step(this.run, place);
    const beyond = this.axis.mode === "time" && place > this.axis.x(this.run, table.end);
    return { index, column: beyond ? -1 : columnAt(table, at), at, place, label: false };
  }

  hover(event) {
    const found = this.at(event);
    this.canvas.style.cursor = found && (found.label ? this.shown[found.index].inner > 1 : found.column >= 0) ? "pointer" : "default";
    if (!found || found.label || found.column < 0) { this.leave(); return; }
    this.cell = found;
    this.axis.pointAt(found.place);
    this.showTip(found, event.clientX, event.clientY);
  }

  leave() {
    this.tip.hidden = true;
    this.cell = null;
    this.axis.pointAt(null);
  }

  // A cell in words: the row, its number, and the steps it stands for.
  text(found) {
    const row = this.shown[found.index];
    const { value, own, others, steps: [from, to] } = this.value(row, found.at);
    const steps = to - from > 1 ? `steps ${step(from)} to ${step(to - 1)}` : `step ${step(from)}`;
    const name = PICTURES[this.picture][0];
    const known = (each) => (each === Infinity ? "NaN or Inf" : Number.isNaN(each) ? "not read" : number(each));
    if (!this.other) return [row.full || row.name, `${name} ${known(value)}`, steps];
    const [run, other] = this.names;
    if (this.matched[row.kind][row.row] < 0) return [row.full || row.name, `not in ${other}`, steps];
    if (Number.isNaN(value)) return [row.full || row.name, `${name} not read in both`, steps];
    const sized = value > 0 && Number.isFinite(value) && own && others;
    return [row.full || row.name, sized ? `${name} ${value < 1 ? `÷ ${number(1 / value)}` : `× ${number(value)}`}` : name, `${known(others)} in ${other}, ${known(own)} in ${run}`, steps];
  }

  showTip(found, x, y) {
    const [name, ...rest] = this.text(found);
    fill(this.tip, el("b", { text: name }), rest.map((text, i) => el("span", { class: i === rest.length - 1 ? "dim" : "", text })));
    const box = this.element.getBoundingClientRect();
    this.tip.hidden = false;
    this.tip.style.left = `${Math.min(x - box.left + 14, box.width - this.tip.offsetWidth - 8)}px`;
    this.tip.style.top = `${y - box.top + 18}px`;
  }

  click(event) {
    this.isPointed = true; // + and - mean the axis to who uses the mouse, and a layer to who came by arrow keys
    const found = this.at(event);
    if (found) this.open(found);
  }

  // A label opens its layer; a cell opens its tensor, and the cell of a layer the tensor that stands out there.
  async open(found) {
    const row = this.shown[found.index];
    if (row.kind === "layers" && found.label) { this.toggle(row.layer); return; }
    if (found.column < 0 && !found.label) return;
    const from = found.column >= 0 ? Math.floor(this.value(row, found.at).steps[0]) : null;
    if (row.kind !== "layers") { this.onopen(this.run, row.kind, row.row, from); return; }
    const layer = this.layout.layers[row.layer];
    if (!this.expanded.has(row.layer) && layer.tensors.length > 1) await this.toggle(row.layer);
    const within = this.tables.get("tensors");
    const column = within?.columns ? columnAt(within, found.at) : -1;
    let best = layer.tensors[0];
    for (const each of column >= 0 ? layer.tensors : []) {
      const [value, known] = [each, best].map((one) => this.standing(within.values[one * within.columns + column]));
      if (Number.isNaN(known) || value > known) best = each;
    }
    if (best === undefined) this.onopen(this.run, "layers", row.row, from); else this.onopen(this.run, "tensors", best, from);
  }

  // How much a number stands out.
  standing(value) {
    if (this.other) return value > 0 ? Math.abs(Math.log(value)) : Number.isNaN(value) ? NaN : Infinity;
    return this.picture === "gsnr" ? -value : value;
  }

  async toggle(layer) {
    if (this.expanded.has(layer)) this.expanded.delete(layer); else this.expanded.add(layer);
    await this.load();
  }

  async key(event) {
    const table = this.tables.get("layers");
    if (!table?.columns || event.ctrlKey || event.metaKey || event.altKey) return;
    const cell = this.cell || { index: 0, column: table.columns - 1, at: table.starts[table.columns - 1] };
    const far = event.shiftKey ? Math.max(1, Math.round(table.columns / 20)) : 1;
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -far], ArrowRight: [0, far], Home: [0, -table.columns], End: [0, table.columns] };
    const row = this.shown[cell.index];
    if (event.key in moves) {
      this.isPointed = false;
      const [down, along] = this.cell ? moves[event.key] : [0, 0];
      const column = Math.max(0, Math.min(table.columns - 1, cell.column + along));
      this.cell = { index: Math.max(0, Math.min(this.shown.length - 1, cell.index + down)), column, at: table.starts[column] };
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      event.stopPropagation();
      await this.open({ ...cell, label: false });
      return;
    } else if ((event.key === "+" || event.key === "-") && !this.isPointed) {
      event.stopPropagation();
      if (this.expanded.has(row.layer) === (event.key === "-")) await this.toggle(row.layer);
    } else return;
    event.preventDefault();
    event.stopPropagation();
    const y = this.cell ? this.cell.index * ROW : 0;
    const height = this.scroller.clientHeight - 22;
    if (y < this.scroller.scrollTop) this.scroller.scrollTop = y;
    if (y + ROW > this.scroller.scrollTop + height) this.scroller.scrollTop = y + ROW - height;
    this.draw();
    if (this.cell) say(this.text(this.cell).join(", "));
  }
}

const named = (layer) => layer.name;

// A number for an address, if it is one.
const whole = (at) => (Number.isFinite(at) ? at : undefined);

function shortened(name, layer) {
  return name.startsWith(`${layer}.`) ? name.slice(layer.length + 1) : name;
}

// For each name its place among others, -1 for none.
function matches(names, others) {
  const places = new Map(others.map((name, at) => [name, at]));
  return names.map((name) => places.get(name) ?? -1);
}
