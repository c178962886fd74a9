// Logit lens: the most likely token of each layer at each position; hover for the others, click to pin.

DRAW.lens = (host, data) => {
  const top = decode(data.top), probability = decode(data.probabilities);
  const targetProbability = decode(data.target_probability), targetRank = decode(data.target_rank);
  const ranks = top.shape[2], hasTarget = data.target.some((word) => word !== "");
  const word = (layer, position, rank = 0) => data.words[top.at(layer, position, rank)];
  const known = (layer, position) => targetRank.at(layer, position) > 0;
  const measures = [
    { name: "probability of the most likely token", format: percent, value: (l, p) => probability.at(l, p, 0), colours: scale(0, 1) },
    ...(hasTarget ? [{ name: "probability of what comes next", format: percent, value: (l, p) => targetProbability.at(l, p), colours: scale(0, 1) }] : []),
    ...data.measures.map((measure) => {
      const values = decode(measure.values);
      return { name: measure.name, unit: measure.unit, format: told, value: (l, p) => values.at(l, p), colours: scale(0, extent(values.values)[1]) };
    }),
  ];
  let shade = measures[0];

  const ranking = (layer, position) => {
    const shown = [];
    for (let rank = 0; rank < ranks; rank++) {
      const bar = make("div", { class: "bar" });
      bar.style.width = `${100 * probability.at(layer, position, rank)}%`;
      const name = token(word(layer, position, rank));
      if (known(layer, position) && rank + 1 === targetRank.at(layer, position)) name.classList.add("is-target");
      shown.push(name, make("span", { class: "right" }, percent(probability.at(layer, position, rank))), bar);
    }
    return make("div", { class: "ranks" }, ...shown);
  };
  const where = (layer, position) => make("div", { class: "where" }, `after layer ${data.layers[layer]}, reading `, token(data.tokens[position]), ` (${position})`);
  const next = (layer, position) => (known(layer, position)
    ? [make("div", {}, "next: ", token(data.target[position]), ` rank ${targetRank.at(layer, position)}, ${percent(targetProbability.at(layer, position))}`)]
    : []);
  const extras = (layer, position) => make("div", { class: "where" },
    measures.filter((m) => m.unit).map((m) => `${m.name} ${m.format(m.value(layer, position), m.unit)}`).join(" · "));

  const controls = make("div", { class: "controls" });
  const field = make("div"), legend = make("div", { class: "legend" });
  const panel = make("div", { class: "panel", "aria-live": "polite" });
  host.append(controls, field, legend, panel);

  const board = grid(field, {
    name: "most likely next token by layer and position",
    rows: data.layers.map(String),
    columns: data.tokens,
    upward: true,
    cell: (room) => ({ width: within(room, data.tokens.length, 74, 132), height: 27 }),
    fill: (layer, position) => (Number.isNaN(shade.value(layer, position)) ? null : shade.colours.fill(shade.value(layer, position))),
    ink: (layer, position) => shade.colours.ink(shade.value(layer, position)),
    text: word,
    framed: (layer, position) => targetRank.at(layer, position) === 1,
    tip: (layer, position) => [where(layer, position), ranking(layer, position), ...next(layer, position), extras(layer, position)],
    say: (layer, position) => `layer ${data.layers[layer]}, after ${data.tokens[position]}: ${word(layer, position)}, ${percent(probability.at(layer, position, 0))}`,
    pick: pin,
  });

  function pin(layer, position) {
    const here = make("div", {}, make("h5", {}, "Pinned"), where(layer, position), ranking(layer, position), extras(layer, position));
    const through = [];
    for (let l = data.layers.length - 1; l >= 0; l--) {
      const bar = make("div", { class: "bar" });
      const p = known(l, position) ? targetProbability.at(l, position) : probability.at(l, position, 0);
      bar.style.width = `${100 * p}%`;
      const said = known(l, position) ? `rank ${targetRank.at(l, position)}` : word(l, position);
      through.push(make("span", { class: l === layer ? "bold" : "" }, `layer ${data.layers[l]} · ${said}`), make("span", { class: "right" }, percent(p)), bar);
    }
    const what = known(layer, position) ? ["What comes next, ", token(data.target[position]), ", by layer"] : ["The most likely token by layer"];
    panel.replaceChildren(here, make("div", {}, make("h5", {}, ...what), make("div", { class: "ranks" }, ...through)));
  }

  function show() {
    legend.replaceChildren(ramp(shade.colours, shade.name, shade.unit, shade.format), make("span", {}, "up: layer · across: token read"),
      hasTarget ? make("span", { class: "framed" }, "does come next") : "");
    board.paint();
  }
  if (measures.length > 1) controls.append(menu("shaded by", measures.map((m) => m.name), 0, (i) => { shade = measures[i]; show(); }));
  const last = [data.layers.length - 1, data.tokens.length - 1];
  show();
  pin(...last);
  board.select(...last);
};
