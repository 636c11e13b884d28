// Numbers under the pointer. The page is whole without it.
"use strict";
const short = (value) => (value === null || value === undefined ? "-" : String(Number(value.toPrecision(3))));
const nearest = (sorted, x) => {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (sorted[middle] < x) low = middle; else high = middle; }
  return x - sorted[low] < sorted[high] - x ? low : high;
};
for (const timeline of document.querySelectorAll(".timeline")) {
  const first = Number(timeline.dataset.first), last = Math.max(Number(timeline.dataset.last), first + 1);
  const lanes = [...timeline.querySelectorAll(".lane.curve")].map((lane) => {
    const svg = lane.querySelector("svg");
    return { plot: svg.parentElement, now: lane.querySelector(".now"), x: JSON.parse(svg.dataset.x), y: JSON.parse(svg.dataset.y) };
  });
  const heats = [...timeline.querySelectorAll(".heatmap")].map((map) => {
    const image = map.querySelector("img.heat");
    return { map, image, plot: image.parentElement, at: map.querySelector(".at"), names: JSON.parse(map.dataset.names) };
  });
  const lines = [...lanes, ...heats].map(({ plot }) => plot.appendChild(Object.assign(document.createElement("i"), { className: "cross", hidden: true })));
  const pixels = (image) => {
    const canvas = Object.assign(document.createElement("canvas"), { width: image.naturalWidth, height: image.naturalHeight });
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(image, 0, 0);
    return context.getImageData(0, 0, canvas.width, canvas.height);
  };
  const colour = (data, at) => (data[at] << 16) | (data[at + 1] << 8) | data[at + 2];
  const value = (heat, column, row) => {
    heat.pixels ??= pixels(heat.image);
    const at = 4 * (row * heat.pixels.width + column), data = heat.pixels.data;
    if (!data[at + 3]) return "-";
    if (!heat.shades) {
      const ramp = pixels(heat.map.querySelector(".ramp"));
      heat.shades = new Map(Array.from({ length: ramp.width }, (_, i) => [colour(ramp.data, 4 * i), i / (ramp.width - 1)]));
    }
    const share = heat.shades.get(colour(data, at));
    const low = Number(heat.image.dataset.low), high = Number(heat.image.dataset.high);
    return share === undefined ? "NaN or Inf" : short(low * (high / low) ** share);
  };
  const leave = () => {
    lines.forEach((line) => { line.hidden = true; });
    lanes.forEach(({ now }) => { now.textContent = now.dataset.latest; });
    heats.forEach(({ at }) => { at.textContent = ""; });
  };
  timeline.addEventListener("pointerleave", leave);
  timeline.addEventListener("pointermove", (event) => {
    const under = (event.target.closest(".plot") ?? {}).getBoundingClientRect?.();
    if (!under || event.clientX < under.left || event.clientX > under.right) { leave(); return; }
    const share = (event.clientX - under.left) / under.width, step = first + share * (last - first);
    lines.forEach((line) => { line.hidden = false; line.style.left = `${100 * share}%`; });
    lanes.forEach(({ now, x, y }) => {
      const at = nearest(x, step);
      now.textContent = `${short(y[at])} at ${Math.round(x[at]).toLocaleString("en")}`;
    });
    heats.forEach((heat) => {
      const inside = heat.plot.contains(event.target);
      const rows = heat.image.naturalHeight, columns = heat.image.naturalWidth;
      const box = heat.image.getBoundingClientRect();
      const row = Math.min(rows - 1, Math.floor((event.clientY - box.top) / box.height * rows));
      const column = Math.min(columns - 1, Math.floor(share * columns));
      const name = heat.names[row];
      heat.at.textContent = inside && row >= 0 ? `${name.length > 40 ? `…${name.slice(-39)}` : name}, step ${Math.round(step).toLocaleString("en")}: ${value(heat, column, row)}` : "";
    });
  });
}
