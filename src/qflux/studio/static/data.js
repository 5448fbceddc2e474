// The wall of pairs: only the cards that can be seen exist, however many samples there are.
import { address, ended, get, post } from "./api.js";
import { h, later, notice, replace } from "./dom.js";
import { slider } from "./slider.js";
import { view as look } from "./viewer.js";
import { known, t } from "./words.js";

const GAP = 12, HEIGHT = 300, LEAST = 250, CHUNK = 60;

export async function show(view, session) {
  const set = session.set ?? session.data.find((item) => item.samples)?.id ?? session.data[0]?.id;
  if (!set) { view.append(h("section", {}, t("data.none"))); return; }
  session.set = set;
  const wall = new Wall(view, session, set);
  await wall.open();
  return () => wall.close();
}

class Wall {
  constructor(view, session, set) {
    Object.assign(this, { view, session, set, words: "", only: "", rows: new Map(), cards: new Map(), asked: new Set(), total: 0, masks: false, selected: 0, generation: 0 });
    this.place = this.place.bind(this);
    this.keys = this.keys.bind(this);
  }

  async open() {
    this.about = await get("data", { set: this.set });
    this.filters = h("div", { class: "bar", id: "filters" });
    this.surface = h("div", { id: "wall", tabIndex: 0, role: "list", "aria-label": t("data.wall") });
    const search = h("input", { type: "search", id: "search", class: "grow", placeholder: t("data.search"), oninput: later(() => { this.words = search.value; this.again(); }, 200) });
    const choice = h("select", { id: "set", onchange: () => { this.session.set = choice.value; window.dispatchEvent(new HashChangeEvent("hashchange")); } },
      this.session.data.map((item) => h("option", { value: item.id, selected: item.id === this.set }, `${item.id} (${item.samples ?? item.problem})`)));
    this.undo = h("button", { id: "undo", onclick: () => this.takeBack(false) }, t("data.undo"));
    replace(this.view, h("div", { class: "bar" }, this.session.data.length > 1 ? choice : h("h2", { style: { margin: 0 } }, this.set),
      search,
      h("label", { class: "small" }, h("input", { type: "checkbox", id: "masks", onchange: (event) => { this.masks = event.target.checked; this.redraw(); } }), " ", t("data.masks")),
      h("button", { id: "replace", onclick: () => this.replaceWords() }, t("data.replace")),
      this.undo,
      h("button", { id: "redo", onclick: () => this.takeBack(true) }, t("data.redo")),
      h("button", { class: "main", id: "inspect", onclick: (event) => this.inspect(event.target) }, t("data.inspect"))),
      this.filters, this.surface);
    this.view.append(h("button", { class: "quiet small", id: "again", onclick: async () => { this.about = await get("data", { set: this.set, again: "1" }); this.describe(); await this.again(); } }, t("data.again")));
    window.addEventListener("scroll", this.place, { passive: true });
    window.addEventListener("resize", this.place);
    document.addEventListener("keydown", this.keys);
    this.describe();
    await this.again();
  }

  close() {
    window.removeEventListener("scroll", this.place);
    window.removeEventListener("resize", this.place);
    document.removeEventListener("keydown", this.keys);
    this.surface.remove();
  }

  describe() {
    const chip = (name, text, count) => h("button", { class: "badge", "data-only": name, "aria-pressed": String(this.only === name), onclick: () => { this.only = this.only === name ? "" : name; this.describe(); this.again(); } }, count === undefined ? text : `${text} ${count}`);
    const kinds = Object.entries(this.about.findings).map(([kind, count]) => chip(kind, known(`finding.${kind}`, kind), count));
    const faults = this.about.faults.length ? h("details", { class: "small" }, h("summary", {}, t("data.faults", { count: this.about.faults.length })),
      h("ul", { class: "findings" }, this.about.faults.map((fault) => h("li", { class: "error" }, `${fault.what}: ${fault.problem}`)))) : null;
    replace(this.filters, h("span", { id: "count", class: "faint" }), chip("changed", t("data.changed"), this.about.changed), chip("excluded", t("data.excluded")), chip("mask", t("data.has_mask")), kinds, faults);
    this.count();
  }

  count() {
    const place = document.getElementById("count");
    if (place) place.textContent = t("data.count", { count: this.total, all: this.about.samples });
  }

  async again() {
    this.generation += 1;
    this.rows.clear(); this.asked.clear();
    await this.fetch(0, true);
  }

  // An answer to a question that is no longer asked is dropped; cards are drawn anew where theirs has arrived.
  async fetch(chunk, isFirst = false) {
    if (this.asked.has(chunk)) return;
    this.asked.add(chunk);
    const generation = this.generation;
    let found;
    try { found = await get("samples", { set: this.set, start: chunk * CHUNK, count: CHUNK, words: this.words, only: this.only }); } catch {
      if (generation === this.generation) setTimeout(() => this.asked.delete(chunk), 2000);
      return;
    }
    if (generation !== this.generation) return;
    this.total = found.total;
    for (const [number, card] of this.cards) if (isFirst || Math.floor(number / CHUNK) === chunk) { card.remove(); this.cards.delete(number); }
    found.rows.forEach((row, index) => this.rows.set(chunk * CHUNK + index, row));
    this.count();
    this.place();
  }

  place() {
    const width = this.surface.clientWidth;
    if (!width) return;
    const columns = Math.max(1, Math.floor((width + GAP) / (LEAST + GAP)));
    const each = (width - GAP * (columns - 1)) / columns;
    this.columns = columns;
    this.surface.style.height = `${Math.ceil(this.total / columns) * (HEIGHT + GAP)}px`;
    const top = -this.surface.getBoundingClientRect().top;
    const first = Math.max(0, Math.floor(top / (HEIGHT + GAP)) - 1) * columns;
    const last = Math.min(this.total, (Math.ceil((top + window.innerHeight) / (HEIGHT + GAP)) + 1) * columns);
    for (const [number, card] of this.cards) if (number < first || number >= last) { card.remove(); this.cards.delete(number); }
    for (let number = first; number < last; number++) {
      const row = this.rows.get(number);
      if (!row) { this.fetch(Math.floor(number / CHUNK)); continue; }
      if (!this.cards.has(number)) { const card = this.card(row, number); this.cards.set(number, card); this.surface.append(card); }
      Object.assign(this.cards.get(number).style, { left: `${(number % columns) * (each + GAP)}px`, top: `${Math.floor(number / columns) * (HEIGHT + GAP)}px`, width: `${each}px`, height: `${HEIGHT}px` });
    }
  }

  card(row, number) {
    const picture = (role) => address("sample-picture", { set: this.set, sample: row.name, role, v: role === "mask" ? row.mask : undefined });
    const [width, height] = row.images[0];
    const frame = slider(row.images.length > 1 ? picture("control0") : null, picture("target"), { label: row.name, width: width || 1, height: height || 1 });
    Object.assign(frame.style, (width || 1) / (height || 1) > 1.35 ? { width: "100%" } : { height: "100%" });
    if (this.masks && row.has_mask) frame.append(h("div", { class: "mask", style: { maskImage: `url("${picture("mask")}")`, webkitMaskImage: `url("${picture("mask")}")` } }));
    const prompt = h("div", { class: "prompt", title: row.prompt, onclick: () => this.edit(row, number, prompt) }, row.prompt);
    const badges = [...row.findings.slice(0, 3).map((finding) => h("span", { class: `badge ${finding.level}`, title: finding.detail }, known(`finding.${finding.kind}`, finding.kind)))];
    if (row.images.length > 2) badges.push(h("span", { class: "badge" }, t("data.controls", { count: row.images.length - 1 })));
    if (row.captions.length) badges.push(h("span", { class: "badge" }, t("data.captions", { count: row.captions.length + 1 })));
    if (row.has_mask) badges.push(h("span", { class: "badge" }, t("data.mask")));
    if (row.original) badges.push(h("span", { class: "badge warning", title: row.original }, t("data.changed")));
    return h("article", { class: row.excluded ? "card excluded" : "card", role: "listitem", "data-name": row.name, ondblclick: () => this.look(number) },
      h("div", { class: "head" }, h("b", { title: row.name }, row.name), badges,
        h("button", { class: "quiet open", "aria-label": t("data.open"), onclick: () => this.look(number) }, "⤢")),
      h("div", { class: "stage" }, frame), prompt);
  }

  edit(row, number, prompt) {
    const area = h("textarea", {}, "");
    area.value = row.prompt;
    const done = async (isKept) => {
      if (area.dataset.done) return;
      area.dataset.done = "yes";
      if (isKept && area.value.trim() && area.value.trim() !== row.prompt) await this.change([{ sample: row.name, prompt: area.value.trim() }]);
      else area.replaceWith(prompt);
    };
    area.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); done(true); }
      if (event.key === "Escape") done(false);
    });
    area.addEventListener("blur", () => done(true));
    prompt.replaceWith(area);
    area.focus();
  }

  async change(changes) {
    try { this.about = await post("changes", { set: this.set, changes }); } catch { return this.redraw(); }
    this.describe();
    await this.refreshed();
  }

  // What is on the screen anew, where it is.
  async refreshed() {
    const chunks = [...this.asked];
    this.generation += 1;
    this.asked.clear();
    await Promise.all(chunks.map((chunk) => this.fetch(chunk)));
  }

  redraw() {
    for (const card of this.cards.values()) card.remove();
    this.cards.clear();
    this.place();
  }

  async takeBack(again) {
    const found = await post("undo", { set: this.set, again });
    this.about = found;
    if (!found.done) notice(t(again ? "data.nothing_to_redo" : "data.nothing_to_undo"));
    this.describe();
    await this.refreshed();
  }

  async replaceWords() {
    const find = h("input", { id: "find" }), put = h("input", { id: "put" }), preview = h("div", { class: "small faint" });
    const tell = later(async () => {
      if (!find.value) return replace(preview);
      const found = await post("replace", { set: this.set, find: find.value, put: put.value, try: true });
      replace(preview, h("p", {}, t("data.would_change", { count: found.count })), found.examples.map((item) => h("p", {}, `${item.before} → ${item.prompt}`)));
    }, 200);
    find.addEventListener("input", tell); put.addEventListener("input", tell);
    const dialog = h("dialog", {}, h("h2", {}, t("data.replace")), h("form", { class: "form", method: "dialog", onsubmit: async (event) => {
      event.preventDefault();
      if (!find.value) return;
      const found = await post("replace", { set: this.set, find: find.value, put: put.value });
      dialog.close(); dialog.remove();
      notice(t("data.replaced", { count: found.count }));
      this.about = await get("data", { set: this.set });
      this.describe();
      await this.refreshed();
    } }, h("label", {}, t("data.find"), find), h("label", {}, t("data.put"), put), preview,
      h("div", { class: "bar" }, h("button", { class: "main" }, t("data.do_replace")), h("button", { type: "button", onclick: () => { dialog.close(); dialog.remove(); } }, t("cancel")))));
    document.body.append(dialog);
    dialog.showModal();
  }

  async inspect(button) {
    button.disabled = true;
    button.textContent = t("data.inspecting");
    try {
      const { job } = await post("inspect", { set: this.set, model: this.session.small.name });
      const found = await ended(job);
      if (found.state !== "done") notice(found.log.split("\n").slice(-6).join("\n"), true);
      else {
        this.about = await post("findings", { set: this.set });
        this.describe();
        await this.refreshed();
      }
    } finally { button.disabled = false; button.textContent = t("data.inspect"); }
  }

  look(number) {
    this.selected = number;
    look({ set: this.set, number, total: this.total, row: async (at) => { if (!this.rows.has(at)) await this.fetch(Math.floor(at / CHUNK)); return this.rows.get(at); },
      change: (changes) => this.change(changes),
      painted: async () => { this.about = await get("data", { set: this.set }); this.describe(); await this.refreshed(); } });
  }

  keys(event) {
    if (document.querySelector("dialog[open]") || /INPUT|TEXTAREA|SELECT/.test(document.activeElement?.tagName ?? "")) return;
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
    if (by && document.activeElement?.closest(".card")) {
      event.preventDefault();
      const own = [...this.cards].find(([, card]) => card.contains(document.activeElement))?.[0] ?? 0;
      this.selected = Math.min(this.total - 1, Math.max(0, own + by));
      this.cards.get(this.selected)?.querySelector(".open").focus();
      this.cards.get(this.selected)?.scrollIntoView({ block: "nearest" });
    } else if (event.key === "z" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); this.takeBack(event.shiftKey); }
  }
}
