// What the timeline shows, without drawing it: the buckets, the range in view, and the highest moment for each column of pixels.
class TimelineView {
  constructor(data) {
    this.edges = sums(data.edges);
    this.size = this.edges.length - 1;
    this.at = Float64Array.from(data.at, (offset, i) => this.edges[i] + offset);
    this.low = sums(data.low, data.unit);
    this.reserved = sums(data.reserved, data.unit);
    this.names = STACK.filter((name) => String(CATEGORIES.indexOf(name)) in data.levels);
    this.levels = this.names.map((name) => sums(data.levels[CATEGORIES.indexOf(name)], data.unit));
    this.places = sums(data.places);
    this.times = data.time_us ? sums(data.time_us) : null;
    this.total = new Float64Array(this.size);
    for (const level of this.levels) for (let i = 0; i < this.size; i++) this.total[i] += level[i];
    this.highest = this.total.reduce((best, value, i) => (value > this.total[best] ? i : best), 0);
    this.useTime(false);
  }

  useTime(byTime) {
    const middle = this.positions ? this.bucketAt((this.begin + this.end) / 2) : 0;
    const share = this.positions ? (this.end - this.begin) / this.length : 1;
    this.byTime = byTime && this.times !== null;
    this.positions = this.byTime ? this.times : this.edges;
    this.first = this.positions[0];
    this.length = Math.max(1, this.positions[this.size] - this.first);
    this.least = this.byTime ? Math.max(2, this.length / 2e6) : Math.min(this.length, 12);
    const width = share * this.length;
    this.show(this.positions[middle] - width / 2, this.positions[middle] + width / 2);
  }

  get last() { return this.first + this.length; }
  get isWhole() { return this.end - this.begin >= this.length * 0.9999; }

  show(begin, end) {
    const width = Math.min(this.length, Math.max(this.least, end - begin));
    const middle = (begin + end) / 2;
    this.begin = Math.min(Math.max(this.first, middle - width / 2), this.last - width);
    this.end = this.begin + width;
  }

  showAll() { this.show(this.first, this.last); }
  pan(share) { const by = share * (this.end - this.begin); this.show(this.begin + by, this.end + by); }

  zoom(factor, around) {
    const width = Math.min(this.length, Math.max(this.least, (this.end - this.begin) * factor));
    const share = (around - this.begin) / (this.end - this.begin);
    this.show(around - share * width, around + (1 - share) * width);
  }

  // The last bucket that begins at or before a position.
  bucketAt(position) {
    let low = 0;
    let high = this.size - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.positions[middle] <= position) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  bucketOfEvent(event) {
    let low = 0;
    let high = this.size - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.edges[middle] <= event) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  middleOf(bucket) { return (this.positions[bucket] + this.positions[bucket + 1]) / 2; }

  // Columns of one width over [begin, end): the bucket with the highest moment in each, the least allocated and the most reserved there.
  columns(number, begin = this.begin, end = this.end) {
    const best = new Int32Array(number);
    const low = new Float64Array(number);
    const reserved = new Float64Array(number);
    const step = (end - begin) / number;
    let bucket = this.bucketAt(begin);
    for (let column = 0; column < number; column++) {
      const until = begin + (column + 1) * step;
      while (bucket + 1 < this.size && this.positions[bucket + 1] <= begin + column * step) bucket++;
      let top = bucket;
      let bottom = this.low[bucket];
      let most = this.reserved[bucket];
      for (let other = bucket + 1; other < this.size && this.positions[other] < until; other++) {
        if (this.total[other] > this.total[top]) top = other;
        bottom = Math.min(bottom, this.low[other]);
        most = Math.max(most, this.reserved[other]);
      }
      best[column] = top;
      low[column] = bottom;
      reserved[column] = most;
    }
    return { best, low, reserved };
  }

  spanOf(event) {
    return summary.spans.find((span) => span.begin <= event && event < span.end) ?? null;
  }

  // A position as people read it.
  words(position) {
    if (this.byTime) return duration(position - this.first);
    return whole(Math.round(position));
  }
}
