// A cursor on the chart, moved with the pointer or with Left and Right, and what it stands on in words and in the legend.
class ChartReader {
  constructor(place, words) {
    this.place = place;
    this.words = words;
    this.at = null;
    place.addEventListener("pointermove", (event) => this.point(event));
    place.addEventListener("pointerleave", () => this.move(null));
    place.addEventListener("keydown", (event) => this.press(event));
  }

  show(chart, history, span) {
    Object.assign(this, { chart, history, span });
    this.move(this.at === null ? null : Math.min(this.at, history.times.length - 1));
  }

  point(event) {
    if (!this.chart) return;
    const box = this.place.getBoundingClientRect();
    const left = event.clientX - box.left, times = this.history.times;
    let nearest = 0;
    const middle = (at) => this.chart.x(times[at] - binOf(times) / 2);
    times.forEach((_, at) => { if (Math.abs(middle(at) - left) < Math.abs(middle(nearest) - left)) nearest = at; });
    this.move(left > this.chart.now + 6 ? null : nearest);
  }

  press(event) {
    if (!this.chart || !["ArrowLeft", "ArrowRight", "Escape"].includes(event.key)) return;
    event.preventDefault();
    const last = this.history.times.length - 1;
    if (event.key === "Escape") return this.move(null);
    const from = this.at ?? last + (event.key === "ArrowLeft" ? 1 : 0);
    return this.move(Math.max(0, Math.min(last, from + (event.key === "ArrowLeft" ? -1 : 1))));
  }

  move(at) {
    this.at = at;
    if (!this.chart) return;
    this.chart.svg.querySelector(".cursor")?.remove();
    const history = this.history;
    if (at !== null) {
      const x = this.chart.x(history.times[at] - binOf(history.times) / 2);
      this.chart.svg.append(drawn("line", { class: "cursor", x1: x, x2: x, y1: this.chart.inner.top, y2: this.chart.inner.bottom }));
    }
    const used = at === null ? null : history.used_bytes[at];
    this.words.textContent = at === null ? "" : `${formatTime(history.times[at], this.span)}: ${used === null ? "no reading" : formatBytes(used)}`;
    drawLegend(history, at);
  }
}

function drawLegend(history, at) {
  const keys = history.processes.map(keyOf);
  const last = history.times.length - 1;
  const row = (fill, words, values) => {
    const value = values[at ?? last];
    const item = element("li", {}, element("i"), element("span", { text: value === null ? words : `${formatBytes(value)} ${words}`, title: words }));
    item.firstChild.style.setProperty("background", fill);
    return item;
  };
  const rows = history.processes.map((each) => row(colourOf(keyOf(each), keys), `${each.pid} ${each.command}`, each.used_bytes));
  if (history.others_bytes.some((each) => each > 0)) rows.push(row("var(--others)", "all others", history.others_bytes));
  byId("legend").replaceChildren(...rows);
}
