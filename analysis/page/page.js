// Puts the page together from the JSON inside it.

function chartsBlock(block) {
  const hidden = new Set(), shownEntries = new Set(block.charts.flatMap(entriesOf));
  const charts = block.charts.map((chart) =>
    chart.kind === "lines" ? lineChart(chart, block.entries, hidden) : barChart(chart, block.entries, hidden));
  const draw = () => charts.forEach((chart) => chart.draw());
  const grid = el("div", { class: "charts" }, ...charts.map((chart) => chart.figure));
  let width = 0;
  const fit = () => {
    if (grid.clientWidth !== width) draw();
    width = grid.clientWidth;
  };
  new ResizeObserver(() => requestAnimationFrame(fit)).observe(grid); // drawing changes sizes: not while they are observed
  return el("div", {}, ...titled(block.title), legend(block.entries, hidden, shownEntries, draw), grid);
}

const entriesOf = (chart) =>
  chart.kind === "lines" ? chart.series.map((one) => one.entry) : chart.groups.flatMap(([, bars]) => bars.map((bar) => bar.entry));

function legend(entries, hidden, drawn, draw) {
  const buttons = new Map();
  const update = () => {
    for (const [entry, button] of buttons) button.setAttribute("aria-pressed", !hidden.has(entry));
    draw();
  };
  entries.forEach((entry, i) => {
    if (!drawn.has(i)) return;
    const toggle = () => {
      if (!hidden.delete(i)) hidden.add(i);
      update();
    };
    buttons.set(i, el("button", { type: "button", "aria-pressed": "true", onclick: toggle }, swatch(i), entry.name));
  });
  const all = () => {
    if (hidden.size) hidden.clear(); else buttons.forEach((_, entry) => hidden.add(entry));
    update();
  };
  const both = buttons.size > 2 ? [el("button", { class: "all", type: "button", onclick: all }, "all / none")] : [];
  return el("div", { class: "legend", role: "group", "aria-label": "what is drawn" }, ...both, ...buttons.values());
}

function detailsBlock(block) {
  const parts = block.parts.flatMap((part) => [
    el("h3", {}, part.title),
    ...(part.code ? [command(part.code)] : []),
    ...(part.facts.length ? [el("dl", {}, ...part.facts.map(fact))] : []),
  ]);
  return el("details", {}, el("summary", {}, el("b", {}, block.title), el("span", { class: "soft" }, block.about)), ...parts);
}

// Breaks lines between words alone: a browser breaks after hyphens, too, and flags begin with them.
function command(text) {
  const words = text.split(" ").map((word) => el("span", {}, word));
  return el("pre", {}, ...words.flatMap((word, i) => (i ? [" ", word] : [word])));
}

const fact = ({ name, value, named }) => el("div", { class: named ? "named" : null }, el("dt", {}, name), el("dd", {}, value));

const BLOCKS = { table: tableBlock, charts: chartsBlock, details: detailsBlock };

function sectionOf(section) {
  return el("section", { id: section.id }, el("h2", {}, section.title),
    ...section.notes.map((note) => el("p", { class: "soft" }, note)), ...section.blocks.map((block) => BLOCKS[block.kind](block)));
}

function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const links = data.sections.map((section) => el("a", { href: `#${section.id}` }, section.title));
  document.getElementById("page").replaceChildren(el("h1", {}, data.title), el("p", { class: "soft" }, `Written ${data.made}.`),
    el("nav", {}, ...links), ...data.sections.map(sectionOf));
  if (data.left_out.length) {
    const reasons = data.left_out.map((reason) => el("p", { class: "soft" }, reason));
    document.getElementById("page").append(el("section", {}, el("h2", {}, "Not shown"), ...reasons));
  }
}

start();
