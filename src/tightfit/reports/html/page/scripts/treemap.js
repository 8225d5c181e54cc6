// Memory at the peak as nested areas (squarified, after Bruls, Huizing and van Wijk, 2000); a part that has parts can be entered.
const [NAME, MAIN, SIZE, COUNT, PARTS] = [0, 1, 2, 3, 4];
const HEADER = 20;

// Rectangles [x, y, width, height] for sizes in descending order.
function squarify(sizes, x, y, width, height) {
  const all = sizes.reduce((sum, size) => sum + size, 0);
  const boxes = [];
  if (!all || width <= 0 || height <= 0) return sizes.map(() => [x, y, 0, 0]);
  const scale = (width * height) / all;
  const areas = sizes.map((size) => size * scale);
  const worst = (sum, most, least, side) => Math.max((side * side * most) / (sum * sum), (sum * sum) / (side * side * least));
  for (let i = 0; i < areas.length; ) {
    const side = Math.min(width, height);
    let sum = areas[i];
    let j = i + 1;
    while (j < areas.length && worst(sum + areas[j], areas[i], areas[j], side) <= worst(sum, areas[i], areas[j - 1], side)) sum += areas[j++];
    const thick = side ? sum / side : 0;
    let along = 0;
    for (; i < j; i++) {
      const length = thick ? areas[i] / thick : 0;
      boxes.push(width >= height ? [x, y + along, thick, length] : [x + along, y, length, thick]);
      along += length;
    }
    if (width >= height) { x += thick; width -= thick; } else { y += thick; height -= thick; }
  }
  return boxes;
}

class Treemap {
  constructor(root) {
    this.box = byId("treemap");
    this.path = [root];
    this.box.addEventListener("keydown", (event) => {
      if ((event.key === "Escape" || event.key === "Backspace") && this.path.length > 1) { event.preventDefault(); this.go(this.path.length - 2, true); }
    });
    new ResizeObserver(() => this.draw()).observe(this.box);
    this.draw();
  }

  get here() { return this.path[this.path.length - 1]; }

  go(depth, takesFocus) {
    const left = this.path[depth + 1];
    this.path = this.path.slice(0, depth + 1);
    this.draw();
    if (takesFocus) (this.cells.get(left) ?? this.box.firstChild)?.focus();
  }

  enter(nodes) {
    this.path.push(...nodes);
    this.draw();
    this.box.firstChild?.focus({ preventScroll: true });
  }

  draw() {
    const crumbs = this.path.flatMap((node, i) => {
      const name = texts[node[NAME]] || "everything";
      const crumb = i === this.path.length - 1
        ? element("span", { "aria-current": "true" }, `${name}, ${bytes(node[SIZE])}`)
        : element("button", { type: "button", class: "plain", onclick: () => this.go(i, true) }, name);
      return i ? [element("span", { "aria-hidden": "true" }, "›"), crumb] : [crumb];
    });
    byId("tree-path").replaceChildren(...crumbs);
    const parts = this.here[PARTS] ?? [];
    const boxes = squarify(parts.map((part) => part[SIZE]), 0, 0, this.box.clientWidth, this.box.clientHeight);
    this.cells = new Map();
    this.entries = new WeakMap();
    this.parts = new WeakMap();
    const focused = this.box.contains(document.activeElement);
    this.box.replaceChildren(...parts.map((part, i) => this.cell(part, boxes[i])));
    if (focused && !this.box.contains(document.activeElement)) this.box.firstChild?.focus({ preventScroll: true });
    this.say(null);
  }

  cell(part, [x, y, width, height]) {
    const deep = PARTS in part;
    const name = texts[part[NAME]];
    const category = CATEGORIES[part[MAIN]];
    const cell = element("button", {
      type: "button",
      class: `cell ${deep ? "deep" : ON_LIGHT_TEXT.has(category) ? "light" : "dark"}`,
      "data-category": deep ? null : category,
      "aria-label": `${name}: ${bytes(part[SIZE])}${deep ? ", has parts" : `, ${LABELS[category]}`}`,
      onclick: (event) => deep && this.enter(this.entered(event) ?? [part]),
      onfocus: () => this.say(part),
      onpointermove: (event) => this.say(this.parts.get(event.target.closest(".inner")) ?? part),
    });
    place(cell, x, y, Math.max(0, width - 1), Math.max(0, height - 1));
    if (width > 34 && height > 16) cell.append(this.title(name, part[SIZE], width));
    if (deep) this.fill(cell, part, width - 1, height - 1, [part]);
    this.cells.set(part, cell);
    return cell;
  }

  title(name, size, width) {
    const title = element("span", { class: "name", "aria-hidden": "true" }, element("b", {}, name));
    if (width > 110) title.append(` ${bytes(size)}`);
    return title;
  }

  // What a click goes into: the innermost part with parts that it hits. Of a key it is the button's own.
  entered(event) {
    let box = event.detail ? event.target : null;
    while (box && !this.entries.has(box)) box = box.parentElement;
    return box && this.entries.get(box);
  }

  // The parts of a part under its name, and theirs, as long as there is room; `path` leads to it from what is entered now.
  fill(cell, part, width, height, path) {
    const top = height > 34 && width > 40 ? HEADER : 2;
    const boxes = squarify(part[PARTS].map((inner) => inner[SIZE]), 2, top, width - 4, height - top - 2);
    part[PARTS].forEach((inner, i) => {
      const [x, y, w, h] = boxes[i];
      if (w < 1.5 || h < 1.5) return;
      const category = CATEGORIES[inner[MAIN]];
      const opens = PARTS in inner && w > 110 && h > 90;
      const box = element("span", { class: `inner ${opens ? "open" : ON_LIGHT_TEXT.has(category) ? "light" : ""}`, "data-category": opens ? null : category, "aria-hidden": "true" });
      place(box, x, y, w - 1, h - 1);
      if (w > 44 && h > 16) box.append(this.title(texts[inner[NAME]], inner[SIZE], w));
      if (PARTS in inner) this.entries.set(box, [...path, inner]);
      this.parts.set(box, inner);
      if (opens) this.fill(box, inner, w - 1, h - 1, [...path, inner]);
      cell.append(box);
    });
  }

  say(part) {
    const shown = part ?? this.here;
    const name = part ? texts[part[NAME]] : texts[this.here[NAME]] || "everything";
    const words = [`${name}: ${bytes(shown[SIZE])} in ${whole(shown[COUNT])} block${shown[COUNT] === 1 ? "" : "s"}`, `${percent(shown[SIZE], this.path[0][SIZE])} of what is allocated`];
    if (shown[MAIN] >= 0) words.push(PARTS in shown ? `mostly ${LABELS[CATEGORIES[shown[MAIN]]]}` : LABELS[CATEGORIES[shown[MAIN]]]);
    const hint = part && PARTS in part ? ". Enter or click goes into it, Esc back." : ".";
    byId("tree-status").textContent = words.join(", ") + hint;
  }
}

function place(box, x, y, width, height) {
  box.style.left = `${x}px`;
  box.style.top = `${y}px`;
  box.style.width = `${width}px`;
  box.style.height = `${height}px`;
}
