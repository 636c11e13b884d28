// What the colours of the heatmap stand for: how large a number is, or how much larger in one run than in the other.
import { css, el } from "./dom.js";
import { number } from "./format.js";
import { HEAT, differ, heat, packed } from "./palette.js";

const WIDE = 128; // of the bar in the legend

// From dark to light by the logarithm.
export class SizeScale {
  constructor(tables, rows, picture) {
    [this.low, this.high] = extent(tables, rows);
    this.picture = picture;
  }

  // A function from a value that is known to a pixel.
  pixels() {
    const [low, high] = [Math.log(this.low), Math.log(this.high)];
    const bad = rgba(css("--critical"));
    const below = this.picture === "gsnr" ? rgba(css("--below")) : HEAT[0];
    return (value) => {
      if (!Number.isFinite(value)) return bad;
      return value <= 0 ? below : HEAT[Math.max(0, Math.min(255, Math.round((255 * (Math.log(value) - low)) / (high - low))))];
    };
  }

  legend() {
    return [el("span", { text: number(this.low) }), bar(heat), el("span", { text: number(this.high) }), el("span", { class: "key bad", text: "NaN or Inf" }),
      this.picture === "gsnr" ? el("span", { class: "key below", text: "0 or less" }) : null];
  }
}

// From one colour for smaller to another for larger, grey where both runs are alike.
export class RatioScale {
  constructor(tables, rows, picture) {
    const [low, high] = extent(tables, rows);
    this.most = Math.min(1e6, Math.max(1.25, 1 / low, high));
    this.picture = picture;
  }

  pixels() {
    const most = Math.log(this.most);
    const dark = window.gradvitalsTheme.isDark();
    const shades = Uint32Array.from({ length: 257 }, (_, i) => packed(differ(i / 256, dark)));
    const bad = rgba(css("--ink")); // the colour of what is critical is too near to that of what is larger
    const below = rgba(css("--below"));
    return (value) => {
      if (!Number.isFinite(value)) return bad;
      return value <= 0 ? below : shades[Math.max(0, Math.min(256, Math.round(128 + (128 * Math.log(value)) / most)))];
    };
  }

  legend() {
    const dark = window.gradvitalsTheme.isDark();
    const most = number(this.most);
    return [el("span", { text: `smaller, ÷ ${most}` }), bar((share) => differ(share, dark)), el("span", { text: `× ${most}, larger` }), el("span", { class: "key ink", text: "NaN or Inf in one" }),
      this.picture === "gsnr" ? el("span", { class: "key below", text: "0 or less in one" }) : null];
  }
}

function bar(colour) {
  const made = el("canvas", { class: "heat-bar", width: WIDE, height: 10, "aria-hidden": "true" });
  const context = made.getContext("2d");
  for (let i = 0; i < WIDE; i++) { const [r, g, b] = colour(i / (WIDE - 1)); context.fillStyle = `rgb(${r}, ${g}, ${b})`; context.fillRect(i, 0, 1, 10); }
  return made;
}

// Ends of the colour scale: the middle 98 % of what is positive, of each kind of row, so that one spike does not
// blacken the rest and tensors do not blacken layers.
function extent(tables, rows) {
  let low = Infinity;
  let high = 0;
  for (const [kind, table] of tables) {
    const sizes = [];
    for (const { row } of rows.filter((each) => each.kind === kind)) {
      for (const value of table.values.subarray(row * table.columns, (row + 1) * table.columns)) if (value > 0 && Number.isFinite(value)) sizes.push(value);
    }
    if (!sizes.length) continue;
    sizes.sort((a, b) => a - b);
    low = Math.min(low, sizes[Math.floor(0.01 * sizes.length)]);
    high = Math.max(high, sizes[Math.floor(0.99 * (sizes.length - 1))]);
  }
  if (!high) return [0.1, 1];
  return high > 1.001 * low ? [low, high] : [low / 2, high * 2];
}

function rgba(colour) {
  const value = parseInt(colour.slice(1), 16);
  return packed([value >> 16, (value >> 8) & 255, value & 255]);
}
