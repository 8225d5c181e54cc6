// The allocation sites, and the largest blocks: sorted by any column, filtered by words, each with its whole stack.
const FIRST_ROWS = 60;

class PlacesTable {
  constructor(timeline) {
    this.timeline = timeline;
    this.kinds = { places: placesKind(), blocks: blocksKind() };
    this.kind = "places";
    for (const button of document.querySelectorAll("[data-rows]")) button.addEventListener("click", () => this.choose(button.dataset.rows));
    byId("filter").addEventListener("input", () => { this.number = FIRST_ROWS; this.fill(); });
    this.choose("places");
  }

  choose(kind) {
    this.kind = kind;
    this.number = FIRST_ROWS;
    for (const button of document.querySelectorAll("[data-rows]")) button.setAttribute("aria-pressed", button.dataset.rows === kind);
    const { columns, rows } = this.kinds[kind];
    this.hidden = new Set(["module", "line"].filter((key) => rows.length && rows.every((row) => !row[key])));
    this.columns = columns.filter(([, key]) => !this.hidden.has(key));
    this.head = element("tr", {}, ...this.columns.map(([heading, key, isNumber]) =>
      element("th", { scope: "col", class: isNumber ? "number" : null, "data-key": key },
        element("button", { type: "button", onclick: () => this.sort(key) }, heading))));
    this.body = element("tbody");
    byId("places-table").replaceChildren(element("table", { class: "data" }, element("thead", {}, this.head), this.body));
    this.fill();
  }

  sort(key) {
    const kind = this.kinds[this.kind];
    const isNumber = this.columns.find(([, name]) => name === key)[2];
    kind.descending = kind.sortBy === key ? !kind.descending : Boolean(isNumber);
    kind.sortBy = key;
    this.fill();
  }

  // How many rows are shown before more are asked for: none that have no bytes or blocks of what the table is sorted by, if any has.
  firstRows(found, { columns, sortBy, descending }) {
    const [, , kind] = columns.find(([, key]) => key === sortBy);
    const counts = descending && (kind === "bytes" || kind === "count");
    const empty = counts ? found.findIndex((row) => row[sortBy] === 0) : -1;
    return Math.min(this.number, found.length, empty > 0 ? empty : Infinity);
  }

  fill() {
    const kind = this.kinds[this.kind];
    const { rows, sortBy, descending, noun } = kind;
    const sign = descending ? -1 : 1;
    const wanted = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter((row) => wanted.every((word) => row.words.includes(word)));
    const compare = (a, b) => (typeof a === "number" ? a - b || 0 : collator.compare(a, b));
    found.sort((a, b) => sign * compare(a[sortBy], b[sortBy]));
    for (const cell of this.head.children) {
      cell.setAttribute("aria-sort", cell.dataset.key === sortBy ? (descending ? "descending" : "ascending") : "none");
    }
    const number = this.number === Infinity ? found.length : this.firstRows(found, kind);
    this.body.replaceChildren(...found.slice(0, number).map((row) => this.row(row)));
    byId("places-table").querySelector(".more")?.remove();
    if (found.length > number) {
      const more = () => { this.number = Infinity; this.fill(); };
      byId("places-table").append(element("button", { type: "button", class: "more", onclick: more }, `Show all ${whole(found.length)} ${noun}`));
    }
    const shown = found.reduce((sum, row) => sum + (row.peak ?? row.size), 0);
    byId("places-status").textContent = `${whole(number)} of ${whole(found.length)} ${noun} shown` +
      `${wanted.length ? ` of ${whole(rows.length)}` : ""}${shown ? `; ${bytes(shown)} at the peak` : ""}.`;
  }

  row(row) {
    return element("tr", {}, ...this.columns.map(([, key, kind]) => this.cell(row, key, kind)));
  }

  cell(row, key, kind) {
    const value = row[key];
    if (key === "what") return element("td", { class: "what" }, swatch(row.category), value);
    if (key === "line") return element("th", { scope: "row", class: "line" }, ...this.line(row));
    if (key === "module") return element("td", { class: "module" }, ...breakable(value));
    if (kind === "event") {
      if (value < 0) return numberCell("before the first");
      const go = () => { this.timeline.moves.goToEvent(value); this.timeline.box.focus({ preventScroll: true }); byId("timeline").scrollIntoView(); };
      return element("td", { class: "number" }, element("button", { type: "button", class: "plain", onclick: go, "aria-label": `Show event ${whole(value)} in the timeline` }, whole(value)));
    }
    if (kind === "life") return numberCell(value === Infinity ? "to the end" : whole(value));
    return numberCell(value ? (kind === "bytes" ? bytes(value) : whole(value)) : "");
  }

  // The user's line, which opens the stack under it where there is more of one.
  line(row) {
    const words = [...breakable(row.line || "no line known"), element("span", { class: "dim" }, row.name ? ` ${row.name}` : "", row.caller ? ` from ${row.caller}` : "")];
    if (row.frames.length < 2) return words;
    const button = element("button", { type: "button", class: "plain", "aria-expanded": "false" }, ...words);
    button.addEventListener("click", () => this.unfold(button, row));
    return [button];
  }

  unfold(button, row) {
    const line = button.closest("tr");
    const open = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", !open);
    if (open) { line.nextSibling.remove(); return; }
    const frames = row.frames.map((frame, i) => element("li", { class: row.own.includes(i) ? "own" : null }, texts[frame]));
    line.after(element("tr", { class: "stack" }, element("td", { colspan: this.columns.length }, element("ol", {}, ...frames))));
  }
}
