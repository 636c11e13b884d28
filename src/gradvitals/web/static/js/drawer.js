// The panel at the side: a finding, actions, one tensor, or the keys. One at a time; Escape closes it.
import { byId, el, fill } from "./dom.js";

let opener = null;
let onclosed = null;

export function openDrawer(title, content, { closed, kind = "" } = {}) {
  const drawer = byId("drawer");
  const before = onclosed;
  onclosed = null;
  before?.();
  if (drawer.hidden) opener = document.activeElement;
  onclosed = closed || null;
  drawer.className = `drawer ${kind}`;
  const heading = el("h2", { id: "drawer-title", tabindex: "-1", text: title });
  fill(drawer, el("div", { class: "drawer-head" }, heading, el("button", { type: "button", class: "quiet", "aria-label": "Close", title: "Close (Esc)", text: "✕", onclick: closeDrawer })),
    el("div", { class: "drawer-body" }, content));
  drawer.hidden = false;
  document.body.classList.add("with-drawer");
  document.body.classList.toggle("with-wide-drawer", kind === "wide");
  heading.focus({ preventScroll: true });
}

export function closeDrawer() {
  const drawer = byId("drawer");
  if (drawer.hidden) return false;
  drawer.hidden = true;
  document.body.classList.remove("with-drawer", "with-wide-drawer");
  const call = onclosed;
  onclosed = null;
  call?.();
  fill(drawer);
  // A mark may have been drawn anew meanwhile.
  const again = opener?.isConnected ? opener : opener?.dataset.mark && document.querySelector(`[data-mark="${CSS.escape(opener.dataset.mark)}"]`);
  (again || byId("main")).focus({ preventScroll: true });
  return true;
}
