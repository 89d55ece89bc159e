// The main loop: polls the server's state every second while the page is visible.

import { Chat } from "./chat.js";
import { compact, count, duration, plural } from "./format.js";
import { HeatMap } from "./heat_map.js";
import { HourView } from "./hour.js";
import { OwnerTable, cacheText, slotsText } from "./owners.js";
import { PlanView } from "./plan.js";
import { RequestTable } from "./requests.js";
import { forgetKey, hasKey, keepKey, probe, read } from "./server.js";
import { Speed } from "./speed.js";

const EVERY_MS = 1000;
const MAP_EVERY_MS = 2000; // it is the larger part
const LATE_MS = 2500; // an answer takes a few milliseconds
const STALLED_S = 10; // a layer of a long prompt takes less

const find = (id) => document.getElementById(id);

const speed = new Speed({
  figure: find("speed"),
  note: find("speed-note"),
  line: find("speed-line"),
});
const owners = new OwnerTable(find("owners"));
const plan = new PlanView({
  section: find("plan"),
  name: find("plan-name"),
  share: find("plan-share"),
  speeds: find("plan-speeds"),
  devices: find("plan-devices"),
  reason: find("plan-reason"),
  moves: find("plan-moves"),
});
const heatMap = new HeatMap({
  canvas: find("map"),
  readout: find("cell"),
  legend: find("legend"),
  scale: find("scale"),
  most: find("most"),
});
const requestTable = new RequestTable({
  body: find("requests"),
  none: find("no-requests"),
  why: find("queue-why"),
});
const hour = new HourView({
  tokens: find("hour-tokens"),
  first: find("hour-first"),
  note: find("hour-note"),
});
const chat = new Chat({
  log: find("chat-log"),
  form: find("chat-form"),
  text: find("chat-text"),
  label: find("chat-label"),
  send: find("chat-send"),
  stop: find("chat-stop"),
  clear: find("chat-clear"),
  title: find("chat-title"),
});

let timer = 0;
let isAsking = false;
let placed = []; // names of the owners in the placement, in its order
let mapOf = { requests: -1, atMs: -MAP_EVERY_MS }; // what the map was read for, and when

function show(text, state) {
  const condition = find("condition");
  if (condition.textContent !== text) condition.textContent = text;
  condition.dataset.state = state;
  find("main").dataset.isOld = String(state === "lost"); // what it shows was true once
}

function setText(id, text) {
  const element = find(id);
  if (element.textContent !== text) element.textContent = text;
}

function showStatus(status) {
  const { model, queue, tokens } = status;
  document.title = `${model.name || model.id} · dflash-moe`;
  setText("version", status.version);
  setText("model-name", model.name || model.id);
  const facts = [
    model.architecture,
    model.expert_types.join(" + "),
    `${plural(model.num_moe_layers, "layer")} × ${plural(model.num_experts, "expert")}, ${model.num_experts_used} used`,
    `context ${count(model.num_positions)}`,
    `${model.backend} backend`,
  ];
  const list = find("model-facts");
  if (list.dataset.shown !== facts.join("\n")) {
    list.dataset.shown = facts.join("\n");
    list.replaceChildren(
      ...facts.map((fact) => {
        const item = document.createElement("li");
        item.textContent = fact;
        return item;
      }),
    );
  }
  speed.update(status.time_s, tokens.generated, queue.reading);
  const total = (name) => status.owners.reduce((sum, owner) => sum + owner[name], 0);
  setText("running", queue.running ? `${queue.running} running` : "idle");
  setText("waiting", `${count(queue.waiting)} waiting, room for ${count(queue.capacity)}`);
  setText("generated", compact(tokens.generated));
  setText("prompted", `${compact(tokens.prompt + (queue.reading?.done ?? 0))} read in prompts`);
  setText("computed", compact(total("pairs")));
  setText("requested", `in ${plural(total("requests"), "request")} to owners`);
  show(...conditionOf(status));
  owners.update(status.time_s, status.owners, placed);
  find("slots").hidden = !status.slots;
  if (status.slots) setText("slots", slotsText(status.slots, status.hits));
  setText("cache", cacheText(status.cache));
  plan.update(status.plan, status.moves);
  chat.setModel(model);
  find("main").hidden = false;
  find("key-form").hidden = true;
  find("forget-key").hidden = !hasKey();
}

/** The server's state as text, and its style. */
function conditionOf({ is_well: isWell, owners, queue }) {
  if (!isWell) return ["the model does not get on", "lost"];
  const troubled = owners.filter((owner) => owner.state !== "ready");
  if (troubled.length) return [`${troubled.map((owner) => owner.name).join(", ")} not ready`, "troubled"];
  if (queue.stalled_s > STALLED_S) return [`no progress for ${duration(queue.stalled_s)}`, "troubled"];
  if (queue.reading) return ["reading a prompt", "ready"];
  return [queue.running ? "writing" : "ready", "ready"];
}

async function readMap(requests) {
  if (mapOf.requests === requests || performance.now() - mapOf.atMs < MAP_EVERY_MS) return;
  const map = await read("status/experts");
  mapOf = { requests, atMs: performance.now() };
  placed = map.owner_names;
  heatMap.update(map);
}

async function ask() {
  const status = await read("status");
  const requests = status.owners.reduce((sum, owner) => sum + owner.requests, 0);
  showStatus(status);
  const asked = await read("status/requests");
  requestTable.update(asked);
  hour.update(asked.last_hour);
  const isFirst = !placed.length;
  await readMap(requests);
  if (isFirst) owners.update(status.time_s, status.owners, placed); // they have colours now
}

async function fail(error) {
  speed.forget();
  owners.forget();
  mapOf = { ...mapOf, requests: -1 };
  if (error.status === 401) {
    needKey();
  } else if (error.code === "loading") {
    const { stage } = await probe("ready");
    show(stage ? `loading: ${stage}` : "loading the model", "loading");
  } else if (error.code === "shutting_down") {
    show("shutting down", "lost");
  } else {
    show(error.status === 0 ? "not reached" : error.message, "lost");
  }
}

function needKey() {
  const wasGiven = hasKey();
  forgetKey();
  clearTimeout(timer);
  find("main").hidden = true;
  find("forget-key").hidden = true;
  find("key-form").hidden = false;
  find("key-problem").textContent = wasGiven ? "The server does not know this key." : "";
  show("needs a key", "loading");
  find("key").focus();
}

async function look() {
  clearTimeout(timer);
  if (isAsking || document.hidden) return;
  isAsking = true;
  const askedMs = performance.now();
  const waiting = setInterval(() => {
    const waitedMs = performance.now() - askedMs;
    if (waitedMs > LATE_MS) show(`no answer for ${count(waitedMs / 1000)} s`, "lost");
  }, 500);
  try {
    await ask();
  } catch (error) {
    await fail(error);
  } finally {
    clearInterval(waiting);
    isAsking = false;
  }
  if (find("key-form").hidden && !document.hidden) timer = setTimeout(look, EVERY_MS);
}

find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(find("key").value.trim());
  find("key").value = "";
  find("key-form").hidden = true;
  look();
});
find("forget-key").addEventListener("click", () => {
  forgetKey();
  needKey();
});
document.addEventListener("visibilitychange", () => {
  speed.forget();
  owners.forget();
  look();
});
look();
