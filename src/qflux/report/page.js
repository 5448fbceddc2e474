"use strict";
const frames = [...document.querySelectorAll(".frame")];

// One divider for all pictures: what is left of it is the control, the rest the output.
const divide = (percent) => {
  const cut = Math.min(100, Math.max(0, percent));
  for (const frame of frames) {
    frame.style.setProperty("--cut", `${cut}%`);
    frame.setAttribute("aria-valuenow", Math.round(cut));
  }
};
for (const frame of frames) {
  const follow = (event) => {
    const box = frame.getBoundingClientRect();
    divide((100 * (event.clientX - box.left)) / box.width);
  };
  frame.addEventListener("pointerdown", (event) => {
    frame.setPointerCapture(event.pointerId);
    follow(event);
  });
  frame.addEventListener("pointermove", (event) => {
    if (event.buttons) follow(event);
  });
  frame.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -5, ArrowRight: 5, Home: -100, End: 100 }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    divide(Number(frame.getAttribute("aria-valuenow")) + move);
  });
}

// One moment for all: each picture shows its newest output up to that step.
const time = document.querySelector(".time");
const show = () => {
  const steps = time ? time.dataset.steps.split(" ").map(Number) : [];
  const step = time ? steps[Number(time.value)] : Infinity;
  if (time) document.querySelector(".timeline .step").textContent = `after step ${step}`;
  for (const frame of frames) {
    const layers = [...frame.querySelectorAll(".after")];
    const past = layers.filter((layer) => Number(layer.dataset.step) <= step);
    const chosen = past.length ? past[past.length - 1] : layers[0];
    for (const layer of layers) layer.classList.toggle("shown", layer === chosen);
    const when = frame.parentElement.querySelector(".when");
    if (when && chosen) when.textContent = ` after step ${chosen.dataset.step}`;
  }
};
if (time) time.addEventListener("input", show);
show();

// Values under the mouse.
const number = (value) => (Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(Number(value.toPrecision(4))));
for (const svg of document.querySelectorAll("svg[data-values]")) {
  const chart = JSON.parse(svg.dataset.values);
  const ruler = document.createElementNS("http://www.w3.org/2000/svg", "line");
  ruler.setAttribute("class", "ruler");
  ruler.setAttribute("y1", chart.top);
  ruler.setAttribute("y2", chart.bottom);
  svg.append(ruler);
  const tip = document.createElement("div");
  tip.className = "tip";
  svg.parentElement.append(tip);
  const hide = () => {
    tip.style.display = ruler.style.display = "none";
  };
  hide();
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const across = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const share = (across - chart.left) / (chart.right - chart.left);
    if (share < -0.02 || share > 1.02) return hide();
    const wanted = chart.first + share * (chart.last - chart.first);
    const nearest = (points) => points.reduce((best, point) => (Math.abs(point[0] - wanted) < Math.abs(best[0] - wanted) ? point : best));
    const found = chart.lines.map((line) => [line, nearest(line.points)]);
    const step = found.reduce((best, [, point]) => (Math.abs(point[0] - wanted) < Math.abs(best - wanted) ? point[0] : best), found[0][1][0]);
    const x = chart.left + ((step - chart.first) / (chart.last - chart.first || 1)) * (chart.right - chart.left);
    ruler.setAttribute("x1", x);
    ruler.setAttribute("x2", x);
    tip.replaceChildren();
    const head = document.createElement("b");
    head.textContent = `${chart.across} ${number(step)}`;
    tip.append(head);
    for (const [line, point] of found) {
      const row = document.createElement("div");
      const mark = document.createElement("i");
      mark.style.background = line.colour;
      row.append(mark, `${line.name}: ${number(point[1])}${point[0] === step ? "" : ` (${chart.across} ${point[0]})`}`);
      tip.append(row);
    }
    tip.style.display = ruler.style.display = "block";
    const place = (x / svg.viewBox.baseVal.width) * box.width;
    tip.style.left = `${Math.min(place + 12, box.width - tip.offsetWidth)}px`;
    if (place + 12 + tip.offsetWidth > box.width) tip.style.left = `${Math.max(0, place - 12 - tip.offsetWidth)}px`;
  });
}
