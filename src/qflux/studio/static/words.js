// What the page says, in the language that was chosen. A word that is missing in a dictionary is shown as its key.
let dictionary = {};

export async function speak(language) {
  const response = await fetch(`/static/${language}.json`);
  dictionary = await response.json();
  document.documentElement.lang = language;
}

export function t(key, values = {}) {
  return (dictionary[key] ?? key).replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "");
}

export const known = (key, fallback) => dictionary[key] ?? fallback;
