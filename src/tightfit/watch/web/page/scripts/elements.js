// Elements are made here and nowhere from text: whatever a process is called, it is shown as text.
const SVG = "http://www.w3.org/2000/svg";

function element(name, { text, classes = "", ...attributes } = {}, ...children) {
  const made = document.createElement(name);
  if (classes) made.className = classes;
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawn(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const byId = (id) => document.getElementById(id);

// Okabe and Ito's colours and shades between them; a process keeps its colour from one drawing to the next.
const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a6fb0", "#b8a500", "#4d908e", "#a05a2c", "#7aa6c2", "#c2577a"];
const colours = new Map();

function colourOf(key, keys) {
  if (!colours.has(key)) {
    const taken = new Set(keys.map((each) => colours.get(each)));
    const free = PALETTE.find((each) => !taken.has(each)) ?? PALETTE[colours.size % PALETTE.length];
    colours.set(key, free);
  }
  return colours.get(key);
}
