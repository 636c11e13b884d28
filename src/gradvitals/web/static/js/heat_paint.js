// Draws the heatmap onto its canvas. `map` is the Heatmap; `box` says where: {rows, first, last, top, left, plot, height}.
import { css } from "./dom.js";
import { duration, step } from "./format.js";

export const ROW = 16;

// Cells are written pixel by pixel into an image as wide as the plot, then stretched over each row.
export function paintCells(context, map, { rows, first, last, top, left, plot }) {
  if (!map.tables.get("layers")?.columns || !map.scale) return;
  const wide = Math.round(plot);
  const image = new ImageData(wide, Math.max(1, last - first));
  const pixels = new Uint32Array(image.data.buffer);
  const colour = map.scale.pixels();
  const columns = new Map([...map.tables].map(([kind, table]) => [kind, columnsOf(map, table, wide)]));
  for (let r = first; r < last; r++) {
    const table = map.tables.get(rows[r].kind);
    if (!table) continue;
    const own = columns.get(rows[r].kind);
    const from = rows[r].row * table.columns;
    for (let x = 0; x < wide; x++) {
      if (own[x] < 0) continue;
      const value = table.values[from + own[x]];
      if (!Number.isNaN(value)) pixels[(r - first) * wide + x] = colour(value);
    }
  }
  const canvas = document.createElement("canvas");
  canvas.width = image.width;
  canvas.height = image.height;
  canvas.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  for (let r = first; r < last; r++) {
    const gap = rows[r].depth ? 0 : 1;
    context.drawImage(canvas, 0, r - first, image.width, 1, left, r * ROW - top + gap, plot, ROW - gap);
  }
}

// Which column of a table each pixel shows, -1 for none.
function columnsOf(map, table, wide) {
  const [low, high] = map.axis.shown();
  const place = (at) => (wide * (map.axis.x(map.run, at) - low)) / (high - low);
  const found = new Int32Array(wide).fill(-1);
  const places = Array.from(table.starts, place);
  const end = place(table.end);
  for (let c = 0; c < places.length; c++) {
    const from = Math.max(0, Math.round(places[c]));
    const to = Math.min(wide, Math.max(from + 1, Math.round(c + 1 < places.length ? places[c + 1] : Math.max(end, places[c] + 3))));
    for (let x = from; x < to; x++) found[x] = c;
  }
  return found;
}

export function paintNames(context, map, { rows, first, last, top, left }) {
  const ink = css("--ink");
  const dim = css("--dim");
  context.textBaseline = "middle";
  for (let r = first; r < last; r++) {
    const { name, depth, kind, layer, inner } = rows[r];
    const y = r * ROW - top + ROW / 2 + 0.5;
    context.font = depth ? "10.5px ui-monospace, monospace" : "11.5px ui-monospace, monospace";
    context.fillStyle = depth ? dim : ink;
    if (kind === "layers" && inner > 1) context.fillText(map.expanded.has(layer) ? "▾" : "▸", 2, y);
    context.fillText(fitted(context, name, left - (depth ? 26 : 20) - 6), depth ? 26 : 15, y);
  }
}

export function paintAxis(context, map, { left, plot, height }) {
  if (!map.axis.isKnown) return;
  const [low, high] = map.axis.shown();
  context.fillStyle = css("--dim");
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "top";
  // On the axis of time the picture may reach beyond the last step of this run, to the end of a longer one.
  const name = (x) => (map.axis.mode === "time" ? duration(x) : `step ${step(Math.round(x))}`);
  context.fillText(name(low), left, height + 6);
  const text = name(high);
  context.fillText(text, left + plot - context.measureText(text).width, height + 6);
}

// Where the cursor is, and the cell that is pointed at.
export function paintCursor(context, map, { rows, top, left, plot, height }) {
  const [low, high] = map.axis.shown();
  const place = (x) => (plot * (x - low)) / (high - low);
  if (map.cursorX !== null && map.cursorX !== undefined) {
    const x = left + place(map.cursorX);
    if (x >= left && x <= left + plot) { context.fillStyle = css("--ink"); context.globalAlpha = 0.5; context.fillRect(x, 0, 1, height); context.globalAlpha = 1; }
  }
  const row = map.cell && rows[map.cell.index];
  if (!row || !map.tables.get("layers")?.columns) return;
  const y = map.cell.index * ROW - top;
  if (y < -ROW || y > height) return;
  const [x0, x1] = map.value(row, map.cell.at).steps.map((at) => left + Math.max(0, Math.min(plot, place(map.axis.x(map.run, at)))));
  context.lineWidth = 2;
  context.strokeStyle = css("--bg");
  context.strokeRect(x0 - 1.5, y - 0.5, Math.max(3, x1 - x0) + 3, ROW + 1);
  context.lineWidth = 1.5;
  context.strokeStyle = css("--ink");
  context.strokeRect(x0 - 0.5, y + 0.5, Math.max(3, x1 - x0) + 1, ROW - 1);
}

function fitted(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let keep = Math.min(text.length, Math.floor(width / 6));
  const cut = () => `${text.slice(0, Math.ceil(keep / 3))}…${text.slice(text.length - Math.floor((2 * keep) / 3))}`;
  while (keep > 2 && context.measureText(cut()).width > width) keep -= 1;
  return cut();
}
