// The exported model: graphs, the state of a sequence, and the choice of tokens.
import * as ort from "./runtime/ort.wasm.bundle.min.mjs";
import {longestMatches} from "./match.js";

ort.env.wasm.numThreads = globalThis.crossOriginIsolated ? Math.min(navigator.hardwareConcurrency || 1, 4) : 1;
ort.env.logLevel = "error";

const WASM = "runtime/ort-wasm-simd-threaded.wasm";
const MATCH_TOKENS = "embedding.match.tokens_BS"; // the last tokens, where the longest match is searched
const FEWEST_SLOTS = 64; // of a new ring, doubled as tokens come until it is full
const SHORT = 4; // tokens that are read one by one
// Without this the runtime keeps the 8-bit matrices as they are, and converts them for every token.
const OPTIONS = {executionProviders: ["wasm"], extra: {session: {disable_quant_qdq: "1"}}};

const integer = (values, shape) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), shape);
const isRing = tensor => tensor.kind === "window" || tensor.kind === "positions";
const empty = tensor => (/(^|\.)logits[^.]*$/.test(tensor.name) ? -Infinity : 0);
const outer = (tensor, ring) => (tensor.is_multiplied ? ring.dims[1] : 1);

/** A file as bytes; `onBytes` is called with the number of each piece that arrives. */
export async function fetchBytes(path, onBytes = () => {}) {
  const response = await fetch(path);
  if (!response.ok) throw new Error(`${path} could not be loaded (${response.status})`);
  const pieces = [], reader = response.body.getReader();
  let size = 0;
  for (;;) {
    const {done, value} = await reader.read();
    if (done) break;
    pieces.push(value);
    onBytes(value.length);
    size += value.length;
  }
  const bytes = new Uint8Array(size);
  size = 0;
  for (const piece of pieces) bytes.set(piece, size), (size += piece.length);
  return bytes;
}

/** A sequence's state: the number of tokens read, and tensors by name as the graphs take them, one row each. */
export class State {
  constructor(numRead, tensors) {
    this.numRead = numRead;
    this.tensors = tensors;
  }
  get numBytes() {
    return Object.values(this.tensors).reduce((sum, tensor) => sum + tensor.data.byteLength, 0);
  }
  /** An independent copy, with which the sequence can be continued in another way. */
  fork() {
    return State.restore(this.save());
  }
  /** Plain data that IndexedDB stores. */
  save() {
    const plain = ([name, {type, data, dims}]) => [name, {type, data: data.slice(), dims: [...dims]}];
    return {numRead: this.numRead, tensors: Object.fromEntries(Object.entries(this.tensors).map(plain))};
  }
  static restore({numRead, tensors}) {
    const tensor = ([name, {type, data, dims}]) => [name, new ort.Tensor(type, data.slice(), dims)];
    return new State(numRead, Object.fromEntries(Object.entries(tensors).map(tensor)));
  }
}

export class Engine {
  /** Load the model of a folder; `onBytes` is called with the number of bytes of each piece that arrives. */
  static async load(folder, onBytes) {
    const engine = new Engine();
    engine.about = JSON.parse(new TextDecoder().decode(await fetchBytes(`${folder}/multilin.json`, onBytes)));
    const names = ["weights.bin", "step.onnx", "prompt.onnx"];
    const [weights, step, prompt] = await Promise.all(names.map(name => fetchBytes(`${folder}/${name}`, onBytes)));
    ort.env.wasm.wasmBinary = (await fetchBytes(WASM, onBytes)).buffer;
    const options = {...OPTIONS, externalData: [{path: "weights.bin", data: weights}]};
    engine.step = await ort.InferenceSession.create(step, options);
    engine.prompt = await ort.InferenceSession.create(prompt, options);
    engine.inputs = engine.about.state.filter(t => t.kind !== "count" && !t.name.startsWith("embedding."));
    engine.kept = [...engine.inputs, ...engine.about.state.filter(t => t.name === MATCH_TOKENS)];
    return engine;
  }

  newState() {
    const state = new State(0, {});
    for (const tensor of this.kept) {
      const slots = isRing(tensor) ? Math.min(FEWEST_SLOTS, tensor.shape[0]) : tensor.shape[0];
      state.tensors[tensor.name] = makeTensor(tensor, slots);
    }
    return state;
  }

  /** Read the next tokens of a sequence, changing its state in place; the logits after the last. */
  async read(state, ids) {
    const limit = this.about.n_positions;
    if (limit && state.numRead + ids.length > limit)
      throw new Error(`The text has ${state.numRead + ids.length} tokens, but this model reads at most ${limit}.`);
    const size = ids.length > SHORT ? this.about.prompt_columns : 1;
    let logits;
    for (let first = 0; first < ids.length; first += size) {
      const piece = ids.slice(first, first + size);
      logits = await this.#run(size === 1 || piece.length === 1 ? this.step : this.prompt, state, piece);
    }
    return logits;
  }

  async #run(session, state, ids) {
    this.#grow(state, state.numRead + ids.length);
    const columns = session === this.step ? 1 : this.about.prompt_columns;
    const padded = [...ids, ...Array(columns - ids.length).fill(0)];
    const feed = {input_ids: integer(padded, [1, columns]), num_read: integer([state.numRead], [1])};
    for (const {name} of this.inputs) feed[name] = state.tensors[name];
    if (session !== this.step) feed.num_new = integer([ids.length], [1]);
    const made = {};
    if (this.about.match) {
      const ring = state.tensors[MATCH_TOKENS].data;
      const [predicted, length] = longestMatches(ring, state.numRead, ids, columns, this.about.match);
      feed.match_predicted = integer(predicted, [1, columns]);
      feed.match_length = integer(length, [1, columns]);
      made[MATCH_TOKENS] = {data: Int32Array.from(padded, id => id + 1)};
    }
    const results = await session.run(feed);
    for (const tensor of this.kept) {
      const fresh = results[`new.${tensor.name}`] ?? made[tensor.name];
      if (isRing(tensor)) writeRing(tensor, state.tensors[tensor.name], fresh, state.numRead, ids.length, columns);
      else state.tensors[tensor.name] = fresh;
    }
    state.numRead += ids.length;
    return results.logits.data;
  }

  /** Make room for numTokens tokens in all rings, or for as many as a full ring keeps. */
  #grow(state, numTokens) {
    for (const tensor of this.kept.filter(isRing)) {
      const ring = state.tensors[tensor.name], slots = ring.dims[tensor.is_multiplied ? 2 : 1];
      if (slots >= Math.min(numTokens, tensor.shape[0])) continue;
      const larger = makeTensor(tensor, Math.min(2 ** Math.ceil(Math.log2(numTokens)), tensor.shape[0]));
      const rows = outer(tensor, ring), from = ring.data.length / rows, to = larger.data.length / rows;
      for (let row = 0; row < rows; row++) larger.data.set(ring.data.subarray(row * from, (row + 1) * from), row * to);
      state.tensors[tensor.name] = larger;
    }
  }
}

function makeTensor(tensor, slots) {
  const shape = [1, slots, ...tensor.shape.slice(1)];
  if (tensor.shape.length === 0) shape.length = 1;
  if (tensor.is_multiplied) [shape[1], shape[2]] = [shape[2], shape[1]];
  const size = shape.reduce((a, b) => a * b, 1);
  if (tensor.dtype === "int32") return new ort.Tensor("int32", new Int32Array(size), shape);
  if (tensor.dtype === "int64") return new ort.Tensor("int64", new BigInt64Array(size), shape);
  const data = tensor.dtype === "float64" ? new Float64Array(size) : new Float32Array(size);
  return new ort.Tensor(tensor.dtype, data.fill(empty(tensor)), shape);
}

/** Put new tokens into their slots: token number n into slot n mod slots. */
function writeRing(tensor, ring, fresh, numRead, count, columns) {
  const rows = outer(tensor, ring), slots = ring.dims[tensor.is_multiplied ? 2 : 1];
  const width = ring.data.length / rows / slots;
  for (let row = 0; row < rows; row++)
    for (let token = Math.max(count - slots, 0); token < count; token++) {
      const source = (row * columns + token) * width, target = row * slots + ((numRead + token) % slots);
      ring.data.set(fresh.data.subarray(source, source + width), target * width);
    }
}

/** The next token: the likeliest at temperature 0, else drawn from the tokens that top-k, then top-p, then min-p leave. */
export function chooseToken(logits, {temperature = 0, topK = 0, topP = 1, minP = 0}, random = Math.random) {
  if (!(temperature > 0)) return logits.reduce((best, logit, token) => (logit > logits[best] ? token : best), 0);
  let tokens = Array.from(logits, (_, token) => token);
  if ((topK > 0 && topK < tokens.length) || topP < 1) tokens.sort((a, b) => logits[b] - logits[a]);
  if (topK > 0) tokens = tokens.slice(0, topK);
  const most = tokens.reduce((max, token) => Math.max(max, logits[token]), -Infinity);
  let weights = tokens.map(token => Math.exp((logits[token] - most) / temperature));
  const sum = values => values.reduce((a, b) => a + b, 0);
  if (topP < 1) {
    const enough = topP * sum(weights);
    let share = 0, kept = 0;
    while (share < enough && kept < weights.length) share += weights[kept++];
    weights = weights.slice(0, Math.max(kept, 1));
  }
  weights = weights.map(weight => (weight >= minP ? weight : 0)); // the likeliest has weight 1
  let rest = random() * sum(weights);
  const drawn = weights.findIndex(weight => (rest -= weight) < 0);
  return tokens[drawn < 0 ? 0 : drawn];
}
