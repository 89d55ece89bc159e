// Formatting of numbers. All of one kind have one width, so that the layout stays still.

export const GIB = 2 ** 30;

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const oneDigit = new Intl.NumberFormat("en", {
  minimumFractionDigits: 1,
  maximumFractionDigits: 1,
});
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });

export const count = (number) => whole.format(number);

/** A count that may grow large: 12.35M. */
export const compact = (number) => (number < 100_000 ? whole : short).format(number);

export const rate = (number) => (number < 100 ? oneDigit : whole).format(number);

export const percent = (share) => `${oneDigit.format(100 * share)} %`;

/** Seconds as µs, ms, s, min or h. */
export function duration(seconds) {
  if (seconds === 0) return "0 s";
  if (seconds < 1e-3) return `${whole.format(Math.round(seconds * 1e6))} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toPrecision(3)} ms`;
  if (seconds < 60) return `${oneDigit.format(seconds)} s`;
  if (seconds < 3600) return `${oneDigit.format(seconds / 60)} min`;
  return `${oneDigit.format(seconds / 3600)} h`;
}

/** Bytes as KiB, MiB or GiB. */
export function size(bytes) {
  if (bytes < 2 ** 20) return `${oneDigit.format(bytes / 2 ** 10)} KiB`;
  return bytes < GIB ? `${oneDigit.format(bytes / 2 ** 20)} MiB` : `${oneDigit.format(bytes / GIB)} GiB`;
}

export const plural = (number, what) => `${count(number)} ${what}${number === 1 ? "" : "s"}`;
