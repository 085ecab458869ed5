// Draws a chart of lines: hovering, touching or the arrow keys show the values at a place.

const FEW = 20; // points that are marked one by one
const TIP_ROWS = 12;
const LONGER = 20; // times most of the runs, and one of so many steps would press the others into a corner
let clips = 0;

function lineChart(chart, entries, hidden) {
  const view = frame(chart.title, chart.unit, () => draw());
  let geometry = null;
  function draw() {
    view.tip.hidden = true;
    geometry = drawLines(view, chart, entries, chart.series.filter((one) => !hidden.has(one.entry)));
  }
  attachHover(view, () => geometry, chart);
  return { figure: view.figure, draw };
}

function drawLines(view, chart, entries, series) {
  const width = Math.max(240, view.drawing.clientWidth || 460), height = Math.round(Math.min(width > 700 ? 440 : 330, Math.max(210, width * 0.56)));
  const log = view.state.log, doubles = chart.ticks.length > 0;
  const shownRange = range(chart, series, log);
  const yTicks = ticks(shownRange.low, shownRange.high, 5, log).map((value) => [value, shown(value)]);
  const left = 14 + 6.6 * Math.max(2, ...yTicks.map(([, text]) => text.length)), right = width - 14, top = 12, bottom = height - 38;
  const far = !doubles && farApart(entries, series);
  const [first, last] = doubles ? [chart.ticks[0][0] / 1.1, chart.ticks.at(-1)[0] * 1.1] : spanOf(entries, series, far);
  const x = scale(first, last, left, right, doubles || far), y = scale(shownRange.low, shownRange.high, bottom, top, log);
  const out = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0", "aria-label": `${chart.title}, ${chart.unit}` });
  drawAxes(out, chart, { x, y, left, right, top, bottom, first, last, yTicks, doubles, far, height });
  const id = `clip${clips++}`;
  out.append(svg("clipPath", { id }, svg("rect", { x: left, y: top - 4, width: right - left + 6, height: bottom - top + 6 })));
  const body = svg("g", { "clip-path": `url(#${id})` });
  for (const one of series) drawSeries(body, one, entries[one.entry].x, x, y, log);
  const cursor = svg("g");
  out.append(body, cursor);
  if (!series.length) out.append(svg("text", { x: (left + right) / 2, y: height / 2, "text-anchor": "middle" }, "no line is chosen"));
  if (shownRange.above) {
    const text = `not shown: ${shownRange.above} higher, up to ${shown(shownRange.highest)}`;
    out.append(svg("text", { x: right, y: 10, "text-anchor": "end" }, text));
  }
  view.drawing.replaceChildren(out);
  return { out, cursor, series, entries, x, y, left, right, top, bottom, width, log };
}

function farApart(entries, series) {
  const ends = series.map((one) => entries[one.entry].x.at(-1));
  return ends.length > 1 && LONGER * quantile(ends, 0.5) <= ends.at(-1); // which sorted them
}

function spanOf(entries, series, far) {
  const [low, high] = extremes(series.flatMap((one) => [entries[one.entry].x[0], entries[one.entry].x.at(-1)]));
  if (far) return [Math.max(1, low) / 1.1, high * 1.05];
  return low < high ? [Math.min(low, high * 0.02), high] : [Number.isFinite(low) ? low - 1 : 0, Number.isFinite(low) ? low + 1 : 1];
}

function drawAxes(out, chart, g) {
  for (const [value, text] of g.yTicks) {
    out.append(svg("line", { class: "grid", x1: g.left, x2: g.right, y1: g.y(value), y2: g.y(value) }),
      svg("text", { x: g.left - 6, y: g.y(value) + 4, "text-anchor": "end" }, text));
  }
  const count = Math.max(2, Math.floor((g.right - g.left) / 80));
  const xTicks = g.doubles ? spread(chart.ticks, g) : ticks(g.first, g.last, count, g.far).filter(Number.isInteger).map((value) => [value, shown(value)]);
  for (const [value, text] of xTicks) {
    out.append(svg("line", { class: "axis", x1: g.x(value), x2: g.x(value), y1: g.bottom, y2: g.bottom + 4 }),
      svg("text", { x: g.x(value), y: g.bottom + 17, "text-anchor": "middle" }, text));
  }
  out.append(svg("line", { class: "axis", x1: g.left, x2: g.right, y1: g.bottom, y2: g.bottom }),
    svg("text", { x: g.right, y: g.height - 4, "text-anchor": "end" }, chart.x + (g.far ? ", logarithmic" : "")));
}

// Lengths lie as close as they were measured; only those with room are named.
function spread(all, g) {
  const out = [];
  for (const tick of all) if (!out.length || g.x(tick[0]) - g.x(out.at(-1)[0]) > 34) out.push(tick);
  return out;
}

function drawSeries(body, one, xs, x, y, log) {
  const stroke = `stroke: ${color(one.entry)}`, fill = `fill: ${color(one.entry)}`;
  const drawable = (value) => value !== null && value !== undefined && (!log || value > 0);
  const path = (values) => {
    let out = "", pen = "M";
    values.forEach((value, i) => {
      if (!drawable(value)) { pen = "M"; return; }
      out += `${pen}${x(xs[i]).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
    });
    return out;
  };
  if (one.raw.length) body.append(svg("path", { class: "line faint", style: stroke, d: path(one.raw) }));
  body.append(svg("path", { class: "line", style: stroke, "stroke-dasharray": dash(one.entry), d: path(one.y) }));
  one.low.forEach((low, i) => {
    if (drawable(low)) body.append(svg("line", { style: stroke, x1: x(xs[i]), x2: x(xs[i]), y1: y(low), y2: y(one.high[i]) }));
  });
  if (one.y.length <= FEW) one.y.forEach((value, i) => {
    if (drawable(value)) body.append(svg("circle", { style: fill, cx: x(xs[i]), cy: y(value), r: 3 }));
  });
  for (const [at, value] of one.marks) if (drawable(value)) {
    const [cx, cy] = [x(at), y(value)];
    body.append(svg("path", { style: `${fill}; stroke: var(--ground)`, d: `M${cx} ${cy - 6}L${cx + 6} ${cy}L${cx} ${cy + 6}L${cx - 6} ${cy}Z` }));
  }
}

// ---- hovering ----

function attachHover(view, geometryNow, chart) {
  let place = null;
  const leave = () => {
    place = null;
    view.tip.hidden = true;
    geometryNow()?.cursor.replaceChildren();
  };
  const at = (event) => {
    const g = geometryNow(), box = g.out.getBoundingClientRect();
    place = nearest(g, ((event.clientX - box.left) / box.width) * g.width);
    if (place === null) leave(); else point(view, g, chart, place);
  };
  view.drawing.addEventListener("pointermove", at);
  view.drawing.addEventListener("pointerdown", at);
  view.drawing.addEventListener("pointerleave", leave);
  view.drawing.addEventListener("focusout", leave);
  view.drawing.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const g = geometryNow(), all = places(g);
    if (!all.length) return;
    const i = place === null ? (move > 0 ? 0 : all.length - 1) : all.indexOf(place) + move;
    place = all[Math.max(0, Math.min(all.length - 1, i))];
    point(view, g, chart, place);
  });
}

const places = (g) => [...new Set(g.series.flatMap((one) => g.entries[one.entry].x))].sort((a, b) => a - b);

function nearest(g, pixel) {
  let best = null;
  for (const one of g.series) for (const at of g.entries[one.entry].x) {
    if (best === null || Math.abs(g.x(at) - pixel) < Math.abs(g.x(best) - pixel)) best = at;
  }
  return best;
}

function point(view, g, chart, place) {
  const rows = [], dots = [];
  for (const one of g.series) {
    const i = g.entries[one.entry].x.indexOf(place);
    const value = i < 0 ? null : one.raw.length ? one.raw[i] : one.y[i];
    if (value === null || value === undefined) continue;
    const bounds = one.low.length && one.high[i] > one.low[i] ? ` (${shown(one.low[i])} to ${shown(one.high[i])})` : "";
    rows.push([one.entry, g.entries[one.entry].name, shown(value) + bounds, value]);
    if (!g.log || value > 0) dots.push([one.entry, value]);
    for (const mark of one.marks) if (mark[0] === place) rows.push([one.entry, `${g.entries[one.entry].name}, evaluation`, shown(mark[1]), mark[1]]);
  }
  rows.sort((a, b) => b[3] - a[3]);
  const shownRows = rows.slice(0, TIP_ROWS);
  if (rows.length > TIP_ROWS) shownRows.push([null, `and ${rows.length - TIP_ROWS} more`, ""]);
  g.cursor.replaceChildren(svg("line", { class: "cursor", x1: g.x(place), x2: g.x(place), y1: g.top, y2: g.bottom }),
    ...dots.filter(([, value]) => g.y(value) >= g.top - 4).map(([entry, value]) =>
      svg("circle", { style: `fill: ${color(entry)}; stroke: var(--ground)`, cx: g.x(place), cy: g.y(value), r: 4 })));
  const heading = chart.ticks.find(([value]) => value === place)?.[1] ?? shown(place);
  const ratio = view.drawing.clientWidth / g.width;
  showTip(view, g.x(place) * ratio, g.top, `${chart.ticks.length ? heading + " tokens" : "step " + heading}`, shownRows);
}
