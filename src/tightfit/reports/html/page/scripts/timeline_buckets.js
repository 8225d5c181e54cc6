// What the run held, in buckets: ranges of events, each with its highest moment, the least allocated and the most reserved in it.
class Buckets {
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
  }

  // The last bucket that begins at or before a value, by its events or by another column of where buckets begin.
  lastAtOrBefore(value, begins = this.edges) {
    let low = 0;
    let high = this.size - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (begins[middle] <= value) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  // Columns of one width over [begin, end): the bucket with the highest moment in each, the least allocated and the most reserved there.
  columns(number, begins, begin, end) {
    const best = new Int32Array(number);
    const low = new Float64Array(number);
    const reserved = new Float64Array(number);
    const step = (end - begin) / number;
    let bucket = this.lastAtOrBefore(begin, begins);
    for (let column = 0; column < number; column++) {
      const until = begin + (column + 1) * step;
      while (bucket + 1 < this.size && begins[bucket + 1] <= begin + column * step) bucket++;
      let top = bucket;
      let bottom = this.low[bucket];
      let most = this.reserved[bucket];
      for (let other = bucket + 1; other < this.size && begins[other] < until; other++) {
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
}

function spanOf(event) {
  return summary.spans.find((span) => span.begin <= event && event < span.end) ?? null;
}
