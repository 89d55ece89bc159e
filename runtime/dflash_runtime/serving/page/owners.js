// The table of owners, and the colour of each.

import { GIB, compact, count, duration, percent, plural, rate, size } from "./format.js";

const NUM_COLOURS = 8;
const LOAD_S = 60; // over so long the share of each owner is shown

/** An owner's colour as [red, green, blue], by its index in the placement. */
export function ownerColour(index) {
  const style = getComputedStyle(document.documentElement);
  const text = style.getPropertyValue(`--owner-${index % NUM_COLOURS}`).trim();
  return [1, 3, 5].map((at) => Number.parseInt(text.slice(at, at + 2), 16));
}

/** A small square in an owner's colour; owners outside the placement, such as the fallback, have none. */
export function swatch(index) {
  const square = document.createElement("span");
  square.className = "swatch";
  square.style.background = index < 0 ? "none" : `var(--owner-${index % NUM_COLOURS})`;
  return square;
}

/** What decode steps did with experts that they keep besides those that live on the device. */
export function slotsText(slots, hits) {
  const parts = [
    `Slots for ${plural(slots.num_slots, "more expert")} of each layer on the GPU`,
    `${compact(slots.found)} selections found there`,
    `${compact(slots.fetched)} experts fetched (${rate(slots.fetched_bytes / GIB)} GiB), ${compact(slots.kept)} kept`,
  ];
  if (hits.layers) parts.push(`${percent(hits.layers_hot_only / hits.layers)} of layers needed the GPU alone`);
  return parts.join("; ");
}

/** What keys and values take. */
export function cacheText(cache) {
  const taken = `Keys and values: ${cache.type}, ${size(cache.num_bytes)} for ${plural(cache.num_positions, "position")}`;
  return `${taken}, of which ${count(cache.num_cached)} are in use`;
}

const KINDS = { local: "this process", daemon: "daemon", fallback: "this process, for lost owners" };

/** Rows are made once for each owner; updates change their texts only. */
export class OwnerTable {
  #rows = new Map();
  #looks = [];

  constructor(body) {
    this.body = body;
  }

  update(timeS, owners, placed) {
    const shares = this.#shares(timeS, new Map(owners.map((owner) => [owner.name, owner.pairs])));
    const names = new Set(owners.map((owner) => owner.name));
    for (const [name, row] of this.#rows) {
      if (names.has(name)) continue;
      row.element.remove();
      this.#rows.delete(name);
    }
    for (const owner of owners) {
      let row = this.#rows.get(owner.name);
      if (!row) {
        row = newRow(owner.name);
        this.#rows.set(owner.name, row);
      }
      row.swatch.replaceChildren(swatch(placed.indexOf(owner.name)));
      fill(row, owner, shares.get(owner.name) ?? null);
    }
    const elements = owners.map((owner) => this.#rows.get(owner.name).element);
    if (elements.some((element, at) => this.body.children[at] !== element)) {
      this.body.append(...elements);
    }
  }

  /** Restart, as after a pause, whose work does not belong to the last minute. */
  forget() {
    this.#looks = [];
  }

  /** Each owner's share of the last minute's work; empty if there was none. */
  #shares(timeS, pairs) {
    const last = this.#looks.at(-1);
    const isNew = last && (timeS < last.timeS || [...pairs].some(([name, now]) => now < (last.pairs.get(name) ?? 0)));
    if (isNew) this.forget(); // a new server
    if (!last || isNew || timeS > last.timeS) this.#looks.push({ timeS, pairs });
    while (this.#looks.length > 2 && this.#looks[1].timeS <= timeS - LOAD_S) this.#looks.shift();
    const before = this.#looks[0].pairs;
    const since = new Map([...pairs].map(([name, now]) => [name, now - (before.get(name) ?? 0)]));
    const total = [...since.values()].reduce((sum, each) => sum + each, 0);
    return total ? new Map([...since].map(([name, each]) => [name, each / total])) : new Map();
  }
}

/** `share` is null while nothing was computed. */
function fill(row, owner, share) {
  const trip = owner.decode_round_trip_s;
  const texts = {
    what: [KINDS[owner.kind] ?? owner.kind, owner.device, owner.transport].filter(Boolean).join(" · "),
    state: owner.state,
    share: share === null ? "–" : percent(share),
    experts: count(owner.num_experts) + (owner.expert_bytes ? ` · ${size(owner.expert_bytes)}` : ""),
    requests: compact(owner.requests),
    trip: trip === null ? "–" : duration(trip),
    wait: owner.kind === "daemon" ? duration(owner.wait_s) : "–",
    fallbacks: count(owner.fallbacks),
    restarts: count(owner.restarts),
    reason: owner.reason,
  };
  for (const [name, text] of Object.entries(texts)) {
    if (row[name].textContent !== text) row[name].textContent = text;
  }
  row.state.dataset.state = owner.state;
  row.fallbacks.classList.toggle("some", owner.fallbacks > 0);
  row.restarts.classList.toggle("some", owner.restarts > 0);
  row.bar.style.width = `${100 * (share ?? 0)}%`;
  const colour = row.swatch.firstChild.style.background;
  row.bar.style.background = colour === "none" ? "var(--muted)" : colour;
}

function newRow(name) {
  const element = document.createElement("tr");
  element.setAttribute("role", "row");
  const row = { element };
  const part = (kind, className, text = "") => {
    const made = document.createElement(kind);
    made.className = className;
    made.textContent = text;
    return made;
  };
  const cell = (label, className, ...parts) => {
    const made = part(label ? "td" : "th", className);
    made.setAttribute("role", label ? "cell" : "rowheader");
    if (label) made.dataset.label = label;
    else made.scope = "row";
    made.append(...parts);
    element.append(made);
  };
  row.swatch = part("span", "");
  row.what = part("span", "what");
  row.state = part("span", "state");
  row.reason = part("span", "reason");
  row.share = part("span", "share");
  row.bar = part("span", "filled");
  const bar = part("span", "bar");
  bar.append(row.bar);
  const owner = part("span", "owner-name", name);
  cell("", "owner", row.swatch, owner, row.what, row.reason);
  cell("State", "condition", row.state);
  cell("Load", "load", row.share, bar);
  for (const [label, key] of [
    ["Experts", "experts"],
    ["Requests", "requests"],
    ["Round trip", "trip"],
    ["Wait", "wait"],
    ["Fallbacks", "fallbacks"],
    ["Restarts", "restarts"],
  ]) {
    row[key] = part("span", "");
    cell(label, "number", row[key]);
  }
  return row;
}
