// The table of requests: running, waiting, and the last hundred that have ended.

import { count, duration, plural, rate } from "./format.js";

const ENDS = {
  stop: "complete",
  length: "length limit",
  cancelled: "cancelled",
  error: "failed",
  queue_full: "refused: queue full",
};
const STATES = { error: "lost", queue_full: "troubled" };

export class RequestTable {
  #rows = new Map();

  constructor({ body, none, why }) {
    Object.assign(this, { body, none, why });
  }

  /** `status` is the answer of status/requests. */
  update({ running, waiting, num_waiting: numWaiting, latest }) {
    const shown = [
      ...running.map((each) => [each, runningTexts(each)]),
      ...waiting.map((each) => [each, waitingTexts(each)]),
      ...latest.map((each) => [each, endedTexts(each)]),
    ];
    const rows = new Map();
    for (const [each, texts] of shown) {
      if (rows.has(each.request_id)) continue; // it has ended meanwhile
      const row = this.#rows.get(each.request_id) ?? newRow();
      fill(row, each, texts);
      rows.set(each.request_id, row);
    }
    this.#rows = rows;
    const elements = [...rows.values()].map((row) => row.element);
    const isSame = elements.length === this.body.childElementCount;
    if (!isSame || elements.some((element, at) => this.body.children[at] !== element)) {
      this.body.replaceChildren(...elements);
    }
    this.none.hidden = elements.length > 0;
    const why = whyText(running[0], numWaiting);
    this.why.hidden = !why;
    if (this.why.textContent !== why) this.why.textContent = why;
  }
}

/** Why requests wait; empty if none does. */
function whyText(running, numWaiting) {
  if (!numWaiting) return "";
  const wait = `${plural(numWaiting, "request")} ${numWaiting === 1 ? "waits" : "wait"}`;
  if (!running) return `${wait} for the model.`;
  const { reading } = running;
  const doing = reading
    ? `reads a prompt, ${count(reading.done)} of ${count(reading.total)} tokens`
    : `has written ${count(running.generated_tokens)} of at most ${count(running.max_tokens)} tokens`;
  return `${wait} for the one that runs, which ${doing}; the model computes one at a time, and clients take turns.`;
}

function runningTexts(request) {
  const { reading } = request;
  return {
    state: reading ? `reading ${count(reading.done)} of ${count(reading.total)}` : "writing",
    style: "ready",
    note: "",
    share: reading ? reading.done / Math.max(1, reading.total) : null,
  };
}

const waitingTexts = (request) => ({ state: "waiting", style: "loading", note: request.why, share: null });

const endedTexts = (request) => ({
  state: ENDS[request.end] ?? request.end,
  style: STATES[request.end] ?? "",
  note: "",
  share: null,
});

const seconds = (value) => (value == null ? "–" : duration(value));

function fill(row, request, { state, style, note, share }) {
  const cached = request.cached_tokens ? `, ${count(request.cached_tokens)} cached` : "";
  const texts = {
    name: request.key ?? shortId(request.request_id),
    when: `${request.key ? `${shortId(request.request_id)} · ` : ""}${clock(request.asked_unix_s)}`,
    state,
    note,
    prompt: count(request.prompt_tokens) + cached,
    written: count(request.generated_tokens),
    first: seconds(request.first_token_s),
    speed: request.tokens_per_s == null ? "–" : rate(request.tokens_per_s),
    whole: seconds(request.whole_s),
  };
  for (const [name, text] of Object.entries(texts)) {
    if (row[name].textContent !== text) row[name].textContent = text;
  }
  row.name.title = request.request_id;
  if (style) row.state.dataset.state = style;
  else delete row.state.dataset.state;
  row.bar.parentElement.hidden = share === null;
  row.bar.style.width = `${100 * (share ?? 0)}%`;
}

const shortId = (id) => (id.length > 16 ? `${id.slice(0, 15)}…` : id);

const clock = (unixS) => new Date(unixS * 1000).toLocaleTimeString();

function newRow() {
  const element = document.createElement("tr");
  element.setAttribute("role", "row");
  const row = { element };
  const part = (className) => {
    const made = document.createElement("span");
    made.className = className;
    return made;
  };
  const cell = (label, className, ...parts) => {
    const made = document.createElement(label ? "td" : "th");
    made.className = className;
    made.setAttribute("role", label ? "cell" : "rowheader");
    if (label) made.dataset.label = label;
    else made.scope = "row";
    made.append(...parts);
    element.append(made);
  };
  row.name = part("request-name");
  row.when = part("what");
  row.state = part("request-state");
  row.note = part("reason");
  row.bar = part("filled");
  const bar = part("bar");
  bar.append(row.bar);
  cell("", "owner", row.name, row.when);
  cell("State", "doing", row.state, bar, row.note);
  for (const [label, key] of [
    ["Prompt", "prompt"],
    ["Written", "written"],
    ["First token", "first"],
    ["Tokens/s", "speed"],
    ["Time", "whole"],
  ]) {
    row[key] = part("");
    cell(label, "number", row[key]);
  }
  return row;
}
