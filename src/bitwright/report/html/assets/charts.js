// Histograms with ranges, and the scatter plot of the Pareto front.
const hasHistogram = (one) => Boolean(one && one.counts && one.counts.length > 1);

// Bar heights are logarithmic, so that tails are visible. Bars outside of the range clip.
function histogram(one, range, { width = 116, height = 34, labels = false, name = "values" } = {}) {
  const low = Math.min(one.low, range ? range[0] : one.low);
  const high = Math.max(one.high, range ? range[1] : one.high);
  const span = high - low || 1;
  const bottom = labels ? height - 14 : height - 1;
  const at = (value) => 1 + ((value - low) / span) * (width - 2);
  const step = (one.high - one.low) / one.counts.length;
  const most = Math.log1p(Math.max(...one.counts));
  const paths = { inside: "", clipped: "", bars: "" };
  one.counts.forEach((number, bin) => {
    if (!number) return;
    const left = one.low + bin * step;
    const middle = left + step / 2;
    const kind = !range ? "bars" : middle < range[0] || middle > range[1] ? "clipped" : "inside";
    const top = bottom - Math.max(1, (Math.log1p(number) / most) * (bottom - 2));
    paths[kind] += `M${at(left).toFixed(1)},${bottom}V${top.toFixed(1)}H${at(left + step).toFixed(1)}V${bottom}Z`;
  });
  const text = `Histogram of ${name}: ${digits(one.low)} to ${digits(one.high)}` +
    (range ? `, range ${digits(range[0])} to ${digits(range[1])}` : "");
  const lines = range ? range.map((x) => s("line", { class: "limit", x1: at(x), x2: at(x), y1: 0, y2: bottom })) : [];
  if (low < 0 && high > 0) lines.unshift(s("line", { class: "zero", x1: at(0), x2: at(0), y1: 0, y2: bottom }));
  const ends = labels
    ? [s("text", { x: 1, y: height - 2 }, digits(low)), s("text", { x: width - 1, y: height - 2, "text-anchor": "end" }, digits(high))]
    : [];
  return s("svg", { class: `histogram${labels ? " large" : ""}`, viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": text },
    Object.entries(paths).filter(([, d]) => d).map(([kind, d]) => s("path", { class: kind, d })), lines, ends);
}

function detailFigures(detail) {
  if (!detail) return [];
  const figures = [];
  const options = { width: 440, height: 110, labels: true };
  if (hasHistogram(detail.values)) {
    const clip = detail.range ? `; range ${digits(detail.range[0])} to ${digits(detail.range[1])}` : "; range computed at run time or not quantized";
    figures.push(h("figure", {}, h("figcaption", {}, `Input values${clip}`), histogram(detail.values, detail.range, { ...options, name: "input values" })));
  }
  if (hasHistogram(detail.weights)) {
    const type = detail.weight_type ? ` as ${detail.weight_type}, ${count(detail.weight_scales, "scale")}` : "";
    figures.push(h("figure", {}, h("figcaption", {}, `Weights${type}`), histogram(detail.weights, detail.weight_range, { ...options, name: "weights" })));
  }
  return figures;
}

function niceTicks(low, high, wanted = 4) {
  const rough = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((m) => m >= rough);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) ticks.push(Number(tick.toPrecision(12)));
  return ticks;
}

const MOST_LABELS = 12;
function scatter(points, x, y) {
  const [width, height, left, right, top, bottom] = [760, 340, 72, 24, 18, 48];
  const pad = (values) => {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const room = (high - low || Math.abs(high) || 1) * 0.12;
    return [low - room, high + room];
  };
  const [x0, x1] = pad(points.map(x.get));
  const [y0, y1] = pad(points.map(y.get));
  const px = (v) => left + ((v - x0) / (x1 - x0)) * (width - left - right);
  const py = (v) => height - bottom - ((v - y0) / (y1 - y0)) * (height - top - bottom);
  const better = y.isHigher ? (a, b) => a > b : (a, b) => a < b;
  const front = [];
  for (const point of [...points].sort((a, b) => x.get(a) - x.get(b) || (better(y.get(a), y.get(b)) ? -1 : 1))) {
    if (!front.length || better(y.get(point), y.get(front[front.length - 1]))) front.push(point);
  }
  const grid = [
    ...niceTicks(x0, x1).map((v) => [s("line", { class: "grid", x1: px(v), x2: px(v), y1: top, y2: height - bottom }),
      s("text", { x: px(v), y: height - bottom + 18, "text-anchor": "middle" }, x.format(v))]),
    ...niceTicks(y0, y1).map((v) => [s("line", { class: "grid", x1: left, x2: width - right, y1: py(v), y2: py(v) }),
      s("text", { x: left - 8, y: py(v) + 4, "text-anchor": "end" }, y.format(v))]),
  ];
  const dots = points.map((point) => {
    const isRight = px(x.get(point)) > width * 0.72;
    return s("g", {}, s("circle", { class: point.is_best ? "best" : "", cx: px(x.get(point)), cy: py(y.get(point)), r: point.is_best ? 7 : 5 }),
      s("title", {}, `${point.name}: ${x.format(x.get(point))}, ${y.format(y.get(point))}`),
      (points.length <= MOST_LABELS || front.includes(point) || point.is_best) && s("text", { class: "label", x: px(x.get(point)) + (isRight ? -11 : 11), y: py(y.get(point)) - 8, "text-anchor": isRight ? "end" : "start" }, point.name));
  });
  return s("svg", { class: "pareto", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${y.name} against ${x.name} of ${points.length} candidates; the table below has the numbers` },
    grid,
    s("text", { x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle" }, x.name),
    s("text", { x: 14, y: top + (height - top - bottom) / 2, transform: `rotate(-90 14 ${top + (height - top - bottom) / 2})`, "text-anchor": "middle" }, y.name),
    s("path", { class: "front", d: front.map((p, i) => `${i ? "L" : "M"}${px(x.get(p))},${py(y.get(p))}`).join("") }),
    dots);
}
