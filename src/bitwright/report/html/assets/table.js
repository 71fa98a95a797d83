// The layer table: sorted by its headers, filtered by text and precision, with details per row.
let showLayer = () => {};

function layerSection() {
  const layers = data.layers;
  if (!layers.length) return;
  const made = section("layers", "Layers",
    "Bar heights of histograms are logarithmic. Lines mark the chosen range; values beyond it clip. Ranges without lines are computed at run time.");
  const has = (test) => layers.some(test);
  const number = (value, text) => (isNumber(value) ? text(value) : "–");
  const accumulated = (row) => (row.accumulated ? row.accumulated.sqnr_db : null);
  const columns = [
    { key: "name", label: "Layer", get: (r) => r.name, cell: nameCell },
    { key: "scheme", label: "Precision", kind: "wide", get: (r) => schemeName(r.scheme), cell: (r) => schemeCell(r.scheme) },
    has((r) => isNumber(r.sqnr_db)) && { key: "sqnr", label: "SQNR dB", kind: "number", get: (r) => r.sqnr_db, cell: (r) => number(r.sqnr_db, (v) => fixed(v, 1)) },
    !has((r) => isNumber(r.sqnr_db)) && has((r) => isNumber(accumulated(r))) && { key: "accumulated", label: "Accumulated dB", kind: "number wide", get: accumulated, cell: (r) => number(accumulated(r), (v) => fixed(v, 1)) },
    has((r) => isNumber(r.share)) && { key: "share", label: "Error share", kind: "number", get: (r) => r.share, cell: (r) => number(r.share, percent) },
    has((r) => isNumber(r.seconds)) && { key: "seconds", label: "Time", kind: "number wide", get: (r) => r.seconds, cell: (r) => micro(r.seconds) },
    has((r) => r.multiply_adds) && { key: "macs", label: "Multiply-adds", kind: "number wide", get: (r) => r.multiply_adds, cell: (r) => (r.multiply_adds ? human(r.multiply_adds, "") : "–") },
    has((r) => r.detail && hasHistogram(r.detail.values)) && { label: "Input values", cell: (r) => chart(r, "values", "range") },
    has((r) => r.detail && hasHistogram(r.detail.weights)) && { label: "Weights", kind: "wide", cell: (r) => chart(r, "weights", "weight_range") },
    has((r) => r.reason) && { label: "Why", kind: "wide", cell: (r) => h("div", { class: "why" }, r.reason) },
  ].filter(Boolean);
  const state = { key: null, isDown: false, text: "", scheme: "" };
  const open = new Set();

  function nameCell(row) {
    const i = layers.indexOf(row);
    return [h("button", { type: "button", class: "link name", "aria-expanded": String(open.has(i)), "data-layer": i, onclick: () => toggle(i) }, nameParts(row.name)), h("div", { class: "op" }, row.op, h("span", { class: "narrow" }, ` · ${schemeName(row.scheme)}`))];
  }
  function chart(row, field, range) {
    const detail = row.detail;
    return detail && hasHistogram(detail[field]) ? histogram(detail[field], detail[range], { name: field === "values" ? "input values" : "weights" }) : "–";
  }
  function toggle(i, isOpen = !open.has(i)) {
    if (isOpen) open.add(i);
    else open.delete(i);
    render();
    const button = body.querySelector(`[data-layer="${i}"]`);
    if (button) button.focus({ preventScroll: true });
  }
  function detailRow(row) {
    const detail = row.detail || {};
    const range = (pair) => (pair ? `${digits(pair[0], 4)} to ${digits(pair[1], 4)}` : null);
    return h("tr", { class: "detail" }, h("td", { colspan: columns.length },
      facts([
        ["Why", row.reason],
        ["Value", h("code", {}, row.value)],
        ["Weight", row.weight ? h("code", {}, row.weight) : null],
        ["Observed", range(detail.observed)],
        ["Range", detail.range ? `${range(detail.range)} (scale ${digits(detail.scale, 5)}, zero point ${detail.zero_point})` : null],
        ["Smoothing", row.smoothing ? `alpha ${digits(row.smoothing)}` : null],
        ["Clip ratio", row.clip_ratio && row.clip_ratio !== 1 ? digits(row.clip_ratio) : null],
        ["Accumulated", row.accumulated ? `${isNumber(row.accumulated.sqnr_db) ? `${fixed(row.accumulated.sqnr_db, 1)} dB` : "exact"}, cosine ${fixed(row.accumulated.cosine, 6)}, largest error ${digits(row.accumulated.max_error)}` : null],
        ["Time", isNumber(row.seconds) ? micro(row.seconds) : null],
        ["Multiply-adds", row.multiply_adds ? human(row.multiply_adds, "") : null],
      ]),
      h("div", { class: "charts" }, detailFigures(row.detail)),
      isNumber(row.node) && h("button", { type: "button", class: "link go", onclick: () => selectNode(row.node, true) }, "Show in the graph")));
  }

  const search = h("input", { type: "search", id: "filter", placeholder: "Filter by name, op or reason", "aria-label": "Filter layers", oninput: (e) => { state.text = e.target.value.toLowerCase(); render(); } });
  const schemes = [...new Set(layers.map((r) => r.scheme))];
  const select = h("select", { id: "scheme-filter", "aria-label": "Filter by precision", onchange: (e) => { state.scheme = e.target.value; render(); } },
    h("option", { value: "" }, "All precisions"), schemes.map((one) => h("option", { value: one }, schemeName(one))));
  const status = h("span", { class: "soft small", id: "layer-count", role: "status" });
  const heads = columns.map((column) => {
    const head = h("th", { scope: "col", class: column.kind });
    if (!column.get) return fill(head, {}, [column.label]);
    head.setAttribute("aria-sort", "none");
    return fill(head, {}, [h("button", { type: "button", "data-sort": column.key, onclick: () => sortBy(column) }, column.label)]);
  });
  const body = h("tbody", {});
  made.append(h("div", { class: "tools" }, search, select, status),
    h("div", { class: "scroll tall card", role: "region", "aria-label": "Layers", tabindex: "0" },
      h("table", { id: "layer-table" }, h("caption", { class: "visually-hidden" }, "Layers with precision, error, time and histograms"), h("thead", {}, h("tr", {}, heads)), body)));

  function sortBy(column) {
    // numbers start with the largest, except SQNR, where the lowest is the worst
    const isFirstDown = String(column.kind).startsWith("number") && !["sqnr", "accumulated"].includes(column.key);
    state.isDown = state.key === column.key ? !state.isDown : isFirstDown;
    state.key = column.key;
    heads.forEach((head, i) => { if (columns[i].get) head.setAttribute("aria-sort", columns[i].key === state.key ? (state.isDown ? "descending" : "ascending") : "none"); });
    render();
  }
  function render() {
    let rows = layers.filter((r) => (!state.scheme || r.scheme === state.scheme) && (!state.text || `${r.name} ${r.op} ${r.reason} ${r.value} ${schemeName(r.scheme)}`.toLowerCase().includes(state.text)));
    const column = columns.find((one) => one.key === state.key);
    if (column) {
      const sign = state.isDown ? -1 : 1;
      const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
      const isKnown = (r) => column.get(r) !== null && column.get(r) !== undefined;
      rows = [...rows.filter(isKnown).sort((a, b) => sign * compare(column.get(a), column.get(b))), ...rows.filter((r) => !isKnown(r))];
    }
    body.replaceChildren(...rows.flatMap((row) => {
      const i = layers.indexOf(row);
      const line = h("tr", { class: `row${open.has(i) ? " marked" : ""}` }, columns.map((one) => h("td", { class: one.kind }, one.cell(row))));
      return open.has(i) ? [line, detailRow(row)] : [line];
    }));
    status.textContent = rows.length === layers.length ? count(layers.length, "layer") : `${rows.length} of ${count(layers.length, "layer")}`;
  }
  showLayer = (i) => {
    Object.assign(state, { text: "", scheme: "" });
    search.value = select.value = "";
    toggle(i, true);
    body.querySelector(`[data-layer="${i}"]`).scrollIntoView({ block: "center" });
  };
  window.addEventListener("beforeprint", () => { open.clear(); render(); });
  render();
}
layerSection();
