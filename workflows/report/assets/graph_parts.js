// An attribution graph as numbers: nodes and edges out of blocks, what is kept at two thresholds, and where
// every node lies. Nothing here draws.

/** Nodes and edges by index; `into` and `outOf` list a node's edges, strongest first. */
function readGraph(data) {
  const column = (name) => decode(data[name]).values;
  const [kinds, layer, position, number] = ["kinds", "layer", "position", "number"].map(column);
  const [activation, influence, cumulative, probability, row] = ["activation", "influence", "cumulative", "probability", "row"].map(column);
  const [source, target, weight] = ["source", "target", "weight"].map(column);
  const size = kinds.length, nodes = Array.from({ length: size }, (_, i) => i);
  const [isFeature, isError, isToken, isLogit] = [0, 1, 2, 3].map((kind) => (i) => kinds[i] === kind);
  const into = nodes.map(() => []), outOf = nodes.map(() => []);
  for (let e = 0; e < source.length; e++) {
    into[target[e]].push(e);
    outOf[source[e]].push(e);
  }
  // As circuit-tracer's viewer calls nodes; there an error may be called as a feature of layer 0 is.
  const nameOf = (i) => [
    `${layer[i]}_${number[i]}_${position[i]}`, `0_${layer[i]}_${position[i]}`, `E_${number[i]}_${position[i]}`,
    `${layer[i] + 1}_${number[i]}_${position[i]}`,
  ][kinds[i]];
  const byName = new Map();
  for (const i of nodes) if (!byName.has(nameOf(i))) byName.set(nameOf(i), i); // features come first
  const textOf = (i) => (isLogit(i) ? data.logits[i - size + data.logits.length] : data.tokens[position[i]]);
  return { nodes, kinds, layer, position, number, activation, influence, cumulative, probability, row, source, target, weight,
    into, outOf, isFeature, isError, isToken, isLogit, nameOf, byName, textOf };
}

/**
 * What carries a share of the influence, as stages/graph/pruning.py finds it: nodes that together have
 * `nodeShare`, tokens and logits; of the edges among them those with `edgeShare` of the edges' scores; then,
 * until nothing changes, features and errors that lead nowhere, and features nothing leads to, go.
 */
function pruner(graph) {
  const { nodes, kinds, layer, influence, cumulative, probability, source, target, weight, into, isFeature, isLogit, isToken } = graph;
  const ranked = nodes.filter((i) => !isLogit(i)).sort((a, b) => cumulative[a] - cumulative[b] || a - b);
  const downward = nodes.filter((i) => into[i].length).sort((a, b) => layer[b] - layer[a]);

  return (nodeShare, edgeShare) => {
    const last = ranked.find((i) => cumulative[i] >= nodeShare);
    const least = last === undefined ? 0 : influence[last];
    const alive = nodes.map((i) => isToken(i) || isLogit(i) || (influence[i] > 0 && influence[i] >= least));
    const score = scores(alive);
    const bound = sharedBy(score, edgeShare);
    const kept = Array.from(score, (each) => each >= bound);
    for (let changed = true; changed;) {
      const leads = new Uint8Array(nodes.length), isLed = new Uint8Array(nodes.length);
      kept.forEach((is, e) => { if (is) leads[source[e]] = isLed[target[e]] = 1; });
      changed = false;
      for (const i of nodes) {
        if (alive[i] && kinds[i] < 2 && !(leads[i] && (isLed[i] || !isFeature(i)))) { alive[i] = false; changed = true; }
      }
      kept.forEach((is, e) => { if (is && !(alive[source[e]] && alive[target[e]])) kept[e] = false; });
    }
    return { alive, kept, nodeCount: alive.filter(Boolean).length, edgeCount: kept.filter(Boolean).length };
  };

  /** Influence through every edge among living nodes, from the logits down. */
  function scores(alive) {
    const entering = new Float64Array(nodes.length), total = Float64Array.from(probability, (p) => p || 0);
    const score = new Float64Array(weight.length);
    const counts = (e) => alive[source[e]] && alive[target[e]];
    for (let e = 0; e < weight.length; e++) if (counts(e)) entering[target[e]] += Math.abs(weight[e]);
    for (const t of downward) {
      if (!total[t]) continue;
      const share = total[t] / Math.max(entering[t], 1e-10);
      for (const e of into[t]) if (counts(e)) total[source[e]] += score[e] = Math.abs(weight[e]) * share;
    }
    return score;
  }

  /** The score down to which the largest sum to `share` of all; never 0. */
  function sharedBy(score, share) {
    const positive = score.filter((each) => each > 0).sort().reverse();
    const wanted = share * positive.reduce((sum, each) => sum + each, 0);
    let sum = 0;
    for (const each of positive) if ((sum += each) >= wanted) return each;
    return positive.length ? positive[positive.length - 1] : Infinity;
  }
}

const PITCH = 15, DOT = 5.2, BOX = 22, LEAST = 36, LONGEST = 84, TALL = 340;

/**
 * Where nodes lie: columns are positions, rows are layers from below, nodes of a cell side by side in lines.
 * alive: which nodes. tokens: texts by position. room: pixels across; more are taken when columns would become
 * too narrow to read. first(a, b): compares nodes of a cell. Returns place (node -> {x, y, wide, high}), columns, rows, width, height.
 */
function layOut(graph, { alive, layers, tokens, room, first }) {
  const { nodes, kinds, layer, position, isLogit, isToken, textOf, probability } = graph;
  const cells = Array.from({ length: layers }, () => tokens.map(() => []));
  for (const i of nodes) if (alive[i] && kinds[i] < 2) cells[layer[i]][position[i]].push(i);
  cells.forEach((row) => row.forEach((cell) => cell.sort(first)));
  const most = tokens.map((_, p) => Math.max(1, ...cells.map((row) => row[p].length)));
  const least = tokens.map((text) => Math.max(LEAST, Math.min(LONGEST, widthOf(text) + 16)));
  const across = (stretch) => most.map((count) => Math.max(1, Math.min(count, Math.ceil(Math.sqrt(count) * stretch))));
  const widths = (counts) => counts.map((count, p) => Math.max(least[p], count * PITCH + 14));
  const total = (sizes) => sizes.reduce((sum, each) => sum + each, 0);

  let low = 1, high = Math.sqrt(Math.max(...most));
  for (let step = 0; step < 20; step++) {
    const middle = (low + high) / 2;
    if (total(widths(across(middle))) <= room) low = middle; else high = middle;
  }
  const counts = across(low), sizes = widths(counts);
  const spare = Math.max(0, room - total(sizes)) / tokens.length;
  const columns = [];
  sizes.reduce((left, wide) => { columns.push({ left, wide: wide + spare }); return left + wide + spare; }, 0);
  const width = Math.max(room, total(sizes));

  const place = new Map(), rows = [];
  // Logits are outputs of the last position only: side by side from the right, in as many lines as they take.
  let line = [], taken = 0, y = 6;
  const close = () => {
    let x = width - 4;
    for (const { i, wide } of line.reverse()) {
      place.set(i, { x: x - wide / 2, y: y + BOX / 2, wide, high: BOX });
      x -= wide + 6;
    }
    y += BOX + 6;
    line = [], taken = 0;
  };
  for (const i of nodes.filter((each) => isLogit(each) && alive[each])) {
    const wide = Math.min(150, Math.max(40, widthOf(`${textOf(i)} ${percent(probability[i])}`) + 20));
    if (line.length && taken + wide > width - 8) close();
    line.push({ i, wide });
    taken += wide + 6;
  }
  close();
  rows.push({ name: "logits", top: 0, high: y });
  const needs = cells.map((row) => {
    const lines = Math.max(...row.map((cell, p) => Math.ceil(cell.length / counts[p])));
    return lines ? lines * PITCH + 16 : 18;
  });
  const ease = Math.min(44, Math.max(0, TALL - total(needs)) / layers); // so that edges of a small graph part
  for (let l = layers - 1; l >= 0; l--) {
    const high = needs[l] + ease;
    rows.push({ name: `L${l}`, top: y, high });
    cells[l].forEach((cell, p) => {
      const own = Math.ceil(cell.length / counts[p]);
      cell.forEach((i, k) => {
        const at = Math.floor(k / counts[p]), inLine = Math.min(counts[p], cell.length - at * counts[p]);
        place.set(i, {
          x: columns[p].left + columns[p].wide / 2 + ((k % counts[p]) - (inLine - 1) / 2) * PITCH,
          y: y + high / 2 + (at - (own - 1) / 2) * PITCH, wide: 2 * DOT, high: 2 * DOT,
        });
      });
    });
    y += high;
  }
  rows.push({ name: "tokens", top: y, high: 44 });
  for (const i of nodes.filter((each) => isToken(each) && alive[each])) {
    const { left, wide } = columns[position[i]];
    place.set(i, { x: left + wide / 2, y: y + 8 + BOX / 2, wide: Math.min(wide - 4, Math.max(28, widthOf(textOf(i)) + 12)), high: BOX });
  }
  return { place, columns, rows, width, height: y + 44 };
}
