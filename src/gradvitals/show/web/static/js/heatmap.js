// Layer × step: every layer in depth order, one colour a stretch of steps. A layer opens into its tensors and heads.
import * as api from "./api.js";
import { choice, css, el, fill, say } from "./dom.js";
import { duration, number, step } from "./format.js";
import { columnAt, extent, fitted, rgba, shortened, span } from "./heat_table.js";
import { HEAT, heat } from "./palette.js";

const ROW = 16;
const MOST_HEIGHT = 420;
const COLUMNS = 600;
const PICTURES = { norm: ["norm", "Gradient norm: the largest in each stretch"], gsnr: ["GSNR", "GSNR: the mean of each stretch"], update: ["update", "Update over weight: the largest in each stretch"] };

export class Heatmap {
  constructor({ axis, onopen }) {
    this.axis = axis;
    this.onopen = onopen;
    this.picture = "norm";
    this.expanded = new Set();
    this.tables = new Map(); // rows -> picture
    this.cell = null;
    this.run = null;
    this.canvas = el("canvas", { tabindex: "0", role: "application", "aria-roledescription": "heatmap", "aria-label": "Layers by steps. Arrow keys move, Enter opens, plus and minus open and close a layer." });
    this.spacer = el("div", { class: "heat-spacer" });
    this.scroller = el("div", { class: "heat-scroll" }, this.spacer, this.canvas);
    this.tip = el("div", { class: "heat-tip", hidden: true });
    this.state = el("div", { class: "plot-state", text: "Loading" });
    this.legend = el("div", { class: "heat-legend" });
    this.buttons = el("div", { class: "heat-buttons" });
    this.element = el("section", { class: "heat card", "aria-label": "Layers by steps" },
      el("div", { class: "card-head" }, el("h2", { text: "Layers" }), this.buttons, el("span", { class: "gap" }), this.legend),
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

  set(run, overview, layout) {
    if (run !== this.run) { this.expanded.clear(); this.tables.clear(); this.cell = null; this.scroller.scrollTop = 0; }
    this.run = run;
    this.layout = layout;
    const have = overview.pictures;
    if (!have.includes(this.picture)) this.picture = have[0] || "norm";
    this.nothing = !have.length || !layout.layers.length;
    fill(this.buttons, have.length ? choice("Picture", have.map((name) => [name, ...PICTURES[name]]), this.picture, (name) => { this.picture = name; this.tables.clear(); this.load(); }) : null,
      layout.layers.length > 1 ? el("button", { type: "button", class: "quiet small", text: "Open all", onclick: (event) => this.openAll(event.target) }) : null);
    this.stale = true;
    this.wake();
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
    if (this.nothing) {
      this.state.hidden = false;
      this.state.textContent = "Single tensors were not read in this run";
      this.scroller.hidden = true;
      return;
    }
    this.scroller.hidden = false;
    const { run, picture } = this;
    const wanted = ["layers", ...(this.expanded.size ? ["tensors"] : []), ...(this.expanded.size && picture === "gsnr" && this.layout.heads.length ? ["heads"] : [])];
    const range = this.axis.range;
    const asked = { picture, columns: COLUMNS };
    if (range) {
      const [low, high] = range.map((x) => this.axis.step(run, x));
      Object.assign(asked, { since: Math.floor(low) - 1, until: Math.ceil(high) });
    }
    try {
      const found = await Promise.all(wanted.map((rows) => api.heatmap(run, { ...asked, rows })));
      if (run !== this.run || picture !== this.picture) return;
      this.tables = new Map(wanted.map((rows, i) => [rows, found[i]]));
      this.measure();
      const empty = !found[0].columns;
      this.state.hidden = !empty;
      this.state.textContent = "Nothing read yet";
    } catch (trouble) {
      this.state.hidden = false;
      this.state.textContent = trouble.message;
    }
    this.draw();
    requestAnimationFrame(() => performance.mark("layers"));
  }

  // The rows that are shown, from the input to the output.
  rows() {
    const rows = [];
    for (const [i, layer] of this.layout.layers.entries()) {
      const inner = layer.tensors.length + layer.heads.length;
      rows.push({ kind: "layers", row: i, layer: i, name: layer.name, inner, depth: 0 });
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
    return column < 0 ? { value: NaN, steps: [at, at + 1] } : { value: table.values[row.row * table.columns + column], steps: span(table, column) };
  }

  measure() {
    const [low, high] = extent(this.tables, this.rows());
    this.scale = { low: Math.log(low), high: Math.log(high) };
    this.showLegend(low, high);
  }

  showLegend(low, high) {
    const bar = el("canvas", { class: "heat-bar", width: 128, height: 10, "aria-hidden": "true" });
    const context = bar.getContext("2d");
    for (let i = 0; i < 128; i++) { const [r, g, b] = heat(i / 127); context.fillStyle = `rgb(${r} ${g} ${b})`; context.fillRect(i, 0, 1, 10); }
    fill(this.legend, el("span", { text: number(low) }), bar, el("span", { text: number(high) }),
      el("span", { class: "key bad", text: "NaN or Inf" }), this.picture === "gsnr" ? el("span", { class: "key below", text: "0 or less" }) : null);
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
    this.paint(context, rows, first, last, top, left, plot);
    this.label(context, rows, first, last, top, left);
    context.restore();
    this.axisLabels(context, left, plot, height);
    this.outline(context, rows, top, left, plot, height);
  }

  // Cells are written pixel by pixel into an image as wide as the plot, then stretched over each row.
  paint(context, rows, first, last, top, left, plot) {
    const main = this.tables.get("layers");
    if (!main || !main.columns || !this.scale) return;
    const wide = Math.round(plot);
    const columns = this.columnOf(main, wide);
    const image = new ImageData(wide, Math.max(1, last - first));
    const pixels = new Uint32Array(image.data.buffer);
    const bad = rgba(css("--critical"));
    const below = rgba(css("--below"));
    const { low, high } = this.scale;
    for (let r = first; r < last; r++) {
      const table = this.tables.get(rows[r].kind);
      if (!table) continue;
      const own = table === main ? columns : this.columnOf(table, wide);
      const from = rows[r].row * table.columns;
      for (let x = 0; x < wide; x++) {
        const column = own[x];
        if (column < 0) continue;
        const value = table.values[from + column];
        if (Number.isNaN(value)) continue;
        let colour;
        if (!Number.isFinite(value)) colour = bad;
        else if (value <= 0) colour = this.picture === "gsnr" ? below : HEAT[0];
        else colour = HEAT[Math.max(0, Math.min(255, Math.round((255 * (Math.log(value) - low)) / (high - low))))];
        pixels[(r - first) * wide + x] = colour;
      }
    }
    const canvas = new OffscreenCanvas(image.width, image.height);
    canvas.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    for (let r = first; r < last; r++) {
      const gap = rows[r].depth ? 0 : 1;
      context.drawImage(canvas, 0, r - first, image.width, 1, left, r * ROW - top + gap, plot, ROW - gap);
    }
  }

  // Which column of a table each pixel shows, -1 for none.
  columnOf(table, wide) {
    const [low, high] = this.axis.shown();
    const found = new Int32Array(wide).fill(-1);
    const places = Array.from(table.starts, (at) => (wide * (this.axis.x(this.run, at) - low)) / (high - low));
    const end = (wide * (this.axis.x(this.run, table.end) - low)) / (high - low);
    for (let c = 0; c < places.length; c++) {
      const from = Math.max(0, Math.round(places[c]));
      const to = Math.min(wide, Math.max(from + 1, Math.round(c + 1 < places.length ? places[c + 1] : Math.max(end, places[c] + 3))));
      for (let x = from; x < to; x++) found[x] = c;
    }
    return found;
  }

  label(context, rows, first, last, top, left) {
    const ink = css("--ink");
    const dim = css("--dim");
    context.textBaseline = "middle";
    for (let r = first; r < last; r++) {
      const { name, depth, kind, layer, inner } = rows[r];
      const y = r * ROW - top + ROW / 2 + 0.5;
      context.font = depth ? "10.5px ui-monospace, monospace" : "11.5px ui-monospace, monospace";
      context.fillStyle = depth ? dim : ink;
      if (kind === "layers" && inner > 1) context.fillText(this.expanded.has(layer) ? "▾" : "▸", 2, y);
      context.fillText(fitted(context, name, left - (depth ? 26 : 20) - 6), depth ? 26 : 15, y);
    }
  }

  axisLabels(context, left, plot, height) {
    const [low, high] = this.axis.shown();
    context.fillStyle = css("--dim");
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "top";
    // On the axis of time the picture may reach beyond the last step of this run, to the end of a longer one.
    const name = (x) => (this.axis.mode === "time" ? duration(x) : `step ${step(Math.round(x))}`);
    context.fillText(name(low), left, height + 6);
    const text = name(high);
    context.fillText(text, left + plot - context.measureText(text).width, height + 6);
  }

  outline(context, rows, top, left, plot, height) {
    const [low, high] = this.axis.shown();
    if (this.cursorX !== null && this.cursorX !== undefined) {
      const x = left + (plot * (this.cursorX - low)) / (high - low);
      if (x >= left && x <= left + plot) { context.fillStyle = css("--ink"); context.globalAlpha = 0.5; context.fillRect(x, 0, 1, height); context.globalAlpha = 1; }
    }
    if (!this.cell) return;
    if (!rows[this.cell.index] || !this.tables.get("layers")?.columns) return;
    const [from, to] = this.value(rows[this.cell.index], this.cell.at).steps;
    const x0 = left + Math.max(0, (plot * (this.axis.x(this.run, from) - low)) / (high - low));
    const x1 = left + Math.min(plot, (plot * (this.axis.x(this.run, to) - low)) / (high - low));
    const y = this.cell.index * ROW - top;
    if (this.cell.index >= rows.length || y < -ROW || y > height) return;
    context.lineWidth = 2;
    context.strokeStyle = css("--bg");
    context.strokeRect(x0 - 1.5, y - 0.5, Math.max(3, x1 - x0) + 3, ROW + 1);
    context.lineWidth = 1.5;
    context.strokeStyle = css("--ink");
    context.strokeRect(x0 - 0.5, y + 0.5, Math.max(3, x1 - x0) + 1, ROW - 1);
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

  text(found) {
    const row = this.shown[found.index];
    const { value, steps: [from, to] } = this.value(row, found.at);
    const steps = to - from > 1 ? `steps ${step(from)} to ${step(to - 1)}` : `step ${step(from)}`;
    const shown = value === Infinity ? "NaN or Inf" : Number.isNaN(value) ? "not read" : number(value);
    return [row.full || row.name, `${PICTURES[this.picture][0]} ${shown}`, steps];
  }

  showTip(found, x, y) {
    const [name, value, steps] = this.text(found);
    fill(this.tip, el("b", { text: name }), el("span", { text: value }), el("span", { class: "dim", text: steps }));
    const box = this.element.getBoundingClientRect();
    this.tip.hidden = false;
    this.tip.style.left = `${Math.min(x - box.left + 14, box.width - this.tip.offsetWidth - 8)}px`;
    this.tip.style.top = `${y - box.top + 18}px`;
  }

  click(event) {
    const found = this.at(event);
    if (found) this.open(found);
  }

  // A label opens its layer; a cell opens its tensor, and the cell of a layer the tensor that stands out there.
  async open(found) {
    const row = this.shown[found.index];
    if (row.kind === "layers" && found.label) { this.toggle(row.layer); return; }
    if (found.column < 0 && !found.label) return;
    const from = found.column >= 0 ? Math.floor(this.value(row, found.at).steps[0]) : null;
    if (row.kind !== "layers") { this.onopen(row.kind, row.row, from); return; }
    const layer = this.layout.layers[row.layer];
    if (!this.expanded.has(row.layer) && layer.tensors.length > 1) await this.toggle(row.layer);
    const within = this.tables.get("tensors");
    const column = within?.columns ? columnAt(within, found.at) : -1;
    let best = layer.tensors[0];
    for (const each of column >= 0 ? layer.tensors : []) {
      const [value, known] = [each, best].map((one) => within.values[one * within.columns + column]);
      if (Number.isNaN(known) || (this.picture === "gsnr" ? value < known : value > known)) best = each;
    }
    if (best === undefined) this.onopen("layers", row.row, from); else this.onopen("tensors", best, from);
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
      const [down, along] = this.cell ? moves[event.key] : [0, 0];
      const column = Math.max(0, Math.min(table.columns - 1, cell.column + along));
      this.cell = { index: Math.max(0, Math.min(this.shown.length - 1, cell.index + down)), column, at: table.starts[column] };
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      event.stopPropagation();
      await this.open({ ...cell, label: false });
      return;
    } else if (event.key === "+" || event.key === "-") {
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
