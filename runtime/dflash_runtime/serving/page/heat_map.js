// Layers × experts: the hue is an expert's owner, the fill how often it was chosen.

import { count, percent, plural } from "./format.js";
import { ownerColour, swatch } from "./owners.js";

const GUTTER = { left: 30, top: 18 }; // CSS pixels, for the numbers at the edges
const LARGEST_CELL = { width: 56, height: 26 };
const FEWEST_PIXELS = 5; // a cell's width, below which the map is turned if that helps
const USUAL_HEIGHT = 440;
const NUM_SHADES = 64;
const HINT = "Point at a cell or tap it; the arrow keys move from one to the next.";

export class HeatMap {
  #layers = [];
  #names = [];
  #most = 0;
  #totals = [];
  #shown = null; // the one owner that is shown, null = all
  #cell = null; // { layer, expert } under the pointer, both as places
  #geometry = null;
  #drawnWidth = 0;

  constructor({ canvas, readout, legend, scale, most }) {
    Object.assign(this, { canvas, readout, legend, scale, most });
    this.readout.textContent = HINT;
    new ResizeObserver(() => {
      if (canvas.clientWidth !== this.#drawnWidth) this.draw(); // not for the height it gets there
    }).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerdown", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") this.#select(null);
    });
    canvas.addEventListener("blur", () => this.#select(null));
    canvas.addEventListener("keydown", (event) => this.#move(event));
  }

  update(map) {
    this.#layers = map.layers;
    this.#most = 0;
    this.#totals = map.layers.map((layer) => {
      let total = 0;
      for (const number of layer.selections) {
        total += number;
        if (number > this.#most) this.#most = number;
      }
      return total;
    });
    if (map.owner_names.join("\n") !== this.#names.join("\n")) {
      this.#names = map.owner_names;
      this.#shown = null;
      this.#makeLegend();
    }
    const numExperts = Math.max(0, ...map.layers.map((layer) => layer.selections.length));
    this.canvas.setAttribute(
      "aria-label",
      `Selections of ${plural(numExperts, "expert")} in each of ${plural(map.layers.length, "layer")}`,
    );
    this.most.textContent = this.#most ? `${count(this.#most)} times` : "";
    this.draw();
    this.#say();
  }

  draw() {
    if (!this.#layers.length) return;
    const g = (this.#geometry = this.#measure());
    this.#drawnWidth = this.canvas.clientWidth;
    this.canvas.width = g.width;
    this.canvas.height = g.height;
    this.canvas.style.height = `${g.height / g.ratio}px`;
    const context = this.canvas.getContext("2d");
    const shades = this.#shades();
    const other = ramp(colourOf("--muted"), 0.04, 0.3);
    this.#layers.forEach((layer, layerAt) => {
      layer.selections.forEach((number, expertAt) => {
        const owner = layer.owners[expertAt];
        const own = this.#shown === null || this.#shown === owner ? shades[owner] : other;
        context.fillStyle = own[shadeOf(number, this.#most)];
        const { x, y } = place(g, layerAt, expertAt);
        context.fillRect(x, y, g.cellWidth - g.gap, g.cellHeight - g.gap);
      });
    });
    this.#drawNumbers(context, g);
    this.#drawCell(context, g);
    this.#drawScale(this.#shown === null ? ramp(colourOf("--ink"), 0.1, 0.8) : shades[this.#shown]);
  }

  #measure() {
    const ratio = window.devicePixelRatio || 1;
    const numLayers = this.#layers.length;
    const numExperts = Math.max(...this.#layers.map((layer) => layer.selections.length));
    const width = Math.floor(this.canvas.clientWidth * ratio);
    const left = Math.round(GUTTER.left * ratio);
    const top = Math.round(GUTTER.top * ratio);
    const room = width - left;
    const isTurned = room / numExperts < FEWEST_PIXELS * ratio && numLayers < numExperts;
    const [rows, columns] = isTurned ? [numExperts, numLayers] : [numLayers, numExperts];
    // Whole device pixels, or cells would differ in size.
    const cellWidth = Math.max(
      1,
      Math.min(Math.floor(room / columns), Math.round(LARGEST_CELL.width * ratio)),
    );
    const cellHeight = Math.max(
      Math.round(3 * ratio),
      Math.min(
        Math.floor((USUAL_HEIGHT * ratio) / rows),
        Math.round(LARGEST_CELL.height * ratio),
        Math.round(2 * cellWidth),
      ),
    );
    const gap = Math.min(cellWidth, cellHeight) >= 4 * ratio ? Math.max(1, Math.round(ratio)) : 0;
    const height = top + rows * cellHeight;
    return { ratio, width, height, left, top, rows, columns, cellWidth, cellHeight, gap, isTurned };
  }

  #shades() {
    return this.#names.map((_, index) => ramp(ownerColour(index), 0.1, 1));
  }

  #drawNumbers(context, g) {
    const style = getComputedStyle(this.canvas);
    context.font = `${Math.round(10.5 * g.ratio)}px ${style.fontFamily}`;
    context.fillStyle = style.color;
    context.textBaseline = "middle";
    context.textAlign = "right";
    const name = (at, isLayer) => String(isLayer ? this.#layers[at].layer_id : at);
    const rowStep = stepFor(g.cellHeight, 15 * g.ratio);
    for (let row = 0; row < g.rows; row += rowStep) {
      const y = g.top + (row + 0.5) * g.cellHeight - g.gap / 2;
      context.fillText(name(row, !g.isTurned), g.left - 6 * g.ratio, y);
    }
    context.textAlign = "center";
    const columnStep = stepFor(g.cellWidth, 26 * g.ratio);
    for (let column = 0; column < g.columns; column += columnStep) {
      const x = g.left + (column + 0.5) * g.cellWidth - g.gap / 2;
      context.fillText(name(column, g.isTurned), x, g.top - 9 * g.ratio);
    }
  }

  #drawCell(context, g) {
    if (!this.#cell) return;
    const { x, y } = place(g, this.#cell.layer, this.#cell.expert);
    context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--ink");
    context.lineWidth = Math.max(2, Math.round(1.5 * g.ratio));
    context.strokeRect(x - 1, y - 1, g.cellWidth - g.gap + 2, g.cellHeight - g.gap + 2);
  }

  #drawScale(shades) {
    const context = this.scale.getContext("2d");
    const { width, height } = this.scale;
    for (let x = 0; x < width; x += 1) {
      context.fillStyle = shades[shadeOf(x, width - 1)];
      context.fillRect(x, 0, 1, height);
    }
  }

  #makeLegend() {
    const buttons = this.#names.map((name, index) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "quiet";
      button.setAttribute("aria-pressed", "false");
      button.append(swatch(index), name);
      button.addEventListener("click", () => {
        this.#shown = this.#shown === index ? null : index;
        buttons.forEach((each, at) => each.setAttribute("aria-pressed", String(at === this.#shown)));
        this.draw();
      });
      return button;
    });
    this.legend.replaceChildren(...buttons);
  }

  #point(event) {
    const g = this.#geometry;
    if (!g) return;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) * g.ratio - g.left) / g.cellWidth);
    const row = Math.floor(((event.clientY - box.top) * g.ratio - g.top) / g.cellHeight);
    this.#select(g.isTurned ? { layer: column, expert: row } : { layer: row, expert: column });
  }

  #move(event) {
    const down = { ArrowDown: 1, ArrowUp: -1 }[event.key] ?? 0;
    const across = { ArrowRight: 1, ArrowLeft: -1 }[event.key] ?? 0;
    if (!down && !across) return;
    event.preventDefault();
    const [layers, experts] = this.#geometry?.isTurned ? [across, down] : [down, across];
    const from = this.#cell;
    const to = from ? { layer: from.layer + layers, expert: from.expert + experts } : { layer: 0, expert: 0 };
    if (this.#layers[to.layer]?.selections[to.expert] !== undefined) this.#select(to);
  }

  #select(cell) {
    const isThere = cell && this.#layers[cell.layer]?.selections[cell.expert] !== undefined;
    const next = isThere ? cell : null;
    if (next?.layer === this.#cell?.layer && next?.expert === this.#cell?.expert) return;
    this.#cell = next;
    this.draw();
    this.#say();
  }

  #say() {
    if (!this.#cell) {
      const isTurned = this.#geometry?.isTurned;
      const axes = isTurned ? "Layers across, experts down." : "Experts across, layers down.";
      this.readout.textContent = `${axes} ${HINT}`;
      return;
    }
    const { layer: layerAt, expert } = this.#cell;
    const layer = this.#layers[layerAt];
    const number = layer.selections[expert];
    const total = this.#totals[layerAt];
    const share = total ? `, ${percent(number / total)} of the layer` : "";
    const owner = layer.owners[expert];
    this.readout.replaceChildren(
      swatch(owner),
      `Layer ${layer.layer_id}, expert ${expert}: ${plural(number, "selection")}${share} · ${this.#names[owner]}`,
    );
  }
}

/** The start of a cell, in device pixels. */
function place(g, layerAt, expertAt) {
  const [row, column] = g.isTurned ? [expertAt, layerAt] : [layerAt, expertAt];
  return { x: g.left + column * g.cellWidth, y: g.top + row * g.cellHeight };
}

/** Square root scale from a visible minimum, so that few differs from none. */
function shadeOf(number, most) {
  if (!number) return 0;
  return Math.round((0.1 + 0.9 * Math.sqrt(number / most)) * (NUM_SHADES - 1));
}

/** Colours from the page's background to an owner's, with the given first and last shares. */
function ramp(colour, first, last) {
  const ground = colourOf("--ground");
  return Array.from({ length: NUM_SHADES }, (_, shade) => {
    const share = first + ((last - first) * shade) / (NUM_SHADES - 1);
    const mixed = colour.map((value, at) => Math.round(ground[at] + share * (value - ground[at])));
    return `rgb(${mixed.join(" ")})`;
  });
}

function colourOf(name) {
  const text = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((at) => Number.parseInt(text.slice(at, at + 2), 16));
}

/** The smallest power of two of cells with room for a label. */
function stepFor(cell, room) {
  let step = 1;
  while (step * cell < room) step *= 2;
  return step;
}
