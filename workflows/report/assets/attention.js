// Attention: choose a layer and a head; point at a token to see which tokens it reads, or which read it.

DRAW.attention = (host, data) => {
  const pairs = decode(data.pattern), overview = decode(data.overview);
  const [, heads, perHead] = pairs.shape, length = data.tokens.length;
  const mean = new Map(); // layer -> its mean over heads, made when first asked for
  let layer = Math.max(0, data.layers.indexOf(data.layer)), head = data.head, query = data.query, reads = true;

  function meanOf(l) {
    if (!mean.has(l)) {
      const sum = new Float64Array(perHead);
      for (let h = 0; h < heads; h++) for (let i = 0; i < perHead; i++) sum[i] += pairs.values[(l * heads + h) * perHead + i];
      mean.set(l, sum.map((value) => value / heads));
    }
    return mean.get(l);
  }
  /** Weight that `from` gives `to`; null above the diagonal. */
  function weight(from, to) {
    if (to > from) return null;
    const i = (from * (from + 1)) / 2 + to;
    return head === null ? meanOf(layer)[i] : pairs.values[(layer * heads + head) * perHead + i];
  }
  const toldWeight = (value) => told(value, "", pairs.digits);
  const ofToken = (other) => (reads ? weight(query, other) : weight(other, query));
  // Weights are mostly small: shaded by their root, told as they are. The scale ends at the largest weight of
  // what is shown beyond the first token, an attention sink, which takes nearly all the weight of many heads.
  const shade = Math.sqrt;
  let colours = scale(0, 1);
  function largestBeyondFirst() {
    let largest = 0;
    for (let from = 1; from < length; from++) for (let to = 1; to <= from; to++) largest = Math.max(largest, weight(from, to));
    return largest || 1;
  }
  const title = () => `layer ${data.layers[layer]}, ${head === null ? "mean of heads" : `head ${head}`}`;
  const named = (position) => [token(data.tokens[position]), ` (${position})`];

  const layerMenu = menu("layer", data.layers.map(String), layer, (i) => { layer = i; show(); });
  const headMenu = menu("head", ["mean of all", ...Array.from({ length: heads }, (_, h) => String(h))], head === null ? 0 : head + 1,
    (i) => { head = i ? i - 1 : null; show(); });
  const strip = make("div", { class: "strip", role: "group", "aria-label": "tokens of the prompt" });
  const status = make("div", { class: "where" });
  const mapTitle = make("h5");
  const chooser = make("div"), matrix = make("div");
  const buttons = data.tokens.map((text, position) => {
    const small = make("small");
    const turn = () => { query = position; shadeStrip(); board.select(...(reads ? [position, 0] : [position, position])); };
    return make("button", { type: "button", pointerenter: turn, focus: turn, click: turn }, text, small);
  });
  strip.append(...buttons);
  strip.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -length, End: length }[event.key];
    if (!step) return;
    event.preventDefault();
    buttons[Math.min(length - 1, Math.max(0, query + step))].focus();
  });
  host.append(
    make("div", { class: "controls" }, layerMenu, headMenu, segments("shown", ["what a token reads", "what reads it"], 0, (i) => { reads = i === 0; shadeStrip(); })),
    strip, status,
    make("div", { class: "pair" },
      make("div", {}, make("h5", {}, `Heads by ${data.overview_name}; click to choose`), chooser),
      make("div", {}, mapTitle, matrix)));

  const [low, high] = extent(overview.values);
  const shades = scale(Math.min(0, low), high);
  const headTip = (l, h) => told(overview.at(l, h), data.overview_unit, overview.digits);
  const picker = grid(chooser, {
    name: `heads by ${data.overview_name}`,
    rows: data.layers.map(String),
    columns: Array.from({ length: heads }, (_, h) => String(h)),
    upward: true,
    cell: (room) => ({ width: within(room, heads, 17, 40), height: data.layers.length > 16 ? 18 : 26 }),
    fill: (l, h) => (Number.isNaN(overview.at(l, h)) ? shades.fill(shades.low) : shades.fill(overview.at(l, h))),
    tip: (l, h) => [make("div", { class: "what" }, headTip(l, h), " ", make("small", {}, data.overview_name)),
      make("div", { class: "where" }, `layer ${data.layers[l]} · head ${h}`)],
    say: (l, h) => `layer ${data.layers[l]}, head ${h}: ${headTip(l, h)}`,
    pick(l, h) { layer = l; head = h; show(); },
  });
  chooser.append(make("div", { class: "legend" }, ramp(shades, "", data.overview_unit), "up: layer · across: head"));

  const board = grid(matrix, {
    name: "attention weights, query by key",
    rows: data.tokens,
    columns: data.tokens,
    cell(room) {
      const side = within(room, length, 15, 26);
      return { width: side, height: side };
    },
    fill: (from, to) => (weight(from, to) === null ? null : colours.fill(shade(weight(from, to)))),
    tip: (from, to) => [make("div", { class: "what" }, toldWeight(weight(from, to))),
      make("div", { class: "where" }, ...named(from), " reads ", ...named(to)), make("div", { class: "where" }, title())],
    say: (from, to) => `${data.tokens[from]} reads ${data.tokens[to]}: ${toldWeight(weight(from, to))}`,
    moved(from, to) { query = reads ? from : to; shadeStrip(); },
    pick(from, to) { query = reads ? from : to; shadeStrip(); },
  });
  const legend = make("div", { class: "legend" });
  matrix.append(legend);

  function shadeStrip() {
    buttons.forEach((button, position) => {
      const value = ofToken(position);
      button.classList.toggle("query", position === query);
      button.classList.toggle("out", value === null);
      button.style.background = value === null ? "none" : colours.fill(shade(value));
      button.style.color = value === null ? "" : colours.ink(shade(value));
      button.tabIndex = position === query ? 0 : -1;
      button.lastChild.textContent = value === null ? "–" : value.toFixed(3);
    });
    status.replaceChildren(reads ? "What " : "What reads ", ...named(query), reads ? " reads in " : " in ", title(), "; weights under the tokens.");
  }

  function show() {
    layerMenu.querySelector("select").selectedIndex = layer;
    headMenu.querySelector("select").selectedIndex = head === null ? 0 : head + 1;
    mapTitle.textContent = `Weights in ${title()}`;
    const largest = largestBeyondFirst();
    colours = scale(0, shade(largest));
    legend.replaceChildren(ramp(colours, "weight, shaded by its root", "", (root) => told(root ** 2)),
      "down: reads · across: is read", ...(largest < 1 ? [" · the scale leaves out the first token, an attention sink"] : []));
    picker.select(head === null ? null : layer, head);
    board.paint();
    shadeStrip();
  }
  redraws.add(shadeStrip);
  show();
};
