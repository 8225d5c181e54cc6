// The timeline as people move in it: zoomed and moved by wheel, drag, pinch, buttons and keys, with a table of the range for who cannot see it.
class Timeline extends TimelineDrawing {
  constructor(view) {
    super();
    this.view = view;
    this.box = byId("chart");
    this.base = byId("chart-base");
    this.over = byId("chart-cursor");
    this.overview = byId("overview");
    this.cursor = view.highest;
    this.fitsHeight = false;
    this.pointers = new Map();
    this.selection = null;
    this.legend = new Legend(view);
    const context = summary.context_bytes ?? 0;
    this.room = summary.capacity_bytes === null ? null : summary.capacity_bytes - context;
    this.box.setAttribute("aria-label", this.described());
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  described() {
    return `Memory over ${whole(summary.num_events)} events. At most ${bytes(summary.peak_allocated_bytes)} is allocated, ` +
      `at event ${whole(summary.peak_event)}${summary.peak_span ? ` in ${summary.peak_span}` : ""}, and ${bytes(summary.peak_reserved_bytes)} reserved.`;
  }

  listen() {
    const press = (id, act) => byId(id).addEventListener("click", act);
    press("go-peak", () => this.goToPeak());
    press("zoom-in", () => this.zoom(0.5));
    press("zoom-out", () => this.zoom(2));
    press("zoom-reset", () => this.reset());
    press("fit-height", () => this.toggleHeight());
    press("by-time", () => this.toggleTime());
    byId("by-time").hidden = this.view.times === null;
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.box.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    document.addEventListener("scroll", () => { this.scrolledAt = performance.now(); }, { passive: true });
    this.box.addEventListener("pointerdown", (event) => this.down(event));
    this.box.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) this.box.addEventListener(name, (event) => this.up(event));
    this.box.addEventListener("pointerleave", () => { if (!this.selection) this.point(this.pinned ?? this.view.highest); });
    this.box.addEventListener("dblclick", () => this.reset());
    const seek = (event) => { if (event.buttons) this.seek(event); };
    this.overview.addEventListener("pointerdown", (event) => { this.overview.setPointerCapture(event.pointerId); this.seek(event); });
    this.overview.addEventListener("pointermove", seek);
    byId("chart-table").addEventListener("toggle", () => this.tabulate());
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const acts = {
      ArrowLeft: () => (event.shiftKey ? this.step(-1) : this.pan(-0.1)),
      ArrowRight: () => (event.shiftKey ? this.step(1) : this.pan(0.1)),
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      _: () => this.zoom(2),
      p: () => this.goToPeak(),
      Home: () => this.pan(-1e9),
      End: () => this.pan(1e9),
      PageUp: () => this.span(-1),
      PageDown: () => this.span(1),
      y: () => this.toggleHeight(),
      t: () => this.toggleTime(),
      Escape: () => this.reset(),
      0: () => this.reset(),
    };
    const act = acts[event.key] ?? acts[event.key.toLowerCase()];
    if (!act) return;
    event.preventDefault();
    act();
  }

  wheel(event) {
    // A page that is being scrolled past the chart goes on scrolling.
    if (performance.now() - (this.scrolledAt ?? -1e9) < 300 && !event.ctrlKey) { this.scrolledAt = performance.now(); return; }
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 16 : 1;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.pan(((event.deltaX || event.deltaY) * unit) / this.width);
    } else {
      this.view.zoom(Math.exp(Math.max(-120, Math.min(120, event.deltaY * unit)) * 0.0035), this.toPosition(this.xOf(event)));
      this.changed();
    }
  }

  xOf(event) {
    const x = event.clientX - this.box.getBoundingClientRect().left;
    return Math.max(LEFT, Math.min(LEFT + this.width, x));
  }

  down(event) {
    if (event.button !== 0) return;
    this.box.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, this.xOf(event));
    const pans = event.pointerType === "touch" || event.shiftKey;
    this.selection = pans || this.pointers.size > 1 ? null : { from: this.xOf(event), to: this.xOf(event) };
  }

  move(event) {
    const x = this.xOf(event);
    if (this.pointers.has(event.pointerId)) {
      const before = [...this.pointers.values()];
      this.pointers.set(event.pointerId, x);
      const after = [...this.pointers.values()];
      if (after.length === 2) this.pinch(before, after);
      else if (this.selection) this.selection.to = x;
      else this.pan((before[0] - after[0]) / this.width);
    }
    this.point(this.nearest(x));
  }

  pinch(before, after) {
    const [from, to] = [Math.abs(before[0] - before[1]), Math.abs(after[0] - after[1])];
    const around = this.toPosition((after[0] + after[1]) / 2);
    if (from > 0 && to > 0) this.view.zoom(from / to, around);
    this.changed();
  }

  up(event) {
    this.pointers.delete(event.pointerId);
    const chosen = this.selection;
    this.selection = null;
    if (chosen && Math.abs(chosen.to - chosen.from) > 4 && event.type === "pointerup") {
      const [a, b] = [this.toPosition(chosen.from), this.toPosition(chosen.to)].sort((x, y) => x - y);
      this.view.show(a, b);
      this.changed();
    } else if (chosen) {
      this.pinned = this.nearest(chosen.from);
      this.point(this.pinned);
    }
  }

  seek(event) {
    const share = (event.offsetX - LEFT) / this.width;
    const half = (this.view.end - this.view.begin) / 2;
    const at = this.view.first + share * this.view.length;
    this.view.show(at - half, at + half);
    this.changed();
  }

  // The highest moment in the column of pixels at x.
  nearest(x) {
    const wide = (this.view.end - this.view.begin) / this.width;
    const position = this.toPosition(x);
    return this.view.columns(1, position - wide / 2, position + wide / 2).best[0];
  }

  pan(share) { this.view.pan(share); this.changed(); }

  zoom(factor) {
    const at = this.view.middleOf(this.cursor);
    const inside = at >= this.view.begin && at <= this.view.end;
    this.view.zoom(factor, inside ? at : (this.view.begin + this.view.end) / 2);
    this.changed();
  }

  reset() { this.view.showAll(); this.changed(); }
  toggleHeight() { this.fitsHeight = !this.fitsHeight; byId("fit-height").setAttribute("aria-pressed", this.fitsHeight); this.changed(); }

  toggleTime() {
    if (this.view.times === null) return;
    this.view.useTime(!this.view.byTime);
    byId("by-time").setAttribute("aria-pressed", this.view.byTime);
    this.changed();
  }

  goToPeak() { this.goToEvent(summary.peak_event); }

  goToEvent(event) {
    const bucket = this.view.bucketOfEvent(event);
    const at = this.view.middleOf(bucket);
    const most = this.view.byTime ? this.view.length / 40 : Math.max(120, this.view.length / 40);
    const half = Math.min(this.view.end - this.view.begin, most) / 2;
    this.view.show(at - half, at + half);
    this.pinned = bucket;
    this.point(bucket);
    this.changed();
  }

  goToSpan(span) {
    const [from, to] = [this.view.bucketOfEvent(span.begin), this.view.bucketOfEvent(span.end - 1)];
    this.view.show(this.view.positions[from], this.view.positions[to + 1]);
    this.pinned = this.view.bucketOfEvent(span.peak_event);
    this.point(this.pinned);
    this.changed();
  }

  span(by) {
    if (!summary.spans.length) return;
    const here = summary.spans.indexOf(this.view.spanOf(this.view.at[this.cursor]));
    const to = this.view.isWhole ? Math.max(0, here) : Math.max(0, Math.min(summary.spans.length - 1, here + by));
    this.goToSpan(summary.spans[to]);
  }

  step(by) {
    const to = Math.max(0, Math.min(this.view.size - 1, this.cursor + by));
    const at = this.view.middleOf(to);
    const width = this.view.end - this.view.begin;
    if (at < this.view.begin || at > this.view.end) this.view.show(at - width / 2, at + width / 2);
    this.pinned = to;
    this.point(to);
    this.changed();
  }

  point(bucket) {
    this.cursor = bucket;
    this.box.dataset.cursor = this.view.at[bucket];
    this.legend.show(bucket);
    this.drawCursor();
  }

  changed() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.draw(); });
    clearTimeout(this.saying);
    this.saying = setTimeout(() => { this.say(); this.tabulate(); }, 120);
  }

  say() {
    const view = this.view;
    const { best } = view.columns(1);
    const unit = view.byTime ? "" : "events ";
    byId("chart-status").textContent = `Shown: ${unit}${view.words(view.begin)} to ${view.words(view.end)}` +
      `${view.isWhole ? ", the whole run" : ` (${percent(view.end - view.begin, view.length)} of the run)`}. ` +
      `Highest in it: ${bytes(view.total[best[0]])} allocated at event ${whole(view.at[best[0]])}.` +
      (this.fitsHeight && this.floor ? ` The height begins at ${bytes(Math.round(this.floor))}, not at 0.` : "");
  }

  tabulate() {
    const details = byId("chart-table");
    if (!details.open) return;
    const view = this.view;
    const { best, reserved } = view.columns(60);
    const rows = [...best].map((bucket, i) => [bucket, reserved[i]]).filter(([bucket], i) => i === 0 || bucket !== best[i - 1]);
    const body = rows.map(([bucket, most]) => element("tr", {},
      element("th", { scope: "row", class: "number" }, whole(view.at[bucket])),
      ...view.levels.map((level) => numberCell(bytes(level[bucket]))),
      numberCell(bytes(view.total[bucket])), numberCell(bytes(most))));
    const names = ["#event", ...view.names.map((name) => `#${LABELS[name]}`), "#allocated", "#reserved"];
    details.querySelector("div").replaceChildren(element("table", { class: "data" }, headings(...names), element("tbody", {}, ...body)));
  }
}
