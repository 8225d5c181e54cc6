// Draws what was held as bands, one above another: a column of device pixels shows the highest moment in it, paler down to the least that was held meanwhile.
function drawBands(pen, plot, columns, number) {
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, STRIP, plot.width, plot.height);
  pen.clip();
  const runs = runsOf(plot, columns, number);
  drawStack(pen, plot, runs);
  drawBandNames(pen, plot, runs);
  drawReserved(pen, plot, columns, number);
  pen.restore();
}

// Neighbouring columns that show the same are one run: [x, width, bucket, least].
function runsOf(plot, { best, low }, number) {
  const runs = [];
  const step = plot.width / number;
  for (let i = 0; i < number; ) {
    let j = i + 1;
    while (j < number && best[j] === best[i] && low[j] === low[i]) j++;
    runs.push([LEFT + i * step, (j - i) * step, best[i], low[i]]);
    i = j;
  }
  return runs;
}

function drawStack(pen, plot, runs) {
  const { buckets } = plot.view;
  const heights = new Float64Array(runs.length);
  const edges = new Path2D();
  buckets.levels.forEach((level, i) => {
    const area = new Path2D();
    runs.forEach(([x, width, bucket], r) => {
      if (!level[bucket]) return;
      const bottom = plot.toY(heights[r]);
      heights[r] += level[bucket];
      const top = plot.toY(heights[r]);
      area.rect(x, top, width + 0.02, bottom - top);
      edges.rect(x, top, width + 0.02, 0.6);
    });
    fillBand(pen, area, buckets.names[i]);
  });
  const pale = new Path2D();
  for (const [x, width, bucket, low] of runs) {
    const top = plot.toY(buckets.total[bucket]);
    if (low < buckets.total[bucket]) pale.rect(x, top, width + 0.02, plot.toY(low) - top);
  }
  pen.fillStyle = colourOf("page");
  pen.globalAlpha = 0.38;
  pen.fill(pale);
  pen.globalAlpha = 0.8;
  pen.fill(edges);
  pen.globalAlpha = 1;
}

function fillBand(pen, area, name) {
  const scale = window.devicePixelRatio || 1;
  pen.fillStyle = colourOf(name);
  pen.fill(area);
  const pattern = patternOf(pen, name, scale);
  if (!pattern) return;
  pattern.setTransform(new DOMMatrix().scale(1 / scale));
  pen.fillStyle = pattern;
  pen.fill(area);
}

// The name of a category where its band is high and wide enough for it.
function drawBandNames(pen, plot, runs) {
  pen.textBaseline = "middle";
  plot.view.buckets.names.forEach((name, i) => {
    const text = LABELS[name];
    const width = pen.measureText(text).width;
    let best = null;
    for (let x = 0, r = 0; x < plot.width; x += 24) {
      while (r + 1 < runs.length && runs[r + 1][0] <= LEFT + x) r++;
      const room = bandAt(plot, runs, LEFT + x, LEFT + x + width + 14, i);
      if (room && room.high > 15 && (!best || room.high > best.high)) best = { ...room, x: LEFT + x + 7 };
    }
    if (!best) return;
    pen.fillStyle = colourOf(name);
    pen.fillRect(best.x - 3, best.y - 8, width + 6, 16);
    pen.fillStyle = ON_LIGHT_TEXT.has(name) ? "#fff" : "#101214";
    pen.fillText(text, best.x, best.y);
  });
}

// The part of a band that is free of its neighbours between two places: its middle and height, or null.
function bandAt(plot, runs, from, to, index) {
  if (to > LEFT + plot.width) return null;
  const { levels } = plot.view.buckets;
  let [top, bottom] = [STRIP, STRIP + plot.height];
  for (const [x, width, bucket] of runs) {
    if (x + width < from || x > to) continue;
    let below = 0;
    for (let i = 0; i < index; i++) below += levels[i][bucket];
    bottom = Math.min(bottom, plot.toY(below));
    top = Math.max(top, plot.toY(below + levels[index][bucket]));
    if (bottom - top < 15) return null;
  }
  return { y: (top + bottom) / 2, high: bottom - top };
}

function drawReserved(pen, plot, { reserved }, number) {
  const step = plot.width / number;
  pen.beginPath();
  for (let i = 0; i < number; i++) {
    const y = plot.toY(reserved[i]);
    if (i === 0) pen.moveTo(LEFT, y);
    else if (reserved[i] !== reserved[i - 1]) { pen.lineTo(LEFT + i * step, plot.toY(reserved[i - 1])); pen.lineTo(LEFT + i * step, y); }
  }
  pen.lineTo(LEFT + plot.width, plot.toY(reserved[number - 1]));
  pen.strokeStyle = colourOf("text");
  pen.lineWidth = 1.5;
  pen.stroke();
}
