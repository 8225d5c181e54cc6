// The whole run as a strip below the timeline, with a frame around what is in view; a press or a drag moves the frame.
function drawOverview(canvas, plot) {
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const pen = penOf(canvas, width, height);
  const { view } = plot;
  const number = Math.round(plot.width);
  const { best } = view.columns(number, view.first, view.last);
  pen.fillStyle = colourOf("strong-line");
  const most = Math.max(1, summary.peak_allocated_bytes);
  for (let i = 0; i < number; i++) {
    const high = (view.buckets.total[best[i]] / most) * (height - 4);
    pen.fillRect(LEFT + i, height - high, 1.05, high);
  }
  const from = LEFT + ((view.begin - view.first) / view.length) * plot.width;
  const to = LEFT + ((view.end - view.first) / view.length) * plot.width;
  pen.fillStyle = colourOf("page");
  pen.globalAlpha = 0.7;
  pen.fillRect(LEFT, 0, from - LEFT, height);
  pen.fillRect(to, 0, LEFT + plot.width - to, height);
  pen.globalAlpha = 1;
  pen.strokeStyle = colourOf("link");
  pen.lineWidth = 2;
  pen.strokeRect(from + 1, 1, Math.max(3, to - from - 2), height - 2);
}

function listenToOverview(canvas, timeline) {
  const seek = (event) => {
    if (!event.buttons) return;
    const { view, plot } = timeline;
    const half = (view.end - view.begin) / 2;
    const at = view.first + ((event.offsetX - LEFT) / plot.width) * view.length;
    view.show(at - half, at + half);
    timeline.changed();
  };
  canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); seek(event); });
  canvas.addEventListener("pointermove", seek);
}
