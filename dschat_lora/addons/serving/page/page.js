"use strict";

const byId = (id) => document.getElementById(id);
const STORED = "dschat_lora.rounds";
const TOKEN = "dschat_lora.token";
const EMPTY = "Type a prompt below: the models answer it side by side. Pick the best answer, and the pair is saved for step 2.";

let settings = { models: [], reward: false };
// Rounds: {messages, answers: [{model, text, state, failed, score, done}], best}.
let rounds = [];
let running = null; // the AbortController of the answers that are on their way
let parent = null; // the round that the next prompt goes on from, if its best answer is known

const fromHash = new URLSearchParams(location.hash.slice(1)).get("token");
if (fromHash) {
  sessionStorage.setItem(TOKEN, fromHash);
  history.replaceState(null, "", location.pathname);
}

async function call(path, body, signal) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const options = { headers, signal };
  if (body !== undefined) {
    options.method = "POST";
    headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server does not answer");
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  const error = new Error(said?.error?.message ?? `the server says ${response.status}`);
  error.status = response.status;
  throw error;
}

function notify(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

async function start() {
  try {
    settings = await (await call("settings")).json();
  } catch (error) {
    byId("token_form").hidden = error.status !== 401;
    notify(error.status === 401 && !sessionStorage.getItem(TOKEN) ? "" : error.message);
    return;
  }
  byId("token_form").hidden = true;
  notify("");
  byId("temperature").value = settings.temperature;
  byId("max_tokens").value = settings.max_tokens;
  const boxes = settings.models.map((name) => {
    const label = document.createElement("label");
    const box = Object.assign(document.createElement("input"), { type: "checkbox", value: name, checked: true });
    label.append(box, name);
    return label;
  });
  byId("models").querySelectorAll("label").forEach((each) => each.remove());
  byId("models").append(...boxes);
  restore();
}

function restore() {
  try {
    rounds = JSON.parse(sessionStorage.getItem(STORED)) ?? [];
  } catch {
    rounds = [];
  }
  for (const round of rounds) {
    for (const answer of round.answers) {
      if (!answer.done) Object.assign(answer, { state: "interrupted", failed: true, done: true });
    }
  }
  parent = rounds.length && rounds.at(-1).best !== null ? rounds.at(-1) : null;
  byId("rounds").replaceChildren();
  rounds.forEach(show);
  showContext();
}

function store() {
  try {
    sessionStorage.setItem(STORED, JSON.stringify(rounds));
  } catch {
    // Full: what is shown stays, and is gone after a reload.
  }
}

function show(round) {
  const section = byId("round").content.cloneNode(true).firstElementChild;
  const turns = round.messages.filter((each) => each.role !== "system");
  section.querySelector(".prompt").textContent = turns.at(-1).content;
  if (turns.length > 1) {
    const note = document.createElement("small");
    note.textContent = `goes on from ${turns.length - 1} earlier messages`;
    section.querySelector(".prompt").prepend(note);
  }
  round.answers.forEach((answer, index) => {
    const card = byId("answer").content.cloneNode(true).firstElementChild;
    card.querySelector("h2").textContent = answer.model;
    card.querySelector(".vote").addEventListener("click", () => vote(round, index));
    Object.defineProperty(answer, "card", { value: card, enumerable: false, writable: true });
    section.querySelector(".answers").append(card);
  });
  Object.defineProperty(round, "section", { value: section, enumerable: false, writable: true });
  byId("rounds").querySelector(".empty")?.remove();
  byId("rounds").append(section);
  refresh(round);
}

function refresh(round) {
  const usable = round.answers.filter((each) => each.done && each.text.trim());
  const differ = new Set(usable.map((each) => each.text.trim())).size > 1;
  const ended = round.answers.every((each) => each.done);
  round.answers.forEach((answer, index) => {
    const { card } = answer;
    const best = round.best === index;
    card.classList.toggle("running", !answer.done);
    card.classList.toggle("best", best);
    card.querySelector(".text").textContent = answer.text;
    const state = card.querySelector(".state");
    state.textContent = answer.state;
    state.classList.toggle("failed", Boolean(answer.failed));
    const button = card.querySelector(".vote");
    button.textContent = best ? "Best, saved" : "Best";
    button.disabled = round.best !== null || !ended || !differ || !answer.text.trim();
    button.title = ended && !differ ? "the answers are the same" : "";
    button.setAttribute("aria-label", `${answer.model} has the best answer`);
  });
}

function showContext() {
  const context = byId("context");
  context.replaceChildren();
  if (!rounds.length && !byId("rounds").children.length) {
    const empty = Object.assign(document.createElement("p"), { className: "empty", textContent: EMPTY });
    byId("rounds").append(empty);
  }
  if (parent) {
    context.append(`Goes on from the answer of ${parent.answers[parent.best].model}. `);
    const anew = Object.assign(document.createElement("button"), { type: "button", textContent: "Start anew" });
    anew.addEventListener("click", () => {
      parent = null;
      showContext();
    });
    context.append(anew);
  } else if (rounds.length) {
    context.textContent = "A new conversation; pick a best answer to go on from it.";
  }
}

function messagesOf(text) {
  const system = byId("system").value.trim();
  const earlier = parent
    ? [...parent.messages.filter((each) => each.role !== "system"),
       { role: "assistant", content: parent.answers[parent.best].text }]
    : [];
  return [...(system ? [{ role: "system", content: system }] : []), ...earlier, { role: "user", content: text }];
}

async function ask(text) {
  const models = [...byId("models").querySelectorAll("input:checked")].map((box) => box.value);
  if (!models.length) return notify("choose a model");
  notify("");
  const answers = models.map((model) => ({ model, text: "", state: "", failed: false, done: false }));
  const round = { messages: messagesOf(text), answers, best: null };
  rounds.push(round);
  byId("prompt").value = "";
  grow();
  show(round);
  parent = null;
  showContext();
  round.section.scrollIntoView({ block: "start" });
  running = new AbortController();
  byId("send").hidden = true;
  byId("stop").hidden = false;
  await Promise.all(answers.map((answer) => stream(round, answer, running.signal)));
  running = null;
  byId("send").hidden = false;
  byId("stop").hidden = true;
  refresh(round);
  store();
  byId("prompt").focus();
}

async function stream(round, answer, signal) {
  try {
    const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
    const response = await call("v1/chat/completions", {
      model: answer.model,
      messages: round.messages,
      stream: true,
      stream_options: { include_usage: true },
      temperature: number("temperature"),
      max_completion_tokens: number("max_tokens"),
      seed: number("seed"),
    }, signal);
    await read(response.body, round, answer);
  } catch (error) {
    const stopped = error.name === "AbortError";
    Object.assign(answer, { state: stopped ? "stopped" : error.message, failed: !stopped });
  }
  answer.done = true;
  refresh(round);
  store();
}

async function read(body, round, answer) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let ended = false;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") ended = true;
      else take(JSON.parse(data), answer);
    }
    refresh(round);
  }
  if (!ended) throw new Error("the connection was lost");
  if (settings.reward && answer.text.trim()) await score(round, answer);
}

function take(event, answer) {
  if (event.error) throw new Error(event.error.message);
  const choice = event.choices[0];
  if (choice?.delta.content) answer.text += choice.delta.content;
  if (choice?.finish_reason === "length") answer.cut = true;
  if (event.usage) answer.state = `${event.usage.completion_tokens} tokens${answer.cut ? ", cut off" : ""}`;
}

async function score(round, answer) {
  const messages = [...round.messages, { role: "assistant", content: answer.text }];
  const { score: found } = await (await call("score", { messages })).json();
  const shown = found === null ? "too long for a reward" : `reward ${found.toFixed(2)}`;
  answer.state = `${shown} · ${answer.state}`;
}

async function vote(round, best) {
  const content = ({ model, text }) => ({ model, content: text });
  try {
    await call("votes", {
      prompt: round.messages,
      chosen: content(round.answers[best]),
      rejected: round.answers.filter((_, index) => index !== best).map(content),
    });
  } catch (error) {
    return notify(error.message);
  }
  notify("");
  round.best = best;
  parent = round === rounds.at(-1) ? round : parent;
  refresh(round);
  showContext();
  store();
}

function grow() {
  const area = byId("prompt");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

byId("prompt").addEventListener("input", grow);
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("prompt").value.trim();
  if (text && !running) ask(text);
});
byId("stop").addEventListener("click", () => running?.abort());
byId("token_form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, byId("token").value);
  start();
});

start();
