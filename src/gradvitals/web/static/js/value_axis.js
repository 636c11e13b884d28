// The axis of values: linear, by the logarithm, or, where values to be drawn by it are 0 or less, by it on both sides of 0.

// What a chart needs to know of the values it draws. linear: values up to this size around 0 are drawn as they are, the
// larger ones by their logarithm; 0 for an axis without a 0. below: how many are not above 0.
export function scaleOf(lines, log) {
  const sizes = [];
  let largest = 0;
  let smallest = Infinity;
  let below = 0;
  if (!log) return { linear: 0, below };
  for (const line of lines) {
    for (const value of line.mean) {
      if (!Number.isFinite(value)) continue;
      if (value > 0) {
        if (value > largest) largest = value;
        if (value < smallest) smallest = value;
      } else {
        below += 1;
        if (value < 0) sizes.push(-value);
      }
    }
  }
  if (!below) return { linear: 0, below };
  // What an estimate is below 0 is noise: so much of what is above 0 may be noise too, and needs no decades of its own.
  sizes.sort((a, b) => a - b);
  const size = sizes.length ? sizes[sizes.length >> 1] : Math.min(smallest, largest);
  const fit = Math.max(size, largest * 1e-6) || 1;
  return { linear: 10 ** Math.floor(Math.log10(fit)), below }; // in whole decades: it does not change with every step
}

// Where an axis begins and ends around its values.
export function spread(min, max, log, banded, linear) {
  if (min === null || max === null || !Number.isFinite(min) || !Number.isFinite(max)) return log && !linear ? [0.1, 1] : [0, 1];
  if (linear) {
    const [low, high] = [Math.asinh(Math.min(min, 0) / linear), Math.asinh(Math.max(max, 0) / linear)];
    const room = (banded ? 0.15 : 0.08) * (high - low) || 0.5;
    return [linear * Math.sinh(low - room), linear * Math.sinh(high + room)];
  }
  if (log) {
    const room = banded ? 2.2 : 1.15;
    return [min / room, max * (max > 1.2 * min ? room : 1.5)];
  }
  const room = max > min ? (banded ? 0.25 : 0.08) * (max - min) : Math.abs(max) * 0.1 || 0.5;
  return [min >= 0 && min - room < 0 ? 0 : min - room, max + room];
}

// Ticks of a log axis: powers of ten, with 2 and 5 between where there is room, or round numbers in less than a decade.
export function decades(plot, _, low, high) {
  const span = Math.log10(high / low);
  const room = Math.max(2, plot.bbox.height / devicePixelRatio / 20);
  if (!(low > 0) || !(span > 0) || !Number.isFinite(span)) return [];
  if (span < 0.7) {
    const rough = (high - low) / Math.min(4, room);
    const unit = 10 ** Math.floor(Math.log10(rough));
    const width = unit * [1, 2, 5, 10].find((times) => unit * times >= rough * 0.999);
    const first = Math.ceil(low / width);
    return Array.from({ length: Math.floor(high / width) - first + 1 }, (__, i) => Number(((first + i) * width).toPrecision(12)));
  }
  const every = Math.max(1, Math.ceil(span / room));
  const between = 3 * span <= room ? [1, 2, 5] : 1.5 * span <= room ? [1, 3] : [1];
  const made = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    if (power % every) continue;
    for (const times of between) made.push(Number((times * 10 ** power).toPrecision(3)));
  }
  return made.filter((value) => value >= low && value <= high);
}

// Ticks of an axis on both sides of 0: 0, and powers of ten with room between them.
export function bothSides(linear) {
  return (plot, _, low, high) => {
    const place = (value) => Math.asinh(value / linear);
    const apart = (20 * devicePixelRatio * (place(high) - place(low))) / plot.bbox.height;
    if (!(apart > 0) || !Number.isFinite(apart)) return [0];
    const upTo = (end) => {
      const made = [];
      let last = 0;
      for (let power = Math.round(Math.log10(linear)) - 1; 10 ** power <= end; power++) {
        for (const times of [1, 2, 5]) {
          const value = Number((times * 10 ** power).toPrecision(3));
          const next = Number((10 ** (power + 1)).toPrecision(3));
          const crowds = times > 1 && next <= end && place(next) - place(value) < apart;
          if (value > end || crowds || place(value) - last < apart) continue;
          made.push(value);
          last = place(value);
        }
      }
      return made;
    };
    return [...upTo(-low).reverse().map((value) => -value), 0, ...upTo(high)];
  };
}
