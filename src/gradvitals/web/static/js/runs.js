// The list of runs, with their verdicts; ticking one draws it beside the run that is looked at.
import { byId, el, fill } from "./dom.js";
import { ago, moment, step } from "./format.js";
import { LEVEL_SIGNS, LEVEL_WORDS, MOST_RUNS, lineColour } from "./palette.js";

const FILTER_FROM = 8;

export class RunList {
  constructor({ onopen, oncompare }) {
    this.host = byId("runs");
    this.onopen = onopen;
    this.oncompare = oncompare;
    this.runs = [];
    this.filter = "";
    this.list = el("ul", { class: "run-list" });
    this.input = el("input", { type: "search", placeholder: "Filter", "aria-label": "Filter runs by name", oninput: () => { this.filter = this.input.value.toLowerCase(); this.draw(); } });
    this.note = el("p", { class: "dim run-note" });
    this.order = el("span", { class: "dim", text: "newest first" });
    fill(this.host, el("div", { class: "runs-head" }, el("h2", { text: "Runs" }), this.order), this.input, this.list, this.note);
  }

  set(runs, current, compared) {
    this.runs = runs;
    this.current = current;
    this.compared = compared;
    this.draw();
  }

  // A step that has come, without fetching the list again.
  news(news) {
    const run = this.runs.find((each) => each.id === news.run);
    if (!run || news.gone) return;
    run.last_step = news.last_step;
    if (news.live !== (run.state === "running")) return;
    const shown = this.list.querySelector(`[data-run="${CSS.escape(run.id)}"] .run-step`);
    if (shown) shown.textContent = stepText(run);
  }

  draw() {
    const focused = document.activeElement?.closest?.(".run-list li")?.dataset.run;
    const within = document.activeElement?.tagName;
    this.order.hidden = this.runs.length < 2;
    this.input.hidden = this.runs.length < FILTER_FROM;
    const shown = this.runs.filter((run) => !this.filter || run.name.toLowerCase().includes(this.filter));
    fill(this.list, shown.map((run) => this.row(run)));
    this.note.textContent = this.runs.length > 1 ? "Check runs to compare them with the current one." : "";
    if (focused) this.list.querySelector(`[data-run="${CSS.escape(focused)}"] ${within === "INPUT" ? "input" : "button"}`)?.focus();
  }

  row(run) {
    const at = this.compared.indexOf(run.id);
    const isCurrent = run.id === this.current;
    const full = at < 0 && this.compared.length >= MOST_RUNS - 1;
    const others = this.runs.length > 1;
    const colour = isCurrent ? 0 : at >= 0 ? at + 1 : null;
    return el("li", { "data-run": run.id, class: isCurrent ? "current" : "" },
      others ? el("input", {
        type: "checkbox", checked: isCurrent || at >= 0, disabled: isCurrent || full || run.state === "error", "aria-label": `Compare ${run.name}`,
        "--c": colour === null || this.compared.length === 0 ? undefined : lineColour(colour), class: colour !== null && this.compared.length ? "coloured" : "",
        onchange: () => this.oncompare(run.id),
      }) : null,
      el("button", { type: "button", class: "run", "aria-current": isCurrent ? "true" : undefined, title: run.line, onclick: () => this.onopen(run.id) },
        el("span", { class: `level ${run.level}`, role: "img", "aria-label": LEVEL_WORDS[run.level], text: LEVEL_SIGNS[run.level] }),
        el("span", { class: "run-name", text: run.name }),
        el("span", { class: `run-step${run.state === "running" ? " live" : ""}`, text: stepText(run), title: run.started_at ? `Started ${moment(run.started_at)}` : undefined })));
  }
}

// By when they were started, which stays as it is while they train; runs of the same moment by name, those not read yet last.
export function newestFirst(runs) {
  return [...runs].sort((a, b) => (b.started_at ?? -Infinity) - (a.started_at ?? -Infinity) || (a.name < b.name ? -1 : 1));
}

function stepText(run) {
  if (run.state === "error") return "cannot be read";
  if (run.state === "unread") return "loading";
  const steps = (run.last_step ?? -1) + 1;
  const at = !steps ? "no steps yet" : run.state === "running" ? `step ${step(run.last_step)}` : `${step(steps)} step${steps === 1 ? "" : "s"}`;
  const when = run.heard_at ? ago(run.heard_at, Date.now() / 1000) : "";
  if (run.state === "running") return `${at}, running`;
  if (run.state === "stopped") return `${at}, cut off${when ? ` ${when}` : ""}`;
  return when ? `${at}, ${when}` : at;
}
