// The last hour, minute by minute, as the server has kept it.

import { count, duration, plural, rate } from "./format.js";

const NUM_MINUTES = 60;
const WIDTH = 240;
const HEIGHT = 40;
const SVG = "http://www.w3.org/2000/svg";

export class HourView {
  #shown = "";

  constructor({ tokens, first, note }) {
    Object.assign(this, { tokens, first, note });
  }

  /** `minutes` are those in which a request ended: `ago`, and sums of these requests. */
  update(minutes) {
    const now = JSON.stringify(minutes);
    if (now === this.#shown) return;
    this.#shown = now;
    this.note.textContent = summary(minutes);
    bars(this.tokens, minutes, (each) => each.generated_tokens);
    bars(this.first, minutes, (each) => (each.first_tokens ? each.first_token_s / each.first_tokens : 0));
  }
}

/** A bar for each minute, the current one last, as high as its share of the highest. */
function bars(svg, minutes, value) {
  const most = Math.max(...minutes.map(value), 1e-9);
  const width = WIDTH / NUM_MINUTES;
  svg.replaceChildren(
    ...minutes.map((each) => {
      const bar = document.createElementNS(SVG, "rect");
      const height = (HEIGHT * value(each)) / most;
      bar.setAttribute("x", String((NUM_MINUTES - 1 - each.ago) * width + 0.5));
      bar.setAttribute("y", (HEIGHT - height).toFixed(1));
      bar.setAttribute("width", String(width - 1));
      bar.setAttribute("height", height.toFixed(1));
      return bar;
    }),
  );
}

function summary(minutes) {
  const sum = (name) => minutes.reduce((total, each) => total + each[name], 0);
  const requests = sum("requests");
  if (!requests) return "No request has ended in the last hour.";
  const parts = [plural(requests, "request")];
  if (sum("errors")) parts.push(`${count(sum("errors"))} failed`);
  parts.push(`${count(sum("generated_tokens"))} tokens written`);
  if (sum("decode_s")) parts.push(`${rate(sum("decode_tokens") / sum("decode_s"))} tokens/s each`);
  if (sum("prefill_s")) parts.push(`prompts read at ${rate(sum("prompt_tokens") / sum("prefill_s"))} tokens/s`);
  if (sum("first_tokens")) {
    const most = Math.max(...minutes.map((each) => each.first_token_most_s));
    parts.push(
      `first token after ${duration(sum("first_token_s") / sum("first_tokens"))} on average, ${duration(most)} at most`,
    );
  }
  return `${parts.join("; ")}.`;
}
