// What the server says, decoded.

export class Trouble extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const LIMIT = 30000; // milliseconds for an answer to be there, all of it; others wait for it

// The answer, read as "json" or "arrayBuffer".
async function get(path, kind = "json") {
  try {
    return await read(await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(LIMIT) }), kind);
  } catch (trouble) {
    throw trouble instanceof Trouble ? trouble : new Trouble("The server does not respond.", 0);
  }
}

async function read(answer, kind) {
  if (answer.ok) return answer[kind]();
  let text = `The server returned ${answer.status}.`;
  try { text = (await answer.json()).error || text; } catch { /* not ours */ }
  throw new Trouble(text, answer.status);
}

function query(values) {
  const made = new URLSearchParams();
  for (const [key, value] of Object.entries(values)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== undefined && each !== null) made.append(key, String(each));
    }
  }
  return made;
}

const about = (run) => `/api/runs/${encodeURIComponent(run)}`;

export async function runs() {
  const early = await window.gradvitalsEarly; // what was asked for while the page was loading, once
  window.gradvitalsEarly = null;
  return early ?? get("/api/runs");
}
export function overview(run) { return get(about(run)); }
export function layout(run) { return get(`${about(run)}/layout`); }
export function diff(run, other) { return get(`${about(run)}/diff?${query({ with: other })}`); }
export function worst(run) { return get(`${about(run)}/worst`); }

// A series: steps, times, and for each metric the lowest, highest and mean value of each bucket, and how many are no numbers.
export async function series(run, asked) {
  const body = await get(`${about(run)}/series?${query(asked)}`, "arrayBuffer");
  const head = new DataView(body);
  const points = head.getUint32(0, true);
  const metrics = head.getUint32(4, true);
  let at = 24 + 8 * metrics;
  const take = (kind, size) => {
    const array = new kind(body, at, points);
    at += points * size;
    return array;
  };
  const found = {
    readings: head.getFloat64(8, true), last: head.getFloat64(16, true),
    now: Array.from(new Float64Array(body, 24, metrics)), // the last reading of each metric
    steps: take(Float64Array, 8), times: take(Float64Array, 8), lines: [],
  };
  for (let i = 0; i < metrics; i++) {
    found.lines.push({ low: take(Float32Array, 4), high: take(Float32Array, 4), mean: take(Float32Array, 4), bad: take(Float32Array, 4) });
  }
  return found;
}

// A picture: the first step of each column, and one value for each row and column.
export async function heatmap(run, asked) {
  const body = await get(`${about(run)}/heatmap?${query(asked)}`, "arrayBuffer");
  const head = new DataView(body);
  const rows = head.getUint32(0, true);
  const columns = head.getUint32(4, true);
  return {
    rows, columns, end: head.getFloat64(8, true), last: head.getFloat64(16, true),
    starts: new Float64Array(body, 24, columns),
    values: columns ? new Float32Array(body, 24 + 8 * columns, rows * columns) : new Float32Array(0),
  };
}
