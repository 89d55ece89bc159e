// What happens when: asks the server for its state every second while somebody looks.

import { Chat } from "./chat.js";
import { compact, count, plural } from "./format.js";
import { HeatMap } from "./heat_map.js";
import { OwnerTable } from "./owners.js";
import { forgetKey, hasKey, keepKey, probe, read } from "./server.js";
import { Speed } from "./speed.js";

const EVERY_MS = 1000;
const MAP_EVERY_MS = 2000; // it is the larger part

const find = (id) => document.getElementById(id);

const speed = new Speed({
  figure: find("speed"),
  note: find("speed-note"),
  line: find("speed-line"),
});
const owners = new OwnerTable(find("owners"));
const heatMap = new HeatMap({
  canvas: find("map"),
  readout: find("cell"),
  legend: find("legend"),
  scale: find("scale"),
  most: find("most"),
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
  speed.update(status.time_s, tokens.generated);
  const total = (name) => status.owners.reduce((sum, owner) => sum + owner[name], 0);
  setText("running", queue.running ? `${queue.running} running` : "idle");
  setText("waiting", `${count(queue.waiting)} waiting, room for ${count(queue.capacity)}`);
  setText("generated", compact(tokens.generated));
  setText("prompted", `${compact(tokens.prompt)} read in prompts`);
  setText("computed", compact(total("pairs")));
  setText("requested", `in ${plural(total("requests"), "request")} to owners`);
  const troubled = status.owners.filter((owner) => owner.state !== "ready");
  if (troubled.length) show(`${troubled.map((owner) => owner.name).join(", ")} not ready`, "troubled");
  else show(queue.running ? "writing" : "ready", "ready");
  owners.update(status.owners, placed);
  chat.setModel(model);
  find("main").hidden = false;
  find("key-form").hidden = true;
  find("forget-key").hidden = !hasKey();
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
  const isFirst = !placed.length;
  await readMap(requests);
  if (isFirst) owners.update(status.owners, placed); // they have colours now
}

async function fail(error) {
  speed.forget();
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
  try {
    await ask();
  } catch (error) {
    await fail(error);
  } finally {
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
  look();
});
look();
