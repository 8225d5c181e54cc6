// The timeline by mouse, wheel and fingers: a drag selects a range, with Shift or a finger it moves, two fingers and the wheel zoom.
class TimelinePointer {
  constructor(timeline) {
    this.timeline = timeline;
    this.view = timeline.view;
    this.plot = timeline.plot;
    this.pointers = new Map();
    this.scrolledAt = -1e9;
    const { box } = timeline;
    box.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    document.addEventListener("scroll", () => { this.scrolledAt = performance.now(); }, { passive: true });
    box.addEventListener("pointerdown", (event) => this.down(event));
    box.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) box.addEventListener(name, (event) => this.up(event));
    box.addEventListener("pointerleave", () => { if (!timeline.selection) timeline.point(timeline.pinned ?? this.view.buckets.highest); });
    box.addEventListener("dblclick", () => timeline.moves.reset());
  }

  wheel(event) {
    // A page that is being scrolled past the chart goes on scrolling.
    if (performance.now() - this.scrolledAt < 300 && !event.ctrlKey) { this.scrolledAt = performance.now(); return; }
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 16 : 1;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.timeline.moves.pan(((event.deltaX || event.deltaY) * unit) / this.plot.width);
    } else {
      this.view.zoom(Math.exp(Math.max(-120, Math.min(120, event.deltaY * unit)) * 0.0035), this.plot.toPosition(this.xOf(event)));
      this.timeline.changed();
    }
  }

  xOf(event) {
    const x = event.clientX - this.plot.box.getBoundingClientRect().left;
    return Math.max(LEFT, Math.min(LEFT + this.plot.width, x));
  }

  down(event) {
    if (event.button !== 0) return;
    this.plot.box.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, this.xOf(event));
    const pans = event.pointerType === "touch" || event.shiftKey;
    this.timeline.selection = pans || this.pointers.size > 1 ? null : { from: this.xOf(event), to: this.xOf(event) };
  }

  move(event) {
    const x = this.xOf(event);
    if (this.pointers.has(event.pointerId)) {
      const before = [...this.pointers.values()];
      this.pointers.set(event.pointerId, x);
      const after = [...this.pointers.values()];
      if (after.length === 2) this.pinch(before, after);
      else if (this.timeline.selection) this.timeline.selection.to = x;
      else this.timeline.moves.pan((before[0] - after[0]) / this.plot.width);
    }
    this.timeline.point(this.nearest(x));
  }

  pinch(before, after) {
    const [from, to] = [Math.abs(before[0] - before[1]), Math.abs(after[0] - after[1])];
    const around = this.plot.toPosition((after[0] + after[1]) / 2);
    if (from > 0 && to > 0) this.view.zoom(from / to, around);
    this.timeline.changed();
  }

  up(event) {
    this.pointers.delete(event.pointerId);
    const chosen = this.timeline.selection;
    this.timeline.selection = null;
    if (chosen && Math.abs(chosen.to - chosen.from) > 4 && event.type === "pointerup") {
      const [a, b] = [this.plot.toPosition(chosen.from), this.plot.toPosition(chosen.to)].sort((x, y) => x - y);
      this.view.show(a, b);
      this.timeline.changed();
    } else if (chosen) {
      this.timeline.pinned = this.nearest(chosen.from);
      this.timeline.point(this.timeline.pinned);
    }
  }

  // The highest moment in the column of pixels at x.
  nearest(x) {
    const wide = (this.view.end - this.view.begin) / this.plot.width;
    const position = this.plot.toPosition(x);
    return this.view.columns(1, position - wide / 2, position + wide / 2).best[0];
  }
}
