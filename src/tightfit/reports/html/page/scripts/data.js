// The page's data, its numbers as people read them, and elements that take text as text.
const page = JSON.parse(document.getElementById("data").textContent);
const texts = page.texts;
const summary = page.summary;
const CATEGORIES = page.categories;

const contextBytes = summary.context_bytes ?? 0;
const deviceBytes = summary.peak_reserved_bytes + contextBytes;
// What is available to torch's caching allocator.
const roomBytes = summary.capacity_bytes === null ? null : summary.capacity_bytes - contextBytes;

const byId = (id) => document.getElementById(id);

function sums(differences, unit = 1) {
  const column = new Float64Array(differences.length);
  let sum = 0;
  for (let i = 0; i < differences.length; i++) {
    sum += differences[i];
    column[i] = sum * unit;
  }
  return column;
}

const UNITS = [["TiB", 2 ** 40, 2], ["GiB", 2 ** 30, 2], ["MiB", 2 ** 20, 1], ["KiB", 2 ** 10, 1]];

function bytes(count) {
  for (const [unit, size, digits] of UNITS) {
    if (Math.abs(count) >= size) return `${(count / size).toFixed(digits)} ${unit}`.replace("-", "−");
  }
  return `${count} B`;
}

const whole = (count) => count.toLocaleString("en-US");

function percent(part, all) {
  if (!all || !part) return "0 %";
  const share = (100 * part) / all;
  return Math.abs(share) < 1 ? "under 1 %" : `${share.toFixed(0)} %`;
}

function duration(microseconds) {
  const size = Math.abs(microseconds);
  if (size >= 1e6) return `${(microseconds / 1e6).toFixed(size >= 1e8 ? 0 : 2)} s`;
  if (size >= 1e3) return `${(microseconds / 1e3).toFixed(1)} ms`;
  return `${Math.round(microseconds)} µs`;
}

// Words and digits in an order that people expect; elements are made with attributes and children, never from markup.
const collator = new Intl.Collator("en", { numeric: true });

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// A path or a dotted name that may be broken after its dots and slashes.
function breakable(name) {
  const pieces = name.split(/(?<=[./])/);
  return pieces.flatMap((piece, i) => (i ? [element("wbr"), piece] : [piece]));
}

function headings(...names) {
  return element("thead", {}, element("tr", {}, ...names.map((name) =>
    element("th", { scope: "col", class: name.startsWith("#") ? "number" : null }, name.replace("#", "")))));
}

const numberCell = (text, kind = "") => element("td", { class: `number ${kind}`.trim() }, text);
