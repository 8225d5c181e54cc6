// Colours after Okabe and Ito (2008), which people with any colour vision tell apart, and a pattern for each so that colour is not the only cue.
const LABELS = {
  parameters: "parameters",
  gradients: "gradients",
  optimizer_state: "optimizer state",
  activations: "activations",
  temporaries: "temporaries",
  inputs: "inputs",
  workspace: "library workspaces",
  unknown: "unknown",
  cache: "unused cache",
  context: "CUDA context",
};
// From the bottom of the stack up: what lives longest is lowest.
const STACK = ["parameters", "optimizer_state", "gradients", "inputs", "workspace", "unknown", "activations", "temporaries"];
const ON_LIGHT_TEXT = new Set(["parameters"]);
const TILE = 6;

const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const patternsOn = () => document.documentElement.dataset.patterns === "on";

const STROKES = {
  gradients: (pen) => { pen.moveTo(-1, TILE + 1); pen.lineTo(TILE + 1, -1); pen.moveTo(-1, 1); pen.lineTo(1, -1); pen.moveTo(TILE - 1, TILE + 1); pen.lineTo(TILE + 1, TILE - 1); },
  temporaries: (pen) => { pen.moveTo(-1, -1); pen.lineTo(TILE + 1, TILE + 1); pen.moveTo(-1, TILE - 1); pen.lineTo(1, TILE + 1); pen.moveTo(TILE - 1, -1); pen.lineTo(TILE + 1, 1); },
  inputs: (pen) => { pen.moveTo(0, TILE / 2); pen.lineTo(TILE, TILE / 2); },
  workspace: (pen) => { pen.moveTo(TILE / 2, 0); pen.lineTo(TILE / 2, TILE); },
  optimizer_state: (pen) => { pen.arc(TILE / 2, TILE / 2, 0.7, 0, 2 * Math.PI); },
};

// A canvas pattern for a category in device pixels, or null where it is plain.
function patternOf(pen, category, scale) {
  const stroke = STROKES[category];
  if (!stroke || !patternsOn()) return null;
  const tile = document.createElement("canvas");
  tile.width = tile.height = Math.round(TILE * scale);
  const tilePen = tile.getContext("2d");
  tilePen.scale(tile.width / TILE, tile.height / TILE);
  tilePen.strokeStyle = colourOf("ink");
  tilePen.lineWidth = 1;
  tilePen.beginPath();
  stroke(tilePen);
  tilePen.stroke();
  return pen.createPattern(tile, "repeat");
}

function swatch(category) {
  return element("span", { class: "swatch", "data-category": category });
}
