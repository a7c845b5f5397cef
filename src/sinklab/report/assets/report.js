// The script of a sinklab page: draws the sink map, the panel of a head and the figures from the data inside this file.
// Nothing is fetched. Text enters the page through textContent only.
(() => {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const root = document.documentElement;
  const painters = []; // redrawn when the theme or the width changes

  // ---------------------------------------------------------------- elements and words
  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    set(node, attributes);
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }
  function svg(tag, attributes = {}, ...children) {
    const node = document.createElementNS(SVG, tag);
    set(node, attributes);
    node.append(...children);
    return node;
  }
  function set(node, attributes) {
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (name === "text") node.textContent = value;
      else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value === true ? "" : value);
    }
  }
  function fmt(value, digits = 3) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e6) digits = 1;
    if (value === 0) return "0";
    if (size >= 1e6 || size < 1e-3) return value.toExponential(digits - 1).replace(/-/g, "\u2212");
    const places = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
    const [whole, part] = value.toFixed(places).split(".");
    return (whole.replace(/\B(?=(\d{3})+$)/g, ",") + (part ? "." + part : "")).replace("-", "\u2212");
  }
  // Axis labels: as few digits as are true.
  const tick = (value) => (value === 0 ? "0" : fmt(Number(value.toPrecision(3)), 3).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, ""));
  const percent = (value) => (value === null ? "–" : `${value.toFixed(Math.abs(value) < 1 && value !== 0 ? 2 : value === 100 || value === 0 ? 0 : 1)}\u202f%`);
  const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
  // Byte-level and SentencePiece marks of a space become spaces; what cannot be seen gets a sign that can.
  function visible(token) {
    const marks = { "Ġ": " ", "▁": " ", "Ċ": "↵", "\n": "↵", "\r": "\\r", "ĉ": "⇥", "\t": "⇥" };
    return [...token].map((letter) => marks[letter] ?? (/[\p{C}]/u.test(letter) ? "�" : letter)).join("");
  }

  // ---------------------------------------------------------------- colour: equal steps of OKLab lightness
  // Hue and chroma depend on lightness alone, so the ramp of the dark theme is that of the light theme, walked from its dark end.
  function oklch(lightness, chroma, hue) {
    const a0 = Math.cos((hue * Math.PI) / 180), b0 = Math.sin((hue * Math.PI) / 180);
    for (let c = chroma; ; c *= 0.94) {
      const a = c * a0, b = c * b0;
      const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
      const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
      const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
      const linear = [
        4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
        -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
        -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
      ];
      if (c < 1e-4 || linear.every((x) => x >= -1e-4 && x <= 1.0001)) {
        return linear.map((x) => {
          const y = Math.min(1, Math.max(0, x));
          return Math.round(255 * (y <= 0.0031308 ? 12.92 * y : 1.055 * y ** (1 / 2.4) - 0.055));
        });
      }
    }
  }
  function between(stops, at) {
    for (let i = 1; i < stops.length; i++) {
      if (at <= stops[i][0] || i === stops.length - 1) {
        const [x0, ...y0] = stops[i - 1], [x1, ...y1] = stops[i];
        const t = Math.min(1, Math.max(0, (at - x0) / (x1 - x0)));
        return y0.map((y, k) => y + t * (y1[k] - y));
      }
    }
  }
  const HUES = { // lightness → chroma, hue (hues run past 360 to stay monotone)
    warm: [[0.2, 0.05, 300], [0.35, 0.14, 325], [0.5, 0.19, 360], [0.66, 0.17, 395], [0.82, 0.12, 430], [0.97, 0.015, 455]],
    cool: [[0.2, 0.035, 275], [0.4, 0.1, 262], [0.6, 0.11, 235], [0.8, 0.08, 200], [0.97, 0.012, 170]],
  };
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  let ramps = {};
  function makeRamps() {
    const [from, to] = dark() ? [0.215, 0.9] : [0.965, 0.27];
    ramps = {};
    for (const [name, stops] of Object.entries(HUES)) {
      ramps[name] = Array.from({ length: 256 }, (_, i) => {
        const lightness = from + ((to - from) * i) / 255;
        return oklch(lightness, ...between(stops, lightness));
      });
    }
  }
  const shade = (ramp, t) => ramps[ramp][Math.round(255 * Math.min(1, Math.max(0, t)))];
  const css = (rgb) => `rgb(${rgb.join(" ")})`;
  const luminance = (rgb) => rgb.reduce((sum, x, i) => sum + [0.2126, 0.7152, 0.0722][i] * (x / 255 <= 0.04045 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4), 0);
  // Whichever of near-black and near-white has the higher contrast ratio on this colour.
  const inkOn = (rgb) => (1.05 / (luminance(rgb) + 0.05) > (luminance(rgb) + 0.05) / 0.0576 ? "#fff" : "#15181c");

  function legend(ramp, ticks, unit = "") {
    const canvas = el("canvas", { width: 256, height: 1, "aria-hidden": "true" });
    const row = el("div", { class: "ticks" });
    const paint = () => {
      const context = canvas.getContext("2d");
      for (let x = 0; x < 256; x++) {
        context.fillStyle = css(ramps[ramp][x]);
        context.fillRect(x, 0, 1, 1);
      }
    };
    const relabel = (list) => row.replaceChildren(...list.map(([at, text]) => {
      const span = el("span", { text });
      span.style.left = `${100 * at}%`;
      return span;
    }));
    relabel(ticks);
    paint();
    return { node: el("div", { class: "legend" }, unit ? el("div", { text: unit }) : null, canvas, row), paint, relabel };
  }

  // ---------------------------------------------------------------- packed arrays
  async function inflate(id) {
    const binary = atob($(id).textContent.trim());
    const bytes = Uint8Array.from(binary, (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }
  async function unsigned(prefix, name) {
    const spec = data.arrays?.[name];
    if (!spec) return null;
    const bytes = await inflate(prefix + name);
    const codes = new DataView(bytes.buffer, bytes.byteOffset);
    const values = new Float32Array(bytes.length / 2);
    for (let i = 0; i < values.length; i++) {
      const code = codes.getUint16(2 * i, true);
      values[i] = code === 65535 ? NaN : (code / 65534) * spec.scale;
    }
    const [, heads, bins] = spec.shape;
    return { of: (row, head) => values.subarray((row * heads + head) * bins, (row * heads + head + 1) * bins) };
  }

  // ---------------------------------------------------------------- tooltip
  const tip = $("tip");
  function showTip(text, x, y) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - box.width - 6))}px`;
    tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18}px`;
  }
  const hideTip = () => { tip.hidden = true; };
  addEventListener("scroll", hideTip, { passive: true });
  addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

  // ---------------------------------------------------------------- theme
  const themeButton = $("theme");
  function stored(value) { // a file opened from a disk may have no storage; then the choice lasts as long as the page
    try {
      if (value === undefined) return localStorage.getItem("sinklab-theme");
      localStorage.setItem("sinklab-theme", value);
    } catch (error) { if (!(error instanceof DOMException)) throw error; }
    return null;
  }
  function repaint() {
    makeRamps();
    themeButton.textContent = dark() ? "Light" : "Dark";
    themeButton.setAttribute("aria-label", dark() ? "Switch to the light theme" : "Switch to the dark theme");
    themeButton.setAttribute("aria-pressed", String(dark()));
    for (const paint of painters) paint();
  }
  // In a notebook the page is as dark as what is around its frame, which a notebook's theme sets and the system's does not.
  function surroundings() {
    for (let node = window.frameElement; node; node = node.parentElement) {
      const colour = node.ownerDocument.defaultView.getComputedStyle(node).backgroundColor;
      const [red, green, blue, opacity = 1] = colour.match(/[\d.]+/g).map(Number);
      if (colour.startsWith("rgb") && opacity > 0.5) return luminance([red, green, blue]) < 0.2 ? "dark" : "light";
    }
    return null;
  }
  const framed = self !== top;
  const saved = framed ? surroundings() : stored();
  if (saved === "dark" || saved === "light") root.dataset.theme = saved;
  if (framed && window.frameElement) {
    const follow = () => { const theme = surroundings(); if (theme && theme !== root.dataset.theme) { root.dataset.theme = theme; repaint(); } };
    new MutationObserver(follow).observe(window.frameElement.ownerDocument.body, { attributes: true });
  }
  themeButton.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    if (!framed) stored(root.dataset.theme);
    repaint();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  let beforePrint = null;
  addEventListener("beforeprint", () => { beforePrint = root.dataset.theme ?? ""; root.dataset.theme = "light"; repaint(); });
  addEventListener("afterprint", () => { if (beforePrint) root.dataset.theme = beforePrint; else delete root.dataset.theme; repaint(); });

  // ---------------------------------------------------------------- line charts
  function niceTicks(low, high, count) {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
    const ticks = [];
    for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + 1e-9 * step; t += step) ticks.push(Math.abs(t) < step / 1e6 ? 0 : t);
    return ticks;
  }
  function logTicks(low, high) {
    const all = [];
    for (let e = Math.floor(Math.log10(low)) - 1; e <= Math.ceil(Math.log10(high)); e++) for (const m of [1, 2, 5]) all.push(m * 10 ** e);
    let inside = all.filter((t) => t >= low * 0.999 && t <= high * 1.001);
    if (inside.length > 5) inside = inside.filter((t) => /^1(e|0*$|\.0*$)/.test(String(t)) || /^(0\.0*1)$/.test(String(t)));
    return inside.length > 1 ? inside : [low, high];
  }
  // Where there are more audits than colours, the colours come again, each time with another dash (r1, r2, … of the style).
  const look = (s) => `k-${s.kind}${s.round ? ` r${s.round}` : ""}`;
  const swatchOf = (s) => el("i", { class: `swatch ${look(s)}`, "aria-hidden": "true" });
  // figure: {title, axis, across, caption?, labels, series: [{name, kind, y, round?}], keys?: false where another legend has them, log?, threshold?, area?, tip?: i => text, height?, zoom?: not from 0,
  // xs?: where the labels stand on the axis, and points that are null are passed over}
  function chart(host, figure) {
    const values = figure.series.flatMap((s) => s.y).filter((y) => y !== null && Number.isFinite(y));
    const keys = el("div", { class: "keys" });
    for (const s of figure.series) {
      if (figure.series.length < 2 || figure.keys === false) break;
      keys.append(el("span", {}, swatchOf(s), s.name));
    }
    const holder = el("div");
    const node = el("figure", { class: "figure" }, el("h3", { text: figure.title }));
    host.append(node);
    if (!values.length) {
      node.append(el("p", { class: "missing", text: "Not measured in this audit." }));
      return node;
    }
    node.append(el("div", { class: "axis-name", text: figure.axis }), ...(figure.keys === false ? [] : [keys]), holder);
    if (figure.caption) node.append(el("p", { class: "caption", text: figure.caption }));
    let current = null;
    const paint = () => {
      const width = Math.max(180, holder.clientWidth || 320), height = (figure.height ?? 150) + 14;
      const left = 42, right = 8, top = 10, bottom = 36;
      let low = Math.min(...values), high = Math.max(...values);
      if (figure.log) { low /= 1.15; high *= 1.15; }
      else {
        if (figure.threshold !== undefined) high = Math.max(high, figure.threshold * 1.08);
        if (figure.zoom) low -= (high - low) * 0.06;
        else low = Math.min(0, low);
        high = high === low ? low + 1 : high + (high - low) * 0.04;
      }
      const scale = figure.log ? (v) => Math.log(v / low) / Math.log(high / low) : (v) => (v - low) / (high - low);
      const count = figure.labels.length;
      const xs = figure.xs ?? figure.labels.map((_, i) => i);
      const x = (i) => left + (count === 1 ? 0.5 : (xs[i] - xs[0]) / (xs[count - 1] - xs[0])) * (width - left - right);
      const nearest = (at) => xs.reduce((best, _, i) => (Math.abs(x(i) - at) < Math.abs(x(best) - at) ? i : best), 0);
      const y = (v) => top + (1 - scale(v)) * (height - top - bottom);
      const ticks = figure.log ? logTicks(low, high) : niceTicks(low, high, height > 200 ? 5 : 3);
      const picture = svg("svg", {
        width, height, viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0",
        "aria-label": `${figure.title}, ${figure.axis}. ` + figure.series.map((s) => {
          const known = s.y.filter((v) => v !== null && Number.isFinite(v));
          return `${s.name}: from ${fmt(Math.min(...known))} to ${fmt(Math.max(...known))}`;
        }).join("; ") + ". Arrow keys read single values.",
      });
      for (const t of ticks) {
        picture.append(svg("line", { class: t === 0 ? "base" : "gridline", x1: left, x2: width - right, y1: y(t), y2: y(t) }));
        picture.append(svg("text", { x: left - 7, y: y(t) + 4, "text-anchor": "end", text: tick(t) }));
      }
      if (figure.xs) {
        for (const t of niceTicks(xs[0], Math.max(xs[count - 1], xs[0] + 1), Math.min(6, Math.floor(width / 70)))) {
          picture.append(svg("text", { x: left + ((t - xs[0]) / (xs[count - 1] - xs[0] || 1)) * (width - left - right), y: height - 20, "text-anchor": "middle", text: tick(t) }));
        }
      } else {
        const room = count / Math.max(2, Math.floor((width - left) / 34));
        const every = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((step) => step >= room) ?? Math.ceil(room);
        figure.labels.forEach((label, i) => {
          if (i % every === 0) picture.append(svg("text", { x: x(i), y: height - 20, "text-anchor": "middle", text: label }));
        });
      }
      picture.append(svg("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle", text: figure.across }));
      if (figure.threshold !== undefined) {
        picture.append(svg("line", { class: "threshold", x1: left, x2: width - right, y1: y(figure.threshold), y2: y(figure.threshold) }));
        picture.append(svg("text", { x: width - right, y: y(figure.threshold) - 5, "text-anchor": "end", text: figure.thresholdName ?? `threshold ${tick(figure.threshold)}` }));
      }
      for (const s of [...figure.series].reverse()) {
        const runs = []; // of known points: a gap ends one, unless the points have places of their own on the axis
        let open = false;
        s.y.forEach((v, i) => {
          const known = v !== null && Number.isFinite(v);
          if (known && open) runs.at(-1).push(i);
          else if (known) runs.push([i]);
          open = known || (open && Boolean(figure.xs));
        });
        const along = (run) => "M" + run.map((i) => `${x(i).toFixed(1)} ${y(s.y[i]).toFixed(1)}`).join("L");
        // The area ends where its run does: what was not measured has none.
        if (figure.area) picture.append(svg("path", { class: `area k-${s.kind}`, d: runs.map((run) => `${along(run)}L${x(run.at(-1)).toFixed(1)} ${y(0).toFixed(1)}L${x(run[0]).toFixed(1)} ${y(0).toFixed(1)}Z`).join("") }));
        picture.append(svg("path", { class: `line ${look(s)}`, d: runs.map(along).join("") }));
        // A point between two gaps has neither a line nor an area.
        if (count > 40 || figure.area) for (const [i] of runs.filter((run) => run.length === 1)) picture.append(svg("circle", { class: look(s), cx: x(i), cy: y(s.y[i]), r: 1.6 }));
        if (count <= 40 && !figure.area) s.y.forEach((v, i) => {
          if (v !== null) picture.append(svg("circle", { class: look(s), cx: x(i), cy: y(v), r: count > 20 ? 1.6 : 2.3 }));
        });
      }
      const cursor = svg("g");
      picture.append(cursor);
      const show = (i, clientX, clientY) => {
        current = Math.max(0, Math.min(count - 1, i));
        cursor.replaceChildren(svg("line", { class: "cursor", x1: x(current), x2: x(current), y1: top, y2: height - bottom }));
        for (const s of figure.series) {
          const v = s.y[current];
          if (v !== null && Number.isFinite(v)) cursor.append(svg("circle", { class: `k-${s.kind}`, cx: x(current), cy: y(v), r: 3.6 }));
        }
        const words = figure.tip ? figure.tip(current) : `layer ${figure.labels[current] === "in" ? "input (embeddings)" : figure.labels[current]}`;
        showTip(`${words}\n` + figure.series.map((s) => `${figure.series.length > 1 ? s.name + ": " : ""}${fmt(s.y[current])}`).join("\n"), clientX, clientY);
      };
      const leave = () => { cursor.replaceChildren(); hideTip(); };
      picture.addEventListener("pointermove", (event) => {
        const box = picture.getBoundingClientRect();
        show(nearest(event.clientX - box.left), event.clientX, event.clientY);
      });
      picture.addEventListener("pointerleave", leave);
      picture.addEventListener("blur", leave);
      picture.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!step) return;
        event.preventDefault();
        const box = picture.getBoundingClientRect(), next = (current ?? (step > 0 ? -1 : count)) + step;
        show(next, box.left + x(Math.max(0, Math.min(count - 1, next))), box.top + height / 2);
      });
      holder.replaceChildren(picture);
    };
    paint();
    const watch = new ResizeObserver(() => { if (holder.isConnected && Math.abs((holder.firstChild?.clientWidth ?? 0) - holder.clientWidth) > 1) paint(); });
    watch.observe(holder);
    return node;
  }

  // One legend for figures of the same lines, in front of them.
  function figures(host, drawn, lines) {
    if (lines.length > 1) host.append(el("div", { class: "keys shared" }, ...lines.map((s) => el("span", {}, swatchOf(s), s.name))));
    for (const figure of drawn) chart(host, { ...figure, keys: false });
  }

  // ---------------------------------------------------------------- the grid of heads: layers from left to right
  // source: {grid, heads, value(row, head), words(row, head)}; onselect makes it a control, else it is a picture.
  function headGrid(host, source, { onselect = null, label }) {
    const { grid, heads } = source;
    const box = el("div", { class: "grid-scroll" });
    const table = el("div", { class: "grid", role: "grid", "aria-label": label, "aria-rowcount": heads, "aria-colcount": grid.length });
    const cells = [];
    let focus = [0, 0], selected = null;
    const topBars = el("div", { role: "presentation" });
    topBars.style.display = "contents";
    table.append(topBars);
    for (let head = 0; head < heads; head++) {
      const line = el("div", { role: "row", "aria-label": `Head ${head}` }, el("div", { class: "axis head", "aria-hidden": "true" }));
      cells.push(grid.map((_, row) => {
        const cell = el("div", { class: "cell", role: "gridcell", tabindex: "-1", "data-row": row, "data-head": head });
        line.append(cell);
        return cell;
      }));
      table.append(line);
    }
    const foot = el("div", { role: "presentation" });
    foot.style.display = "contents";
    table.append(foot);
    box.append(table);
    host.append(box);
    host.append(el("p", { class: "axis-title", text: `Layers from left to right, heads from top to bottom${grid.length > 1 ? "; bars above: mean of each layer" : ""}.` }));
    const paint = () => {
      const space = (host.clientWidth || 900) - 40;
      const width = Math.max(6, Math.min(76, Math.floor(space / grid.length) - 2));
      const height = Math.max(11, Math.min(44, width, Math.floor(500 / heads)));
      table.style.gridTemplateColumns = `34px repeat(${grid.length}, ${width}px)`;
      table.style.gridAutoRows = "auto";
      const means = grid.map((_, row) => {
        const known = cells.map((_, head) => source.value(row, head)).filter((v) => v !== null);
        return known.length ? known.reduce((a, b) => a + b, 0) / known.length : 0;
      });
      topBars.replaceChildren(el("div"), ...means.map((mean, row) => {
        const bar = el("i");
        bar.style.height = `${mean ? Math.max(1, 0.35 * mean) : 0}px`;
        const wrap = el("div", { class: "margin-bar", "aria-hidden": "true" }, bar);
        wrap.addEventListener("pointermove", (event) => showTip(`layer ${grid[row].label}: ${source.mean?.(mean) ?? percent(mean)} on average`, event.clientX, event.clientY));
        wrap.addEventListener("pointerleave", hideTip);
        return wrap;
      }));
      const headEvery = Math.ceil(13 / (height + 2)), layerEvery = Math.ceil((6 + 7 * Math.max(2, ...grid.map((g) => g.label.length))) / (width + 2));
      cells.forEach((line, head) => {
        line[0].previousSibling.textContent = head % headEvery === 0 ? head : "";
        line.forEach((cell, row) => {
          const value = source.value(row, head);
          cell.style.width = `${width}px`;
          cell.style.height = `${height}px`;
          cell.classList.toggle("none", value === null);
          cell.setAttribute("aria-label", value === null ? `Layer ${grid[row].label}, head ${head}: not measured` : `Layer ${grid[row].label}, head ${head}: ${source.words(row, head)}`);
          if (value === null) { cell.style.background = ""; cell.textContent = ""; return; }
          const colour = shade("warm", value / 100);
          cell.style.background = css(colour);
          cell.style.color = inkOn(colour);
          cell.textContent = width >= 34 && height >= 18 ? source.text?.(row, head) ?? `${Math.round(value)}` : "";
        });
      });
      foot.replaceChildren(el("div"), ...grid.map((g, row) => {
        const mark = el("div", { class: "axis", "aria-hidden": "true", text: row % layerEvery === 0 ? g.label.split(".").slice(-3).join(".") : "" });
        mark.style.height = "18px";
        return mark;
      }));
    };
    const point = (cell, event) => {
      const at = event ? [event.clientX, event.clientY] : [cell.getBoundingClientRect().right, cell.getBoundingClientRect().bottom];
      showTip(cell.getAttribute("aria-label").replace(": ", "\n"), ...at);
    };
    const place = (target) => { const cell = target.closest?.(".cell"); return cell ? [Number(cell.dataset.row), Number(cell.dataset.head)] : null; };
    table.addEventListener("pointermove", (event) => { const at = place(event.target); if (at) point(cells[at[1]][at[0]], event); });
    table.addEventListener("pointerleave", hideTip);
    table.addEventListener("focusout", hideTip);
    const rove = (row, head, move) => {
      cells[focus[1]][focus[0]].tabIndex = -1;
      focus = [row, head];
      const cell = cells[head][row];
      cell.tabIndex = 0;
      if (move) { cell.focus(); point(cell); }
    };
    const select = (row, head, told = true) => {
      if (selected) cells[selected[1]][selected[0]].removeAttribute("aria-selected");
      selected = [row, head];
      cells[head][row].setAttribute("aria-selected", "true");
      rove(row, head, false);
      if (told && onselect) onselect(row, head);
    };
    table.addEventListener("click", (event) => { const at = place(event.target); if (at && onselect) select(...at); });
    table.addEventListener("keydown", (event) => {
      let [row, head] = focus;
      const last = grid.length - 1;
      switch (event.key) {
        case "ArrowLeft": row = Math.max(0, row - 1); break;
        case "ArrowRight": row = Math.min(last, row + 1); break;
        case "ArrowUp": head = Math.max(0, head - 1); break;
        case "ArrowDown": head = Math.min(heads - 1, head + 1); break;
        case "Home": row = 0; if (event.ctrlKey) head = 0; break;
        case "End": row = last; if (event.ctrlKey) head = heads - 1; break;
        case "Enter": case " ": event.preventDefault(); if (onselect) select(row, head); return;
        default: return;
      }
      event.preventDefault();
      rove(row, head, true);
    });
    cells[0][0].tabIndex = 0;
    paint();
    let known = host.clientWidth;
    new ResizeObserver(() => { if (host.clientWidth !== known) { known = host.clientWidth; paint(); } }).observe(host);
    return { paint, select };
  }

  // ---------------------------------------------------------------- one attention map
  function mapView(title, note, ramp) {
    const canvas = el("canvas", { "aria-hidden": "true" });
    const rowBand = el("div", { class: "band row", hidden: true }), columnBand = el("div", { class: "band column", hidden: true });
    const box = el("div", { class: "map-box", tabindex: "0", role: "application", "aria-label": `${title}. Arrow keys read single values.` }, canvas, rowBand, columnBand);
    const ticksX = el("div", { class: "ticks-x", "aria-hidden": "true" }), ticksY = el("div", { class: "ticks-y", "aria-hidden": "true" });
    const key = legend(ramp, []);
    const node = el("figure", { class: "map-figure" },
      el("figcaption", {}, el("h3", {}, title, el("span", { text: note })), key.node),
      el("div", { class: "map-frame" }, ticksY, box, ticksX),
      el("div", { class: "map-note", "aria-hidden": "true" }, el("span", { text: "keys →" }), el("span", { text: "queries ↓" })));
    return {
      node, box, key,
      // colour(r, c): rgb, or null for a tile that no query sees; texts: of the keys and of the queries, written where there is room
      draw(rows, columns, colour, seqLen, tile, texts = [[], []]) {
        canvas.width = columns; canvas.height = rows;
        const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
        for (let i = 0; i < rows * columns; i++) {
          const rgb = colour(i);
          if (rgb) image.data.set([...rgb, 255], 4 * i);
        }
        context.putImageData(image, 0, 0);
        const ticks = niceTicks(0, seqLen - 1, 4).filter((t) => Number.isInteger(t)), frame = box.parentNode;
        const room = ((frame.clientWidth || 0) - 92) / Math.max(rows, columns), written = tile === 1 && room >= 8.5 && texts.every((side) => side.length);
        frame.classList.toggle("written", written);
        frame.style.setProperty("--label", `${Math.min(12, Math.floor(room))}px`);
        for (const [host, count, side, labels] of [[ticksX, columns, "left", texts[0]], [ticksY, rows, "top", texts[1]]]) {
          const places = written ? labels.slice(0, count).map((_, i) => i) : ticks;
          host.replaceChildren(...places.map((t) => {
            const span = el("span", { text: written ? visible(labels[t]).replace(/^(corner )?patch /, "") : String(t) });
            span.style[side] = `${(100 * (t / tile + 0.5 / tile * (tile > 1 ? 0 : 1))) / count}%`;
            return span;
          }));
        }
        for (const band of [rowBand, columnBand]) band.hidden = true;
      },
      mark(row, column, rows, columns) {
        rowBand.hidden = row === null;
        columnBand.hidden = column === null;
        if (row !== null) { rowBand.style.top = `${(100 * row) / rows}%`; rowBand.style.height = `${100 / rows}%`; }
        if (column !== null) { columnBand.style.left = `${(100 * column) / columns}%`; columnBand.style.width = `${100 / columns}%`; }
      },
    };
  }

  // ---------------------------------------------------------------- the report
  async function report() {
    if (data.grid.length && data.heads) await perHead();
    else $("grid-host").append(el("p", { class: "missing", text: "No per-head numbers were measured in this audit." }));
    if (data.positionRate) {
      chart($("profile"), {
        title: "Sink rate of every position", axis: "percent of samples × layers × heads", across: "key position", height: 170, area: true,
        labels: data.bins.map(([begin]) => String(begin)), series: data.positionRate,
        tip: (i) => binName(data.bins[i]),
        // Where every query sees every key, as in an encoder, the last positions count like all others.
        caption: Math.max(...data.candidates) < data.bins.at(-1)[1] || data.positionRate.length > 1
          ? "The last positions of a causal text are seen by few queries, their own among them; a high rate at the very end is not a sink." : undefined,
      });
    } else $("profile").append(el("p", { class: "missing", text: "The sink rate was not measured per position." }));
    for (const figure of data.figures) chart($("figures"), figure);
  }

  const binName = ([start, stop]) => (stop - start === 1 ? `position ${start}` : `positions ${start}–${stop - 1}, the largest`);

  const single = data.page === "heads"; // one text, or what a session saw, and not the samples of an audit
  async function perHead() {
    const received = await unsigned("blob-", "received");
    // Of one text, what is drawn is the weight itself.
    const rate = single ? received && { of: (row, head) => received.of(row, head).map((v) => 100 * v) } : await unsigned("blob-", "rate");
    const { grid, heads, bins } = data;
    const binOf = (position) => bins.findIndex(([start, stop]) => position >= start && position < stop);

    // The sink map.
    // A place is a position, null for any position, or "s0": the first sink, which is a token or the null score.
    const keyOf = (sink, index) => sink.position ?? `s${index}`, sinkOf = (place) => data.sinks.find((sink, index) => keyOf(sink, index) === place);
    let chosen = data.sinks.length ? keyOf(data.sinks[0], 0) : single && !rate ? "m0" : 0;
    const measure = () => (String(chosen).startsWith("m") ? data.headNumbers[Number(chosen.slice(1))] : null);
    const bounds = (of) => { const known = of.values.flat().filter((v) => v !== null); return [Math.min(...known), Math.max(...known)]; };
    function scaled(value) {
      const [low, high] = bounds(measure());
      return value === null || value === undefined ? null : high > low ? (100 * (value - low)) / (high - low) : 50;
    }
    // Of each row, the groups with a position that half of the queries see: only there can a sink be.
    const candidates = data.candidates.map((count) => bins.filter(([start]) => start < count).length);
    const rateAt = (row, head, position) => {
      if (typeof position === "string") return sinkOf(position).rates[row][head];
      if (!rate) return null;
      const list = rate.of(row, head);
      let value;
      if (position !== null) value = list[binOf(position)];
      else value = Math.max(...Array.from(list.subarray(0, candidates[row]), (v) => (Number.isNaN(v) ? -1 : v)));
      return value === undefined || Number.isNaN(value) || value < 0 ? null : value;
    };
    const where = () => (chosen === null ? "some position" : sinkOf(chosen)?.name ?? `position ${chosen}`);
    const source = { grid, heads, value: (row, head) => (measure() ? scaled(measure().values[row]?.[head]) : rateAt(row, head, chosen)), words: (row, head) => {
      if (measure()) return `${measure().label.toLowerCase()} ${fmt(measure().values[row][head])} ${measure().unit}`.trim();
      if (single) return `${chosen === null ? "one position gets" : `${where()} gets`} ${percent(rateAt(row, head, chosen))} of its attention`;
      const mean = received && typeof chosen === "number" ? received.of(row, head)[binOf(chosen)] : NaN;
      if (chosen >= data.candidates[row]) return `${where()} gets more than ${data.threshold} in ${percent(rateAt(row, head, chosen))} of samples, of too few queries to count`;
      return `sinks at ${where()} in ${percent(rateAt(row, head, chosen))} of samples${Number.isNaN(mean) ? "" : `; mean weight ${fmt(mean)}`}`;
    } };
    source.text = (row, head) => (measure() ? fmt(measure().values[row][head], 2) : undefined);
    source.mean = (mean) => { if (!measure()) return undefined; const [low, high] = bounds(measure()); return fmt(low + (mean / 100) * (high - low)); };
    let view = null;
    const tools = $("grid-tools");
    if (rate || (single && data.headNumbers.length)) {
      const options = !rate ? [] : [...new Set([...data.sinks.map(keyOf), 0])].map((position) => {
        const sink = sinkOf(position);
        const token = sink?.token && !sink.name ? ` · “${visible(sink.token).slice(0, 24)}”` : "";
        return el("option", { value: position, text: `${sink?.name ?? `position ${position}`}${token}${sink ? ` · ${percent(sink.rate)}` : ""}` });
      });
      const measures = single ? data.headNumbers.map((entry, i) => el("option", { value: `m${i}`, text: [entry.label, entry.unit].filter(Boolean).join(", ") })) : [];
      const picker = el("select", { id: "position" }, ...options, rate ? el("option", { value: "any", text: "any position: the largest" }) : null, ...measures);
      const hundred = [[0, "0"], [0.25, "25"], [0.5, "50"], [0.75, "75"], [1, "100"]];
      const key = legend("warm", hundred, single ? "percent of a head’s attention" : "percent of samples");
      const relabel = () => {
        if (!single) return;
        key.node.firstChild.textContent = measure() ? measure().label.toLowerCase() : "percent of a head’s attention";
        key.relabel(measure() ? bounds(measure()).map((v, i) => [i, fmt(v)]) : hundred);
      };
      relabel();
      picker.addEventListener("change", () => { chosen = picker.value === "any" ? null : /^[sm]/.test(picker.value) ? picker.value : Number(picker.value); relabel(); view.paint(); });
      painters.push(key.paint);
      tools.append(el("label", {}, single ? "Colour" : "Sink at", picker), key.node);
    } else {
      tools.append(el("p", { class: "missing", text: "The sink rate was not measured per head; the squares still open the heads." }));
    }

    // In an address a head is called by its layer or, where several columns have that number, by the label of its column.
    const shared = (layer) => grid.filter((g) => g.layer === layer).length > 1;
    const nameOfRow = (row) => (shared(grid[row].layer) ? encodeURIComponent(grid[row].label.replaceAll(" ", "-")) : `layer-${grid[row].layer}`);
    const named = new Map(grid.map((_, row) => [nameOfRow(row), row]));

    // The panel.
    const panel = makePanel({ rate, received, rateAt, binOf });
    let opened = false;
    view = headGrid($("grid-host"), source, {
      label: "Sink map: one cell per layer and head",
      onselect(row, head) {
        panel.show(row, head);
        if (!framed) history.replaceState(null, "", `#${nameOfRow(row)}-head-${head}`); // a frame has no address of its own
        if (opened && $("panel").getBoundingClientRect().top > innerHeight * 0.8) $("panel").scrollIntoView({ block: "start" });
      },
    });
    painters.push(view.paint);
    const asked = /^#(.+)-head-(\d+)$/.exec(location.hash);
    // An address by a layer that is not unique leads to the first such column.
    const layer = /^layer-(-?\d+)$/.exec(asked?.[1] ?? "");
    let start = asked ? [named.get(asked[1]) ?? (layer ? grid.findIndex((g) => g.layer === Number(layer[1])) : -1), Number(asked[2])] : null;
    if (!start || start[0] < 0 || start[1] >= heads) {
      let best = [-1, 0, 0];
      for (let row = 0; row < grid.length; row++) for (let head = 0; head < heads; head++) {
        const value = source.value(row, head) ?? 0, weight = received && !measure() ? received.of(row, head)[binOf(chosen)] || 0 : 0;
        if (value + weight > best[0]) best = [value + weight, row, head];
      }
      start = best.slice(1);
    }
    view.select(start[0], start[1], false);
    await panel.show(...start);
    opened = true;
  }

  function makePanel({ rate, received, rateAt, binOf }) {
    const { grid, heads, bins, maps } = data;
    const body = $("panel-body");
    $("panel").hidden = false;
    let sample = 0, place = [0, 0], bytes = null, turn = 0, locked = null;
    const strip = el("div", { class: "strip", id: "strip", tabindex: "0", role: "region", "aria-label": "Tokens of the sample" });
    const stripWords = el("span");
    const readout = el("p", { class: "readout", id: "readout", "aria-live": "polite" });
    const scoresView = mapView("Scores", "before the softmax", "cool"), weightsView = mapView("Weights", "after the softmax; colour follows √weight", "warm");
    const numbers = el("dl", { class: "numbers", id: "numbers" });
    const curve = el("div", { id: "curve" });
    const idle = "Point at a map, or at a token, to read single values.";
    weightsView.key.relabel([[0, "0"], [Math.sqrt(0.1), ".1"], [Math.sqrt(0.3), ".3"], [1, "1"]]);

    if (maps) {
      const segments = el("div", { class: "segments" });
      for (let i = 0; i < maps.samples; i++) {
        const input = el("input", { type: "radio", name: "sample", value: i, id: `sample-${i}` });
        input.checked = i === 0;
        input.addEventListener("change", () => { sample = i; show(...place); });
        segments.append(el("label", {}, input, String(i + 1)));
      }
      body.append(el("fieldset", { id: "samples" }, el("legend", { text: "Sample" }), segments, el("span", { class: "hint", id: "map-words" })));
      body.append(maps.ranges ? el("div", { class: "pair" }, scoresView.node, weightsView.node) : weightsView.node, readout);
      if (!data.pictures || !single) (single ? $("text") : body).append(el("div", { class: "strip-head" }, el("h3", { text: data.sample === "text" ? "The sample as text" : "The positions of the sample" }), stripWords), strip);
      if (maps.reduced) body.append(el("p", { class: "hint", text: maps.reduced }));
    } else if (!single) body.append(el("p", { class: "missing", text: "No attention maps were recorded in this audit." }));
    if (!single || data.headNumbers.length) body.append(el("div", { class: "below" }, el("div", {}, curve), el("div", {}, el("h3", { text: "This head in numbers" }), numbers)));
    else if (received) $("map").append(curve);
    if (maps?.samples === 1) $("samples").firstChild.remove(), $("samples").firstChild.remove();

    // The keys of a decoder are tokens of the target; its queries, and those of cross-attention, too.
    const targetParts = { key: ["decoder"], query: ["decoder", "cross-attention"] };
    const isTarget = (kind) => targetParts[kind].includes(grid[place[0]].part);
    const tokens = (kind = "key") => (isTarget(kind) ? data.targets : data.tokens)[sample] ?? [];
    const tileRange = (t) => [t * maps.tile, Math.min(maps.seqLen, (t + 1) * maps.tile) - 1];
    const size = () => maps.rows * maps.columns;
    const weightAt = (r, c) => (bytes[place[1] * size() + r * maps.columns + c] / 255) ** 2;
    const codeAt = (r, c) => bytes[maps.heads * size() + place[1] * size() + r * maps.columns + c];
    function scoreAt(r, c) {
      if (!maps.ranges) return codeAt(r, c) === 0 ? null : NaN;
      const code = codeAt(r, c), [low, high] = maps.ranges[sample][maps.place[place[0]]][place[1]];
      return code === 0 ? null : low + ((code - 1) / 254) * (high - low);
    }
    const hasMap = () => maps && bytes;

    // Reading out: a query row, a key column, or one tile of both.
    function nameOf(kind, t) {
      const [first, last] = tileRange(t), texts = tokens(kind).slice(first, last + 1).map(visible);
      const words = el("span", { text: first === last ? `${kind} ${first}` : `${kind}s ${first}–${last}` });
      const shown = first === last ? texts[0] : texts.join("").slice(0, 24) + "…";
      return texts.length ? [words, " ", el("code", { class: "token", text: shown })] : [words];
    }
    function read(row, column) {
      for (const one of [scoresView, weightsView]) one.mark(row, column, maps.rows, maps.columns);
      if (row === null && column === null) { readout.textContent = idle; return paintStrip(null, null); }
      if (row !== null && column !== null) {
        const score = scoreAt(row, column), largest = maps.tile > 1 ? "largest " : "";
        readout.replaceChildren(...nameOf("query", row), " → ", ...nameOf("key", column), score === null
          ? " · the query does not see this key" : ` · ${largest}weight ${fmt(weightAt(row, column))}${maps.ranges ? ` · ${largest}score ${fmt(score)}` : ""}`);
      } else if (row !== null) {
        let best = 0;
        for (let c = 0; c < maps.columns; c++) if (weightAt(row, c) > weightAt(row, best)) best = c;
        readout.replaceChildren(...nameOf("query", row), " looks most at ", ...nameOf("key", best), ` · weight ${fmt(weightAt(row, best))}`);
      }
      paintStrip(row, column);
    }
    function wire(one) {
      let at = null;
      const cell = (event) => {
        const frame = one.box.getBoundingClientRect();
        const clamp = (v, n) => Math.max(0, Math.min(n - 1, Math.floor(v * n)));
        return [clamp((event.clientY - frame.top) / frame.height, maps.rows), clamp((event.clientX - frame.left) / frame.width, maps.columns)];
      };
      one.box.addEventListener("pointermove", (event) => { if (hasMap()) { at = cell(event); read(...at); } });
      one.box.addEventListener("pointerleave", () => { at = null; if (hasMap()) read(locked, null); });
      one.box.addEventListener("blur", () => { at = null; if (hasMap()) read(locked, null); });
      one.box.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
        if (!step || !hasMap()) return;
        event.preventDefault();
        at = at ? [at[0] + step[0], at[1] + step[1]] : [maps.rows - 1, 0];
        at = [Math.max(0, Math.min(maps.rows - 1, at[0])), Math.max(0, Math.min(maps.columns - 1, at[1]))];
        read(...at);
      });
    }

    // The text: colour is what each token receives, or, for a chosen query, the weights of that query.
    let spans = [], spanSample = null;
    function fillStrip() {
      const shown = `${sample} ${isTarget("key")}`;
      if (spanSample === shown) return;
      spanSample = shown;
      locked = null;
      spans = tokens().map((token, i) => el("span", { "data-i": i, text: visible(token) }));
      strip.replaceChildren(...spans);
      if (!spans.length) strip.textContent = "The tokens of this sample were not recorded.";
    }
    function paintStrip(row, column) {
      if (!spans.length) return;
      const exact = maps.tile === 1;
      const value = (i) => {
        if (row !== null) return weightAt(row, Math.floor(i / maps.tile));
        if (!exact) return received ? received.of(...place)[binOf(i)] : 0;
        let sum = 0, seen = 0;
        for (let r = 0; r < maps.rows; r++) if (codeAt(r, i) !== 0) { sum += weightAt(r, i); seen++; }
        return seen ? sum / seen : 0;
      };
      const values = spans.map((_, i) => Math.max(0, value(i) || 0));
      // The threshold is the least that fills the scale: in a head without a sink no token looks like one.
      const most = Math.max(data.threshold, ...values);
      stripWords.textContent = (row !== null
        ? `Colour: where ${maps.tile === 1 ? `query ${row}` : `queries ${tileRange(row).join("–")}`} look${maps.tile === 1 ? "s" : ""}`
        : `Colour: mean attention received${exact ? " in this sample" : single ? "" : " over all samples"}`) + `, darkest at ${fmt(most)}.`.replace("darkest", dark() ? "brightest" : "darkest");
      spans.forEach((span, i) => {
        const colour = shade("warm", values[i] / most);
        span.style.backgroundColor = css(colour);
        span.style.color = inkOn(colour);
        span.classList.toggle("on", (row !== null && Math.floor(i / maps.tile) === row) || (column !== null && Math.floor(i / maps.tile) === column));
      });
    }
    const spanIndex = (event) => { const i = event.target.dataset?.i; return i === undefined ? null : Math.floor(Number(i) / maps.tile); };
    strip.addEventListener("pointermove", (event) => { const row = spanIndex(event); if (row !== null && hasMap() && row < maps.rows) read(row, null); });
    strip.addEventListener("pointerleave", () => { if (hasMap()) read(locked, null); });
    strip.addEventListener("click", (event) => { const row = spanIndex(event); locked = row === locked ? null : row; if (hasMap()) read(locked, null); });

    function paintMaps() {
      if (!hasMap()) return;
      const { rows, columns, seqLen, tile } = maps, offset = place[1] * size(), scores = maps.heads * size();
      weightsView.draw(rows, columns, (i) => (bytes[scores + offset + i] === 0 ? null : ramps.warm[bytes[offset + i]]), seqLen, tile, single ? [tokens("key"), tokens("query")] : undefined);
      if (!maps.ranges) return read(locked, null);
      scoresView.draw(rows, columns, (i) => { const code = bytes[scores + offset + i]; return code === 0 ? null : ramps.cool[Math.round(((code - 1) / 254) * 255)]; }, seqLen, tile);
      const [low, high] = maps.ranges[sample][maps.place[place[0]]][place[1]];
      scoresView.key.relabel([[0, fmt(low, 2)], [1, fmt(high, 2)]]);
      read(locked, null);
    }

    // The place at which a head sinks most often: its own position, or several, or a token: no position by itself has it.
    function strongest(row, head) {
      const own = data.ownSink?.[row][head];
      // A position that too few queries see is none, whatever they give it.
      let found = { share: single ? NaN : rate && own >= data.candidates[row] ? 0 : rateAt(row, head, own), at: `position ${own}`, verb: "gets", weight: received ? received.of(row, head)[binOf(own)] : NaN };
      for (const sink of data.sinks) {
        const rate = Number.isInteger(sink.position) ? null : sink.rates?.[row]?.[head] ?? null;
        if (rate !== null && rate > (found.share ?? 0)) found = { share: rate, at: sink.name, verb: sink.kind === "group" ? "get" : "gets", weight: NaN };
      }
      return found;
    }

    function paintNumbers(row, head) {
      numbers.replaceChildren();
      const own = data.ownSink?.[row][head], most = strongest(row, head);
      const add = (label, value, note) => numbers.append(el("div", {}, el("dt", { text: label }), el("dd", {}, value, note ? el("small", { text: note }) : null)));
      if (rate && !single && (most.share > 0 || own < data.candidates[row])) add("Sink rate", percent(most.share), `of samples, at ${most.at}`);
      if (received) add("Mean weight", fmt(received.of(row, head)[binOf(own)]), `received by position ${own}`);
      for (const entry of data.headNumbers) {
        const value = entry.values[row]?.[head];
        if (value === null || value === undefined) continue;
        add(entry.label, entry.unit === "percent" ? percent(value) : fmt(value), [entry.unit === "percent" ? "" : entry.unit, entry.note].filter(Boolean).join(", "));
      }
      if (!numbers.children.length) numbers.append(el("p", { class: "missing", text: "Not measured in this audit." }));
    }

    async function show(row, head) {
      place = [row, head];
      const mine = ++turn;
      const name = `Layer ${grid[row].label}, head ${head}`;
      $("panel-title").textContent = name;
      const own = data.ownSink?.[row][head];
      if (single) $("panel-lead").textContent = received ? `Most on average to position ${own}${tokens()[own] === undefined ? "" : ` “${visible(tokens()[own]).slice(0, 24)}”`}: ${fmt(received.of(row, head)[binOf(own)])} of its attention.` : "";
      const { share, at, verb, weight } = strongest(row, head), gets = `${at} ${verb}`;
      if (!single) $("panel-lead").textContent = share === null ? "The sink rate of this head was not measured."
        : share >= 50 ? `A sink head: in ${percent(share)} of samples ${gets} more than ${data.threshold} of its attention${Number.isNaN(weight) ? "" : `, ${fmt(weight)} on average`}.`
        : share > 0 ? `Sometimes a sink head: in ${percent(share)} of samples ${gets} more than ${data.threshold} of its attention.`
        : !data.candidates[row] ? "No position can be a sink of this head: none is seen by half of the queries of these samples, as under a sliding window."
        : `Not a sink head: in no sample does any position get more than ${data.threshold} of its attention on average.`;
      curve.replaceChildren();
      if (received) {
        chart(curve, {
          title: "Attention received by each position", across: "key position", axis: `mean weight over the queries that see it${single ? "" : ", all samples"}`, height: single ? 150 : 210, area: true,
          labels: bins.map(([start]) => String(start)), threshold: data.threshold, tip: (i) => binName(bins[i]),
          series: [{ name: "mean weight", kind: "sink", y: Array.from(received.of(row, head), (v) => (Number.isNaN(v) ? null : v)) }],
        });
      } else if (!single) curve.append(el("h3", { text: "Attention received by each position" }), el("p", { class: "missing", text: "Not measured in this audit." }));
      paintNumbers(row, head);
      if (!maps) return;
      fillStrip();
      const module = maps.place[row], words = $("map-words");
      if (module < 0 || head >= maps.heads) {
        bytes = null;
        words.textContent = "No map was recorded for this head.";
        return;
      }
      const unpacked = await inflate(`blob-map-${sample}-${module}`);
      if (mine !== turn) return; // another head was chosen while this one was unpacked
      bytes = unpacked;
      words.textContent = maps.tile === 1 ? plural(maps.seqLen, data.sample === "text" ? "token" : "position")
        : `${fmt(maps.seqLen, 6)} ${data.sample === "text" ? "tokens" : "positions"}; each tile is the largest of ${maps.tile} × ${maps.tile}, so a one-pixel column survives`;
      paintMaps();
      $("panel").dataset.shown = `${sample}-${row}-${head}`;
    }

    if (maps) {
      wire(scoresView);
      wire(weightsView);
      painters.push(() => { scoresView.key.paint(); weightsView.key.paint(); paintMaps(); });
      let wide = 0;
      new ResizeObserver(() => { if (single && weightsView.node.clientWidth !== wide) { wide = weightsView.node.clientWidth; paintMaps(); } }).observe(weightsView.node);
    }
    return { show };
  }

  // ---------------------------------------------------------------- pictures, with what their patches receive
  function pictures() {
    const shown = data.pictures, [rows, columns] = shown.grid, first = shown.names.length - rows * columns;
    const layers = shown.received[0].length, heads = shown.received[0][0].length;
    const choice = (label, entries, value) => {
      const picker = el("select", {}, ...entries.map(([key, text]) => el("option", { value: key, text })));
      picker.value = value;
      picker.addEventListener("change", () => paint());
      return [picker, el("label", {}, label, picker)];
    };
    const range = (count) => [...Array(count).keys()];
    // The layer in which a sink of several positions gets the most, or else any position behind the first.
    const roles = shown.names.map((name) => /^(corner patch|register)/.test(name));
    const weight = (layer) => shown.received.flatMap((sample) => sample[layer]).reduce((sum, head) => sum + head.reduce((a, b, i) => a + (roles[i] ? b : 0), 0), 0);
    const best = range(layers).reduce((a, b) => (weight(b) > weight(a) ? b : a), 0);
    const [measure, measureLabel] = choice("Show", [["received", "attention received"], ...(shown.norms ? [["norms", "hidden norm"]] : []), ["none", "the picture"]], "received");
    const [layer, layerLabel] = choice("Layer", range(layers).map((i) => [String(i), String(i)]), String(best));
    const [head, headLabel] = choice("Head", [["mean", "mean of all"], ...(heads > 1 ? range(heads).map((i) => [String(i), String(i)]) : [])], "mean");
    $("picture-tools").append(measureLabel, layerLabel, headLabel);
    const values = (sample) => {
      const at = Number(layer.value);
      if (measure.value === "norms") return shown.norms[sample][Math.min(at + 1, shown.norms[sample].length - 1)];
      const all = shown.received[sample][at];
      return (head.value === "mean" ? shown.names.map((_, i) => all.reduce((sum, one) => sum + one[i], 0) / heads) : all[Number(head.value)]).map((v) => v / 1e4);
    };
    const words = (value) => (measure.value === "norms" ? fmt(value) : percent(100 * value));
    function paint() {
      const all = shown.images.map((_, sample) => values(sample)), most = Math.max(...all.flatMap((each) => each.slice(first)), 1e-9);
      head.disabled = measure.value !== "received";
      $("picture-host").replaceChildren(...shown.images.map((address, sample) => {
        const each = all[sample];
        const drawing = svg("svg", { viewBox: `0 0 ${columns} ${rows}`, role: "img" }, svg("image", { href: address, width: columns, height: rows, preserveAspectRatio: "none" }));
        for (let place = 0; place < rows * columns; place++) {
          const value = each[first + place], name = shown.names[first + place], x = place % columns, y = Math.floor(place / columns);
          if (measure.value !== "none") drawing.append(svg("rect", { x, y, width: 1, height: 1, fill: "#e8174b", "fill-opacity": (0.85 * Math.sqrt(Math.max(0, value) / most)).toFixed(3) }));
          if (measure.value !== "none" && roles[first + place]) drawing.append(svg("rect", { class: "role", x: x + 0.05, y: y + 0.05, width: 0.9, height: 0.9 }));
        }
        drawing.addEventListener("pointermove", (event) => {
          const box = drawing.getBoundingClientRect();
          const x = Math.min(columns - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * columns)));
          const y = Math.min(rows - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * rows)));
          const place = first + y * columns + x;
          showTip(`${shown.names[place]}\n${measure.value === "none" ? "" : words(each[place])}`, event.clientX, event.clientY);
        });
        drawing.addEventListener("pointerleave", hideTip);
        const of = (test) => each.filter((_, i) => test(shown.names[i]));
        const sum = (list) => list.reduce((a, b) => a + b, 0);
        const corners = of((name) => name.startsWith("corner")), front = shown.names.slice(0, first).map((name, i) => `${name} ${words(each[i])}`);
        const group = corners.length ? [measure.value === "norms" ? `corner patches ${words(sum(corners) / corners.length)} on average` : `corner patches ${words(sum(corners))} together`] : [];
        const said = measure.value === "none" ? "" : [...group, ...front.slice(0, 6)].join(", ");
        drawing.setAttribute("aria-label", `${shown.sources[sample]}. ${said}`);
        return el("figure", {}, drawing, el("figcaption", {}, el("b", { text: shown.sources[sample] }), said ? `: ${said}` : ""));
      }));
    }
    paint();
  }

  // ---------------------------------------------------------------- the comparison
  async function comparison() {
    const key = legend("warm", [[0, "0"], [0.25, "25"], [0.5, "50"], [0.75, "75"], [1, "100"]], "percent of samples");
    painters.push(key.paint);
    $("grid-tools").append(el("span", { text: "Each square is one head of the model above it, at its own strongest position." }), key.node);
    for (const audit of data.audits) {
      const holder = el("div"), block = el("div", {}, el("h3", {}, audit.kind ? swatchOf(audit) : null, audit.name), holder);
      $("grid-host").append(block);
      if (!audit.rates) {
        holder.append(el("p", { class: "missing", text: "The sink rate was not measured per head." }));
        continue;
      }
      const view = headGrid(holder, {
        grid: audit.grid, heads: audit.heads, value: (row, head) => audit.rates[row][head],
        words: (row, head) => `sinks at ${audit.place} in ${percent(audit.rates[row][head])} of samples`,
      }, { label: `Sink map of ${audit.name}` });
      painters.push(view.paint);
    }
    figures($("figures"), data.figures, data.audits.filter((audit) => audit.kind));
  }

  makeRamps();
  repaint();
  // The frame of a notebook's cell is as high as its page, which a frame of another origin does not let it be.
  async function headsPage() {
    await perHead();
    if (data.pictures) pictures();
    const frame = window.frameElement;
    if (frame) new ResizeObserver(() => { frame.style.height = `${Math.min(1400, document.body.scrollHeight + 4)}px`; }).observe(document.body);
  }

  const pages = { report, compare: comparison, heads: headsPage };
  const nothing = async () => {}; // other pages have nothing that a script draws
  (pages[data.page] ?? nothing)().then(
    () => { repaint(); root.dataset.ready = "true"; },
    (error) => {
      const words = typeof DecompressionStream === "undefined" ? "This browser cannot unpack the figures; it needs DecompressionStream." : `The figures could not be drawn: ${error.message}`;
      $("grid-host").append(el("p", { class: "missing", text: words }));
      throw error;
    },
  );
})();
