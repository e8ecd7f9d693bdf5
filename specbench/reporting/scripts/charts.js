// Draws each chart of the page's data into its figure, as wide as the figure is, and again when that changes.
// What a chart is: see specbench/reporting/charts.py.
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const ROW = 26, FRAME = 84, HEIGHT = 300, LINE = 13;

  const longest = (texts) => Math.max(0, ...(texts || []).map((text) => String(text).length));

  const told = { title: "told", tip: true };
  const marks = {
    one: () => [Plot.ruleX([1], { stroke: "currentColor", strokeOpacity: 0.5, strokeDasharray: "2,3" })],
    dot: (points, { by, hollow, size }, at) => [Plot.dot(points, { ...at, ...told, x: "x", y: "y", r: size, symbol: by,
      ...(hollow ? { stroke: by, fill: "var(--paper)", strokeWidth: 1.6 } : { fill: by }) })],
    line: (points, { by, dash }) => [Plot.line(points, { x: "x", y: "y", stroke: by, strokeDasharray: dash, strokeWidth: 1.6 })],
    interval: (points, { by }, at) => {
      const look = by ? { ...at, stroke: by, strokeOpacity: 0.7 } : { ...at, stroke: "currentColor", strokeWidth: 1.2 };
      return [Plot.ruleY(points.filter(({ x1 }) => x1 != null), { x1: "x1", x2: "x2", y: "y", ...look }),
        Plot.ruleX(points.filter(({ y1 }) => y1 != null), { x: "x", y1: "y1", y2: "y2", ...look })];
    },
    bar: (points, { by }, at) => [Plot.barX(points, { ...at, ...told, y: "y", fill: by,
      ...(points.length && "x1" in points[0] ? { x1: "x1", x2: "x2" } : { x: "x", order: by }) })],
    total: (points) => [Plot.tickX(points, { x: "x", y: "y", stroke: "currentColor", strokeWidth: 2.5, inset: 9, title: "told" })],
    name: (points, { by }) => [Plot.text(points, { x: "x", y: "y", text: by, fill: by, dx: 8, textAnchor: "start",
      stroke: "var(--paper)", strokeWidth: 3 })],
  };

  function draw(chart, width) {
    const { x, y, fy, color, symbol } = chart.scales;
    const rows = fy || (y.label === null ? y : null); // scale of the names next to the rows of the chart, if it has rows
    const named = chart.layers.filter(({ mark }) => mark === "name").flatMap(({ points }) => points);
    // A name must not cover a point, so points are drawn after names.
    const layers = named.length ? chart.layers.toSorted((a, b) => (a.mark === "dot") - (b.mark === "dot")) : chart.layers;
    return Plot.plot({
      width,
      height: chart.rows ? FRAME + ROW * chart.rows : HEIGHT,
      marginLeft: rows ? Math.max(40, Math.min(width / 2.6, 14 + 6.6 * longest(rows.domain))) : 48,
      marginRight: named.length ? Math.min(width / 3, 16 + 6.6 * longest(named.map((point) => point.run))) : 16,
      marginTop: 24,
      marginBottom: 40,
      style: { fontSize: "12px", fontFamily: "inherit", background: "transparent", overflow: "visible" },
      ariaLabel: chart.label,
      x: { ...x, ...(x.ticks || width > 420 ? {} : { ticks: 4 }) },
      y,
      ...(fy ? { fy } : {}),
      color,
      symbol,
      marks: layers.flatMap((layer) => marks[layer.mark](layer.points, layer, fy ? { fy: "fy" } : {})),
    });
  }

  // Moves names down, or up from the chart's foot, until no two of them cover each other.
  function part(place) {
    const names = [...place.querySelectorAll("[aria-label=text] text")].map((text) => ({ text, box: text.getBBox(),
      matrix: text.transform.baseVal.consolidate().matrix })).map((one) => ({ ...one, left: one.matrix.e + one.box.x,
      right: one.matrix.e + one.box.x + one.box.width, top: one.matrix.f, from: one.matrix.f }));
    const foot = HEIGHT - 44;
    names.sort((a, b) => a.top - b.top);
    names.forEach((one, place) => names.slice(0, place).forEach((other) => {
      const beside = one.left < other.right && other.left < one.right;
      if (beside && one.top < other.top + LINE) one.top = other.top + LINE;
    }));
    names.reverse().forEach((one, place) => {
      one.top = Math.min(one.top, foot);
      names.slice(0, place).forEach((other) => {
        const beside = one.left < other.right && other.left < one.right;
        if (beside && one.top > other.top - LINE) one.top = other.top - LINE;
      });
    });
    names.forEach((one) => one.text.setAttribute("transform", `translate(${one.matrix.e},${one.top})`));
  }

  document.querySelectorAll("[data-chart]").forEach((place) => {
    const chart = charts[Number(place.dataset.chart)];
    let drawn = 0;
    const fit = () => {
      const width = Math.floor(Math.min(640, place.clientWidth));
      if (width <= 0 || width === drawn) return;
      place.replaceChildren(draw(chart, (drawn = width)));
      place.querySelectorAll("g[aria-label]").forEach((part) => part.setAttribute("role", "group")); // a name needs one
      part(place);
    };
    fit();
    new ResizeObserver(fit).observe(place);
  });
})();
