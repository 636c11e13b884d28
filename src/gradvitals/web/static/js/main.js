// The page: which run is looked at, which beside it, what the keys do, and what is shown while there is nothing.
import * as api from "./api.js";
import { showHelp } from "./details.js";
import { byId, el, fill } from "./dom.js";
import { closeDrawer } from "./drawer.js";
import { Live } from "./live.js";
import { RunList, newestFirst } from "./runs.js";
import { RunView } from "./view.js";

const UNSEEN_EVERY = 20000; // milliseconds from one look to the next while the page is hidden

const main = byId("main");
let runs = [];
let texts = {};
let current = null;
let compared = [];
let view = null;
let list = null;
let link = "connecting";
let pending = null;
let refreshing = Promise.resolve();

function fromAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  return { run: asked.get("run"), others: (asked.get("with") || "").split(",").filter(Boolean) };
}

function toAddress() {
  const made = new URLSearchParams();
  if (current) made.set("run", current);
  if (compared.length) made.set("with", compared.join(","));
  const hash = `#${made}`;
  if (hash !== location.hash) history.replaceState(null, "", hash);
}

function state(title, ...parts) {
  view = null;
  current = null;
  fill(main, el("div", { class: "state" }, el("h2", { text: title }), ...parts));
}

function empty(folder) {
  state("No runs yet",
    el("p", { text: `This page shows each run in ${folder} as soon as it starts.` }),
    el("p", {}, "To try it: ", el("code", { text: "gradvitals demo" })),
    el("p", {}, "In a training script: ", el("code", { text: 'monitor = gv.watch(model, optimizer, run="runs/first")' })));
}

// One after the other: a list that was asked for later names steps that an earlier one has not drawn.
function refreshRuns() {
  refreshing = refreshing.then(askForRuns).catch(() => {});
}

async function askForRuns() {
  clearTimeout(pending);
  pending = null;
  let found;
  try {
    found = await api.runs();
  } catch (trouble) {
    if (!runs.length) state("The server does not respond", el("p", { text: "Is gradvitals serve still running? This page keeps trying." }));
    return;
  }
  runs = newestFirst(found.runs);
  texts = found.metrics;
  byId("folder").textContent = found.folder;
  document.body.classList.toggle("one-run", runs.length < 2);
  if (!runs.length) { empty(found.folder); list.set([], null, []); return; }
  const asked = fromAddress();
  const known = new Set(runs.map((run) => run.id));
  if (current && !known.has(current)) current = null;
  if (!current) {
    const live = runs.filter((run) => run.state === "running");
    const latest = (live.length ? live : runs).reduce((a, b) => ((b.heard_at ?? 0) > (a.heard_at ?? 0) ? b : a));
    await open(known.has(asked.run) ? asked.run : latest.id, asked.others.filter((id) => known.has(id)));
  }
  await view?.catchUp(runs);
  list.set(runs, current, compared);
  if (runs.some((run) => run.state === "unread")) refreshSoon(50);
  else if (runs.some((run) => run.level === "pending")) refreshSoon(2000);
}

function refreshSoon(after = 400) {
  if (pending === null) pending = setTimeout(refreshRuns, after);
}

async function open(run, others = compared) {
  compared = others.filter((id) => id !== run);
  current = run;
  toAddress();
  list.set(runs, current, compared);
  if (!view) { fill(main); view = new RunView(main, texts); }
  byId("frame").classList.remove("showing-runs");
  byId("runs-button").setAttribute("aria-expanded", "false");
  try {
    await view.show(run, compared, runs);
  } catch (trouble) {
    if (run !== current) return;
    const name = runs.find((each) => each.id === run)?.name ?? "";
    state("Cannot show this run", el("p", { class: "run-name", text: name }), el("p", { text: trouble.message }));
    current = run;
  }
}

function compare(run) {
  open(current, compared.includes(run) ? compared.filter((id) => id !== run) : [...compared, run]);
}

function showLink() {
  const node = byId("link");
  const words = { connecting: "Connecting", open: "Connected", lost: "Connection lost" };
  fill(node, words[link], link === "lost" ? el("span", { class: "more-words", text: ", trying again" }) : null);
  node.className = `link ${link}`;
  document.body.classList.toggle("offline", link === "lost");
}

function showTheme() {
  const dark = window.gradvitalsTheme.isDark();
  byId("theme-button").textContent = dark ? "☀ Light" : "☾ Dark";
}

function beside(by) {
  const at = runs.findIndex((run) => run.id === current);
  const next = runs[at + by];
  if (next) open(next.id);
}

function toggleRuns() {
  const open = byId("frame").classList.toggle("showing-runs");
  byId("runs-button").setAttribute("aria-expanded", String(open));
  if (open) byId("runs").querySelector("button, input:not([hidden])")?.focus();
}

const KEYS = {
  j: () => beside(1), k: () => beside(-1), f: () => view?.nextFinding(), x: () => view?.toggleMode(), d: () => view?.heatmap.next(),
  "+": () => view?.axis.zoom(0.5), "=": () => view?.axis.zoom(0.5), "-": () => view?.axis.zoom(2), 0: () => view?.axis.reset(),
  ArrowLeft: () => view?.axis.pan(-0.2), ArrowRight: () => view?.axis.pan(0.2),
  t: () => window.gradvitalsTheme.toggle(), r: toggleRuns, "?": showHelp,
  Escape: () => { if (!closeDrawer()) { if (byId("frame").classList.contains("showing-runs")) toggleRuns(); else view?.axis.reset(); } },
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  const typing = event.target.matches?.("input[type=search], textarea, select");
  if (typing && event.key !== "Escape") return;
  if (Object.hasOwn(KEYS, event.key)) { KEYS[event.key](); event.preventDefault(); }
});

function start() {
  list = new RunList({ onopen: (run) => open(run), oncompare: compare });
  byId("runs-button").addEventListener("click", toggleRuns);
  byId("help-button").addEventListener("click", showHelp);
  byId("theme-button").addEventListener("click", () => window.gradvitalsTheme.toggle());
  window.addEventListener("themechange", () => { showTheme(); list.draw(); });
  window.addEventListener("hashchange", () => {
    const asked = fromAddress();
    if (asked.run && runs.some((run) => run.id === asked.run)) open(asked.run, asked.others);
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) { refreshRuns(); view?.refreshAll(); } });
  setInterval(() => { if (document.hidden) view?.refreshWords(); }, UNSEEN_EVERY); // the title of the tab still tells
  showTheme();
  refreshRuns();
  new Live({
    onnews: (news) => {
      const known = runs.find((run) => run.id === news.run);
      if (!known || news.gone || known.state === "error" || (known.state === "running") !== news.live) refreshSoon();
      else if (news.live) refreshSoon(5000);
      // The list names a step once it is drawn, so that no two places of the page name different ones.
      Promise.resolve(view?.news(news)).catch(() => {}).then(() => list.news(news));
    },
    onstate: (found) => {
      const back = link === "lost" && found === "open";
      link = found;
      showLink();
      if (back) { refreshRuns(); view?.refreshAll(); }
    },
  });
}

start();
