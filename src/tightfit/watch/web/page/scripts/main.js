// Asks for the state every two seconds, for the history every ten, and draws what comes.
const SPANS = [["15 min", 900], ["1 h", 3600], ["6 h", 21600], ["1 d", 86400], ["7 d", 604800]];
const STATE_MILLISECONDS = 2000, HISTORY_MILLISECONDS = 10000;
const view = { card: null, span: 3600, state: null, history: null };
const table = new ProcessTable();
const reader = new ChartReader(byId("chart"), byId("reading"));

async function ask(address) {
  const answer = await fetch(address, { cache: "no-store" });
  const content = await answer.json();
  return answer.ok ? content : { error: content.error ?? answer.statusText };
}

async function refreshState() {
  let state;
  try {
    state = await ask("/api/state.json");
  } catch {
    state = { error: "the server does not answer" };
  }
  if (state.error) {
    showStatus(state.error, true);
  } else {
    view.state = state;
    if (!state.cards.some((card) => card.uuid === view.card)) choose(state.cards[0]?.uuid ?? null);
    drawState();
  }
}

async function refreshHistory() {
  const { card, span } = view;
  if (card === null) return;
  try {
    const history = await ask(`/api/history.json?card=${encodeURIComponent(card)}&seconds=${span}`);
    // Another card or span may have been chosen while this was on its way.
    if (history.error || card !== view.card || span !== view.span) return;
    view.history = history;
    drawHistory();
  } catch {
    // Said by the state, which is asked for more often.
  }
}

function choose(card) {
  view.card = card;
  view.history = null;
  refreshHistory();
}

function drawState() {
  const state = view.state;
  document.title = `${state.host}: GPUs`;
  byId("host").textContent = state.host;
  const age = Date.now() / 1000 - state.time;
  const notes = state.notes.map((each) => `; ${each}`).join("");
  if (state.source.lost_since !== null) showStatus(`the driver has not answered since ${formatTime(state.source.lost_since, 900)}: ${state.source.lost_reason}${notes}`, true);
  else showStatus(`${state.source.name}, read ${age > 15 ? `${formatAge(age)} ago` : formatTime(state.time, 900)}, every ${state.interval_seconds} s${notes}`, age > 15 || notes !== "");
  drawAlerts(state.alerts);
  drawCards(state, view.card, (card) => { choose(card); drawState(); });
  table.show(state);
  drawContainers(state);
  const card = state.cards.find((each) => each.uuid === view.card);
  byId("history-heading").textContent = card ? `GPU ${card.index}: memory of its processes` : "History";
}

function drawHistory() {
  const card = view.state?.cards.find((each) => each.uuid === view.card);
  if (!card || !view.history) return;
  reader.show(drawChart(byId("chart"), view.history, card, view.span), view.history, view.span);
  document.documentElement.dataset.ready = "true";
}

function drawAlerts(alerts) {
  const list = byId("alerts");
  const recent = alerts.filter((each) => each.resolved_at === null || Date.now() / 1000 - each.resolved_at < 3600).slice(0, 20);
  list.hidden = recent.length === 0;
  list.replaceChildren(...recent.map((each) => {
    const since = formatTime(each.fired_at, 900), over = each.resolved_at === null ? "" : ` (over at ${formatTime(each.resolved_at, 900)})`;
    return element("li", { classes: each.resolved_at === null ? "" : "over", text: `${since} ${each.rule}: ${each.subject}: ${each.message}${over}` });
  }));
}

function showStatus(text, isBad) {
  const status = byId("status");
  if (status.textContent !== text) status.textContent = text;
  status.classList.toggle("bad", isBad);
}

for (const [name, seconds] of SPANS) {
  const button = element("button", { type: "button", text: name, "aria-pressed": String(seconds === view.span) });
  button.addEventListener("click", () => {
    view.span = seconds;
    for (const other of byId("spans").children) other.setAttribute("aria-pressed", String(other === button));
    refreshHistory();
  });
  byId("spans").append(button);
}

const THEMES = ["system", "light", "dark"];
byId("theme").addEventListener("click", () => {
  const root = document.documentElement, next = THEMES[(THEMES.indexOf(root.dataset.theme ?? "system") + 1) % THEMES.length];
  if (next === "system") delete root.dataset.theme;
  else root.dataset.theme = next;
  byId("theme").textContent = `Theme: ${next}`;
});

listenForJobs(ask);
addEventListener("resize", drawHistory);
const every = (milliseconds, refresh) => {
  const next = () => refresh().finally(() => setTimeout(next, document.hidden ? 5 * milliseconds : milliseconds));
  next();
};
every(STATE_MILLISECONDS, refreshState);
every(HISTORY_MILLISECONDS, refreshHistory);
