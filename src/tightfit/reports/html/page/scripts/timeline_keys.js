// The timeline by its buttons, and by the keyboard while it has the focus.
function listenToButtons(moves) {
  const acts = {
    "go-peak": () => moves.goToPeak(),
    "zoom-in": () => moves.zoom(0.5),
    "zoom-out": () => moves.zoom(2),
    "zoom-reset": () => moves.reset(),
    "fit-height": () => moves.toggleHeight(),
    "by-time": () => moves.toggleTime(),
  };
  for (const [id, act] of Object.entries(acts)) byId(id).addEventListener("click", act);
  byId("by-time").hidden = moves.buckets.times === null;
}

function listenToKeys(box, moves) {
  const acts = {
    ArrowLeft: (shift) => (shift ? moves.step(-1) : moves.pan(-0.1)),
    ArrowRight: (shift) => (shift ? moves.step(1) : moves.pan(0.1)),
    "+": () => moves.zoom(0.5),
    "=": () => moves.zoom(0.5),
    "-": () => moves.zoom(2),
    _: () => moves.zoom(2),
    p: () => moves.goToPeak(),
    Home: () => moves.pan(-1e9),
    End: () => moves.pan(1e9),
    PageUp: () => moves.nextSpan(-1),
    PageDown: () => moves.nextSpan(1),
    y: () => moves.toggleHeight(),
    t: () => moves.toggleTime(),
    Escape: () => moves.reset(),
    0: () => moves.reset(),
  };
  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = acts[event.key] ?? acts[event.key.toLowerCase()];
    if (!act) return;
    event.preventDefault();
    act(event.shiftKey);
  });
}
