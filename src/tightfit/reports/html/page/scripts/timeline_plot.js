// Where the timeline draws, in CSS pixels: the area between its axes, with positions across and bytes upwards.
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

class Plot {
  constructor(box, view) {
    this.box = box;
    this.view = view;
    this.floor = 0;
    this.ceiling = 1;
  }

  get width() { return Math.max(20, this.box.clientWidth - LEFT - RIGHT); }
  get height() { return Math.max(20, this.box.clientHeight - STRIP - BOTTOM); }
  toX(position) { return LEFT + ((position - this.view.begin) / (this.view.end - this.view.begin)) * this.width; }
  toPosition(x) { return this.view.begin + ((x - LEFT) / this.width) * (this.view.end - this.view.begin); }
  toY(value) { return STRIP + this.height * (1 - (value - this.floor) / (this.ceiling - this.floor)); }

  // From 0 to above the highest reserved of the run and, where that is near, what the card has room for; or just what the columns span.
  setHeights({ low, reserved }, fitsHeight) {
    if (fitsHeight) {
      const highest = Math.max(...reserved);
      const lowest = Math.min(...low);
      const margin = Math.max(1, (highest - lowest) * 0.06);
      this.floor = Math.max(0, lowest - margin);
      this.ceiling = highest + margin;
      return;
    }
    this.floor = 0;
    this.ceiling = Math.max(1, summary.peak_reserved_bytes) * 1.08;
    if (roomBytes !== null && roomBytes > summary.peak_reserved_bytes * 0.7 && roomBytes < summary.peak_reserved_bytes * 1.6) {
      this.ceiling = Math.max(this.ceiling, roomBytes * 1.06);
    }
  }
}
