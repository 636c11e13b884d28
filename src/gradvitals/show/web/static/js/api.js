// What the server says, decoded.

export class Trouble extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function get(path) {
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store" });
  } catch {
    throw new Trouble("The server does not answer.", 0);
  }
  if (!answer.ok) {
    let text = `The server answered ${answer.status}.`;
    try { text = (await answer.json()).error || text; } catch { /* not ours */ }
    throw new Trouble(text, answer.status);
  }
  return answer;
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
  return (early?.ok ? early : await get("/api/runs")).json();
}
export async function overview(run) { return (await get(about(run))).json(); }
export async function layout(run) { return (await get(`${about(run)}/layout`)).json(); }
export async function worst(run) { return (await get(`${about(run)}/worst`)).json(); }

// A series: steps, times, and for each metric the lowest, highest and mean value of each bucket, and how many are no numbers.
export async function series(run, asked) {
  const body = await (await get(`${about(run)}/series?${query(asked)}`)).arrayBuffer();
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
  const body = await (await get(`${about(run)}/heatmap?${query(asked)}`)).arrayBuffer();
  const head = new DataView(body);
  const rows = head.getUint32(0, true);
  const columns = head.getUint32(4, true);
  return {
    rows, columns, end: head.getFloat64(8, true), last: head.getFloat64(16, true),
    starts: new Float64Array(body, 24, columns),
    values: columns ? new Float32Array(body, 24 + 8 * columns, rows * columns) : new Float32Array(0),
  };
}
