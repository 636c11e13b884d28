// Questions to the table behind the heatmap, and two tables made one: how much larger the numbers of one run are.

const FAR = 1e30; // as large as a ratio gets, where one of the two is zero
export const BELOW = -1; // a ratio of numbers that are not positive

// The first step of a column, and the first one after it.
export function span(table, column) {
  return [table.starts[column], column + 1 < table.columns ? table.starts[column + 1] : table.end];
}

// The column that a step is in, -1 for none.
export function columnAt(table, wanted) {
  if (!table.columns || wanted < table.starts[0] || wanted > table.end) return -1;
  let low = 0;
  let high = table.columns - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (table.starts[middle] <= wanted) low = middle; else high = middle - 1;
  }
  return low;
}

// The numbers of another run over those of a run, row by row and stretch by stretch. Both tables say a thing of each
// stretch (its largest number, or its mean), so a column here holds the same stretch of both: as many whole columns of
// either as it takes.
//   rowOf: for each row of the run that of the other, -1 for none
//   place: from a step of the other run to that of the run which it is compared with
export function ratios(run, other, rowOf, place, averaged) {
  const joint = together(run, Array.from(other.starts, place), place(other.end));
  const columns = joint.length;
  const made = { rows: run.rows, columns, starts: Float64Array.from(joint, (each) => run.starts[each.from]), end: columns ? span(run, joint[columns - 1].to - 1)[1] : 0, last: run.last };
  for (const name of ["values", "own", "others"]) made[name] = new Float32Array(run.rows * columns).fill(NaN);
  for (let row = 0; row < run.rows; row++) {
    if (rowOf[row] < 0) continue;
    for (const [c, each] of joint.entries()) {
      const at = row * columns + c;
      made.own[at] = reduced(run, row, each.from, each.to, averaged);
      made.others[at] = reduced(other, rowOf[row], each.otherFrom, each.otherTo, averaged);
      made.values[at] = ratio(made.own[at], made.others[at], averaged);
    }
  }
  return made;
}

// Which columns of two tables hold the same steps: [from, to) of the one and of the other.
function together(table, starts, end) {
  const joint = [];
  let next = 0;
  while (next < starts.length && (next + 1 < starts.length ? starts[next + 1] : end) <= table.starts[0]) next++;
  for (let c = 0; c < table.columns; c++) {
    const [first, after] = span(table, c);
    if (!(first < end)) break;
    const from = next;
    while (next < starts.length && starts[next] < after) next++;
    if (next > from) joint.push({ from: c, to: c + 1, otherFrom: from, otherTo: next });
    else if (joint.length) joint[joint.length - 1].to = c + 1; // the other's column that began earlier goes on here
  }
  return joint;
}

function reduced(table, row, from, to, averaged) {
  let found = NaN;
  let known = 0;
  for (let c = from; c < to; c++) {
    const value = table.values[row * table.columns + c];
    if (Number.isNaN(value)) continue;
    found = !known++ ? value : averaged ? found + value : Math.max(found, value);
  }
  return averaged && known ? found / known : found;
}

function ratio(own, other, averaged) {
  if (Number.isNaN(own) || Number.isNaN(other)) return NaN;
  if (!Number.isFinite(own) || !Number.isFinite(other)) return Infinity;
  if (averaged && (own <= 0 || other <= 0)) return BELOW;
  if (own === other) return 1;
  return Math.min(FAR, Math.max(1 / FAR, other / own));
}
