// A new run: a form and the config itself, side by side. Whichever is changed, the other follows.
import { ended, post } from "./api.js";
import { h, later, notice, replace } from "./dom.js";
import { t } from "./words.js";

const FIELDS = [
  ["run_name", "text"], ["model.pretrained", "text"], ["data.batch_size", "number"], ["train.max_train_steps", "number"], ["lora.rank", "number"],
  ["memory", "text"], ["train.checkpoint_every", "number"], ["validation.images", "number"], ["seed", "number"],
];

export async function show(view, session) {
  const set = session.set ?? session.data.find((item) => item.samples)?.id;
  if (!set) { view.append(h("section", {}, t("data.none"))); return; }
  const state = { text: "", fields: {}, problems: [] };
  const text = h("textarea", { class: "yaml", id: "yaml", spellcheck: "false", wrap: "off", "aria-label": "YAML" });
  const problems = h("ul", { class: "problems", id: "problems" });
  const form = h("div", { class: "form", id: "form" });
  const plan = h("div", { id: "plan" });
  const lane = h("select", { id: "lane" }, session.devices.map((device) => h("option", { value: device.lane }, device.memory_gib ? `${device.lane} · ${device.name} · ${Math.round(device.memory_gib)} GiB` : device.name)));

  const family = h("select", { id: "family", onchange: () => begin() },
    h("option", { value: `small:${session.small.family}` }, t("new.small")), session.families.map((item) => h("option", { value: item.name }, item.title)));

  async function begin() {
    const [kind, own] = family.value.split(":");
    take(await post("draft", kind === "small" ? { set, model: session.small.name } : { set, family: own ?? kind }));
  }

  function take(found) {
    Object.assign(state, found);
    if (text.value !== found.text) text.value = found.text;
    replace(problems, found.problems.map((problem) => h("li", {}, [problem.line ? t("new.line", { line: problem.line }) : "", problem.path, problem.message].filter(Boolean).join(": "))));
    fill();
    start.disabled = found.problems.length > 0;
  }

  // Inputs are made once: whoever types must not lose their place when the config answers.
  const inputs = FIELDS.map(([path, kind]) => {
    const input = h("input", { type: kind === "number" ? "number" : "text", "data-path": path, id: `field-${path}` });
    const wrong = h("span", { class: "problem" });
    const send = () => set_(path, kind, input), soon = later(send, 350);
    for (const event of ["input", "change"]) input.addEventListener(event, () => { waiting.set(path, send); soon(); });
    return { path, input, wrong, label: h("label", {}, t(`field.${path}`), input, wrong) };
  });

  function fill() {
    for (const { path, input, wrong, label } of inputs) {
      if (document.activeElement !== input) input.value = state.fields[path] ?? "";
      const found = state.problems.filter((problem) => problem.path === path);
      label.className = found.length ? "wrong" : "";
      wrong.textContent = found.map((problem) => problem.message).join("; ");
    }
  }

  // Changes go one after another, each on what the one before has made of the text; what is waiting is sent before a start.
  let chain = Promise.resolve();
  const waiting = new Map();
  const queued = (work) => { chain = chain.then(work, work); return chain; };

  function set_(path, kind, input) {
    waiting.delete(path);
    return queued(async () => {
      const value = input.value === "" ? null : kind === "number" ? Number(input.value) : input.value;
      if ((state.fields[path] ?? null) === value) return;
      take(await post("draft/check", { text: text.value, set: { [path]: value } }));
    });
  }

  function read() {
    waiting.delete("text");
    return queued(async () => {
      const sent = text.value;
      const found = await post("draft/check", { text: sent });
      if (text.value === sent) take(found); // else somebody types on, and will be read again
    });
  }

  const soon = later(read, 350);
  text.addEventListener("input", () => { waiting.set("text", read); soon(); });
  async function settled() {
    for (const send of [...waiting.values()]) await send();
    await chain;
  }

  async function check() {
    await settled();
    replace(plan, h("p", { class: "faint" }, t("new.checking")));
    let found;
    try {
      const { job } = await post("draft/plan", { text: text.value, lane: lane.value });
      found = await ended(job);
    } catch { replace(plan); return; }
    if (!found.checks.length) { replace(plan, h("pre", { class: "log" }, found.log.slice(-3000))); return; }
    replace(plan, memory(found.checks), h("table", {}, found.checks.map((item) => h("tr", {}, h("td", {}, h("span", { class: `badge ${item.state === "ok" ? "done" : item.state}` }, t(`check.${item.state}`))), h("th", {}, item.what), h("td", {}, item.detail, item.remedy ? h("div", { class: "faint" }, `→ ${item.remedy}`) : null)))));
  }

  const start = h("button", { class: "main", id: "start", onclick: async () => {
    await settled();
    if (state.problems.length) return;
    start.disabled = true;
    try {
      const found = await post("run/start", { text: text.value, lane: lane.value });
      notice(t("new.started"));
      location.hash = `runs/${encodeURIComponent(found.run)}`;
    } finally { start.disabled = false; }
  } }, t("new.start"));

  replace(form, h("label", {}, t("new.family"), family), inputs.map((field) => field.label), h("label", {}, t("new.device"), lane),
    h("div", { class: "bar" }, start, h("button", { id: "check", onclick: () => check() }, t("new.check"))));
  view.append(h("div", { class: "two" }, h("section", {}, h("h2", {}, t("new.title")), form), h("section", {}, h("h2", {}, t("new.yaml")), text, problems, plan)));
  if (session.duplicate) { const found = session.duplicate; session.duplicate = null; take(found); } else await begin();
}

// Parts of a GPU's memory as a bar: "weights 11.9, what trains 0.2, activations 6.2: 18.3 of 22.4 GiB".
function memory(checks) {
  const text = checks.find((item) => item.what === "memory")?.detail ?? "";
  const whole = /: [\d.]+ of ([\d.]+) GiB/.exec(text);
  if (!whole) return null;
  const total = Number(whole[1]);
  const parts = [["weights", "#2563eb"], ["what trains", "#059669"], ["activations", "#ea580c"]]
    .map(([name, colour]) => [t(`memory.${name}`), colour, Number(new RegExp(`${name} ([\\d.]+)`).exec(text)?.[1] ?? 0)]);
  parts.push([t("memory.spare"), "transparent", Math.max(0, total - parts.reduce((sum, part) => sum + part[2], 0))]);
  return h("div", { id: "memory" }, h("div", { class: "memory" }, parts.map(([name, colour, size]) => h("i", { title: `${name} ${size.toFixed(1)} GiB`, style: { width: `${(100 * size) / total}%`, background: colour } }))),
    h("div", { class: "legend" }, parts.map(([name, colour, size]) => h("span", {}, h("i", { style: { background: colour } }), `${name} ${size.toFixed(1)} GiB`))));
}
