// Pages of features: a list to search and sort, and one feature at a time. Data come as scripts: from a disk nothing
// else can be loaded. Everything shown is text or numbers set as such.

const data = {}; // name -> what a script handed over
const waiting = new Map(); // name of a shard -> what to do when it is there
const take = ([name, value]) => {
  data[name] = value;
  waiting.get(name)?.();
  waiting.delete(name);
};
const early = window.mizarr || [];
window.mizarr = { push: take };
early.forEach(take);

const all = data.features, words = data.vocabulary;
const column = (name) => decode(all[name]).values;
const feature = column("feature"), count = column("count"), mean = column("mean"), largest = column("largest");
const fires = column("fires"), raises = column("raises");
const placeOf = new Map(Array.from(feature, (number, place) => [number, place]));
const ROWS = 100;

/** A token as it is shown alone: line breaks and edges visible. */
const word = (place) => (place ? visible(words[place - 1]) : "");
const visible = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "␣");
const inText = (text) => text.replace(/\n/g, "⏎\n");
const labelOf = (place) => all.labels[feature[place]]?.[0] ?? "";
const share = (place) => count[place] / all.n_tokens;
/** What a feature is called: its label, else what it raises and where it is strongest. */
function nameOf(place) {
  if (labelOf(place)) return labelOf(place);
  if (!count[place]) return "never active";
  const quoted = (token) => `“${words[token - 1].replace(/\n/g, "⏎")}”`;
  const parts = [fires[place] && `fires on ${quoted(fires[place])}`, raises[place] && `raises ${quoted(raises[place])}`];
  return parts.filter(Boolean).join(", ");
}

// -- the list

const ORDERS = {
  "by number": (a, b) => a - b,
  "most frequent first": (a, b) => count[b] - count[a] || a - b,
  "rarest first, of those active": (a, b) => (count[a] || Infinity) - (count[b] || Infinity) || a - b,
  "strongest first": (a, b) => largest[b] - largest[a] || a - b,
  "labelled first": (a, b) => (labelOf(b) ? 1 : 0) - (labelOf(a) ? 1 : 0) || a - b,
};
let order = [], first = 0, current = -1;
const search = make("input", { type: "search", placeholder: "number, label or token", "aria-label": "search", input: sorted });
const sort = make("select", { "aria-label": "order", change: sorted }, ...Object.keys(ORDERS).map((name) => make("option", {}, name)));
const rows = make("ul", { class: "rows" });
const found = make("span", { "aria-live": "polite" });
const before = make("button", { type: "button", click: () => turn(-ROWS) }, "earlier");
const after = make("button", { type: "button", click: () => turn(ROWS) }, "later");
document.getElementById("list").append(
  make("label", {}, "Find", search), make("label", {}, "Order", sort), rows, make("div", { class: "turn" }, before, found, after),
);

/** The features that are looked for, in the order asked for. */
function sorted() {
  const wanted = search.value.trim().toLowerCase();
  const number = /^\d+$/.test(wanted) ? Number(wanted) : null;
  const fits = (place) => !wanted || feature[place] === number || nameOf(place).toLowerCase().includes(wanted);
  order = Array.from(feature, (_, place) => place).filter(fits).sort(ORDERS[sort.value]);
  first = 0;
  listed();
}

function turn(step) {
  first = Math.max(0, Math.min(first + step, Math.floor((order.length - 1) / ROWS) * ROWS));
  listed();
}

function listed() {
  rows.replaceChildren(...order.slice(first, first + ROWS).map((place) => make("li", {},
    make("a", { href: `#${feature[place]}`, "aria-current": place === current ? "page" : null },
      make("span", { class: "name" }, make("b", {}, feature[place]), nameOf(place)),
      make("span", { class: "share", title: "share of tokens" }, count[place] ? percent(share(place)) : "–")))));
  rows.scrollTop = 0;
  found.textContent = order.length ? `${first + 1} to ${Math.min(first + ROWS, order.length)} of ${order.length.toLocaleString("en")}` : "none found";
  before.disabled = first === 0;
  after.disabled = first + ROWS >= order.length;
}

// -- one feature

const host = document.getElementById("page");

/** Hand a shard over to `use`, loading it where it is not there yet. */
function withShard(number, use) {
  const name = `shard ${number}`;
  if (data[name]) return use(data[name]);
  waiting.set(name, () => use(data[name]));
  const file = `data/${String(number).padStart(5, "0")}.js`;
  const failed = () => host.replaceChildren(make("p", { class: "notice" }, `${file} could not be loaded; is the folder whole?`));
  document.head.append(make("script", { src: file, error: failed }));
}

function show() {
  const asked = location.hash.slice(1);
  const place = asked ? placeOf.get(Number(asked)) : undefined;
  if (asked && place === undefined) {
    host.replaceChildren(make("p", { class: "notice" }, `There is no feature ${asked} among these ${feature.length.toLocaleString("en")}.`));
    return;
  }
  current = place ?? order[0];
  for (const link of rows.querySelectorAll("a")) {
    const own = link.getAttribute("href") === `#${feature[current]}`;
    if (own) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const wanted = current;
  withShard(Math.floor(wanted / all.per_file), (shard) => {
    if (wanted === current) draw(wanted, shard);
  });
}

/** To the next or previous feature of the list. */
function step(by) {
  const next = order[order.indexOf(current) + by];
  if (next !== undefined) location.hash = `#${feature[next]}`;
}

const card = (name, ...children) => make("section", { class: `element ${name}` }, ...children);

function draw(place, shard) {
  const row = place % all.per_file;
  /** Row of an array of the shard: its values along the last axes. */
  const at = (name) => {
    const block = (shard[name].decoded ??= decode(shard[name]));
    const size = block.values.length / block.shape[0];
    return block.values.subarray(row * size, (row + 1) * size);
  };
  const label = all.labels[feature[place]];
  const facts = [
    ["active", count[place] ? `${percent(share(place))} of tokens` : "never"],
    ["tokens", count[place].toLocaleString("en")],
    ["largest", told(largest[place])],
    ["mean where active", told(mean[place])],
    ["norm of decoder", told(at("norm")[0])],
  ];
  const top = card("", make("div", { class: "head" },
    make("h2", {}, `Feature ${feature[place]}`),
    make("div", { class: "steps" },
      make("button", { type: "button", click: () => step(-1), title: "k or left arrow" }, "← previous"),
      make("button", { type: "button", click: () => step(1), title: "j or right arrow" }, "next →"))),
  label ? make("p", { class: "label" }, label[0], " ", make("small", {}, [label[1], label[2].slice(0, 10)].filter(Boolean).join(", "))) : null,
  make("dl", { class: "values" }, ...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))));
  const parts = [top];
  if (count[place]) parts.push(card("half", make("h2", {}, "Activations"), strengths(place, at)));
  if (shard.raised) {
    parts.push(card("half", make("h2", {}, "Effect on logits"), bars(at("effects"), at("low")[0], at("high")[0], [], true)));
    parts.push(card("", make("h2", {}, "Tokens it moves"), make("div", { class: "columns" },
      table("raises", at("raised"), at("raised_by"), logit), table("lowers", at("lowered"), at("lowered_by"), logit)),
    make("p", { class: "caption" }, "By what its decoder adds, read by the unembedding, in logits per unit of activation, less the mean over the vocabulary.")));
  }
  parts.push(card("examples", make("h2", {}, "Where it fires"), ...examples(place, at)));
  parts.push(card("third", make("h2", {}, "Writes alike"), relatives("cosine of decoders", at("neighbour"), at("cosine"))));
  parts.push(card("third", make("h2", {}, "Correlated"), relatives("correlation", at("correlated"), at("correlation"))));
  parts.push(card("third", make("h2", {}, "Active together"), relatives("of tokens of either", at("companion"), at("jaccard"), percent)));
  parts.push(make("p", { class: "caption" }, `Correlations and shared tokens are counted over ${all.sampled.toLocaleString("en")} of ${all.n_tokens.toLocaleString("en")} tokens; pairs seen together once are left out.`));
  host.replaceChildren(...parts);
  document.title = `Feature ${feature[place]} · ${all.title}`;
}

const logit = (place) => token(word(place));

function table(name, places, values, cell) {
  return make("div", { class: "scroll" }, make("table", {},
    make("thead", {}, make("tr", {}, make("th", { scope: "col" }, name), make("th", { scope: "col", class: "right" }, "logits"))),
    make("tbody", {}, ...Array.from(places, (place, i) => make("tr", {}, make("td", {}, cell(place)), make("td", { class: "right" }, signed(values[i])))))));
}

const signed = (value) => (value > 0 ? "+" : "") + told(value, "", 3);

/** Features close to this one, with what tells how close. */
function relatives(name, numbers, values, format = (value) => value.toFixed(3)) {
  const those = Array.from(numbers, (number, i) => [number, values[i]]).filter(([number]) => number >= 0);
  if (!those.length) return make("p", { class: "dim" }, "none");
  return make("div", { class: "scroll" }, make("table", {},
    make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "feature"), make("th", { scope: "col", class: "right" }, name))),
    make("tbody", {}, ...those.map(([number, value]) => {
      const place = placeOf.get(number);
      const called = place === undefined ? [number] : [make("a", { href: `#${number}` }, number), ` ${nameOf(place)}`];
      return make("tr", {}, make("td", { title: place === undefined ? null : nameOf(place) }, ...called), make("td", { class: "right" }, format(value)));
    }))));
}

// -- histograms

const WIDE = 460, HIGH = 130, FOOT = 20;

/** Bars of counts from low to high; edges: where dashed lines stand, as shares of the range. */
function bars(counts, low, high, edges = [], isSigned = false) {
  const most = Math.max(...counts, 1), step = WIDE / counts.length;
  const zero = low < 0 && high > 0 ? -low / (high - low) * WIDE : null;
  const side = (i) => (isSigned ? (low + (high - low) * (i + 0.5) / counts.length < 0 ? "below" : "above") : null);
  const label = (x, text, anchor) => make("text", { x, y: HIGH + FOOT - 4, "text-anchor": anchor }, text);
  const drawn = make("svg", { class: "bars", viewBox: `0 0 ${WIDE} ${HIGH + FOOT}`, role: "img", "aria-label": `histogram from ${told(low)} to ${told(high)}, at most ${most} in a bar` },
    ...Array.from(counts, (value, i) => {
      const tall = value ? Math.max(1, value / most * (HIGH - 4)) : 0;
      const from = low + (high - low) * i / counts.length, to = low + (high - low) * (i + 1) / counts.length;
      const say = (event) => showTip(event.target.getBoundingClientRect(), [
        make("div", { class: "what" }, value.toLocaleString("en"), " ", make("small", {}, "tokens")), make("div", { class: "where" }, `${told(from, "", 3)} to ${told(to, "", 3)}`)]);
      return make("rect", { x: i * step + 0.5, y: HIGH - tall, width: Math.max(step - 1, 0.5), height: tall, class: side(i), pointerenter: say, pointerleave: hideTip });
    }),
    ...edges.map((edge) => make("line", { class: "edge", x1: edge * WIDE, x2: edge * WIDE, y1: 0, y2: HIGH })),
    make("line", { class: "axis", x1: 0, x2: WIDE, y1: HIGH, y2: HIGH }),
    label(0, told(low, "", 3), "start"), label(WIDE, told(high, "", 3), "end"),
    zero !== null && zero > 60 && zero < WIDE - 60 ? label(zero, "0", "middle") : null);
  return drawn;
}

function strengths(place, at) {
  const edges = Array.from({ length: all.intervals - 1 }, (_, i) => (i + 1) / all.intervals);
  return make("div", {}, bars(at("histogram"), 0, largest[place], edges),
    make("p", { class: "caption" }, "Tokens by activation, where it is active; dashed: the intervals of the examples below."));
}

// -- examples

function* examples(place, at) {
  const ids = at("ids"), levels = at("levels"), value = at("value"), prompt = at("prompt"), position = at("position");
  const counts = at("interval_count"), wide = all.window.length, middle = all.window.indexOf(0);
  const total = value.length, each = (total - all.strongest) / all.intervals;
  const colours = scale(0, 255);
  const text = (example) => {
    const spans = [];
    for (let i = 0; i < wide; i++) {
      const id = ids[example * wide + i];
      if (!id) continue;
      const level = levels[example * wide + i];
      const exact = i === middle ? told(value[example], "", 4) : level ? `about ${told(level / 255 * largest[place], "", 2)}` : "silent";
      const span = make("span", { class: i === middle ? "peak" : null,
        pointerenter: (event) => showTip(event.target.getBoundingClientRect(), [
          make("div", { class: "what" }, exact), make("div", { class: "where" }, token(word(id)), ` prompt ${prompt[example]}, position ${position[example] + all.window[i]}`)]),
        pointerleave: hideTip }, inText(words[id - 1]));
      const shade = () => {
        span.style.background = level ? colours.fill(level) : "none";
        span.style.color = level ? colours.ink(level) : "";
      };
      shade();
      span.shade = shade;
      spans.push(span);
    }
    return make("div", { class: "text" }, make("div", { class: "where" }, told(value[example], "", 3)), make("p", { class: "shaded" }, ...spans));
  };
  const some = (from, to) => {
    const shown = [];
    for (let example = from; example < to; example++) if (prompt[example] >= 0) shown.push(text(example));
    return shown;
  };
  if (!count[place]) {
    yield make("p", { class: "dim" }, "Nowhere in this corpus.");
    return;
  }
  yield make("h3", {}, "The strongest ", make("small", {}, "one place of each text"));
  yield* some(0, all.strongest);
  for (let interval = all.intervals - 1; interval >= 0; interval--) {
    const [low, high] = [interval, interval + 1].map((i) => told(largest[place] * i / all.intervals, "", 3));
    const shown = some(all.strongest + interval * each, all.strongest + (interval + 1) * each);
    if (!shown.length) continue;
    yield make("h3", {}, `${low} to ${high} `, make("small", {}, `${percent(counts[interval] / count[place])} of its activations`));
    yield* shown;
  }
}

redraws.add(() => host.querySelectorAll(".shaded span").forEach((span) => span.shade()));

// -- start

document.getElementById("about").append(make("ul", {}, ...all.about.map(([name, value]) => make("li", {}, make("b", {}, name), value))));
addEventListener("hashchange", () => {
  hideTip();
  show();
  if (host.getBoundingClientRect().top > innerHeight / 3) host.scrollIntoView(); // where the list stands above it
});
addEventListener("keydown", (event) => {
  if (event.target.closest("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const by = { j: 1, ArrowRight: 1, k: -1, ArrowLeft: -1 }[event.key];
  if (by) step(by);
  if (event.key === "/") {
    event.preventDefault();
    search.focus();
  }
});
sort.value = "most frequent first";
sorted();
show();
document.documentElement.dataset.ready = "";
