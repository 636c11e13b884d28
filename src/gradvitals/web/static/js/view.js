// One run on one screen: the verdict, the vital signs, findings and actions, the layers, the worst tensors.
import * as api from "./api.js";
import { SharedAxis } from "./axis.js";
import { findingBody, severityTag, showActions, showFinding, showTensor, tensorButton } from "./details.js";
import { choice, el, fill } from "./dom.js";
import { closeDrawer } from "./drawer.js";
import { count, duration, number, step } from "./format.js";
import { Heatmap } from "./heatmap.js";
import { Lane } from "./lane.js";
import { LEVEL_SIGNS, LEVEL_WORDS, SIGNS, lineColour, severityColour } from "./palette.js";
import { Strip } from "./strip.js";

const VITALS = ["loss", "grad/norm", "gsnr", "noise_scale", "lr"];
const CHIPS = 4;
const NO_LAYOUT = { layers: [], tensors: [], shapes: [], heads: [] };
const CHARTS = { tensors: "tensor_charts", layers: "layer_charts", heads: "head_charts" };
const HEATMAP_EVERY = 4000; // milliseconds between pictures of a live run, and so on
const WORST_EVERY = 10000;
const OVERVIEW_EVERY = 2500;

export class RunView {
  constructor(host, texts) {
    this.texts = texts;
    this.axis = new SharedAxis();
    this.run = null;
    this.others = [];
    this.overviews = new Map();
    this.layouts = new Map(); // run -> what its rows stand for, on its way or there
    this.opened = new Map(); // what is open at the side and wants news, and of which runs
    this.done = { heatmap: 0, worst: 0, overview: 0 };
    this.due = {}; // timers of what is to be done again
    this.chosen = null;
    this.verdict = el("section", { class: "verdict", "aria-label": "Verdict", "aria-live": "polite" });
    this.judged = el("p", { class: "dim judged", "aria-live": "off" });
    this.compared = el("section", { class: "card compared", "aria-label": "Compared", hidden: true });
    this.legend = el("div", { class: "legend" });
    this.zoomed = el("button", { type: "button", class: "small", text: "Show everything", title: "Esc or 0", hidden: true, onclick: () => this.axis.reset() });
    this.modes = choice("Along the axis", [["step", "Steps", "Runs side by side at the same step (x)"], ["time", "Time", "Runs side by side at the same time since their start (x)"]], "step", (mode) => this.setMode(mode));
    this.lanes = [this.newLane()]; // of each run that is drawn
    this.laneHost = el("div", {}, this.lanes[0].element);
    this.strips = VITALS.map((metric, i) => new Strip({ metric, axis: this.axis, texts, showX: i === VITALS.length - 1, oncursor: (x) => this.axis.pointAt(x) }));
    this.heatmap = new Heatmap({ axis: this.axis, onopen: (run, kind, row, at) => this.openTensor(kind, row, at, run) });
    this.findings = el("section", { class: "card", "aria-label": "Findings" });
    this.worst = el("section", { class: "card", "aria-label": "Worst tensors" });
    this.facts = el("section", { class: "card facts", "aria-label": "About the run" });
    const charts = el("div", { class: "strips card" }, el("div", { class: "card-head" }, el("h2", { text: "Vital signs" }), this.modes, this.legend, el("span", { class: "gap" }), this.zoomed), this.laneHost, this.strips.map((strip) => strip.element));
    charts.addEventListener("dblclick", () => this.axis.reset());
    fill(host, this.verdict, this.compared, charts, this.heatmap.element, el("div", { class: "columns" }, this.findings, this.worst), this.facts);
    this.axis.onchange((zoomed) => this.ranged(zoomed));
    this.axis.oncursor((x) => {
      this.strips.forEach((strip) => strip.showValue(x));
      this.lanes.forEach((lane) => lane.pointAt(x));
      if (x !== this.heatmap.cursorX) this.heatmap.pointAt(x);
    });
    window.addEventListener("themechange", () => this.restyle());
  }

  // lines: what the list of runs says of each, so that charts need not wait for the rest.
  async show(run, others, lines) {
    this.lines = new Map(lines.map((line) => [line.id, line]));
    const changed = run !== this.run;
    this.run = run;
    this.others = others;
    const ids = this.ids();
    if (changed) {
      closeDrawer();
      this.axis.range = null;
      this.chosen = null;
      fill(this.verdict, el("p", { class: "dim", text: "Loading the run" }));
      fill(this.worst); fill(this.findings); fill(this.facts);
    }
    const missing = ids.filter((id) => !this.overviews.has(id) || id === run);
    if (changed) this.layouts.delete(run);
    const layout = this.layoutOf(run).catch(() => NO_LAYOUT);
    this.setStrips();
    const charts = this.loadStrips(ids.filter((id) => changed || !this.strips.some((strip) => strip.all.has(id))));
    const found = await Promise.all(missing.map((id) => api.overview(id).catch((trouble) => trouble)));
    if (run !== this.run) return;
    for (const [i, id] of missing.entries()) {
      if (found[i] instanceof Error) { if (id === run) throw found[i]; } else this.keep(id, found[i]);
    }
    this.drawWords();
    this.compare();
    await charts;
    this.layout = await layout;
    if (run !== this.run) return;
    this.setHeatmap();
    this.loadWorst();
  }

  // How each other run differs from this one, in the words of gradvitals diff.
  async compare() {
    const [run, others] = [this.run, this.others.filter((id) => id !== this.run).slice(0, 3)];
    this.compared.hidden = !others.length;
    const found = await Promise.all(others.map((id) => api.diff(run, id).catch((trouble) => ({ sentences: [trouble.message] }))));
    if (run !== this.run || !others.length) return;
    fill(this.compared, el("div", { class: "card-head" }, el("h2", { text: "Compared" })), found.map((each) => el("div", { class: "compared-run" },
      each.names ? el("p", { class: "dim", text: `A is ${each.names.A}, B is ${each.names.B}.` }) : null, el("ul", {}, each.sentences.map((text) => el("li", { text }))))));
  }

  // What a run says of itself, and the step up to which it was judged then; news tell of later steps.
  keep(id, overview) {
    overview.judged_step = overview.last_step;
    for (const [i, finding] of overview.findings.entries()) finding.key = `${id} ${finding.id} ${finding.first_step} ${finding.rank} ${i}`;
    this.overviews.set(id, overview);
  }

  // What the rows of a run stand for; asked for again where it could not be had.
  layoutOf(run) {
    if (!this.layouts.has(run)) this.layouts.set(run, api.layout(run).catch((trouble) => { this.layouts.delete(run); throw trouble; }));
    return this.layouts.get(run);
  }

  setHeatmap() {
    const runs = this.ids().filter((id) => this.overviews.has(id)).map((id) => ({ id, name: this.lines.get(id)?.name ?? id, pictures: this.overviews.get(id).pictures }));
    this.heatmap.set(runs, (id) => (id === this.run ? Promise.resolve(this.layout) : this.layoutOf(id)));
  }

  ids() { return [this.run, ...this.others.filter((id) => id !== this.run)]; }

  setStrips() {
    for (const strip of this.strips) {
      const described = new Map();
      for (const id of this.ids()) {
        const chart = (this.overviews.get(id) ?? this.lines.get(id))?.charts?.find((each) => each.metric === strip.metric);
        if (chart) described.set(id, chart);
      }
      strip.setRuns(this.ids(), described);
    }
    fill(this.legend, this.legendOf(this.ids()));
  }

  // The colour and dash of each run, where there are several.
  legendOf(ids) {
    return this.others.length ? ids.map((id) => [id, this.ids().indexOf(id)]).map(([id, i]) => el("span", { class: "legend-run", "--c": lineColour(i) }, el("span", { class: `swatch dash${i}`, "aria-hidden": "true" }), this.lines.get(id)?.name ?? id)) : null;
  }

  async loadStrips(ids) {
    await Promise.all(this.strips.flatMap((strip) => ids.map((id) => strip.load(id).catch((trouble) => { strip.state.hidden = false; strip.state.textContent = trouble.message; }))));
    this.measure();
    for (const strip of this.strips) strip.show();
    requestAnimationFrame(() => performance.mark("charts"));
    if (this.axis.range) this.strips.forEach((strip) => strip.refine());
  }

  // How far the axis reaches, and when each step was.
  measure() {
    let low = Infinity;
    let high = -Infinity;
    for (const id of this.ids()) {
      const known = this.strips.map((strip) => strip.all.get(id)).filter((data) => data?.steps.length);
      if (!known.length) continue;
      const longest = known.reduce((a, b) => (b.steps.length > a.steps.length ? b : a));
      const start = Math.min(...known.map((data) => data.times[0])); // the first reading: the record may be of an older run
      for (const strip of this.strips) strip.starts.set(id, start);
      this.axis.clocks.set(id, { steps: longest.steps, seconds: longest.times.map((time) => time - start) });
      if (this.axis.mode === "step") {
        low = Math.min(low, ...known.map((data) => data.steps[0]));
        high = Math.max(high, ...known.map((data) => data.last));
      } else {
        low = 0;
        high = Math.max(high, ...known.map((data) => data.times.at(-1) - start));
      }
    }
    if (low < Infinity) this.axis.setFull(low, high);
    this.strips.forEach((strip) => strip.chart.setRange());
    this.drawMarks();
  }

  ranged(zoomed) {
    this.zoomed.hidden = !this.axis.range;
    this.strips.forEach((strip) => strip.chart.setRange());
    this.lanes.forEach((lane) => lane.draw());
    this.heatmap.draw();
    if (!zoomed) return;
    clearTimeout(this.refining);
    this.refining = setTimeout(() => {
      this.strips.forEach((strip) => strip.refine().catch(() => {}));
      this.heatmap.refresh();
    }, this.axis.range ? 60 : 0);
  }

  setMode(mode) {
    this.axis.range = null;
    this.axis.mode = mode;
    for (const button of this.modes.children) button.setAttribute("aria-pressed", String(button.dataset.value === mode));
    this.strips.forEach((strip) => { strip.stretch.clear(); strip.chart.shape = ""; });
    this.measure();
    this.strips.forEach((strip) => strip.show());
    this.axis.tell(true);
  }

  toggleMode() { this.setMode(this.axis.mode === "step" ? "time" : "step"); }

  drawMarks() {
    const overview = this.overviews.get(this.run);
    if (!overview) return;
    const drawn = this.ids().filter((id) => this.overviews.has(id));
    const findings = (id) => this.overviews.get(id).findings;
    const owner = drawn.find((id) => findings(id).some((finding) => finding.key === this.chosen));
    const chosen = owner && findings(owner).find((finding) => finding.key === this.chosen);
    const at = (where, id = this.run) => this.axis.x(id, where);
    const marks = overview.findings.filter((finding) => finding.severity !== "info").slice(0, 60).map((finding) => ({ x: at(finding.first_step), colour: severityColour(finding.severity), strong: finding === chosen }));
    const shade = chosen ? { from: at(chosen.first_step, owner), to: at((chosen.last_step ?? this.overviews.get(owner).last_step) + 1, owner), colour: severityColour(chosen.severity) } : null;
    this.strips.forEach((strip) => strip.chart.setMarks(marks, shade));
    this.drawLanes(drawn);
  }

  newLane() { return new Lane({ axis: this.axis, onfinding: (finding, run) => this.openFinding(finding, run), onaction: showActions }); }

  // A lane for each of these runs, named where there are several.
  drawLanes(drawn) {
    while (this.lanes.length < drawn.length) {
      this.lanes.push(this.newLane());
      this.laneHost.append(this.lanes.at(-1).element);
    }
    for (const lane of this.lanes.splice(drawn.length)) lane.element.remove();
    for (const [i, id] of drawn.entries()) {
      const number = this.ids().indexOf(id);
      this.lanes[i].chosen = this.chosen;
      this.lanes[i].set(id, this.overviews.get(id), drawn.length > 1 ? { name: this.lines.get(id)?.name ?? id, colour: lineColour(number), dash: number } : null);
    }
  }

  drawWords() {
    const overview = this.overviews.get(this.run);
    document.title = `${LEVEL_SIGNS[overview.level]} ${overview.name} · gradvitals`;
    const words = LEVEL_WORDS[overview.level];
    const rest = overview.line.startsWith(`${words}:`) ? overview.line.slice(words.length + 1) : overview.line;
    const open = overview.findings.filter((finding) => finding.open && finding.severity !== "info");
    const chips = open.slice(0, CHIPS);
    const more = open.length - chips.length;
    const made = [
      el("p", { class: "verdict-line" }, el("span", { class: `level ${overview.level}`, "aria-hidden": "true", text: LEVEL_SIGNS[overview.level] }), el("strong", { class: `word ${overview.level}`, text: overview.level === "unknown" ? words : overview.line.startsWith("Nothing") ? "Early" : words }), el("span", { class: "verdict-rest", text: ` ${rest.trim()}` })),
      overview.fix ? el("div", { class: "remedy" },
        overview.cause ? el("p", {}, el("span", { class: "label", text: "Likely cause" }), el("span", { text: overview.cause })) : null,
        el("p", { class: "fix" }, el("span", { class: "label", text: "Fix" }), el("span", { text: overview.fix })),
        overview.snippet ? el("pre", { class: "snippet", text: overview.snippet }) : null) : null,
      chips.length ? el("div", { class: "chips" }, chips.map((finding) => el("button", { type: "button", class: `chip ${finding.severity}`, title: finding.title, onclick: () => this.openFinding(finding) }, el("span", { class: "sign", "aria-hidden": "true", text: SIGNS[finding.severity] }), el("span", { class: "chip-text", text: finding.name }))), more > 0 ? el("a", { href: "#findings", class: "dim", text: `and ${more} more` }) : null) : null,
    ];
    // A live region is only touched when its words change: screen readers say what is put into it.
    const text = made.map((part) => part?.textContent).join("\n");
    if (this.verdict.dataset.text !== text || !this.judged.isConnected) { this.verdict.dataset.text = text; this.verdict.className = `verdict ${overview.level}`; fill(this.verdict, made, this.judged); }
    const counts = overview.state === "running" && overview.level !== "unknown" && overview.judged_step !== null;
    this.judged.textContent = counts ? `Judged up to step ${step(overview.judged_step)}` : "";
    this.judged.hidden = !counts;
    this.drawFindings(overview);
    this.drawFacts(overview);
    this.drawMarks();
  }

  drawFindings(overview) {
    const open = new Set([...this.findings.querySelectorAll("details[open]")].map((each) => each.dataset.key));
    const focused = this.findings.contains(document.activeElement) ? document.activeElement.parentElement?.dataset.key : null;
    const calls = { onopen: (kind, row) => this.openTensor(kind, row), onzoom: (finding) => this.zoomTo(finding) };
    const hidden = overview.num_findings - overview.findings.length;
    fill(this.findings,
      el("div", { class: "card-head" }, el("h2", { id: "findings", text: "Findings" }), el("span", { class: "dim", text: overview.findings.length ? `${overview.num_findings}, worst first` : "" })),
      overview.findings.length ? null : el("p", { class: "dim", text: overview.last_step === null ? "No readings yet." : "No findings." }),
      overview.findings.map((finding) => {
        const key = `${finding.id} ${finding.first_step} ${finding.rank}`;
        const details = el("details", { class: `finding ${finding.severity}${finding.open ? "" : " over"}`, "data-key": key, open: open.has(key) },
          el("summary", {}, severityTag(finding), el("span", { class: "finding-title", text: finding.title }), el("span", { class: "dim when", text: finding.when })));
        let filled = false;
        const write = () => { if (details.open && !filled) { filled = true; details.append(el("div", { class: "finding-body" }, findingBody(finding, calls).slice(1))); } };
        details.addEventListener("toggle", write);
        write();
        return details;
      }),
      hidden > 0 ? el("p", { class: "dim", text: `${hidden} more; gradvitals doctor -v lists them all.` }) : null,
      overview.acted.length ? el("div", { class: "acted" }, el("h3", { text: "Actions" }), overview.acted.map((line) => el("p", { text: line[0].toUpperCase() + line.slice(1) }))) : null,
      overview.monitoring.length ? el("div", { class: "acted" }, el("h3", { text: "Monitoring" }), overview.monitoring.map((note) => el("p", { text: `${note.title} (step ${step(note.step)})` }))) : null);
    if (focused) this.findings.querySelector(`[data-key="${CSS.escape(focused)}"] > summary`)?.focus();
  }

  drawFacts(overview) {
    const seconds = (overview.heard_at ?? 0) - (overview.started_at ?? 0);
    const facts = [
      ["State", { running: "running", finished: "finished", stopped: "cut off: the process ended without closing the run" }[overview.state] ?? overview.state],
      ["Last step", step(overview.last_step)], ["Recorded over", duration(seconds)],
      ["Started", overview.started_at ? new Date(overview.started_at * 1000).toLocaleString() : "–"],
      ["Watched", `${count(overview.num_parameters)} parameters in ${count(overview.num_tensors)} tensors`],
      ["Ranks", overview.num_ranks > 1 ? String(overview.num_ranks) : null], ["Machine", overview.host],
      ["Readings lost", overview.dropped ? count(overview.dropped) : null],
    ];
    fill(this.facts, el("dl", {}, facts.filter(([, value]) => value).map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", { text: value })))));
  }

  async loadWorst() {
    const run = this.run;
    this.done.worst = Date.now();
    let found;
    try { found = await api.worst(run); } catch (trouble) { found = { lists: [], trouble: trouble.message }; }
    if (run !== this.run) return;
    const buttons = () => [...this.worst.querySelectorAll("button")];
    const focused = buttons().indexOf(document.activeElement);
    fill(this.worst, el("div", { class: "card-head" }, el("h2", { text: "Worst tensors" })),
      found.lists.length ? null : el("p", { class: "dim", text: found.trouble || "This run has no readings of single tensors." }),
      el("div", { class: "worst" }, found.lists.map((list) => el("table", {}, el("caption", { text: list.title, title: this.texts[list.metric] }), el("thead", {}, el("tr", {}, ["Tensor", "Value", "Step"].map((text) => el("th", { scope: "col" }, el("span", { class: "unseen", text }))))),
        el("tbody", {}, list.rows.map((item) => el("tr", {}, el("td", {}, tensorButton(item, (kind, row) => this.openTensor(kind, row))), el("td", { class: "n", text: number(item.value) }), el("td", { class: "n dim", text: `at ${step(item.step)}`, title: `step ${step(item.step)}` }))))))));
    if (focused >= 0) buttons()[focused]?.focus({ preventScroll: true }); // the same place in the lists
  }

  openFinding(finding, run = this.run) {
    this.chosen = finding.key;
    this.drawMarks();
    const title = run === this.run ? finding.title : `${this.lines.get(run)?.name ?? run}: ${finding.title}`;
    showFinding({ ...finding, title }, {
      onopen: (kind, row) => this.openTensor(kind, row, null, run), onzoom: (each) => this.zoomTo(each, run),
      closed: () => { this.chosen = null; this.drawMarks(); },
    });
  }

  nextFinding() {
    const findings = this.overviews.get(this.run)?.findings ?? [];
    if (!findings.length) return;
    const at = findings.findIndex((finding) => finding.key === this.chosen);
    this.openFinding(findings[(at + 1) % findings.length]);
  }

  zoomTo(finding, run = this.run) {
    const end = finding.last_step ?? this.overviews.get(run).last_step;
    const room = Math.max(20, 0.5 * (end - finding.first_step));
    const ends = [finding.first_step - room, end + room].map((at) => this.axis.x(run, at));
    this.axis.setRange(...ends);
  }

  // The same tensor, layer or head of all runs that are drawn. at: the step that was pointed at, if any.
  async openTensor(kind, row, at = null, from = this.run) {
    const found = await Promise.all(this.ids().map(async (id) => ({ id, layout: id === this.run ? this.layout : await this.layoutOf(id).catch(() => NO_LAYOUT) })));
    const names = (layout) => (kind === "layers" ? layout.layers.map((layer) => layer.name) : layout[kind]);
    const source = found.find((each) => each.id === from);
    const name = source && names(source.layout)[row];
    if (name === undefined) return;
    const runs = found.map(({ id, layout }) => ({ id, row: id === from ? row : names(layout).indexOf(name), charts: this.overviews.get(id)?.[CHARTS[kind]] ?? [] }));
    const drawn = runs.filter((each) => each.row >= 0);
    showTensor(this.ids(), drawn, kind, {
      name,
      about: kind === "tensors" ? `${source.layout.shapes[row] ?? ""} · every reading of this tensor` : kind === "heads" ? "attention head" : "layer",
      legend: this.legendOf(drawn.map((each) => each.id)), texts: this.texts, live: this.opened, at,
      range: this.axis.range && this.axis.mode === "step" ? this.axis.range : null,
    });
  }

  // Something was written to a run that is shown.
  async news(news) {
    const before = this.overviews.get(news.run);
    if (!before || !this.ids().includes(news.run) || news.gone) return;
    const again = news.segments !== before.segments || (news.last_step ?? 0) < (before.last_step ?? 0);
    const told = news.findings !== before.told || news.live !== (before.state === "running") || before.last_step === null;
    if (!again && !told && news.last_step === before.last_step) return this.extend(news.run); // the words may have come first
    Object.assign(before, { segments: news.segments, last_step: news.last_step, told: news.findings });
    const now = Date.now();
    const due = told || again ? 0 : this.done.overview + OVERVIEW_EVERY - now;
    if (news.run === this.run && due <= 0) this.refreshWords();
    else if (news.run === this.run) this.refreshLater(due); // these may be the last news for a long time
    if (news.run !== this.run && (told || again)) this.inTime(`lane ${news.run}`, OVERVIEW_EVERY, () => this.refreshLane(news.run));
    if (again) await this.loadStrips([news.run]);
    else await this.extend(news.run);
    if (news.run === this.run) this.drawFacts(this.overviews.get(news.run));
    for (const [load, runs] of this.opened) if (runs.includes(news.run)) load(true);
    if (this.heatmap.shows(news.run)) this.inTime("heatmap", HEATMAP_EVERY, () => this.heatmap.refresh());
    if (news.run === this.run) this.inTime("worst", WORST_EVERY, () => this.loadWorst());
  }

  // Now, or as soon as it is due again: these may be the last news for a long time.
  inTime(what, every, work) {
    const now = () => { this.due[what] = undefined; this.done[what] = Date.now(); work(); };
    const after = (this.done[what] ?? 0) + every - Date.now();
    if (after <= 0) { clearTimeout(this.due[what]); now(); } else this.due[what] ??= setTimeout(now, after);
  }

  // What was written since the charts were drawn. Whoever is about to name a step waits for it.
  async extend(run) {
    await Promise.all(this.strips.map((strip) => strip.extend(run).catch(() => {})));
    this.measure();
    const last = Math.max(...this.strips.map((strip) => strip.all.get(run)?.last ?? -1));
    requestAnimationFrame(() => window.dispatchEvent(new CustomEvent("drawn", { detail: { run, last } })));
  }

  // The list of runs was asked anew, and may know of later steps than the charts.
  async catchUp(lines) {
    const going = lines.filter((line) => line.state === "running" && this.ids().includes(line.id));
    await Promise.all(going.map((line) => this.extend(line.id)));
    const ahead = going.find((line) => line.id === this.run);
    const known = this.overviews.get(this.run);
    if (ahead && known && ahead.last_step !== null) this.drawFacts({ ...known, last_step: Math.max(ahead.last_step, known.last_step ?? 0) });
  }

  // What was found in a run beside the current one.
  async refreshLane(run) {
    try {
      this.keep(run, await api.overview(run));
      this.drawMarks();
    } catch { /* the next news will ask again */ }
  }

  refreshLater(after) {
    if (this.later === undefined) this.later = setTimeout(() => this.refreshWords(), after);
  }

  async refreshWords() {
    clearTimeout(this.later);
    this.later = undefined;
    this.done.overview = Date.now();
    const run = this.run;
    const turn = this.asked = (this.asked ?? 0) + 1;
    try {
      const found = await api.overview(run);
      if (run !== this.run || turn < this.answered) return; // an answer that was long on its way replaces no newer one
      this.answered = turn;
      const before = this.overviews.get(run);
      const shown = (overview) => JSON.stringify([overview.charts, overview.pictures]); // a source may give way to another
      this.keep(run, found);
      if (shown(found) !== shown(before) || (!this.layout.layers.length && found.num_tensors)) {
        this.layouts.delete(run);
        this.layout = await this.layoutOf(run);
        this.setStrips();
        this.setHeatmap();
        await this.loadStrips([run]);
      } else if (found.last_step !== before.last_step) await this.extend(run);
      if (run !== this.run) return;
      this.drawWords();
    } catch { /* the next news will ask again; a lost connection is told at the top */ }
  }

  // After a time without a connection, or with the page hidden: everything again.
  async refreshAll() {
    if (!this.run) return;
    await this.refreshWords();
    await this.loadStrips(this.ids());
    this.heatmap.refresh();
    this.loadWorst();
  }

  restyle() {
    this.strips.forEach((strip) => { strip.show(); strip.chart.restyle(); });
    this.setStrips();
    this.drawMarks();
    this.heatmap.restyle();
  }
}
