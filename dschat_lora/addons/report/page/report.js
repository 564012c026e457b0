"use strict";
// Draws the charts of a report, and searches its responses. All texts are set as text, never as
// markup, and nothing is fetched.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const kept = (name, value) => {
    // Of a page opened from the disk the browser may refuse storage.
    try {
      if (value === undefined) return sessionStorage.getItem(`report:${name}`);
      sessionStorage.setItem(`report:${name}`, value);
    } catch { /* what is kept nowhere is asked for again */ }
    return null;
  };
  const element = (tag, text, name) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (name) made.className = name;
    return made;
  };
  const short = (value) => {
    const size = Math.abs(value);
    if (size >= 1e7 || (size > 0 && size < 1e-4)) return value.toExponential(2);
    return size >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
  };

  // Charts

  const HEIGHT = 220;
  // Exponential moving average without the bias of its start; gaps stay gaps.
  const smooth = (values, weight) => {
    let mean = 0, total = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = weight * mean + (1 - weight) * value;
      total = weight * total + 1 - weight;
      return mean / total;
    });
  };
  const hue = (chart, curve, runs) => (runs > 1 ? curve.run : curve.held ? 1 : 0) % 6;

  // Columns for uPlot over the union of all steps, and what each one is.
  const columns = (chart, weight, hidden, runs) => {
    const tables = [], series = [{}], bands = [];
    const add = (xs, ys, options) => {
      tables.push([xs, ys]);
      series.push({ points: { show: false }, spanGaps: false, ...options });
    };
    for (const curve of chart.curves) {
      if (hidden.has(curve.run)) continue;
      const stroke = color(`--c${hue(chart, curve, runs)}`);
      const few = curve.y.length < 30;
      const look = { stroke, width: 1.8, dash: curve.held ? [6, 4] : undefined };
      if (curve.e) {
        for (const sign of [1, -1]) {
          add(curve.x, curve.y.map((y, n) => y === null || curve.e[n] === null
            ? null : y + sign * curve.e[n]), { width: 0, stroke: "transparent" });
        }
        bands.push({ series: [series.length - 2, series.length - 1], fill: `${stroke}33` });
      }
      const smoothed = weight > 0 && !curve.held;
      const dots = few && !smoothed ? { show: true, size: 5, fill: stroke, stroke } : { show: false };
      if (smoothed) add(curve.x, curve.y, { ...look, width: 1, stroke: `${stroke}44` });
      add(curve.x, smoothed ? smooth(curve.y, weight) : curve.y,
        { ...look, points: dots, curve, label: curve.name });
    }
    return { table: tables.length ? uPlot.join(tables) : [[]], series, bands };
  };

  const value_at = (column, index) => {
    for (let away = 0; away < column.length; away++) {
      for (const at of [index - away, index + away]) {
        if (column[at] !== undefined && column[at] !== null) return at;
      }
    }
    return null;
  };
  const show_values = (plot, chart, place, runs) => {
    const at = plot.cursor.idx;
    place.replaceChildren();
    // Charts beside it show where the pointer is, and no values.
    if (at === null || at === undefined || !plot.over.matches(":hover")) return;
    const steps = plot.data[0];
    place.append(element("b", `step ${short(steps[at])}  `));
    plot.series.forEach((series, n) => {
      if (!series.curve) return;
      const found = value_at(plot.data[n], at);
      if (found === null) return;
      const where = found === at ? "" : ` (step ${short(steps[found])})`;
      const error = series.curve.e && series.curve.e[series.curve.x.indexOf(steps[found])];
      const text = short(plot.data[n][found]) + (error ? ` \u00b1 ${short(+error.toPrecision(2))}` : "");
      const part = element("span", `${series.curve.name} ${text}${where}`);
      part.classList.add(`c${hue(chart, series.curve, runs)}`);
      place.append(part);
    });
  };
  const draw_marks = (plot, marks) => {
    const { ctx, bbox } = plot, size = 5 * devicePixelRatio;
    ctx.save();
    ctx.fillStyle = color("--warning");
    for (const step of marks) {
      const x = plot.valToPos(step, "x", true), y = bbox.top + bbox.height;
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, y - 2 * size);
      ctx.lineTo(x - size, y);
      ctx.lineTo(x + size, y);
      ctx.fill();
    }
    ctx.restore();
  };
  const plots = new Map();
  const draw = (place) => {
    if (!place.clientWidth) return; // folded: drawn when it is opened
    const chart = data.charts[+place.dataset.chart];
    const controls = document.querySelector(`.controls[data-group="${chart.group}"]`);
    const runs = Math.max(1, all("[data-run]", controls).length);
    const hidden = new Set(all("[data-run]", controls).filter((each) => !each.checked)
      .map((each) => +each.dataset.run));
    const weight = +controls.querySelector("[type=range]").value;
    const { table, series, bands } = columns(chart, weight, hidden, runs);
    const values = place.parentElement.querySelector(".values");
    const axis = { stroke: color("--muted"), grid: { stroke: color("--grid"), width: 1 },
      ticks: { stroke: color("--grid"), width: 1, size: 4 }, font: "12px system-ui, sans-serif",
      labelFont: "12px system-ui, sans-serif", labelSize: 18 };
    plots.get(place)?.destroy();
    plots.set(place, new uPlot({
      width: place.clientWidth, height: HEIGHT, series, bands, legend: { show: false },
      scales: { x: { time: false }, y: chart.percent ? { range: (u, low, high) => {
        const pad = Math.max((high - low) * 0.05, 0.5);
        return [Math.max(0, low - pad), Math.min(Math.max(100, high), high + pad)];
      } } : {} },
      axes: [
        { ...axis, size: 28, label: chart.labels[0], values: (u, ticks) => ticks.map((t) => Number.isInteger(t) ? short(t) : "") },
        { ...axis, label: chart.labels[1], size: (u, ticks) => 14 + 7.2 * Math.max(2, ...(ticks || []).map((t) => t.length)),
          values: (u, ticks) => ticks.map((t) => t === null ? "" : short(t)) },
      ],
      cursor: { sync: { key: `group-${chart.group}`, setSeries: false }, points: { size: 6 } },
      hooks: {
        setCursor: [(plot) => show_values(plot, chart, values, runs)],
        draw: [(plot) => draw_marks(plot, chart.marks)],
      },
    }, table, place));
  };
  const redraw = (group) => all(".plot")
    .filter((place) => group === undefined || data.charts[+place.dataset.chart].group === group)
    .forEach(draw);
  for (const controls of all(".controls[data-group]")) {
    const group = +controls.dataset.group, slider = controls.querySelector("[type=range]");
    const longest = Math.max(0, ...data.charts.filter((chart) => chart.group === group)
      .flatMap((chart) => chart.curves.filter((c) => !c.held).map((c) => c.y.length)));
    controls.hidden = false;
    slider.value = kept(`smoothing-${group}`) ?? (longest > 60 ? 0.8 : 0);
    slider.addEventListener("input", () => kept(`smoothing-${group}`, slider.value));
    controls.addEventListener("input", () => redraw(group));
  }
  redraw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());
  const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => {
    const plot = plots.get(target);
    if (!plot) draw(target);
    else if (target.clientWidth && plot.width !== target.clientWidth) {
      plot.setSize({ width: target.clientWidth, height: HEIGHT });
    }
  }));
  all(".plot").forEach((place) => sizes.observe(place));

  // Responses

  const PAGE = 10;
  const ORDERS = {
    new: (a, b) => b.iteration - a.iteration,
    high: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
    low: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity),
    advantage: (a, b) => Math.abs(b.advantage ?? 0) - Math.abs(a.advantage ?? 0),
    kl: (a, b) => (b.kl ?? -Infinity) - (a.kl ?? -Infinity),
  };
  const BY = { token_advantage: "advantage", token_kl: "KL to the reference", token_value: "value" };
  const tokens = (row, by) => {
    const shown = element("div", undefined, "text tokens"), numbers = row[by];
    const largest = Math.max(1e-12, ...numbers.map(Math.abs));
    row.tokens.forEach((token, n) => {
      const level = Math.ceil((4 * Math.abs(numbers[n])) / largest - 1e-9);
      const side = numbers[n] < 0 ? "down" : "up";
      const part = element("span", token, level ? `${side}${level}` : "");
      part.title = `${BY[by]} ${short(numbers[n])}`;
      part.tabIndex = -1; // so that a tap shows it
      shown.append(part);
    });
    return shown;
  };
  const card = (row, by) => {
    const made = element("details", undefined, "sample"), prompt = element("div", row.prompt, "text");
    const line = element("summary"), preview = element("span", `${row.prompt} \u2192 ${row.response}`);
    const reward = row.reward === null ? "" : `reward ${short(row.reward)}`;
    preview.dir = "auto";
    line.append(preview, element("small", reward));
    const answers = element("div", undefined, "answers"), answer = element("div");
    const text = row.tokens && row[by] ? tokens(row, by)
      : element("div", row.response || "(empty)", "text");
    prompt.dir = text.dir = "auto";
    answer.append(element("div", row.words, "when"), text);
    answers.append(answer);
    made.append(line, prompt, answers);
    made.open = by !== "";
    return made;
  };
  for (const browser of all(".browser")) {
    const rows = data.rollouts[+browser.dataset.group];
    const one = (name) => browser.querySelector(`.${name}`);
    const limit = (name, otherwise) => one(name).value === "" ? otherwise : +one(name).value;
    const ways = Object.keys(BY).filter((name) => rows.some((row) => row[name]));
    for (const way of ["", ...ways]) {
      one("by").append(new Option(way ? BY[way] : "nothing", way));
    }
    one("token-choice").hidden = !ways.length;
    let shown = PAGE;
    const update = () => {
      const text = one("text-filter").value.toLowerCase(), by = one("by").value;
      const least = limit("least", -Infinity), most = limit("most", Infinity);
      const bounded = least > -Infinity || most < Infinity;
      const found = rows.filter((row) => (!one("cut").checked || row.cut)
        && (!bounded || (row.reward !== null && row.reward >= least && row.reward <= most))
        && (!by || row[by])
        && (!text || row.prompt.toLowerCase().includes(text)
          || row.response.toLowerCase().includes(text)));
      found.sort(ORDERS[one("order").value]);
      one("count").textContent = `${found.length.toLocaleString("en")} of the `
        + `${rows.length.toLocaleString("en")} responses in this page`;
      one("found").replaceChildren(...found.slice(0, shown).map((row) => card(row, by)));
      one("more").hidden = found.length <= shown;
    };
    browser.addEventListener("input", () => { shown = PAGE; update(); });
    one("more").addEventListener("click", () => { shown += PAGE; update(); });
    browser.hidden = false;
    update();
  }

  // The page of a run that is going on loads itself again.

  if (data.reload) {
    const pause = document.getElementById("pause");
    pause.checked = kept("pause") === "yes";
    pause.addEventListener("change", () => kept("pause", pause.checked ? "yes" : "no"));
    const busy = () => pause.checked || document.hidden || document.activeElement?.matches("input, select");
    setInterval(() => { if (!busy()) location.reload(); }, 1000 * data.reload);
  }
})();
