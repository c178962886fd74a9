// An attribution graph in words: what a tooltip and a pinned card say of a node, and of a named group of nodes.

const SIGN = { positive: () => RAMPS.diverging[mode()][4], negative: () => RAMPS.diverging[mode()][0] };
const signOf = (value) => (value < 0 ? SIGN.negative() : SIGN.positive());

/** weight with its sign and a bar of its size against `most`. */
function weightTold(value, most) {
  const bar = make("i", { class: "bar" });
  bar.style.width = `${Math.max(2, (32 * Math.abs(value)) / most)}px`;
  bar.style.background = signOf(value);
  return make("span", { class: "weight" }, bar, `${value > 0 ? "+" : ""}${told(value, "", 3)}`);
}

/**
 * graph: as readGraph gives it; data: the element. state: kept(e) tells whether an edge stands at the present
 * thresholds, alive(i) whether a node does, groups() gives the named groups, go(i) is called on a click on a node's name.
 */
function teller(graph, data, state) {
  const { kinds, layer, position, number, activation, influence, cumulative, probability, row, source, target, weight, isFeature, isError, isToken, isLogit } = graph;
  const notes = data.notes;
  const tables = Object.fromEntries(Object.entries(notes).filter(([name]) => name !== "words").map(([name, block]) => [name, decode(block)]));
  const shades = scale(0, 1);

  const title = (i) => (isFeature(i) ? `L${layer[i]}:${number[i]}` : isError(i) ? `error L${layer[i]}` : graph.textOf(i));
  // What a feature writes most, beside its number: that alone says nothing.
  const called = new Map(data.called);
  const label = (i) => (isFeature(i) && called.has(title(i)) ? [" ", make("q", {}, called.get(title(i)))] : []);
  const writes = (i) => (label(i).length ? label(i) : isFeature(i) && row[i] >= 0 && tables.raised.shape[1] ? [" ", token(notes.words[tables.raised.at(row[i], 0)])] : []);
  const here = (i) => [token(data.tokens[position[i]]), ` (${position[i]})`];
  const inWords = (i) => (isToken(i) ? `token ${graph.textOf(i)}, position ${position[i]}` : isLogit(i)
    ? `output ${graph.textOf(i)}, probability ${percent(probability[i])}`
    : `${isFeature(i) ? `feature ${title(i)}` : `error of layer ${layer[i]}`} at position ${position[i]}, ${data.tokens[position[i]]}`);

  function head(i) {
    const name = isToken(i) || isLogit(i) ? token(graph.textOf(i)) : title(i);
    const said = isFeature(i) ? ["layer ", String(layer[i]), ", feature ", String(number[i]), " at position ", String(position[i]), " "]
      : isError(i) ? ["what features of layer ", String(layer[i]), " leave unexplained at position ", String(position[i]), " "]
        : isToken(i) ? ["embedding of the token at position ", String(position[i])]
          : ["output after position ", String(position[i])];
    const what = isLogit(i) ? percent(probability[i]) : ["feature", "error node", "token"][kinds[i]];
    return [make("div", { class: "what" }, name, ...label(i), " ", make("small", {}, what)),
      make("div", { class: "where" }, ...said, isFeature(i) || isError(i) ? token(data.tokens[position[i]]) : null)];
  }

  function facts(i) {
    const pairs = [];
    if (isFeature(i)) pairs.push(["activation", told(activation[i])]);
    if (!isLogit(i)) pairs.push(["influence", told(influence[i])], ["cumulative", told(cumulative[i])]);
    return make("div", { class: "node-facts" }, ...pairs.map(([name, value]) => make("span", {}, `${name} `, make("b", {}, value))));
  }

  /** A node's name; in cards a button that leads there. */
  function mention(i, isCard) {
    const parts = isToken(i) || isLogit(i) ? [token(graph.textOf(i))] : [title(i), ...writes(i)];
    const where = isLogit(i) ? null : make("span", { class: "dim" }, ` (${position[i]})${isToken(i) ? "" : ` ${data.tokens[position[i]].trim()}`}`);
    return isCard ? make("button", { type: "button", class: "to-node", click: () => state.go(i) }, ...parts, where)
      : make("span", { class: "to-node" }, ...parts, where);
  }

  /** [[mention, weight], …] as a list under a heading; says how many are not listed. */
  function ranking(heading, entries, most) {
    if (!entries.length) return null;
    const largest = Math.abs(entries[0][1]);
    return make("div", {}, make("h6", {}, heading), make("div", { class: "edges" },
      ...entries.slice(0, most).flatMap(([name, value]) => [name(), weightTold(value, largest)])),
    entries.length > most ? make("div", { class: "dim" }, `and ${entries.length - most} more`) : null);
  }

  const linked = (edges, ends, isCard) => edges.filter(state.kept).map((e) => [() => mention(ends[e], isCard), weight[e]]);
  const links = (i, most, isCard) => make("div", { class: "two" },
    ranking("from", linked(graph.into[i], source, isCard), most), ranking("to", linked(graph.outOf[i], target, isCard), most));

  function effects(i) {
    const at = row[i];
    if (at < 0 || !tables.raised.shape[1]) return null;
    const list = (heading, words, values) => make("div", {}, make("h6", {}, heading), make("div", { class: "effects" },
      ...Array.from({ length: tables[words].shape[1] }, (_, k) => make("span", { title: `${told(tables[values].at(at, k), "logits", 3)} per unit of activation` },
        token(notes.words[tables[words].at(at, k)]), make("small", {}, ` ${told(tables[values].at(at, k), "", 2)}`)))));
    return make("div", { class: "two" }, list("raises", "raised", "raised_by"), list("lowers", "lowered", "lowered_by"));
  }

  function examples(i, most) {
    const at = row[i], [, ranks, window] = tables.example_words.shape;
    if (at < 0 || !ranks) return null;
    const texts = [];
    let top = 0;
    for (let rank = 0; rank < ranks; rank++) {
      const words = Array.from({ length: window }, (_, w) => [tables.example_words.at(at, rank, w), tables.example_values.at(at, rank, w)]).filter(([word]) => word >= 0);
      if (words.length) texts.push(words);
      top = Math.max(top, ...words.map(([, value]) => value));
    }
    if (!texts.length) return null;
    return make("div", { class: "examples" }, make("h6", {}, "most active in"), ...texts.slice(0, most).map((words) => make("p", { class: "shaded" },
      ...words.map(([word, value]) => {
        const span = make("span", { title: value ? told(value, "", 3) : null }, running(notes.words[word]));
        if (value > 0) {
          span.style.background = shades.fill(value / top);
          span.style.color = shades.ink(value / top);
        }
        return span;
      }))));
  }

  const tell = (i, isCard) => [...head(i), facts(i),
    isCard && !state.alive(i) ? make("div", { class: "notice" }, "Not drawn: it is below the threshold.") : null,
    links(i, isCard ? 12 : 5, isCard), effects(i), examples(i, isCard ? 20 : 2)].filter(Boolean);

  // -- groups

  /** What enters and leaves a group as a whole: [name, weight] by node, or by group, largest first. */
  function summed(group, edgesOf, ends, isCard) {
    const sums = new Map(), held = new Set(group.members);
    for (const i of group.members) {
      for (const e of edgesOf[i]) {
        if (!state.kept(e) || held.has(ends[e])) continue;
        const end = state.groups().find((other) => other.members.includes(ends[e])) ?? ends[e];
        sums.set(end, (sums.get(end) ?? 0) + weight[e]);
      }
    }
    return [...sums].sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]))
      .map(([end, sum]) => [() => (end.members ? make("b", {}, end.name) : mention(end, isCard)), sum]);
  }

  function tellGroup(group, isCard) {
    const most = isCard ? 12 : 5;
    const share = group.members.reduce((sum, i) => sum + influence[i], 0);
    return [
      make("div", { class: "what" }, group.name, " ", make("small", {}, `group of ${group.members.length}`)),
      make("div", { class: "node-facts" }, make("span", {}, "influence together ", make("b", {}, told(share)))),
      make("div", { class: "members" }, ...group.members.slice(0, isCard ? 200 : 8).map((i) => mention(i, isCard)),
        !isCard && group.members.length > 8 ? ` and ${group.members.length - 8} more` : null),
      make("div", { class: "two" }, ranking("from, summed", summed(group, graph.into, source, isCard), most),
        ranking("to, summed", summed(group, graph.outOf, target, isCard), most)),
    ];
  }
  return { tell, tellGroup, inWords, title, here };
}
