// Several runs on one axis, and the same edits of each.
import { address, get } from "./api.js";
import { chart, COLOURS } from "./chart.js";
import { h, replace } from "./dom.js";
import { slider } from "./slider.js";
import { t } from "./words.js";

export async function show(view, session) {
  const runs = (await get("runs")).filter((run) => run.step);
  const there = new Set(runs.map((run) => run.run));
  const chosen = new Set((session.compared ?? runs.slice(0, 3).map((run) => run.run)).filter((name) => there.has(name)));
  const known = new Map();
  const body = h("div", {});
  view.append(h("section", {}, h("h2", {}, t("compare.title")), h("div", { class: "bar", id: "chosen" }, runs.map((run) => h("label", {}, h("input", { type: "checkbox", value: run.run, checked: chosen.has(run.run), onchange: (event) => { if (event.target.checked) chosen.add(run.run); else chosen.delete(run.run); draw(); } }), " ", run.name))), runs.length ? null : h("p", { class: "faint" }, t("runs.none"))), body);

  async function draw() {
    session.compared = [...chosen];
    for (const name of chosen) if (!known.has(name)) known.set(name, await get("run", { run: name }));
    const shown = [...chosen].map((name) => known.get(name));
    const colour = (index) => COLOURS[index % COLOURS.length];
    const steps = (title, key) => chart(title, shown.map((run, index) => ({ name: run.name, colour: colour(index), points: run.curves[key] ?? [] })));
    const measured = (title, key) => chart(title, shown.map((run, index) => ({ name: run.name, colour: colour(index), points: (run.validation ?? []).filter((line) => line[key] !== undefined).map((line) => [line.step, line[key]]) })), { whole: true });
    const names = [...new Set(shown.flatMap((run) => run.edits.map((edit) => edit.name)))].slice(0, 24);
    const rows = names.map((name) => h("tr", {}, h("th", {}, name), shown.map((run) => {
      const number = run.edits.findIndex((edit) => edit.name === name);
      if (number < 0) return h("td", {}, "–");
      const edit = run.edits[number];
      const picture = (what) => address("run/picture", { run: run.run, edit: number, what, step: String(edit.steps[edit.steps.length - 1]) });
      return h("td", { style: { minWidth: "180px" } }, slider(edit.controls ? picture("control0") : null, picture("output"), { label: `${run.name} ${name}`, start: 0 }));
    })));
    replace(body, h("section", {}, h("div", { class: "charts", id: "compared" }, [steps(t("run.loss"), "loss"), measured(t("compare.held_out"), "held_out_loss"), measured(t("run.outside"), "outside_colour"), measured(t("run.done"), "done"), steps(t("run.tokens"), "tokens_per_second")].filter(Boolean))),
      rows.length ? h("section", {}, h("h3", {}, t("run.edits")), h("div", { class: "scroll" }, h("table", { id: "same" }, h("tr", {}, h("th", {}), shown.map((run) => h("th", {}, run.name))), rows))) : null);
  }
  if (runs.length) await draw();
}
