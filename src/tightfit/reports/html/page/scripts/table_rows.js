// What the table of allocation sites and that of the largest blocks show: their rows, their columns, and how they are sorted at first.

// Columns: [heading, key of a row, kind]; keys in rows are what is sorted by.
function placesKind() {
  const rows = page.places.map(([category, module, stack, peak, numPeak, largest, total, numTotal]) =>
    tableRow(category, module, stack, { peak, numPeak, largest, total, numTotal }));
  const columns = [["category", "what"], ["your line", "line"], ["module", "module"], ["bytes at the peak", "peak", "bytes"], ["blocks at the peak", "numPeak", "count"],
    ["largest block", "largest", "bytes"], ["total over the run", "total", "bytes"], ["blocks over the run", "numTotal", "count"]];
  return { rows, columns, sortBy: "peak", descending: true, noun: "allocation sites" };
}

function blocksKind() {
  const rows = page.blocks.map(([category, module, stack, size, requested, born, died]) =>
    tableRow(category, module, stack, { size, lost: size - requested, born, lives: died >= summary.num_events ? Infinity : died - born }));
  const columns = [["category", "what"], ["your line", "line"], ["module", "module"], ["bytes", "size", "bytes"], ["lost to rounding", "lost", "bytes"],
    ["allocated at event", "born", "event"], ["lifetime in events", "lives", "life"]];
  return { rows, columns, sortBy: "size", descending: true, noun: "blocks" };
}

function tableRow(category, module, stack, figures) {
  const { line, function: name, frames, own } = page.stacks[stack];
  const row = { category: CATEGORIES[category], what: LABELS[CATEGORIES[category]], module: texts[module], line: texts[line], name: texts[name].replace(/^aten\./, ""), frames, own, ...figures };
  row.caller = own.length > 1 ? texts[frames[own[1]]].replace(/ .*$/, "").replace(/^.*\//, "") : "";
  row.words = [row.what, row.module, row.line, row.name, row.caller].join(" ").toLowerCase();
  return row;
}
