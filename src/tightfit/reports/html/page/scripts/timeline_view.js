// The range of the run in view, by events or by time, without drawing it: a position is an event's number or its microseconds.
class TimelineView {
  constructor(buckets) {
    this.buckets = buckets;
    this.measure(false);
    this.showAll();
  }

  measure(byTime) {
    this.byTime = byTime && this.buckets.times !== null;
    this.positions = this.byTime ? this.buckets.times : this.buckets.edges;
    this.first = this.positions[0];
    this.length = Math.max(1, this.positions[this.buckets.size] - this.first);
    this.last = this.first + this.length;
    this.minLength = this.byTime ? Math.max(2, this.length / 2e6) : Math.min(this.length, 12);
  }

  // Switches between events and time, around the same moment.
  useTime(byTime) {
    const middle = this.buckets.lastAtOrBefore((this.begin + this.end) / 2, this.positions);
    const share = (this.end - this.begin) / this.length;
    this.measure(byTime);
    const width = share * this.length;
    this.show(this.positions[middle] - width / 2, this.positions[middle] + width / 2);
  }

  get isWhole() { return this.end - this.begin >= this.length * 0.9999; }

  show(begin, end) {
    const width = Math.min(this.length, Math.max(this.minLength, end - begin));
    const middle = (begin + end) / 2;
    this.begin = Math.min(Math.max(this.first, middle - width / 2), this.last - width);
    this.end = this.begin + width;
  }

  showAll() { this.show(this.first, this.last); }
  pan(share) { const by = share * (this.end - this.begin); this.show(this.begin + by, this.end + by); }

  zoom(factor, around) {
    const width = Math.min(this.length, Math.max(this.minLength, (this.end - this.begin) * factor));
    const share = (around - this.begin) / (this.end - this.begin);
    this.show(around - share * width, around + (1 - share) * width);
  }

  middleOf(bucket) { return (this.positions[bucket] + this.positions[bucket + 1]) / 2; }

  columns(number, begin = this.begin, end = this.end) { return this.buckets.columns(number, this.positions, begin, end); }

  // A position as people read it.
  words(position) { return this.byTime ? duration(position - this.first) : whole(Math.round(position)); }
}
