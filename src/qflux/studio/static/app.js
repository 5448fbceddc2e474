// The frame of the page: tabs, language, light or dark, and which view is shown. Views are modules with `show(place)`.
import { get } from "./api.js";
import { h, replace } from "./dom.js";
import { speak, t } from "./words.js";
import * as data from "./data.js";
import * as draft from "./draft.js";
import * as runs from "./runs.js";
import * as compare from "./compare.js";
import * as trying from "./trying.js";

const VIEWS = { data, new: draft, runs, compare, try: trying };
export const session = {};
let leave = () => {};
let shown = 0;

function stored(key, fallback) { try { return localStorage.getItem(key) ?? fallback; } catch { return fallback; } }
function keep(key, value) { try { localStorage.setItem(key, value); } catch { /* a private window */ } }

function tabs(current) {
  const links = Object.keys(VIEWS).map((name) => h("a", { href: `#${name}`, "aria-current": name === current ? "page" : null }, t(`tab.${name}`)));
  replace(document.getElementById("tabs"), links);
  const language = document.documentElement.lang === "zh" ? "en" : "zh";
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  replace(document.getElementById("tools"),
    h("button", { class: "quiet", id: "language", onclick: () => choose(language, null) }, language === "zh" ? "中文" : "English"),
    h("button", { class: "quiet", id: "theme", onclick: () => choose(null, theme) }, t(`theme.${theme}`)));
}

async function choose(language, theme) {
  if (language) { keep("language", language); await speak(language); }
  if (theme) { keep("theme", theme); document.documentElement.dataset.theme = theme; }
  await show();
}

async function show() {
  leave();
  leave = () => {};
  const number = ++shown;
  const [name, ...rest] = location.hash.slice(1).split("/");
  const current = name in VIEWS ? name : "data";
  tabs(current);
  // Each view has a place of its own: one that is still loading when it is left must not draw into the next.
  const place = h("div", {});
  replace(document.getElementById("view"), place);
  const ended = (await VIEWS[current].show(place, session, decodeURIComponent(rest.join("/")))) ?? (() => {});
  if (number === shown) leave = ended;
  else ended();
}

async function open() {
  const language = stored("language", navigator.language.startsWith("zh") ? "zh" : "en");
  await speak(language);
  const dark = window.matchMedia?.("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = stored("theme", dark ? "dark" : "light");
  Object.assign(session, await get("session"));
  document.getElementById("place").textContent = session.root;
  document.title = `${session.root} · qflux studio`;
  window.addEventListener("hashchange", show);
  await show();
  document.body.dataset.ready = "yes";
}

open();
