// One chart: lines of one or more runs over the shared axis, with a band and with marks. The only file that knows uPlot.
import { css } from "./dom.js";
import { tick, tickTime } from "./format.js";
import { DASHES } from "./palette.js";
import { bothSides, decades, scaleOf, spread } from "./value_axis.js";

const uPlot = window.uPlot;

// Round distances of ticks.
const STEPS = [...Array(10).keys()].flatMap((power) => [1, 2, 5].map((times) => times * 10 ** power));
const DAY = 86400;
const SECONDS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, DAY, 2 * DAY, 5 * DAY, 10 * DAY, 30 * DAY, 100 * DAY];

// Draws a chart only while it can be seen.
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) entry.target.chart?.setVisible(entry.isIntersecting);
}, { rootMargin: "120px" });

export class Chart {
  // lines: set by setLines; options: {axis, height, log, showX, gutter, onzoom, oncursor, sync}
  constructor(host, options) {
    this.host = host;
    this.options = { height: 110, gutter: 54, log: false, showX: false, sync: "run", ...options };
    this.lines = [];
    this.marks = [];
    this.shade = null;
    this.visible = false;
    this.stale = true;
    this.plot = null;
    this.shape = "";
    this.linear = 0; // of an axis by the logarithm on both sides of 0
    this.below = 0; // values that are not above 0, on an axis by the logarithm
    host.chart = this;
    seen.observe(host);
    this.resizing = new ResizeObserver(() => this.resize());
    this.resizing.observe(host);
  }

  // Each line: {x, mean, low, high, colour, dash, band}; low and high are a band around the mean where there is one.
  setLines(lines) { this.lines = lines; this.rescale(); this.refresh(); }

  setMarks(marks, shade) { this.marks = marks; this.shade = shade; this.plot?.redraw(false, false); }

  setLog(log) { this.options.log = log; this.shape = ""; this.rescale(); this.refresh(); }

  rescale() { Object.assign(this, scaleOf(this.lines, this.options.log)); }

  restyle() { this.shape = ""; this.refresh(); }

  setVisible(visible) {
    this.visible = visible;
    if (visible && this.stale) this.refresh();
  }

  refresh() {
    this.stale = true;
    if (!this.visible || !this.host.clientWidth) return;
    this.stale = false;
    const shape = `${this.options.log},${this.linear}|${this.lines.map((line) => `${line.colour},${Boolean(line.low)}`).join("|")}`;
    const data = this.data();
    if (this.plot && shape === this.shape) {
      this.plot.setData(data, false);
      this.setRange();
      return;
    }
    this.plot?.destroy();
    this.shape = shape;
    this.plot = new uPlot(this.uplotOptions(), data, this.host);
    this.setRange();
    this.host.querySelector(".u-over")?.setAttribute("tabindex", "-1");
  }

  setRange() {
    const [min, max] = this.options.axis.shown();
    this.plot?.setScale("x", { min, max });
  }

  resize() {
    if (!this.plot) { this.refresh(); return; }
    const width = this.host.clientWidth;
    if (width && Math.abs(width - this.plot.width) > 1) this.plot.setSize({ width, height: this.options.height });
  }

  destroy() {
    seen.unobserve(this.host);
    this.resizing.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }

  data() {
    const log = this.options.log && !this.linear;
    const tables = this.lines.map((line) => {
      const cap = line.low ? largest(line.mean) * 1e4 : 0;
      const table = [line.x, drawable(line.mean, log)];
      if (line.low) table.push(bounded(line.high, log, cap), bounded(line.low, log, cap));
      return table;
    });
    if (!tables.length) return [[], []];
    return tables.length === 1 ? tables[0] : uPlot.join(tables);
  }

  uplotOptions() {
    const { axis, height, log, showX, gutter, sync } = this.options;
    const linear = this.linear;
    const ink = css("--dim");
    const rule = css("--rule");
    const font = "11px system-ui, sans-serif";
    const series = [{}];
    const bands = [];
    const banded = this.lines.some((line) => line.low);
    for (const [i, line] of this.lines.entries()) {
      const width = 1.5;
      series.push({ stroke: line.colour, width, dash: DASHES[line.dash ?? i % DASHES.length], points: { show: false }, spanGaps: false });
      if (line.low) {
        // The edges of an interval are left out; those of buckets are drawn, or a peak of one step could not be seen.
        const edge = { stroke: line.band ? "transparent" : `${line.colour}99`, width: line.band ? 0 : 1, points: { show: false }, auto: !line.band };
        bands.push({ series: [series.length, series.length + 1], fill: `${line.colour}${line.band ? "2e" : "40"}` });
        series.push({ ...edge }, { ...edge });
      }
    }
    return {
      width: this.host.clientWidth, height, series, bands,
      legend: { show: false },
      padding: [6, 12, showX ? 0 : 4, 0],
      scales: {
        x: { time: false, auto: false, range: (_, min, max) => [min, max] },
        y: { distr: linear ? 4 : log ? 3 : 1, asinh: linear || 1, range: (_, min, max) => spread(min, max, log, banded, linear) },
      },
      axes: [
        {
          show: true, size: showX ? 30 : 0, stroke: ink, font, gap: 4, ticks: { show: showX, stroke: rule, size: 4 },
          grid: { stroke: rule, width: 1 }, space: 70,
          values: (plot, ticks) => showX && axis.isKnown ? ticks.map((value) => axis.mode === "time" ? tickTime(value, plot.scales.x.max - plot.scales.x.min) : tick(value)) : ticks.map(() => ""),
          incrs: axis.mode === "step" ? STEPS : SECONDS,
        },
        {
          size: gutter, stroke: ink, font, gap: 4, space: log ? 22 : 26, ticks: { show: false }, grid: { stroke: rule, width: 1 }, ...(log ? { splits: linear ? bothSides(linear) : decades, filter: (_, ticks) => ticks } : {}),
          values: (_, ticks) => ticks.map((value) => value === null || !this.lines.length ? "" : tick(value)),
        },
      ],
      cursor: {
        sync: { key: sync, setSeries: false, scales: ["x", null] },
        drag: { x: true, y: false, setScale: false, dist: 6 },
        points: { size: 6, width: 1.5 },
        x: true, y: false,
      },
      hooks: {
        setSelect: [(plot) => this.selected(plot)],
        setCursor: [(plot) => this.pointed(plot)],
        drawClear: [(plot) => this.drawShade(plot)],
        drawAxes: [(plot) => this.drawZero(plot)],
        draw: [(plot) => this.drawMarks(plot)],
      },
    };
  }

  selected(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    const low = plot.posToVal(left, "x");
    const high = plot.posToVal(left + width, "x");
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.options.axis.setRange(low, high);
  }

  pointed(plot) {
    const { left, idx } = plot.cursor;
    const inside = left !== null && left >= 0 && idx !== null && idx !== undefined;
    this.options.oncursor?.(inside ? plot.posToVal(left, "x") : null);
  }

  // The values of each line at a place on the axis.
  valuesAt(x) {
    return this.lines.map((line) => {
      const at = nearest(line.x, x);
      if (at < 0) return null;
      return { x: line.x[at], mean: line.mean[at], low: line.low?.[at], high: line.high?.[at] };
    });
  }

  drawShade(plot) {
    if (!this.shade) return;
    const { ctx, bbox } = plot;
    const from = Math.max(bbox.left, plot.valToPos(this.shade.from, "x", true));
    const to = Math.min(bbox.left + bbox.width, Math.max(from + 3, plot.valToPos(this.shade.to, "x", true)));
    if (!(to > from)) return;
    ctx.save();
    ctx.globalAlpha = 0.13;
    ctx.fillStyle = this.shade.colour;
    ctx.fillRect(from, bbox.top, to - from, bbox.height);
    ctx.restore();
  }

  // A line at 0 where values lie on both sides of it.
  drawZero(plot) {
    const { min, max } = plot.scales.y;
    if (!(min < 0) || !(max > 0) || !this.lines.length) return;
    const { ctx, bbox } = plot;
    const y = Math.round(plot.valToPos(0, "y", true));
    ctx.save();
    ctx.fillStyle = css("--dim");
    ctx.globalAlpha = 0.7;
    ctx.fillRect(bbox.left, y, bbox.width, devicePixelRatio);
    ctx.restore();
  }

  drawMarks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const mark of this.marks) {
      const x = Math.round(plot.valToPos(mark.x, "x", true)) + 0.5;
      if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
      ctx.strokeStyle = mark.colour;
      ctx.globalAlpha = mark.strong ? 0.95 : 0.5;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.setLineDash([]);
    ctx.globalAlpha = 1;
    ctx.fillStyle = css("--critical");
    for (const line of this.lines) {
      for (const x of line.broken || []) { // where the value is not a number
        const at = plot.valToPos(x, "x", true);
        if (at >= bbox.left && at <= bbox.left + bbox.width) ctx.fillRect(at - devicePixelRatio, bbox.top, 2 * devicePixelRatio, 5 * devicePixelRatio);
      }
    }
    ctx.restore();
  }
}

// Numbers that can be drawn, null where there is a gap. What is fine as it is stays the array it is.
function drawable(values, log) {
  let fine = true;
  for (let i = 0; i < values.length && fine; i++) fine = Number.isFinite(values[i]) && (!log || values[i] > 0);
  return fine ? values : Array.from(values, (value) => (Number.isFinite(value) && (!log || value > 0) ? value : null));
}

// The ends of a band, cut to what can be drawn: an interval may reach to infinity, or below zero on a log axis.
function bounded(values, log, cap) {
  return Array.from(values, (value) => {
    if (Number.isNaN(value)) return null;
    if (cap > 0) value = Math.max(-cap, Math.min(cap, value));
    return Number.isFinite(value) ? (log && value <= 0 ? (cap || 1) * 1e-16 : value) : null;
  });
}

function largest(values) {
  let found = 0;
  for (const value of values) if (Number.isFinite(value) && Math.abs(value) > found) found = Math.abs(value);
  return found;
}

export function nearest(x, wanted) {
  if (!x.length) return -1;
  let low = 0;
  let high = x.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] <= wanted) low = middle; else high = middle;
  }
  return wanted - x[low] <= x[high] - wanted ? low : high;
}

