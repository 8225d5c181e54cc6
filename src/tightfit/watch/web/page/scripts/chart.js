// The history of one card: its processes stacked, the line of the driver's count, the limit, and behind "now" the band of the next hour.
const MARGIN = { left: 64, right: 12, top: 14, bottom: 24 };
const AHEAD = 0.16; // of the width, for the forecast: as a time it would be a hair beside a week

function drawChart(place, history, card, span) {
  const width = Math.max(320, place.clientWidth), height = place.clientHeight;
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  const forecast = card.forecast;
  const inner = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
  const now = inner.left + (inner.right - inner.left) * (forecast ? 1 - AHEAD : 1);
  const end = history.times[history.times.length - 1], begin = end - span;
  const highest = Math.max(card.total_bytes ?? 0, forecast?.upper_bytes ?? 0, ...history.used_bytes.map((each) => each ?? 0), 1);
  const x = (time) => inner.left + ((time - begin) / span) * (now - inner.left);
  const y = (bytes) => inner.bottom - (bytes / (highest * 1.04)) * (inner.bottom - inner.top);
  drawGrid(svg, inner, y, highest, { x, begin, end, span, now });
  const keys = history.processes.map(keyOf);
  let below = history.times.map(() => 0);
  for (const each of [...history.processes].reverse()) {
    below = drawLayer(svg, history.times, each.used_bytes, below, x, y, { fill: colourOf(keyOf(each), keys), class: "layer", "data-pid": each.pid });
  }
  drawLayer(svg, history.times, history.others_bytes, below, x, y, { fill: "var(--others)", class: "layer" });
  svg.append(drawn("path", { class: "used", d: linePath(history.times, history.used_bytes, x, y) }));
  if (forecast) drawForecast(svg, forecast, now, inner, y);
  if (card.total_bytes) {
    const at = y(card.total_bytes);
    svg.append(drawn("line", { class: "limit", x1: inner.left, x2: inner.right, y1: at, y2: at }));
  }
  place.replaceChildren(svg);
  return { svg, x, y, inner, now };
}

const keyOf = (process) => `${process.pid} ${process.command}`;

function drawGrid(svg, inner, y, highest, { x, begin, end, span, now }) {
  const step = [0.25, 0.5, 1, 2, 4, 5, 8, 10, 16, 20, 32, 40, 64, 128].map((each) => each * GIB).find((each) => highest / each <= 6) ?? highest / 4;
  for (let bytes = 0; bytes <= highest * 1.001; bytes += step) {
    svg.append(drawn("line", { class: "grid", x1: inner.left, x2: inner.right, y1: y(bytes), y2: y(bytes) }));
    svg.append(drawn("text", { x: inner.left - 8, y: y(bytes) + 4, "text-anchor": "end" }, formatBytes(bytes)));
  }
  const count = Math.max(2, Math.min(6, Math.floor((now - inner.left) / 130)));
  for (let tick = 0; tick < count; tick += 1) {
    const time = begin + (span * tick) / count;
    svg.append(drawn("text", { x: x(time), y: inner.bottom + 17, "text-anchor": tick ? "middle" : "start" }, formatTime(time, span)));
  }
  svg.append(drawn("line", { class: "now", x1: now, x2: now, y1: inner.top, y2: inner.bottom }));
  svg.append(drawn("text", { x: now, y: inner.bottom + 17, "text-anchor": "middle" }, `${formatTime(end, span)} now`));
}

// In steps, as memory goes: each sample is the largest of its bin. A stretch without samples has no area: what nobody saw is not drawn.
function drawLayer(svg, times, values, below, x, y, attributes) {
  const width = binOf(times);
  const above = below.map((base, at) => base + (values[at] ?? 0));
  let path = "", begin = null;
  for (let at = 0; at <= times.length; at += 1) {
    const isThere = at < times.length && values[at] !== null && values[at] > 0;
    if (isThere && begin === null) begin = at;
    if (!isThere && begin !== null) {
      const indices = Array.from({ length: at - begin }, (_, offset) => begin + offset);
      const ends = (index) => [times[index] - width, times[index]].map((time) => x(Math.max(time, times[0] - width)).toFixed(1));
      const forth = indices.map((index) => ends(index).map((left) => `${left},${y(above[index]).toFixed(1)}`).join("L"));
      const back = indices.reverse().map((index) => ends(index).reverse().map((left) => `${left},${y(below[index]).toFixed(1)}`).join("L"));
      path += `M${forth.join("L")}L${back.join("L")}Z`;
      begin = null;
    }
  }
  if (path) svg.append(drawn("path", { d: path, ...attributes }));
  return above;
}

const binOf = (times) => (times.length > 1 ? times[1] - times[0] : 0);

function linePath(times, values, x, y) {
  const width = binOf(times);
  let path = "", isDown = false;
  values.forEach((value, at) => {
    if (value !== null) path += `${isDown ? "L" : "M"}${x(times[at] - width).toFixed(1)},${y(value).toFixed(1)}L${x(times[at]).toFixed(1)},${y(value).toFixed(1)}`;
    isDown = value !== null;
  });
  return path || "M0,0";
}

function drawForecast(svg, forecast, now, inner, y) {
  const median = y(forecast.median_bytes), upper = y(forecast.upper_bytes), width = inner.right - now;
  svg.append(drawn("rect", { class: "median", x: now, width, y: median, height: Math.max(0, inner.bottom - median) }));
  svg.append(drawn("rect", { class: "upper", x: now, width, y: upper, height: Math.max(0, median - upper) }));
  svg.append(drawn("line", { class: "bound", x1: now, x2: inner.right, y1: upper, y2: upper }));
  const label = `${+(100 * forecast.quantile).toFixed(2)} % within`;
  svg.append(drawn("text", { x: inner.right, y: upper - 18 < inner.top ? upper + 14 : upper - 18, "text-anchor": "end" }, label));
  svg.append(drawn("text", { x: inner.right, y: upper - 18 < inner.top ? upper + 28 : upper - 5, "text-anchor": "end" }, formatBytes(forecast.upper_bytes)));
  svg.append(drawn("text", { x: (now + inner.right) / 2 + 10, y: inner.bottom + 17, "text-anchor": "middle" }, forecast.horizon_seconds === 3600 ? "next hour" : `next ${formatAge(forecast.horizon_seconds)}`));
}
