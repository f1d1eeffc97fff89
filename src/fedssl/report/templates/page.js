"use strict";
// Draw each figure from the JSON inside it. No library, no request.
(() => {
  const tip = document.getElementById("tip");
  const TEN = 10;

  // Create an element. Text is never parsed, so that no name becomes markup.
  function make(parent, name, attributes = {}, text) {
    const svg = name === "svg" || parent.namespaceURI === "http://www.w3.org/2000/svg";
    const node = svg
      ? document.createElementNS("http://www.w3.org/2000/svg", name)
      : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  }

  // Ten colors that are distinct for color-blind readers; further ones are spread over the hues.
  const colour = (k, count) =>
    count <= TEN || k < TEN && count <= 2 * TEN ? `var(--c${k % TEN})`
      : `hsl(${(k * 137.5) % 360} ${45 + 20 * (k % 3)}% ${42 + 9 * (k % 4)}%)`;
  const dash = (k) => ["", "6 3", "2 3", "8 3 2 3"][Math.floor(k / TEN) % 4];

  // The path of a mark; classes differ in shape as well as in color.
  function shape(k, x, y, r) {
    const marks = [
      `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`,
      `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}z`,
      `M${x} ${y - 1.25 * r}L${x + 1.2 * r} ${y + r}L${x - 1.2 * r} ${y + r}z`,
      `M${x} ${y - 1.4 * r}L${x + 1.4 * r} ${y}L${x} ${y + 1.4 * r}L${x - 1.4 * r} ${y}z`,
    ];
    return marks[k % marks.length];
  }

  function said(value, unit) {
    if (unit === "B") return size(value);
    const digits = Math.abs(value) >= 1e5 || Number.isInteger(value) ? 0 : 4;
    const text = Number.isInteger(value) || digits === 0
      ? Math.round(value).toLocaleString("en")
      : String(Number(value.toPrecision(5)));
    return unit === "%" ? `${Number(value).toFixed(1)} %` : text;
  }

  function size(bytes) {
    for (const unit of ["B", "kB", "MB", "GB"]) {
      if (Math.abs(bytes) < 1000) return `${Number(bytes.toFixed(unit === "B" ? 0 : 1))} ${unit}`;
      bytes /= 1000;
    }
    return `${Number(bytes.toFixed(1))} TB`;
  }

  function ticks(low, high, most) {
    const rough = (high - low || 1) / Math.max(1, most);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough) || 10 * power;
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) {
      found.push(Number((k * step).toPrecision(12)));
    }
    return found;
  }

  // Show the values under the pointer or the cursor.
  function show(x, y, fill) {
    tip.replaceChildren();
    fill(tip);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = x + 16 + box.width > innerWidth ? x - 16 - box.width : x + 16;
    tip.style.left = `${Math.max(4, Math.min(left, innerWidth - box.width - 4))}px`;
    tip.style.top = `${Math.max(4, Math.min(y + 12, innerHeight - box.height - 4))}px`;
  }
  const hide = () => { tip.hidden = true; };
  for (const moved of ["wheel", "touchmove"]) addEventListener(moved, hide, { passive: true });

  // Cut the middle out of a long name: names often differ at their ends.
  const cut = (name, most) => (name.length <= most ? name
    : `${name.slice(0, Math.ceil((most - 1) / 2))}…${name.slice(name.length - Math.floor((most - 1) / 2))}`);

  function swatch(parent, k, count, kind) {
    const icon = make(parent, "svg", { viewBox: "0 0 16 10", "aria-hidden": "true" });
    const paint = `stroke:${colour(k, count)};fill:${colour(k, count)}`;
    if (kind === "line") {
      make(icon, "path", { d: "M0 5H16", style: `${paint};stroke-width:2.5`, "stroke-dasharray": dash(k) });
    } else {
      const d = kind === "mark" ? shape(k, 8, 5, 4) : "M2 0h12v10h-12z";
      make(icon, "path", { d, style: paint });
    }
  }

  // Buttons that hide and show a series.
  function legend(box, names, hidden, kind, colours, redraw) {
    const list = make(box, "div", { class: "legend" });
    names.forEach((name, k) => {
      const button = make(list, "button", { type: "button", "aria-pressed": !hidden.has(k) });
      swatch(button, colours.of(k), colours.count, kind);
      make(button, "span", { title: name }, name);
      button.addEventListener("click", () => {
        if (!hidden.delete(k)) hidden.add(k);
        button.setAttribute("aria-pressed", !hidden.has(k));
        redraw();
      });
    });
  }

  function canvas(box, width, height, label) {
    const attributes = { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, tabindex: 0 };
    return make(box, "svg", attributes);
  }

  // Move one cursor over count() positions with the pointer or the arrow keys.
  function cursor(svg, count, find, put) {
    let at = -1;
    const scale = () => svg.viewBox.baseVal.width / svg.getBoundingClientRect().width;
    const over = (event) => {
      const box = svg.getBoundingClientRect();
      const found = find((event.clientX - box.left) * scale(), (event.clientY - box.top) * scale());
      if (found === null) { put(null); hide(); return; }
      at = found;
      put(at, event.clientX, event.clientY);
    };
    svg.addEventListener("pointermove", over);
    svg.addEventListener("pointerdown", over);
    const off = () => { put(null); hide(); };
    svg.addEventListener("pointerleave", off);
    svg.addEventListener("blur", off);
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") off();
      if (!step || !count()) return;
      event.preventDefault();
      at = Math.max(0, Math.min(count() - 1, at + step));
      const box = svg.getBoundingClientRect();
      put(at, null, null, (x, y) => [box.left + x / scale(), box.top + y / scale()]);
    });
  }

  // places: labels for the positions 1, 2, … instead of numbers.
  function axes(svg, area, x, y, unit, names, places = []) {
    for (const value of ticks(...y.range, Math.max(2, area.height / 45))) {
      make(svg, "line", { class: "axis", x1: area.left, x2: area.left + area.width, y1: y(value), y2: y(value) });
      make(svg, "text", { x: area.left - 6, y: y(value) + 4, "text-anchor": "end" }, label(value, unit));
    }
    const most = Math.max(3, Math.floor(area.width / places.length / 7));
    places.forEach((name, k) => {
      const text = make(svg, "text", { class: "place", x: x(k + 1), y: area.top + area.height + 16, "text-anchor": "middle" }, cut(name, most));
      make(text, "title", {}, name);
    });
    for (const value of places.length ? [] : ticks(...x.range, Math.max(2, area.width / 70))) {
      if (!Number.isInteger(value)) continue;
      make(svg, "text", { x: x(value), y: area.top + area.height + 16, "text-anchor": "middle" },
        value.toLocaleString("en"));
    }
    const foot = area.top + area.height;
    make(svg, "line", { class: "axis base", x1: area.left, x2: area.left + area.width, y1: foot, y2: foot });
    if (names) {
      make(svg, "text", { x: area.left + area.width, y: foot + 30, "text-anchor": "end" }, names);
    }
  }

  function label(value, unit) {
    if (unit === "B") return size(value);
    if (Math.abs(value) >= 1e4) {
      return new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 }).format(value);
    }
    return Math.abs(value) < 1e-3 && value !== 0 ? value.toExponential(0) : String(value);
  }

  function scaler(low, high, from, to) {
    const span = high - low || 1;
    const scale = (value) => from + ((value - low) / span) * (to - from);
    scale.range = [low, high];
    scale.back = (place) => low + ((place - from) / (to - from)) * span;
    return scale;
  }

  function extent(series, key) {
    let low = Infinity, high = -Infinity;
    for (const one of series) {
      for (const value of one[key]) {
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
    return [low, high];
  }

  // The index of the number in a sorted list that is nearest to a value.
  function nearest(list, value) {
    let low = 0, high = list.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (list[middle] < value) low = middle; else high = middle;
    }
    return Math.abs(list[low] - value) <= Math.abs(list[high] - value) ? low : high;
  }

  function lines(box, panel, hidden, width) {
    const area = { left: 54, top: 8, width: width - 66, height: 176 };
    const svg = canvas(box, width, area.height + 44, panel.title);
    const count = panel.colours;
    const shown = panel.series.filter((_, k) => !hidden.has(k));
    if (!shown.length) return;
    const [first, last] = extent(panel.series, "x");
    let [low, high] = extent(shown, "y");
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
    if (low >= 0 && (panel.unit === "B" || low < (high - low) * 0.4)) low = 0; else low -= pad;
    const x = scaler(first, last === first ? first + 1 : last, area.left, area.left + area.width);
    const y = scaler(low, high + pad, area.top + area.height, area.top);
    axes(svg, area, x, y, panel.unit, "round");
    [...panel.series.entries()].reverse().forEach(([at, one]) => {  // the first, the mean, on top
      if (hidden.has(at)) return;
      const k = one.colour;
      const d = one.x.map((round, i) => `${i ? "L" : "M"}${x(round).toFixed(1)} ${y(one.y[i]).toFixed(1)}`);
      const paint = `stroke:${colour(k, count)}`;
      const strong = panel.series.length > 1 && one.name === "mean" ? " strong" : "";
      make(svg, "path", { class: `curve${strong}`, d: d.join(""), style: paint, "stroke-dasharray": dash(k) });
      if (one.x.length <= 12) {
        one.x.forEach((round, i) => make(svg, "circle",
          { class: "point", cx: x(round), cy: y(one.y[i]), r: 3.2, style: `fill:${colour(k, count)}` }));
      }
    });
    const rounds = [...new Set(shown.flatMap((one) => one.x))].sort((a, b) => a - b);
    const mark = make(svg, "g");
    cursor(svg, () => rounds.length, (px) => nearest(rounds, x.back(px)), (at, px, py, place) => {
      mark.replaceChildren();
      if (at === null) return;
      const round = rounds[at];
      make(mark, "line", { class: "cursor", x1: x(round), x2: x(round), y1: area.top, y2: area.top + area.height });
      const values = panel.series.map((one, k) => [k, hidden.has(k) ? -1 : nearest(one.x, round)])
        .filter(([k, i]) => i >= 0 && (panel.series[k].x[i] === round || thin(panel.series[k], i, round)));
      for (const [k, i] of values) {
        const one = panel.series[k];
        make(mark, "circle", { class: "point on", cx: x(one.x[i]), cy: y(one.y[i]), r: 4, style: `fill:${colour(one.colour, count)}` });
      }
      const [tx, ty] = place ? place(x(round), area.top) : [px, py];
      show(tx, ty, (tip) => {
        make(tip, "b", {}, `round ${round.toLocaleString("en")}`);
        for (const [k, i] of values.slice(0, 14)) {
          const row = make(tip, "div");
          swatch(row, panel.series[k].colour, count, "line");
          make(row, "span", {}, panel.series[k].name);
          make(row, "span", {}, said(panel.series[k].y[i], panel.unit));
        }
        if (values.length > 14) make(tip, "div", {}, `and ${values.length - 14} more`);
      });
    });
  }

  // True if a thinned curve has no point in this round: its nearest point is shown.
  const thin = (one, i, round) => one.total > one.x.length && round >= one.x[0] && round <= one.x.at(-1);

  function dots(box, rows, hidden, width) {
    const compact = rows.length > 16;
    const step = compact ? 15 : 34;
    const area = { left: 4, top: 4, width: width - 8, height: rows.length * step };
    const svg = canvas(box, width, area.height + 26, "accuracies");
    const all = rows.flatMap((row) => [row.mean - (row.spread || 0), row.mean + (row.spread || 0), ...row.each]);
    const low = Math.min(...all), high = Math.max(...all), pad = (high - low) * 0.08 || 1;
    const x = scaler(Math.max(0, low - pad), Math.min(100, high + pad), area.left + 6, area.left + area.width - 52);
    const foot = area.top + area.height;
    for (const value of ticks(...x.range, Math.max(2, width / 90))) {
      make(svg, "line", { class: "axis", x1: x(value), x2: x(value), y1: area.top, y2: foot });
      make(svg, "text", { x: Math.max(20, x(value)), y: foot + 16, "text-anchor": "middle" }, `${value} %`);
    }
    const kinds = { run: 0, baseline: 1, untrained: 8, paper: 2 };
    rows.forEach((row, k) => {
      const y = area.top + k * step + (compact ? step / 2 : 24);
      const paint = `fill:${colour(kinds[row.kind], 1)};stroke:${colour(kinds[row.kind], 1)}`;
      if (!compact) {
        const name = cut(row.name, Math.floor(width / 6.6));
        const text = make(svg, "text", { class: "name", x: area.left, y: y - 10 }, name);
        text.style.paintOrder = "stroke";
        text.style.stroke = "var(--ground)";
        text.style.strokeWidth = "3px";
      }
      make(svg, "line", { class: "axis", x1: area.left, x2: area.left + area.width - 46, y1: y, y2: y });
      if (row.spread) {
        make(svg, "line", { x1: x(row.mean - row.spread), x2: x(row.mean + row.spread), y1: y, y2: y, style: `${paint};stroke-width:2` });
        for (const value of row.each) {
          make(svg, "line", { x1: x(value), x2: x(value), y1: y - 5, y2: y + 5, style: `${paint};stroke-width:1` });
        }
      }
      const mark = { run: 0, baseline: 1, untrained: 2, paper: 3 }[row.kind];
      make(svg, "path", { class: "point", d: shape(mark, x(row.mean), y, compact ? 3.5 : 5), style: `fill:${colour(kinds[row.kind], 1)}` });
      make(svg, "text", { x: area.left + area.width, y: y + 4, "text-anchor": "end", class: "name" }, `${row.mean.toFixed(1)} %`);
    });
    cursor(svg, () => rows.length, (px, py) => {
      const k = Math.floor((py - area.top) / step);
      return k >= 0 && k < rows.length ? k : null;
    }, (at, px, py, place) => {
      if (at === null) return;
      const row = rows[at];
      const [tx, ty] = place ? place(x(row.mean), area.top + at * step + 24) : [px, py];
      show(tx, ty, (tip) => {
        make(tip, "b", {}, row.name);
        const spread = row.spread === null ? "" : ` ± ${row.spread.toFixed(2)} (${row.each.length} seeds)`;
        make(tip, "div", {}, `${row.mean.toFixed(2)} %${spread}`);
      });
    });
  }

  function bars(box, part, hidden, width) {
    const many = part.names.length > 24;
    const step = many ? 10 : 20;
    const name = Math.min(150, 14 + 7 * Math.max(...part.names.map((n) => Math.min(n.length, 20))));
    const area = { left: name, top: 4, width: width - name - 52, height: part.names.length * step };
    const svg = canvas(box, width, area.height + 10, "who holds what");
    const held = part.held || part.sizes.map((n) => [n]);
    const x = scaler(0, Math.max(...part.sizes), 0, area.width);
    const count = part.held ? part.classes.length : 1;
    held.forEach((row, k) => {
      const top = area.top + k * step;
      let from = area.left;
      row.forEach((n, c) => {
        if (!n || hidden.has(c)) return;
        const wide = x(n);
        make(svg, "rect", { class: "bar", x: from, y: top, width: Math.max(0.6, wide - 0.6), height: step - (many ? 2 : 4), style: `fill:${colour(c, count)}` });
        from += wide;
      });
      const rest = part.sizes[k] - row.reduce((a, b) => a + b, 0);
      if (rest > 0) {
        make(svg, "rect", { class: "bar", x: from, y: top, width: x(rest), height: step - (many ? 2 : 4), style: "fill:var(--rule)" });
        from += x(rest);
      }
      if (many && k % 5) return;
      make(svg, "text", { x: area.left - 8, y: top + (many ? 8 : 12), "text-anchor": "end" }, cut(part.names[k], 20));
      make(svg, "text", { x: from + 6, y: top + (many ? 8 : 12) }, part.sizes[k].toLocaleString("en"));
    });
    cursor(svg, () => held.length, (px, py) => {
      const k = Math.floor((py - area.top) / step);
      return k >= 0 && k < held.length ? k : null;
    }, (at, px, py, place) => {
      if (at === null) return;
      const [tx, ty] = place ? place(area.left, area.top + at * step) : [px, py];
      show(tx, ty, (tip) => {
        make(tip, "b", {}, `client ${part.names[at]}: ${part.sizes[at].toLocaleString("en")} images`);
        if (!part.held) return;
        const order = held[at].map((n, c) => [n, c]).filter(([n]) => n).sort((a, b) => b[0] - a[0]);
        for (const [n, c] of order.slice(0, 12)) {
          const row = make(tip, "div");
          swatch(row, c, count, "bar");
          make(row, "span", {}, part.classes[c]);
          make(row, "span", {}, n.toLocaleString("en"));
        }
        if (order.length > 12) make(tip, "div", {}, `and ${order.length - 12} more`);
      });
    });
  }

  function clients(box, models, hidden, width) {
    const area = { left: 54, top: 8, width: width - 66, height: 220 };
    const svg = canvas(box, width, area.height + 44, "accuracy of each client");
    const sorted = models.map((own) => own.scores.map((s, k) => [s, own.names[k]]).sort((a, b) => a[0] - b[0]));
    const shown = sorted.filter((_, k) => !hidden.has(k));
    if (!shown.length) return;
    const low = Math.min(...shown.map((own) => own[0][0])), pad = (100 - low) * 0.08 || 1;
    const most = Math.max(...sorted.map((own) => own.length));
    const middles = sorted.map((own) => (own[Math.floor((own.length - 1) / 2)][0] + own[Math.floor(own.length / 2)][0]) / 2);
    // Up to twelve clients are labelled, in the order of the first model shown.
    const places = most <= 12 ? shown[0].map(([, name]) => name) : [];
    const known = (own) => own.length === places.length && own.every(([, name]) => places.includes(name));
    const few = sorted.every(known);
    if (few) sorted.forEach((own) => own.sort((a, b) => places.indexOf(a[1]) - places.indexOf(b[1])));
    const x = scaler(0.5, most + 0.5, area.left, area.left + area.width);
    const y = scaler(Math.max(0, low - pad), 100 + pad / 4, area.top + area.height, area.top);
    axes(svg, area, x, y, "", "clients, worst first", few ? places : []);
    sorted.forEach((own, k) => {
      if (hidden.has(k)) return;
      const paint = `stroke:${colour(k, TEN)}`;
      const middle = middles[k];
      make(svg, "line", { class: "cursor", x1: area.left, x2: area.left + area.width, y1: y(middle), y2: y(middle), style: paint });
      make(svg, "text", { x: area.left + 4, y: y(middle) - 5 }, `median ${models[k].model}`);
      own.forEach(([score], i) => {
        const at = x(i + 1) + (models.length > 1 ? (k - 0.5) * 2 : 0);
        if (own.length <= 60) make(svg, "line", { x1: at, x2: at, y1: y(y.range[0]), y2: y(score), style: `${paint};stroke-opacity:0.35` });
        make(svg, "path", { class: "point", d: shape(k, at, y(score), own.length > 200 ? 2 : 4.5), style: `fill:${colour(k, TEN)}` });
      });
    });
    cursor(svg, () => most, (px) => Math.max(0, Math.min(most - 1, Math.round(x.back(px)) - 1)), (at, px, py, place) => {
      if (at === null) return;
      const [tx, ty] = place ? place(x(at + 1), area.top) : [px, py];
      show(tx, ty, (tip) => sorted.forEach((own, k) => {
        if (hidden.has(k) || !own[at]) return;
        const row = make(tip, "div");
        swatch(row, k, TEN, "mark");
        make(row, "span", {}, `client ${own[at][1]}, ${models[k].model} model`);
        make(row, "span", {}, `${own[at][0].toFixed(1)} %`);
      }));
    });
  }

  function map(box, look, hidden, width) {
    const side = Math.min(width, 640);
    const svg = canvas(box, side, side, "map of test images");
    const count = look.classes.length;
    const places = look.points.map(([x, y]) => [14 + x * (side - 28), 14 + (1 - y) * (side - 28)]);
    const of = (k) => (look.labels ? look.labels[k] : -1);
    make(svg, "rect", { class: "axis", x: 0.5, y: 0.5, width: side - 1, height: side - 1, fill: "none" });
    const radius = places.length > 500 ? 3.4 : 4.2;
    places.forEach(([x, y], k) => {
      if (hidden.has(of(k))) return;
      const paint = of(k) < 0 ? "var(--c8)" : colour(of(k), count);
      make(svg, "path", { class: "point", d: shape(Math.max(0, of(k)), x, y, radius), style: `fill:${paint}` });
    });
    const mark = make(svg, "g");
    cursor(svg, () => places.length, (px, py) => {
      let best = null, least = 18 * 18;
      places.forEach(([x, y], k) => {
        const far = (x - px) ** 2 + (y - py) ** 2;
        if (far < least && !hidden.has(of(k))) { best = k; least = far; }
      });
      return best;
    }, (at, px, py, place) => {
      mark.replaceChildren();
      if (at === null) return;
      const [x, y] = places[at];
      const paint = of(at) < 0 ? "var(--c8)" : colour(of(at), count);
      make(mark, "path", { class: "point on", d: shape(Math.max(0, of(at)), x, y, 7), style: `fill:${paint}` });
      const [tx, ty] = place ? place(x, y) : [px, py];
      show(tx, ty, (tip) => {
        const cell = `--x:${at % look.columns};--y:${Math.floor(at / look.columns)}`;
        make(tip, "i", { class: `thumb s${look.sprite}`, style: cell });
        if (of(at) >= 0) {
          const row = make(tip, "div");
          swatch(row, of(at), count, "mark");
          make(row, "span", {}, look.classes[of(at)]);
        }
      });
    });
  }

  const draw = { lines, dots, bars, clients, map };
  const names = {
    lines: (panel) => (panel.legend ? panel.series.map((one) => one.name) : []),
    dots: () => [],
    bars: (part) => (part.held ? part.classes : []),
    clients: (models) => (models.length > 1 ? models.map((own) => own.model) : []),
    map: (look) => (look.labels ? look.classes : []),
  };
  const icons = { lines: "line", bars: "bar", clients: "mark", map: "mark" };

  for (const box of document.querySelectorAll(".plot")) {
    const { kind } = box.dataset;
    const content = JSON.parse(box.querySelector("script").textContent);
    const hidden = new Set();
    const figure = make(box, "div");
    let width = 0;
    const redraw = () => {
      width = figure.clientWidth;
      figure.replaceChildren();
      hide();
      if (width > 0) draw[kind](figure, content, hidden, width);
    };
    const listed = names[kind](content);
    const colours = kind === "lines"
      ? { of: (k) => content.series[k].colour, count: content.colours }
      : { of: (k) => k, count: listed.length };
    if (listed.length) legend(box, listed, hidden, icons[kind], colours, redraw);
    redraw();
    new ResizeObserver(() => { if (Math.abs(figure.clientWidth - width) > 1) redraw(); }).observe(figure);
  }
})();
