// Draws a chart of bars that lie, so that long names have room on a narrow screen too.

function barChart(chart, entries, hidden) {
  const view = frame(chart.title, chart.unit, () => draw());
  function draw() {
    view.tip.hidden = true;
    const groups = chart.groups.map(([name, bars]) => [name, bars.filter((bar) => !hidden.has(bar.entry))]);
    drawBars(view, chart, entries, groups.filter(([, bars]) => bars.length));
  }
  view.drawing.addEventListener("pointerleave", () => { view.tip.hidden = true; });
  return { figure: view.figure, draw };
}

function drawBars(view, chart, entries, groups) {
  const width = Math.max(240, view.drawing.clientWidth || 460), log = view.state.log;
  const bars = groups.flatMap(([, inner]) => inner);
  const known = bars.flatMap((bar) => [bar.value, bar.high]).filter((value) => value > 0);
  const letters = Math.max(4, ...bars.map((bar) => entries[bar.entry].name.length));
  const above = letters * 6.4 > 0.38 * width; // the name stands above its bar where it has no room beside it
  const left = above ? 4 : letters * 6.4 + 10, right = width - 62, pitch = above ? 36 : 22;
  const [least, highest] = known.length ? extremes(known) : [1, 10];
  const low = log ? least / 2 : 0, x = scale(low, highest, left, right, log);
  let y = 4;
  const out = svg("svg", { role: "img", "aria-label": `${chart.title}, ${chart.unit}` });
  for (const [name, inner] of groups) {
    if (name) out.append(svg("text", { class: "group", x: 4, y: (y += 14) }, name));
    y += name ? 6 : 0;
    for (const bar of inner) {
      out.append(oneBar(view, chart, entries, bar, { x, y, left, above, log, low, name, width }));
      y += pitch;
    }
    y += 8;
  }
  if (!bars.length) out.append(svg("text", { x: width / 2, y: (y += 30), "text-anchor": "middle" }, "no bar is chosen"));
  out.setAttribute("viewBox", `0 0 ${width} ${y + 2}`);
  view.drawing.replaceChildren(out);
}

function oneBar(view, chart, entries, bar, g) {
  const { name } = entries[bar.entry], top = g.y + (g.above ? 15 : 0), middle = top + 12;
  const label = g.above ? { x: g.left, y: g.y + 11 } : { x: g.left - 6, y: middle, "text-anchor": "end" };
  const out = svg("g", {}, svg("rect", { x: 0, y: g.y, width: g.width, height: g.above ? 36 : 22, fill: "transparent" }),
    svg("text", { class: "strong", ...label }, g.above ? shortened(name, g.width) : name));
  if (bar.value === null) {
    out.append(svg("text", { x: g.left + 4, y: middle }, bar.why || "not known"));
  } else {
    const end = g.x(Math.max(bar.value, g.low)), tip = bar.high > bar.value ? g.x(bar.high) : end;
    out.append(svg("rect", { class: "bar", style: `fill: ${color(bar.entry)}`, x: g.left, y: top, width: Math.max(1, end - g.left), height: 16, rx: 2 }));
    if (bar.high > bar.low) {
      const from = g.x(Math.max(bar.low, g.low));
      out.append(svg("path", { class: "whisker", d: `M${from} ${top + 8}H${tip}M${from} ${top + 4}v8M${tip} ${top + 4}v8` }));
    }
    out.append(svg("text", { class: "strong", x: tip + 5, y: middle }, shown(Number(bar.value.toPrecision(3)))));
  }
  const show = () => {
    const rows = [[bar.entry, name, bar.value === null ? bar.why || "not known" : `${shown(bar.value)}`]];
    if (bar.high > bar.low) rows.push([null, "lowest to highest", `${shown(bar.low)} to ${shown(bar.high)}`]);
    showTip(view, 0.3 * view.drawing.clientWidth, ((top + 22) * view.drawing.clientWidth) / g.width, g.name || chart.title, rows);
  };
  out.addEventListener("pointerenter", show);
  out.addEventListener("pointerdown", show);
  return out;
}

function shortened(name, width) {
  const room = Math.floor(width / 6.6);
  return name.length > room ? `${name.slice(0, room - 1)}…` : name;
}
