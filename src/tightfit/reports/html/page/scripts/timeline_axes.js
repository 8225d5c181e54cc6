// Draws what stands around the bands: the grid and its numbers, the steps, the peak, and what is available to PyTorch.

// Round steps between ticks: powers of two for bytes, 1-2-5 for the rest.
function byteStep(range, most) {
  let step = 1;
  while (range / step > most) step *= 2;
  return step;
}

function decimalStep(range, most) {
  const power = 10 ** Math.floor(Math.log10(range / most));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => range / step <= most);
}

function drawGrid(pen, plot) {
  pen.strokeStyle = colourOf("line");
  pen.fillStyle = colourOf("muted");
  pen.lineWidth = 1;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  const step = byteStep(plot.ceiling - plot.floor, Math.max(2, plot.height / 38));
  pen.beginPath();
  for (let value = Math.ceil(plot.floor / step) * step; value <= plot.ceiling; value += step) {
    const y = Math.round(plot.toY(value)) + 0.5;
    pen.moveTo(LEFT, y);
    pen.lineTo(LEFT + plot.width, y);
    pen.fillText(value ? bytes(value).replace(/\.0+ /, " ") : "0", LEFT - 6, y);
  }
  pen.stroke();
  drawPositions(pen, plot);
}

function drawPositions(pen, plot) {
  const { begin, end, first, byTime } = plot.view;
  pen.textAlign = "center";
  pen.textBaseline = "top";
  const across = decimalStep(end - begin, Math.max(2, plot.width / 110));
  const from = byTime ? first : 0;
  for (let at = Math.ceil((begin - from) / across) * across + from; at <= end; at += across) {
    const x = plot.toX(at);
    if (x < LEFT + 18 || x > LEFT + plot.width - 24) continue;
    pen.fillRect(Math.round(x), STRIP + plot.height, 1, 4);
    pen.fillText(plot.view.words(at), x, STRIP + plot.height + 7);
  }
  pen.textAlign = "left";
  pen.fillText(byTime ? "time" : "event", 0, STRIP + plot.height + 7);
}

function drawRoom(pen, plot) {
  if (roomBytes === null) return;
  const y = plot.toY(roomBytes);
  if (y < STRIP || y > STRIP + plot.height) return;
  pen.textAlign = "right";
  pen.textBaseline = "bottom";
  pen.strokeStyle = colourOf("bad");
  pen.lineWidth = 1.5;
  pen.setLineDash([6, 4]);
  pen.beginPath();
  pen.moveTo(LEFT, y);
  pen.lineTo(LEFT + plot.width, y);
  pen.stroke();
  pen.setLineDash([]);
  drawLabel(pen, `available to PyTorch: ${bytes(roomBytes)}`, LEFT + plot.width - 4, y - 3, "bad");
}

function drawSpans(pen, plot) {
  const { view } = plot;
  pen.textBaseline = "middle";
  pen.textAlign = "left";
  const positionOf = (event) => (event >= summary.num_events ? view.last : view.positions[view.buckets.lastAtOrBefore(event)]);
  let freeFrom = LEFT;
  for (const span of summary.spans) {
    const from = Math.max(LEFT, plot.toX(positionOf(span.begin)));
    const to = Math.min(LEFT + plot.width, plot.toX(positionOf(span.end)));
    if (to <= LEFT || from >= LEFT + plot.width) continue;
    pen.fillStyle = colourOf("strong-line");
    if (from > LEFT && from >= freeFrom - 1) { pen.fillRect(Math.round(from), 4, 1, STRIP - 4 + plot.height); freeFrom = from + 3; }
    pen.fillStyle = colourOf("muted");
    if (pen.measureText(span.name).width + 10 < to - from) pen.fillText(span.name, from + 5, STRIP / 2 + 1);
  }
}

function drawPeak(pen, plot) {
  if (summary.peak_event < 0) return;
  const { view } = plot;
  const x = plot.toX(view.middleOf(view.buckets.lastAtOrBefore(summary.peak_event)));
  if (x < LEFT - 1 || x > LEFT + plot.width + 1) return;
  const y = plot.toY(summary.peak_allocated_bytes);
  pen.fillStyle = colourOf("text");
  // Only down to the peak: what is held then can be a column as thin as the line.
  pen.fillRect(x - 0.75, STRIP, 1.5, Math.max(0, y - STRIP - 9));
  pen.beginPath();
  pen.moveTo(x, y - 1);
  pen.lineTo(x - 5, y - 10);
  pen.lineTo(x + 5, y - 10);
  pen.fill();
  const words = `peak ${bytes(summary.peak_allocated_bytes)}`;
  const toLeft = x + pen.measureText(words).width + 16 > LEFT + plot.width;
  // Under the line of what is reserved where that would run through the words.
  const lines = [summary.reserved_at_peak_bytes, summary.peak_reserved_bytes].map((size) => plot.toY(size));
  const top = lines.reduce((at, line) => (line > at - 4 && line < at + 18 ? line + 5 : at), STRIP + 5);
  pen.textAlign = toLeft ? "right" : "left";
  pen.textBaseline = "top";
  drawLabel(pen, words, x + (toLeft ? -8 : 8), top, "text");
}

// Words over a ground of the page's colour; textAlign and textBaseline as they are set.
function drawLabel(pen, words, x, y, colour) {
  const width = pen.measureText(words).width;
  const left = pen.textAlign === "right" ? x - width : pen.textAlign === "center" ? x - width / 2 : x;
  const top = pen.textBaseline === "bottom" ? y - 14 : y;
  pen.fillStyle = colourOf("page");
  pen.globalAlpha = 0.85;
  pen.fillRect(left - 3, top - 1, width + 6, 16);
  pen.globalAlpha = 1;
  pen.fillStyle = colourOf(colour);
  pen.fillText(words, x, y);
}
