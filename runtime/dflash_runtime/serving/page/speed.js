// Tokens per second, from the server's counter at successive polls.

import { count, rate } from "./format.js";

const KEPT = 60;
const SMOOTHED_S = 2.5; // looks come every second, tokens of slow models seldom

export class Speed {
  #looks = [];
  #rates = [];
  #most = 0;

  constructor({ figure, note, line }) {
    this.figure = figure;
    this.note = note;
    this.path = line.querySelector("path");
    this.polyline = line.querySelector("polyline");
  }

  /** `reading` is the progress of the current prompt, or null. */
  update(timeS, generated, reading) {
    const last = this.#looks.at(-1);
    if (last && (generated < last.generated || timeS < last.timeS)) this.forget(); // a new server
    this.#looks.push({ timeS, generated });
    while (this.#looks.length > 2 && this.#looks[1].timeS <= timeS - SMOOTHED_S) {
      this.#looks.shift();
    }
    const first = this.#looks[0];
    const now = timeS > first.timeS ? (generated - first.generated) / (timeS - first.timeS) : 0;
    this.#rates = [...this.#rates, now].slice(-KEPT);
    this.#most = Math.max(this.#most, now);
    this.#show(now, generated, reading);
  }

  #note(generated, reading) {
    if (reading) return `${count(reading.done)} of ${count(reading.total)} tokens of a prompt read`;
    if (this.#most) return `at most ${rate(this.#most)} since this page was opened`;
    return generated ? "none since this page was opened" : "nothing written yet";
  }

  /** Restart, as after a pause, for which there is no rate. */
  forget() {
    this.#looks = [];
  }

  #show(now, generated, reading) {
    this.figure.textContent = rate(now);
    this.note.textContent = this.#note(generated, reading);
    const most = Math.max(...this.#rates, 1e-9);
    const first = KEPT - this.#rates.length;
    const points = this.#rates.map((each, index) => {
      const x = ((first + index) / (KEPT - 1)) * 120;
      return `${x.toFixed(1)},${(30 - (each / most) * 27).toFixed(1)}`;
    });
    this.polyline.setAttribute("points", points.join(" "));
    const left = ((first / (KEPT - 1)) * 120).toFixed(1);
    this.path.setAttribute("d", `M${left},32 L${points.join(" L")} L120,32 Z`);
  }
}
