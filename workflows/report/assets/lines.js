// Curves over a common x: a cursor on the nearest point tells the value of every curve there.

const MARGIN = { left: 52, right: 16, top: 10, bottom: 38 }, HEIGHT = 300, TOLD = 14, MARK_WIDTH = 62;
const LISTED = 12; // curves in an order beyond which one ramp stands for their names

/** Name of a curve -> its colour on this page, -1 for that of a curve alone: one name, one colour, in every plot. */
const CURVE_RANKS = new Map();

/** The colours of the curves of one plot: those their names have on this page, and for new names the least used. */
function curveRanks(names, count) {
  const here = new Set();
  return names.map((name) => {
    let rank = CURVE_RANKS.get(name);
    if (rank === undefined || here.has(rank)) {
      const uses = Array.from({ length: count }, (_, i) => [...CURVE_RANKS.values()].filter((each) => each === i).length);
      const free = uses.map((_, i) => i).filter((i) => !here.has(i)).sort((a, b) => uses[a] - uses[b] || a - b);
      rank = names.length === 1 && ![...CURVE_RANKS.values()].includes(-1) ? -1 : free[0];
      if (!CURVE_RANKS.has(name)) CURVE_RANKS.set(name, rank);
    }
    here.add(rank);
    return rank;
  });
}

/** Round numbers that divide low..high into about `count` steps. */
function ticks(low, high, count) {
  const step = roundStep((high - low) / count), found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

/** As `log_ticks` of views/paper.py: 1-2-5 of every decade, or decades, or every so many of them; else even steps. */
function logTicks(low, high, count) {
  const ofDecades = (steps, every) => {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      if (power % every === 0) found.push(...steps.map((step) => Number(`${step}e${power}`)));
    }
    return found.filter((tick) => tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9));
  };
  const dense = ofDecades([1, 2, 5], 1);
  if (dense.length < 3) return ticks(low, high, count);
  if (dense.length <= count) return dense;
  let every = 1;
  while (ofDecades([1], every).length > count) every++;
  return ofDecades([1], every);
}

/** A number at a tick: thousands by commas, very large and small ones by their power of ten. */
function mark(value) {
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e6)) {
    const [digits, power] = value.toExponential(11).split("e");
    return `${Number(digits)}e${Number(power)}`;
  }
  return Number.isInteger(value) ? (value + 0).toLocaleString("en") : String(Number(value.toPrecision(12)));
}

/** Where a value lies between low and high, 0 to 1. */
const along = (value, low, high, log) => (log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low));

DRAW.lines = (host, data) => {
  const curves = data.lines.map((line) => ({ ...line, points: decode(line.values), around: line.band && decode(line.band) }));
  const labelled = typeof data.x[0] === "string";
  const xs = labelled ? data.x.map((_, i) => i) : data.x;
  const placed = (value) => Number.isFinite(value) && (value > 0 || !data.log); // has a place on the y axis
  const values = curves.flatMap((curve) => [...curve.points.values, curve.level ?? NaN]).filter(Number.isFinite);
  const unplaced = values.filter((value) => !placed(value)).length;
  const known = values.concat(curves.flatMap((curve) => [...(curve.around?.values ?? [])])).filter(placed);
  let [low, high] = known.length || !data.log ? extent(known) : [0.1, 1];
  if (placed(data.low ?? NaN)) low = Math.min(low, data.low);
  if (placed(data.high ?? NaN)) high = Math.max(high, data.high);
  if (low === high) [low, high] = data.log ? [low / 2, high * 2] : [low, low + 1];
  const box = make("div", { class: "curves" });
  host.append(box);
  let cursor = null, place = { x: () => 0, y: () => 0 };
  const own = curves.filter((curve) => !curve.control && !curve.strong), controls = curves.filter((curve) => curve.control);
  const shades = scale(-own.length / 3, own.length - 1); // many curves come in an order, such as layers: one ramp
  const kin = own.map((curve) => curve.family || curve.name), heads = [...new Set(kin)];
  const related = heads.length < kin.length && heads.length <= LINE_COLOURS.light.length;
  const many = !related && own.length > LINE_COLOURS.light.length;
  const ranks = many ? own.map((_, i) => i) : curveRanks(related ? heads : kin, LINE_COLOURS.light.length);
  const colour = (i) => {
    if (curves[i].control) return getComputedStyle(host).getPropertyValue("--faint");
    if (curves[i].strong) return getComputedStyle(host).getPropertyValue("--accent");
    const place = own.indexOf(curves[i]);
    if (many) return shades.fill(place);
    const rank = ranks[related ? heads.indexOf(kin[place]) : place];
    const found = rank < 0 ? ONE_COLOUR[mode()] : LINE_COLOURS[mode()][rank];
    const sisters = own.filter((_, n) => kin[n] === kin[place]);
    return sisters.length < 2 ? found : tint(found, 0.65 * sisters.indexOf(curves[i]) / Math.max(2, sisters.length - 1));
  };
  const named = (name, log) => (log ? `${name}, log scale` : name);
  const exact = (curve, i) => told(curve.points.values[i], data.unit, curve.points.digits);

  function draw() {
    const wide = host.clientWidth || 700;
    const [from, to] = [xs[0], xs[xs.length - 1]];
    place.x = (x) => MARGIN.left + (to === from ? 0.5 : along(x, from, to, data.log_x)) * (wide - MARGIN.left - MARGIN.right);
    // What has no place lies at the foot: the lower end of a band, the cursor in a gap.
    place.y = (y) => MARGIN.top + (placed(y) ? 1 - along(y, low, high, data.log) : 1) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    const svg = make("svg", { viewBox: `0 0 ${wide} ${HEIGHT}`, height: HEIGHT, tabindex: 0, role: "application",
      "aria-label": `${data.y_name} by ${data.x_name}, ${curves.length} curves; left and right arrow keys move` });
    for (const y of data.log ? logTicks(low, high, 6) : ticks(low, high, 5)) {
      svg.append(make("line", { class: y === 0 ? "zero" : "axis", x1: MARGIN.left, x2: wide - MARGIN.right, y1: place.y(y), y2: place.y(y) }),
        make("text", { x: MARGIN.left - 8, y: place.y(y) + 4, "text-anchor": "end" }, mark(y)));
    }
    const count = Math.max(2, Math.floor(wide / 70));
    const every = Math.ceil(xs.length / count);
    const whole = !labelled && xs.every((x) => Number.isInteger(x));
    const marks = labelled ? xs.filter((_, i) => i % every === 0) : from === to ? [from]
      : (data.log_x ? logTicks(from, to, 1 + Math.floor((wide - MARGIN.left - MARGIN.right) / MARK_WIDTH)) : ticks(from, to, count))
        .filter((x) => !whole || Number.isInteger(x));
    for (const x of marks) {
      const text = make("text", { x: place.x(x), y: HEIGHT - MARGIN.bottom + 18, "text-anchor": "middle" }, labelled ? fitted(data.x[x], 66) : mark(x));
      svg.append(text);
    }
    svg.append(make("text", { x: wide - MARGIN.right, y: HEIGHT - 4, "text-anchor": "end" }, named(data.x_name, data.log_x)));
    if (data.at !== null) svg.append(make("line", { class: "marked", x1: place.x(data.at), x2: place.x(data.at), y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
    const order = curves.map((_, i) => i).sort((a, b) => curves[a].strong - curves[b].strong); // strong ones before all others
    order.forEach((i) => {
      const curve = curves[i];
      if (curve.around) {
        const edge = (row) => xs.map((x, n) => [x, curve.around.at(row, n)]).filter(([, y]) => Number.isFinite(y))
          .map(([x, y]) => `${place.x(x).toFixed(1)} ${place.y(y).toFixed(1)}`);
        svg.append(make("path", { d: `M${[...edge(0), ...edge(1).reverse()].join("L")}Z`, fill: colour(i), "fill-opacity": 0.15, stroke: "none" }));
      }
      if (curve.level !== null && placed(curve.level)) svg.append(make("line", { x1: MARGIN.left, x2: wide - MARGIN.right, y1: place.y(curve.level), y2: place.y(curve.level),
        stroke: colour(i), "stroke-dasharray": "5 4", "stroke-opacity": 0.6 }));
      let path = "", open = false;
      xs.forEach((x, n) => {
        const y = curve.points.values[n];
        if (placed(y)) path += `${open ? "L" : "M"}${place.x(x).toFixed(1)} ${place.y(y).toFixed(1)}`;
        open = placed(y);
      });
      svg.append(make("path", { d: path, fill: "none", stroke: colour(i), "stroke-width": curve.faint ? 1 : curve.control ? 1.5 : curve.strong ? 3 : 2.2,
        "stroke-dasharray": !curve.control ? null : curve === controls[0] ? "5 4" : "1 4", "stroke-linejoin": "round" }));
      if (xs.length <= 24) xs.forEach((x, n) => placed(curve.points.values[n]) &&
        svg.append(make("circle", { cx: place.x(x), cy: place.y(curve.points.values[n]), r: curve.control ? 2 : 3, fill: colour(i) })));
    });
    cursor = make("g");
    svg.append(cursor);
    svg.addEventListener("pointermove", (event) => {
      const x = event.clientX - svg.getBoundingClientRect().left;
      at(nearest(x), event.clientY, false);
    });
    svg.addEventListener("pointerleave", clear);
    svg.addEventListener("blur", clear);
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      at(Math.min(xs.length - 1, Math.max(0, (here ?? -step) + step)), null, true);
    });
    box.replaceChildren(svg);
  }

  let here = null;
  const nearest = (pixel) => xs.reduce((best, x, i) => (Math.abs(place.x(x) - pixel) < Math.abs(place.x(xs[best]) - pixel) ? i : best), 0);

  function at(i, pointer, loud) {
    here = i;
    const x = place.x(xs[i]), area = box.getBoundingClientRect();
    const shown = curves.map((curve, n) => [curve, n]).filter(([curve]) => Number.isFinite(curve.points.values[i]));
    if (shown.length > TOLD) {
      const y = pointer === null ? HEIGHT / 2 : pointer - area.top;
      shown.sort((a, b) => Math.abs(place.y(a[0].points.values[i]) - y) - Math.abs(place.y(b[0].points.values[i]) - y));
      shown.length = TOLD;
    }
    shown.sort((a, b) => b[0].points.values[i] - a[0].points.values[i]);
    cursor.replaceChildren(make("line", { class: "cursor", x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }),
      ...shown.filter(([curve]) => placed(curve.points.values[i])).map(([curve, n]) => make("circle", { cx: x, cy: place.y(curve.points.values[i]), r: 4, fill: colour(n) })));
    const where = `${data.x_name} ${labelled ? data.x[i] : Number.isInteger(xs[i]) ? xs[i].toLocaleString("en") : told(xs[i])}`;
    const rows = shown.flatMap(([curve, n]) => {
      const swatch = make("i");
      swatch.style.borderColor = colour(n);
      return [swatch, make("span", {}, curve.name), make("b", {}, exact(curve, i))];
    });
    const y = shown.length ? Math.min(...shown.map(([curve]) => place.y(curve.points.values[i]))) : HEIGHT / 2;
    showTip({ left: area.left + x, right: area.left + x, top: area.top + y, bottom: area.top + y },
      [make("div", { class: "where" }, `${where} · ${data.y_name}`), make("div", { class: "series" }, ...rows)],
      loud ? `${where}: ${shown.map(([curve]) => `${curve.name} ${exact(curve, i)}`).join(", ")}` : "");
  }

  function clear() {
    here = null;
    cursor.replaceChildren();
    hideTip();
  }

  const keys = make("ul", { class: "keys" });
  host.append(keys);
  function key() {
    const ramped = many && own.length > LISTED;
    const strip = make("i", { class: "ordered" });
    strip.style.background = `linear-gradient(to right, ${own.map((_, i) => shades.fill(i))})`;
    keys.replaceChildren(ramped ? make("li", {}, own[0].name, strip, own[own.length - 1].name) : "", ...curves.flatMap((curve, i) => {
      if (!curve.name || (ramped && own.includes(curve))) return [];
      const swatch = make("i", { class: curve.control ? "control" : "" });
      swatch.style.borderColor = colour(i);
      return [make("li", {}, swatch, curve.name)];
    }), make("li", { class: "dim" }, `up: ${named(data.y_name + (data.unit ? ` (${data.unit})` : ""), data.log)}`),
      ...(unplaced ? [make("li", { class: "dim" }, `not drawn: ${unplaced} value${unplaced > 1 ? "s" : ""} of 0 or below`)] : []));
  }
  const both = () => { draw(); key(); };
  redraws.add(both);
  new ResizeObserver(draw).observe(host);
  both();
};
