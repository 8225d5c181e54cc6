// The timeline: what is in view, the moment at the cursor and what is selected, drawn again whenever one of them changes.
class Timeline {
  constructor(view) {
    this.view = view;
    this.box = byId("chart");
    this.plot = new Plot(this.box, view);
    this.legend = new Legend(view.buckets);
    this.cursor = view.buckets.highest;
    this.pinned = null;
    this.selection = null;
    this.fitsHeight = false;
    this.moves = new TimelineMoves(this);
    this.pointer = new TimelinePointer(this);
    listenToButtons(this.moves);
    listenToKeys(this.box, this.moves);
    listenToOverview(byId("overview"), this);
    byId("chart-table").addEventListener("toggle", () => writeRangeTable(this.view));
    this.box.setAttribute("aria-label", timelineName());
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  draw() {
    const { view, plot } = this;
    const pen = penOf(byId("chart-base"), this.box.clientWidth, this.box.clientHeight);
    const number = Math.max(1, Math.round(plot.width * (window.devicePixelRatio || 1)));
    const columns = view.columns(number);
    Object.assign(this.box.dataset, { begin: view.begin, end: view.end });
    plot.setHeights(columns, this.fitsHeight);
    drawGrid(pen, plot);
    drawBands(pen, plot, columns, number);
    drawRoom(pen, plot);
    drawSpans(pen, plot);
    drawPeak(pen, plot);
    drawOverview(byId("overview"), plot);
    this.drawCursor();
  }

  drawCursor() {
    const { view, plot, selection } = this;
    const pen = penOf(byId("chart-cursor"), this.box.clientWidth, this.box.clientHeight);
    if (selection) {
      pen.fillStyle = colourOf("link");
      pen.globalAlpha = 0.22;
      pen.fillRect(Math.min(selection.from, selection.to), STRIP, Math.abs(selection.to - selection.from), plot.height);
      pen.globalAlpha = 1;
    }
    const x = plot.toX(view.middleOf(this.cursor));
    if (x < LEFT || x > LEFT + plot.width) return;
    if (this.cursor === view.buckets.lastAtOrBefore(summary.peak_event)) return;
    pen.fillStyle = colourOf("link");
    pen.fillRect(x - 0.75, STRIP, 1.5, plot.height);
    pen.beginPath();
    pen.arc(x, plot.toY(view.buckets.total[this.cursor]), 3.5, 0, 2 * Math.PI);
    pen.fill();
  }

  point(bucket) {
    this.cursor = bucket;
    this.box.dataset.cursor = this.view.buckets.at[bucket];
    this.legend.show(bucket);
    this.drawCursor();
  }

  // Points at a moment to which the cursor returns when the pointer leaves.
  pin(bucket) {
    this.pinned = bucket;
    this.point(bucket);
    this.changed();
  }

  changed() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.draw(); });
    clearTimeout(this.saying);
    this.saying = setTimeout(() => { this.say(); writeRangeTable(this.view); }, 120);
  }

  say() {
    byId("chart-status").textContent = rangeInWords(this.view, this.fitsHeight ? this.plot.floor : 0);
  }
}
