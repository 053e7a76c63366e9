"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const charts = [...document.querySelectorAll("svg.time")];
  const heights = charts.map((svg) => svg.getAttribute("viewBox").split(" ")[3]);
  const tip = document.getElementById("tip");
  const told = new Map();
  const byTensor = new Map();
  let view = [0, data.units];

  const seconds = (x) => (x / data.units) * data.end;
  const time = (s) => {
    const size = Math.abs(s);
    const digits = (value) => (value < 10 ? 3 : value < 100 ? 2 : 1);
    if (size >= 1) return `${s.toFixed(digits(size))} s`;
    if (size >= 1e-3) return `${(s * 1e3).toFixed(digits(size * 1e3))} ms`;
    return `${(s * 1e6).toFixed(1)} \u00b5s`;
  };
  const roundTime = (s) => (s === 0 ? "0" : `${Number((s * 1e3).toPrecision(9))} ms`);
  const bytes = (n) => {
    let unit = 0;
    let value = n;
    for (; value >= 1024 && unit < 3; unit++) value /= 1024;
    return unit ? `${value.toFixed(1)} ${["B", "KiB", "MiB", "GiB"][unit]}` : `${n} B`;
  };

  const nameOf = (kind, what) => (kind === "op" || kind === "scratch" ? data.ops[what][0] : data.tensors[what][0]);
  const subjects = new Map(Object.values(data.lanes).flat().map(([step, kind, what]) => [step, [kind, what]]));
  const phrase = (step) => {
    const [kind, what] = subjects.get(step);
    return `${{ op: "op", in: "swap-in of", out: "swap-out of" }[kind]} ${nameOf(kind, what)}`;
  };
  const relate = (rect, tensor) => {
    if (!byTensor.has(tensor)) byTensor.set(tensor, []);
    byTensor.get(tensor).push(rect);
  };

  const add = (parent, name, attributes) => {
    const element = document.createElementNS(parent.namespaceURI, name);
    Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
    parent.append(element);
    return element;
  };
  const rectangle = (group, from, to, y, height, tell) => {
    const rect = add(group, "rect", { x: from, y, width: to - from, height });
    const when = `${time(seconds(from))} to ${time(seconds(to))}, ${time(seconds(to - from))}`;
    told.set(rect, () => tell(when));
    return rect;
  };
  const height = 100000;
  const levelOf = (n) => Math.round((1 - n / data.memory) * height);

  const lanes = document.getElementById("lanes");
  const stalls = add(lanes, "g", { class: "stall" });
  data.stalls.forEach(([step, cause, from, to]) => {
    const what = `${phrase(step)} waits${cause === null ? "" : ` for the ${phrase(cause)}`}`;
    rectangle(stalls, from, to, 1, 8, (when) => ["stall", what, when]);
  });
  Object.entries(data.lanes).forEach(([lane, steps], row) => {
    const group = add(lanes, "g", { class: lane });
    steps.forEach(([step, kind, what, late, from, to]) => {
      const rect = rectangle(group, from, to, row * 10 + 1, 8, (when) => [
        nameOf(kind, what),
        kind === "op" ? data.ops[what][1] : `${kind === "in" ? "swap-in" : "swap-out"}, ${bytes(data.tensors[what][1])}`,
        when,
        `step ${step}`,
        ...(late === null ? [] : [`waited for the ${phrase(late)}`]),
      ]);
      if (kind !== "op") relate(rect, what);
    });
  });

  const use = document.getElementById("use");
  let below = data.use.map(() => 0);
  data.kinds.forEach((kind, k) => {
    const above = data.use.map(([, now], i) => below[i] + now[k]);
    const outline = (values) => data.use.flatMap(([x], i) =>
      i ? [`${x},${levelOf(values[i - 1])}`, `${x},${levelOf(values[i])}`] : [`${x},${levelOf(values[i])}`]);
    if (above.some((n, i) => n !== below[i])) {
      add(use, "path", { class: kind, d: `M${outline(above).join(" ")} ${outline(below).reverse().join(" ")}Z` });
    }
    below = above;
  });

  const memory = document.getElementById("memory");
  const groups = new Map(data.kinds.map((kind) => [kind, add(memory, "g", { class: kind })]));
  data.occupancies.forEach(([kind, what, start, drawn, size, hasAddress, from, to]) => {
    const top = levelOf(start + drawn);
    const workspace = start >= data.partition && data.partition < data.memory;
    const offset = workspace ? start - data.partition : start;
    const rect = rectangle(groups.get(kind), from, to, top, levelOf(start) - top, (when) => [
      kind === "scratch" ? `scratch of ${nameOf(kind, what)}` : nameOf(kind, what),
      `${{ resident: "resident parameter", parameter: "parameter, swapped in" }[kind] || kind}, ${bytes(size)}`,
      hasAddress
        ? `${workspace ? "workspace" : "partition"} ${offset.toLocaleString()} to ${(offset + size).toLocaleString()}`
        : "in the pool, wherever the allocator puts it",
      when,
    ]);
    if (kind !== "scratch") relate(rect, what);
  });
  if (data.partition > 0 && data.partition < data.memory) {
    const y = levelOf(data.partition);
    add(memory, "line", { class: "border", x1: 0, x2: data.units, y1: y, y2: y });
  }
  if (data.answer !== null) {
    charts.forEach((svg) => add(svg, "line", { class: "answer", x1: data.answer, x2: data.answer, y1: 0, y2: "100%" }));
  }
  if (told.size > 1500) document.body.classList.add("many");

  const ticks = (from, to, most) => {
    const rough = (to - from) / most;
    const magnitude = 10 ** Math.floor(Math.log10(rough));
    const step = magnitude * [1, 2, 5, 10].find((m) => magnitude * m >= rough);
    const found = [];
    for (let i = Math.ceil(from / step); i * step <= to; i++) found.push(i * step);
    return found;
  };
  const draw = () => {
    const [from, to] = view;
    charts.forEach((svg, i) => svg.setAttribute("viewBox", `${from} 0 ${to - from} ${heights[i]}`));
    const [start, end] = [seconds(from), seconds(to)];
    const most = Math.max(2, Math.floor(lanes.clientWidth / 120));
    const marks = data.end > 0 ? ticks(start, end, most) : [];
    document.querySelectorAll("[data-axis]").forEach((axis) => {
      axis.replaceChildren(...marks.map((t) => {
        const mark = document.createElement("span");
        const share = (t - start) / (end - start);
        mark.style.left = `${share * 100}%`;
        if (share < 0.01) mark.className = "edge";
        mark.textContent = roundTime(t);
        return mark;
      }));
    });
  };
  const zoom = (from, to) => {
    const width = Math.min(data.units, Math.max(to - from, data.units / 20000));
    const start = Math.min(Math.max(0, from), data.units - width);
    view = [start, start + width];
    draw();
  };
  const zoomBy = (factor, at = (view[0] + view[1]) / 2) =>
    zoom(at - (at - view[0]) * factor, at + (view[1] - at) * factor);

  document.querySelectorAll("[data-zoom]").forEach((button) => {
    const factor = Number(button.dataset.zoom);
    button.addEventListener("click", () => (factor ? zoomBy(factor) : zoom(0, data.units)));
  });

  let hot = [];
  const point = (event) => {
    const say = told.get(event.target);
    hot.forEach((rect) => rect.classList.remove("hot"));
    hot = say ? [event.target] : [];
    byTensor.forEach((rects) => { if (rects.includes(event.target)) hot = rects; });
    hot.forEach((rect) => rect.classList.add("hot"));
    tip.hidden = !say;
    if (!say) return;
    tip.replaceChildren(...say().map((line, i) => {
      const part = document.createElement(i ? "div" : "b");
      part.textContent = line;
      return part;
    }));
    const right = event.clientX + 16 + tip.offsetWidth < innerWidth;
    const below = event.clientY + 16 + tip.offsetHeight < innerHeight;
    tip.style.left = `${right ? event.clientX + 16 : event.clientX - 12 - tip.offsetWidth}px`;
    tip.style.top = `${below ? event.clientY + 16 : event.clientY - 12 - tip.offsetHeight}px`;
  };

  const plots = [...document.querySelectorAll(".plot")];
  const cursors = plots.map((plot) => {
    const line = document.createElement("div");
    line.className = "cursor";
    line.hidden = true;
    plot.append(line);
    return line;
  });
  let band = null;
  let from = 0;
  plots.forEach((plot) => {
    const at = (event) => {
      const box = plot.getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      return [share * box.width, view[0] + share * (view[1] - view[0])];
    };
    plot.addEventListener("pointermove", (event) => {
      const [x] = at(event);
      cursors.forEach((line) => { line.hidden = false; line.style.left = `${x}px`; });
      if (band) {
        band.style.left = `${Math.min(x, from)}px`;
        band.style.width = `${Math.abs(x - from)}px`;
        tip.hidden = true;
      } else point(event);
    });
    plot.addEventListener("pointerleave", () => {
      cursors.forEach((line) => { line.hidden = true; });
      tip.hidden = true;
    });
    plot.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      [from] = at(event);
      band = document.createElement("div");
      band.className = "band";
      plot.append(band);
      plot.setPointerCapture(event.pointerId);
    });
    plot.addEventListener("pointerup", (event) => {
      if (!band) return;
      band.remove();
      band = null;
      const [to] = at(event);
      const width = plot.clientWidth;
      if (Math.abs(to - from) < 5) return;
      const unit = (x) => view[0] + (x / width) * (view[1] - view[0]);
      zoom(unit(Math.min(from, to)), unit(Math.max(from, to)));
    });
    plot.addEventListener("dblclick", () => zoom(0, data.units));
    plot.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoomBy(event.deltaY < 0 ? 0.8 : 1.25, at(event)[1]);
    }, { passive: false });
  });
  addEventListener("resize", draw);
  draw();
})();
