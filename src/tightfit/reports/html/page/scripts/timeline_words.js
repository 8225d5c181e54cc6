// The timeline in words: its name, a line about the range in view, and that range as a table for who cannot see it.
function timelineName() {
  return `Memory over ${whole(summary.num_events)} events. The peak is ${bytes(summary.peak_allocated_bytes)} allocated, ` +
    `at event ${whole(summary.peak_event)}${summary.peak_span ? ` in ${summary.peak_span}` : ""}, and ${bytes(summary.peak_reserved_bytes)} reserved.`;
}

function rangeInWords(view, floor) {
  const { buckets } = view;
  const { best } = view.columns(1);
  const unit = view.byTime ? "" : "events ";
  return `Shown: ${unit}${view.words(view.begin)} to ${view.words(view.end)}` +
    `${view.isWhole ? ", the whole run" : ` (${percent(view.end - view.begin, view.length)} of the run)`}. ` +
    `Peak in this range: ${bytes(buckets.total[best[0]])} allocated at event ${whole(buckets.at[best[0]])}.` +
    (floor ? ` The height begins at ${bytes(Math.round(floor))}, not at 0.` : "");
}

function writeRangeTable(view) {
  const details = byId("chart-table");
  if (!details.open) return;
  const { buckets } = view;
  const { best, reserved } = view.columns(60);
  const rows = [...best].map((bucket, i) => [bucket, reserved[i]]).filter(([bucket], i) => i === 0 || bucket !== best[i - 1]);
  const body = rows.map(([bucket, most]) => element("tr", {},
    element("th", { scope: "row", class: "number" }, whole(buckets.at[bucket])),
    ...buckets.levels.map((level) => numberCell(bytes(level[bucket]))),
    numberCell(bytes(buckets.total[bucket])), numberCell(bytes(most))));
  const names = ["#event", ...buckets.names.map((name) => `#${LABELS[name]}`), "#allocated", "#reserved"];
  details.querySelector("div").replaceChildren(element("table", { class: "data" }, headings(...names), element("tbody", {}, ...body)));
}
