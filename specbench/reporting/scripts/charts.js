// Draws each chart of the page's data into its figure, as wide as the figure is, and again when that changes.
// A chart names marks of Observable Plot with their points and options; see specbench/reporting/charts.py.
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const ROW = 26, FRAME = 84, HEIGHT = 270;

  const longest = (domain) => Math.max(0, ...(domain || []).map((text) => String(text).length));

  function draw(chart, width) {
    const { x, y, fy, color } = chart.scales;
    const rows = fy || (y.label === null ? y : null); // what is named beside the rows of the chart, if it has rows
    return Plot.plot({
      width,
      height: chart.rows ? FRAME + ROW * chart.rows : HEIGHT,
      marginLeft: rows ? Math.max(40, Math.min(width / 2.6, 14 + 6.6 * longest(rows.domain))) : 48,
      marginRight: 16,
      marginTop: 24,
      marginBottom: 40,
      style: { fontSize: "12px", fontFamily: "inherit", background: "transparent", overflow: "visible" },
      ariaLabel: chart.label,
      x: { ...x, ...(x.ticks || width > 420 ? {} : { ticks: 4 }) },
      y,
      ...(fy ? { fy } : {}),
      color,
      marks: chart.layers.map(({ mark, points, options }) => Plot[mark](points, options)),
    });
  }

  document.querySelectorAll("[data-chart]").forEach((place) => {
    const chart = charts[Number(place.dataset.chart)];
    let drawn = 0;
    const fit = () => {
      const width = Math.floor(Math.min(640, place.clientWidth));
      if (width > 0 && width !== drawn) place.replaceChildren(draw(chart, (drawn = width)));
    };
    fit();
    window.addEventListener("resize", fit);
  });
})();
