// The verdict, the figures, memory at the peak by category, the GPUs, the steps and the assumptions.
function verdictOf(card) {
  if (card.device_bytes > card.capacity_bytes) return ["bad", "does not fit", `${bytes(card.device_bytes - card.capacity_bytes)} too much`];
  const left = `${bytes(card.capacity_bytes - card.device_bytes)} left`;
  // Of a recording everything was seen.
  const seen = summary.not_seen && summary.origin === "estimate" ? " as far as seen" : "";
  if (card.device_high_bytes > card.capacity_bytes) return ["doubt", `fits${seen} without the safety margin`, `${left}, and the peak may be ${bytes(card.device_high_bytes - card.device_bytes)} higher`];
  return [seen ? "doubt" : "good", `fits${seen}`, left];
}

const ownCard = () => summary.cards.find((card) => card.device === summary.device) ??
  (summary.capacity_bytes === null ? null : { device: summary.device, capacity_bytes: summary.capacity_bytes, device_bytes: deviceBytes, device_low_bytes: deviceBytes, device_high_bytes: deviceBytes });

function writeHeader() {
  const origin = summary.origin === "estimate" ? `estimated for ${summary.device}` : `recorded on ${summary.device || "a GPU that the recording does not name"}`;
  const numSteps = summary.spans.filter((span) => span.kind === "step").length;
  const steps = numSteps ? `, ${whole(numSteps)} step${numSteps === 1 ? "" : "s"}` : "";
  byId("label").textContent = summary.label;
  byId("subject").textContent = `${origin}: ${whole(summary.num_events)} allocator events${steps}`;
  const card = ownCard();
  const heading = byId("verdict");
  if (card && summary.origin === "estimate") {
    const [kind, word, amount] = verdictOf(card);
    heading.append(element("span", { class: kind }, word[0].toUpperCase() + word.slice(1)), ` on ${card.device}: ${amount}`, kind !== "bad" && summary.not_seen ? `; ${summary.not_seen}` : "");
  } else {
    heading.textContent = `Peak: ${bytes(summary.peak_allocated_bytes)} allocated, ${bytes(summary.peak_reserved_bytes)} reserved`;
  }
}

function figure(term, main, more) {
  return element("div", {}, element("dt", {}, term), element("dd", { class: "main" }, main), more ? element("dd", { class: "more-on" }, more) : null);
}

function writeFigures() {
  const card = ownCard();
  const unused = summary.peak_reserved_bytes - summary.peak_allocated_bytes;
  const rounding = summary.peak_allocated_bytes - summary.requested_at_peak_bytes;
  const rows = [];
  if (summary.context_bytes !== null) {
    const range = card && card.device_low_bytes !== card.device_high_bytes ? `${bytes(card.device_low_bytes)} to ${bytes(card.device_high_bytes)}` : "";
    rows.push(figure("peak GPU memory", bytes(deviceBytes), range || `${percent(deviceBytes, summary.capacity_bytes)} of the capacity`));
  }
  rows.push(figure("peak reserved", bytes(summary.peak_reserved_bytes), "by torch's caching allocator"));
  rows.push(figure("peak allocated", bytes(summary.peak_allocated_bytes), "by live tensors"));
  rows.push(figure("fragmentation", percent(unused, summary.peak_reserved_bytes), `${bytes(unused)} reserved beyond the peak`));
  if (rounding > 0) rows.push(figure("lost to rounding", bytes(rounding), `${percent(rounding, summary.peak_allocated_bytes)} of the peak allocated`));
  if (card && card.seconds_per_step) rows.push(figure("time per step", duration(card.seconds_per_step * 1e6), "estimated time"));
  byId("figures").append(...rows);
  const parts = [summary.peak_span, summary.peak_line, summary.peak_function.replace(/^aten\./, ""), summary.peak_module].filter(Boolean);
  if (summary.peak_event >= 0) {
    byId("moment").append(`The peak is at event ${whole(summary.peak_event)} of ${whole(summary.num_events)}${parts.length ? ": " : "."}`, element("code", {}, parts.join(", ")));
  }
}

// One bar as long as the GPU's capacity, or as what is reserved where the GPU is not known.
function writeHeld() {
  if (!deviceBytes) { byId("held").hidden = true; return; }
  const all = Math.max(summary.capacity_bytes ?? 0, deviceBytes);
  const sizes = [...STACK.map((name) => [name, summary.at_peak[name]]), ["cache", summary.at_peak.cache], ["context", contextBytes]].filter(([, size]) => size > 0);
  const part = (name, size, words, attributes) => {
    const box = element("div", { class: `part ${ON_LIGHT_TEXT.has(name) ? "light" : ""}`, title: `${words}: ${bytes(size)}`, ...attributes });
    box.style.width = `${(100 * size) / all}%`;
    box.append(element("span", { class: "long" }, `${words} ${bytes(size)}`), element("span", { class: "short" }, words));
    return box;
  };
  const parts = sizes.map(([name, size]) => part(name, size, LABELS[name], { "data-category": name }));
  const free = all - deviceBytes;
  if (free > 0) parts.push(part("free", free, "free", { class: "part free" }));
  const track = element("div", { class: "track", role: "img" }, ...parts);
  track.setAttribute("aria-label", sizes.map(([name, size]) => `${LABELS[name]} ${bytes(size)}`).join(", "));
  if (summary.capacity_bytes !== null && summary.capacity_bytes < deviceBytes) {
    // Above the bar, so that the words cover no part of it, and on the side that has room for them.
    const share = summary.capacity_bytes / all;
    const limit = element("div", { class: share > 0.8 ? "limit end" : "limit" }, `GPU capacity ${bytes(summary.capacity_bytes)}`);
    limit.style.left = `${100 * share}%`;
    track.classList.add("over");
    track.append(limit);
  }
  const end = summary.capacity_bytes === null ? "reserved" : summary.capacity_bytes >= deviceBytes ? `GPU capacity ${bytes(all)}` : `peak ${bytes(deviceBytes)}`;
  // Words that a part has no room for are left out, not cut: its title has them.
  new ResizeObserver(() => {
    for (const box of track.querySelectorAll(".part")) {
      const fits = (span) => { span.hidden = false; return span.offsetWidth <= box.clientWidth - 6; };
      const [long, short] = box.children;
      short.hidden = true;
      long.hidden = !fits(long);
      if (long.hidden) short.hidden = !fits(short);
    }
  }).observe(track);
  byId("held").append(track, element("div", { class: "scale" }, element("span", {}, "memory at the peak, by category"), element("span", {}, end)));
}

function meter(parts, label) {
  const box = element("div", { class: "meter", role: "img", "aria-label": label });
  for (const [kind, from, to] of parts) {
    const piece = element("span", { class: kind });
    piece.style.left = `${100 * from}%`;
    if (kind !== "limit") piece.style.width = `${100 * Math.max(0, to - from)}%`;
    box.append(piece);
  }
  return box;
}

function writeCards() {
  const { cards } = summary;
  byId("cards").hidden = !cards.length;
  byId("cards-heading").textContent = cards.some((card) => card.device === summary.device) ? "On this GPU and others" : "On these GPUs";
  const most = Math.max(...cards.map((card) => card.device_high_bytes), 1);
  const withSeconds = cards.some((card) => card.seconds_per_step);
  const body = cards.map((card) => {
    const [kind, word] = verdictOf(card);
    const scale = Math.max(most, card.capacity_bytes);
    const [peak, capacity] = [card.device_bytes / scale, card.capacity_bytes / scale];
    const bars = [["outline", 0, capacity], ["fill", 0, Math.min(peak, capacity)]];
    if (peak > capacity) bars.push(["over", capacity, peak], ["limit", capacity]);
    const left = card.capacity_bytes - card.device_bytes;
    return element("tr", { class: card.device === summary.device ? "own" : null },
      element("th", { scope: "row" }, card.device.replace(/^NVIDIA (GeForce )?/, "")),
      element("td", { class: kind }, word),
      element("td", { class: "bars" }, meter(bars, `${percent(card.device_bytes, card.capacity_bytes)} of it`)),
      numberCell(bytes(card.capacity_bytes)), numberCell(bytes(card.device_bytes)), numberCell(bytes(left), left < 0 ? "bad" : ""),
      ...(withSeconds ? [numberCell(card.seconds_per_step ? duration(card.seconds_per_step * 1e6) : "")] : []));
  });
  const names = ["GPU", "", "", "#capacity", "#peak", "#left", ...(withSeconds ? ["#time per step"] : [])];
  byId("cards-table").append(element("table", { class: "data" }, headings(...names), element("tbody", {}, ...body)));
  byId("cards-note").textContent = summary.origin === "recording"
    ? "The recorded peak with the CUDA context of each GPU, if the run allocated the same there."
    : "With the CUDA context, library workspaces and speed of each GPU.";
}

function writeSteps(timeline) {
  // A set-up that allocates nothing has nothing to show.
  const spans = summary.spans.filter((span) => span.peak_reserved_bytes);
  byId("steps").hidden = !spans.length;
  const most = Math.max(...spans.map((span) => span.peak_reserved_bytes), 1);
  const body = spans.map((span) => {
    const go = () => { timeline.moves.goToSpan(span); timeline.box.focus({ preventScroll: true }); byId("timeline").scrollIntoView(); };
    const [allocated, reserved] = [span.peak_allocated_bytes / most, span.peak_reserved_bytes / most];
    return element("tr", {},
      element("th", { scope: "row" }, element("button", { type: "button", class: "plain", onclick: go, "aria-label": `Show ${span.name} in the timeline` }, span.name)),
      element("td", { class: "bars" }, meter([["outline", 0, reserved], ["fill", 0, allocated]], `${percent(span.peak_reserved_bytes, most)} of the highest`)),
      numberCell(bytes(span.peak_allocated_bytes)), numberCell(bytes(span.peak_reserved_bytes)), numberCell(bytes(span.end_allocated_bytes)));
  });
  byId("steps-table").append(element("table", { class: "data" }, headings("", "", "#peak allocated", "#peak reserved", "#still allocated after the step"), element("tbody", {}, ...body)));
  const left = summary.num_spans - summary.spans.length;
  byId("steps-note").textContent = left ? `The ${whole(spans.length)} with the highest peaks of ${whole(summary.num_spans)}.` : "";
}

function writeAssumptions() {
  const items = summary.assumptions.map(({ what, where, num_more }) => {
    const places = where.filter(Boolean).join(", ") + (num_more ? ` and ${whole(num_more)} more places` : "");
    return element("li", {}, what, places ? element("span", { class: "hint" }, ` (${places})`) : null);
  });
  byId("assumptions-list").append(...items);
  byId("assumptions-list").hidden = !items.length;
  byId("assumptions-heading").textContent = items.length ? "Assumptions" : "No assumptions";
  const left = summary.num_assumptions - summary.assumptions.length;
  const versions = Object.entries(summary.versions).filter(([, version]) => version).map(([name, version]) => `${name} ${version}`);
  const words = [left > 0 ? `${whole(left)} more assumptions are not listed.` : "",
    `Allocator settings: ${summary.settings || "torch's defaults"}.`, summary.cards.some((card) => card.seconds_per_step) ? "Times are estimates, without data loading and logging." : "", versions.length ? `With ${versions.join(", ")}.` : "", "Colours after Okabe and Ito."];
  byId("small-print").textContent = words.filter(Boolean).join(" ");
}
