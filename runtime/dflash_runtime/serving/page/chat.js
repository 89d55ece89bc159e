// The chat box; for a model without a chat template, a text that it continues.

import { plural, rate } from "./format.js";
import { stream } from "./server.js";

const MOST_TOKENS = { chat: 1024, text: 256 };

export class Chat {
  #messages = [];
  #model = null;
  #abort = null;

  constructor({ log, form, text, label, send, stop, clear, title }) {
    Object.assign(this, { log, form, text, label, send, stop, clear, title });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      form.requestSubmit();
    });
    stop.addEventListener("click", () => this.#abort?.abort());
    clear.addEventListener("click", () => {
      this.#abort?.abort();
      this.#messages = [];
      this.log.replaceChildren();
      this.clear.hidden = true;
      this.text.focus();
    });
  }

  setModel(model) {
    if (this.#model?.id === model.id) return;
    this.#model = model;
    const canChat = model.has_chat_template;
    this.title.textContent = canChat ? "Chat" : "Continue a text";
    this.label.textContent = canChat ? "Message" : "This model has no chat template: it goes on from here";
    this.log.classList.toggle("raw", !canChat);
  }

  async #ask() {
    const text = this.text.value;
    if (this.#abort || !text.trim() || !this.#model) return;
    const canChat = this.#model.has_chat_template;
    this.text.value = "";
    this.clear.hidden = false;
    const asked = this.#add("asked", canChat ? "You" : "Text");
    asked.body.textContent = text;
    const answered = canChat ? this.#add("answered", this.#model.id) : this.#continue(asked);
    this.#setBusy(true);
    const messages = [...this.#messages, { role: "user", content: text }];
    const body = canChat
      ? { messages, max_tokens: MOST_TOKENS.chat }
      : { prompt: text, max_tokens: MOST_TOKENS.text };
    const path = canChat ? "v1/chat/completions" : "v1/completions";
    const abort = (this.#abort = new AbortController());
    let answer = "";
    try {
      let last = null;
      for await (const event of stream(path, { model: this.#model.id, ...body }, abort.signal)) {
        last = event;
        const choice = event.choices?.[0];
        const thought = choice?.delta?.reasoning_content;
        if (thought) this.#think(answered, thought);
        const piece = choice?.delta?.content ?? choice?.text ?? "";
        if (piece) answer += this.#write(answered.body, piece);
      }
      answered.note.textContent = summary(last);
    } catch (error) {
      if (abort.signal.aborted) answered.note.textContent = "Stopped.";
      else this.#fail(answered, error);
    } finally {
      if (this.#abort === abort) this.#abort = null;
      this.#setBusy(false);
    }
    if (answer && answered.element.isConnected) {
      this.#messages = [...messages, { role: "assistant", content: answer }];
    }
  }

  /** Reasoning stands before the answer, and is not sent again. */
  #think(answered, thought) {
    if (!answered.reasoning) {
      answered.reasoning = document.createElement("div");
      answered.reasoning.className = "reasoning";
      answered.body.prepend(answered.reasoning);
    }
    this.#write(answered.reasoning, thought);
  }

  #write(element, piece) {
    const isAtEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    element.append(piece);
    if (isAtEnd) this.log.scrollTop = this.log.scrollHeight;
    return piece;
  }

  #fail(answered, error) {
    answered.note.textContent = `Failed: ${error.message}`;
    answered.note.classList.add("problem");
    answered.note.setAttribute("role", "alert");
  }

  #add(className, who) {
    const element = document.createElement("article");
    const [name, body, note] = ["h3", "div", "p"].map((kind) => document.createElement(kind));
    element.className = className;
    name.textContent = who;
    body.className = "body";
    note.className = "note";
    element.append(name, body, note);
    this.log.append(element);
    this.log.scrollTop = this.log.scrollHeight;
    return { element, body, note };
  }

  /** Generated text is appended to the prompt, in the same element. */
  #continue(asked) {
    const body = document.createElement("span");
    body.className = "continued";
    asked.body.append(body);
    return { ...asked, body };
  }

  #setBusy(isBusy) {
    this.send.disabled = isBusy;
    this.stop.hidden = !isBusy;
    this.log.setAttribute("aria-busy", String(isBusy));
    this.log.lastElementChild?.classList.toggle("busy", isBusy);
    this.log.scrollTop = this.log.scrollHeight;
  }
}

function summary(last) {
  const timings = last?.timings;
  if (!timings) return "";
  const parts = [plural(timings.predicted_n, "token")];
  if (timings.predicted_per_second) parts.push(`${rate(timings.predicted_per_second)} per second`);
  if (last.choices?.[0]?.finish_reason === "length") parts.push("reached the length limit");
  return parts.join(" · ");
}
