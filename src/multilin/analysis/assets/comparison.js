"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [14, 4], [5, 5], [1, 4], [12, 3, 2, 3, 2, 3]];
  const COLOURS = 8;
  const hidden = new Set();
  let charts = [];

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const place = (i) => data.rows[i].colour;  // the colour does not depend on the rank
  const colour = (i) => css(`--c${place(i) % COLOURS}`);
  const dash = (i) => DASHES[(place(i) + 3 * Math.floor(place(i) / COLOURS)) % DASHES.length];  // no two rows share colour and dash
  const PREFIXES = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  function short(value) {
    if (value == null) return "";
    const rounded = Number(value.toPrecision(3));  // the prefix is chosen after rounding
    for (const [size, prefix] of PREFIXES) if (rounded >= size) return `${Number((rounded / size).toPrecision(3))} ${prefix}`;
    return String(rounded);
  }
  const percent = (value) => `${Number((100 * value).toPrecision(3))} %`;
  const score = (value) => (data.measure === "accuracy" ? percent(value) : value.toFixed(3));

  // Names beside the ends of the lines, moved apart where they would touch.
  function names(rows) {
    return (u) => {
      const { ctx, bbox } = u, ratio = devicePixelRatio, step = 14 * ratio;
      const labels = [];
      u.series.forEach((series, s) => {
        if (!s || series.row === undefined || !series.show) return;
        const values = u.data[s];
        let last = values.length - 1;
        while (last >= 0 && values[last] == null) last--;
        if (last < 0) return;
        const x = u.valToPos(u.data[0][last], "x", true), y = u.valToPos(values[last], "y", true);
        if (y >= bbox.top - 1 && y <= bbox.top + bbox.height + 1) labels.push({ row: series.row, x, y, at: y });
      });
      labels.sort((a, b) => a.y - b.y);
      for (let i = 1; i < labels.length; i++) labels[i].at = Math.max(labels[i].at, labels[i - 1].at + step);
      let limit = bbox.top + bbox.height;
      for (let i = labels.length - 1; i >= 0; i--) { labels[i].at = Math.min(labels[i].at, limit); limit = labels[i].at - step; }
      ctx.save();
      ctx.font = `${12 * ratio}px system-ui, sans-serif`;
      ctx.textBaseline = "middle";
      ctx.textAlign = "left";
      const left = bbox.left + bbox.width + 14 * ratio;
      for (const name of labels) {
        ctx.strokeStyle = colour(name.row);
        ctx.lineWidth = ratio;
        ctx.beginPath(); ctx.moveTo(name.x, name.y); ctx.lineTo(left - 3 * ratio, name.at); ctx.stroke();
        ctx.fillStyle = css("--ink");
        ctx.fillText(clip(rows[name.row].name), left, name.at);
      }
      ctx.restore();
    };
  }
  // Names beside single points.
  function pointNames(u) {
    const ratio = devicePixelRatio;
    u.ctx.save();
    u.ctx.font = `${12 * ratio}px system-ui, sans-serif`;
    u.ctx.textBaseline = "middle";
    u.ctx.fillStyle = css("--ink");
    u.series.forEach((series, s) => {
      if (!s || !series.show) return;
      const at = u.data[s].findIndex((v) => v != null);
      const x = u.valToPos(u.data[0][at], "x", true), onLeft = x > u.bbox.left + u.bbox.width * 0.75;
      u.ctx.textAlign = onLeft ? "right" : "left";
      u.ctx.fillText(clip(data.rows[series.row].name), x + (onLeft ? -11 : 11) * ratio, u.valToPos(u.data[s][at], "y", true));
    });
    u.ctx.restore();
  }
  function chanceLine(u, id) {
    if (data.chance == null || !["course", "memory"].includes(id)) return;
    const { ctx, bbox } = u, ratio = devicePixelRatio, y = u.valToPos(data.chance, "y", true);
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = css("--quiet");
    ctx.lineWidth = ratio;
    ctx.setLineDash([4 * ratio, 4 * ratio]);
    ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
    ctx.font = `${12 * ratio}px system-ui, sans-serif`;
    ctx.fillText(`chance ${percent(data.chance)}`, bbox.left + 6 * ratio, y - 5 * ratio);
    ctx.restore();
  }
  const clip = (name) => (name.length > 16 ? `${name.slice(0, 15)}…` : name);
  function room(rows) {
    const context = document.createElement("canvas").getContext("2d");
    context.font = "12px system-ui, sans-serif";
    return 20 + Math.max(...rows.map((row) => context.measureText(clip(row.name)).width));
  }

  // Powers of ten; with 2 and 5 between them where the axis is short.
  function decades(low, high) {
    const ticks = [], steps = high / low > 100 ? [1] : [1, 2, 5];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      for (const step of steps) ticks.push(step * 10 ** power);
    }
    return ticks.filter((v) => v >= low * 0.999 && v <= high * 1.001);
  }

  function axes(xValues, yValues, xLabel, moreY = {}, moreX = {}) {
    const shared = { stroke: () => css("--quiet"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { stroke: () => css("--line"), width: 1 }, font: "12px system-ui, sans-serif" };
    return [
      { ...shared, values: xValues, label: xLabel, labelFont: "12px system-ui, sans-serif", labelSize: 20, size: 34, space: 60, ...moreX },
      { ...shared, values: yValues, size: 58, ...moreY },
    ];
  }

  function chart(id, build) {
    const element = document.getElementById(id);
    if (!element) return;
    const { options, table } = build();
    element.replaceChildren();
    const width = element.clientWidth;
    const plot = new uPlot({
      width, height: Math.round(Math.max(240, Math.min(380, width * 0.55))),
      legend: { show: false },
      padding: [10, options.pointed ? 16 : room(data.rows), 0, 0],
      cursor: { drag: { x: false, y: false }, y: false },
      ...options,
      hooks: { draw: [(u) => chanceLine(u, id), options.pointed ? pointNames : names(data.rows)], setCursor: [(u) => tell(u, id, options.tellX)] },
    }, table, element);
    charts.push(plot);
  }

  function tell(u, id, tellX) {
    const line = document.getElementById(`${id}-readout`);
    if (!line) return;
    const at = u.cursor.idx;
    if (at == null || u.cursor.left < 0) { line.textContent = ""; return; }
    const parts = [];
    u.series.forEach((series, s) => {
      if (s && series.row !== undefined && series.show && u.data[s][at] != null) parts.push(`${data.rows[series.row].name} ${series.tell(u.data[s][at])}`);
    });
    line.textContent = `${tellX(u.data[0][at])}: ${parts.join(", ")}`;
  }

  const line = (i, extra) => ({ row: i, show: !hidden.has(i), stroke: () => colour(i), width: 2, dash: dash(i), spanGaps: true, points: { show: false }, ...extra });

  function course() {
    const axis = document.querySelector("input[name=axis]:checked").value;
    const tables = [], series = [{}], bands = [];
    data.rows.forEach((row, i) => {
      const points = row.course;
      tables.push([points.map((p) => p[axis]), points.map((p) => p[data.measure]), points.map((p) => p.low), points.map((p) => p.high)]);
      const s = series.length;
      const edge = { show: !hidden.has(i), stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
      series.push(line(i, { tell: score }), edge, { ...edge });
      bands.push({ series: [s + 2, s + 1], fill: () => `${colour(i)}26` });
    });
    const shown = data.rows.filter((_, i) => !hidden.has(i));
    const settled = (course) => course.slice(course.length > 2 ? 2 : 0);
    const values = shown.flatMap((row) => settled(row.course).flatMap((p) => [p.low, p.high]));
    const range = () => {
      const low = Math.min(...values), high = Math.max(...values), pad = (high - low) * 0.05 || 0.1;
      return data.measure === "accuracy" ? [0, 1.02] : [low - pad, high + pad];
    };
    return {
      table: uPlot.join(tables),
      options: {
        series, bands, tellX: (x) => `${short(x)} ${data.axes[axis]}`,
        scales: { x: { time: false }, y: { range } },
        axes: axes((u, ticks) => ticks.map(short), (u, ticks) => ticks.map((v) => (data.measure === "accuracy" ? percent(v) : Number(v.toPrecision(4)))), data.axes[axis]),
      },
    };
  }

  function against(field, label, unit) {
    return () => {
      const contexts = [...new Set(data.rows.flatMap((row) => row.decoding.map((d) => d.context)))].sort((a, b) => a - b);
      const find = (row, context) => row.decoding.find((d) => d.context === context)?.[field] ?? null;
      return {
        table: [contexts, ...data.rows.map((row) => contexts.map((context) => find(row, context)))],
        options: {
          series: [{}, ...data.rows.map((row, i) => line(i, { tell: short, points: { show: true, size: 5, fill: () => colour(i), stroke: () => colour(i) } }))],
          tellX: (x) => `after ${x.toLocaleString("en")} tokens`,
          scales: { x: { time: false, distr: 3, log: 2 }, y: { distr: 3, log: 10 } },
          axes: axes((u, ticks) => ticks.map((v) => (contexts.includes(v) ? (v >= 1024 ? `${v / 1024}k` : v) : "")), (u, ticks) => ticks.map((v) => (v == null ? "" : `${short(v)}${unit}`)), label, { splits: (u, i, low, high) => decades(low, high), filter: (u, ticks) => ticks }),
        },
      };
    };
  }

  function memory() {
    const points = data.rows.map((row, i) => ({ i, x: row.memory, y: row.score })).filter((p) => p.x != null && p.y != null);
    return {
      table: uPlot.join(points.map((p) => [[p.x], [p.y]])),
      options: {
        series: [{}, ...points.map((p) => line(p.i, { width: 0, tell: score, points: { show: true, size: 11, fill: () => colour(p.i), stroke: () => colour(p.i) } }))],
        pointed: true, tellX: (x) => `${short(x)} bytes`,
        scales: { x: { time: false, distr: 3, log: 10, range: (u, low, high) => [low / 2, high * 2] }, y: { range: () => [0, 1.04] } },
        axes: axes((u, ticks) => ticks.map(short), (u, ticks) => ticks.map((v) => percent(v)), "bytes of state", {}, { splits: (u, i, low, high) => decades(low, high), filter: (u, ticks) => ticks }),
      },
    };
  }

  function draw() {
    charts.forEach((plot) => plot.destroy());
    charts = [];
    if (!data.rows.length) return;
    chart("course", course);
    chart("memory", memory);
    chart("speed", against("tokens_per_second", "tokens before", ""));
    chart("state", against("state_bytes", "tokens before", "B"));
  }

  function legends() {
    document.querySelectorAll(".legend").forEach((legend) => {
      legend.replaceChildren(...data.rows.map((row, i) => {
        const button = document.createElement("button");
        button.type = "button";
        button.setAttribute("aria-pressed", String(!hidden.has(i)));
        button.innerHTML = `<svg width="26" height="8" aria-hidden="true"><line x1="0" y1="4" x2="26" y2="4" stroke="var(--c${place(i) % COLOURS})" stroke-width="3" stroke-dasharray="${dash(i).join(" ")}"/></svg>`;
        button.append(row.name);
        button.addEventListener("click", () => {
          if (!hidden.delete(i)) hidden.add(i);
          if (hidden.size === data.rows.length) hidden.clear();
          document.querySelectorAll(".legend").forEach((other) => [...other.children].forEach((b, k) => b.setAttribute("aria-pressed", String(!hidden.has(k)))));
          draw();
        });
        return button;
      }));
    });
  }

  document.querySelectorAll("input[name=axis]").forEach((input) => {
    input.checked = input.value === data.axis;
    input.addEventListener("change", draw);
  });
  legends();
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  let width = document.body.clientWidth;
  new ResizeObserver(() => {
    if (document.body.clientWidth !== width) { width = document.body.clientWidth; draw(); }
  }).observe(document.body);
  addEventListener("beforeprint", () => { document.documentElement.classList.add("print"); draw(); });
  addEventListener("afterprint", () => { document.documentElement.classList.remove("print"); draw(); });
})();
