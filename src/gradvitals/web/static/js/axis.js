// The x axis that all pictures share: steps or time since the start, and the stretch that is looked at.

export class SharedAxis {
  constructor() {
    this.mode = "step";
    this.range = null; // in the units of the mode; null for everything
    this.full = [0, 1];
    this.isKnown = false; // until something was read, the ends are made up
    this.listeners = new Set();
    this.cursor = new Set();
    this.clocks = new Map(); // run -> {steps, seconds}: which step was when
  }

  onchange(listener) { this.listeners.add(listener); }

  oncursor(listener) { this.cursor.add(listener); }

  pointAt(x) { for (const listener of this.cursor) listener(x); }

  shown() { return this.range || this.full; }

  setFull(low, high) {
    this.isKnown = true;
    if (!(high > low)) high = low + 1;
    if (low === this.full[0] && high === this.full[1]) return;
    this.full = [low, high];
    if (!this.range) this.tell(false);
  }

  setRange(low, high) {
    const [from, to] = this.full;
    low = Math.max(from, low);
    high = Math.min(to, high);
    if (!(high > low)) return;
    this.range = high - low > 0.995 * (to - from) ? null : [low, high];
    this.tell(true);
  }

  reset() {
    if (!this.range) return;
    this.range = null;
    this.tell(true);
  }

  zoom(factor) {
    const [low, high] = this.shown();
    const middle = (low + high) / 2;
    const half = ((high - low) / 2) * factor;
    this.setRange(middle - half, middle + half);
  }

  pan(share) {
    if (!this.range) return;
    const [low, high] = this.range;
    const [from, to] = this.full;
    const by = Math.max(from - low, Math.min(to - high, share * (high - low)));
    if (by) this.setRange(low + by, high + by);
  }

  // Where a step of a run is on the axis.
  x(run, step) {
    if (this.mode === "step") return step;
    const clock = this.clocks.get(run);
    return clock ? between(clock.steps, clock.seconds, step) : NaN;
  }

  // Which step of a run is at a place on the axis.
  step(run, x) {
    if (this.mode === "step") return x;
    const clock = this.clocks.get(run);
    return clock ? between(clock.seconds, clock.steps, x) : NaN;
  }

  // From where to where a run goes on the axis, as far as is known.
  reach(run) {
    const clock = this.clocks.get(run);
    if (!clock?.steps.length) return null;
    const from = this.mode === "step" ? clock.steps : clock.seconds;
    return [from[0], from[from.length - 1]];
  }

  // The step of a run at the same place as a step of another; beyond its end there is none.
  stepOf(run, other, step) {
    if (this.mode === "step") return step;
    const x = this.x(other, step);
    const reach = this.reach(run);
    return reach && x > reach[1] ? Infinity : this.step(run, x);
  }

  tell(zoomed) { for (const listener of this.listeners) listener(zoomed); }
}

// Where `wanted` lies among `from`, which rises, carried over to `to`.
export function between(from, to, wanted) {
  const size = from.length;
  if (!size) return NaN;
  if (wanted <= from[0]) return to[0];
  if (wanted >= from[size - 1]) return to[size - 1];
  let low = 0;
  let high = size - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (from[middle] <= wanted) low = middle; else high = middle;
  }
  const width = from[high] - from[low];
  return width > 0 ? to[low] + ((wanted - from[low]) / width) * (to[high] - to[low]) : to[low];
}
