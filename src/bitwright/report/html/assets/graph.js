// The graph: an SVG with boxes in columns, selection, keyboard, pan and zoom.
const STEPS = 7;
let selectNode = () => {};

function graphSection() {
  const graph = data.graph;
  if (!graph || !graph.nodes.length) return;
  const layerOf = (node) => (node.layers.length ? data.layers[node.layers[0]] : null);
  const made = section("graph", "Graph",
    "Each box is a layer with the operations that follow it directly. Read the columns downwards, then to the right. Select a box for its details.");
  const sources = graph.nodes.map(() => []);
  const targets = graph.nodes.map(() => []);
  graph.edges.forEach(([a, b]) => { sources[b].push(a); targets[a].push(b); });

  // Colours
  const hasOwn = data.layers.some((row) => isNumber(row.sqnr_db));
  const hasShares = data.layers.some((row) => isNumber(row.share));
  const errors = graph.nodes.map((node) => {
    const rows = node.layers.map((i) => data.layers[i]);
    const shares = rows.map((r) => r.share).filter(isNumber);
    if (hasShares) return shares.length ? shares.reduce((a, b) => a + b, 0) : null;
    const known = rows.map((r) => (hasOwn ? r.sqnr_db : r.accumulated && r.accumulated.sqnr_db)).filter(isNumber);
    return known.length ? -Math.min(...known) : null;
  });
  const seconds = graph.nodes.map((node) => node.seconds);
  const modes = {
    error: { label: "Error", letter: "e", values: errors, known: errors.some(isNumber),
      text: hasShares ? "share of the output error" : hasOwn ? "SQNR at the layer; a strong colour is a low SQNR" : "SQNR accumulated up to the layer",
      format: (v) => (hasShares ? percent(v) : `${fixed(-v, 1)} dB`) },
    time: { label: "Time", letter: "t", values: seconds, known: seconds.some((v) => isNumber(v) && v > 0),
      text: "time of a run", format: micro },
    scheme: { label: "Precision", known: graph.nodes.some((n) => n.layers.length) },
  };
  let mode = ["error", "time", "scheme"].find((name) => modes[name].known) || "scheme";
  const stepOf = (which, value) => {
    const known = which.values.filter(isNumber);
    const [low, high] = [Math.min(...known), Math.max(...known)];
    return isNumber(value) ? Math.min(STEPS - 1, Math.floor(((value - low) / (high - low || 1)) * STEPS)) : null;
  };

  // Elements
  const frame = s("g", {});
  const svg = s("svg", { id: "graph-svg", role: "group", "aria-label": `Graph of ${graph.name || data.title}, ${count(graph.nodes.length, "box", "boxes")}. Arrow keys move between boxes, Enter selects, plus and minus zoom.` },
    s("defs", {}, s("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, markerUnits: "userSpaceOnUse", orient: "auto" }, s("path", { class: "arrow", d: "M0,0L8,4L0,8Z" }))), frame);
  const panel = h("div", { id: "node-detail", "aria-live": "polite" });
  const side = h("aside", { class: "side card", "aria-label": "Selected box" },
    h("button", { type: "button", class: "quiet close", "aria-label": "Close the details", onclick: () => deselect() }, "×"), panel);
  const legend = h("div", { class: "legend", id: "legend" });
  const tools = h("div", { class: "tools", role: "toolbar", "aria-label": "Graph" }, h("span", { class: "soft small" }, "Colour by"));
  const buttons = Object.entries(modes).filter(([, one]) => one.known).map(([name, one]) =>
    h("button", { type: "button", class: "tool", "data-mode": name, onclick: () => { mode = name; paint(); } }, one.label));
  const zoomButton = (text, label, act) => h("button", { type: "button", class: "tool", "aria-label": label, onclick: act }, text);
  const zooms = [zoomButton("−", "Zoom out", () => zoom(0.8)), zoomButton("+", "Zoom in", () => zoom(1.25)), zoomButton("Fit", "Show the whole graph", () => fit(true))];
  tools.append(...buttons, h("span", { class: "spring" }), h("span", { class: "group" }, zooms));
  made.append(tools, h("div", { class: "picture" }, h("div", { class: "canvas card" }, svg), side), legend);
  side.hidden = true;

  const subtitle = (node) => {
    const layer = layerOf(node);
    if (node.kind !== "op") return node.type;
    return layer ? `${layer.op} · ${{ static: "static", dynamic_per_token: "per token", dynamic_per_tensor: "per tensor", weight_only: "weights only" }[layer.scheme] || schemeName(layer.scheme)}` : node.ops.slice(0, 4).join(" + ");
  };
  const clipLeft = (text, most) => (text.length > most ? `…${text.slice(text.length - most + 1)}` : text);
  const clipRight = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
  // The last parts of a dotted name that fit, after the last number among the others: 0 · self.query
  const boxLabel = (name, most) => {
    if (name.length <= most) return name;
    const parts = name.split(".");
    let first = parts.length - 1;
    const joined = (from) => {
      const number = parts.slice(0, from).filter((part) => /^\d+$/.test(part)).pop();
      return (number === undefined ? "" : `${number} · `) + parts.slice(from).join(".");
    };
    while (first > 0 && joined(first - 1).length <= most) first--;
    return clipLeft(joined(first), most);
  };
  // Without the dotted prefix that all layers share
  const prefix = sharedPrefix(data.layers.map((row) => row.name));
  const shortName = (name) => (name.startsWith(prefix) ? name.slice(prefix.length) : name) || name;
  const boxes = graph.nodes.map((node, i) => {
    const layer = layerOf(node);
    const label = `${node.name}, ${subtitle(node)}`;
    return s("g", { class: "node", role: "button", tabindex: i ? -1 : 0, "aria-label": label, "aria-pressed": "false", "data-node": i },
      s("title", {}, label),
      s("rect", { width: BOX.width, height: BOX.height, rx: node.kind === "op" ? 7 : 20 }),
      layer && s("rect", { class: "stripe", x: 0, y: 0, width: 6, height: BOX.height, rx: 3, "stroke-width": 0 }),
      s("text", { x: BOX.width / 2 + 3, y: 15, "text-anchor": "middle" }, boxLabel(shortName(node.name), 22)),
      s("text", { class: "sub", x: BOX.width / 2 + 3, y: 28, "text-anchor": "middle" }, clipRight(subtitle(node), 25)));
  });
  let lines = [];
  let placed = null;
  let view = { x: 0, y: 0, k: 1 };
  let selected = null;

  function size() {
    return { width: svg.clientWidth || 800, height: svg.clientHeight || 600 };
  }
  function draw() {
    const { width, height } = size();
    placed = placeGraph(graph, width, height);
    const lanes = {};
    lines = graph.edges.map((edge) => s("path", { class: `edge${edge[2].length ? "" : " far"}`, d: edgePath(graph, placed, edge, lanes), "marker-end": "url(#arrow)" }));
    boxes.forEach((box, i) => {
      const node = graph.nodes[i];
      box.setAttribute("transform", `translate(${placed.centre(node.rank, node.x) - BOX.width / 2},${placed.top(node.rank)})`);
    });
    frame.replaceChildren(...lines, ...boxes);
    mark();
  }
  function show() {
    const { width, height } = size();
    svg.setAttribute("viewBox", `${view.x} ${view.y} ${width / view.k} ${height / view.k}`);
  }
  // The whole graph; at first not smaller than text can be read at.
  function fit(isWhole) {
    const { width, height } = size();
    const margin = 26;
    const k = Math.min(1.25, width / (placed.width + 2 * margin), height / (placed.height + 2 * margin));
    view.k = isWhole ? k : Math.max(k, width < 600 ? 0.85 : 0.5);
    const [w, hgt] = [width / view.k, height / view.k];
    const first = (placed.columns[0].high - placed.columns[0].low + 1) * BOX.stepX;
    view.x = w >= placed.width + margin ? (placed.width - w) / 2 : Math.max(-margin, (first - w) / 2);
    view.y = hgt >= placed.height + margin ? (placed.height - hgt) / 2 : -margin;
    show();
  }
  function zoom(factor, at) {
    const { width, height } = size();
    const [px, py] = at || [width / 2, height / 2];
    const k = Math.min(4, Math.max(0.05, view.k * factor));
    view.x += px / view.k - px / k;
    view.y += py / view.k - py / k;
    view.k = k;
    show();
  }
  function reveal(i) {
    const node = graph.nodes[i];
    const { width: whole, height } = size();
    const width = whole - (side.hidden || getComputedStyle(side).position !== "absolute" ? 0 : side.offsetWidth + 24);
    const [x, y] = [placed.centre(node.rank, node.x), placed.top(node.rank) + BOX.height / 2];
    const [w, hgt] = [width / view.k, height / view.k];
    if (x - BOX.width / 2 < view.x || x + BOX.width / 2 > view.x + w) view.x = x - w / 2;
    if (y - BOX.height < view.y || y + BOX.height > view.y + hgt) view.y = y - hgt / 2;
    show();
  }

  function paint() {
    const which = modes[mode];
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.mode === mode)));
    boxes.forEach((box, i) => {
      const layer = layerOf(graph.nodes[i]);
      const names = ["node", graph.nodes[i].kind];
      if (layer) names.push(schemeClass(layer.scheme));
      const step = which.values ? stepOf(which, which.values[i]) : null;
      if (step !== null && graph.nodes[i].kind === "op") names.push(`${which.letter}${step}`);
      box.setAttribute("class", names.join(" "));
    });
    const used = new Map(data.layers.filter((r) => r.node !== null && r.node !== undefined).map((r) => [schemeClass(r.scheme), schemeName(r.scheme)]));
    const stripes = [...used].map(([key, name]) => h("span", {}, h("span", { class: `swatch ${key}` }), key === "other" ? "other quantization" : name));
    if (!which.values) return legend.replaceChildren(h("span", {}, "Stripe at the left of a box:"), ...stripes);
    const known = which.values.filter(isNumber);
    legend.replaceChildren(
      h("span", {}, which.format(Math.min(...known))),
      h("span", { class: "ramp", role: "img", "aria-label": `light is ${which.format(Math.min(...known))}, strong is ${which.format(Math.max(...known))}` }, Array.from({ length: STEPS }, (_, i) => h("i", { class: `${which.letter}${i}` }))),
      h("span", {}, `${which.format(Math.max(...known))} (${which.text})`), ...stripes);
  }

  function mark() {
    lines.forEach((line, e) => {
      const [a, b] = graph.edges[e];
      line.classList.toggle("lit", selected !== null && (a === selected || b === selected));
    });
    boxes.forEach((box, i) => box.setAttribute("aria-pressed", String(i === selected)));
  }
  function focusBox(i) {
    boxes.forEach((box, j) => box.setAttribute("tabindex", i === j ? 0 : -1));
    reveal(i);
    boxes[i].focus({ preventScroll: true });
  }
  function describe(i) {
    const node = graph.nodes[i];
    const layer = layerOf(node);
    const jump = (j) => h("li", {}, h("button", { type: "button", class: "link", onclick: () => { focusBox(j); selectNode(j); } }, graph.nodes[j].name));
    const list = (name, items) => (items.length ? [h("h3", {}, name), h("ul", {}, items.slice(0, 8).map(jump), items.length > 8 && h("li", {}, `${items.length - 8} more`))] : []);
    panel.replaceChildren(
      h("h3", { id: "node-name" }, node.name),
      h("p", { class: "soft small" }, node.kind === "op" ? node.ops.join(" + ") : `model ${node.kind}`),
      facts([
        ["Type", h("code", {}, node.type)],
        ["Time", isNumber(node.seconds) ? micro(node.seconds) : null],
        ...(layer ? [
          ["Precision", schemeCell(layer.scheme)],
          ["Why", layer.reason],
          ["SQNR", isNumber(layer.sqnr_db) ? `${fixed(layer.sqnr_db, 1)} dB` : null],
          ["Accumulated", layer.accumulated ? (isNumber(layer.accumulated.sqnr_db) ? `${fixed(layer.accumulated.sqnr_db, 1)} dB` : "exact") : null],
          ["Error share", isNumber(layer.share) ? percent(layer.share) : null],
          ["Multiply-adds", layer.multiply_adds ? human(layer.multiply_adds, "") : null],
        ] : []),
      ]),
      ...(layer ? detailFigures(layer.detail) : []),
      ...(layer ? [h("p", {}, h("button", { type: "button", class: "link go", onclick: () => showLayer(node.layers[0]) }, "Show in the layer table"))] : []),
      ...list("Reads", sources[i]), ...list("Read by", targets[i]));
  }
  selectNode = (i, isRevealed = false) => {
    selected = i;
    side.hidden = false;
    mark();
    describe(i);
    boxes.forEach((box, j) => box.setAttribute("tabindex", i === j ? 0 : -1));
    if (isRevealed) {
      reveal(i);
      document.getElementById("graph").scrollIntoView();
    }
  };

  const deselect = () => {
    const last = selected;
    selected = null;
    side.hidden = true;
    mark();
    if (last !== null) boxes[last].focus({ preventScroll: true });
  };

  // Keyboard: down and up follow edges, left and right stay in a rank
  const nearest = (i, candidates) => candidates.reduce((best, j) => (best === null || Math.abs(graph.nodes[j].x - graph.nodes[i].x) < Math.abs(graph.nodes[best].x - graph.nodes[i].x) ? j : best), null);
  const inRank = (i, side_) => graph.nodes.map((_, j) => j).filter((j) => j !== i && graph.nodes[j].rank === graph.nodes[i].rank && (graph.nodes[j].x - graph.nodes[i].x) * side_ > 0);
  svg.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const box = event.target.closest(".node");
    const i = box ? Number(box.dataset.node) : 0;
    const moves = {
      ArrowDown: () => nearest(i, targets[i]), ArrowUp: () => nearest(i, sources[i]),
      ArrowRight: () => nearest(i, inRank(i, 1)), ArrowLeft: () => nearest(i, inRank(i, -1)),
      Home: () => 0, End: () => graph.nodes.length - 1,
    };
    if (event.key in moves) {
      const next = moves[event.key]();
      if (next !== null) focusBox(next);
    } else if (event.key === "Enter" || event.key === " ") selectNode(i);
    else if (event.key === "Escape" && selected !== null) deselect();
    else if (event.key === "+" || event.key === "=") zoom(1.25);
    else if (event.key === "-") zoom(0.8);
    else if (event.key === "0") fit(true);
    else return;
    event.preventDefault();
  });

  // Pointer: drag to pan, two fingers or ctrl and wheel to zoom
  const pointers = new Map();
  let moved = 0;
  const local = (event) => {
    const box = svg.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  svg.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, local(event));
    if (pointers.size === 1) moved = 0;
  });
  svg.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) return;
    const [before, now] = [pointers.get(event.pointerId), local(event)];
    if (pointers.size === 2) {
      const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
      const [d0, d1] = [before, now].map(([x, y]) => Math.hypot(x - other[0], y - other[1]));
      if (d0 > 0) zoom(d1 / d0, other);
    } else {
      moved += Math.hypot(now[0] - before[0], now[1] - before[1]);
      if (moved > 4) {
        if (!svg.classList.contains("dragging")) {
          svg.classList.add("dragging");
          svg.setPointerCapture(event.pointerId);
        }
        view.x -= (now[0] - before[0]) / view.k;
        view.y -= (now[1] - before[1]) / view.k;
        show();
      }
    }
    pointers.set(event.pointerId, now);
  });
  for (const kind of ["pointerup", "pointercancel", "pointerleave"]) {
    svg.addEventListener(kind, (event) => {
      pointers.delete(event.pointerId);
      svg.classList.remove("dragging");
    });
  }
  svg.addEventListener("click", (event) => {
    const box = event.target.closest(".node");
    if (box && moved <= 4) selectNode(Number(box.dataset.node));
  });
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 300), local(event));
  }, { passive: false });

  draw();
  paint();
  fit(false);
  let last = svg.clientWidth;
  new ResizeObserver(() => {
    if (svg.clientWidth !== last && svg.clientWidth) {
      last = svg.clientWidth;
      draw();
      fit(false);
    }
  }).observe(svg);
  window.addEventListener("beforeprint", () => { draw(); fit(true); });
}
graphSection();
