// Puts the page together, and switches between light and dark and between plain and patterned.
const THEMES = ["system", "light", "dark"];

function start() {
  const root = document.documentElement;
  root.dataset.patterns = "on";
  writeHeader();
  writeFigures();
  writeHeld();
  writeCards();
  writeAssumptions();
  const timeline = page.timeline.edges.length > 1 ? new Timeline(new TimelineView(new Buckets(page.timeline))) : null;
  if (timeline) {
    timeline.point(timeline.cursor);
    timeline.say();
  } else {
    byId("timeline").hidden = true;
  }
  writeSteps(timeline);
  byId("tree").hidden = !(PARTS in page.tree);
  byId("places").hidden = !page.places.length;
  new Treemap(page.tree);
  new PlacesTable(timeline);
  const redraw = () => timeline?.draw();
  let theme = 0;
  byId("theme").addEventListener("click", () => {
    theme = (theme + 1) % THEMES.length;
    root.dataset.theme = THEMES[theme];
    byId("theme").textContent = `Theme: ${THEMES[theme]}`;
    redraw();
  });
  byId("patterns").addEventListener("click", () => {
    const on = root.dataset.patterns !== "on";
    root.dataset.patterns = on ? "on" : "off";
    byId("patterns").setAttribute("aria-pressed", on);
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", redraw);
  const followScreen = () => matchMedia(`(resolution: ${devicePixelRatio}dppx)`).addEventListener("change", () => { redraw(); followScreen(); }, { once: true });
  followScreen();
  root.dataset.ready = "true";
}

start();
