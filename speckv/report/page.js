"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";

  // ---- small helpers -------------------------------------------------------------------------------------------

  function element(tag, attributes = {}, ...children) {
    return fill(document.createElement(tag), attributes, children);
  }

  function svg(tag, attributes = {}, ...children) {
    return fill(document.createElementNS(SVG, tag), attributes, children);
  }

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(name, value);
    node.append(...children.flat().filter((child) => child !== null));
    return node;
  }

  const percent = (share, digits = 1) => `${(100 * share).toFixed(digits).replace("-", "−")} %`;
  const signed = (share, digits = 1) => (share > 0 ? "+" : "") + percent(share, digits);
  const interval = (ends) => ends ? `${signed(ends[0]).replace(" %", "")} … ${signed(ends[1]).replace(" %", "")}` : "";
  const rate = (value) => value >= 100 ? value.toFixed(0) : value.toFixed(value >= 10 ? 1 : 2);
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const milliseconds = (value) => value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${value.toFixed(value < 10 ? 1 : 0)} ms`;

  /** Marks that differ in shape as well as in colour. */
  function mark(kind, x, y, size, attributes = {}) {
    const r = size;
    const shapes = {
      circle: () => svg("circle", { cx: x, cy: y, r }),
      square: () => svg("rect", { x: x - r * .9, y: y - r * .9, width: 1.8 * r, height: 1.8 * r }),
      triangle: () => svg("path", { d: `M${x} ${y - 1.2 * r}L${x + 1.1 * r} ${y + .9 * r}L${x - 1.1 * r} ${y + .9 * r}Z` }),
      diamond: () => svg("path", { d: `M${x} ${y - 1.3 * r}L${x + 1.3 * r} ${y}L${x} ${y + 1.3 * r}L${x - 1.3 * r} ${y}Z` }),
      cross: () => svg("path", { d: `M${x - r} ${y - r}L${x + r} ${y + r}M${x - r} ${y + r}L${x + r} ${y - r}` }),
      left: () => svg("path", { d: `M${x - r} ${y}L${x + r} ${y - r}L${x + r} ${y + r}Z` }),
    };
    const node = shapes[kind]();
    const shade = kind === "cross" ? "line" : attributes.hollow ? "hollow" : "mark";
    node.setAttribute("class", `${shade} ${attributes.class ?? ""}`);
    if (attributes.title) node.append(svg("title", {}, attributes.title));
    return node;
  }

  const SHAPES = ["circle", "square", "triangle", "diamond", "circle"];

  function legendEntry(kind, css, text, attributes = {}) {
    const sample = svg("svg", { width: 16, height: 14, "aria-hidden": "true" });
    if (kind === "rule") sample.append(svg("line", { x1: 8, x2: 8, y1: 0, y2: 14, class: "zero" }));
    else sample.append(mark(kind, 8, 7, 5, { class: css, ...attributes }));
    return element("span", {}, sample, text);
  }

  /** Round steps for an axis with about so many ticks. */
  function ticks(low, high, count) {
    const rough = (high - low) / count || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step / 1e6 ? 0 : at);
    return found;
  }

  const scale = (low, high, from, to) => (value) => from + (value - low) / (high - low || 1) * (to - from);

  // ---- what is being looked at ---------------------------------------------------------------------------------

  const cells = data.cells.policy.map((_, n) =>
    Object.fromEntries(Object.entries(data.cells).map(([name, column]) => [name, column[n]])));
  const bounds = new Set(data.bounds);
  const machine = byId("machine"), compression = byId("compression");
  const cellsOf = (costs, stored) => cells.filter((cell) => cell.costs === costs && cell.compression === stored);
  const against = data.against === "best-fixed" ? "the best fixed gamma" : data.against;
  const isPlain = (cell) => !bounds.has(cell.policy) && cell.policy !== data.against;

  function options(select, values, text = (value) => value) {
    select.replaceChildren(...values.map((value) => element("option", { value }, text(value))));
  }

  // ---- room: the gap to the judge and the oracle -----------------------------------------------------------------

  const LEFT = -.3; // beyond it, a gain is shown at the edge

  function drawGap() {
    byId("gap-legend").replaceChildren(
      legendEntry("rule", "", against.replace("the ", "")), legendEntry("cross", "grey", "no speculation"),
      legendEntry("circle", "s0", "best policy"), legendEntry("diamond", "s2", "perfect judge", { hollow: true }),
      legendEntry("diamond", "s2", "oracle"));
    const rows = data.costs.flatMap((costs) => data.compressions.map((stored) => gapRow(costs.name, stored)));
    const low = Math.max(LEFT, Math.min(0, ...rows.map((row) => row.none.gain)) - .02);
    const high = Math.max(...rows.map((row) => row.oracle.gain)) + .03;
    byId("gap-chart").replaceChildren(...rows.map((row, n) => drawGapRow(row, low, high, n === rows.length - 1)));
  }

  function gapRow(costs, stored) {
    const found = cellsOf(costs, stored);
    const named = (policy) => found.find((cell) => cell.policy === policy);
    const best = found.filter(isPlain).reduce((a, b) => (b.throughput > a.throughput ? b : a));
    return { costs, stored, best, none: named("none"), base: named(data.against), judge: named("perfect-judge"), oracle: named("oracle") };
  }

  function drawGapRow(row, low, high, last) {
    const closed = [["judge", row.best.judge_gap_closed], ["oracle", row.best.gap_closed]]
      .filter(([, share]) => share !== null && share > 0).map(([bound, share]) => `${percent(share, 0)} to the ${bound}`);
    const caption = element("figcaption", {}, `${row.stored} · ${row.costs}: `,
      element("span", { class: row.best.gain > 0 ? "up" : "down" }, `${row.best.policy} ${signed(row.best.gain)}`),
      element("br"), element("small", {}, (row.best.gain_ci ? `${interval(row.best.gain_ci)} %; ` : "") + `${rate(row.best.throughput)} against ${rate(row.base.throughput)} tokens/s`
        + (closed.length ? `; of the way, ${closed.join(", ")}` : "")));
    const figure = element("figure", {}, caption);
    const chart = byId("gap-chart"), width = Math.max(200, chart.clientWidth), height = last ? 44 : 24;
    const x = scale(low, high, 12, width - 12);
    const picture = svg("svg", { width, height, role: "img", "aria-label":
      `${row.stored} on ${row.costs}: no speculation ${signed(row.none.gain)}, ${row.best.policy} ${signed(row.best.gain)}, perfect judge ${signed(row.judge.gain)}, oracle ${signed(row.oracle.gain)}` });
    for (const tick of ticks(low, high, width / 90)) {
      picture.append(svg("line", { x1: x(tick), x2: x(tick), y1: 0, y2: 24, class: "rule" }));
      if (last) picture.append(svg("text", { x: x(tick), y: 40, "text-anchor": "middle", class: "muted small" }, signed(tick, 0)));
    }
    picture.append(svg("line", { x1: x(0), x2: x(row.oracle.gain), y1: 12, y2: 12, class: "rule" }),
      svg("line", { x1: x(0), x2: x(0), y1: 0, y2: 24, class: "zero" }));
    const plain = Math.max(row.none.gain, low);
    picture.append(mark(row.none.gain < low ? "left" : "cross", x(plain), 12, 5, { class: "grey", title: `no speculation ${signed(row.none.gain)}` }));
    if (row.none.gain < low) picture.append(svg("text", { x: x(plain) + 10, y: 16, class: "muted small" }, signed(row.none.gain, 0)));
    const ends = row.best.gain_ci?.map((end) => x(Math.max(low, end))); // of a single prompt there is no interval
    if (ends) picture.append(svg("line", { x1: ends[0], x2: ends[1], y1: 12, y2: 12, class: "interval s0" }));
    picture.append(mark("diamond", x(row.judge.gain), 12, 5, { class: "s2", hollow: true, title: `perfect judge ${signed(row.judge.gain)}` }),
      mark("diamond", x(row.oracle.gain), 12, 5, { class: "s2", title: `oracle ${signed(row.oracle.gain)}` }),
      mark("circle", x(Math.max(low, row.best.gain)), 12, 5.5, { class: "s0", title: `${row.best.policy} ${signed(row.best.gain)}` }));
    figure.append(picture);
    return figure;
  }

  // ---- leaderboard -----------------------------------------------------------------------------------------------

  const share = (value) => value === null ? "" : percent(value, 0);
  const COLUMNS = [
    { key: "policy", title: "Policy", text: (cell) => cell.policy },
    { key: "throughput", title: "Tok/s", text: (cell) => rate(cell.throughput) },
    { key: "gain", title: "Gain", text: gainText },
    { key: "gain_ci", title: "95 % interval", value: (cell) => cell.gain_ci?.[0] ?? 0, text: (cell) => interval(cell.gain_ci) },
    { key: "plot", title: "", cell: intervalCell },
    { key: "p", title: "p", text: (cell) => cell.p === null ? "" : cell.p < .001 ? "< 0.001" : cell.p.toPrecision(2) },
    { key: "judge_gap_closed", title: "Judge", text: (cell) => share(cell.judge_gap_closed) },
    { key: "gap_closed", title: "Oracle", text: (cell) => share(cell.gap_closed) },
    { key: "tokens_per_step", title: "Tok/step", text: (cell) => cell.tokens_per_step.toFixed(2) },
    { key: "gamma_share", title: "Mean gamma", value: meanGamma, cell: gammaCell },
    { key: "switches", title: "Switches", text: (cell) => cell.switches.toFixed(0) },
    { key: "decision_us", title: "µs", text: (cell) => cell.decision_us.toFixed(0) },
  ];
  const sorting = { key: "throughput", descending: true };

  function meanGamma(cell) {
    return sum(cell.gamma_share.map((part, gamma) => part * gamma));
  }

  function gainText(cell) {
    if (cell.policy === data.against) return "baseline";
    const sure = cell.p !== null && cell.p < .05 && Math.abs(cell.gain) >= .0005;
    const up = cell.gain > 0;
    const sign = sure ? element("span", { class: up ? "up" : "down", title: "p < 0.05" }, up ? "▲ " : "▼ ") : "";
    return element("span", {}, sign, signed(cell.gain));
  }

  function intervalCell(cell, table) {
    const width = innerWidth > 1300 ? 240 : 120, height = 22;
    const gains = table.map((other) => other.gain);
    const low = Math.max(LEFT, Math.min(...gains) - .02), high = Math.max(...gains) + .03;
    const x = scale(low, high, 4, width - 4);
    const css = bounds.has(cell.policy) ? "s2" : cell.policy === data.against ? "ink" : "s0";
    const picture = svg("svg", { width, height, "aria-hidden": "true" }, svg("line", { x1: x(0), x2: x(0), y1: 0, y2: height, class: "zero" }));
    if (cell.gain < low) picture.append(mark("left", x(low), 11, 4, { class: css }));
    else {
      if (cell.gain_ci) picture.append(svg("line", { x1: x(Math.max(low, cell.gain_ci[0])), x2: x(cell.gain_ci[1]), y1: 11, y2: 11, class: `interval ${css}` }));
      picture.append(mark(bounds.has(cell.policy) ? "diamond" : "circle", x(cell.gain), 11, 3, { class: css }));
    }
    return element("td", { class: "plot" }, picture);
  }

  function gammaCell(cell) {
    const picture = svg("svg", { width: cell.gamma_share.length * 5, height: 20, "aria-hidden": "true" });
    cell.gamma_share.forEach((part, gamma) => picture.append(
      svg("rect", { x: gamma * 5, y: 18, width: 4, height: 1, class: "empty" }),
      svg("rect", { x: gamma * 5, y: 19 - 18 * part, width: 4, height: 18 * part, class: "bar" })));
    return element("td", {}, element("span", { class: "beside" }, picture, meanGamma(cell).toFixed(1)));
  }

  function drawLeaderboard() {
    const table = cellsOf(machine.value, compression.value);
    const column = COLUMNS.find((other) => other.key === sorting.key);
    const value = column.value ?? ((cell) => cell[column.key]);
    const known = table.filter((cell) => value(cell) !== null), unknown = table.filter((cell) => value(cell) === null);
    known.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (sorting.descending ? -1 : 1));
    const head = element("tr", {}, COLUMNS.map(headCell));
    const body = [...known, ...unknown].map((cell) => {
      const css = cell.policy === data.against ? "baseline" : bounds.has(cell.policy) ? "bound" : null;
      return element("tr", { class: css }, COLUMNS.map((other, n) =>
        other.cell ? other.cell(cell, table)
          : element(n ? "td" : "th", n ? {} : { scope: "row", title: data.policies[cell.policy] ?? null }, other.text(cell))));
    });
    const shown = byId("leaderboard-table"), focused = shown.contains(document.activeElement);
    shown.replaceChildren(element("thead", {}, head), element("tbody", {}, body));
    if (focused) shown.querySelector(`button[data-key="${sorting.key}"]`).focus();
    const { settings } = data;
    byId("leaderboard-note").textContent = `${table.length} policies at ${storedName()} under the costs of ${machine.value}; `
      + `${settings.prompts} prompts, ${settings.tokens} tokens, ${settings.hold_out === "task" ? "each task held out once" : `each prompt held out once in ${settings.folds} folds`}. `
      + `Choose a column’s name to sort by it.${batchNote()}`;
    hintAtMore("leaderboard");
  }

  function hintAtMore(section) {
    const scroller = byId(`${section}-table`).parentNode;
    byId(`${section}-hint`).hidden = scroller.scrollWidth <= scroller.clientWidth;
  }

  /** What the numbers mean where several sequences share every step. */
  function batchNote() {
    const size = data.costs.find((costs) => costs.name === machine.value).batch_size;
    return size === 1 ? "" : ` Steps are those of ${size} sequences together, and tok/s those of one of them; all are taken to play alike. That is exact`
      + " for one gamma for all; of a policy that decides for each sequence it is an upper bound, as a step lasts as long as its longest draft.";
  }

  function headCell(column) {
    if (!column.title) return element("td");
    const here = column.key === sorting.key;
    const button = element("button", { type: "button", "data-key": column.key }, column.title,
      element("span", { class: "way", "aria-hidden": "true" }, here ? (sorting.descending ? "▾" : "▴") : ""));
    button.addEventListener("click", () => {
      sorting.descending = here ? !sorting.descending : !["policy", "p", "decision_us"].includes(column.key);
      sorting.key = column.key;
      drawLeaderboard();
    });
    return element("th", { scope: "col", "aria-sort": here ? (sorting.descending ? "descending" : "ascending") : "none" }, button);
  }

  const storedName = () => compression.value === "all" ? "all compressions together" : compression.value;

  // ---- by task ---------------------------------------------------------------------------------------------------

  function drawTasks() {
    const byStored = data.tasks[machine.value];
    const series = data.compressions;
    const tasks = Object.keys(byStored.all);
    const policies = data.explorer.policies.filter((policy) => policy !== data.against);
    byId("tasks-note").textContent = `Costs of ${machine.value}.`;
    byId("tasks-legend").replaceChildren(...series.map((stored, n) => legendEntry(SHAPES[n % 5], `s${n % 5}`, stored)));
    const all = tasks.flatMap((task) => policies.flatMap((policy) => series.flatMap((stored) => byStored[stored][task]?.[policy]?.slice(1) ?? [])));
    const low = Math.max(LEFT, Math.min(0, ...all) - .02), high = Math.max(...all) + .02;
    const charts = byId("tasks-charts");
    charts.replaceChildren();
    const frames = tasks.map((task) => element("figure", {}, element("figcaption", {}, task)));
    charts.append(...frames);
    tasks.forEach((task, n) => frames[n].append(taskChart(task, byStored, series, policies, low, high, frames[n].clientWidth)));
    drawTaskTable(tasks, byStored, series, policies);
  }

  function taskChart(task, byStored, series, policies, low, high, width) {
    const longest = Math.max(...policies.map((policy) => policy.length));
    const label = Math.max(104, Math.min(width / 2, 12 + 7 * longest)), line = 14, block = line * series.length + 10, height = policies.length * block + 24;
    const x = scale(low, high, label, width - 10);
    const picture = svg("svg", { width, height, role: "img", "aria-label": `Gain of ${policies.length} policies on ${task}; the numbers are in the table below` });
    for (const tick of ticks(low, high, (width - label) / 60)) picture.append(
      svg("line", { x1: x(tick), x2: x(tick), y1: 0, y2: height - 22, class: tick ? "rule" : "zero" }),
      svg("text", { x: x(tick), y: height - 6, "text-anchor": "middle", class: "muted small" }, signed(tick, 0)));
    policies.forEach((policy, at) => {
      picture.append(svg("text", { x: label - 10, y: at * block + block / 2 + 4, "text-anchor": "end", class: "small" }, policy));
      series.forEach((stored, n) => {
        const cell = byStored[stored][task]?.[policy];
        if (!cell) return;
        const [throughput, gain, from, to] = cell, y = at * block + 5 + line * (n + .5), css = `s${n % 5}`;
        const sure = from !== undefined; // of a single prompt there is no interval
        const title = `${policy}, ${stored}: ${rate(throughput)} tokens/s, ${signed(gain)}` + (sure ? ` (${interval([from, to])})` : "");
        if (gain < low) {
          picture.append(mark("left", x(low), y, 4.5, { class: css, title }), svg("text", { x: x(low) + 9, y: y + 4, class: "muted small" }, signed(gain, 0)));
          return;
        }
        if (sure) picture.append(svg("line", { x1: x(Math.max(low, from)), x2: x(to), y1: y, y2: y, class: `interval ${css}` }));
        picture.append(mark(SHAPES[n % 5], x(gain), y, 4.5, { class: css, title }));
      });
    });
    return picture;
  }

  function drawTaskTable(tasks, byStored, series, policies) {
    const head = element("tr", {}, ["policy", "stored as", ...tasks].map((name) => element("th", { scope: "col" }, name)));
    const body = policies.flatMap((policy) => series.map((stored) => element("tr", {}, element("th", { scope: "row" }, policy), element("td", {}, stored),
      tasks.map((task) => {
        const cell = byStored[stored][task]?.[policy];
        return element("td", {}, cell ? `${rate(cell[0])} tok/s, ${signed(cell[1])}` + (cell.length > 2 ? ` (${interval(cell.slice(2))})` : "") : "");
      }))));
    byId("tasks-table").replaceChildren(element("thead", {}, head), element("tbody", {}, body));
  }

  // ---- histograms of gamma ---------------------------------------------------------------------------------------

  function drawGammas() {
    byId("gammas-note").textContent = `At ${storedName()}, costs of ${machine.value}.`;
    const table = cellsOf(machine.value, compression.value);
    const frames = table.map((cell) => element("figure", {}, element("figcaption", {}, cell.policy, element("br"), element("small", {}, `mean ${meanGamma(cell).toFixed(1)}`))));
    byId("gammas-charts").replaceChildren(...frames);
    const width = frames.length ? frames[0].clientWidth : 0;
    table.forEach((cell, n) => frames[n].append(histogram(cell, width)));
  }

  function histogram(cell, width) {
    const count = cell.gamma_share.length, height = 68, base = 52, step = width / count;
    const shares = cell.gamma_share.map((part, gamma) => [gamma, part]).filter(([, part]) => part >= .005);
    const picture = svg("svg", { width, height, role: "img", "aria-label": `${cell.policy}: ${shares.map(([gamma, part]) => `gamma ${gamma} in ${percent(part, 0)}`).join(", ")} of the steps` });
    picture.append(svg("line", { x1: 0, x2: width, y1: base, y2: base, class: "rule" }));
    cell.gamma_share.forEach((part, gamma) => {
      picture.append(svg("rect", { x: gamma * step + .5, y: base - 50 * part, width: Math.max(1, step - 1), height: 50 * part, class: "bar" }, svg("title", {}, `gamma ${gamma}: ${percent(part)}`)));
      if (gamma % 4 === 0) picture.append(svg("text", { x: (gamma + .5) * step, y: base + 14, "text-anchor": "middle", class: "muted small" }, String(gamma)));
    });
    return picture;
  }

  // ---- from one machine to another ---------------------------------------------------------------------------------

  function drawMachines() {
    const here = machine.value, changes = data.changes[here];
    for (const id of ["machines", "machines-link"]) byId(id).hidden = !changes;
    if (!changes) return;
    const others = data.costs.map((costs) => costs.name).filter((name) => name !== here);
    const ranked = new Map([here, ...others].map((name) => [name, cellsOf(name, compression.value)
      .filter((cell) => !bounds.has(cell.policy)).sort((a, b) => b.throughput - a.throughput)]));
    const place = (name, policy) => ranked.get(name).findIndex((cell) => cell.policy === policy);
    const policies = ranked.get(here).map((cell) => cell.policy);
    byId("machines-note").textContent = `The same recording under other costs, ranked at ${storedName()}; in the order of ${here}, where ${policies[0]} is fastest.`;
    byId("machines-changes").replaceChildren(...others.map((name) => {
      const kept = policies.filter((policy) => changes[name][policy] === 0).length, first = ranked.get(name)[0].policy;
      return element("li", {}, `${name}: ${first} is fastest${first === policies[0] ? ", too" : `, and ${policies[0]} in place ${place(name, policies[0]) + 1}`}; `
        + `${kept} of ${policies.length} policies draft the same there, the other ${policies.length - kept} do not.`);
    }));
    const columns = (name) => ["Place", "Tok/s", "Mean gamma", ...(name === here ? [] : ["Other gammas"])];
    const shown = [here, ...others];
    const groups = element("tr", {}, element("td"), shown.map((name) => element("th", { scope: "colgroup", colspan: columns(name).length }, name)));
    const head = element("tr", {}, element("th", { scope: "col" }, "Policy"), shown.flatMap((name) => columns(name).map((title, n) =>
      element("th", { scope: "col", class: n ? null : "first" }, title))));
    const body = policies.map((policy, at) => element("tr", { class: policy === data.against ? "baseline" : null },
      element("th", { scope: "row", title: data.policies[policy] ?? null }, policy), shown.flatMap((name) => {
        const to = place(name, policy), cell = ranked.get(name)[to];
        const figures = [placeCell(to, at - to), element("td", {}, rate(cell.throughput)), element("td", {}, meanGamma(cell).toFixed(1))];
        return name === here ? figures : [...figures, changeCell(changes[name][policy])];
      })));
    byId("machines-table").replaceChildren(element("thead", {}, groups, head), element("tbody", {}, body));
    hintAtMore("machines");
  }

  function placeCell(place, won) {
    const moved = won ? `${won > 0 ? "▲" : "▼"} ${Math.abs(won)}` : "";
    return element("td", { class: "first" }, String(place + 1), element("span", { class: `move ${won > 0 ? "up" : "down"}` }, moved));
  }

  function changeCell(part) {
    if (part === 0) return element("td", { class: "same" }, "same");
    const picture = svg("svg", { width: 60, height: 10, "aria-hidden": "true" }, svg("rect", { x: 0, y: 0, width: 60, height: 10, class: "empty" }),
      svg("rect", { x: 0, y: 0, width: Math.max(1, 60 * part), height: 10, class: "changed" }));
    return element("td", {}, element("span", { class: "beside" }, picture, part < .001 ? "< 0.1 %" : percent(part)));
  }

  // ---- charts with two axes --------------------------------------------------------------------------------------

  function frame(width, height, xs, ys, labels, aria) {
    const left = 52, bottom = 40, top = 26, x = scale(xs.low, xs.high, left, width - (labels.right ?? 14)), y = scale(ys.low, ys.high, height - bottom, top);
    const picture = svg("svg", { width, height, role: "img", "aria-label": aria });
    for (const tick of ys.ticks) picture.append(svg("line", { x1: left, x2: x(xs.high), y1: y(tick), y2: y(tick), class: "rule" }),
      svg("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end", class: "muted small" }, ys.text(tick)));
    for (const tick of xs.ticks) picture.append(svg("text", { x: x(tick), y: height - bottom + 17, "text-anchor": "middle", class: "muted small" }, xs.text(tick)));
    picture.append(svg("text", { x: (left + x(xs.high)) / 2, y: height - 5, "text-anchor": "middle", class: "muted small" }, labels.x),
      svg("text", { x: 0, y: 12, class: "muted small" }, labels.y));
    return { picture, x, y };
  }

  /** A column of labels that must not lie on each other: each as near to where it belongs as there is room. */
  function spread(places, distance) {
    const order = places.map((place, n) => [place, n]).sort((a, b) => a[0] - b[0]);
    const found = [];
    order.forEach(([place], n) => { found[n] = n ? Math.max(place, found[n - 1] + distance) : place; });
    const result = [];
    order.forEach(([, at], n) => { result[at] = found[n]; });
    return result;
  }

  function drawCosts() {
    const charts = byId("costs-charts");
    const frames = data.costs.map((costs) => element("figure", {}, element("figcaption", {}, costs.name,
      costs.batch_size > 1 ? element("small", {}, ` (tokens of each of ${costs.batch_size} sequences, milliseconds of all together)`) : "")));
    charts.replaceChildren(...frames);
    data.costs.forEach((costs, n) => frames[n].append(costsChart(costs, frames[n].clientWidth), element("p", { class: "fine" }, `Source: ${costs.source}.`)));
  }

  function costsChart(costs, width) {
    const series = [...Object.entries(costs.verify).map(([stored, line], n) => [`target, ${stored}`, line, `s${n % 4}`, SHAPES[n % 4]]), ["draft", costs.draft, "s4", "diamond"]];
    const high = 1.05 * Math.max(...series.flatMap(([, line]) => line)), count = costs.draft.length;
    const aria = `Milliseconds of a forward on ${costs.name}: ` + series.map(([name, line]) => `${name} ${milliseconds(line[0])} for 1 token, ${milliseconds(line[count - 1])} for ${count}`).join("; ");
    const { picture, x, y } = frame(width, 300, { low: 1, high: count, ticks: [1, 4, 8, 12, 16], text: String },
      { low: 0, high, ticks: ticks(0, high, 5), text: (tick) => String(+tick.toPrecision(6)) }, { x: "tokens in the forward", y: "ms", right: 96 }, aria);
    const places = spread(series.map(([, line]) => y(line[count - 1])), 16);
    series.forEach(([name, line, css, shape], n) => {
      picture.append(svg("path", { d: line.map((value, at) => `${at ? "L" : "M"}${x(at + 1)} ${y(value)}`).join(""), class: `line ${css} ${n === series.length - 1 ? "dashed" : ""}` }));
      line.forEach((value, at) => picture.append(mark(shape, x(at + 1), y(value), 3.5, { class: css, title: `${name}, ${at + 1} tokens: ${milliseconds(value)}` })));
      picture.append(mark(shape, x(count) + 16, places[n], 4.5, { class: css }), svg("text", { x: x(count) + 26, y: places[n] + 4, class: "small" }, name));
    });
    return picture;
  }

  function drawCalibration() {
    const charts = byId("calibration-charts");
    const frames = data.costs.map((costs) => element("figure", {}, element("figcaption", {}, `fitted under ${costs.name}`)));
    charts.replaceChildren(...frames);
    data.costs.forEach((costs, n) => frames[n].append(...calibrationChart(costs.name, frames[n].clientWidth)));
  }

  function calibrationChart(costs, available) {
    const curves = [...data.calibration.policies.filter((curve) => curve.costs === costs).map((curve, n) => ({ ...curve, css: `s${n % 5}`, shape: SHAPES[n % 5] })),
      { policy: "draft’s own probability", ...data.calibration.draft, css: "grey", shape: "diamond" }];
    const width = Math.min(available, 460), whole = { low: 0, high: 1, ticks: [0, .2, .4, .6, .8, 1], text: (tick) => percent(tick, 0) };
    const { picture, x, y } = frame(width, width * .8, whole, whole, { x: "chance of acceptance that was predicted", y: "share accepted" },
      "Share of accepted tokens by predicted chance; the table below has the errors");
    picture.append(svg("line", { x1: x(0), y1: y(0), x2: x(1), y2: y(1), class: "zero dashed" }));
    for (const curve of curves) {
      const most = Math.max(...curve.tokens);
      picture.append(svg("path", { d: curve.predicted.map((value, n) => `${n ? "L" : "M"}${x(value)} ${y(curve.observed[n])}`).join(""), class: `line ${curve.css}` }));
      curve.predicted.forEach((value, n) => picture.append(mark(curve.shape, x(value), y(curve.observed[n]), 3 + 4 * Math.sqrt(curve.tokens[n] / most),
        { class: curve.css, title: `${curve.policy}: ${percent(value, 0)} predicted, ${percent(curve.observed[n], 0)} accepted, ${curve.tokens[n]} tokens` })));
    }
    const head = ["model", "tokens", "ECE", "Brier"].map((name) => element("th", { scope: "col", title: { ECE: "expected calibration error", Brier: "mean squared error of the chance" }[name] ?? null }, name));
    const rows = curves.map((curve) => element("tr", {}, element("th", { scope: "row" }, legendEntry(curve.shape, curve.css, ` ${curve.policy}`)),
      [sum(curve.tokens), curve.ece.toFixed(3), curve.brier.toFixed(3)].map((text) => element("td", {}, String(text)))));
    const scroller = element("div", { class: "scroller", role: "region", "aria-label": `Calibration errors, ${costs}`, tabindex: "0" },
      element("table", {}, element("thead", {}, element("tr", {}, head)), element("tbody", {}, rows)));
    return [picture, scroller];
  }

  // ---- trace explorer --------------------------------------------------------------------------------------------

  const explorer = data.explorer;
  const KINDS = {
    accepted: "accepted draft", correction: "correction: the target’s token after a wrong one",
    bonus: "bonus: the target’s token after all were right", alone: "the target alone, nothing drafted",
  };
  const prompt = byId("prompt"), tip = byId("tip");
  let shown = null, pinned = null; // steps: whose tip is shown, and whether it stays when the pointer leaves

  function setUpExplorer() {
    const named = (policy) => explorer.clairvoyant.includes(policy) ? `${policy} (knows the future)` : policy;
    for (const select of [byId("left"), byId("right")]) options(select, explorer.policies, named);
    byId("left").value = explorer.policies.includes(data.against) ? data.against : "best-fixed";
    byId("explorer-legend").replaceChildren(...Object.entries(KINDS).map(([kind, text]) =>
      element("span", {}, element("i", { class: kind, "aria-hidden": "true" }, "abc"), text)));
    for (const select of [prompt, byId("left"), byId("right")]) select.addEventListener("change", drawExplorer);
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
    document.addEventListener("click", (event) => { if (!event.target.closest(".step, #tip")) hideTip(); });
    document.addEventListener("scroll", () => { if (shown) placeTip(shown); }, { passive: true });
  }

  /** Offer the prompts that were recorded at a compression, and stay at the chosen one if it is among them. */
  function offerPrompts(stored) {
    const before = prompt.value, offered = explorer.sequences.filter((sequence) => sequence.compression === stored);
    const tasks = [...new Set(offered.map((sequence) => sequence.task))];
    prompt.replaceChildren(...tasks.map((task) => element("optgroup", { label: task },
      offered.filter((sequence) => sequence.task === task).map(({ id }) => element("option", { value: id }, id)))));
    if (offered.some((sequence) => sequence.id === before)) prompt.value = before;
  }

  function drawExplorer() {
    hideTip();
    const stored = compression.value === "all" ? data.compressions[0] : compression.value;
    offerPrompts(stored);
    const at = explorer.sequences.findIndex((sequence) => sequence.id === prompt.value && sequence.compression === stored);
    const sequence = explorer.sequences[at];
    for (const node of document.querySelectorAll(".panels, #prompt-text")) node.hidden = !sequence;
    if (!sequence) {
      byId("explorer-note").textContent = `None of the prompts that were held out first was recorded at ${stored}.`;
      return;
    }
    byId("prompt-text").querySelector("pre").textContent = explorer.prompts[sequence.id];
    byId("explorer-note").textContent = `Shown: ${stored} on ${machine.value}, as chosen above; these prompts were held out when the policies were fitted.`
      + (explorer.texts ? "" : " The recording has no texts of its tokens, so their numbers are shown; “speckv traces texts” adds them.");
    const runs = ["left", "right"].map((side) => run(byId(side).value, sequence, at));
    const most = Math.max(4, ...runs.flatMap((one) => one.steps.map((step) => step.gamma)));
    ["left", "right"].forEach((side, n) => drawPanel(byId(`panel-${side}`), side, runs[n], runs[1 - n], sequence, most));
  }

  /** The steps of a policy on a sequence, with where each starts. */
  function run(policy, sequence, at) {
    const [gammas, accepted, times, looked] = explorer.runs.find((other) => other.costs === machine.value && other.policy === policy).steps[at];
    let start = 0;
    const steps = gammas.map((gamma, n) => {
      const step = { number: n, start, gamma, accepted: accepted[n], ms: times[n], looked: looked.includes(n) };
      step.end = Math.min(start + accepted[n] + 1, sequence.tokens.length);
      start = step.end;
      return step;
    });
    return { policy, steps, ms: sum(times), speed: 1000 * sequence.tokens.length / sum(times) };
  }

  function kindOf(step, offset) {
    if (offset < step.accepted) return "accepted";
    return step.gamma === 0 ? "alone" : step.accepted < step.gamma ? "correction" : "bonus";
  }

  function drawPanel(panel, side, mine, other, sequence, most) {
    const drafted = sum(mine.steps.map((step) => step.gamma)), accepted = sum(mine.steps.map((step) => step.accepted));
    const ratio = mine.speed / other.speed;
    const figures = element("p", { class: "figures" }, element("b", {}, `${rate(mine.speed)} tokens/s`), mine.policy === other.policy ? "" : ` (${ratio.toFixed(2)} times the other)`,
      `; ${mine.steps.length} steps, ${(drafted / mine.steps.length).toFixed(1)} drafted a step, ${drafted ? percent(accepted / drafted, 0) : "none"} of them accepted; `
      + `${sequence.tokens.length} tokens, ${sequence.ended ? "ended by itself" : "cut off there"}`);
    const text = element("div", { class: "text", role: "group", "aria-label": `Steps of ${mine.policy}: arrow keys move from one to the next` });
    const nodes = mine.steps.map((step) => stepNode(step, mine, sequence));
    text.append(...nodes);
    nodes[0].tabIndex = 0;
    text.addEventListener("keydown", (event) => moveAmong(nodes, event));
    panel.replaceChildren(element("h3", { id: `panel-${side}-title` }, mine.policy), figures, timeline(mine, sequence, most, panel.clientWidth - 30), text);
  }

  /** Bars over the positions of the text: what was drafted in each step, and how much of it was accepted. */
  function timeline(mine, sequence, most, width) {
    const height = 56, base = 54, gammas = mine.steps.map((step) => step.gamma);
    const x = scale(0, sequence.tokens.length, 0, width), unit = (base - 4) / most;
    const picture = svg("svg", { width, height, class: "timeline", role: "img", "aria-label": `Gamma by position in the text, from ${Math.min(...gammas)} to ${Math.max(...gammas)}` });
    picture.append(svg("line", { x1: 0, x2: width, y1: base, y2: base, class: "rule" }));
    for (const step of mine.steps) {
      const wide = Math.max(1, x(step.end) - x(step.start) - 1), at = { x: x(step.start), width: wide };
      picture.append(svg("g", {}, svg("title", {}, `gamma ${step.gamma}, ${step.accepted} accepted`),
        svg("rect", { ...at, y: base - unit * step.gamma, height: unit * (step.gamma - step.accepted), class: "rest" }),
        svg("rect", { ...at, y: base - unit * step.accepted, height: unit * step.accepted, class: "block" })));
    }
    return picture;
  }

  function stepNode(step, mine, sequence) {
    const tokens = sequence.tokens.slice(step.start, step.end);
    const label = `Step ${step.number + 1} of ${mine.steps.length}: gamma ${step.gamma}, ${step.accepted} accepted, ${milliseconds(step.ms)}. ${tokens.join("")}`;
    const node = element("span", { class: "step", role: "button", tabindex: "-1", "aria-label": label, "data-start": step.start, "data-end": step.end },
      element("span", { class: "gamma", "aria-hidden": "true" }, String(step.gamma)),
      tokens.map((token, offset) => tokenNode(token, kindOf(step, offset))));
    node.addEventListener("mouseenter", () => { if (!pinned) showTip(node, step, sequence); });
    node.addEventListener("mouseleave", (event) => { if (!pinned && event.relatedTarget !== tip && document.activeElement !== node) hideTip(); });
    node.addEventListener("focus", () => { pinned = null; showTip(node, step, sequence); });
    node.addEventListener("blur", () => { if (pinned !== node) hideTip(); });
    node.addEventListener("click", () => { showTip(node, step, sequence); pinned = node; });
    return node;
  }

  function tokenNode(token, kind) {
    const node = element("span", { class: `token ${kind}` });
    for (const part of token.split(/(\n)/)) {
      if (part === "\n") node.append(element("span", { class: "return", "aria-hidden": "true" }, "↵"), "\n");
      else if (part) node.append(part);
    }
    return node;
  }

  function moveAmong(nodes, event) {
    const at = nodes.indexOf(document.activeElement), last = nodes.length - 1;
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last }[event.key];
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      nodes[at]?.click();
    }
    if (to === undefined || at < 0) return;
    event.preventDefault();
    const next = nodes[Math.max(0, Math.min(last, to))];
    nodes[at].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  function showTip(node, step, sequence) {
    hideTip();
    tip.replaceChildren(...tipContent(step, sequence));
    tip.hidden = false;
    shown = node;
    node.classList.add("shown");
    node.setAttribute("aria-describedby", "tip");
    for (const other of document.querySelectorAll(".step")) {
      if (!node.parentNode.contains(other) && +other.dataset.start < step.end && +other.dataset.end > step.start) other.classList.add("peer");
    }
    placeTip(node);
  }

  function hideTip() {
    pinned = null;
    tip.hidden = true;
    shown?.classList.remove("shown");
    shown?.removeAttribute("aria-describedby");
    shown = null;
    for (const other of document.querySelectorAll(".step.peer")) other.classList.remove("peer");
  }

  function placeTip(node) {
    const box = node.getBoundingClientRect(), wide = tip.offsetWidth, high = tip.offsetHeight;
    const first = node.getClientRects()[0] ?? box;
    const below = box.bottom + 8 + high <= innerHeight || box.top < high + 8;
    tip.style.left = `${Math.max(8, Math.min(first.left, innerWidth - wide - 8))}px`;
    tip.style.top = `${below ? Math.min(box.bottom + 8, innerHeight - high - 8) : box.top - high - 8}px`;
  }

  const visible = (token) => token.replaceAll("\n", "↵").replaceAll(" ", "·");

  function tipContent(step, sequence) {
    const { signals } = sequence, last = step.end - 1;
    const parts = [element("p", {}, element("b", {}, `Step ${step.number + 1}: gamma ${step.gamma}`), `${step.gamma ? `, ${step.accepted} accepted` : ""}, ${milliseconds(step.ms)}`)];
    const where = step.end - step.start > 1 ? `Tokens ${step.start + 1} to ${step.end}` : `Token ${step.end}`;
    parts.push(element("p", {}, `${where} of ${sequence.tokens.length}.${step.looked ? " The draft’s next distribution was looked at, and nothing drawn from it." : ""}`));
    if (step.gamma) {
      const head = ["drafted", "", "probability", "entropy, nats"].map((name) => element("th", { scope: "col" }, name));
      parts.push(element("table", {}, element("thead", {}, element("tr", {}, head)), element("tbody", {}, draftOf(step, sequence).map(([token, fate, top1, entropy]) =>
        element("tr", {}, element("td", {}, element("code", {}, visible(token))), element("td", {}, fate), element("td", {}, top1?.toFixed(2) ?? ""), element("td", {}, entropy?.toFixed(2) ?? ""))))));
    }
    if (last - step.start === step.accepted) {
      const kind = { correction: "correction", bonus: "bonus", alone: "own token" }[kindOf(step, step.accepted)];
      parts.push(element("p", {}, `The target’s ${kind}: `, element("code", {}, visible(sequence.tokens[last])),
        ` (its entropy ${signals.target_entropy[last].toFixed(2)} nats, margin ${signals.target_margin[last].toFixed(1)} logits)`));
    }
    return parts;
  }

  /** The drafted tokens of a step: text, what became of it, the draft's probability and entropy there. */
  function draftOf(step, sequence) {
    const { signals } = sequence, rows = [];
    for (let n = 0; n < step.gamma; n += 1) {
      const position = step.start + n;
      if (n < step.accepted) rows.push([sequence.tokens[position], "✓ accepted", signals.draft_top1[position], signals.draft_entropy[position]]);
      else {
        const wrong = step.start + step.accepted, [texts, top1, entropy] = sequence.wrong[wrong] ?? [[], [], []], behind = n - step.accepted;
        rows.push(behind
          ? [texts[behind] ?? "", "✗ behind it", top1[behind - 1], entropy[behind - 1]]
          : [texts[0] ?? "", "✗ wrong", signals.draft_top1[wrong], signals.draft_entropy[wrong]]);
      }
    }
    return rows;
  }

  // ---- the whole page --------------------------------------------------------------------------------------------

  function drawAll() {
    drawGap();
    drawLeaderboard();
    drawTasks();
    drawGammas();
    drawMachines();
    drawCosts();
    drawCalibration();
    drawExplorer();
  }

  function setUp() {
    const { settings, pair, decoding } = data;
    byId("title").textContent = `${pair.draft} drafting for ${pair.target}`;
    byId("lead").textContent = `${Object.keys(data.policies).length} policies for the number of drafted tokens, compared in tokens per second on a recording of `
      + `${settings.sequences} sequences (${settings.prompts} prompts, ${settings.tokens} tokens) under ${data.costs.length} measured cost model${data.costs.length > 1 ? "s" : ""}.`;
    for (const node of document.querySelectorAll(".against")) node.textContent = against;
    byId("footer").append(
      element("p", {}, `Made by speckv ${data.speckv}. Recording: ${Object.entries(decoding).map(([name, value]) => `${name} ${value}`).join(", ")}. ${settings.folds} folds, seed ${settings.seed}.`),
      ...data.costs.map((costs) => element("p", {}, `Costs of ${costs.name}: ${costs.source}.`)));
    options(machine, data.costs.map((costs) => costs.name));
    options(compression, data.compressions.length > 1 ? [...data.compressions, "all"] : data.compressions, (value) => value === "all" ? "all together" : value);
    for (const select of [machine, compression]) select.addEventListener("change", drawAll);
    setUpExplorer();
    drawAll();
    let width = innerWidth;
    addEventListener("resize", () => {
      if (innerWidth === width) return;
      width = innerWidth;
      requestAnimationFrame(drawAll);
    });
  }

  setUp();
})();
