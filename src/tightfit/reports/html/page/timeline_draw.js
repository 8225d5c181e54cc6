// Draws the timeline in device pixels: a column of pixels shows the highest moment in it, paler down to the least that was held meanwhile.
const LEFT = 66;
const RIGHT = 10;
const STRIP = 22;
const BOTTOM = 24;
const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";

// A canvas as sharp as the screen, with a pen in CSS pixels.
function penOf(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w) canvas.width = w;
  if (canvas.height !== h) canvas.height = h;
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = FONT;
  return pen;
}

// Round steps between ticks: powers of two and half of them for bytes, 1-2-5 for the rest.
function byteStep(range, most) {
  let step = 1;
  while (range / step > most) step *= 2;
  return step;
}

function decimalStep(range, most) {
  const power = 10 ** Math.floor(Math.log10(range / most));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => range / step <= most);
}

class TimelineDrawing {
  get width() { return Math.max(20, this.box.clientWidth - LEFT - RIGHT); }
  get height() { return Math.max(20, this.box.clientHeight - STRIP - BOTTOM); }
  toX(position) { return LEFT + ((position - this.view.begin) / (this.view.end - this.view.begin)) * this.width; }
  toPosition(x) { return this.view.begin + ((x - LEFT) / this.width) * (this.view.end - this.view.begin); }
  toY(value) { return STRIP + this.height * (1 - (value - this.floor) / (this.ceiling - this.floor)); }

  draw() {
    const pen = penOf(this.base, this.box.clientWidth, this.box.clientHeight);
    const scale = window.devicePixelRatio || 1;
    const number = Math.max(1, Math.round(this.width * scale));
    const columns = this.view.columns(number);
    Object.assign(this.box.dataset, { begin: this.view.begin, end: this.view.end });
    this.setHeights(columns);
    this.drawGrid(pen);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, STRIP, this.width, this.height);
    pen.clip();
    const runs = this.runsOf(columns, number);
    this.drawStack(pen, runs, scale);
    this.drawReserved(pen, columns, number);
    pen.restore();
    this.drawRoom(pen);
    this.drawSpans(pen);
    this.drawPeak(pen);
    this.drawOverview();
    this.drawCursor();
  }

  setHeights({ best, low, reserved }) {
    const view = this.view;
    if (this.fitsHeight) {
      const highest = Math.max(...reserved);
      const lowest = Math.min(...low);
      const margin = Math.max(1, (highest - lowest) * 0.06);
      this.floor = Math.max(0, lowest - margin);
      this.ceiling = highest + margin;
    } else {
      this.floor = 0;
      this.ceiling = Math.max(1, summary.peak_reserved_bytes) * 1.08;
      if (this.room !== null && this.room > summary.peak_reserved_bytes * 0.7 && this.room < summary.peak_reserved_bytes * 1.6) {
        this.ceiling = Math.max(this.ceiling, this.room * 1.06);
      }
    }
    this.highestShown = best.reduce((most, bucket) => (view.total[bucket] > view.total[most] ? bucket : most), best[0]);
  }

  // Neighbouring columns that show the same are one run: [x, width, bucket, least].
  runsOf({ best, low }, number) {
    const runs = [];
    const step = this.width / number;
    for (let i = 0; i < number; ) {
      let j = i + 1;
      while (j < number && best[j] === best[i] && low[j] === low[i]) j++;
      runs.push([LEFT + i * step, (j - i) * step, best[i], low[i]]);
      i = j;
    }
    return runs;
  }

  drawStack(pen, runs, scale) {
    const view = this.view;
    const heights = new Float64Array(runs.length);
    const edges = new Path2D();
    view.levels.forEach((level, i) => {
      const area = new Path2D();
      runs.forEach(([x, width, bucket], r) => {
        if (!level[bucket]) return;
        const bottom = this.toY(heights[r]);
        heights[r] += level[bucket];
        const top = this.toY(heights[r]);
        area.rect(x, top, width + 0.02, bottom - top);
        edges.rect(x, top, width + 0.02, 0.6);
      });
      pen.fillStyle = colourOf(view.names[i]);
      pen.fill(area);
      const pattern = patternOf(pen, view.names[i], scale);
      if (pattern) {
        pattern.setTransform(new DOMMatrix().scale(1 / scale));
        pen.fillStyle = pattern;
        pen.fill(area);
      }
    });
    const pale = new Path2D();
    for (const [x, width, bucket, low] of runs) {
      if (low < view.total[bucket]) pale.rect(x, this.toY(view.total[bucket]), width + 0.02, this.toY(low) - this.toY(view.total[bucket]));
    }
    pen.fillStyle = colourOf("page");
    pen.globalAlpha = 0.38;
    pen.fill(pale);
    pen.globalAlpha = 0.8;
    pen.fill(edges);
    pen.globalAlpha = 1;
    this.drawNames(pen, runs);
  }

  // The name of a category where its band is high and wide enough for it.
  drawNames(pen, runs) {
    const view = this.view;
    pen.textBaseline = "middle";
    view.names.forEach((name, i) => {
      let best = null;
      for (let x = 0, r = 0; x < this.width; x += 24) {
        while (r + 1 < runs.length && runs[r + 1][0] <= LEFT + x) r++;
        const room = this.bandAt(runs, LEFT + x, LEFT + x + pen.measureText(LABELS[name]).width + 14, i);
        if (room && room.high > 15 && (!best || room.high > best.high)) best = { ...room, x: LEFT + x + 7 };
      }
      if (!best) return;
      const text = LABELS[name];
      const width = pen.measureText(text).width;
      pen.fillStyle = colourOf(name);
      pen.fillRect(best.x - 3, best.y - 8, width + 6, 16);
      pen.fillStyle = ON_LIGHT_TEXT.has(name) ? "#fff" : "#101214";
      pen.fillText(text, best.x, best.y);
    });
  }

  // The part of a band that is free of its neighbours between two places: its middle and height, or null.
  bandAt(runs, from, to, index) {
    if (to > LEFT + this.width) return null;
    let [top, bottom] = [STRIP, STRIP + this.height];
    for (const [x, width, bucket] of runs) {
      if (x + width < from || x > to) continue;
      let below = 0;
      for (let i = 0; i < index; i++) below += this.view.levels[i][bucket];
      bottom = Math.min(bottom, this.toY(below));
      top = Math.max(top, this.toY(below + this.view.levels[index][bucket]));
      if (bottom - top < 15) return null;
    }
    return { y: (top + bottom) / 2, high: bottom - top };
  }

  drawReserved(pen, { reserved }, number) {
    const step = this.width / number;
    pen.beginPath();
    for (let i = 0; i < number; i++) {
      const y = this.toY(reserved[i]);
      if (i === 0) pen.moveTo(LEFT, y);
      else if (reserved[i] !== reserved[i - 1]) { pen.lineTo(LEFT + i * step, this.toY(reserved[i - 1])); pen.lineTo(LEFT + i * step, y); }
    }
    pen.lineTo(LEFT + this.width, this.toY(reserved[number - 1]));
    pen.strokeStyle = colourOf("text");
    pen.lineWidth = 1.5;
    pen.stroke();
  }

  drawGrid(pen) {
    pen.strokeStyle = colourOf("line");
    pen.fillStyle = colourOf("muted");
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const step = byteStep(this.ceiling - this.floor, Math.max(2, this.height / 38));
    pen.beginPath();
    for (let value = Math.ceil(this.floor / step) * step; value <= this.ceiling; value += step) {
      const y = Math.round(this.toY(value)) + 0.5;
      pen.moveTo(LEFT, y);
      pen.lineTo(LEFT + this.width, y);
      pen.fillText(value ? bytes(value).replace(/\.0+ /, " ") : "0", LEFT - 6, y);
    }
    pen.stroke();
    pen.textAlign = "center";
    pen.textBaseline = "top";
    const { begin, end, first } = this.view;
    const across = decimalStep(end - begin, Math.max(2, this.width / 110));
    const from = this.view.byTime ? first : 0;
    for (let at = Math.ceil((begin - from) / across) * across + from; at <= end; at += across) {
      const x = this.toX(at);
      if (x < LEFT + 18 || x > LEFT + this.width - 24) continue;
      pen.fillRect(Math.round(x), STRIP + this.height, 1, 4);
      pen.fillText(this.view.words(at), x, STRIP + this.height + 7);
    }
    pen.textAlign = "left";
    pen.fillText(this.view.byTime ? "time" : "event", 0, STRIP + this.height + 7);
  }

  drawRoom(pen) {
    if (this.room === null) return;
    const y = this.toY(this.room);
    pen.textAlign = "right";
    pen.textBaseline = "bottom";
    const words = `room on the card: ${bytes(this.room)}`;
    if (y < STRIP || y > STRIP + this.height) return;
    pen.strokeStyle = colourOf("bad");
    pen.lineWidth = 1.5;
    pen.setLineDash([6, 4]);
    pen.beginPath();
    pen.moveTo(LEFT, y);
    pen.lineTo(LEFT + this.width, y);
    pen.stroke();
    pen.setLineDash([]);
    this.label(pen, words, LEFT + this.width - 4, y - 3, "bad");
  }

  // Words over a ground of the page's colour; textAlign and textBaseline as they are set.
  label(pen, words, x, y, colour) {
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

  drawSpans(pen) {
    pen.textBaseline = "middle";
    pen.textAlign = "left";
    const positionOf = (event) => (event >= summary.num_events ? this.view.last : this.view.positions[this.view.bucketOfEvent(event)]);
    let freeFrom = LEFT;
    for (const span of summary.spans) {
      const from = Math.max(LEFT, this.toX(positionOf(span.begin)));
      const to = Math.min(LEFT + this.width, this.toX(positionOf(span.end)));
      if (to <= LEFT || from >= LEFT + this.width) continue;
      pen.fillStyle = colourOf("strong-line");
      if (from > LEFT && from >= freeFrom - 1) { pen.fillRect(Math.round(from), 4, 1, STRIP - 4 + this.height); freeFrom = from + 3; }
      pen.fillStyle = colourOf("muted");
      if (pen.measureText(span.name).width + 10 < to - from) pen.fillText(span.name, from + 5, STRIP / 2 + 1);
    }
  }

  drawPeak(pen) {
    if (summary.peak_event < 0) return;
    const bucket = this.view.bucketOfEvent(summary.peak_event);
    const x = this.toX(this.view.middleOf(bucket));
    if (x < LEFT - 1 || x > LEFT + this.width + 1) return;
    const y = this.toY(summary.peak_allocated_bytes);
    pen.fillStyle = colourOf("text");
    // Only down to the peak: what is held then can be a column as thin as the line.
    pen.fillRect(x - 0.75, STRIP, 1.5, Math.max(0, y - STRIP - 9));
    pen.beginPath();
    pen.moveTo(x, y - 1);
    pen.lineTo(x - 5, y - 10);
    pen.lineTo(x + 5, y - 10);
    pen.fill();
    const words = `peak ${bytes(summary.peak_allocated_bytes)}`;
    const toLeft = x + pen.measureText(words).width + 16 > LEFT + this.width;
    pen.textAlign = toLeft ? "right" : "left";
    pen.textBaseline = "top";
    this.label(pen, words, x + (toLeft ? -8 : 8), STRIP + 5, "text");
  }

  drawCursor() {
    const pen = penOf(this.over, this.box.clientWidth, this.box.clientHeight);
    if (this.selection) {
      const { from, to } = this.selection;
      pen.fillStyle = colourOf("link");
      pen.globalAlpha = 0.22;
      pen.fillRect(Math.min(from, to), STRIP, Math.abs(to - from), this.height);
      pen.globalAlpha = 1;
    }
    const x = this.toX(this.view.middleOf(this.cursor));
    if (x < LEFT || x > LEFT + this.width) return;
    if (this.cursor === this.view.bucketOfEvent(summary.peak_event)) return;
    pen.fillStyle = colourOf("link");
    pen.fillRect(x - 0.75, STRIP, 1.5, this.height);
    pen.beginPath();
    pen.arc(x, this.toY(this.view.total[this.cursor]), 3.5, 0, 2 * Math.PI);
    pen.fill();
  }

  drawOverview() {
    const [width, height] = [this.overview.clientWidth, this.overview.clientHeight];
    const pen = penOf(this.overview, width, height);
    const view = this.view;
    const number = Math.round(this.width);
    const { best } = view.columns(number, view.first, view.last);
    pen.fillStyle = colourOf("strong-line");
    const most = Math.max(1, summary.peak_allocated_bytes);
    for (let i = 0; i < number; i++) {
      const high = (view.total[best[i]] / most) * (height - 4);
      pen.fillRect(LEFT + i, height - high, 1.05, high);
    }
    const from = LEFT + ((view.begin - view.first) / view.length) * this.width;
    const to = LEFT + ((view.end - view.first) / view.length) * this.width;
    pen.fillStyle = colourOf("page");
    pen.globalAlpha = 0.7;
    pen.fillRect(LEFT, 0, from - LEFT, height);
    pen.fillRect(to, 0, LEFT + this.width - to, height);
    pen.globalAlpha = 1;
    pen.strokeStyle = colourOf("link");
    pen.lineWidth = 2;
    pen.strokeRect(from + 1, 1, Math.max(3, to - from - 2), height - 2);
  }
}
