// Texts whose tokens are shaded by a number; a token is told under the pointer, or as the arrow keys reach it.

/** A token as running text has it: beside letters a space is one, so that lines break there. */
const running = (word) => (/[^␣⏎⇥]/.test(word) ? word.replaceAll("␣", " ") : word);

DRAW.tokens = (host, data) => {
  const texts = data.texts.map((text) => ({ ...text, points: decode(text.values) }));
  const [low, high] = extent(texts.flatMap((text) => [...extent(text.points.values)]));
  const colours = scale(data.low ?? low, data.high ?? high, data.diverging);
  const spans = [];
  let current = 0;

  for (const text of texts) {
    const exact = (i) => told(text.points.values[i], data.unit, text.points.digits);
    const line = make("p", { class: "shaded" }, ...text.tokens.map((word, i) => {
      const at = spans.length;
      const say = () => {
        current = at;
        showTip(span.getBoundingClientRect(), [
          make("div", { class: "what" }, exact(i), " ", make("small", {}, data.value_name)),
          make("div", { class: "where" }, token(word), ` (${i})`),
        ], document.activeElement === span ? `${word}: ${exact(i)}` : "");
      };
      const span = make("span", { tabindex: at ? -1 : 0, pointerenter: say, focus: say, pointerleave: hideTip, blur: hideTip }, running(word));
      const value = text.points.values[i];
      spans.push({ span, shade() {
        span.style.background = Number.isNaN(value) ? "none" : colours.fill(value);
        span.style.color = Number.isNaN(value) ? "" : colours.ink(value);
      } });
      return span;
    }));
    host.append(make("div", { class: "text" }, text.label ? make("div", { class: "where" }, text.label) : null, line));
  }
  host.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -spans.length, End: spans.length }[event.key];
    if (!step) return;
    event.preventDefault();
    spans[current].span.tabIndex = -1;
    current = Math.min(spans.length - 1, Math.max(0, current + step));
    spans[current].span.tabIndex = 0;
    spans[current].span.focus();
  });
  const shade = () => spans.forEach((each) => each.shade());
  redraws.add(shade);
  shade();
  host.append(make("div", { class: "legend" }, ramp(colours, data.value_name, data.unit)));
};
