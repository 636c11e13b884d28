// Colours that colour-blind people can tell apart: lines after Okabe and Ito, each with a dash of its own as well;
// the heatmap goes from dark to light in steps that grow in lightness alone.
import { css } from "./dom.js";

const LINES = {
  light: ["#0072b2", "#d55e00", "#009e73", "#b5538a", "#8a6d00", "#3a9bd4"],
  dark: ["#56b4e9", "#f08a3c", "#2fc79a", "#e39ac4", "#f0e442", "#7f9cff"],
};
export const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [5, 2], [1, 2]];
export const MOST_RUNS = LINES.light.length;

export function lineColour(number) {
  const set = window.gradvitalsTheme.isDark() ? LINES.dark : LINES.light;
  return set[number % set.length];
}

const ANCHORS = [
  [10, 22, 58], [22, 58, 110], [38, 98, 134], [62, 136, 138], [112, 170, 128], [176, 200, 110], [244, 226, 96],
];

// How much two runs differ: blue for less, orange for more, by lightness too; the middle is a grey that is not the ground.
const DIFFER = {
  light: [[20, 86, 152], [98, 156, 208], [214, 219, 225], [228, 150, 78], [178, 82, 0]],
  dark: [[132, 200, 255], [62, 116, 172], [62, 71, 80], [176, 108, 44], [255, 184, 108]],
};

// A colour as one number of an image: little-endian, as canvases are on every machine with a browser.
export function packed([r, g, b]) { return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0; }

function along(anchors, share) {
  const at = Math.max(0, Math.min(1, share)) * (anchors.length - 1);
  const first = Math.min(anchors.length - 2, Math.floor(at));
  return anchors[first].map((from, i) => Math.round(from + (at - first) * (anchors[first + 1][i] - from)));
}

export function heat(share) { return along(ANCHORS, share); }

export function differ(share, dark) { return along(dark ? DIFFER.dark : DIFFER.light, share); }

export const HEAT = Uint32Array.from({ length: 256 }, (_, i) => packed(heat(i / 255)));

export function severityColour(severity) {
  return css(`--${severity}`);
}

export const SIGNS = { critical: "■", warning: "▲", info: "●" };
export const LEVEL_SIGNS = { healthy: "✓", attention: "▲", unhealthy: "■", pending: "…", unknown: "?" };
export const LEVEL_WORDS = { healthy: "Healthy", attention: "Needs attention", unhealthy: "Unhealthy", pending: "Loading", unknown: "No verdict" };
