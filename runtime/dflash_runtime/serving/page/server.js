// Client of the server: key, errors, streams.

const KEY = "dflash-moe-key";
const TIMEOUT_MS = 10_000;

export class ServerError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const keepKey = (key) => sessionStorage.setItem(KEY, key);
export const forgetKey = () => sessionStorage.removeItem(KEY);

/** The JSON of a path. Throws ServerError; status 0: no answer. */
export async function read(path) {
  const response = await ask(path, { signal: AbortSignal.timeout(TIMEOUT_MS) });
  return response.json();
}

/** The JSON of a path whatever its status; {} without an answer. */
export async function probe(path) {
  const options = { signal: AbortSignal.timeout(TIMEOUT_MS), cache: "no-store" };
  return fetch(path, options).then((response) => response.json()).catch(() => ({}));
}

/** The parsed events of a stream. Throws ServerError; AbortError once `signal` is aborted. */
export async function* stream(path, body, signal) {
  const response = await ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  let rest = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ") || block === "data: [DONE]") continue; // a comment, the end
      const event = JSON.parse(block.slice("data: ".length));
      if (event.error) throw new ServerError(500, event.error.message, event.error.code);
      yield event;
    }
  }
}

async function ask(path, options) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "the server does not answer", "offline");
  }
  if (!response.ok) {
    const error = (await response.json().catch(() => ({}))).error ?? {};
    throw new ServerError(response.status, error.message ?? response.statusText, error.code);
  }
  return response;
}
