// Attribution graph: point at a node to see what it is and its edges, click to pin it, prune with two sliders,
// name groups of nodes, save pins and groups as circuit-tracer's viewer does, and load them again.

const FAINT = 150; // strongest edges drawn under everything
const REACH = 9; // pixels from a dot that still hit it
// Of LINE_COLOURS, none of which pins have.
const GROUPS = [0, 1, 3, 4, 2, 5];

DRAW.graph = (host, data) => {
  const graph = readGraph(data), prune = pruner(graph);
  const { source, target, weight, into, outOf, isFeature, isError, isToken, isLogit, textOf } = graph;
  const shades = scale(1, 0); // by cumulative influence: what matters most is darkest
  const shares = { nodes: Math.min(data.node_threshold, data.share), edges: data.edge_threshold };
  let found = prune(shares.nodes, shares.edges), laid = null, over = null, pins = [], groups = [];
  const words = teller(graph, data, { kept: (e) => found.kept[e], alive: (i) => found.alive[i], groups: () => groups, go });

  const groupOf = (i) => groups.findIndex((group) => group.members.includes(i));
  const colourOf = (k) => LINE_COLOURS[mode()][GROUPS[k % GROUPS.length]];
  const isGroup = (at) => typeof at === "object" && at !== null;
  const membersOf = (at) => (isGroup(at) ? at.members : [at]);

  // -- controls

  const counted = make("span", { class: "counted", "aria-live": "polite" });
  const slider = (name, which, most) => {
    const shown = make("output");
    const input = make("input", { type: "range", min: 0, max: most, step: 0.005, input: () => { shares[which] = Number(input.value); tell(); later(); } });
    const tell = () => { input.value = shares[which]; shown.textContent = `${(100 * shares[which]).toFixed(1)} %`; };
    tell();
    return { label: make("label", {}, name, input, shown), tell };
  };
  const sliders = [slider("nodes with", "nodes", data.share >= 1 ? 1 : Math.floor(200 * data.share) / 200), slider("edges with", "edges", 1)];
  const said = make("span", { class: "dim", role: "status" });
  const name = make("input", { type: "text", placeholder: "name of the group", "aria-label": "name of the group", maxlength: 60,
    keydown: (event) => { if (event.key === "Enter") group(); } });
  const button = (label, click, title) => make("button", { type: "button", class: "button", click, title }, label);
  const file = make("input", { type: "file", accept: "application/json,.json", class: "unseen", tabindex: -1, "aria-label": "a saved JSON file",
    change: async () => { if (file.files[0]) load(await file.files[0].text()); file.value = ""; } });
  const grouping = button("Group pinned", group, "Give the pinned nodes a name; they are drawn together");
  const chips = make("div", { class: "chips" });
  const box = make("div", { class: "net", tabindex: 0, role: "application", "aria-roledescription": "graph",
    "aria-label": `attribution graph: ${graph.nodes.length} nodes; arrow keys move, Enter pins` });
  const legend = make("div", { class: "legend" }), cards = make("div", { class: "cards" });
  host.append(
    make("div", { class: "controls" }, ...sliders.map((each) => each.label), make("span", {}, "of the influence"), counted),
    box, legend,
    make("div", { class: "controls grouping" }, name, grouping, button("Unpin all", () => { pins = pins.filter(isGroup); show(); }, "Unpin every node"),
      button("Save", save, "Download pins and groups as JSON"), button("Load", () => file.click(), "Read a saved JSON"), file, said),
    chips, cards);

  // -- drawing

  const svg = (tag, properties, ...children) => make(tag, properties, ...children);
  const under = svg("g"), faint = svg("g"), strong = svg("g"), marks = svg("g"), labels = svg("g");
  const field = svg("svg", { class: "net-field", "aria-hidden": "true" }, under, faint, strong, marks, labels);
  const gutter = svg("svg", { class: "net-gutter", "aria-hidden": "true" });
  box.append(gutter, field);
  const GUTTER = 52;
  let shapes = new Map();

  function lay() {
    laid = layOut(graph, {
      alive: found.alive, layers: data.layers, tokens: data.tokens, room: Math.max(200, (host.clientWidth || 800) - GUTTER - 4),
      first: (a, b) => groupOf(b) - groupOf(a) || graph.kinds[a] - graph.kinds[b] || graph.cumulative[a] - graph.cumulative[b],
    });
    for (const [part, width] of [[field, laid.width], [gutter, GUTTER]]) {
      part.setAttribute("width", width);
      part.setAttribute("height", laid.height);
    }
    gutter.replaceChildren(svg("rect", { class: "patch", width: GUTTER, height: laid.height }),
      ...laid.rows.filter((row) => row.high >= 14).map((row) => svg("text", { x: GUTTER - 10, y: row.top + row.high / 2 + 4, "text-anchor": "end" }, row.name)));
    under.replaceChildren(
      ...laid.columns.filter((_, p) => p % 2).map((column) => svg("rect", { class: "stripe", x: column.left, y: laid.rows[0].high, width: column.wide, height: laid.height - laid.rows[0].high })),
      ...laid.rows.slice(1).map((row) => svg("line", { class: "floor", x1: 0, x2: laid.width, y1: row.top, y2: row.top })),
      ...laid.columns.map((column, p) => svg("text", { class: "index", x: column.left + column.wide / 2, y: laid.height - 3, "text-anchor": "middle" }, String(p))));
    shapes = new Map();
    for (const [i, at] of laid.place) shapes.set(i, shape(i, at));
    marks.replaceChildren(...shapes.values());
    const strongest = [];
    for (let e = 0; e < weight.length && strongest.length < FAINT; e++) if (found.kept[e]) strongest.push(e);
    faint.replaceChildren(...strongest.map((e) => edge(e, 1.2, 0.16)));
    counted.textContent = `${found.nodeCount.toLocaleString("en")} of ${data.n_nodes.toLocaleString("en")} nodes, ${found.edgeCount.toLocaleString("en")} edges`;
    show();
  }

  /** What is pinned has changed. Cards stay as they are under a moving pointer: a click must find its button. */
  function show() {
    paint();
    list();
  }

  function shape(i, { x, y, wide, high }) {
    if (isFeature(i)) return svg("circle", { "data-node": i, cx: x, cy: y, r: DOT });
    if (isError(i)) return svg("path", { "data-node": i, d: `M${x} ${y - 6}L${x + 6} ${y}L${x} ${y + 6}L${x - 6} ${y}Z` });
    const text = isLogit(i) ? [svg("tspan", {}, fitted(textOf(i), wide - widthOf(percent(graph.probability[i])) - 18)), svg("tspan", { class: "share", dx: 6 }, percent(graph.probability[i]))]
      : [fitted(textOf(i), wide - 8)];
    return svg("g", { "data-node": i, class: isToken(i) ? "is-token" : "is-logit" }, svg("rect", { x: x - wide / 2, y: y - high / 2, width: wide, height: high, rx: 5 }),
      svg("text", { x, y: y + 4, "text-anchor": "middle" }, ...text));
  }

  function edge(e, width, opacity) {
    const from = laid.place.get(source[e]), to = laid.place.get(target[e]);
    const [y1, y2] = [from.y - from.high / 2, to.y + to.high / 2], bend = (y1 + y2) / 2;
    return svg("path", { "data-edge": e, fill: "none", d: `M${from.x.toFixed(1)} ${y1.toFixed(1)}C${from.x.toFixed(1)} ${bend.toFixed(1)} ${to.x.toFixed(1)} ${bend.toFixed(1)} ${to.x.toFixed(1)} ${y2.toFixed(1)}`,
      stroke: signOf(weight[e]), "stroke-width": width.toFixed(2), "stroke-opacity": opacity.toFixed(2) });
  }

  /** Edges of a node, or of a group but for those within it, as wide as they are strong among their likes. */
  function edgesOf(at) {
    const dimmed = over === null || over === at ? 1 : 0.35;
    const held = new Set(membersOf(at)), drawn = [];
    for (const [edges, end] of [[into, source], [outOf, target]]) {
      const mine = [...held].flatMap((i) => edges[i]).filter((e) => found.kept[e] && !(isGroup(at) && held.has(end[e])));
      const most = mine.reduce((top, e) => Math.max(top, Math.abs(weight[e])), 0);
      for (const e of mine) {
        const share = Math.abs(weight[e]) / most;
        drawn.push(edge(e, 0.6 + 4.4 * share, dimmed * (0.1 + 0.85 * share ** 0.6)));
      }
    }
    return drawn;
  }

  function paint() {
    const focus = over === null ? pins : [over, ...pins.filter((pin) => pin !== over)];
    const lit = focus.filter((at) => membersOf(at).some((i) => laid.place.has(i)));
    strong.replaceChildren(...lit.flatMap(edgesOf).reverse()); // the node pointed at is on top
    faint.style.opacity = lit.length ? 0.35 : 1;
    const near = over === null ? null : new Set(membersOf(over).flatMap((i) => [i, ...into[i].filter((e) => found.kept[e]).map((e) => source[e]), ...outOf[i].filter((e) => found.kept[e]).map((e) => target[e])]));
    for (const [i, mark] of shapes) {
      const group = groupOf(i), colour = group < 0 ? "" : colourOf(group);
      mark.classList.toggle("pinned", pins.includes(i));
      mark.classList.toggle("over", over === i);
      mark.classList.toggle("grouped", group >= 0);
      mark.classList.toggle("off", near !== null && !near.has(i) && !pins.includes(i));
      const body = mark.tagName === "g" ? mark.firstChild : mark;
      body.style.stroke = colour;
      if (!isToken(i) && !isLogit(i)) body.style.fill = shades.fill(graph.cumulative[i]);
    }
    labels.replaceChildren(...groups.map(pill).filter(Boolean));
  }

  /** The name of a group in the middle of its members, with a line to each. */
  function pill(group, k) {
    const places = group.members.map((i) => laid.place.get(i)).filter(Boolean);
    if (!places.length) return null;
    const wide = widthOf(group.name) + 16, colour = colourOf(k);
    const middle = places.reduce((sum, each) => sum + each.x, 0) / places.length;
    const x = Math.min(laid.width - wide / 2 - 2, Math.max(wide / 2 + 2, middle)), y = Math.max(12, Math.min(...places.map((each) => each.y)) - 21);
    group.place = { x, y, wide, high: 20 };
    const lines = places.map((each) => svg("line", { x1: x, y1: y, x2: each.x, y2: each.y, stroke: colour }));
    const rect = svg("rect", { x: x - wide / 2, y: y - 10, width: wide, height: 20, rx: 10, stroke: colour });
    return svg("g", { class: `pill${over === group ? " over" : ""}${pins.includes(group) ? " pinned" : ""}`, "data-group": k }, ...lines, rect, svg("text", { x, y: y + 4, "text-anchor": "middle" }, group.name));
  }

  // -- pins, groups and their cards

  function list() {
    const card = (at) => make("section", { class: "pin", "data-node": isGroup(at) ? null : at },
      make("button", { type: "button", class: "close", "aria-label": `unpin ${isGroup(at) ? at.name : words.inWords(at)}`, click: () => pin(at) }, "×"),
      ...(isGroup(at) ? words.tellGroup(at, true) : words.tell(at, true)));
    cards.replaceChildren(...(pins.length ? pins.map(card).reverse() : [make("p", { class: "dim" }, "Click a node to pin it here; several can be pinned, and pinned nodes can be grouped under a name.")]));
    chips.replaceChildren(...groups.map((group, k) => {
      const dot = make("i");
      dot.style.background = colourOf(k);
      return make("span", { class: "chip" }, dot, make("button", { type: "button", click: () => pin(group) }, `${group.name} (${group.members.length})`),
        make("button", { type: "button", "aria-label": `dissolve ${group.name}`, click: () => { groups.splice(k, 1); pins = pins.filter((each) => each !== group); lay(); } }, "×"));
    }));
    grouping.disabled = !pins.some((at) => !isGroup(at));
  }

  function pin(at) {
    pins = pins.includes(at) ? pins.filter((each) => each !== at) : [...pins, at];
    show();
  }

  function group() {
    const members = pins.filter((at) => !isGroup(at));
    if (!members.length) return;
    groups.forEach((each) => { each.members = each.members.filter((i) => !members.includes(i)); });
    groups = groups.filter((each) => each.members.length);
    groups.push({ name: name.value.trim() || `group ${groups.length + 1}`, members });
    pins = pins.filter((at) => groups.includes(at));
    name.value = "";
    lay();
  }

  /** Bring a node into view, point at it and pin it. */
  function go(i) {
    if (!pins.includes(i)) pins = [...pins, i];
    over = null;
    show();
    if (laid.place.has(i)) {
      box.focus();
      step(i);
    }
  }

  // -- saved state

  const many = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;

  function save() {
    const members = groups.flatMap((each) => each.members), own = pins.filter((at) => !isGroup(at));
    const state = {
      pinnedIds: [...new Set([...own, ...members])].map(graph.nameOf),
      supernodes: groups.map((each) => [each.name, ...each.members.map(graph.nameOf)]),
      linkType: "both", clickedId: own.length ? graph.nameOf(own[own.length - 1]) : "", sg_pos: "", pruningThreshold: shares.nodes,
    };
    const url = URL.createObjectURL(new Blob([`${JSON.stringify(state, null, 2)}\n`], { type: "application/json" }));
    make("a", { href: url, download: "supernodes.json" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
    const shared = [...own, ...members].filter((i) => graph.byName.get(graph.nameOf(i)) !== i);
    said.textContent = `saved ${many(groups.length, "group")} and ${many(own.length, "pin")}${shared.length
      ? `; in this format ${graph.nameOf(shared[0])} is also the name of a feature, and will be read as that` : ""}`;
  }

  /** Pins and groups of a saved JSON, or of a whole graph's; nodes that are not here are counted. */
  function load(text) {
    let state = null;
    try {
      state = JSON.parse(text);
      state = state.qParams ?? state;
    } catch { /* told below */ }
    const lists = [state?.pinnedIds ?? [], state?.supernodes ?? []];
    const isState = state && (state.pinnedIds || state.supernodes) && lists.every(Array.isArray) && lists[1].every((each) => Array.isArray(each) && typeof each[0] === "string");
    if (!isState) {
      said.textContent = "expected a saved JSON with pinnedIds or supernodes, found none in this file";
      return;
    }
    if (typeof state.pruningThreshold === "number") {
      shares.nodes = Math.min(data.share, Math.max(0, state.pruningThreshold));
      sliders[0].tell();
    }
    restore(lists[0], lists[1]);
    found = prune(shares.nodes, shares.edges);
    lay();
  }

  function restore(pinned, supernodes) {
    const known = (names) => names.map((each) => graph.byName.get(each)).filter((i) => i !== undefined);
    groups = supernodes.map(([title, ...names]) => ({ name: title, members: known(names) })).filter((each) => each.members.length);
    const grouped = new Set(groups.flatMap((each) => each.members));
    pins = known(pinned).filter((i) => !grouped.has(i));
    const lost = new Set([...pinned, ...supernodes.flatMap((each) => each.slice(1))].filter((each) => !graph.byName.has(each))).size;
    said.textContent = `loaded ${many(groups.length, "group")} and ${many(pins.length, "pin")}${lost
      ? `; ${many(lost, "node")} ${lost === 1 ? "is" : "are"} not on this page` : ""}`;
  }

  // -- pointer and keys

  function at(event) {
    const area = field.getBoundingClientRect(), x = event.clientX - area.left, y = event.clientY - area.top;
    const inside = ({ x: left, y: top, wide, high }) => Math.abs(x - left) <= wide / 2 && Math.abs(y - top) <= high / 2;
    const named = groups.find((each) => each.place && laid.place.has(each.members.find((i) => laid.place.has(i))) && inside(each.place));
    if (named) return named;
    let best = null, least = REACH;
    for (const [i, place] of laid.place) {
      if (isToken(i) || isLogit(i)) { if (inside(place)) return i; continue; }
      const far = Math.hypot(x - place.x, y - place.y);
      if (far < least) { best = i; least = far; }
    }
    return best;
  }

  function hover(next, loud) {
    if (next === over && (next === null || bubble.classList.contains("on"))) return;
    over = next;
    paint();
    box.style.cursor = next === null ? "" : "pointer";
    if (next === null) return hideTip();
    const area = field.getBoundingClientRect(), { x, y, wide, high } = isGroup(next) ? next.place : laid.place.get(next);
    showTip({ left: area.left + x - wide / 2, right: area.left + x + wide / 2, top: area.top + y - high / 2, bottom: area.top + y + high / 2 },
      [make("div", { class: "node-told" }, ...(isGroup(next) ? words.tellGroup(next, false) : words.tell(next, false)))],
      loud ? `${words.inWords(next)}, ${isLogit(next) ? "" : `influence ${told(graph.influence[next])}`}` : "");
  }

  /** Point at a node as the keys do, once it is in view: scrolling hides tooltips. */
  function step(i) {
    const { x, y } = laid.place.get(i), seen = 40;
    box.scrollLeft = Math.min(Math.max(box.scrollLeft, x + GUTTER + seen - box.clientWidth), Math.max(0, x - seen));
    box.scrollTop = Math.min(Math.max(box.scrollTop, y + seen - box.clientHeight), Math.max(0, y - seen));
    over = i; // the next key may come before the next frame
    requestAnimationFrame(() => requestAnimationFrame(() => { hideTip(); hover(i, true); }));
  }

  function key(event) {
    if (event.target !== box) return;
    if (event.key === "Escape") return hover(null, false);
    const places = [...laid.place];
    const now = isGroup(over) ? null : over;
    if (event.key === "Enter" || event.key === " ") { if (over !== null) pin(over); }
    else if (["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) {
      if (now === null || !laid.place.has(now)) step(graph.nodes.find((i) => isLogit(i) && laid.place.has(i)) ?? places[0][0]);
      else {
        const here = laid.place.get(now), apart = ([, a]) => Math.abs(a.x - here.x);
        const line = places.filter(([, a]) => Math.abs(a.y - here.y) < 2).sort((a, b) => a[1].x - b[1].x), k = line.findIndex(([i]) => i === now);
        const side = event.key === "ArrowUp" ? -1 : 1, beyond = places.filter(([, a]) => side * (a.y - here.y) > 2);
        const nearest = Math.min(...beyond.map(([, a]) => side * a.y));
        const next = { ArrowLeft: line[k - 1], ArrowRight: line[k + 1], Home: line[0], End: line[line.length - 1] }[event.key]
          ?? (event.key.endsWith("p") || event.key.endsWith("Down") ? beyond.filter(([, a]) => side * a.y - nearest < 2).sort((a, b) => apart(a) - apart(b))[0] : undefined);
        step(next ? next[0] : now);
      }
    } else return;
    event.preventDefault();
  }

  field.addEventListener("pointermove", (event) => hover(at(event), false));
  field.addEventListener("pointerleave", () => hover(null, false));
  field.addEventListener("click", (event) => { const node = at(event); if (node !== null) pin(node); });
  box.addEventListener("keydown", key);
  box.addEventListener("blur", () => hover(null, false));

  // -- beginning

  let waiting = false, known = 0;
  function later() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; found = prune(shares.nodes, shares.edges); over = null; hideTip(); lay(); });
  }
  function explain() {
    const key = (mark, text) => make("span", { class: `key ${mark}` }, text);
    const sign = (text, colour) => { const line = make("i"); line.style.borderColor = colour; return make("span", { class: "key sign" }, line, text); };
    legend.replaceChildren(key("dot", "feature"), key("diamond", "error"), ramp(shades, "cumulative influence", ""), sign("raises", SIGN.positive()), sign("lowers", SIGN.negative()),
      make("span", {}, `up: layer · across: token${data.n_edges > weight.length ? ` · the ${weight.length.toLocaleString("en")} strongest of ${data.n_edges.toLocaleString("en")} edges are on this page, and thresholds are shares of these` : ""}`),
      data.share < 1 ? make("span", {}, `the most influential nodes are on this page, up to ${(100 * data.share).toFixed(1)} % of the influence`) : "");
  }
  redraws.add(() => { explain(); lay(); });
  new ResizeObserver(() => {
    if (!host.clientWidth || host.clientWidth === known) return;
    const isFirst = known === 0;
    known = host.clientWidth;
    lay();
    if (isFirst) box.scrollLeft = box.scrollWidth; // what is explained stands at the end
  }).observe(host);
  restore(data.pinned, data.supernodes);
  said.textContent = "";
  explain();
  lay();
};
