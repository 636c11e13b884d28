// Numbers, steps and times as short text.

export function number(value) {
  if (value === null || value === undefined || value === "nan" || Number.isNaN(value)) return "–";
  value = Number(value);
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "–" : value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1000 && size < 100000) return Math.round(value).toLocaleString("en-US");
  if (size >= 100000 || size < 0.001) return value.toExponential(2).replace("e+", "e").replace("-", "−").replace("e-", "e−");
  return String(Number(value.toPrecision(3))).replace("-", "−");
}

export function step(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US");
}

export function count(value) {
  if (value >= 1e9) return `${(value / 1e9).toFixed(value < 1e10 ? 2 : 1)} billion`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(value < 1e7 ? 2 : 1)} million`;
  return value.toLocaleString("en-US");
}

export function duration(seconds) {
  if (!(seconds >= 0)) return "–";
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function ago(then, now) {
  const seconds = Math.max(0, now - then);
  return seconds < 5 ? "now" : `${duration(seconds).replace(/ \d+ (s|min|h)$/, "")} ago`;
}

// A date and a time, of the reader's own clock.
export function moment(seconds) {
  return new Date(1000 * seconds).toLocaleString("en-GB", { day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit" });
}

export function tick(value) {
  const size = Math.abs(value);
  const sign = value < 0 ? "−" : "";
  if (value === 0) return "0";
  if (size >= 1e6) return `${sign}${Number((size / 1e6).toPrecision(4))}M`;
  if (size >= 1e4) return `${sign}${Number((size / 1e3).toPrecision(4))}k`;
  if (size < 1e-3) return sign + size.toExponential(0).replace("e-", "e−");
  return sign + String(Number(size.toPrecision(4)));
}

export function tickTime(seconds, span) {
  if (span < 180) return `${Number(seconds.toFixed(span < 5 ? 1 : 0))} s`;
  const minutes = Math.round(seconds / 60);
  if (span < 7200) return `${minutes} min`;
  const hours = seconds / 3600;
  return span < 172800 ? `${Number(hours.toFixed(1))} h` : `${Number((hours / 24).toFixed(1))} d`;
}
