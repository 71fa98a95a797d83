// Places the ranks of the graph in columns, read like a newspaper: down, then right.
const BOX = { width: 142, height: 36, stepX: 156, stepY: 54, gutter: 40, lane: 5 };

function rowExtents(graph) {
  const rows = [];
  const widen = (rank, x) => {
    rows[rank] = rows[rank] || { low: x, high: x };
    rows[rank].low = Math.min(rows[rank].low, x);
    rows[rank].high = Math.max(rows[rank].high, x);
  };
  for (const node of graph.nodes) widen(node.rank, node.x);
  const crossing = new Array(rows.length).fill(0);
  for (const [source, , points] of graph.edges) {
    points.forEach((x, i) => widen(graph.nodes[source].rank + i, x));
    for (let i = 0; i + 1 < points.length; i++) crossing[graph.nodes[source].rank + i]++;
  }
  return { rows, crossing };
}

// Columns of at most `per` ranks, cut where few edges cross.
function cutColumns({ rows, crossing }, per) {
  const columns = [];
  for (let start = 0; start < rows.length; ) {
    let end = Math.min(start + per, rows.length);
    if (end < rows.length) {
      for (let e = end - 1; e >= start + Math.ceil(per * 0.75); e--) if (crossing[e - 1] < crossing[end - 1]) end = e;
    }
    const part = rows.slice(start, end);
    columns.push({ start, end, low: Math.min(...part.map((r) => r.low)), high: Math.max(...part.map((r) => r.high)) });
    start = end;
  }
  return columns;
}

function sizeOf(columns) {
  const width = columns.reduce((sum, c) => sum + (c.high - c.low + 1) * BOX.stepX, 0) + (columns.length - 1) * BOX.gutter;
  return { width, height: Math.max(...columns.map((c) => c.end - c.start)) * BOX.stepY };
}

function placeGraph(graph, width, height) {
  const extents = rowExtents(graph);
  let best = null;
  for (let per = extents.rows.length; per >= Math.min(3, extents.rows.length); per--) {
    const columns = cutColumns(extents, per);
    const size = sizeOf(columns);
    const scale = Math.min(width / size.width, height / size.height);
    if (!best || scale > best.scale) best = { columns, ...size, scale };
  }
  let left = 0;
  const columnOf = [];
  best.columns.forEach((column, index) => {
    column.left = left;
    column.index = index;
    left += (column.high - column.low + 1) * BOX.stepX + BOX.gutter;
    for (let rank = column.start; rank < column.end; rank++) columnOf[rank] = column;
  });
  const centre = (rank, x) => columnOf[rank].left + (x - columnOf[rank].low + 0.5) * BOX.stepX;
  const top = (rank) => (rank - columnOf[rank].start) * BOX.stepY + (BOX.stepY - BOX.height) / 2;
  return { ...best, columnOf, centre, top };
}

function rounded(points, radius = 8) {
  let d = `M${points[0].join(",")}`;
  for (let i = 1; i + 1 < points.length; i++) {
    const [[ax, ay], [bx, by], [cx, cy]] = points.slice(i - 1, i + 2);
    const before = Math.min(radius, Math.hypot(bx - ax, by - ay) / 2);
    const after = Math.min(radius, Math.hypot(cx - bx, cy - by) / 2);
    d += `L${bx + Math.sign(ax - bx) * before},${by + Math.sign(ay - by) * before}Q${bx},${by} ${bx + Math.sign(cx - bx) * after},${by + Math.sign(cy - by) * after}`;
  }
  return `${d}L${points[points.length - 1].join(",")}`;
}

// An edge goes down inside a column, and around the foot of a column to the head of the next.
function edgePath(graph, placed, edge, lanes) {
  const [source, target, points] = edge;
  const first = graph.nodes[source].rank;
  const end = graph.nodes[target];
  if (!points.length) {
    const [x0, y0] = [placed.centre(first, graph.nodes[source].x), placed.top(first) + BOX.height];
    const [x1, y1] = [placed.centre(end.rank, end.x), placed.top(end.rank)];
    return `M${x0},${y0}C${x0},${y0 + 40} ${x1},${y1 - 40} ${x1},${y1}`;
  }
  let d = "";
  let [x, y] = [placed.centre(first, points[0]), placed.top(first) + BOX.height];
  for (let i = 1; i < points.length; i++) {
    const rank = first + i;
    const [nextX, nextY] = [placed.centre(rank, points[i]), placed.top(rank)];
    if (placed.columnOf[rank] === placed.columnOf[rank - 1]) {
      const middle = (y + nextY) / 2;
      d += `M${x},${y}C${x},${middle} ${nextX},${middle} ${nextX},${nextY}`;
    } else {
      const column = placed.columnOf[rank];
      const lane = (lanes[column.index] = (lanes[column.index] || 0) + 1) - 1;
      const shift = (lane % 6) * BOX.lane;
      const gutter = column.left - BOX.gutter / 2 - 12 + shift;
      d += rounded([[x, y], [x, y + 9 + shift], [gutter, y + 9 + shift], [gutter, -10 - shift], [nextX, -10 - shift], [nextX, nextY]]);
    }
    [x, y] = [nextX, nextY];
    if (i + 1 < points.length) {
      d += `M${x},${y}V${y + BOX.height}`;
      y += BOX.height;
    }
  }
  return d;
}
