// Curves over steps as SVG.
import { h } from "./dom.js";

export const COLOURS = ["#ea580c", "#2563eb", "#059669", "#9333ea", "#b45309", "#0891b2"];
const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [560, 220, 58, 12, 10, 26];
const MANY = 100; // points, of which the highest few may be cut off

function draw(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

export function label(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return value ?? "–"; // NaN comes as text
  const size = Math.abs(value);
  if (size >= 10000) return Math.round(value).toLocaleString("en");
  if (size >= 100) return value.toFixed(0);
  if (size >= 1) return value.toFixed(2);
  return size === 0 ? "0" : String(Number(value.toPrecision(3)));
}

function ticks(low, high, count, least = 0) {
  const raw = Math.max((high - low || 1) / count, least), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return found;
}

export function chart(title, lines, { whole = false } = {}) {
  const shown = lines.filter((line) => line.points.length);
  if (!shown.length) return null;
  const all = shown.flatMap((line) => line.points);
  const ys = all.map((point) => point[1]).sort((a, b) => a - b);
  const left = all.reduce((least, [x]) => Math.min(least, x), Infinity), right = all.reduce((most, [x]) => Math.max(most, x), -Infinity);
  // The first steps of a run would flatten everything behind them.
  let low = ys[0], high = ys[whole || ys.length < MANY ? ys.length - 1 : Math.floor((ys.length - 1) * 0.985)];
  if (high - low < 1e-12) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
  const svg = draw("svg", { role: "img", "aria-label": title });
  const paint = (width) => {
    const x = (value) => LEFT + ((value - left) / (right - left || 1)) * (width - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - ((Math.min(value, high) - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    for (const at of ticks(low, high, 4)) {
      svg.append(draw("line", { x1: LEFT, x2: width - RIGHT, y1: y(at), y2: y(at), class: "grid" }));
      svg.append(draw("text", { x: LEFT - 6, y: y(at) + 4, "text-anchor": "end" }, label(at)));
    }
    for (const at of ticks(left, right, width / 90, 1)) svg.append(draw("text", { x: x(at), y: HEIGHT - 8, "text-anchor": "middle" }, String(at)));
    shown.forEach((line, index) => {
      const colour = line.colour ?? COLOURS[index % COLOURS.length];
      const points = line.points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`);
      svg.append(points.length > 1 ? draw("polyline", { points: points.join(" "), class: "curve", stroke: colour })
        : draw("circle", { cx: points[0].split(",")[0], cy: points[0].split(",")[1], r: 3, fill: colour }));
    });
  };
  // Drawn for the width it gets, so that words have one size on a phone and on a wide screen.
  paint(WIDTH);
  new ResizeObserver(([entry]) => { if (entry.contentRect.width > LEFT + RIGHT) paint(entry.contentRect.width); }).observe(svg);
  const legend = h("div", { class: "legend" }, shown.map((line, index) => h("span", {},
    h("i", { style: { background: line.colour ?? COLOURS[index % COLOURS.length] } }), `${line.name} ${label(line.points[line.points.length - 1][1])}`)));
  return h("figure", { class: "chart" }, h("figcaption", {}, title), svg, legend);
}
