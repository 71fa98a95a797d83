// The first screen: what changed, and what to do next.
function statCard(title, figure, unit, pair, values, note) {
  const card = h("div", { class: "stat card" }, h("h3", {}, title),
    h("div", { class: "figure" }, figure, unit && [" ", h("small", {}, unit)]), pair && h("div", { class: "pair" }, pair));
  if (values && values.every(isNumber) && Math.max(...values) > 0) {
    const most = Math.max(...values);
    const bar = (value, y, kind) => s("rect", { class: kind, x: 0, y, rx: 2, height: 6, width: Math.max(0.6, (100 * value) / most) });
    card.append(s("svg", { viewBox: "0 0 100 16", preserveAspectRatio: "none", "aria-hidden": "true" }, bar(values[0], 0, "before"), bar(values[1], 9, "after")));
  }
  if (note) card.append(h("div", { class: "note" }, note));
  return card;
}

const ratio = (better) => (better >= 10 ? better.toFixed(0) : better.toFixed(2).replace(/0$/, ""));
function times(before, after, better, worse) {
  if (!isNumber(before) || !isNumber(after) || after <= 0 || before <= 0) return ["–", ""];
  return before >= after ? [`${ratio(before / after)}×`, better] : [`${ratio(after / before)}×`, worse];
}

function summarySection() {
  const found = data.summary || {};
  const made = h("section", { id: "summary", "aria-labelledby": "summary-title" },
    h("h1", { id: "summary-title" }, data.title),
    h("p", { class: "lead" }, data.headline));
  main.append(made);
  document.getElementById("nav").append(h("a", { href: "#summary" }, "Summary"));
  const cards = [];
  if (found.size) {
    const { before, after } = found.size;
    cards.push(statCard("Size", ...times(before, after, "smaller", "larger"), `${bytes(before)} → ${bytes(after)}`, [before, after], found.size.what === "files" ? "model files" : "weights"));
  }
  if (found.latency) {
    const [a, b] = [found.latency.before, found.latency.after];
    const ms = (one) => (one ? `${digits(one.median_ms)} ms` : "–");
    const about = `median of ${found.rounds} rounds, ${count(found.threads, "thread")}, ${Object.values(found.inputs || {})[0] || ""}`;
    if (a) {
      const [figure, unit] = isNumber(found.speedup) ? times(found.speedup, 1, "faster", "slower") : times(a.median_ms, b.median_ms, "faster", "slower");
      cards.push(statCard("Latency", figure, unit, `${ms(a)} → ${ms(b)}`, [a.median_ms, b.median_ms], about));
    } else cards.push(statCard("Latency", digits(b.median_ms), "ms", null, null, about));
  }
  if (found.memory) {
    const { before, after } = found.memory;
    const note = "packed weights and arena";
    if (isNumber(before)) cards.push(statCard("Memory at run time", ...times(before, after, "less", "more"), `${bytes(before)} → ${bytes(after)}`, [before, after], note));
    else cards.push(statCard("Memory at run time", bytes(after), "", null, null, note));
  }
  for (const score of (found.scores || []).slice(0, 2)) {
    const change = score.after - score.before;
    const shown = isNumber(change) ? `${change > 0 ? "+" : change < 0 ? "−" : "±"}${digits(Math.abs(change), 2)}` : "–";
    cards.push(statCard(`Score: ${score.name}`, shown, "", `${digits(score.before, 5)} → ${digits(score.after, 5)}`, null, "by your function"));
  }
  const outputs = Object.entries(found.output_sqnr_db || {});
  if (outputs.length) {
    const known = outputs.filter(([, value]) => isNumber(value)).sort((a, b) => a[1] - b[1]);
    const worst = known[0];
    const top = worst && (found.same_top1 || {})[worst[0]];
    const pair = worst ? `output ${worst[0]}${isNumber(top) ? `, same top-1 ${percent(top)}` : ""}` : "outputs are equal";
    cards.push(statCard("Output error", worst ? fixed(worst[1], 1) : "none", worst ? "dB SQNR" : "", pair, null, found.measured_on && `on ${found.measured_on}`));
  }
  made.append(h("div", { class: `stats of-${cards.length}` }, cards));
  const layers = data.layers.filter((r) => r.scheme !== "float").length;
  const line = [data.layers.length && `${layers} of ${count(data.layers.length, "layer")} quantized`,
    isNumber(found.int8_mac_fraction) && `${percent(found.int8_mac_fraction)} of the multiply-adds in 8 bits`,
    data.reproduce && data.reproduce.recipe && `recipe ${data.reproduce.recipe}`].filter(Boolean).join(" · ");
  if (line) made.append(h("p", { class: "soft small" }, line));
  if ((found.scores || []).length > 2) {
    made.append(table("Scores", [["Score", (one) => one.name], ["Float", (one) => digits(one.before, 6), "number"], ["Quantized", (one) => digits(one.after, 6), "number"],
      ["Change", (one) => (isNumber(one.after - one.before) ? digits(one.after - one.before, 3) : "–"), "number"]], found.scores), h("p", {}));
  }
  if (data.next_steps.length) {
    const word = { good: "good", act: "act", check: "check" };
    made.append(h("div", { class: "next card" }, h("h3", {}, "What to do next"),
      h("ul", {}, data.next_steps.map((step) => h("li", {}, h("span", { class: `tag ${step.kind}` }, word[step.kind] || step.kind), h("span", {}, step.text))))));
  }
}
summarySection();
