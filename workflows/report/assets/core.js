"use strict";

// What every drawn element uses: numbers out of blocks, colours of numbers, a tooltip, small DOM helpers.

const DRAW = {}; // kind -> (host, data) => undefined; the files after this one fill it
const dark = matchMedia("(prefers-color-scheme: dark)");
const redraws = new Set();
dark.addEventListener("change", () => redraws.forEach((draw) => draw()));

// -- numbers

const ARRAYS = {
  "<f4": Float32Array, "|u1": Uint8Array, "|i1": Int8Array, "<u2": Uint16Array, "<i2": Int16Array, "<i4": Int32Array,
};

/** An array of blocks.py: values in C order, shape, at(i, j, …), and how many digits it is good for. */
function decode(block) {
  const text = atob(block.data);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const half = block.dtype === "<f2";
  const values = half
    ? Float32Array.from(new Uint16Array(bytes.buffer), fromHalf)
    : new ARRAYS[block.dtype](bytes.buffer);
  const at = (...index) => values[index.reduce((flat, i, axis) => flat * block.shape[axis] + i, 0)];
  return { values, shape: block.shape, digits: half ? 3 : 4, at };
}

function fromHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, rest = bits & 1023;
  if (exponent === 31) return rest ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + rest / 1024) : 2 ** -14 * (rest / 1024));
}

/** A number as people read it: four digits, no more zeros than it needs. */
function told(value, unit = "", digits = 4) {
  if (Number.isNaN(value)) return "no value";
  const size = Math.abs(value);
  const text = size && (size < 1e-4 || size >= 1e7) ? value.toExponential(digits - 1) : String(Number(value.toPrecision(digits)));
  return unit ? `${text} ${unit}` : text;
}

/** A probability as a percentage one can read at a glance, as the tables have it. */
function percent(p) {
  if (Number.isNaN(p)) return "no value";
  const share = 100 * p;
  if (share === 0) return "0%";
  return share >= 1 ? `${share.toFixed(1)}%` : share >= 0.01 ? `${share.toFixed(3)}%` : `${share.toExponential(1).replace(/-(\d)$/, "-0$1")}%`;
}

/** Smallest and largest of the finite values; [0, 1] where there is none. */
function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low && Number.isFinite(value)) low = value;
    if (value > high && Number.isFinite(value)) high = value;
  }
  return low <= high ? [low, high] : [0, 1];
}

const isNumber = (label) => label.trim() !== "" && Number.isFinite(Number(label));

/** 1, 2, 5, 10, 20, … : the first that is at least `least`. */
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((times) => times * power >= least * 0.999);
}

// -- colours

const RAMPS = {
  sequential: {
    light: ["#f4f6f8", "#cfe3ed", "#8cbdd5", "#3f86ad", "#123c5a"],
    dark: ["#20262e", "#234a61", "#2d7399", "#62add0", "#dcf1fa"],
  },
  diverging: {
    light: ["#134e6e", "#7db0ca", "#f5f5f3", "#eba47a", "#a63a0c"],
    dark: ["#93d2ef", "#30708f", "#22272e", "#a5552d", "#ffb78a"],
  },
};
// Of a curve alone; of several, neither blue nor orange, which in a grid mean a sign.
const ONE_COLOUR = { light: "#1d5b7f", dark: "#7cc0e4" };
const LINE_COLOURS = {
  light: ["#7e22ce", "#4d7c0f", "#0f766e", "#a16207", "#be185d", "#475569"],
  dark: ["#c9a2ff", "#a3d15a", "#5ed0c4", "#e3b64b", "#ff8fbd", "#a9b4c6"],
};
const CARD = { light: "#ffffff", dark: "#1a1e25" };
const mode = () => (dark.matches ? "dark" : "light");
const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

/** A colour that is as much of the card it lies on. */
const tint = (hex, share) => `rgb(${rgb(hex).map((channel, c) => Math.round(channel + (rgb(CARD[mode()])[c] - channel) * share))})`;

/** Colours of numbers from low to high: fill(value), ink(value) for text on it, and the ramp as a gradient. */
function scale(low, high, diverging = false) {
  if (diverging) low = -(high = Math.max(Math.abs(low), Math.abs(high)) || 1);
  else if (low === high) high = low + 1;
  const stops = () => RAMPS[diverging ? "diverging" : "sequential"][mode()];
  const mix = (value) => {
    const colours = stops().map(rgb);
    const place = Math.min(1, Math.max(0, (value - low) / (high - low))) * (colours.length - 1);
    const i = Math.min(colours.length - 2, Math.floor(place));
    return colours[i].map((channel, c) => Math.round(channel + (colours[i + 1][c] - channel) * (place - i)));
  };
  const ink = (value) => {
    const [r, g, b] = mix(value).map((c) => (c / 255) ** 2.2);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.25 ? "#12161c" : "#ffffff";
  };
  return { low, high, ink, fill: (value) => `rgb(${mix(value)})`, gradient: () => `linear-gradient(to right, ${stops()})` };
}

// -- DOM

/** An element: properties (functions listen, `class` and ARIA included), then children. */
function make(tag, properties = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "tspan", "circle", "g", "rect"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** A token in its own typeface, spaces visible by its background. */
const token = (text) => make("span", { class: "token" }, text || "∅");

/** A labelled <select>; chosen(index) is called on every change. */
function menu(name, labels, start, chosen) {
  const select = make("select", { change: () => chosen(select.selectedIndex) },
    ...labels.map((label, i) => make("option", { value: i }, label)));
  select.selectedIndex = start;
  return make("label", {}, name, select);
}

let groups = 0;

/** A row of radio buttons that looks like one control. */
function segments(name, labels, start, chosen) {
  const group = `g${++groups}`;
  return make("fieldset", { class: "segments" }, make("legend", {}, name), ...labels.map((label, i) =>
    make("label", {}, make("input", { type: "radio", name: group, value: i, checked: i === start, change: () => chosen(i) }), label)));
}

/** The legend of a colour scale. */
function ramp(colours, name, unit, format = told) {
  const strip = make("i");
  const show = () => { strip.style.background = colours.gradient(); };
  redraws.add(show);
  show();
  const end = (value) => make("span", {}, format(value, unit));
  return make("span", { class: "ramp" }, name ? make("span", {}, name) : null, end(colours.low), strip, end(colours.high));
}

// -- tooltip

const bubble = make("div", { class: "tip", role: "tooltip" });
const spoken = make("div", { class: "unseen", "aria-live": "polite" });
document.body.append(bubble, spoken);
addEventListener("scroll", hideTip, { capture: true, passive: true });

/** Show nodes beside a rectangle of the window, on whichever side has room; say: what a screen reader is told. */
function showTip(box, nodes, say = "") {
  bubble.replaceChildren(...nodes);
  const { width, height } = bubble.getBoundingClientRect();
  const right = document.documentElement.clientWidth - 8;
  const after = box.right + 10 + width <= right, before = !after && box.left - 10 - width >= 8;
  const beside = after || before;
  const left = after ? box.right + 10 : before ? box.left - 10 - width : Math.max(8, Math.min(box.left, right - width));
  let top = beside ? box.top - 6 : box.bottom + 10;
  if (top + height > innerHeight - 8) top = beside ? innerHeight - 8 - height : box.top - height - 10;
  bubble.style.left = `${left}px`;
  bubble.style.top = `${Math.max(8, top)}px`;
  bubble.classList.add("on");
  if (say) spoken.textContent = say;
}

function hideTip() {
  bubble.classList.remove("on");
}
