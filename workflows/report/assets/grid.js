// A grid of cells on a canvas: what heatmaps, lens and attention share. Only what is in view is painted, so a
// grid may have thousands of columns; labels stay in view while cells scroll.

const FONT = '12px ui-monospace, "SF Mono", "Cascadia Mono", "DejaVu Sans Mono", Menlo, Consolas, monospace';
const GAP = 8, TILT = -Math.PI / 3;
const WHOLE = 96; // rows up to which a grid is shown whole; one of more scrolls inside a window
const pen = document.createElement("canvas").getContext("2d");

function widthOf(text) {
  pen.font = FONT;
  return pen.measureText(text).width;
}

/** `text` cut to `room` pixels. */
function fitted(text, room) {
  if (widthOf(text) <= room) return text;
  let end = text.length;
  while (end > 0 && widthOf(`${text.slice(0, end)}…`) > room) end--;
  return end ? `${text.slice(0, end)}…` : "";
}

/**
 * rows, columns: labels.  cell(room): {width, height} of a cell when `room` pixels are there for all columns.
 * fill(row, column), ink: colours.  text(row, column): written into the cell.  framed(row, column): whether it
 * has a frame; blocks: [first row, first column, last row, last column] of frames around several.
 * tip(row, column): nodes of the tooltip.  say(row, column): the same in words.  pick(row, column): on a click,
 * Enter or Space.  moved(row, column): whenever the cursor is somewhere else.  upward: first row at the bottom.
 */
function grid(host, { rows, columns, cell, fill, ink, text, framed, blocks = [], tip, say, pick, moved, upward = false, name }) {
  const gutter = Math.min(150, Math.ceil(Math.max(...rows.map(widthOf))) + 2 * GAP);
  const longest = Math.ceil(Math.max(...columns.map((label) => widthOf(label))));
  const canvas = make("canvas");
  const space = make("div", {}, canvas);
  const box = make("div", { class: rows.length > WHOLE ? "grid tall" : "grid", tabindex: 0, role: "application", "aria-roledescription": "grid",
    "aria-label": `${name}: ${rows.length} rows, ${columns.length} columns; arrow keys move, Enter chooses` }, space);
  host.append(box);
  const numeric = columns.every(isNumber);
  let size, tilted, header, over = null, picked = null;

  const lineOf = (row) => (upward ? rows.length - 1 - row : row);
  const left = (column) => gutter + column * size.width - box.scrollLeft;
  const top = (row) => header + lineOf(row) * size.height - box.scrollTop;

  function measure() {
    const room = (host.clientWidth || 600) - gutter - 2;
    size = cell(room);
    tilted = !numeric && longest + 6 > size.width;
    const lean = tilted ? Math.ceil(Math.min(96, longest) * Math.cos(TILT)) : 0;
    if (tilted) size = cell(room - lean);
    header = tilted ? Math.min(96, Math.ceil(longest * Math.sin(-TILT)) + 16) : 24;
    const whole = [gutter + columns.length * size.width + lean + 1, header + rows.length * size.height + 1];
    space.style.width = `${whole[0]}px`;
    space.style.height = `${whole[1]}px`;
    canvas.style.width = "0px"; // so that it does not decide the size of the box
    const wide = Math.min(whole[0], box.clientWidth), high = Math.min(whole[1], box.clientHeight);
    const sharp = devicePixelRatio || 1;
    canvas.width = Math.round(wide * sharp);
    canvas.height = Math.round(high * sharp);
    canvas.style.width = `${wide}px`;
    canvas.style.height = `${high}px`;
    paint();
  }

  function paint() {
    const context = canvas.getContext("2d"), sharp = devicePixelRatio || 1;
    const wide = canvas.width / sharp, high = canvas.height / sharp;
    const style = getComputedStyle(box);
    const colours = Object.fromEntries(["ink", "soft", "accent", "card"].map((n) => [n, style.getPropertyValue(`--${n}`)]));
    context.setTransform(sharp, 0, 0, sharp, 0, 0);
    context.clearRect(0, 0, wide, high);
    context.font = FONT;
    context.textBaseline = "middle";
    const seen = { from: Math.max(0, Math.floor(box.scrollLeft / size.width)), to: Math.min(columns.length, Math.ceil((box.scrollLeft + wide - gutter) / size.width)) };
    const lines = { from: Math.max(0, Math.floor(box.scrollTop / size.height)), to: Math.min(rows.length, Math.ceil((box.scrollTop + high - header) / size.height)) };
    const seam = Math.min(size.width, size.height) > 9 ? 1 : 0;
    context.save();
    context.beginPath();
    context.rect(gutter, header, wide, high);
    context.clip();
    for (let line = lines.from; line < lines.to; line++) {
      const row = lineOf(line);
      for (let column = seen.from; column < seen.to; column++) {
        const x = left(column), y = top(row);
        const colour = fill(row, column);
        if (colour === null) continue;
        context.fillStyle = colour;
        context.fillRect(x, y, size.width - seam, size.height - seam);
        const word = text ? text(row, column) : "";
        if (word) {
          context.fillStyle = ink(row, column);
          context.fillText(fitted(word, size.width - 9), x + 4, y + size.height / 2 + 0.5);
        }
        if (framed?.(row, column)) frame(context, [row, column, row, column], colours.accent, 1.5);
      }
    }
    for (const block of blocks) frame(context, block, colours.accent, 2);
    if (picked) frame(context, [...picked, ...picked], colours.accent, 2.5);
    if (over) frame(context, [...over, ...over], colours.ink, 1.5);
    context.restore();
    labels(context, colours, seen, lines, wide);
    fade(context, colours.card, wide, high);
  }

  /** The card's colour over the last cells at a side where there are more. */
  function fade(context, card, wide, high) {
    const patch = (x, y, width, height, ...line) => {
      const veil = context.createLinearGradient(...line);
      veil.addColorStop(0, `${card}00`);
      veil.addColorStop(1, card);
      context.fillStyle = veil;
      context.fillRect(x, y, width, height);
    };
    if (box.scrollLeft + box.clientWidth < box.scrollWidth - 1) patch(wide - 22, 0, 22, high, wide - 22, 0, wide, 0);
    if (box.scrollTop + box.clientHeight < box.scrollHeight - 1) patch(0, high - 22, wide, 22, 0, high - 22, 0, high);
  }

  function frame(context, [row, column, lastRow, lastColumn], colour, width) {
    const x = left(column), y = Math.min(top(row), top(lastRow));
    const wide = (lastColumn - column + 1) * size.width, high = (Math.abs(lastRow - row) + 1) * size.height;
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.strokeRect(x + width / 2 - 0.5, y + width / 2 - 0.5, wide - width, high - width);
  }

  function labels(context, colours, seen, lines, wide) {
    const rowStep = roundStep(Math.max(1, 15 / size.height));
    const columnStep = roundStep(Math.max(1, (tilted ? 14 : longest + (numeric ? 12 : 6)) / size.width));
    const skipped = (label, index, step) => step > 1 && (isNumber(label) ? Number(label) : index) % step !== 0;
    // The label under the cursor is always there, on a patch of its own where its neighbours are.
    const patch = (x, y, wide, high) => { context.fillStyle = colours.card; context.fillRect(x, y, wide, high); };
    context.textAlign = "right";
    context.save();
    context.beginPath();
    context.rect(0, header, gutter, canvas.height);
    context.clip();
    const rowLabel = (row, colour) => {
      context.fillStyle = colour;
      context.fillText(fitted(rows[row], gutter - 2 * GAP), gutter - GAP, top(row) + size.height / 2);
    };
    for (let line = lines.from; line < lines.to; line++) {
      if (!skipped(rows[lineOf(line)], lineOf(line), rowStep)) rowLabel(lineOf(line), colours.soft);
    }
    if (over) {
      patch(0, top(over[0]) + size.height / 2 - 9, gutter - 2, 18);
      rowLabel(over[0], colours.ink);
    }
    context.restore();
    context.textAlign = "left";
    context.save();
    context.beginPath();
    context.rect(gutter - 1, 0, wide, header);
    context.clip();
    const columnLabel = (column, colour) => {
      context.save();
      context.translate(left(column) + (tilted ? size.width / 2 + 1 : numeric ? size.width / 2 : 4), tilted ? header - 7 : header / 2 + 2);
      if (tilted) context.rotate(TILT);
      else if (colour === colours.ink) patch(numeric ? -longest / 2 - 5 : -3, -9, numeric ? longest + 10 : size.width - 2, 18);
      context.fillStyle = colour;
      context.fillText(numeric ? columns[column] : fitted(columns[column], tilted ? 96 : size.width - 6), 0, 0);
      context.restore();
    };
    context.textAlign = numeric ? "center" : "left";
    for (let column = seen.from; column < seen.to; column++) {
      if (!skipped(columns[column], column, columnStep)) columnLabel(column, colours.soft);
    }
    if (over) columnLabel(over[1], colours.ink);
    context.restore();
  }

  function cellAt(event) {
    const area = canvas.getBoundingClientRect();
    const x = event.clientX - area.left, y = event.clientY - area.top;
    if (x < gutter || y < header) return null;
    const column = Math.floor((x - gutter + box.scrollLeft) / size.width);
    const line = Math.floor((y - header + box.scrollTop) / size.height);
    return column < columns.length && line < rows.length ? [lineOf(line), column] : null;
  }

  function hover(place, loud) {
    if (place && !loud && fill(...place) === null) place = null;
    if (!loud && place?.[0] === over?.[0] && place?.[1] === over?.[1] && bubble.classList.contains("on")) return;
    over = place;
    paint();
    if (!place || fill(...place) === null) return hideTip();
    moved?.(...place);
    const area = canvas.getBoundingClientRect();
    const x = area.left + left(place[1]), y = area.top + top(place[0]);
    showTip({ left: x, right: x + size.width, top: y, bottom: y + size.height }, tip(...place), loud ? say(...place) : "");
  }

  function reveal([row, column]) {
    const x = column * size.width, y = lineOf(row) * size.height;
    const wide = box.clientWidth - gutter, high = box.clientHeight - header;
    if (x < box.scrollLeft) box.scrollLeft = x;
    else if (x + size.width > box.scrollLeft + wide) box.scrollLeft = x + size.width - wide;
    if (y < box.scrollTop) box.scrollTop = y;
    else if (y + size.height > box.scrollTop + high) box.scrollTop = y + size.height - high;
  }

  function choose(place) {
    if (!pick || fill(...place) === null) return;
    picked = place;
    pick(...place);
    paint();
  }

  function key(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0],
      Home: [0, -columns.length], End: [0, columns.length], PageUp: [-rows.length, 0], PageDown: [rows.length, 0] };
    if (event.key === "Escape") return hideTip();
    const [row, column] = over ?? picked ?? [lineOf(0), 0];
    if (event.key === "Enter" || event.key === " ") choose([row, column]);
    else if (steps[event.key]) {
      const [down, across] = over ? steps[event.key] : [0, 0];
      const line = Math.min(rows.length - 1, Math.max(0, lineOf(row) + down));
      const place = [lineOf(line), Math.min(columns.length - 1, Math.max(0, column + across))];
      reveal(place);
      over = place; // the next key may come before the next frame
      requestAnimationFrame(() => hover(over, true)); // after the scroll, which hides tooltips
    } else return;
    event.preventDefault();
  }

  canvas.addEventListener("pointermove", (event) => hover(cellAt(event), false));
  canvas.addEventListener("pointerleave", () => { over = null; hideTip(); paint(); });
  canvas.addEventListener("click", (event) => { const place = cellAt(event); if (place) { hover(place, false); choose(place); } });
  box.addEventListener("keydown", key);
  box.addEventListener("blur", () => { over = null; hideTip(); paint(); });
  box.addEventListener("scroll", () => requestAnimationFrame(paint), { passive: true });
  let known = 0;
  new ResizeObserver(() => {
    if (host.clientWidth && host.clientWidth !== known) {
      known = host.clientWidth;
      measure();
    }
  }).observe(host);
  redraws.add(paint);
  measure();
  return {
    paint,
    /** Frame a cell as picked and bring it into view. */
    select(row, column) { picked = row === null ? null : [row, column]; if (picked) reveal(picked); paint(); },
  };
}

/** Cells that share `room` among `count` columns, neither narrower nor wider than readable. */
const within = (room, count, least, most) => Math.max(least, Math.min(most, Math.floor(room / count)));
