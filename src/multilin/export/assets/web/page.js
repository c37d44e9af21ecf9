import {TextCodec, TextStream} from "./tokenizer.js";

const $ = id => document.getElementById(id);
const BUTTONS = ["fork", "fresh", "save", "restore"];
// For people at the console, and for tests.
const page = (globalThis.multilin = {engine: null, codec: null, branches: [], active: null, isRunning: false});
let names = 0, isStopping = false;

/** Megabytes and kilobytes as people read them. */
const shown = bytes => (bytes < 1e6 ? `${Math.round(bytes / 1e3)} kB` : `${(bytes / 1e6).toFixed(1)} MB`);
const count = number => number.toLocaleString("en");

function say(text, isError = false) {
  $("message").textContent = text;
  $("message").classList.toggle("error", isError);
}

/** A text: its state, all of its tokens, of which the last may not be read yet, and parts of text as they are shown. */
class Branch {
  constructor(state, ids = [], parts = []) {
    Object.assign(this, {state, ids, parts: [], name: String.fromCharCode(65 + (names++ % 26))});
    this.card = document.createElement("article");
    this.card.className = "branch";
    this.card.innerHTML = `<header><label><input type="radio" name="branch"><b></b><span class="facts"></span></label>
      <button type="button" class="close">×</button></header><p class="text" tabindex="0"></p>`;
    const find = selector => this.card.querySelector(selector);
    [this.radio, this.facts, this.text] = [find("input"), find(".facts"), find(".text")];
    find("b").textContent = `Text ${this.name}`;
    this.text.setAttribute("aria-label", `Text ${this.name}`);
    find(".close").setAttribute("aria-label", `Remove text ${this.name}`);
    find(".close").onclick = () => remove(this);
    this.radio.onchange = () => activate(this);
    this.text.onclick = () => page.isRunning || activate(this);
    $("branches").append(this.card);
    page.branches.push(this);
    for (const part of parts) this.write(part.text, part.kind);
    this.describe();
  }

  write(text, kind) {
    if (!text) return;
    const {text: sheet, parts} = this, isAtEnd = sheet.scrollHeight - sheet.scrollTop - sheet.clientHeight < 40;
    if (parts.at(-1)?.kind === kind) {
      parts.at(-1).text += text;
      sheet.lastChild.append(text);
    } else {
      parts.push({text, kind});
      const element = document.createElement("span");
      element.className = kind;
      element.append(text);
      sheet.append(element);
    }
    if (isAtEnd) sheet.scrollTop = sheet.scrollHeight;
  }

  describe() {
    this.facts.textContent = `${count(this.ids.length)} tokens · state ${shown(this.state.numBytes)}`;
  }

  plain() {
    return {state: this.state.save(), ids: this.ids, parts: this.parts};
  }
}

function activate(branch) {
  page.active = branch;
  branch.radio.checked = true;
  $("prompt").placeholder = branch.ids.length ? "Add text, or let the model continue" : "Begin a text, or leave it to the model";
  $("generate").textContent = branch.ids.length ? "Continue" : "Generate";
}

function remove(branch) {
  const index = page.branches.indexOf(branch);
  page.branches.splice(index, 1);
  branch.card.remove();
  if (page.active === branch) activate(page.branches[Math.max(index - 1, 0)]);
  page.active.radio.focus();
}

function fork() {
  const {state, ids, parts} = page.active;
  activate(new Branch(state.fork(), [...ids], structuredClone(parts)));
  page.active.card.scrollIntoView({block: "nearest"});
  say(`Text ${page.active.name} is a copy. The two texts continue independently.`);
}

function settings() {
  const number = id => $(id).valueAsNumber;
  const choice = {temperature: number("temperature"), topK: number("topK"), topP: number("topP"), minP: number("minP")};
  return {...choice, maxNewTokens: number("maxNewTokens")};
}

async function generate() {
  const {engine, codec, active: branch, chooseToken} = page, {end_id, eos_id, pad_id, n_positions} = engine.about;
  const {maxNewTokens, ...choice} = settings(), prompt = $("prompt").value;
  const given = branch.ids.length ? codec.encode(prompt, true) : [end_id, ...codec.encode(prompt)];
  const room = n_positions ? n_positions - branch.ids.length - given.length + 1 : Infinity;
  if (room < 1) return say(`This model reads at most ${count(n_positions)} tokens; begin a new text.`, true);
  setRunning(true);
  branch.ids.push(...given);
  branch.write(prompt, "given");
  $("prompt").value = "";
  const stream = new TextStream(codec, branch.ids);
  let fresh = "";
  const show = () => {
    branch.write(fresh, "generated");
    fresh = "";
    showSpeed(branch, number - 1, begin);
  };
  let begin = performance.now(), yielded = begin, number = 0;
  try {
    for (; number < Math.min(maxNewTokens, room) && !isStopping; number++) {
      const logits = await engine.read(branch.state, branch.ids.slice(branch.state.numRead));
      if (number === 0) begin = performance.now(); // the speed leaves out the reading of a prompt
      if (pad_id !== end_id && pad_id !== eos_id) logits[pad_id] = -Infinity;
      logits.fill(-Infinity, codec.numTokens); // rows of a padded embedding
      const token = chooseToken(logits, choice);
      branch.ids.push(token);
      fresh += stream.put(token);
      if (token === end_id || token === eos_id) {
        fresh += stream.end();
        show();
        branch.write("\n— end of text —\n", "end");
        break;
      }
      if (performance.now() - yielded > 30) { // let the browser draw, and take clicks
        show();
        await new Promise(resolve => setTimeout(resolve));
        yielded = performance.now();
      }
    }
    if (number && number >= room) say(`The text is full: this model reads at most ${count(n_positions)} tokens.`);
  } catch (error) {
    say(error.message, true);
  }
  fresh += stream.end();
  show();
  setRunning(false);
}

function showSpeed(branch, number, begin) {
  const seconds = (performance.now() - begin) / 1e3;
  if (number > 0) $("speed").textContent = `${count(Math.round(number / seconds))} tokens/s`;
  branch.describe();
}

function setRunning(isRunning) {
  page.isRunning = isRunning;
  isStopping = false;
  page.active.card.classList.toggle("running", isRunning);
  page.active.text.setAttribute("aria-busy", isRunning);
  for (const id of BUTTONS) $(id).disabled = isRunning;
  for (const button of document.querySelectorAll(".branch input, .close")) button.disabled = isRunning;
  if (isRunning) say("");
  activate(page.active);
  if (isRunning) $("generate").textContent = "Stop";
}

/** Call `use` with the store of saved texts, and give back the result of its request. */
async function withStore(mode, use) {
  const opening = indexedDB.open("multilin", 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore("texts");
  await new Promise((resolve, reject) => {
    opening.onsuccess = resolve;
    opening.onerror = () => reject(opening.error);
  });
  try {
    const transaction = opening.result.transaction("texts", mode), request = use(transaction.objectStore("texts"));
    await new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error);
    });
    return request.result;
  } finally {
    opening.result.close();
  }
}

/** Saved states belong to one model; its other precisions have states of the same shapes, which fit. */
const key = () => page.engine.about.model_hash;

async function save() {
  const branches = page.branches.map(branch => branch.plain()), active = page.branches.indexOf(page.active);
  await withStore("readwrite", store => store.put({branches, active}, key()));
  const bytes = page.branches.reduce((sum, branch) => sum + branch.state.numBytes, 0);
  say(`Saved ${branches.length === 1 ? "the text" : `${branches.length} texts`} with ${shown(bytes)} of state in this browser.`);
}

async function restore() {
  const saved = await withStore("readonly", store => store.get(key()));
  if (!saved) return say("Nothing is saved in this browser yet.", true);
  for (const branch of page.branches.splice(0)) branch.card.remove();
  names = 0;
  for (const {state, ids, parts} of saved.branches) new Branch(page.State.restore(state), ids, parts);
  activate(page.branches[saved.active]);
  say("Restored. The next token follows without reading the text again.");
}

/** Wait until files come through the service worker, which keeps them; there is none on plain http of other hosts. */
async function startWorker() {
  if (!navigator.serviceWorker) return false;
  const taken = new Promise(resolve => navigator.serviceWorker.addEventListener("controllerchange", resolve));
  try {
    await navigator.serviceWorker.register("sw.js");
    if (!navigator.serviceWorker.controller) await Promise.race([taken, new Promise(resolve => setTimeout(resolve, 10000))]);
  } catch (error) {
    console.warn(error); // no network, or storage refused: the page works as far as its files can be loaded
  }
  return navigator.serviceWorker.controller !== null;
}

async function start() {
  const isKept = await startWorker();
  const {sizes} = await (await fetch("files.json")).json();
  const paths = Object.keys(sizes).filter(path => path.endsWith(".wasm") || /^model\/(.*\.onnx|.*\.bin|multilin\.json)$/.test(path));
  const total = paths.reduce((sum, path) => sum + sizes[path], 0);
  let loaded = 0;
  const onBytes = number => {
    loaded += number;
    $("progress").value = loaded / total;
    $("progress-text").textContent = `Loading the model: ${shown(loaded)} of ${shown(total)}`;
    if (loaded >= total) $("progress-text").textContent = "Preparing the model";
  };
  const {Engine, State, chooseToken} = await import("./engine.js");
  page.codec = new TextCodec(await (await fetch("model/tokenizer.json")).json());
  page.engine = await Engine.load("model", onBytes);
  Object.assign(page, {State, chooseToken});
  const {architectures, vocab_size, n_positions, precision} = page.engine.about;
  const limit = n_positions && `texts of up to ${count(n_positions)} tokens`;
  const facts = [architectures.join(" + "), `vocabulary of ${count(vocab_size)}`, limit, precision.replace("bit", " bits")];
  $("facts").textContent = facts.filter(Boolean).join(" · ");
  $("about").textContent = `It runs in this page${isKept ? ", even without network" : ""}. What you write stays on this device.`;
  activate(new Branch(page.engine.newState()));
  $("loading").hidden = true;
  $("controls").disabled = false;
  $("prompt").focus();
}

/** Show errors on the page, instead of only logging them. */
const guarded = action => async () => {
  try {
    await action();
  } catch (error) {
    say(error.message, true);
  }
};
$("form").onsubmit = event => {
  event.preventDefault();
  if (page.isRunning) isStopping = true;
  else guarded(generate)();
};
$("form").addEventListener("invalid", () => ($("sampling").open = true), true); // a mistake must be seen
$("fork").onclick = guarded(fork);
$("fresh").onclick = guarded(() => (activate(new Branch(page.engine.newState())), $("prompt").focus()));
$("save").onclick = guarded(save);
$("restore").onclick = guarded(restore);
document.addEventListener("keydown", event => {
  if (event.key === "Escape" && page.isRunning) isStopping = true;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !page.isRunning) $("form").requestSubmit();
});
start().catch(error => {
  $("loading").hidden = true;
  say(`The model could not be loaded: ${error.message}`, true);
});
