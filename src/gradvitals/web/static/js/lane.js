// The lane of a run above the charts: findings as bars from their first step to their last, actions as diamonds.
import { el, fill } from "./dom.js";
import { step } from "./format.js";
import { SIGNS } from "./palette.js";

const ROWS = 4;
const ROW_HEIGHT = 22;
const GATHER = 14; // pixels within which actions of a kind become one mark
const MOST_ACTIONS = 80;

export class Lane {
  constructor({ axis, onfinding, onaction }) {
    this.axis = axis;
    this.onfinding = onfinding;
    this.onaction = onaction;
    this.element = el("div", { class: "lane", role: "group" });
    this.track = el("div", { class: "lane-track" });
    this.cursor = el("div", { class: "lane-cursor", hidden: true });
    this.head = el("div", { class: "lane-head" });
    this.element.append(this.head, el("div", { class: "lane-box" }, this.track, this.cursor));
    this.run = null;
    this.label = null;
    this.findings = [];
    this.actions = [];
    this.lastStep = 0;
    this.chosen = null;
    new ResizeObserver(() => this.draw()).observe(this.track);
  }

  // label: {name, colour, dash} where there are several runs.
  set(run, overview, label) {
    this.run = run;
    this.label = label;
    this.element.setAttribute("aria-label", `Findings and actions${label ? ` of ${label.name}` : ""} on the axis`);
    this.findings = overview.findings;
    this.actions = overview.actions;
    this.lastStep = overview.last_step ?? 0;
    this.draw();
  }

  pointAt(x) {
    const [low, high] = this.axis.shown();
    const share = (x - low) / (high - low);
    this.cursor.hidden = x === null || !(share >= 0 && share <= 1);
    if (!this.cursor.hidden) this.cursor.style.left = `${100 * share}%`;
  }

  draw() {
    const width = this.track.clientWidth;
    if (!width || !this.run) return;
    const [low, high] = this.axis.shown();
    const place = (at) => (width * (this.axis.x(this.run, at) - low)) / (high - low);
    const focused = document.activeElement?.dataset?.mark;
    const marks = [];
    const ends = new Array(ROWS).fill(-Infinity); // where each row is free again
    const inOrder = [...this.findings].sort((a, b) => a.first_step - b.first_step);
    let hidden = 0;
    for (const finding of inOrder) {
      const from = place(finding.first_step);
      const to = Math.max(place((finding.last_step ?? this.lastStep) + 0.5), from + 16);
      if (to < 0 || from > width) continue;
      const shown = [Math.min(Math.max(0, from), width - 17), Math.min(width, to)];
      const label = 8 + 6.4 * Math.min(finding.name.length, 30);
      const side = shown[1] - shown[0] >= label + 20 ? "inside" : to + label < width ? "rightward" : "leftward";
      const taken = { inside: shown, rightward: [shown[0], to + label], leftward: [shown[0] - label, shown[1]] };
      const free = ([start]) => ends.findIndex((end) => end + 3 < Math.max(0, start));
      const named = free(taken[side]) >= 0;
      const row = free(named ? taken[side] : shown);
      if (row < 0) { hidden += 1; continue; }
      ends[row] = (named ? taken[side] : shown)[1];
      marks.push(this.bar(finding, row, shown, named ? side : "nameless"));
    }
    const used = ends.filter((end) => end > -Infinity).length;
    const gathered = this.gathered(place, width);
    for (const group of gathered) marks.push(this.diamond(group, used));
    const height = Math.max(1, used + (gathered.length ? 1 : 0)) * ROW_HEIGHT + 2;
    this.track.style.height = `${height}px`;
    const parts = [`${this.findings.length} finding${this.findings.length === 1 ? "" : "s"}`];
    if (this.actions.length) parts.push(`${this.actions.length} action${this.actions.length === 1 ? "" : "s"}`);
    fill(this.head,
      this.label ? el("span", { class: "lane-run", "--c": this.label.colour, title: this.label.name }, el("span", { class: `swatch dash${this.label.dash}`, "aria-hidden": "true" }), el("span", { text: this.label.name })) : null,
      el("span", { text: this.findings.length || this.actions.length ? parts.join(", ") : "Nothing found" }),
      hidden ? el("span", { class: "dim", text: `${hidden} more below` }) : null);
    fill(this.track, marks.length ? marks : el("span", { class: "lane-none", text: this.findings.length + this.actions.length ? "None in this range" : "No findings so far" }));
    if (focused) this.track.querySelector(`[data-mark="${CSS.escape(focused)}"]`)?.focus();
  }

  bar(finding, row, [from, to], side) {
    return el("button", {
      type: "button", class: `mark ${finding.severity} ${side}${finding.open ? " open" : ""}${this.chosen === finding.key ? " chosen" : ""}`,
      "data-mark": finding.key, title: finding.title,
      "aria-label": `${finding.severity}: ${finding.title}, ${finding.when}`,
      "--left": `${from}px`, "--width": `${Math.max(16, to - from)}px`, "--top": `${row * ROW_HEIGHT}px`,
      onclick: () => this.onfinding(finding, this.run),
    }, el("span", { class: "mark-sign", "aria-hidden": "true", text: SIGNS[finding.severity] }), el("span", { class: "mark-name", text: finding.name }));
  }

  gathered(place, width) {
    const groups = [];
    for (const action of this.actions) {
      const x = place(action.step);
      if (!(x >= -4 && x <= width + 4)) continue;
      const same = groups.findLast((group) => group.kind === action.kind && group.taken === action.taken && x - group.x < GATHER);
      if (same) same.actions.push(action);
      else groups.push({ kind: action.kind, taken: action.taken, x, actions: [action] });
    }
    return groups.slice(-MOST_ACTIONS);
  }

  diamond(group, row) {
    const [first] = group.actions;
    const many = group.actions.length;
    const name = group.kind.replaceAll("_", " ");
    const text = many === 1 ? first.text : `${many} times ${name}, steps ${step(first.step)} to ${step(group.actions.at(-1).step)}`;
    return el("button", {
      type: "button", class: `act${group.taken ? "" : " not-taken"}`, "data-mark": `action ${first.step} ${group.kind}`,
      title: text, "aria-label": `action: ${text}`, "--left": `${group.x}px`, "--top": `${row * ROW_HEIGHT}px`,
      onclick: () => this.onaction(group.actions),
    }, el("span", { "aria-hidden": "true", text: group.taken ? "◆" : "◇" }));
  }
}
