"use strict";
for (const compare of document.querySelectorAll(".compare")) {
  const frame = compare.querySelector(".frame");
  const layers = [...frame.querySelectorAll(".after")];
  const cut = compare.querySelector(".cut");
  const time = compare.querySelector(".time");
  const step = compare.querySelector(".step");
  const show = () => {
    layers.forEach((layer, index) => layer.classList.toggle("shown", index === Number(time.value)));
    const layer = layers[Number(time.value)];
    step.textContent = layer ? `after step ${layer.dataset.step}` : "";
  };
  cut.addEventListener("input", () => frame.style.setProperty("--cut", `${cut.value}%`));
  time.addEventListener("input", show);
  show();
}
