"use strict";
// Draws a document of page/document.py: a report, or a running server, whose documents it asks for each second.
(() => {
  // ---- Text. Names of models come from outside: everything is set as text, never as markup.

  const scaled = (n, step, units, digits) => {
    let unit = 0;
    let value = n;
    for (; Math.abs(value) >= step && unit < units.length - 1; unit++) value /= step;
    return `${unit ? value.toFixed(digits) : Number(value.toFixed(1))} ${units[unit]}`;
  };
  const bytes = (n) => scaled(n, 1024, ["B", "KiB", "MiB", "GiB"], 1);
  const figures3 = (n) => n.toFixed(n < 10 ? 2 : n < 100 ? 1 : 0);
  const time = (s) => {
    const size = Math.abs(s);
    if (s === 0) return "0 ms";
    if (size >= 1) return `${figures3(s)} s`;
    return size >= 1e-4 ? `${figures3(s * 1e3)} ms` : `${(s * 1e6).toFixed(1)} \u00b5s`;
  };
  const duration = (s) => (s < 120 ? `${Math.round(s)} s` : s < 7200 ? `${Math.round(s / 60)} min` : s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} days`);
  const rate = (n) => (n === 0 ? "0" : n.toFixed(n < 10 ? 1 : 0));
  const units = {
    s: time,
    "+s": (s) => `${s > 0 ? "+" : s < 0 ? "\u2212" : ""}${time(Math.abs(s))}`,
    bytes,
    "bytes/s": (n) => `${bytes(n)}/s`,
    "1/s": (n) => `${rate(n)}/s`,
    share: (n) => `${n < 0.995 ? (n * 100).toFixed(1) : Number((n * 100).toFixed(n < 1 ? 3 : 0))} %`,
    count: (n) => `${n}`,
    times: (n) => `${Number.isInteger(n) ? n : n.toFixed(2)}\u00d7`,
  };
  const isQuantity = (cell) => cell.length === 2 && cell[1] in units && (cell[0] === null || typeof cell[0] === "number");
  /** Writes a text, a quantity, or a phrase of both. */
  const write = (cell) => {
    if (typeof cell === "string") return cell;
    if (isQuantity(cell)) return cell[0] === null ? "\u2013" : units[cell[1]](cell[0]);
    return cell.map(write).join("");
  };

  const make = (name, attributes = {}, ...children) => {
    const element = document.createElement(name);
    Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
    element.append(...children);
    return element;
  };
  const draw = (parent, name, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
    parent.append(element);
    return element;
  };
  /** Changes a text only if it differs, so that a reader's selection and a screen reader's place stay. */
  const say = (element, text) => {
    if (element.textContent !== text) element.textContent = text;
  };
  const section = (title, about, ...children) => {
    const id = `h-${title.toLowerCase().replace(/[^a-z]+/g, "-")}`;
    const text = about ? [make("p", { class: "about" }, about)] : [];
    return make("section", { class: "card", "aria-labelledby": id }, make("h2", { id }, title), ...text, ...children);
  };

  // ---- What a part says, when it is pointed at or reached with the arrow keys.

  const tip = document.getElementById("tip");
  const told = new WeakMap();
  let hot = [];
  const unmark = () => {
    hot.forEach((element) => element.classList.remove("hot"));
    hot = [];
    tip.hidden = true;
  };
  const mark = (element, x, y) => {
    unmark();
    const { lines, together } = told.get(element);
    hot = together();
    hot.forEach((each) => each.classList.add("hot"));
    tip.replaceChildren(...lines().map((line, i) => make(i ? "div" : "b", {}, line)));
    tip.hidden = false;
    const right = x + 16 + tip.offsetWidth < innerWidth;
    const below = y + 16 + tip.offsetHeight < innerHeight;
    tip.style.left = `${Math.max(4, right ? x + 16 : x - 12 - tip.offsetWidth)}px`;
    tip.style.top = `${Math.max(4, below ? y + 16 : y - 12 - tip.offsetHeight)}px`;
  };
  /** Lets arrow keys go through the parts of a drawing; `rows` returns them, a list per row. */
  const explore = (box, rows) => {
    let current = null;
    box.tabIndex = 0;
    box.addEventListener("keydown", (event) => {
      const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
      if (event.key === "Escape") unmark();
      const all = rows().filter((row) => row.length);
      if (!step || !all.length) return;
      event.preventDefault();
      let row = all.findIndex((each) => each.includes(current));
      let at = row < 0 ? 0 : all[row].indexOf(current) + step[1];
      if (row < 0) row = 0;
      else if (step[0]) [row, at] = [Math.min(Math.max(row + step[0], 0), all.length - 1), 0];
      current = all[row][Math.min(Math.max(at, 0), all[row].length - 1)];
      const place = current.getBoundingClientRect();
      mark(current, place.left + place.width / 2, place.bottom - 8);
    });
    box.addEventListener("blur", unmark);
    box.addEventListener("pointermove", (event) => {
      const part = event.target.closest("[data-part]");
      if (part && told.has(part)) mark(part, event.clientX, event.clientY);
      else unmark();
    });
    box.addEventListener("pointerleave", unmark);
  };

  // ---- Parts of documents.

  const COURSE_S = 300;
  const figures = () => {
    const list = make("dl", { class: "figures" });
    const meaning = make("dl");
    const courses = new Map(); // values by the figure's name, one a second, as long as this page is open
    const follow = (figure, line) => {
      const values = courses.get(figure.name) || [];
      values.push(figure.value[0]);
      courses.set(figure.name, values.slice(-COURSE_S));
      const known = values.filter((value) => value !== null);
      line.hidden = known.length < 2;
      if (line.hidden) return;
      const most = Math.max(...known);
      const points = values.map((value, i) => (value === null ? null : `${COURSE_S - values.length + i},${(28 - (value / (most || 1)) * 26).toFixed(1)}`));
      const svg = draw(make("div"), "svg", { viewBox: `0 0 ${COURSE_S} 30`, preserveAspectRatio: "none", role: "img" });
      svg.setAttribute("aria-label", `${figure.name} in the last minutes, at most ${write([most, figure.value[1]])}`);
      draw(svg, "polyline", { points: points.filter((point) => point !== null).join(" ") });
      line.replaceChildren(svg, make("span", {}, `at most ${write([most, figure.value[1]])}`));
    };
    const node = make("div", {}, list, make("details", { class: "help" }, make("summary", {}, "What these numbers mean"), meaning));
    const balance = () => {
      // Rows of about equal length, since a tile that is alone in its row looks like another kind of number.
      const style = getComputedStyle(list), gap = parseFloat(style.columnGap), least = parseFloat(style.getPropertyValue("--least"));
      const count = list.children.length, fit = Math.max(1, Math.floor((list.clientWidth + gap) / (least + gap)));
      let columns = Math.ceil(count / Math.ceil(count / fit));
      while (columns > 2 && count % columns === 1) columns -= 1;
      list.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
    };
    new ResizeObserver(balance).observe(list);
    const update = (all) => {
      if (list.children.length !== all.length) {
        list.replaceChildren(...all.map(() => make("div", {}, make("dt"), make("dd"), make("dd", { class: "note" }), make("dd", { class: "course", hidden: "" }))));
        meaning.replaceChildren(...all.flatMap(() => [make("dt"), make("dd")]));
        balance();
      }
      all.forEach((figure, i) => {
        const [name, value, note, line] = list.children[i].children;
        if (figure.is_followed) follow(figure, line);
        say(name, figure.name);
        say(value, write(figure.value));
        say(note, write(figure.note));
        say(meaning.children[2 * i], figure.name);
        say(meaning.children[2 * i + 1], figure.help);
      });
    };
    return { node, update };
  };

  const legend = (marks) =>
    make("div", { class: "legend" }, ...marks.map(({ kind, name }) => make("span", {}, make("i", { class: `mark ${kind}` }), name)));

  const table = (one) => {
    if (!one.rows.length) return section(one.title, one.about, make("p", {}, one.empty));
    const head = one.columns.length ? [make("thead", {}, make("tr", {}, ...one.columns.map((name) => make("th", { scope: "col" }, name))))] : [];
    const rows = one.rows.map((row) => make("tr", {}, ...row.map((cell) => {
      const isNumber = typeof cell !== "string"; // or a phrase of numbers
      return make("td", { class: isNumber ? "n" : "t" }, isNumber && cell[0] === null ? "" : write(cell));
    })));
    const more = one.more ? [make("p", { class: "about" }, `and ${one.more} more`)] : [];
    return section(one.title, one.about, make("div", { class: "wide" }, make("table", {}, ...head, make("tbody", {}, ...rows))), ...more);
  };

  /** Round numbers between two others. */
  const ticks = (from, to, most) => {
    const rough = (to - from) / most;
    const magnitude = 10 ** Math.floor(Math.log10(rough));
    const step = magnitude * [1, 2, 5, 10].find((m) => magnitude * m >= rough * 0.999);
    const found = [];
    for (let i = Math.ceil(from / step); i * step <= to; i++) found.push(i * step);
    return found;
  };

  // ---- Lines over two axes.

  const SCALES = {
    linear: (low, high) => ({
      at: (n) => (n - low) / (high - low || 1),
      ticks: high > low ? ticks(low, high, 5) : [low],
      show: (n) => `${Number(n.toPrecision(6))}`,
    }),
    log: (least, most) => {
      const room = Math.max(0, 0.15 - Math.log10(most / least) / 2); // at least a factor of two
      const [low, high] = [Math.log10(least) - room, Math.log10(most) + room];
      const digits = high - low > 3 ? [1] : high - low > 1.2 ? [1, 3] : [1, 2, 3, 5, 7];
      const powers = Array.from({ length: Math.ceil(high) - Math.floor(low) + 1 }, (_, i) => 10 ** (Math.floor(low) + i));
      const all = powers.flatMap((power) => digits.map((digit) => digit * power));
      return {
        at: (n) => (Math.log10(n) - low) / (high - low),
        ticks: all.filter((n) => Math.log10(n) >= low && Math.log10(n) <= high),
        show: (n) => `${Number(n.toPrecision(2))}`,
      };
    },
    nines: (low, high) => {
      const nines = (share) => -Math.log10(Math.max(1 - share, 1e-9));
      const most = Math.max(1, nines(high));
      return {
        at: (share) => nines(share) / most,
        ticks: [0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999].filter((share) => nines(share) <= most + 1e-9),
        show: (share) => `${Number((100 * share).toFixed(4))} %`,
      };
    },
  };

  const lineChart = (one) => {
    const box = make("div", { class: "curve", role: "img", "aria-label": `${one.y.name} over ${one.x.name}` });
    let dots = [];
    explore(box, () => dots);
    const redraw = () => {
      const width = box.clientWidth;
      const height = width < 500 ? 240 : 320;
      const [left, right, top, bottom] = [54, 14, 26, 44];
      const [x, y] = [one.x, one.y].map(({ scale, low, high }) => SCALES[scale](low, high));
      const within = (axis, n) => Math.min(Math.max(n, axis.low), axis.high);
      const px = (n) => left + x.at(within(one.x, n)) * (width - left - right);
      const py = (n) => height - bottom - y.at(within(one.y, n)) * (height - top - bottom);
      const svg = draw(make("div"), "svg", { viewBox: `0 0 ${width} ${height}` });
      const text = (attributes, words) => { draw(svg, "text", attributes).textContent = words; };
      // Axes: the vertical one's ticks are lines, the horizontal one's are left out where they would touch.
      y.ticks.forEach((n) => {
        draw(svg, "line", { class: "tick", x1: left, x2: width - right, y1: py(n), y2: py(n) });
        text({ x: left - 6, y: py(n) + 4, "text-anchor": "end" }, y.show(n));
      });
      let last = -Infinity;
      x.ticks.filter((n) => px(n) - last >= 34 && (last = px(n))).forEach((n) => {
        draw(svg, "line", { class: "tick", x1: px(n), x2: px(n), y1: height - bottom, y2: height - bottom + 5 });
        text({ x: px(n), y: height - bottom + 18, "text-anchor": "middle" }, x.show(n));
      });
      text({ x: width - right, y: height - 8, "text-anchor": "end" }, one.x.name);
      text({ x: 0, y: 14 }, one.y.name);
      if (one.level && one.level.value >= one.y.low && one.level.value <= one.y.high) {
        const at = py(one.level.value);
        draw(svg, "line", { class: "level", x1: left, x2: width - right, y1: at, y2: at });
        text({ x: width - right, y: at - 5, "text-anchor": "end" }, one.level.name);
      }
      // Lines, and their dots on top of them.
      one.lines.forEach(({ series, points, style }) => {
        let path = "";
        let pen = "M";
        points.forEach(([a, b]) => {
          path += b === null ? "" : style === "steps" && pen === "L" ? `H${px(a)}V${py(b)}` : `${pen}${px(a)},${py(b)}`;
          pen = b === null ? "M" : "L";
        });
        draw(svg, "path", { class: `line s${series % 6} ${style}`, d: path });
      });
      dots = one.lines.filter((line) => line.dots).map(({ series, points }) => points.filter(([, b]) => b !== null).map(([a, b]) => {
        const dot = draw(svg, "circle", { class: `s${series % 6}`, cx: px(a), cy: py(b), r: 4, "data-part": "" });
        const lines = [one.series[series], ...[[one.x, a], [one.y, b]].map(([axis, n]) => `${axis.name}: ${Number(n.toPrecision(4))}`)];
        told.set(dot, { lines: () => lines, together: () => [dot] });
        return dot;
      }));
      unmark();
      box.replaceChildren(svg);
    };
    new ResizeObserver(redraw).observe(box);
    const names = one.series.length > 1 ? [legend(one.series.map((name, i) => ({ kind: `s${i % 6}`, name })))] : [];
    return section(one.title, one.about, ...names, box);
  };

  // ---- Steps over time.

  const WIDE = 100000; // the coordinates of every drawing over time, and their height

  /** Lanes over time, and for a plan its memory: all zoom together. `update` draws another chart with the same zoom. */
  const laneChart = () => {
    let chart = null;
    let view = [0, WIDE];
    let plots = [];
    const body = make("div");
    const seconds = (x) => chart.start_s + (x / WIDE) * (chart.end_s - chart.start_s);
    const at = (s) => ((s - chart.start_s) / (chart.end_s - chart.start_s || 1)) * WIDE;

    const place = () => {
      plots.forEach(({ svg, height }) => svg.setAttribute("viewBox", `${view[0]} 0 ${view[1] - view[0]} ${height}`));
      const [start, end] = view.map(seconds);
      const most = Math.max(2, Math.floor(plots[0].svg.clientWidth / 110));
      const unit = (s) => (chart.start_s < 0 ? (s === 0 ? "now" : `${Number(s.toPrecision(6))} s`) : s === 0 ? "0" : `${Number((s * 1e3).toPrecision(9))} ms`);
      body.querySelectorAll(".axis").forEach((axis) => {
        axis.replaceChildren(...(end > start ? ticks(start, end, most) : []).map((t) => {
          const share = (t - start) / (end - start);
          const tick = make("span", { class: share < 0.02 ? "first" : share > 0.98 ? "last" : "" }, unit(t));
          tick.style.left = `${share * 100}%`;
          return tick;
        }));
      });
    };
    const zoom = (from, to) => {
      const width = Math.min(WIDE, Math.max(to - from, WIDE / 20000));
      const start = Math.min(Math.max(0, from), WIDE - width);
      view = [start, start + width];
      place();
    };
    const zoomBy = (factor, around = (view[0] + view[1]) / 2) =>
      zoom(around - (around - view[0]) * factor, around + (view[1] - around) * factor);

    /** Adds a drawing, in which the boxes of `rows` can be reached. */
    const plot = (kind, height, label, rows) => {
      const node = make("div", { class: "plot", role: "img", "aria-label": label });
      const svg = draw(node, "svg", { class: kind, viewBox: `0 0 ${WIDE} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
      const cursor = make("div", { class: "cursor", hidden: "" });
      node.append(cursor);
      if (rows) explore(node, rows);
      const share = (event) => {
        const box = node.getBoundingClientRect();
        return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      };
      let band = null;
      let from = 0;
      node.addEventListener("pointermove", (event) => {
        plots.forEach((each) => {
          each.cursor.hidden = false;
          each.cursor.style.left = `${share(event) * 100}%`;
        });
        if (!band) return;
        band.style.left = `${Math.min(share(event), from) * 100}%`;
        band.style.width = `${Math.abs(share(event) - from) * 100}%`;
        unmark();
      });
      node.addEventListener("pointerleave", () => plots.forEach((each) => { each.cursor.hidden = true; }));
      node.addEventListener("pointerdown", (event) => {
        if (event.button || event.pointerType === "touch") return;
        from = share(event);
        band = make("div", { class: "band" });
        node.append(band);
        node.setPointerCapture(event.pointerId);
      });
      node.addEventListener("pointerup", (event) => {
        if (!band) return;
        band.remove();
        band = null;
        const to = share(event);
        if (Math.abs(to - from) * node.clientWidth < 5) return;
        const x = (part) => view[0] + part * (view[1] - view[0]);
        zoom(x(Math.min(from, to)), x(Math.max(from, to)));
      });
      node.addEventListener("dblclick", () => zoom(0, WIDE));
      node.addEventListener("keydown", (event) => {
        const factor = { "+": 0.5, "-": 2 }[event.key];
        if (factor) zoomBy(factor);
        if (event.key === "0") zoom(0, WIDE);
      });
      node.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        zoomBy(event.deltaY < 0 ? 0.8 : 1.25, view[0] + share(event) * (view[1] - view[0]));
      }, { passive: false });
      plots.push({ svg, height, cursor });
      return { node, svg };
    };

    const groups = new Map();
    const box = (parent, one, y, height) => {
      const [start, end, kind, words, group] = one;
      const rect = draw(parent, "rect", { class: `fill ${kind}`, "data-part": "", x: at(start), y, width: Math.max(at(end) - at(start), 0), height });
      if (group !== null) groups.set(group, [...(groups.get(group) || []), rect]);
      told.set(rect, {
        lines: () => [...words.map((i) => write(chart.words[i])), `${time(start)} to ${time(end)}: ${time(end - start)}`],
        together: () => (group === null ? [rect] : groups.get(group)),
      });
      return rect;
    };
    const row = (labels, plotted) => make("div", { class: "row" }, labels, plotted);
    const axis = () => row(make("div", { class: "labels" }), make("div", { class: "axis", "aria-hidden": "true" }));

    const lanes = () => {
      const rows = [];
      const busy = (lane) => (lane.busy === null ? "" : `${units.share(lane.busy)} busy`);
      const said = chart.lanes.map((lane) => `${lane.name}: ${lane.boxes.length} steps ${busy(lane)}`).join("; ");
      const { node, svg } = plot("lanes", 10 * chart.lanes.length, `Lanes over time. ${said}. Arrow keys go through the steps.`, () => rows);
      node.style.height = `${chart.lanes.length * 36}px`;
      chart.lanes.forEach((lane, i) => {
        rows.push(lane.boxes.map((one) => box(svg, one, 10 * i + 1, 8)));
      });
      if (chart.answer_s !== null) {
        draw(svg, "line", { class: "answer", x1: at(chart.answer_s), x2: at(chart.answer_s), y1: 0, y2: 10 * chart.lanes.length });
      }
      const labels = chart.lanes.map((lane) => make("div", {}, make("b", {}, lane.name), make("span", {}, lane.boxes.length ? busy(lane) : "not used")));
      return [legend(chart.marks), row(make("div", { class: "labels lanes" }, ...labels), node), axis()];
    };

    const memory = (map) => {
      const level = (n) => Math.round((1 - n / (map.nbytes || 1)) * WIDE);
      const use = plot("use", WIDE, `Bytes in use over time: ${write(map.summary)}.`);
      let below = map.use.map(() => 0);
      map.marks.forEach(({ kind }, k) => {
        const above = map.use.map(([, now], i) => below[i] + now[k]);
        const outline = (values) => map.use.flatMap(([s], i) =>
          (i ? [`${at(s)},${level(values[i - 1])}`] : []).concat(`${at(s)},${level(values[i])}`));
        draw(use.svg, "path", { class: `fill ${kind}`, d: `M${outline(above).join(" ")} ${outline(below).reverse().join(" ")}Z` });
        below = above;
      });
      const rows = map.marks.map(() => []);
      const bytesMap = plot("memory", WIDE, "Which tensor is in which bytes over time. Arrow keys go through them.", () => rows);
      map.boxes.forEach((one) => {
        const rect = box(bytesMap.svg, one, level(one[6]), level(one[5]) - level(one[6]));
        rows[map.marks.findIndex(({ kind }) => kind === one[2])].push(rect);
      });
      map.regions.slice(1).forEach(({ offset }) => {
        draw(bytesMap.svg, "line", { class: "border", x1: 0, x2: WIDE, y1: level(offset), y2: level(offset) });
      });
      const offsets = make("div", { class: "labels offsets" });
      const tall = map.regions.filter(({ nbytes }) => nbytes / map.nbytes > 0.2); // where its name has room
      tall.forEach(({ name, offset, nbytes }) => {
        const label = make("b", {}, name);
        label.style.bottom = `${((offset + nbytes / 2) / map.nbytes) * 100}%`;
        offsets.append(label);
      });
      const unit = [2 ** 30, 2 ** 20, 2 ** 10, 1].find((n) => map.nbytes >= 2 * n) || 1;
      ticks(0, Math.max(map.nbytes / unit, 1e-9), 6).forEach((t) => {
        const label = make("span", {}, t ? bytes(t * unit) : "0");
        label.style.bottom = `${((t * unit) / map.nbytes) * 100}%`;
        offsets.append(label);
      });
      const budget = make("div", { class: "labels budget" }, make("span", {}, bytes(map.nbytes)), make("span", {}, "0"));
      return [
        make("h3", {}, "Memory in use"),
        make("p", { class: "about" }, "Bytes of this model's memory that hold something, by kind; the full height is the budget."),
        legend(map.marks),
        row(budget, use.node),
        make("h3", {}, "Memory map"),
        make("p", { class: "about" }, "Each block is a tensor: its height is its place in memory, its width the time that it stays there."),
        row(offsets, bytesMap.node),
        axis(),
      ];
    };

    const tools = make("div", { class: "tools" }, make("span", { class: "hint" }, "drag to zoom, double-click to go back"));
    [["+", 0.5, "zoom in"], ["\u2212", 2, "zoom out"], ["all", 0, "show everything"]].forEach(([text, factor, label]) => {
      const button = make("button", { "aria-label": label }, text);
      button.addEventListener("click", () => (factor ? zoomBy(factor) : zoom(0, WIDE)));
      tools.append(button);
    });
    const update = (next) => {
      chart = next;
      plots = [];
      groups.clear();
      body.replaceChildren(...lanes(), ...(chart.memory ? memory(chart.memory) : []));
      body.classList.toggle("many", body.querySelectorAll("rect").length > 1500);
      body.classList.toggle("sparse", !chart.memory); // a window of seconds: steps are thinner than a pixel
      place();
    };
    new ResizeObserver(() => { if (chart) place(); }).observe(body);
    return { node: make("div", { class: "chart" }, tools, body), update };
  };

  // ---- A report.

  const page = document.getElementById("page");
  const head = (title, subtitle) => make("header", {}, make("h1", {}, title), make("p", {}, subtitle));

  const SECTIONS = {
    table,
    line_chart: lineChart,
    lanes: (one) => {
      const chart = laneChart();
      chart.update(one.chart);
      return section(one.title, one.about, chart.node);
    },
    columns: (one) => make("div", { class: "columns" }, ...one.columns.map((column) => make("div", {}, ...column.map(drawn)))),
    alternatives: (one) => {
      const select = make("select", {}, ...one.names.map((name, i) => make("option", { value: i }, name)));
      const chosen = make("div");
      const show = () => chosen.replaceChildren(...one.sections[select.value].map(drawn));
      select.value = one.chosen;
      select.addEventListener("change", show);
      show();
      return make("div", {}, make("label", { class: "choice" }, `${one.label} `, select), chosen);
    },
  };
  const drawn = (one) => SECTIONS[one.kind](one);

  const showReport = (report) => {
    const notices = report.notices.map((notice) => make("p", { class: "alarm" }, write(notice)));
    const top = figures();
    page.append(head(report.title, write(report.subtitle)), ...notices, ...(report.figures.length ? [top.node] : []), make("main", {}, ...report.sections.map(drawn)));
    top.update(report.figures);
  };

  // ---- A running server.

  const STILL_MS = 5000; // a server that sends nothing for so long is asked again
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));
  let token = null; // kept by this page only, until it is closed
  const headers = () => (token ? { Authorization: `Bearer ${token}` } : {});
  const reason = async (answer) => {
    try {
      return (await answer.json()).error;
    } catch {
      return `${answer.status} ${answer.statusText}`;
    }
  };

  /** Asks a question in a dialog; returns what was typed, "" without a field, or null if it was closed. */
  const ask = (title, text, confirm, field) => new Promise((done) => {
    const input = make("input", { type: "password", autocomplete: "off", "aria-label": "token" });
    const yes = make("button", { value: "yes", class: "strong" }, confirm);
    const form = make("form", { method: "dialog" }, make("h2", {}, title), make("p", {}, text), ...(field ? [input] : []),
      make("div", { class: "buttons" }, make("button", { value: "", type: "button" }, "Cancel"), yes));
    const dialog = make("dialog", { "aria-label": title }, form);
    form.querySelector("button[type=button]").addEventListener("click", () => dialog.close(""));
    dialog.addEventListener("close", () => {
      dialog.remove();
      done(dialog.returnValue === "yes" && (!field || input.value) ? input.value.trim() : null);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
  const askToken = async (why) => {
    const given = await ask("This needs a token", `${why}. The token stays in this page until it is closed.`, "Send it", true);
    if (given) token = given;
    return given !== null;
  };

  const showLive = () => {
    const title = head("Cohabit", location.host);
    const banner = make("p", { class: "banner", role: "alert", hidden: "" });
    const notice = make("p", { class: "notice", role: "status" });
    const top = figures();
    const map = arena();
    const models = modelTable(notice);
    const chains = stepRows();
    const chart = laneChart();
    const tracing = make("p", { class: "about" });
    const lanes = section("Lanes of the last seconds", "What the device did for the requests that are traced: when a model computed, when it waited for its parameters, and when they were copied in.", tracing, chart.node);
    const main = make("main", { hidden: "" }, map.node, models.node, chains.node, lanes);
    top.node.hidden = true;
    page.append(title, banner, notice, top.node, main);

    const trouble = (text, isDown) => {
      banner.hidden = !text;
      banner.classList.toggle("down", isDown);
      say(banner, text || "");
      main.classList.toggle("old", isDown);
    };
    const show = (now) => {
      const restarts = now.restarts ? `; engine restarted ${now.restarts === 1 ? "once" : `${now.restarts} times`}` : "";
      say(title.lastChild, `${location.host}, version ${now.version}, layout ${now.layout}, up ${duration(now.uptime[0])}${restarts}`);
      const waits = now.down ? ": requests wait in the server, and are executed when it runs again. Figures below are from before." : "";
      trouble(now.trouble && `${now.trouble[0].toUpperCase()}${now.trouble.slice(1)}${waits}`, now.down);
      main.hidden = top.node.hidden = false;
      document.title = `Cohabit: ${now.figures[0].value[0]} served, ${write(now.figures[1].value)}`;
      top.update(now.figures);
      map.update(now.arena);
      models.update(now);
      chains.update(now);
      say(tracing, now.tracing);
      chart.node.hidden = !now.chart;
      if (now.chart && !chart.node.matches(":hover") && !chart.node.contains(document.activeElement)) chart.update(now.chart);
    };

    const follow = async () => {
      const stop = new AbortController();
      let still = setTimeout(() => stop.abort(), STILL_MS);
      const leave = () => document.hidden && stop.abort();
      document.addEventListener("visibilitychange", leave);
      try {
        const answer = await fetch("ui/events", { headers: headers(), cache: "no-store", signal: stop.signal });
        if (answer.status === 401 || answer.status === 403) {
          const why = await reason(answer);
          token = null;
          clearTimeout(still);
          trouble("This server shows its state to those who have a token. Reload the page to give one.", false);
          if (!(await askToken(why))) await new Promise(() => {});
          return;
        }
        if (!answer.ok) throw new Error(await reason(answer));
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        for (let rest = ""; ;) {
          const { value, done } = await reader.read();
          if (done) throw new Error("the server has ended");
          clearTimeout(still);
          still = setTimeout(() => stop.abort(), STILL_MS);
          const events = (rest + value).split("\n\n");
          rest = events.pop();
          if (events.length) show(JSON.parse(events.at(-1).slice("data: ".length)));
        }
      } catch (error) {
        if (document.hidden) return;
        const what = stop.signal.aborted ? `it has sent nothing for ${STILL_MS / 1000} s` : error.message;
        trouble(`No connection to the server (${what}). Trying again.`, true);
        await pause(1000);
      } finally {
        clearTimeout(still);
        document.removeEventListener("visibilitychange", leave);
      }
    };
    const visible = () => new Promise((done) => {
      if (!document.hidden) done();
      else document.addEventListener("visibilitychange", () => done(), { once: true });
    });
    (async () => {
      for (;;) {
        await visible();
        await follow();
      }
    })();
  };

  /** The device's memory to scale. */
  const arena = () => {
    const strip = make("div", { class: "arena", role: "img" });
    const scale = make("div", { class: "axis", "aria-hidden": "true" });
    let parts = [];
    explore(strip, () => [parts]);
    const marks = [
      { use: "partition", kind: "resident", name: "resident parameters: they stay between requests" },
      { use: "partition", kind: "streamed", name: "rest of a partition: streamed parameters come and go here" },
      { use: "shared", kind: "resident", name: "parameters of all models: what others need is evicted" },
      { use: "workspace", kind: "workspace", name: "workspace: activations, and parameters in flight" },
      { use: "free", kind: "free", name: "free" },
    ];
    const partitioned = "The whole arena, to scale. Each model has a partition that no other model can touch, or shares one with models that have nearly the same weights; the workspace is used by one inference at a time.";
    const shared = "The whole arena, to scale. All models share one region, as --layout says; the workspace is used by one inference at a time.";
    const key = make("div");
    const node = section("Device memory", partitioned, key, strip, scale);
    let drawn = "";
    const fit = () => parts.forEach((part) => {
      part.classList.toggle("narrow", part.clientWidth < 84);
      part.classList.toggle("tiny", part.clientWidth < 14);
    });
    addEventListener("resize", fit);
    const update = (all) => {
      if (JSON.stringify(all) === drawn) return; // it changes when a model is loaded, moved or unloaded
      drawn = JSON.stringify(all);
      const total = Math.max(1, ...all.map((part) => part.offset + part.nbytes));
      unmark();
      const uses = new Set(all.map((part) => part.use));
      say(node.querySelector(".about"), uses.has("shared") ? shared : partitioned);
      key.replaceChildren(legend(marks.filter(({ use }) => uses.has(use))));
      parts = all.map((part) => {
        const label = make("span", {}, part.name);
        const element = make("div", { class: `part ${part.use}`, "data-part": "" }, label);
        element.style.left = `${(part.offset / total) * 100}%`;
        element.style.width = `${(part.nbytes / total) * 100}%`;
        if (part.use === "partition") {
          const resident = make("div", { class: "residents" });
          resident.style.height = `${(part.resident_bytes / part.nbytes) * 100}%`;
          element.prepend(resident);
        }
        const range = `bytes ${part.offset.toLocaleString("en")} to ${(part.offset + part.nbytes).toLocaleString("en")}`;
        told.set(element, { lines: () => [part.name, write(part.words), range], together: () => [element] });
        return element;
      });
      strip.replaceChildren(...parts);
      fit();
      const sum = (use) => bytes(all.filter((part) => part.use === use).reduce((n, part) => n + part.nbytes, 0));
      const count = all.filter((part) => part.use === "partition").length;
      strip.setAttribute("aria-label", `${bytes(total)}: workspaces ${sum("workspace")}, ${count} partitions ${sum("partition")}, free ${sum("free")}. Arrow keys go through them.`);
      scale.replaceChildren(...[0, 0.25, 0.5, 0.75, 1].map((share) => {
        const tick = make("span", { class: share === 0 ? "first" : share === 1 ? "last" : "" }, share ? bytes(total * share) : "0");
        tick.style.left = `${share * 100}%`;
        return tick;
      }));
    };
    return { node, update };
  };

  const COLUMNS = [
    ["model", "Model"],
    ["answered", "Answers"],
    ["waiting", "Waiting"],
    ["latency", "Latency p50 / p99"],
    ["trouble", "Refused / failed per s"],
    ["predicted", "Predicted run"],
    ["measured", "Measured / predicted"],
    ["weights", "Parameters resident"],
    ["copied", "Copied in"],
    ["order", ""],
  ];
  const HELP = [
    ["Waiting", "requests in the model's queue now."],
    ["Latency", "from a request's arrival to its answer, within the last seconds."],
    ["Refused / failed per s", "Refused requests met a full queue, a deadline that could not be met, or a limit, or did not fit the model."],
    ["Predicted run", "the plan's time for one inference of the smallest batch."],
    ["Measured / predicted", "how long executions take in comparison. Coloured is above 1.5, of runs over 1 ms: the device is shared, or slower than when it was measured. Shorter runs take a fixed time besides their ops."],
    ["Parameters resident", "the part that stays in device memory; the rest is streamed in for every execution. A bar is all of the model."],
    ["Copied in", "parameters streamed per second, and per execution (run)."],
  ];
  const STATES = { ready: "ready", loading: "loading", unloading: "unloading", unavailable: "not served", "not loaded": "not loaded" };

  const modelTable = (notice) => {
    const head = make("tr", { role: "row" }, ...COLUMNS.map(([key, name]) =>
      make("th", { role: "columnheader", scope: "col", class: key }, name || make("span", { class: "hidden" }, "Load or unload"))));
    const body = make("tbody", { role: "rowgroup" });
    const how = make("p", { class: "about" });
    const help = make("details", { class: "help" }, make("summary", {}, "What the columns mean"),
      make("dl", {}, ...HELP.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)])));
    const node = section("Models", "", how, make("div", { class: "wide" },
      make("table", { class: "models", role: "table" }, make("thead", { role: "rowgroup" }, head), body)), help);
    const rows = new Map();

    const order = async (name, verb, button) => {
      if (verb === "unload" && (await ask(`Unload ${name}?`, "Requests for it are refused from then on. It can be loaded again.", "Unload", false)) === null) return;
      button.disabled = true;
      say(notice, `${verb === "load" ? "Loading" : "Unloading"} ${name}\u2026`);
      for (;;) {
        try {
          const answer = await fetch(`v2/repository/models/${encodeURIComponent(name)}/${verb}`, { method: "POST", headers: headers() });
          if ((answer.status === 401 || answer.status === 403) && (await askToken(await reason(answer.clone())))) continue;
          say(notice, answer.ok ? `${verb === "load" ? "Loaded" : "Unloaded"} ${name}.` : `${name}: ${await reason(answer)}`);
        } catch (error) {
          say(notice, `${name}: ${error.message}`);
        }
        break;
      }
      button.disabled = false;
    };

    const newRow = (model) => {
      const cells = {};
      const row = make("tr", { role: "row" });
      COLUMNS.forEach(([key, name]) => {
        const cell = make(key === "model" ? "th" : "td", { role: key === "model" ? "rowheader" : "cell", class: key, "data-name": name });
        if (key === "model") cell.scope = "row";
        row.append(cell);
        cells[key] = cell;
      });
      const parts = { name: make("b", {}, model.name), version: make("span", { class: "version" }), state: make("span", { class: "state" }), reason: make("div", { class: "reason" }) };
      cells.model.append(parts.name, parts.version, parts.state, parts.reason);
      const bar = make("div", { class: "bar", "aria-hidden": "true" }, make("i", { class: "mark resident" }), make("i", { class: "mark streamed" }));
      const held = make("span");
      cells.weights.append(bar, held);
      const button = make("button");
      cells.order.append(button);
      button.addEventListener("click", () => order(model.name, button.dataset.verb, button));
      return { row, cells, parts, bar, held, button };
    };

    const update = (now) => {
      const versions = new Map();
      now.models.forEach(({ name }) => versions.set(name, (versions.get(name) || 0) + 1));
      say(how, `Rates, latencies and copies are those of the last ${now.window_s} s.${now.control ? "" : " To load and unload models here, start the server with --model-control-mode explicit."}`);
      const seen = now.models.map((model) => {
        const key = JSON.stringify([model.name, model.version]);
        if (!rows.has(key)) rows.set(key, newRow(model));
        const { row, cells, parts, bar, held, button } = rows.get(key);
        const isReady = model.state === "ready";
        row.className = isReady ? "" : "off";
        say(parts.version, versions.get(model.name) > 1 ? `version ${model.version}` : "");
        say(parts.state, STATES[model.state]);
        parts.state.className = `state ${model.state.replace(" ", "-")}`;
        say(parts.reason, model.reason);
        say(cells.answered, write(model.answered));
        say(cells.waiting, write(model.waiting));
        say(cells.latency, model.p50[0] === null ? "\u2013" : `${write(model.p50)} / ${write(model.p99)}`);
        const trouble = (model.refused[0] || 0) + (model.failed[0] || 0);
        say(cells.trouble, isReady ? model.refused[0] === null ? "\u2013" : `${rate(model.refused[0])} / ${rate(model.failed[0])}` : "\u2013");
        cells.trouble.classList.toggle("alarm", trouble > 0);
        say(cells.predicted, write(model.predicted));
        say(cells.measured, write(model.measured));
        const isSlow = (model.measured[0] || 0) > 1.5 && (model.predicted[0] || 0) > 1e-3;
        cells.measured.classList.toggle("alarm", isSlow);
        if (isSlow) cells.measured.append(make("div", { class: "advice" }, "measured again once it is quiet, or: cohabit cache remeasure"));
        const share = (n) => `${((n || 0) / Math.max(1, model.parameters[0] || 0)) * 100}%`;
        bar.hidden = !isReady;
        bar.children[0].style.width = share(model.resident[0]);
        bar.children[1].style.width = share((model.parameters[0] || 0) - (model.resident[0] || 0));
        say(held, isReady ? `${write(model.resident)} of ${write(model.parameters)}` : "\u2013");
        say(cells.copied, write(model.copied) + (model.copied_each[0] ? `, ${write(model.copied_each)} per run` : ""));
        button.dataset.verb = isReady ? "unload" : "load";
        say(button, isReady ? "Unload" : "Load");
        button.setAttribute("aria-label", `${isReady ? "Unload" : "Load"} ${model.name}`);
        button.hidden = !now.control;
        button.toggleAttribute("data-busy", model.state === "loading" || model.state === "unloading");
        return [key, row];
      });
      const keys = new Set(seen.map(([key]) => key));
      [...rows.keys()].filter((key) => !keys.has(key)).forEach((key) => rows.delete(key));
      if (seen.length !== body.children.length || seen.some(([, row], i) => body.children[i] !== row)) {
        body.replaceChildren(...seen.map(([, row]) => row));
      }
    };
    return { node, update };
  };

  /** The steps of each ensemble as a row; those that wait for the same number of steps are one above the other. */
  const stepRows = () => {
    const body = make("div");
    const node = section("Ensembles", "The steps of each request, in order: how many run or wait in their model's queue now, and the average time of the latest.", body);
    const box = ({ model, running, queued, took }) => {
      const now = [running ? `${running} running` : "", queued ? `${queued} queued` : ""].filter(Boolean).join(", ") || "idle";
      return make("li", { class: running ? "running" : queued ? "queued" : "" }, make("b", {}, model), make("span", {}, now), make("span", {}, write(took)));
    };
    const update = (now) => {
      const all = now.models.filter(({ stages }) => stages.length);
      node.hidden = !all.length;
      body.replaceChildren(...all.map((model) => make("div", { class: "chain" },
        make("h3", {}, model.name), make("p", {}, `${write(model.answered)}, p50 / p99 ${write(model.p50)} / ${write(model.p99)}`),
        make("ol", {}, ...model.stages.map((stage) => make("li", { class: "stage" }, make("ul", {}, ...stage.map(box))))))));
    };
    return { node, update };
  };

  const data = JSON.parse(document.getElementById("data").textContent);
  if (data.kind === "report") showReport(data);
  else showLive();
})();
