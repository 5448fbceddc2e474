// One sample, closely: both pictures, further controls, its prompt, what is wrong with it, and a brush for its mask.
import { address, put } from "./api.js";
import { h, notice, replace } from "./dom.js";
import { slider } from "./slider.js";
import { known, t } from "./words.js";

export function view({ set, number, total, row, change, painted }) {
  let at = number;
  const dialog = h("dialog", { id: "viewer" });
  const close = () => { document.removeEventListener("keydown", keys, true); dialog.close(); dialog.remove(); };
  const go = async (by) => { at = Math.min(total - 1, Math.max(0, at + by)); await draw(); };
  const keys = (event) => {
    if (/TEXTAREA|INPUT/.test(document.activeElement?.tagName ?? "") || document.activeElement?.classList.contains("frame")) return;
    if (event.key === "ArrowRight") go(1);
    else if (event.key === "ArrowLeft") go(-1);
  };
  dialog.addEventListener("cancel", (event) => { event.preventDefault(); close(); });
  document.addEventListener("keydown", keys, true);

  async function draw() {
    const sample = await row(at);
    if (!sample) return;
    const picture = (role) => address("sample-picture", { set, sample: sample.name, role, large: "1", v: role === "mask" ? sample.mask : undefined });
    const [width, height] = sample.images[0];
    const frame = slider(sample.images.length > 1 ? picture("control0") : null, picture("target"), { label: sample.name, width: width || 1, height: height || 1 });
    const room = Math.min(window.innerHeight * 0.66, 760);
    frame.style.width = `${Math.min(760, room * ((width || 1) / (height || 1)))}px`;
    const further = sample.images.slice(2).map((_, index) => h("figure", {}, h("img", { src: picture(`control${index + 1}`), alt: "" }), t("data.control", { number: index + 2 })));
    const text = h("textarea", { id: "viewer-prompt" });
    text.value = sample.prompt;
    const findings = h("ul", { class: "findings" }, sample.findings.map((finding) => h("li", { class: finding.level }, h("b", {}, known(`finding.${finding.kind}`, finding.kind)), ` ${finding.detail}`)));
    const stage = h("div", { class: "stage" }, frame, further.length ? h("div", { class: "thumbs" }, further) : null);
    const side = h("div", { class: "side" },
      h("p", { class: "faint small" }, `${at + 1} / ${total} · ${width}×${height}`),
      text,
      h("div", { class: "bar" }, h("button", { id: "save-prompt", onclick: async () => { await change([{ sample: sample.name, prompt: text.value }]); await draw(); } }, t("viewer.save")),
        sample.original ? h("button", { onclick: async () => { await change([{ sample: sample.name, prompt: null }]); await draw(); } }, t("viewer.original")) : null),
      h("label", {}, h("input", { type: "checkbox", id: "exclude", checked: sample.excluded, onchange: async (event) => { await change([{ sample: sample.name, excluded: event.target.checked || null }]); } }), " ", t("viewer.exclude")),
      h("div", { class: "bar" }, h("button", { id: "paint", onclick: () => paint(sample, frame, side, picture) }, t(sample.has_mask ? "viewer.paint_more" : "viewer.paint")),
        sample.is_painted ? h("button", { onclick: async () => { await change([{ sample: sample.name, mask: null }]); await draw(); } }, t("viewer.unpaint")) : null),
      sample.captions.length ? h("div", { class: "small faint" }, h("b", {}, t("viewer.captions")), sample.captions.map((caption) => h("p", {}, caption))) : null,
      findings);
    replace(dialog, h("button", { class: "close quiet", "aria-label": t("close"), onclick: close }, "✕"), h("h2", {}, sample.name), h("div", { class: "viewer" }, stage, side),
      h("div", { class: "bar" }, h("button", { onclick: () => go(-1), disabled: at === 0 }, "←"), h("button", { onclick: () => go(1), disabled: at >= total - 1 }, "→")));
  }

  async function paint(sample, frame, side, picture) {
    const [width, height] = sample.images[0];
    const scale = Math.min(1, 1024 / Math.max(width, height));
    const canvas = h("canvas", { class: "paint", width: Math.round(width * scale), height: Math.round(height * scale) });
    const pen = canvas.getContext("2d");
    if (sample.has_mask) {
      const known = new Image();
      known.src = picture("mask");
      await known.decode().catch(() => {});
      // The mask is grey: its lightness becomes how much of the colour is there.
      pen.drawImage(known, 0, 0, canvas.width, canvas.height);
      const pixels = pen.getImageData(0, 0, canvas.width, canvas.height);
      for (let i = 0; i < pixels.data.length; i += 4) { const value = pixels.data[i]; pixels.data.set([234, 88, 12, value], i); }
      pen.putImageData(pixels, 0, 0);
    }
    frame.style.setProperty("--cut", "0%");
    frame.append(canvas);
    const size = h("input", { type: "range", min: "4", max: "160", value: "40", "aria-label": t("viewer.brush") });
    const erase = h("input", { type: "checkbox", id: "erase" });
    let last = null;
    const stroke = (event) => {
      const box = canvas.getBoundingClientRect();
      const point = [((event.clientX - box.left) / box.width) * canvas.width, ((event.clientY - box.top) / box.height) * canvas.height];
      pen.globalCompositeOperation = erase.checked ? "destination-out" : "source-over";
      Object.assign(pen, { strokeStyle: "rgb(234, 88, 12)", lineWidth: (Number(size.value) / box.width) * canvas.width, lineCap: "round" });
      pen.beginPath(); pen.moveTo(...(last ?? point)); pen.lineTo(...point); pen.stroke();
      last = point;
    };
    canvas.addEventListener("pointerdown", (event) => { event.stopPropagation(); canvas.setPointerCapture(event.pointerId); last = null; stroke(event); });
    canvas.addEventListener("pointermove", (event) => { event.stopPropagation(); if (event.buttons) stroke(event); });
    canvas.addEventListener("pointerup", () => { last = null; });
    side.prepend(h("div", { class: "bar", id: "brush" }, h("label", { class: "small" }, t("viewer.brush"), " ", size), h("label", { class: "small" }, erase, " ", t("viewer.erase")),
      h("button", { class: "main", id: "save-mask", onclick: async () => {
        const blob = await new Promise((made) => canvas.toBlob(made, "image/png"));
        await put("mask", blob, { set, sample: sample.name });
        notice(t("viewer.mask_saved"));
        await painted();
        await draw();
      } }, t("viewer.save_mask"))));
  }

  document.body.append(dialog);
  dialog.showModal();
  draw();
}
