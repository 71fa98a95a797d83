// Data, elements, formats, sections and the theme. The other files share this scope.
const data = JSON.parse(document.getElementById("report-data").textContent);
const main = document.getElementById("main");
const NS = "http://www.w3.org/2000/svg";

// Children are elements or text; text never becomes HTML.
function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(NS, tag), attributes, children);

const isNumber = (x) => typeof x === "number" && Number.isFinite(x);
const digits = (x, count = 3) => {
  if (!isNumber(x)) return "–";
  if (x !== 0 && (Math.abs(x) >= 1e6 || Math.abs(x) < 1e-4)) return x.toExponential(2);
  return String(Number(x.toPrecision(count)));
};
const fixed = (x, places) => (isNumber(x) ? x.toFixed(places) : "–");
const percent = (x, places = 1) => (isNumber(x) ? `${(100 * x).toFixed(places)} %` : "–");
function human(x, unit, base = 1000) {
  if (!isNumber(x)) return "–";
  for (const [power, letter] of [[4, "T"], [3, "G"], [2, "M"], [1, "k"]]) {
    if (Math.abs(x) >= base ** power) return `${digits(x / base ** power)} ${letter}${unit}`;
  }
  return `${digits(x)} ${unit}`.trim();
}
const bytes = (x) => human(x, "B");
const micro = (seconds) => (isNumber(seconds) ? `${fixed(seconds * 1e6, seconds < 1e-5 ? 1 : 0)} µs` : "–");
const count = (n, word, plural = `${word}s`) => `${n.toLocaleString("en")} ${n === 1 ? word : plural}`;

const SCHEMES = {
  static: "int8 static",
  dynamic_per_token: "int8 per token",
  dynamic_per_tensor: "int8 per tensor",
  weight_only: "weights only",
  float: "float",
};
const schemeClass = (scheme) => (scheme in SCHEMES ? scheme : "other");
const schemeName = (scheme) => SCHEMES[scheme] || String(scheme).replaceAll("_", " ");
const schemeCell = (scheme) =>
  h("span", { class: "nowrap" }, h("span", { class: `swatch ${schemeClass(scheme)}`, "aria-hidden": "true" }), schemeName(scheme));

function sharedPrefix(names) {
  if (names.length < 2) return "";
  const parts = names.map((name) => name.split("."));
  let shared = 0;
  while (parts.every((p) => p.length > shared + 1 && p[shared] === parts[0][shared])) shared++;
  return parts[0].slice(0, shared).map((part) => `${part}.`).join("");
}

// A dotted name that may wrap after its separators; the last part stands out.
function nameParts(name) {
  const pieces = name.split(/(?<=[./_])/);
  const last = name.split(/(?<=[./])/).pop();
  const head = name.slice(0, name.length - last.length);
  const wrap = (text) => text.split(/(?<=[./_])/).map((piece) => [piece, h("wbr", {})]);
  return pieces.length > 1 && head ? [h("span", { class: "head" }, wrap(head)), wrap(last)] : wrap(name);
}

function section(id, title, lead) {
  const made = h("section", { id, "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title` }, title));
  if (lead) made.append(h("p", { class: "lead" }, lead));
  main.append(made);
  document.getElementById("nav").append(h("a", { href: `#${id}` }, title));
  return made;
}

function table(caption, columns, rows, attributes = {}) {
  const cells = (row) => columns.map(([, cell, kind]) => h("td", { class: kind }, cell(row)));
  return h("div", { class: "scroll card", role: "region", "aria-label": caption, tabindex: "0", ...attributes },
    h("table", {},
      h("caption", { class: "visually-hidden" }, caption),
      h("thead", {}, h("tr", {}, columns.map(([name, , kind]) => h("th", { scope: "col", class: kind }, name)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, cells(row))))));
}

const facts = (pairs) =>
  h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));

// The choice is kept where the browser allows it; a file without storage starts as the system asks.
const themes = ["auto", "light", "dark"];
function applyTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  const button = document.getElementById("theme");
  button.textContent = { auto: "Theme: auto", light: "Theme: light", dark: "Theme: dark" }[theme];
  button.dataset.theme = theme;
}
function storedTheme() {
  try {
    const found = localStorage.getItem("bitwright-theme");
    return themes.includes(found) ? found : "auto";
  } catch {
    return "auto";
  }
}
applyTheme(storedTheme());
document.getElementById("theme").addEventListener("click", (event) => {
  const next = themes[(themes.indexOf(event.currentTarget.dataset.theme) + 1) % themes.length];
  applyTheme(next);
  try {
    localStorage.setItem("bitwright-theme", next);
  } catch { /* without storage the choice lasts until the page closes */ }
});
