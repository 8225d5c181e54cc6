// Beside the timeline: each category at the peak and at the cursor, and what the run was doing at the cursor.
class Legend {
  constructor(buckets) {
    this.buckets = buckets;
    this.cells = new Map();
    const body = byId("legend").tBodies[0];
    for (const name of [...buckets.names].reverse()) body.append(this.row(name, swatch(name), summary.at_peak[name]));
    const rule = (row) => { row.classList.add("rule"); return row; };
    body.append(rule(this.row("allocated", null, summary.peak_allocated_bytes)));
    body.append(this.row("reserved", element("span", { class: "swatch line" }), summary.reserved_at_peak_bytes));
    if (roomBytes !== null) body.append(this.row("available to PyTorch", element("span", { class: "swatch dash" }), roomBytes));
  }

  row(name, mark, atPeak) {
    const here = numberCell("");
    this.cells.set(name, here);
    return element("tr", {}, element("th", { scope: "row" }, mark, LABELS[name] ?? name), numberCell(atPeak ? bytes(atPeak) : ""), here);
  }

  show(bucket) {
    const { names, levels, total, reserved, edges, at, times, places, low } = this.buckets;
    names.forEach((name, i) => { this.cells.get(name).textContent = levels[i][bucket] ? bytes(levels[i][bucket]) : ""; });
    this.cells.get("allocated").textContent = bytes(total[bucket]);
    this.cells.get("reserved").textContent = bytes(reserved[bucket]);
    const width = edges[bucket + 1] - edges[bucket];
    const rows = [["event", whole(at[bucket]) + (width > 1 ? `, the highest of ${whole(width)}` : "")]];
    if (times) rows.push(["time", duration(times[bucket])]);
    const span = spanOf(at[bucket]);
    if (span) rows.push(["in", span.name]);
    rows.push(["allocated by", texts[places[bucket]] || "nothing: memory is freed here"]);
    if (width > 1) rows.push(["lowest", bytes(low[bucket])]);
    byId("cursor").replaceChildren(...rows.flatMap(([term, words]) => [element("dt", {}, term), element("dd", {}, words)]));
  }
}
