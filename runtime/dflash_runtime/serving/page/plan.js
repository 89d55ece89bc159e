// The plan: speeds that were predicted beside measured ones, and what each device's memory is for.

import { GIB, count, duration, percent, plural, rate } from "./format.js";

const MOST_OTHERS = 6; // options that were not chosen, the fastest first

const gib = (bytes) => (bytes ? rate(bytes / GIB) : "–");

export class PlanView {
  #shown = "";

  constructor({ section, name, share, speeds, devices, reason, moves }) {
    Object.assign(this, { section, name, share, speeds, devices, reason, moves });
  }

  /** `plan` is null if nothing was planned. */
  update(plan, moves) {
    this.section.hidden = !plan;
    const now = JSON.stringify([plan, moves]);
    if (!plan || now === this.#shown) return;
    this.#shown = now;
    const total = plan.budgets.reduce((sum, each) => sum + each.num_experts, 0);
    this.name.textContent = plan.name;
    this.share.textContent = `${percent(plan.share_here)} of selections on ${plan.setup.device}, ${evidence(plan)}`;
    this.reason.textContent = plan.reason;
    this.moves.textContent = movesText(moves);
    this.speeds.replaceChildren(
      row("Predicted", ...speeds(plan.forecast)),
      row("Measured", ...speeds(plan.measured)),
      ...others(plan).map((each) => row(otherName(each, plan), ...speeds(each.forecast ?? {}))),
    );
    this.devices.replaceChildren(
      ...plan.budgets.map((each) =>
        row(
          each.name,
          ["Free (GiB)", gib(each.free_bytes)],
          ["Model", gib(each.trunk_bytes)],
          ["Context", gib(each.cache_bytes)],
          ["Work", gib(each.work_bytes)],
          ["Experts", gib(each.expert_bytes) + limits(each)],
          ["Number", `${count(each.num_experts)} of ${count(total)}`],
        ),
      ),
    );
  }
}

const limits = (budget) =>
  (budget.disk_bytes ? `, ${gib(budget.disk_bytes)} on the disk` : "") +
  (budget.limit_bytes == null ? "" : `, at most ${gib(budget.limit_bytes)}`);

const evidence = (plan) =>
  plan.heat_tokens ? `by the choices of ${plural(plan.heat_tokens, "token")}` : "no choices counted yet";

const speeds = (rates) => [
  ["Writing", speed(rates.decode)],
  ["Prompt 512", speed(rates.prompt_512)],
  ["Prompt 4,096", speed(rates.prompt_4096)],
];

const speed = (tokens) => (tokens == null ? "–" : rate(tokens));

const others = (plan) =>
  [...plan.alternatives]
    .sort((one, two) => (two.forecast?.decode ?? 0) - (one.forecast?.decode ?? 0))
    .slice(0, MOST_OTHERS);

function otherName(other, plan) {
  const device = other.device === plan.setup.device ? "" : ` on ${other.device}`;
  return `Not chosen: ${other.name}${device}${other.why_not ? `, ${other.why_not}` : ""}`;
}

function movesText(moves) {
  if (!moves.rounds && !moves.rounds_not_applied) return "No expert was moved since the start.";
  const done = `${plural(moves.experts_moved, "expert")} moved in ${plural(moves.rounds, "round")}, ${count(moves.rounds_not_applied)} given up`;
  return `${done}; the last: ${moves.last_reason} (requests waited ${duration(moves.last_pause_s)})`;
}

function row(name, ...cells) {
  const element = document.createElement("tr");
  element.setAttribute("role", "row");
  const head = document.createElement("th");
  head.setAttribute("role", "rowheader");
  head.scope = "row";
  head.className = "owner";
  head.textContent = name;
  element.append(head);
  for (const [label, text] of cells) {
    const cell = document.createElement("td");
    cell.setAttribute("role", "cell");
    cell.className = "number";
    cell.dataset.label = label;
    cell.textContent = text;
    element.append(cell);
  }
  return element;
}
