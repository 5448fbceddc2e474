// Two pictures of one thing, one over the other: drag, or use the arrow keys, to see more of the first.
import { h } from "./dom.js";

export function slider(before, after, { label = "", start = 50, width = null, height = null } = {}) {
  const frame = h("div", { class: "frame", tabIndex: 0, role: "slider", "aria-label": label, "aria-valuemin": "0", "aria-valuemax": "100" });
  if (width && height) frame.style.aspectRatio = `${width} / ${height}`;
  frame.append(h("img", { src: after, alt: "", draggable: "false", loading: "lazy" }));
  const set = (share) => {
    frame.style.setProperty("--cut", `${share}%`);
    frame.setAttribute("aria-valuenow", String(Math.round(share)));
  };
  if (before) {
    frame.append(h("img", { src: before, class: "before", alt: "", draggable: "false", loading: "lazy" }), h("div", { class: "handle" }));
    const move = (event) => {
      const box = frame.getBoundingClientRect();
      set(Math.min(100, Math.max(0, (100 * (event.clientX - box.left)) / box.width)));
    };
    frame.addEventListener("pointermove", (event) => { if (event.buttons || event.pointerType === "mouse") move(event); });
    frame.addEventListener("pointerdown", move);
    frame.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -5, ArrowRight: 5 }[event.key];
      if (!by) return;
      event.preventDefault(); event.stopPropagation();
      set(Math.min(100, Math.max(0, Number(frame.getAttribute("aria-valuenow")) + by)));
    });
  } else frame.style.cursor = "default";
  set(start);
  return frame;
}
