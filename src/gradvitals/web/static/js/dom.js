// Elements made by hand. Whatever comes from a run is only ever set as text, never read as markup.

export function el(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "class") made.className = value;
    else if (key === "text") made.textContent = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key.startsWith("--")) made.style.setProperty(key, value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

export function fill(host, ...children) {
  host.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return host;
}

export function byId(id) {
  return document.getElementById(id);
}

let saying;
export function say(text) {
  // For screen readers: what changed, once the reader has come to rest.
  clearTimeout(saying);
  saying = setTimeout(() => { byId("said").textContent = text; }, 150);
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Buttons of which one is chosen.
export function choice(label, options, chosen, onchoose) {
  const group = el("div", { class: "choice", role: "group", "aria-label": label });
  const show = (value) => {
    for (const button of group.children) button.setAttribute("aria-pressed", String(button.dataset.value === value));
  };
  for (const [value, text, title] of options) {
    const button = el("button", { type: "button", text, title, "data-value": value, onclick: () => { show(value); onchoose(value); } });
    group.append(button);
  }
  show(chosen);
  return group;
}
