// Try an edit: drop pictures, say what to do, with a run's LoRA or without.
import { address, get, post, put } from "./api.js";
import { h, notice, replace } from "./dom.js";
import { slider } from "./slider.js";
import { t } from "./words.js";

export async function show(view, session) {
  const runs = await get("runs");
  const images = [];
  const file = h("input", { type: "file", id: "file", accept: "image/*", multiple: true, hidden: true, onchange: () => take(file.files) });
  const drop = h("div", { class: "drop", id: "drop", tabIndex: 0, role: "button", onclick: () => file.click(), onkeydown: (event) => { if (event.key === "Enter") file.click(); },
    ondragover: (event) => { event.preventDefault(); drop.classList.add("over"); }, ondragleave: () => drop.classList.remove("over"),
    ondrop: (event) => { event.preventDefault(); drop.classList.remove("over"); take(event.dataTransfer.files); } });
  const drawDrop = () => replace(drop, images.length ? images.map((image) => h("img", { src: address("upload", { id: image.id }), alt: "" })) : t("try.drop"));
  async function take(files) {
    for (const picture of files) images.push(await put("upload", picture));
    drawDrop();
  }
  const run = h("select", { id: "run" }, runs.filter((item) => item.step).map((item) => h("option", { value: item.run, selected: item.run === session.tryRun }, item.name)));
  const lora = h("select", { id: "lora" }, [["adapter", t("try.adapter")], ["best", t("try.best")], ["none", t("try.without")]].map(([value, text]) => h("option", { value }, text)));
  const prompt = h("textarea", { id: "prompt", rows: "3" });
  const strength = h("input", { type: "number", id: "strength", value: "1", step: "0.05" });
  const seeds = h("input", { id: "seeds", value: "0" });
  const steps = h("input", { type: "number", id: "steps", min: "1", placeholder: t("try.steps_default") });
  const results = h("div", { class: "edits", id: "results" });
  const go = h("button", { class: "main", id: "go", onclick: async () => {
    const numbers = seeds.value.split(/[\s,]+/).filter(Boolean).map(Number);
    await post("try", { images: images.map((image) => image.id), prompt: prompt.value, run: run.value, lora: lora.value, strength: Number(strength.value), seeds: numbers, steps: steps.value ? Number(steps.value) : null });
    notice(t("try.queued"));
    await look();
  } }, t("try.go"));
  view.append(h("div", { class: "two" }, h("section", {}, h("h2", {}, t("try.title")), h("div", { class: "form" }, drop, file,
    h("div", { class: "bar" }, h("button", { onclick: () => { images.length = 0; drawDrop(); } }, t("try.clear"))),
    h("label", {}, t("try.prompt"), prompt), h("label", {}, t("try.run"), run), h("label", {}, t("try.lora"), lora), h("label", {}, t("try.strength"), strength), h("label", {}, t("try.seeds"), seeds), h("label", {}, t("try.steps"), steps), go)),
  h("section", {}, h("h2", {}, t("try.results")), results)));
  drawDrop();
  let told = "";
  async function look() {
    const found = await get("tries", {}, true).catch(() => null);
    if (!found || JSON.stringify(found) === told) return;
    told = JSON.stringify(found);
    replace(results, found.length ? found.map((item) => h("article", { "data-state": item.state },
      item.state === "done" ? slider(item.images[0] ? address("upload", { id: item.images[0] }) : null, address("try", { id: item.try }), { label: item.prompt }) : h("p", { class: "faint" }, h("span", { class: `badge ${item.state}` }, t(`status.${item.state}`)), item.state === "failed" && item.job ? h("button", { class: "quiet small", onclick: async () => notice((await get("job", { job: item.job })).log.slice(-600), true) }, t("try.why")) : null),
      h("p", {}, item.prompt),
      h("p", { class: "small faint" }, `${item.run} · ${t(`try.${item.lora === "none" ? "without" : item.lora}`)} × ${item.strength} · ${t("try.seed")} ${item.seed}`),
      h("div", { class: "bar" }, item.state !== "done" ? null : h("a", { href: address("try", { id: item.try }), download: `${item.try}.png`, class: "small" }, t("try.download")), ["queued", "running"].includes(item.state) ? null : h("button", { class: "quiet small", onclick: async () => { await post("try/forget", { id: item.try }); look(); } }, t("try.forget"))))) : h("p", { class: "faint" }, t("try.none")));
  }
  await look();
  const timer = setInterval(look, 1500);
  return () => clearInterval(timer);
}
