// The cards as buttons: memory now, the bound of the next hour, and what else the driver says.
function drawCards(state, selected, choose) {
  const place = byId("cards");
  const wanted = state.cards.map((card) => card.uuid).join(" ");
  if (place.dataset.cards !== wanted) {
    place.dataset.cards = wanted;
    place.replaceChildren(...state.cards.map((card) => cardButton(card, choose)));
  }
  // Filled anew and not made anew, so that a click or the focus is not lost.
  state.cards.forEach((card, at) => fillCard(place.children[at], card, card.uuid === selected));
}

function cardButton(card, choose) {
  const button = element("button", { type: "button", classes: "card" });
  button.addEventListener("click", () => choose(card.uuid));
  button.append(
    element("span", { classes: "name" }),
    element("span", { classes: "row" }, element("b"), element("span", { classes: "share" })),
    element("span", { classes: "track" }, element("i", { classes: "ahead" }), element("i", { classes: "now" })),
    element("span", { classes: "more next" }),
    element("span", { classes: "more rest" }),
  );
  return button;
}

function fillCard(button, card, isSelected) {
  const put = (selector, text) => { button.querySelector(selector).textContent = text; };
  const share = (bytes) => (bytes === null || bytes === undefined || !card.total_bytes ? null : Math.min(1, bytes / card.total_bytes));
  const used = share(card.used_bytes), ahead = share(card.forecast?.upper_bytes) ?? 0;
  button.setAttribute("aria-pressed", String(isSelected));
  put(".name", `GPU ${card.index}  ${card.name}`);
  put("b", formatBytes(card.used_bytes));
  put(".share", `${formatPercent(used)} of ${formatBytes(card.total_bytes)}`);
  put(".next", `next hour ${formatBound(card.forecast)}${card.forecast?.model === "growth" ? `, ${card.forecast.note}` : ""}`);
  const watts = card.power_watts === null ? "" : `, ${Math.round(card.power_watts)} W`;
  const heat = card.temperature_celsius === null ? "" : `, ${Math.round(card.temperature_celsius)} °C`;
  put(".rest", `busy ${formatPercent(card.utilization)}${watts}${heat}`);
  button.querySelector(".now").style.setProperty("width", `${100 * (used ?? 0)}%`);
  button.querySelector(".ahead").style.setProperty("width", `${100 * ahead}%`);
  button.querySelector(".now").classList.toggle("high", (used ?? 0) >= 0.95);
  button.querySelector(".next").classList.toggle("bad", ahead >= 1);
}
