"use strict";
// Makes elements. What was measured only ever becomes text, never markup.

function made(namespace, tag, attributes, children) {
  const out = namespace ? document.createElementNS(namespace, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) out.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) out.setAttribute(name, value);
  }
  out.append(...children);
  return out;
}

const el = (tag, attributes = {}, ...children) => made(null, tag, attributes, children);
const svg = (tag, attributes = {}, ...children) => made("http://www.w3.org/2000/svg", tag, attributes, children);

const COLORS = 8;
const DASHES = [null, "7 4", "2 3", "9 3 2 3"];
const color = (entry) => `var(--c${entry % COLORS})`;
const dash = (entry) => DASHES[Math.floor(entry / COLORS) % DASHES.length];
const swatch = (entry) => {
  const out = el("span", { class: `swatch ${["", "dashed", "dotted"][Math.min(2, Math.floor(entry / COLORS) % DASHES.length)]}` });
  out.style.background = out.style.borderColor = color(entry);
  return out;
};

const titled = (title) => (title ? [el("h3", { class: "titled" }, title)] : []);

// A number as short as it can be read: 12,345 or 0.00123.
function shown(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e9)) return value.toExponential(3).replace(/\.?0+e/, "e");
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  return String(Number(value.toPrecision(5)));
}

// The frame of a chart: its title, the switch to a logarithmic axis, the drawing, and the box that hovering shows.
function frame(title, unit, redraw) {
  const state = { log: false };
  const toggle = el("button", { class: "toggle", type: "button", "aria-pressed": "false", title: "logarithmic axis" }, "log");
  const drawing = el("div");
  const tip = el("div", { class: "tip", role: "status", hidden: "" });
  const figure = el("figure", { class: "chart" },
    el("figcaption", {}, el("div", {}, el("h3", {}, title), el("span", { class: "soft" }, unit)), toggle), drawing, tip);
  toggle.addEventListener("click", () => {
    state.log = !state.log;
    toggle.setAttribute("aria-pressed", state.log);
    redraw();
  });
  return { figure, drawing, tip, state };
}

// Shows rows of [entry or null, name, value] beside a place of the drawing, inside the figure.
function showTip(view, x, y, heading, rows) {
  const lines = rows.map(([entry, name, value]) =>
    el("div", {}, el("span", {}, ...(entry === null ? [] : [swatch(entry)]), name), el("b", {}, value)));
  view.tip.replaceChildren(el("div", {}, el("b", {}, heading)), ...lines);
  view.tip.hidden = false;
  const room = view.figure.clientWidth, left = view.drawing.offsetLeft + x;
  const beside = left + 14 + view.tip.offsetWidth < room ? left + 14 : left - 14 - view.tip.offsetWidth;
  view.tip.style.left = `${Math.max(8, Math.min(beside, room - view.tip.offsetWidth - 8))}px`;
  view.tip.style.top = `${view.drawing.offsetTop + y}px`;
}
