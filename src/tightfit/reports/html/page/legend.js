// Beside the timeline: each category at the peak and at the cursor, and what the run was doing at the cursor.
class Legend {
  constructor(view) {
    this.view = view;
    this.cells = new Map();
    const body = byId("legend").tBodies[0];
    for (const name of [...view.names].reverse()) body.append(this.row(name, swatch(name), summary.at_peak[name]));
    const rule = (row) => { row.classList.add("rule"); return row; };
    body.append(rule(this.row("allocated", null, summary.peak_allocated_bytes)));
    body.append(this.row("reserved", element("span", { class: "swatch line" }), summary.reserved_at_peak_bytes));
    if (summary.capacity_bytes !== null) {
      const room = summary.capacity_bytes - (summary.context_bytes ?? 0);
      body.append(this.row("room on the card", element("span", { class: "swatch dash" }), room));
    }
  }

  row(name, mark, atPeak) {
    const here = numberCell("");
    this.cells.set(name, here);
    return element("tr", {}, element("th", { scope: "row" }, mark, LABELS[name] ?? name), numberCell(bytes(atPeak)), here);
  }

  show(bucket) {
    const view = this.view;
    view.names.forEach((name, i) => { this.cells.get(name).textContent = bytes(view.levels[i][bucket]); });
    this.cells.get("allocated").textContent = bytes(view.total[bucket]);
    this.cells.get("reserved").textContent = bytes(view.reserved[bucket]);
    const width = view.edges[bucket + 1] - view.edges[bucket];
    const rows = [["event", whole(view.at[bucket]) + (width > 1 ? `, the highest of ${whole(width)}` : "")]];
    if (view.times) rows.push(["time", duration(view.times[bucket])]);
    const span = view.spanOf(view.at[bucket]);
    if (span) rows.push(["in", span.name]);
    const place = texts[view.places[bucket]];
    rows.push(["asked for by", place || "nothing: memory is given back here"]);
    if (width > 1) rows.push(["meanwhile", `down to ${bytes(view.low[bucket])}`]);
    byId("cursor").replaceChildren(...rows.flatMap(([term, words]) => [element("dt", {}, term), element("dd", {}, words)]));
  }
}
