// Whether a job of a size that somebody types fits, card by card.
function listenForJobs(ask) {
  const answer = async () => {
    const size = byId("job").value.trim();
    if (!size) return;
    const found = await ask(`/api/advice.json?job=${encodeURIComponent(size)}`);
    const rows = found.error ? [element("li", { classes: "bad", text: found.error })] : found.advice.map(adviceRow);
    byId("advice").replaceChildren(...rows);
  };
  byId("ask").addEventListener("click", answer);
  byId("job").addEventListener("keydown", (event) => { if (event.key === "Enter") answer(); });
}

function adviceRow({ sentence, admission }) {
  const classes = admission?.fits ? "good" : admission && admission.probability !== null && admission.now_bytes + admission.job_bytes <= admission.capacity_bytes ? "doubt" : "bad";
  return element("li", { classes, text: sentence });
}
