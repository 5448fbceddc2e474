// Runs: all of them, or one that is watched while it learns.
import { address, ended, get, post, query } from "./api.js";
import { chart, label } from "./chart.js";
import { h, notice, replace } from "./dom.js";
import { slider } from "./slider.js";
import { t } from "./words.js";

export async function show(view, session, name) {
  return name ? one(view, session, name) : all(view, session);
}

function listen(values, onNews) {
  const source = new EventSource(`/api/events?${query(values)}`);
  let isTold = false;
  source.onmessage = (event) => { isTold = false; onNews(JSON.parse(event.data)); };
  source.onerror = () => { if (!isTold) { isTold = true; notice(t("runs.lost"), true); } };
  return () => source.close();
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const minutes = Math.round(seconds / 60);
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const status = (run) => h("span", { class: `badge ${run.status}` }, t(`status.${run.status}`));
const progress = (run) => h("div", { class: "progress" }, h("b", { style: { width: `${run.total ? (100 * run.step) / run.total : 0}%` } }));

async function all(view, session) {
  const rows = h("tbody", {});
  const box = h("section", {}, h("h2", {}, t("runs.title")), h("div", { class: "scroll" }, h("table", { id: "runs" }, h("thead", {}, h("tr", {}, ["name", "status", "progress", "loss", "remaining"].map((key) => h("th", {}, t(`runs.${key}`))))), rows)));
  const none = h("p", { class: "faint" }, t("runs.none"), " ", h("a", { href: "#new" }, t("tab.new")));
  const draw = (runs) => {
    replace(rows, runs.map((run) => h("tr", { class: "link", tabIndex: 0, "data-run": run.run, onclick: () => { location.hash = `runs/${encodeURIComponent(run.run)}`; }, onkeydown: (event) => { if (event.key === "Enter") event.currentTarget.click(); } },
      h("td", {}, run.name), h("td", {}, status(run)), h("td", {}, run.step !== undefined ? `${run.step} / ${run.total ?? "?"}` : "", run.total ? progress(run) : null), h("td", {}, label(run.loss)), h("td", {}, run.status === "running" ? duration(run.remaining) : ""))));
    none.hidden = runs.length > 0;
  };
  view.append(box);
  box.append(none);
  draw(await get("runs"));
  return listen({}, (news) => draw(news.runs));
}

// A stream that was lost begins again with what is known already.
function merged(known, fresh) {
  const last = known.length ? known[known.length - 1][0] : -1;
  const all = known.concat(fresh.filter(([step]) => step > last));
  return all.length > 2000 ? all.filter((_, index) => index % 2 === 0 || index === all.length - 1) : all;
}

async function one(view, session, name) {
  const head = h("section", {}), charts = h("section", {}), edits = h("section", {}), log = h("pre", { class: "log", id: "log" }), out = h("section", {});
  const config = h("pre", { class: "log" });
  let run = await get("run", { run: name });
  let shownStep = null;
  view.append(head, charts, edits, out, h("section", {}, h("details", {}, h("summary", {}, t("run.config")), config)), h("section", {}, h("h3", {}, t("run.log")), log));

  // The head is drawn anew every second: a click must count where it began.
  const stop = () => { if (run.stopping) return; run.stopping = true; act("stop", () => notice(t("run.stopping"))); };
  const act = async (path, after) => { await post(`run/${path}`, { run: name }); after?.(); run = await get("run", { run: name }); draw(); };

  function draw() {
    const active = ["running", "preparing", "finishing", "queued"].includes(run.status) || ["running", "queued"].includes(run.state);
    replace(head, h("div", { class: "bar" }, h("h2", { style: { margin: 0 } }, run.name), status(run), h("span", { class: "grow" }),
      active ? h("button", { id: "stop", disabled: Boolean(run.stopping), onpointerdown: (event) => { event.preventDefault(); stop(); }, onclick: () => stop() }, t(run.stopping ? "run.is_stopping" : "run.stop")) : null,
      !active && run.status !== "finished" ? h("button", { class: "main", id: "resume", onclick: () => act("resume") }, t("run.resume")) : null,
      h("button", { id: "duplicate", onclick: async () => { session.duplicate = await post("run/duplicate", { run: name }); location.hash = "new"; } }, t("run.duplicate")),
      !active ? h("button", { id: "delete", onclick: async () => { if (confirm(t("run.really_delete", { name: run.name }))) { await post("run/delete", { run: name }); location.hash = "runs"; } } }, t("run.delete")) : null),
    h("div", { class: "numbers" }, [["step", run.step === undefined ? "–" : `${run.step} / ${run.total ?? "?"}`], ["loss", label(run.loss)], ["tokens", label(run.tokens_per_second)], ["memory", typeof run.memory === "number" ? `${run.memory.toFixed(1)} GiB` : "–"], ["remaining", run.status === "running" ? duration(run.remaining) : "–"]].map(([key, value]) => h("div", {}, h("b", { id: `number-${key}` }, value), h("span", {}, t(`run.${key}`))))),
    run.total ? progress(run) : null,
    (run.warnings ?? []).slice(-3).map((text) => h("p", { class: "small", style: { color: "var(--warn)" } }, text)));
    drawCharts();
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 30;
    log.textContent = run.log ?? "";
    if (isAtEnd) log.scrollTop = log.scrollHeight;
    config.textContent = run.config ?? "";
  }

  function drawCharts() {
    const curves = run.curves ?? {}, measured = (key) => (run.validation ?? []).filter((line) => line[key] !== undefined).map((line) => [line.step, line[key]]);
    const line = (key, title) => ({ name: title ?? "", points: curves[key] ?? [] });
    replace(charts, h("h3", {}, t("run.curves")), h("div", { class: "charts", id: "charts" }, [
      chart(t("run.loss"), [line("loss", t("run.training")), { name: t("run.held_out"), points: measured("held_out_loss") }]),
      chart(t("run.levels"), [1, 2, 3, 4].map((level) => line(`level_${level}`, t(`run.level_${level}`)))),
      chart(t("run.outside"), [{ name: "CIEDE2000", points: measured("outside_colour") }, { name: t("run.cast"), points: measured("cast") }], { whole: true }),
      chart(t("run.done"), [{ name: t("run.done"), points: measured("done") }, { name: "SSIM", points: measured("outside_ssim") }], { whole: true }),
      chart(t("run.tokens"), [line("tokens_per_second")]),
      chart(t("run.memory"), [line("peak_memory_gib")], { whole: true }),
    ].filter(Boolean)));
  }

  function drawEdits() {
    const steps = [...new Set((run.edits ?? []).flatMap((edit) => edit.steps))].sort((a, b) => a - b);
    if (!steps.length) { replace(edits, h("h3", {}, t("run.edits")), h("p", { class: "faint" }, t("run.no_edits"))); return; }
    const at = shownStep ?? steps.length - 1;
    const range = h("input", { type: "range", id: "time", min: "0", max: String(steps.length - 1), value: String(at), "aria-label": t("run.step"), oninput: () => { shownStep = Number(range.value); pictures(); } });
    const told = h("b", {}), grid = h("div", { class: "edits" });
    const pictures = () => {
      const step = steps[Number(range.value)];
      told.textContent = t("run.after_step", { step });
      replace(grid, run.edits.map((edit, number) => {
        const own = edit.steps.filter((value) => value <= step).pop() ?? edit.steps[0];
        const picture = (what) => address("run/picture", { run: name, edit: number, what, step: String(own) });
        const found = run.measured?.[edit.name];
        return h("article", {}, slider(edit.controls ? picture("control0") : null, picture("output"), { label: edit.name, start: 0 }),
          h("p", {}, h("b", {}, edit.name), " ", edit.prompt),
          found?.outside_colour !== undefined ? h("p", { class: "small faint" }, `CIEDE2000 ${label(found.outside_colour)}${found.done !== undefined ? ` · ${Math.round(100 * found.done)} %` : ""}`) : null);
      }));
    };
    replace(edits, h("h3", {}, t("run.edits")), h("div", { class: "timeline" }, told, range, h("span", { class: "faint small" }, t("run.drag"))), grid);
    pictures();
  }

  async function drawOut() {
    if (!run.adapter) { replace(out, h("h3", {}, t("out.title")), h("p", { class: "faint" }, t("out.none"))); return; }
    const files = await get("run/files", { run: name });
    const exported = async (format, button) => {
      button.disabled = true;
      const { job } = await post("run/export", { run: name, format });
      const found = await ended(job);
      notice(found.state === "done" ? t("out.exported") : found.log.slice(-400), found.state !== "done");
      await drawOut();
    };
    replace(out, h("h3", {}, t("out.title")), h("div", { class: "bar" },
      h("button", { id: "export-comfyui", onclick: (event) => exported("comfyui", event.target) }, "ComfyUI"),
      h("button", { id: "export-diffusers", onclick: (event) => exported("diffusers", event.target) }, "diffusers"),
      h("button", { onclick: () => { session.tryRun = name; location.hash = "try"; } }, t("out.try"))),
    h("table", { id: "files" }, files.map((file) => h("tr", {}, h("td", {}, h("a", { href: address("run/download", { run: name, file: file.name }), download: "" }, file.name)), h("td", {}, `${label(file.bytes / 1e6)} MB`)))));
  }

  draw(); drawEdits(); drawOut();
  let seen = { validations: run.validation?.length ?? 0, edits: -1, status: run.status };
  return listen({ run: name, since: String(run.step ?? 0) }, async (news) => {
    const now = news.runs.find((item) => item.run === name);
    if (!now) return;
    const fresh = seen.edits !== (news.edits ?? -1) || seen.validations !== (news.validations ?? 0) || now.status !== run.status || now.state !== run.state;
    seen = { validations: news.validations ?? 0, edits: news.edits ?? -1 };
    if (fresh) {
      run = await get("run", { run: name });
      Object.assign(run, now);
      draw(); drawEdits(); drawOut();
      return;
    }
    Object.assign(run, now);
    for (const [key, points] of Object.entries(news.curves ?? {})) run.curves[key] = merged(run.curves[key] ?? [], points);
    const job = news.jobs.find((item) => item.id === run.job);
    if (job && job.state === "running") run.log = (await get("job", { job: run.job }, true)).log;
    draw();
  });
}
