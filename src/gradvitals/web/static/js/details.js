// What opens at the side: a finding in words, actions, one tensor in charts, the keys.
import { css, el } from "./dom.js";
import { openDrawer } from "./drawer.js";
import { step } from "./format.js";
import { SIGNS } from "./palette.js";
import { Strip } from "./strip.js";
import { SharedAxis } from "./axis.js";

const WORDS = { critical: "Critical", warning: "Warning", info: "Note" };

export function severityTag(finding) {
  const resolved = finding.open ? "" : ", resolved";
  return el("span", { class: `tag ${finding.severity}${finding.open ? "" : " over"}` }, el("span", { "aria-hidden": "true", text: `${SIGNS[finding.severity]} ` }), `${WORDS[finding.severity]}${resolved}`);
}

function list(title, texts, ordered) {
  if (!texts.length) return null;
  const items = texts.map((text) => el("li", { text }));
  return el("section", {}, el("h3", { text: title }), el(ordered && texts.length > 1 ? "ol" : "ul", {}, items));
}

export function tensorButton(item, onopen) {
  return item.row === null || item.row === undefined
    ? el("span", { class: "tensor", text: item.name })
    : el("button", { type: "button", class: "tensor", text: item.name, title: item.name, onclick: () => onopen("tensors", item.row) });
}

export function findingBody(finding, { onopen, onzoom }) {
  const rest = finding.num_tensors - finding.tensors.length;
  return [
    el("p", {}, severityTag(finding), el("span", { class: "dim", text: ` ${finding.when}` }), finding.rank === null ? null : el("span", { class: "dim", text: `, rank ${finding.rank}` })),
    list("Evidence", finding.seen),
    list("Likely cause", finding.causes, true),
    list("Fix", finding.fixes, true),
    finding.snippet ? el("pre", { class: "snippet", text: finding.snippet }) : null,
    finding.tensors.length ? el("section", {}, el("h3", { text: "Where" }), el("div", { class: "tensors" }, finding.tensors.map((item) => tensorButton(item, onopen)), rest > 0 ? el("span", { class: "dim", text: `and ${rest} more` }) : null)) : null,
    el("p", { class: "row" }, onzoom ? el("button", { type: "button", text: "Zoom to it", onclick: () => onzoom(finding) }) : null),
    el("p", { class: "dim" }, "Details: ", el("code", { text: `gradvitals doctor --explain ${finding.id}` })),
  ];
}

export function showFinding(finding, calls) {
  openDrawer(finding.title, findingBody(finding, calls), { closed: calls.closed });
}

export function showActions(actions) {
  const title = actions.length === 1 ? `${actions[0].kind.replaceAll("_", " ")} at step ${step(actions[0].step)}` : `${actions.length} times ${actions[0].kind.replaceAll("_", " ")}`;
  const facts = (name, texts) => texts.length ? el("div", { class: "facts-line" }, el("b", { text: name }), ` ${texts.join(", ")}`) : null;
  openDrawer(title, actions.slice(-50).map((action) => el("section", {},
    el("h3", { text: `Step ${step(action.step)}${action.taken ? "" : ", not taken"}` }),
    el("p", { text: action.reason || action.text }),
    facts("answer to", action.finding ? [action.finding] : []), facts("before", action.before), facts("after", action.after), facts("cost", action.cost))));
}

// One tensor, layer or head over the whole run, in charts of its own, and the same of the runs beside it.
// ids: all runs that are drawn, which gives each its colour; runs: [{id, row, charts}], those that have it.
export function showTensor(ids, runs, kind, { name, about, legend, texts, range, live, at = null }) {
  const axis = new SharedAxis();
  const host = el("div", { class: "strips narrow" });
  const rows = new Map(runs.map((run) => [run.id, run.row]));
  const metrics = [...new Set(runs.flatMap((run) => run.charts.map((chart) => chart.metric)))];
  const strips = metrics.map((metric, i) => {
    const last = i === metrics.length - 1;
    const strip = new Strip({
      metric, axis, texts, where: { kind, rows }, sync: "tensor", showX: last, height: last ? 136 : 112,
      oncursor: (x) => strips.forEach((each) => each.showValue(x)),
    });
    strip.setRuns(ids, new Map(runs.map((run) => [run.id, run.charts.find((chart) => chart.metric === metric)]).filter(([, chart]) => chart)));
    if (at !== null) strip.chart.setMarks([{ x: at, colour: css("--ink"), strong: true }], null);
    host.append(strip.element);
    return strip;
  });
  axis.onchange(() => strips.forEach((strip) => { strip.chart.setRange(); strip.refine(); }));
  const load = (extend) => Promise.all(strips.flatMap((strip) => runs.map((run) => (extend ? strip.extend(run.id) : strip.load(run.id))))).then(() => {
    const ends = strips.flatMap((strip) => [...strip.all.values()]).filter((data) => data.steps.length);
    if (ends.length) axis.setFull(Math.min(...ends.map((data) => data.steps[0])), Math.max(...ends.map((data) => data.last)));
    strips.forEach((strip) => strip.chart.setRange());
  }).catch((trouble) => { host.append(el("p", { class: "dim", text: trouble.message })); });
  const pointed = at === null ? "" : ` · the dashed line is step ${step(at)}`;
  openDrawer(name, [el("p", { class: "dim", text: `${about}${pointed}` }), legend ? el("div", { class: "legend" }, legend) : null, metrics.length ? host : el("p", { text: "It has no readings of its own." }),
    el("p", { class: "dim", text: "Drag to zoom, double-click for everything." })], {
    kind: "wide", closed: () => { live.delete(load); strips.forEach((strip) => strip.destroy()); },
  });
  host.addEventListener("dblclick", () => axis.reset());
  load(false).then(() => { if (range) axis.setRange(...range); });
  live.set(load, runs.map((run) => run.id));
}

export function showHelp() {
  const keys = [["j / k", "next or previous run"], ["f", "next finding"], ["x", "steps or time on the axis"], ["d", "layers of the next run, then where runs differ"], ["+ / −", "zoom in or out"], ["← / →", "move along, when zoomed"], ["0", "show everything"], ["t", "light or dark"], ["r", "list of runs"], ["Esc", "close, or show everything"]];
  openDrawer("Keys, and how to read the charts", [
    el("dl", { class: "keys" }, keys.map(([key, text]) => [el("dt", {}, el("kbd", { text: key })), el("dd", { text })])),
    el("section", {}, el("h3", { text: "Charts" }),
      el("p", { text: "Drag over a chart to zoom; all charts follow and load more detail. Double-click to show everything. In a long run, the line is the mean of each bin and the shaded area its range, so no peak is lost." }),
      el("p", { text: "The band of GSNR and noise scale is their 95% interval. A gap means that the readings do not determine a value." }),
      el("p", { text: "A red tick at the top is a NaN or infinite value." })),
    el("section", {}, el("h3", { text: "Findings" }), el("p", { text: "A bar spans the steps of a finding. ■ is critical, ▲ a warning, ● a note; resolved findings are pale. ◆ is an action of a Guard or a schedule, ◇ one that it did not take." })),
    el("section", {}, el("h3", { text: "Layers" }), el("p", { text: "Each row is a layer, from the input at the top to the output; lighter colors are larger values. Click a cell to open the tensor that stands out there; click a name to show its tensors and, for GSNR, its attention heads. In the heatmap: arrow keys move, Enter opens, + and − open and close a layer." }),
      el("p", { text: "When you compare runs, choose above the heatmap which run it shows, or the ratio of two: gray means equal, orange that the other run is larger, blue that it is smaller." })),
  ]);
}
