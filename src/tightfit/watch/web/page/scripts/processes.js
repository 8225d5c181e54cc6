// Processes in a table that can be sorted and filtered, and what containers use together.
const MAX_ROWS = 300;
const COLUMNS = [
  { name: "GPU", key: (each) => each.gpu, classes: "number" },
  { name: "PID", key: (each) => each.pid, classes: "number" },
  { name: "user", key: (each) => each.user },
  { name: "memory", key: (each) => each.used_bytes, show: (each) => formatBytes(each.used_bytes), classes: "number" },
  { name: "next hour", key: (each) => each.forecast?.upper_bytes ?? null, show: (each) => formatBound(each.forecast), classes: "number" },
  { name: "torch", key: (each) => each.allocated_bytes, show: (each) => (each.allocated_bytes === null ? "-" : `${formatBytes(each.allocated_bytes)} of ${formatBytes(each.reserved_bytes)}`), classes: "number" },
  { name: "time", key: (each) => (each.started === null ? null : -each.started), show: (each, now) => formatAge(now - (each.started ?? NaN)), classes: "number" },
  { name: "container", key: (each) => each.container, show: (each) => each.container || "-" },
  { name: "command", key: (each) => each.command, classes: "command" },
];

class ProcessTable {
  constructor() {
    this.sort = { column: 3, isDescending: true };
    this.head = byId("processes").tHead;
    this.body = byId("processes").tBodies[0];
    const row = element("tr");
    COLUMNS.forEach((column, at) => {
      const button = element("button", { type: "button", text: column.name });
      button.addEventListener("click", () => this.sortBy(at));
      row.append(element("th", { scope: "col", classes: column.classes === "number" ? "number" : "" }, button));
    });
    this.head.append(row);
    byId("filter").addEventListener("input", () => this.draw());
  }

  sortBy(column) {
    const isDescending = this.sort.column === column ? !this.sort.isDescending : column >= 3 && column <= 6;
    this.sort = { column, isDescending };
    this.draw();
  }

  show(state) {
    this.state = state;
    this.draw();
  }

  draw() {
    if (!this.state) return;
    const words = byId("filter").value.trim().toLowerCase();
    const found = this.state.processes.filter((each) => `${each.pid} ${each.user} ${each.container} ${each.command}`.toLowerCase().includes(words));
    const { key } = COLUMNS[this.sort.column], sign = this.sort.isDescending ? -1 : 1;
    found.sort((one, other) => compare(key(one), key(other), sign) || one.pid - other.pid);
    this.body.replaceChildren(...found.slice(0, MAX_ROWS).map((each) => this.row(each)));
    [...this.head.rows[0].cells].forEach((cell, at) => {
      if (at === this.sort.column) cell.setAttribute("aria-sort", this.sort.isDescending ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    byId("more").textContent = found.length > MAX_ROWS ? `${found.length - MAX_ROWS} more: filter, or sort by another column` : found.length ? "" : "none";
  }

  row(process) {
    return element("tr", {}, ...COLUMNS.map(({ key, show, classes = "" }) => {
      const text = show ? show(process, this.state.time) : String(key(process) ?? "-");
      return element("td", { classes, text, ...(classes === "command" ? { title: text } : {}) });
    }));
  }
}

// What nobody knows comes last, whichever way.
function compare(one, other, sign) {
  if (one === null || other === null) return (one === null) - (other === null);
  return sign * (one < other ? -1 : one > other ? 1 : 0);
}

function drawContainers(state) {
  const rows = state.containers.map((each) => element("tr", {}, element("td", { text: each.name }), element("td", { classes: "number", text: formatBytes(each.used_bytes) })));
  byId("containers").tBodies[0].replaceChildren(...(rows.length ? rows : [element("tr", {}, element("td", { classes: "quiet", text: "none" }))]));
}
