// Draws a table whose headings sort it: numbers by size, the largest first; words by letter; what is missing last.

const text = (cell) => (typeof cell === "string" ? cell : cell.text);
const value = (cell) => (typeof cell === "string" ? cell : cell.value);
const missing = (cell) => value(cell) === null || value(cell) === "";

function compare(a, b) {
  const [x, y] = [value(a), value(b)];
  return typeof x === "number" && typeof y === "number" ? x - y : text(a).localeCompare(text(b), "en", { numeric: true });
}

function sorted(rows, column, descending) {
  return [...rows].sort((a, b) => {
    const [x, y] = [a.cells[column], b.cells[column]];
    if (missing(x) || missing(y)) return missing(x) - missing(y);
    return descending ? compare(y, x) : compare(x, y);
  });
}

function tableBlock(block) {
  const rows = block.rows.map((cells, i) => ({ cells, entry: block.entries[i] ?? -1 }));
  const numeric = block.columns.map((_, column) => rows.some(({ cells }) => typeof value(cells[column]) === "number"));
  const body = el("tbody");
  const fill = (ordered) => body.replaceChildren(...ordered.map((row) => tableRow(row, numeric)));
  const headings = block.columns.map((name, column) => {
    const heading = el("th", { class: numeric[column] ? "number" : null, scope: "col", "aria-sort": "none" });
    const sort = () => {
      const before = heading.getAttribute("aria-sort");
      const descending = before === "none" ? numeric[column] : before === "ascending";
      headings.forEach((other) => other.setAttribute("aria-sort", "none"));
      heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      fill(sorted(rows, column, descending));
    };
    heading.append(el("button", { type: "button", onclick: sort, title: "sort" }, name || "name"));
    return heading;
  });
  fill(rows);
  const table = el("table", {}, el("thead", {}, el("tr", {}, ...headings)), body);
  table.style.setProperty("--name", `${1.05 * Math.max(...rows.map(({ cells }) => text(cells[0]).length + 3), 6)}ch`);
  const scroll = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": block.title || "table" }, table);
  return el("div", {}, ...titled(block.title), scroll, ...block.notes.map((note) => el("p", { class: "soft" }, note)));
}

function tableRow({ cells, entry }, numeric) {
  return el("tr", {}, ...cells.map((cell, column) => {
    const long = text(cell).length > 40;
    const mark = column === 0 && entry >= 0 ? [swatch(entry)] : [];
    return el("td", { class: numeric[column] ? "number" : long ? "long" : null }, ...mark, text(cell));
  }));
}
