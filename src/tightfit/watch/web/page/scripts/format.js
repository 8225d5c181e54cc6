// Figures as people read them; "-" is what nobody knows.
const GIB = 2 ** 30, MIB = 2 ** 20;

function formatBytes(count) {
  if (count === null || count === undefined) return "-";
  if (count === 0) return "0";
  return count >= GIB ? `${(count / GIB).toFixed(1)} GiB` : `${Math.round(count / MIB)} MiB`;
}

function formatPercent(part) {
  return part === null || part === undefined ? "-" : `${Math.round(100 * part)} %`;
}

function formatAge(seconds) {
  if (!Number.isFinite(seconds)) return "-";
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  return seconds < 86400 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} d`;
}

// In the viewer's own time zone; with the day where a span is longer than one.
function formatTime(seconds, span) {
  const options = span > 86400 ? { weekday: "short", hour: "2-digit", minute: "2-digit" } : { hour: "2-digit", minute: "2-digit" };
  if (span <= 900) options.second = "2-digit";
  return new Date(1000 * seconds).toLocaleTimeString([], options);
}

function formatBound(forecast) {
  if (!forecast) return "-";
  return `≤ ${formatBytes(forecast.upper_bytes)}`;
}
