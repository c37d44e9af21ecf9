import {ReadingView} from "./reading.js";
import {ServerError, call, setKey, stream} from "./server.js";
import {Texts} from "./texts.js";
import {Tree} from "./tree.js";

const $ = id => document.getElementById(id);
const count = number => number.toLocaleString("en");
/** Bytes as kB or MB. */
const shown = bytes => (bytes < 1e6 ? `${(bytes / 1e3).toFixed(bytes < 1e4 ? 1 : 0)} kB` : `${(bytes / 1e6).toFixed(1)} MB`);

const texts = new Texts();
const tree = new Tree($("tree"), select);
const view = new ReadingView($("text"), {step: $("step"), most: $("read-most"), meaning: $("meaning")});
let model = null, turn = null, running = null; // the model, the id of the selected turn, and the running generation

function say(text, isError = false) {
  $("message").textContent = text;
  $("message").classList.toggle("error", isError);
}

/** Show errors to the user instead of only logging them. */
const guarded = action => async (...values) => {
  try {
    return await action(...values);
  } catch (error) {
    if (error.status === 401) {
      $("key-form").hidden = false;
      $("key").focus();
    }
    say(error.message, true);
  }
};

function part(kind, text) {
  const element = document.createElement("span");
  element.className = kind;
  element.textContent = text;
  return element;
}

/** Select a turn to show and to continue; null begins a new text. */
function select(id) {
  if (running) return;
  turn = id;
  closeReading();
  draw();
}

function draw() {
  const path = turn ? texts.path(turn) : [], last = path.at(-1);
  tree.draw(texts.forest(), path);
  $("more").hidden = !texts.older.length;
  $("text").replaceChildren(...path.flatMap((each, place) => [...parts(each, place), ...(each === last ? [] : [branchMark(each, place)])]));
  $("text").scrollTop = $("text").scrollHeight;
  $("about-turn").textContent = last?.kept
    ? `Turn ${path.length} · ${count(last.tokens)} tokens · state ${shown(last.state_bytes)}` : last ? "No longer kept" : "New text";
  $("prompt").placeholder = turn ? "Add text, or leave this empty" : "Begin a text, or leave this empty";
  setButtons();
}

function parts({kept, kind, prompt, text}, place) {
  if (!kept) return [part("end", "— no longer kept —\n")];
  const [before, between] = kind === "completion" ? ["", ""] : [place ? "\n\n" : "", "\n\n"];
  return [part("given", before + prompt + between), part("generated", text)].filter(element => element.textContent);
}

function branchMark({id}, place) {
  const mark = document.createElement("button");
  mark.type = "button";
  mark.className = "branch";
  mark.title = "Branch: continue from here in another way";
  mark.setAttribute("aria-label", `Branch after turn ${place + 1}`);
  mark.onclick = () => (select(id), $("prompt").focus());
  return mark;
}

function setButtons() {
  const isRunning = running !== null, kept = turn !== null && texts.turns.get(turn).kept;
  $("sheet").classList.toggle("running", isRunning);
  $("text").setAttribute("aria-busy", isRunning);
  $("history").inert = isRunning;
  $("generate").textContent = isRunning ? "Stop" : turn ? "Continue" : "Generate";
  $("fresh").disabled = isRunning;
  $("read").disabled = isRunning || !kept;
  $("again").disabled = isRunning || !kept || texts.turns.get(turn).kind !== "completion";
  $("delete").disabled = isRunning || !turn || !texts.endingAt(turn).length;
  for (const mark of document.querySelectorAll(".branch")) mark.disabled = isRunning;
}

function settings() {
  const values = {};
  for (const name of ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "seed"])
    if ($(name).value !== "") values[name] = $(name).valueAsNumber;
  const stop = $("stop").value.split("\n").filter(Boolean).map(line => line.replaceAll("\\n", "\n"));
  return stop.length ? {...values, stop} : values;
}

/** The wanted number of tokens, or fewer if the model has less room. */
async function room(wanted, prompt) {
  if (!model.max_model_len) return wanted;
  const {count: added} = await call("POST", "/tokenize", {prompt});
  const free = model.max_model_len - (turn ? texts.turns.get(turn).tokens : 1) - added + 1;
  if (free < 1) throw new ServerError(400, `This model reads at most ${count(model.max_model_len)} tokens; branch earlier, or begin a new text.`);
  return Math.min(wanted, free);
}

/** Generate text after a prompt at the end of the selected turn. */
async function generate(prompt) {
  const run = running = {abort: new AbortController(), session: null, isBegun: false, isStopping: false};
  let end = null, opened = null;
  say("");
  closeReading();
  setButtons();
  try {
    const values = settings();
    values.max_tokens = await room(values.max_tokens, prompt);
    opened = await texts.openAt(turn);
    run.session = opened.session.id;
    end = await show(prompt, stream("/v1/completions", {...values, prompt, logprobs: 0, session: run.session}, run.abort.signal), run);
  } catch (error) {
    $("prompt").value ||= prompt;
    if (error.name === "AbortError") say("Stopped; this text was not kept.");
    else throw error;
  } finally {
    running = null;
    try {
      if (end) await texts.fetch(run.session), (turn = end);
      else if (opened?.isNew) await texts.remove(opened.session).catch(() => {}); // fails if the session is busy; an empty branch does no harm
    } finally {
      draw();
    }
  }
}

/** Show a stream while it arrives, and return the id of the new turn. */
async function show(prompt, events, run) {
  const sheet = $("text"), given = part("given", prompt), written = part("generated", "");
  let end = null, first = 0, number = 0, begin = 0;
  sheet.append(...(prompt ? [given, written] : [written]));
  sheet.scrollTop = sheet.scrollHeight;
  for await (const {choices: [choice]} of events) {
    run.isBegun = true;
    if (!choice) continue;
    const isAtEnd = sheet.scrollHeight - sheet.scrollTop - sheet.clientHeight < 40;
    written.append(choice.text);
    if (isAtEnd) sheet.scrollTop = sheet.scrollHeight;
    number += choice.logprobs?.tokens.length ?? 0;
    end = choice.turn ?? end;
    if (!begin) [begin, first] = [performance.now(), number]; // measured from here, without reading the prompt
    const seconds = (performance.now() - begin) / 1e3;
    $("speed").textContent = number > first && seconds > 0 ? `${count(Math.round((number - first) / seconds))} tokens/s` : "";
  }
  return end;
}

/** End the generation and keep its text; a second call, or one before any text came, discards it. */
function stop() {
  if (!running) return;
  if (running.isBegun && !running.isStopping) {
    running.isStopping = true;
    guarded(call)("POST", `/v1/sessions/${running.session}/stop`);
  } else {
    running.abort.abort();
  }
}

async function openReading(step = 0) {
  const wanted = turn;
  $("read").disabled = true;
  say("Computing the weights …");
  try {
    const reading = await view.fetch(texts.withTurn(wanted).id, wanted, step);
    if (wanted !== turn || running) return;
    say("");
    $("reading").hidden = false;
    $("read").setAttribute("aria-pressed", "true");
    view.show(reading);
    $("text").focus();
  } finally {
    setButtons();
  }
}

function closeReading() {
  if ($("reading").hidden) return;
  $("reading").hidden = true;
  $("read").setAttribute("aria-pressed", "false");
  view.hide();
  draw();
}

async function removeBranch() {
  if (!confirm("Delete this branch, and its turns that no other branch has?")) return;
  const [, ...earlier] = texts.path(turn).reverse();
  for (const session of texts.endingAt(turn)) await texts.remove(session);
  select(earlier.find(each => texts.withTurn(each.id))?.id ?? null);
}

async function start() {
  [model] = (await call("GET", "/v1/models")).data;
  await texts.list();
  $("key-form").hidden = true;
  say("");
  document.title = $("name").textContent = model.id;
  $("facts").textContent = model.max_model_len ? `Reads texts of up to ${count(model.max_model_len)} tokens` : "Reads texts of any length with a state of constant size";
  $("controls").disabled = false;
  draw();
  $("prompt").focus();
}

$("form").onsubmit = event => {
  event.preventDefault();
  if (running) return stop();
  const prompt = $("prompt").value;
  $("prompt").value = "";
  guarded(generate)(prompt);
};
$("key-form").onsubmit = event => {
  event.preventDefault();
  setKey($("key").value);
  guarded(start)();
};
$("again").onclick = guarded(async () => {
  const path = texts.path(turn);
  turn = path.at(-2)?.id ?? null;
  draw();
  await generate(path.at(-1).prompt);
});
$("fresh").onclick = () => (select(null), $("prompt").focus());
$("delete").onclick = guarded(removeBranch);
$("more").onclick = guarded(async () => (await texts.more(), draw()));
$("read").onclick = () => ($("reading").hidden ? guarded(openReading)() : closeReading());
view.onStep = () => guarded(openReading)($("step").value);
document.addEventListener("keydown", event => {
  if (event.key === "Escape") running ? stop() : closeReading();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !running) $("form").requestSubmit();
});
$("form").addEventListener("invalid", () => ($("sampling").open = true), true); // shows the wrong field
$("history").open = matchMedia("(min-width: 48rem)").matches;
guarded(start)();
