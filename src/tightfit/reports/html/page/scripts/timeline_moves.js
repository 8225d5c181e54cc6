// Where people go in the timeline, however they ask for it: by buttons, by keys, or from the tables of the page.
class TimelineMoves {
  constructor(timeline) {
    this.timeline = timeline;
    this.view = timeline.view;
    this.buckets = timeline.view.buckets;
  }

  pan(share) { this.view.pan(share); this.timeline.changed(); }

  // Around the cursor where that is in view, else around the middle.
  zoom(factor) {
    const at = this.view.middleOf(this.timeline.cursor);
    const inside = at >= this.view.begin && at <= this.view.end;
    this.view.zoom(factor, inside ? at : (this.view.begin + this.view.end) / 2);
    this.timeline.changed();
  }

  reset() { this.view.showAll(); this.timeline.changed(); }

  toggleHeight() {
    this.timeline.fitsHeight = !this.timeline.fitsHeight;
    byId("fit-height").setAttribute("aria-pressed", this.timeline.fitsHeight);
    this.timeline.changed();
  }

  toggleTime() {
    if (this.buckets.times === null) return;
    this.view.useTime(!this.view.byTime);
    byId("by-time").setAttribute("aria-pressed", this.view.byTime);
    this.timeline.changed();
  }

  goToPeak() { this.goToEvent(summary.peak_event); }

  goToEvent(event) {
    const bucket = this.buckets.lastAtOrBefore(event);
    const at = this.view.middleOf(bucket);
    const most = this.view.byTime ? this.view.length / 40 : Math.max(120, this.view.length / 40);
    const half = Math.min(this.view.end - this.view.begin, most) / 2;
    this.view.show(at - half, at + half);
    this.timeline.pin(bucket);
  }

  goToSpan(span) {
    const [from, to] = [this.buckets.lastAtOrBefore(span.begin), this.buckets.lastAtOrBefore(span.end - 1)];
    this.view.show(this.view.positions[from], this.view.positions[to + 1]);
    this.timeline.pin(this.buckets.lastAtOrBefore(span.peak_event));
  }

  // To the step so many after the one at the cursor; from the whole run to that one itself.
  nextSpan(by) {
    if (!summary.spans.length) return;
    const here = summary.spans.indexOf(spanOf(this.buckets.at[this.timeline.cursor]));
    const to = this.view.isWhole ? Math.max(0, here) : Math.max(0, Math.min(summary.spans.length - 1, here + by));
    this.goToSpan(summary.spans[to]);
  }

  step(by) {
    const to = Math.max(0, Math.min(this.buckets.size - 1, this.timeline.cursor + by));
    const at = this.view.middleOf(to);
    const width = this.view.end - this.view.begin;
    if (at < this.view.begin || at > this.view.end) this.view.show(at - width / 2, at + width / 2);
    this.timeline.pin(to);
  }
}
