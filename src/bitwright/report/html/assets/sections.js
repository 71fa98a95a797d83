// The ledger, the Pareto front, what was skipped, the worst inputs, and how to reproduce.
const dash = (x) => (x === null || x === undefined || x === "" ? "–" : x);

function ledgerSection() {
  const ledger = data.ledger;
  if (!ledger) return;
  const lines = ledger.lines || [];
  const metric = ledger.metric;
  const about = [`The outputs are at ${fixed(ledger.sqnr_db, 1)} dB over ${count(ledger.rows || 0, "row")}`,
    metric && `${metric.name} ${digits(metric.float, 5)} → ${digits(metric.quantized, 5)}`,
    ledger.flip_count ? `${count(ledger.flip_count, "prediction changes", "predictions change")}` : null].filter(Boolean).join("; ");
  const made = section("ledger", "Ledger", `Where the output error comes from, and what fixes it. ${about}.`);
  const most = Math.max(...lines.map((l) => l.share || 0), 1e-9);
  const meter = (share) => {
    const bar = h("i", {});
    bar.style.width = `${Math.max(0, Math.min(100, (100 * (share || 0)) / most))}%`;
    return [h("span", { class: "meter", "aria-hidden": "true" }, bar), percent(share)];
  };
  const gain = (fix) => [isNumber(fix.bytes) && `${fix.bytes >= 0 ? "+" : "−"}${bytes(Math.abs(fix.bytes))}`, isNumber(fix.seconds) && `${fix.seconds >= 0 ? "+" : "−"}${micro(Math.abs(fix.seconds))}`, isNumber(fix.metric) && `${metric ? metric.name : "score"} ${fix.metric >= 0 ? "+" : "−"}${digits(Math.abs(fix.metric))}`].filter(Boolean).join(", ");
  const rest = isNumber(ledger.rest) ? [{ layer: "everything else", op: "", scheme: "", cause: "", share: ledger.rest, fix: null }] : [];
  made.append(table("Ledger", [
    ["Layer", (l) => [h("span", { class: "name" }, l.layer), h("div", { class: "op" }, l.op)]],
    ["Share of the error", (l) => h("span", { class: "nowrap" }, meter(l.share))],
    ["Cause", (l) => dash(l.cause), "wide"],
    ["Precision", (l) => (l.scheme ? schemeCell(l.scheme) : "–"), "wide"],
    ["SQNR if fixed", (l) => (isNumber(l.predicted_sqnr_db) ? `${fixed(l.predicted_sqnr_db, 1)} dB` : "–"), "number"],
    ["Fix", (l) => (l.fix ? [l.fix.text || l.fix.action || "–", gain(l.fix) && h("div", { class: "op" }, gain(l.fix))] : "–")],
  ], [...lines, ...rest]));
  const outputs = Object.entries(ledger.outputs || {});
  if (outputs.length > 1) {
    made.append(h("h3", {}, "Outputs"), table("Outputs of the ledger", [["Output", ([name]) => name], ["SQNR", ([, one]) => `${fixed(one.sqnr_db, 1)} dB`, "number"]], outputs));
  }
}

function paretoSection() {
  const tune = data.tune;
  if (!tune) return;
  const about = [tune.objective && `Objective: ${tune.objective}`, isNumber(tune.seconds) && `${fixed(tune.seconds, 0)} s of search`, tune.stopped && `stopped: ${tune.stopped}`,
    isNumber(tune.max_drop) && `largest allowed drop ${digits(tune.max_drop)}`].filter(Boolean).join("; ");
  const made = section("pareto", "Pareto front", `Candidates of the search, and those that no other candidate beats in both. ${about}${about ? "." : ""}`);
  const points = tune.pareto || [];
  const enough = (key) => points.filter((p) => isNumber(p[key])).length > 1;
  const xs = [["latency_ms", "latency, ms", (v) => digits(v)], ["bytes", "size", bytes], ["memory_bytes", "memory", bytes]];
  const ys = [["score", (tune.metric && tune.metric.name) || "score", (v) => digits(v, 4), true], ["measured_error", "measured error", (v) => digits(v), false], ["predicted_error", "predicted error", (v) => digits(v), false]];
  const x = xs.find(([key]) => enough(key));
  const y = ys.find(([key]) => enough(key));
  if (x && y) {
    const shown = points.filter((p) => isNumber(p[x[0]]) && isNumber(p[y[0]]));
    made.append(h("div", { class: "card padded" }, scatter(shown, { name: x[1], get: (p) => p[x[0]], format: x[2] }, { name: y[1], get: (p) => p[y[0]], format: y[2], isHigher: y[3] })));
  }
  if (points.length) {
    made.append(h("div", { class: "gap" }, table("Candidates", [
      ["Candidate", (p) => [h("span", { class: "name" }, p.name), p.is_best && h("div", { class: "op" }, "chosen")]],
      ["Latency", (p) => (isNumber(p.latency_ms) ? `${digits(p.latency_ms)} ms` : "–"), "number"],
      ["Size", (p) => bytes(p.bytes), "number"],
      ["Memory", (p) => bytes(p.memory_bytes), "number wide"],
      ["Score", (p) => digits(p.score, 5), "number"],
      ["Predicted error", (p) => digits(p.predicted_error), "number wide"],
      ["Measured error", (p) => digits(p.measured_error), "number wide"],
    ], points)));
  }
  if ((tune.layers || []).length) {
    made.append(h("h3", {}, "Chosen precision of each layer"), table("Chosen precisions", [
      ["Layer", (l) => h("span", { class: "name" }, l.layer)],
      ["Precision", (l) => l.precision],
      ["Why", (l) => h("div", { class: "why" }, dash(l.reason))],
      ["Alternatives", (l) => Object.entries(l.options || {}).map(([name, one]) => h("div", { class: "small nowrap" }, `${name}: ${micro(one.seconds)}, error ${digits(one.error)}`)), "wide"],
    ], tune.layers, { class: "scroll tall card" }));
  }
}

function skippedSection() {
  if (!data.skipped.length && !data.notes.length) return;
  const made = section("skipped", "Skipped", data.skipped.length ? "What stays in float or runs without a kernel, and why." : "No layer was skipped.");
  if (data.skipped.length) {
    made.append(table("Skipped", [
      ["What", (one) => [h("span", { class: "name" }, one.name), h("div", { class: "op" }, one.op)]],
      ["Kind", (one) => one.kind, "wide"],
      ["Why", (one) => one.reason],
      ["Multiply-adds", (one) => (one.multiply_adds ? human(one.multiply_adds, "") : "–"), "number wide"],
    ], data.skipped, { class: "scroll tall card" }));
  }
  if (data.notes.length) made.append(h("h3", {}, "Notes"), h("ul", {}, data.notes.map((note) => h("li", {}, note))));
}

function worstSection() {
  const flips = (data.ledger && data.ledger.flips) || [];
  const outputs = Object.entries((data.comparison && data.comparison.outputs) || {});
  if (!data.worst_inputs.length && !flips.length) return;
  const made = section("worst", "Worst inputs", "Inputs are named by their position in the data, counted from 0. Their contents are not in this file unless they were asked for.");
  const db = (one) => (isNumber(one.sqnr_db) ? `${fixed(one.sqnr_db, 1)} dB` : "exact");
  const distance = [
    ["SQNR", db, "number"], ["Cosine", (one) => fixed(one.cosine, 6), "number"], ["Largest error", (one) => digits(one.max_error), "number"],
    ["Same top-1", (one) => (isNumber(one.same_top1) ? percent(one.same_top1) : "–"), "number wide"],
  ];
  if (outputs.length) made.append(h("h3", {}, "Outputs over all batches"), table("Outputs", [["Output", ([name]) => name], ...distance.map(([name, get, kind]) => [name, ([, one]) => get(one), kind])], outputs));
  if (data.worst_inputs.length) {
    const contents = data.worst_inputs.some((one) => one.inputs);
    const preview = (one) => Object.entries(one.inputs || {}).map(([name, array]) => h("details", {}, h("summary", {}, `${name}: ${array.type}`), h("code", { class: "small" }, array.first.map((v) => (isNumber(v) ? digits(v) : String(v))).join(" "))));
    made.append(h("h3", {}, "Batches with the largest error"), table("Batches with the largest error", [["Batch", (one) => one.batch], ...distance, ...(contents ? [["First elements", preview]] : [])], data.worst_inputs));
  }
  if (flips.length) {
    made.append(h("h3", {}, `Changed predictions: ${data.ledger.flip_count ?? flips.length}`), table("Changed predictions", [
      ["Batch", (f) => f.batch, "number"], ["Row", (f) => f.row, "number"], ["Output", (f) => f.output],
      ["Float", (f) => dash(f.float)], ["Quantized", (f) => dash(f.quantized)],
      ["Margin before", (f) => digits(f.float_margin), "number wide"], ["Margin after", (f) => digits(f.quantized_margin), "number wide"],
    ], flips, { class: "scroll tall card" }));
  }
}

function reproduceSection() {
  const found = data.reproduce || {};
  const made = section("reproduce", "Reproduce");
  if (found.command) {
    const copy = h("button", { type: "button", class: "quiet", onclick: async () => {
      try {
        await navigator.clipboard.writeText(found.command);
        copy.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(command);
        copy.textContent = "Selected";
      }
    } }, "Copy");
    const command = h("code", {}, found.command);
    made.append(h("pre", {}, command), h("div", { class: "tools" }, copy));
  }
  const files = Object.entries(found.files || {}).map(([side, file]) => [`${side === "float" ? "Float" : "Quantized"} file`, [file.name, `, ${bytes(file.bytes)}`, h("div", { class: "op mono" }, `sha256 ${file.sha256}`)]]);
  made.append(facts([
    ...files, ["Recipe", found.recipe], ["Created", found.created],
    ["Quantized in", isNumber(found.seconds) ? `${digits(found.seconds)} s` : null],
    ["Timed on", found.threads ? [`${found.target}, ${count(found.threads, "thread")}`, Object.entries(found.inputs || {}).map(([name, type]) => h("div", { class: "op" }, `${name}: ${type}`))] : null],
    ["Versions", Object.entries(found.versions || {}).map(([name, text]) => `${name} ${text}`).join(", ")],
    ["System", [found.system, found.python && `Python ${found.python}`].filter(Boolean).join(", ")],
  ]));
  if (data.tune && data.tune.recipe) made.append(h("h3", {}, "Recipe of the search"), h("pre", {}, h("code", {}, JSON.stringify(data.tune.recipe, null, 2))));
}

ledgerSection();
paretoSection();
skippedSection();
worstSection();
reproduceSection();
document.getElementById("foot").textContent = `Made by bitwright${data.reproduce && data.reproduce.versions && data.reproduce.versions.bitwright ? ` ${data.reproduce.versions.bitwright}` : ""}. This file loads nothing from the network.`;
