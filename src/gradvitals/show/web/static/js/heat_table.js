// Questions to the table behind the heatmap, and small help for drawing it.

// The first step of a column, and the first one after it.
export function span(table, column) {
  return [table.starts[column], column + 1 < table.columns ? table.starts[column + 1] : table.end];
}

// The column that a step is in, -1 for none.
export function columnAt(table, wanted) {
  if (wanted < table.starts[0] || wanted > table.end) return -1;
  let low = 0;
  let high = table.columns - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (table.starts[middle] <= wanted) low = middle; else high = middle - 1;
  }
  return low;
}

// Ends of the colour scale: the middle 98 % of what is positive, of each kind of row, so that one spike does not
// blacken the rest and tensors do not blacken layers.
export function extent(tables, rows) {
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

export function shortened(name, layer) {
  return name.startsWith(`${layer}.`) ? name.slice(layer.length + 1) : name;
}

export function fitted(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let keep = Math.min(text.length, Math.floor(width / 6));
  const cut = () => `${text.slice(0, Math.ceil(keep / 3))}…${text.slice(text.length - Math.floor((2 * keep) / 3))}`;
  while (keep > 2 && context.measureText(cut()).width > width) keep -= 1;
  return cut();
}

export function rgba(colour) {
  const value = parseInt(colour.slice(1), 16);
  return ((255 << 24) | ((value & 255) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}
