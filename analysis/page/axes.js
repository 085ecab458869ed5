// Places numbers along an axis, linear or logarithmic, and chooses round ticks.

function scale(low, high, from, to, log) {
  const f = log ? Math.log10 : (value) => value;
  const span = f(high) - f(low) || 1;
  return (value) => from + ((f(value) - f(low)) / span) * (to - from);
}

function ticks(low, high, count, log) {
  if (log) return logTicks(low, high, count);
  const rough = (high - low || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= rough * 0.999);
  const out = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) out.push(i * step);
  return out;
}

// Powers of ten, with 2 and 5 of each where there are few; where it is less than a decade, round numbers will do.
function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (decades < 0.8) return ticks(low, high, count, false).filter((value) => value > 0);
  const digits = decades <= count / 2 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(decades / count));
  const out = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += every)
    for (const digit of digits) out.push(digit * 10 ** power);
  return out.filter((value) => value >= low * 0.999 && value <= high * 1.001);
}

const quantile = (values, share) => values.sort((a, b) => a - b)[Math.floor(share * (values.length - 1))];

// The range that is shown, and how many values lie above it, as a first step that compiles does.
function range(chart, series, log) {
  const known = (values) => values.filter((value) => value !== null && (!log || value > 0));
  const all = series.flatMap((one) => known([...one.y, ...one.raw, ...one.low, ...one.high, ...one.marks.map((mark) => mark[1])]));
  if (!all.length) return { low: log ? 1 : 0, high: log ? 10 : 1, above: 0, highest: 0 };
  const [least, highest] = extremes(all);
  if (log) return { low: least / 1.15, high: highest * 1.15, above: 0, highest };
  if (!chart.zero) {
    const margin = 0.06 * (highest - least || Math.abs(highest) || 1);
    return { low: least - margin, high: highest + margin, above: 0, highest };
  }
  const late = series.map((one) => known(one.y.slice(Math.min(chart.warmup, one.y.length - 1)))).filter((values) => values.length);
  const usual = late.length ? Math.max(...late.map((values) => quantile(values, 0.98))) : highest;
  const high = highest <= 1.5 * usual || usual <= 0 ? 1.1 * highest : 1.25 * usual;
  const above = all.filter((value) => value > high).length;
  return { low: Math.min(0, least), high: high || 1, above, highest };
}

// Lowest and highest, for lists too long to be arguments.
function extremes(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}
