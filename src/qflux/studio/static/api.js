// Requests to the studio. An error is shown, and thrown so that whoever asked stops.
import { notice } from "./dom.js";

async function ask(method, path, body, isQuiet = false) {
  const options = { method, headers: {} };
  if (body instanceof Blob) options.body = body;
  else if (body !== undefined) { options.body = JSON.stringify(body); options.headers["content-type"] = "application/json"; }
  let response;
  try { response = await fetch(path, options); } catch (error) {
    if (!isQuiet) notice("The studio does not answer. Is it still open in the terminal?", true);
    throw error;
  }
  const found = await response.json().catch(() => ({ error: response.statusText }));
  if (!response.ok) {
    const text = [found.error, found.remedy].filter(Boolean).join(" → ");
    if (!isQuiet) notice(text, true);
    throw new Error(text);
  }
  return found;
}

export const query = (values) => new URLSearchParams(Object.entries(values).filter(([, value]) => value !== undefined && value !== null && value !== "")).toString();
export const get = (path, values = {}, isQuiet = false) => ask("GET", `/api/${path}?${query(values)}`, undefined, isQuiet);
export const post = (path, body = {}) => ask("POST", `/api/${path}`, body);
export const put = (path, blob, values = {}) => ask("PUT", `/api/${path}?${query(values)}`, blob);
export const address = (path, values) => `/api/${path}?${query(values)}`;

// A job is asked about until it has ended.
export async function ended(job, onLook = () => {}) {
  let failures = 0;
  for (;;) {
    let found;
    try { found = await get("job", { job }, ++failures < 5); } catch (error) {
      if (failures >= 5) throw error;
      await new Promise((done) => setTimeout(done, 1500));
      continue;
    }
    failures = 0;
    onLook(found);
    if (!["queued", "running"].includes(found.state)) return found;
    await new Promise((done) => setTimeout(done, 700));
  }
}
